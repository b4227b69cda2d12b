#!/usr/bin/env bash
# The demo runs all stages of a tiny model: text, tokenizer, pre-training, fine-tuning, GSPO,
# export, answers. Finished stages are not repeated. Arguments are overrides of the GSPO run, and
# its folder is named after the arguments:
#   bash examples/tiny_cpu/run.sh                        # runs/tiny_cpu
#   bash examples/tiny_cpu/run.sh training.seed=2        # runs/tiny_cpu-seed=2; the seed of all stages
#   bash examples/tiny_cpu/run.sh parallel.layout=tp=1   # runs/tiny_cpu-layout=tp=1
# The variables PRETRAIN and SFT are overrides of the earlier stages: PRETRAIN="training.steps=800".
# The variable CONFIG is another configuration of the GSPO run; START is another folder for the
# earlier stages. Everything is written below runs/ in the current folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
gspo="python -m gspo_megatron"
read -ra pretrain <<<"${PRETRAIN:-}"
read -ra sft <<<"${SFT:-}"

# On GPUs, each of the four ranks would need its own GPU, and most workstations have fewer than
# four. So all ranks use the CPU. With CUDA_VISIBLE_DEVICES=0,1,2,3 before the command, the ranks
# use four GPUs.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}

seed=1 rl=runs/tiny_cpu folder=
for word in "$@"; do
    name=${word%%=*} value=${word#*=}
    case $word in
    -*) ;;
    logging.dir=*) folder=$value ;;
    *=*) rl+=-${name##*.}=${value//[^A-Za-z0-9._=,-]/_} ;;
    esac
    [ "$name" != training.seed ] || seed=$value
done
rl=${folder:-$rl}
data=runs/tiny_cpu_start/data
start=${START:-runs/tiny_cpu_start}/seed_$seed
say() { printf '\n== %s\n' "$*"; }

say "1/6 text and prompts"
python -m gspo_megatron.data.toy --train 4000 --test 256 --documents 6600 -o "$data"
head -c 200 "$data/corpus.jsonl" && echo ...

say "2/6 text to a tokenizer and tokens"
[ -f "$data/corpus.idx" ] || python "$here/tokenize_text.py" "$data"

say "3/6 pre-training"
$gspo pretrain "$here/pretrain.yaml" training.seed="$seed" \
    logging.dir="$start/pretrain" export.hf_path="$start/pretrain/hf" ${pretrain[@]+"${pretrain[@]}"}

say "4/6 supervised fine-tuning"
$gspo sft "$here/sft.yaml" training.seed="$seed" model.checkpoint_path="$start/pretrain" \
    logging.dir="$start/sft" export.hf_path="$start/sft/hf" ${sft[@]+"${sft[@]}"}

say "5/6 GSPO"
$gspo train "${CONFIG:-$here/config.yaml}" model.checkpoint_path="$start/sft" "$@" logging.dir="$rl"

say "6/6 export, and answers by transformers"
[ -d "$rl/hf" ] || $gspo convert megatron-to-hf "$rl" "$rl/hf"
[ -f "$rl/answers.json" ] || python "$here/answer.py" \
    "$start/pretrain/hf" "$start/sft/hf" "$rl/hf" --prompts "$data/test.jsonl" -o "$rl/answers.json"
python "$here/table.py" "$start/pretrain" "$start/sft" "$rl"
