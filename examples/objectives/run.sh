#!/usr/bin/env bash
# Make the toy data and train 20 steps with one objective. Further arguments are overrides:
#   bash examples/objectives/run.sh sapo training.seed=2
set -euo pipefail
cd "$(dirname "$0")/../.."
names=$(cd examples/objectives && printf '%s\n' *.yaml | sed 's/\.yaml$//' | paste -sd ' ')
if [ ! -f "examples/objectives/${1:-}.yaml" ]; then
    echo "usage: $0 NAME [section.key=value ...]; NAME is one of: $names" >&2
    exit 2
fi
name=$1
shift
python -m gspo_megatron.data.toy --task mixed --train 4000 --test 400 --seed 1 -o runs/toy >/dev/null
python -m gspo_megatron sft examples/objectives/start/sft.yaml >/dev/null  # skipped if finished before
exec python -m gspo_megatron train "examples/objectives/$name.yaml" "$@"
