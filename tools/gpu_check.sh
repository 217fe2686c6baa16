#!/usr/bin/env bash
# Test the kernels on this machine's GPU, then measure; needs torch, triton and transformers, installs nothing.
# tools/gpu_check.sh [--minutes 8.5] [--smoke]; results as JSON in $OUT, or in gpu-check/
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="$root:$root/kernels:$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/tools/gpu_check.py" "$@"
