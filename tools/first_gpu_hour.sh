#!/usr/bin/env bash
# The first hour on a machine with GPUs: all checks of tools/gpu_visit/steps.py, each with a time limit.
#   bash tools/first_gpu_hour.sh                   # first_gpu_hour/visit.txt, visit.json, logs.txt
#   STEPS="doctor bf16" bash tools/first_gpu_hour.sh OUT
#   VLLM_PYTHON=/path/to/vllm/bin/python bash tools/first_gpu_hour.sh      # with the step sync
# The script starts GPUS ranks (default: all GPUs that torch sees). The step sync leaves one GPU to
# the server. Run the script in the environment of `make setup`, with a GPU build of torch. A step
# that this machine cannot do says why, and the other steps still run. On a machine without a GPU,
# GPUS=1 rehearses the steps.
set -uo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-first_gpu_hour}
read -ra steps <<<"${STEPS:-}"
exec python "$home/tools/gpu_visit/run.py" "$out" --hour ${steps:+--only "${steps[@]}"}
