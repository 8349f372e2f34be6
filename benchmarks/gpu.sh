#!/usr/bin/env bash
# The GPU benchmark in one command: correctness of every kernel, then the table. Options: --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
unset TRITON_INTERPRET # interpreted kernels would run on the CPU
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "$python" -m benchmarks.gpu "$@"
