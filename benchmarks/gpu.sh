#!/usr/bin/env bash
# Checks and measures training on this machine's GPU, or with tiny shapes on a CPU:
#
#     benchmarks/gpu.sh [PART ...]
#
# A first machine with a GPU should run `dschat-lora doctor --first_hour` before.
# Parts, all by default: env trajectories scaling reload saving commands pairs sft decode ppo attention
# lora optimizer throughput-1.3b throughput-6.7b tensor-parallel ragged user-sft-1.3b user-ppo-1.3b
# user-sft-6.7b user-ppo-6.7b sft-llama-3.1-8b sft-qwen2.5-7b decode-qwen3-4b grpo-qwen2.5-1.5b
# rows grpo-llama-3.1-8b sft-qwen3-30b-a3b decode-qwen3-30b-a3b
# Environment:
#   PYTHON        interpreter that has torch, deepspeed and transformers; default python3
#   BENCH_OUTPUT  directory of the JSON results; default benchmarks/results
#   BENCH_TINY=1  tiny shapes on a GPU too
#   BENCH_SFT=1   the part sft at a size that means something on a CPU, 10 minutes at most
#   BENCH_TENSOR=1  the part tensor-parallel so
# Each part is a process of its own with a time limit of at most 240 seconds, but for these;
# README.md beside this file has groups of parts that take 10 minutes at most. A part that fails
# does not stop the others. Exit status: 0 if all parts passed, 1 if one failed, 2 for a wrong argument.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
BENCH_OUTPUT=${BENCH_OUTPUT:-$ROOT/benchmarks/results}
PARTS=(
  env trajectories scaling reload saving commands pairs sft decode ppo attention lora optimizer
  throughput-1.3b throughput-6.7b tensor-parallel ragged
  user-sft-1.3b user-ppo-1.3b user-sft-6.7b user-ppo-6.7b
  sft-llama-3.1-8b sft-qwen2.5-7b decode-qwen3-4b grpo-qwen2.5-1.5b
  rows grpo-llama-3.1-8b sft-qwen3-30b-a3b decode-qwen3-30b-a3b
)

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning

# Seconds a part may take, five more to be killed in not included.
limit() {
  case $1 in
    env) echo 90 ;;
    trajectories) echo 75 ;;
    scaling) echo 35 ;;
    reload) echo 45 ;;
    saving) echo 120 ;;
    commands) echo 150 ;;
    pairs) echo 70 ;;
    sft) [[ -n ${BENCH_SFT:-} ]] && echo 595 || echo 90 ;;
    decode) echo 150 ;;
    ppo) echo 240 ;;
    attention) echo 150 ;;
    lora) echo 60 ;;
    optimizer) echo 45 ;;
    throughput-1.3b) echo 165 ;;
    throughput-6.7b) echo 240 ;;
    tensor-parallel) [[ -n ${BENCH_TENSOR:-} ]] && echo 595 || echo 105 ;;
    ragged) echo 60 ;;
    user-sft-1.3b) echo 60 ;;
    user-*) echo 120 ;;
    sft-*) echo 120 ;;
    decode-qwen3-4b) echo 90 ;;
    decode-*) echo 120 ;;
    rows | grpo-*) echo 120 ;;
    *) return 1 ;;
  esac
}

for part in "$@"; do
  if ! limit "$part" > /dev/null; then
    echo "gpu.sh: unknown part '$part'; parts are: ${PARTS[*]}" >&2
    exit 2
  fi
done
[[ $# -gt 0 ]] && PARTS=("$@")

failed=()
for part in "${PARTS[@]}"; do
  seconds=$(limit "$part")
  printf '\n== %s (at most %s s)\n' "$part" "$seconds"
  timeout --kill-after=5 "$seconds" "$PYTHON" "$ROOT/benchmarks/gpu.py" "$part" \
    --output "$BENCH_OUTPUT" ${BENCH_TINY:+--tiny}
  status=$?
  if [[ $status -eq 124 || $status -eq 137 ]]; then
    echo "$part: stopped after $seconds s; what it had measured is kept" >&2
  fi
  [[ $status -eq 0 ]] || failed+=("$part")
done

if [[ ${#failed[@]} -gt 0 ]]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
printf '\nall parts passed: %s\n' "${PARTS[*]}"
