#!/usr/bin/env bash
# All measurements of docs/evidence.md and docs/stability_frontier.md, then their figures and tables.
#   bash examples/evidence/run.sh           # what the kept lines lack; all of it: 2 hours of one idle core
#   bash examples/evidence/run.sh --quick   # one point of each figure again, against its kept interval
# Every result is a line in results/. What has its line is not measured again, so the script goes on
# after an interruption; to measure all anew, move results/*.jsonl away. WITHOUT_VLLM=1 leaves out what
# needs vLLM (its environment, 2.4 GB, is made the first time).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
quick=()
[ -z "${WITHOUT_VLLM:-}" ] || quick=(--without-vllm)

if [ "${1:-}" = --quick ]; then
    status=0
    python "$here/quick.py" "${quick[@]}" || status=1
    python "$here/frontier.py" --quick || status=1
    exit $status
fi
run() { python "$here/$1.py" "${@:2}"; }
for seed in 1 2 3; do
    run gradients --length 8 --seed $seed
    for length in 32 128; do
        run gradients --length $length --updates 1 4 16 --seed $seed
    done
    for experts in 8 32 128; do
        run volatility --experts $experts --seed $seed
    done
    [ -n "${WITHOUT_VLLM:-}" ] || run likelihoods --seed $seed
done
[ -n "${WITHOUT_VLLM:-}" ] || run likelihoods --dtype float32
for mismatch in bf16_vllm router_noise; do
    for length in 8 32 128; do
        run gradients --length $length --updates 1 4 16 --mismatch $mismatch
    done
done
run gradients --length 512 --updates 1 4 16
run frontier
run draw
run frontier_figure -o "$here/../../docs/evidence/frontier.png" # prints the tables
