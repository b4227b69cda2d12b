#!/usr/bin/env bash
# A tiny model learns to call a calculator. Arguments are overrides of the RL run:
#   bash examples/tool_use/run.sh
#   bash examples/tool_use/run.sh objective.name=grpo objective.clip_low=0.2 objective.clip_high=0.27 \
#       logging.dir=runs/tool_use/grpo
# The variable SFT holds overrides of the fine-tuning: SFT="training.steps=400".
# Everything is written below runs/ in the current folder.
set -euo pipefail
read -ra sft <<<"${SFT:-}"
here=$(cd "$(dirname "$0")" && pwd)
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
[ -f runs/tool_use/data/tokenizer.model ] || python "$here/make_data.py" -o runs/tool_use/data
python -m gspo_megatron sft "$here/sft.yaml" ${sft[@]+"${sft[@]}"}
exec python -m gspo_megatron train "$here/config.yaml" "$@"
