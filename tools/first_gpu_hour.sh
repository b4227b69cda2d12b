#!/usr/bin/env bash
# The first hour on a machine with GPUs: every check in order, each with a time limit and what it should
# print, and one report to send back.
#   bash tools/first_gpu_hour.sh                   # all steps; first_gpu_hour/report.txt
#   STEPS="doctor bf16" bash tools/first_gpu_hour.sh OUT
#   VLLM_PYTHON=/path/to/vllm/bin/python bash tools/first_gpu_hour.sh      # with the step sync
# GPUS (default: all that torch sees) ranks are started; in sync, one GPU is left to the server. Run it in
# the environment of `make setup`, on a GPU build of torch. Steps that this machine cannot do say why, and
# the others go on.
set -uo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-first_gpu_hour}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$home" || exit 1
gspo=(python -m gspo_megatron)
seen=$(python -c 'import torch; print(torch.cuda.device_count())')
gpus=${GPUS:-$seen}
wanted=${STEPS:-data doctor preflight tests verify bf16 resume sync fp8 engine compare throughput}
if [ "$gpus" -lt 1 ]; then
    echo "first_gpu_hour: torch sees no GPU here; GPUS=1 rehearses the steps on the CPU" >&2
    exit 2
fi
layouts=(tp=1)
[ "$gpus" -eq 1 ] || layouts+=(tp=2)
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

# A server serves nothing before the sums of its tensors and its log-probs of a probe are the trainer's.
# So a run that ends has shown it for the weights of the start and of each step.
sync_weights() {
    if [ -z "${VLLM_PYTHON:-}" ]; then
        echo "set VLLM_PYTHON to the python of an environment with vLLM"
        exit 2
    fi
    local ranks=$((seen > gpus ? gpus : seen - 1))
    [ "$seen" -gt 0 ] || ranks=$gpus
    if [ "$ranks" -lt 1 ]; then
        echo "two GPUs are needed: one trains, one serves"
        exit 2
    fi
    python -m gspo_megatron train "$config" --nproc "$ranks" "parallel.layout=dp=$ranks" \
        "model.megatron={kv_channels: 32}" checkpoint.interval=0 "logging.dir=$out/sync" \
        rollout.engine=vllm rollout.vllm.servers=1 "rollout.vllm.python=$VLLM_PYTHON" \
        rollout.vllm.weight_transport=nccl rollout.max_staleness=0 || exit 1
    grep -o '"sync/[a-z]*": [0-9.e+-]*' "$out/sync/metrics.jsonl"
}
export -f sync_weights
export seen gpus config out

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
# fp32 with the layers that a CPU has, too: the same weights on both
step verify 10 "a last line with equal=1; worst_error is 1e-5 or less where both compute in fp32" \
    "${gspo[@]}" verify "$config" model.backend=torch_native --reference-on-cpu --tolerance 1e-4 \
    --layouts "${layouts[@]}"
step bf16 5 "three steps, finite losses, grad norm above 0" "${gspo[@]}" train "$config" --nproc "$gpus"
step resume 5 "that the run goes on after step 3, and step 4" "${gspo[@]}" train "$config" --nproc "$gpus" training.steps=4
step sync 15 "sync/version 1 to 3, sync/bytes above 0; or what is missing for it" bash -c sync_weights
step fp8 10 "three steps; or what this GPU or Transformer Engine lacks, in one line" \
    "${gspo[@]}" train "$config" --nproc "$gpus" training.precision=fp8-delayed logging.dir="$out/fp8"
step engine 5 "three steps by Transformer Engine; or that it is not installed" \
    "${gspo[@]}" train "$config" --nproc "$gpus" model.backend=transformer_engine logging.dir="$out/engine"
step compare 2 "the same reward and loss to two digits in bf16 and engine" \
    "${gspo[@]}" report "$out/bf16" "$out/engine" -o "$out/compare"
step throughput 10 "a last line of name=value" python tools/bench_rollout.py

echo "$failed steps failed; send $report" | tee -a "$report"
[ "$failed" -eq 0 ]
