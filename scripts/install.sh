#!/usr/bin/env bash
# Makes a virtual environment and installs torch, then the given requirements, into it:
#   scripts/install.sh FOLDER PIP_ARGUMENT...
# PYTHON (default python3) and TORCH_VERSION (default: the version the tests run with) may be set.
set -euo pipefail

folder=$1
shift
export PIP_DISABLE_PIP_VERSION_CHECK=1
"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
# torch first, and pinned: a resolver that sees all requirements at once may pick another build.
"${pip[@]}" "setuptools>=77" wheel "torch==${TORCH_VERSION:-2.13.0}"
"${pip[@]}" --no-build-isolation "$@"
