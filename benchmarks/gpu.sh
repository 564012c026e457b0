#!/usr/bin/env bash
# Checks and measures training on this machine's GPU, or with tiny shapes on a CPU:
#
#     benchmarks/gpu.sh [PART | GROUP ...]
#
# A first machine with a GPU should run `pytest -m gpu tests/gpu` before. gpu.py beside this file has
# the table of parts, each a process of its own with a limit of time, and of their groups, which take
# 10 minutes at most; README.md says what they do and which variables make some larger.
# Environment:
#   PYTHON        interpreter that has torch, deepspeed and transformers; default python3
#   BENCH_OUTPUT  directory of the JSON results; default benchmarks/results
#   BENCH_TINY=1  tiny shapes on a GPU too
# A part that fails does not stop the others. Exit status: 0 if all parts passed, 1 if one failed,
# 2 for a wrong argument.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning
exec "${PYTHON:-python3}" "$ROOT/benchmarks/gpu.py" --limited \
  --output "${BENCH_OUTPUT:-$ROOT/benchmarks/results}" ${BENCH_TINY:+--tiny} "$@"
