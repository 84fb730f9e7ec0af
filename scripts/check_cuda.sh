#!/usr/bin/env bash
# Compiles what needs CUDA as far as a machine without a GPU and with torch's CPU wheel can: every
# csrc/**/*.cu for sm_80 and sm_90, and the binding against torch's headers. Nothing is linked or run.
#   scripts/check_cuda.sh [PYTHON]
# Without nvcc it says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-python3}
if ! command -v nvcc > /dev/null; then
    echo "check_cuda: nvcc was not found; the CUDA sources were not compiled"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mapfile -t kernels < <(find csrc -name '*.cu' | sort)
for kernel in ${kernels[@]+"${kernels[@]}"}; do
    nvcc -std=c++17 -Icsrc -Xcompiler -fPIC,-Wall --threads 2 \
        -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
        -c "$kernel" -o "$work/kernel.o"
done

# Where nvcc itself says that its toolkit is: a wrapper or link on the PATH leads elsewhere.
touch "$work/empty.cu"
toolkit=$(nvcc --dryrun -c "$work/empty.cu" -o "$work/empty.o" 2>&1 | sed -n 's/^#\$ TOP=//p')
# The one header that the CPU wheel lacks, because a build of torch with CUDA generates it.
mkdir -p "$work/stub/c10/cuda/impl"
printf '#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n' \
    > "$work/stub/c10/cuda/impl/cuda_cmake_macros.h"
mapfile -t includes < <("$python" - <<'PYTHON'
from torch.utils.cpp_extension import include_paths

print(*(f"-isystem{path}" for path in include_paths()), sep="\n")
PYTHON
)
mapfile -t bindings < <(find csrc/binding -name '*.cpp' 2> /dev/null | sort)
for binding in ${bindings[@]+"${bindings[@]}"}; do
    "${CXX:-c++}" -std=c++20 -fsyntax-only -Wall -Icsrc -isystem"$work/stub" "${includes[@]}" \
        -isystem"$toolkit/include" "$binding"
done
echo "check_cuda: ${#kernels[@]} kernel files for sm_80 and sm_90, ${#bindings[@]} binding files"
