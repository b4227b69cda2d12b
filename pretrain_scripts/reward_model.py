"""Training of a preference model as an entry file for launchers that want one.

torchrun --nproc-per-node 8 pretrain_scripts/reward_model.py CONFIG.yaml [section.key=value ...]
srun --ntasks-per-node 8 python pretrain_scripts/reward_model.py CONFIG.yaml [section.key=value ...]
python pretrain_scripts/reward_model.py CONFIG.yaml --nproc 8
"""

from __future__ import annotations

import sys

from gspo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["reward-model", *sys.argv[1:]]))
