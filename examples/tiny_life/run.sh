#!/usr/bin/env bash
# The whole life of a tiny model: text, tokenizer, pre-training, fine-tuning, GSPO, export, answers.
# What is done already is not done again. Arguments are overrides of the GSPO run:
#   bash examples/tiny_life/run.sh training.seed=2       # of all stages, in runs/tiny_life/seed_2
#   bash examples/tiny_life/run.sh parallel.layout=tp=1 logging.dir=runs/tiny_life/one_rank
# PRETRAIN and SFT, if set, are overrides of the stages before: PRETRAIN="training.steps=800".
# Everything is written below runs/tiny_life in the folder where it is started.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../../tools
gspo="python -m gspo_megatron"
read -ra pretrain <<<"${PRETRAIN:-}"
read -ra sft <<<"${SFT:-}"

seed=1
for word in "$@"; do
    case $word in training.seed=*) seed=${word#*=} ;; esac
done
data=runs/tiny_life/data
run=runs/tiny_life/seed_$seed
rl=$run/rl
for word in "$@"; do
    case $word in logging.dir=*) rl=${word#*=} ;; esac
done
say() { printf '\n== %s\n' "$*"; }

say "1/7 text and prompts"
python -m gspo_megatron.data.toy --train 4000 --test 256 --documents 6600 -o "$data"
head -c 200 "$data/corpus.jsonl" && echo ...

say "2/7 tokenizer"
[ -f "$data/tokenizer/tokenizer.model" ] || python "$tools/train_tokenizer.py" "$data/corpus.jsonl" \
    --vocab-size 48 --model-type char --no-byte-fallback -o "$data/tokenizer"

say "3/7 text to tokens"
[ -f "$data/corpus.json" ] || python "$tools/prepare_data.py" "$data/corpus.jsonl" \
    --tokenizer "$data/tokenizer" --workers 1 -o "$data/corpus"

say "4/7 pre-training"
$gspo pretrain "$here/pretrain.yaml" training.seed="$seed" \
    logging.dir="$run/pretrain" export.hf_path="$run/pretrain/hf" ${pretrain[@]+"${pretrain[@]}"}

say "5/7 supervised fine-tuning"
$gspo sft "$here/sft.yaml" training.seed="$seed" model.checkpoint_path="$run/pretrain" \
    logging.dir="$run/sft" export.hf_path="$run/sft/hf" ${sft[@]+"${sft[@]}"}

say "6/7 GSPO"
$gspo train "$here/config.yaml" training.seed="$seed" model.checkpoint_path="$run/sft" \
    logging.dir="$rl" "$@"

say "7/7 export, and answers by transformers"
[ -d "$rl/hf" ] || $gspo convert megatron-to-hf "$rl" "$rl/hf"
[ -f "$rl/answers.json" ] || python "$here/answer.py" \
    "$run/pretrain/hf" "$run/sft/hf" "$rl/hf" --prompts "$data/test.jsonl" -o "$rl/answers.json"
python "$here/table.py" "$run/pretrain" "$run/sft" "$rl"
