"""`python -m gspo_megatron`, the same as the console script `gspo-megatron`."""

from __future__ import annotations

import sys

from gspo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
