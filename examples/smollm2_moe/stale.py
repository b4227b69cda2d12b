"""Train on responses from older weights, without a server.

    python examples/smollm2_moe/stale.py STALENESS CONFIG [KEY=VALUE ...]

This is `gspo-megatron train` in one process, with one change: the responses of step t are generated
with the weights after step t - 1 - STALENESS. Steps up to STALENESS + 1 get responses of the first
weights. Servers do the same with `rollout.max_staleness`, but there only the largest staleness is
fixed, and the server needs memory for a model of its own. A stopped run cannot be continued,
because the waiting responses are not saved.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque

from gspo_megatron.cli.main import main as gspo_megatron
from gspo_megatron.rl import run
from gspo_megatron.rl.loop import ReinforcementLoop, RunComponents
from gspo_megatron.rl.rollouts import Experience


class StaleLoop(ReinforcementLoop):
    """RL steps that train on responses from older weights."""

    staleness = 0  # the age of these weights, in steps

    def __init__(self, components: RunComponents) -> None:
        super().__init__(components)
        self._waiting: deque[Experience] = deque()
        self._generated = self.done  # the last step whose responses are generated

    def roll_out(self, step: int) -> Experience:
        """Return the step's responses. Afterwards all responses up to step + staleness are
        generated."""
        while self._generated < min(step + self.staleness, self.config.training.steps):
            self._generated += 1
            self._waiting.append(super().roll_out(self._generated))
        return self._waiting.popleft()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("staleness", type=int)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(arguments)
    if args.staleness < 0:
        parser.error("STALENESS is at least 0")
    StaleLoop.staleness = args.staleness
    run.ReinforcementLoop = StaleLoop  # `train` builds its loop from this name
    # Ranks that `train` starts would be new processes, without StaleLoop.
    return gspo_megatron(["train", args.config, *args.overrides, "parallel.layout=tp=1"])


if __name__ == "__main__":
    sys.exit(main())
