#!/usr/bin/env bash
# Runs all measurements of docs/evidence.md and docs/stability_frontier.md, then makes their figures
# and tables.
#   bash examples/evidence/run.sh           # measures what results/ lacks; everything takes 4 hours of one core
#   bash examples/evidence/run.sh --quick   # measures one point of each figure again, and compares it with
#                                           # the kept interval: 5 minutes of one core, if the start model exists
# Every result is a line in results/. A result that has its line is not measured again, so after an
# interruption the script continues where it stopped. To measure everything anew, move
# results/*.jsonl away. WITHOUT_VLLM=1 leaves out the measurements that need vLLM. The first run
# with vLLM makes an environment for vLLM, which takes 2.4 GB.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
quick=()
engines=(bf16_vllm router_noise)
axes=("learning rate" "learning rate, noisy routers" mini-batches staleness "old log-probs, vLLM in bf16")
if [ -n "${WITHOUT_VLLM:-}" ]; then
    quick=(--without-vllm)
    engines=(router_noise)
    unset "axes[-1]"
fi

if [ "${1:-}" = --quick ]; then
    status=0
    python "$here/quick.py" "${quick[@]}" || status=1
    python "$here/frontier.py" --quick || status=1
    echo "exit_code=$status seconds=$SECONDS"
    exit $status
fi
run() { python "$here/$1.py" "${@:2}"; }
for seed in 1 2 3; do
    run gradients --length 8 --seed $seed
    for length in 32 128; do
        run gradients --length $length --updates 1 4 16 --seed $seed
    done
    for mismatch in "${engines[@]}"; do
        for length in 8 32 128; do
            run gradients --length $length --updates 1 4 16 --mismatch "$mismatch" --seed $seed
        done
    done
    for experts in 8 32 128; do
        run volatility --experts $experts --seed $seed
    done
    if [ -z "${WITHOUT_VLLM:-}" ]; then
        run likelihoods --seed $seed
        run likelihoods --seed $seed --dtype float32
    fi
done
run gradients --length 512 --updates 1 4 16
run frontier --axes "${axes[@]}"
# Two more sweeps of the learning rate. The first shows the cost of replay at rates where no arm
# needs replay. The second runs the arm "tight clip" at a value between those of the sweep above.
run frontier --axes "learning rate" --arms gspo grpo gspo+r2 grpo+r2 --values 2.8e-4 4e-4
run frontier --axes "learning rate" --arms "grpo, tight clip" --values 4e-4
run draw
echo "seconds=$SECONDS"
