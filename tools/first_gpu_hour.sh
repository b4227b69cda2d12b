#!/usr/bin/env bash
# The first hour on a machine with GPUs: all checks of tools/gpu_visit/steps.py, each with a time limit.
#   bash tools/first_gpu_hour.sh                   # first_gpu_hour/visit.txt, visit.json, logs.txt
#   STEPS="doctor bf16" bash tools/first_gpu_hour.sh OUT
#   VLLM_PYTHON=/path/to/vllm/bin/python bash tools/first_gpu_hour.sh      # with the step sync
# GPUS (default: all that torch sees) ranks are started; in sync, one GPU is left to the server. Run it in
# the environment of `make setup`, on a GPU build of torch. Steps that this machine cannot do say why, and
# the others go on. GPUS=1 without a GPU rehearses the steps on the CPU.
set -uo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-first_gpu_hour}
read -ra steps <<<"${STEPS:-}"
exec python "$home/tools/gpu_visit/run.py" "$out" --hour ${steps:+--only "${steps[@]}"}
