#!/usr/bin/env bash
# Makes the data, fine-tunes the model from which all runs start, trains every variant with three
# seeds, and writes runs/ablation/report.html. Finished parts are not repeated. Arguments are passed
# to `ablate`:
#   bash examples/ablation/run.sh --seeds 5
#   bash examples/ablation/run.sh routing.rollout_noise=0.0 -o runs/ablation_without_noise
set -euo pipefail
cd "$(dirname "$0")/../.."
python examples/ablation/make_data.py -o runs/sorting
python -m gspo_megatron sft examples/ablation/sft.yaml
exec python -m gspo_megatron ablate examples/ablation/config.yaml "$@"
