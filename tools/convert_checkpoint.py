"""Convert a checkpoint from or to Hugging Face: `gspo-megatron convert` as a script."""

from __future__ import annotations

import sys

from gspo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
