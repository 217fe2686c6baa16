#!/usr/bin/env bash
# Test the kernels on this machine's GPU, then measure; needs torch, triton and transformers, installs nothing.
# tools/gpu/gpu_check.sh [--minutes 8.5] [--only WORD ...] [--list] [--smoke]; results as JSON in $OUT, or in gpu-check/
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
export PYTHONPATH="$root:$root/kernels:$root/tools/gpu:$root/tools/bench${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/tools/gpu/gpu_check.py" "$@"
