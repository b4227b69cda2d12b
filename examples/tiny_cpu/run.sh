#!/usr/bin/env bash
# The demo: make the toy data, train, show the result. Arguments are passed on as overrides:
#   bash examples/tiny_cpu/run.sh training.seed=2 parallel.layout=dp=2,ep=2
set -euo pipefail
cd "$(dirname "$0")/../.."
python -m gspo_megatron.data.toy --task mixed --train 4000 --test 400 --seed 1 -o runs/toy >/dev/null
exec python -m gspo_megatron train examples/tiny_cpu/config.yaml "$@"
