#!/usr/bin/env bash
# Checks the configuration and trains on this machine; the same command continues a stopped run.
# Arguments replace keys of config.yaml:   bash run.sh training.steps=2
#
# On a Slurm cluster, from this folder, with as many nodes and GPUs as you want:
#   @SBATCH@
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${GSPO_PYTHON:-@PYTHON@}
"$python" -m gspo_megatron check config.yaml "$@"
"$python" -m gspo_megatron train config.yaml "$@"
