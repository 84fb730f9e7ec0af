#!/usr/bin/env bash
# Installs into .venv (once), then trains on scikit-learn's digits, two pipeline stages on the CPU.
# Arguments go to examples/digits.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -e .venv/complete ]]; then
    echo "Installing into .venv (some minutes) ..."
    bash scripts/install.sh .venv -e ".[test,examples,cli]"
    touch .venv/complete
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/torchrun --standalone --nproc-per-node 2 examples/digits.py "$@"
