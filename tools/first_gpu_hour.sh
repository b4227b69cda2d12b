#!/usr/bin/env bash
# The first hour on a machine with GPUs: every check in order, each with a time limit and what it should
# print, and one report to send back.
#   bash tools/first_gpu_hour.sh                   # all steps; first_gpu_hour/report.txt
#   STEPS="doctor bf16" bash tools/first_gpu_hour.sh OUT
# GPUS (default: all that torch sees) ranks are started. Run it in the environment of `make setup`, on a
# GPU build of torch. Steps that this machine cannot do say why, and the others go on.
set -uo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-first_gpu_hour}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$home" || exit 1
gspo=(python -m gspo_megatron)
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
wanted=${STEPS:-data doctor preflight tests verify bf16 resume fp8 engine compare throughput}
config=$out/config.yaml report=$out/report.txt failed=0

cat >"$config" <<YAML
data: {prompts: $out/data/train.jsonl, eval_prompts: $out/data/test.jsonl, tokenizer: $out/data/tokenizer.model}
parallel: {layout: dp=$gpus}
rollout: {group_size: 8, prompts_per_step: $((8 * gpus)), max_response_tokens: 16}
reward: {name: per_character}
training: {steps: 3, precision: bf16}
checkpoint: {interval: 2}
logging: {dir: $out/bf16, plots: false}
YAML

# step NAME MINUTES "WHAT IT SHOULD PRINT" COMMAND...
step() {
    local name=$1 minutes=$2 expected=$3 started=$SECONDS code
    shift 3
    [[ " $wanted " == *" $name "* ]] || return 0
    {
        echo "== $name (at most $minutes min)"
        echo "   command: $*"
        echo "   expect:  $expected"
    } | tee -a "$report"
    timeout "$((60 * minutes))" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 15 "$out/$name.log" | sed 's/^/   | /' >>"$report"
    case $code in
    0) echo "   ok in $((SECONDS - started)) s" ;;
    2) echo "   not here: $(tail -n 1 "$out/$name.log")" ;;
    124) echo "   TIME OUT after $minutes min" ;;
    *) echo "   FAILED with exit code $code: $(tail -n 1 "$out/$name.log")" ;;
    esac | tee -a "$report"
    [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || failed=$((failed + 1))
}

: >"$report"
{ date -u; git log -1 --format=%H; nvidia-smi; } >>"$report" 2>&1
mkdir -p "$out/data"
step data 1 "nothing" python -c "
from pathlib import Path
from gspo_megatron.data.toy import write_toy_dataset
write_toy_dataset(Path('$out/data'), 'mixed', train=256, test=32, seed=1)"
step doctor 2 "the GPUs by name, their memory, the precisions that they can do" "${gspo[@]}" doctor
step preflight 5 "memory, matmul and collectives of each GPU, and no unfit host" \
    "${gspo[@]}" preflight "$config" --nproc "$gpus"
step tests 15 "passed; skipped only FP8 kinds that this GPU does not have" \
    python -m pytest -q -m '' tests/gpu
step verify 10 "a last line of name=value with errors of 1e-5 and less" \
    "${gspo[@]}" verify "$config" training.precision=fp32 --layouts "$([ "$gpus" -gt 1 ] && echo tp=2 || echo tp=1)"
step bf16 5 "three steps, finite losses, grad norm above 0" "${gspo[@]}" train "$config" --nproc "$gpus"
step resume 5 "that the run goes on after step 3, and step 4" "${gspo[@]}" train "$config" --nproc "$gpus" training.steps=4
step fp8 10 "three steps; or what this GPU or Transformer Engine lacks, in one line" \
    "${gspo[@]}" train "$config" --nproc "$gpus" training.precision=fp8-delayed logging.dir="$out/fp8"
step engine 5 "three steps by Transformer Engine; or that it is not installed" \
    "${gspo[@]}" train "$config" --nproc "$gpus" model.backend=transformer_engine logging.dir="$out/engine"
step compare 2 "the same reward and loss to two digits in bf16 and engine" \
    "${gspo[@]}" report "$out/bf16" "$out/engine" -o "$out/compare"
step throughput 10 "a last line of name=value" python tools/bench_rollout.py

echo "$failed steps failed; send $report" | tee -a "$report"
[ "$failed" -eq 0 ]
