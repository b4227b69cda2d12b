"""Which figures of a run are plotted, and how: a table of panels, no drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspo_megatron.observe.records import FINE_TUNING, PRETRAINING, RL, WARM_START

QUANTILES = ("min", "p01", "p50", "p99", "max")


@dataclass(frozen=True)
class Panel:
    """One small plot.

    `curves` are (key, label) pairs; a key that ends in "/" stands for every figure below it. The
    first key present is the one drawn when several runs are laid over each other. kind "fan" shows
    the quantiles below its single key as bands around the median, less one; "stack" piles its
    curves up, under the line of their `total`.
    """

    title: str
    ylabel: str
    curves: tuple[tuple[str, str], ...]
    kind: Literal["lines", "fan", "stack"] = "lines"
    total: str | None = None
    floor: str | None = None  # half-width of what is noise around zero, drawn as a band
    percent: bool = False
    log: bool = False
    noisy: bool = True  # drawn with a moving average
    scale: float = 1.0


@dataclass(frozen=True)
class Page:
    """One picture: panels of one subject and phase."""

    name: str  # of the file, without .png
    title: str
    panels: tuple[Panel, ...]
    phase: str = RL


def _clip_panel(unit: str, title: str) -> Panel:
    kinds = ("binding", "outside", "low", "high")
    return Panel(
        title,
        f"share of {unit}s",
        tuple((f"clip/{unit}/{kind}", kind) for kind in kinds),
        percent=True,
    )


REWARD = Panel("Reward", "mean reward", (("reward/mean", "mean"),))
ACCURACY = Panel(
    "Held-out accuracy", "share right", (("evaluation/accuracy", "accuracy"),), percent=True
)
CLIP_SEQUENCE = _clip_panel("sequence", "Clipped sequences")
CLIP_TOKEN = _clip_panel("token", "Clipped tokens")
ENTROPY = Panel("Entropy", "nats per token", (("policy/entropy", "entropy"),))
GRAD_NORM = Panel("Gradient norm", "norm before clipping", (("grad_norm", "grad norm"),), log=True)
LOSS = Panel("Loss", "loss", (("loss", "loss"),))
LENGTH = Panel("Response length", "mean tokens", (("response/length_mean", "length"),))
STEP_TIME = Panel(
    "Time of a step",
    "seconds",
    tuple((f"perf/{part}_seconds", part) for part in ("rollout", "logprob", "train", "sync")),
    kind="stack",
    total="perf/step_seconds",
)
THROUGHPUT = Panel("Throughput", "tokens per second", (("perf/tokens_per_second", "tokens/s"),))
VOLATILITY = Panel(
    "Routing volatility",
    "share changed",
    (("routing/volatility", "expert choices"), ("routing/tokens_changed", "tokens")),
    percent=True,
)

PAGES = (
    Page(
        "learning",
        "Learning",
        (
            REWARD,
            ACCURACY,
            Panel("Reward spread", "standard deviation", (("reward/std", "std"),)),
            Panel(
                "Wasted responses",
                "share",
                (
                    ("reward/zero_spread_groups", "groups without spread"),
                    ("response/truncated", "truncated"),
                ),
                percent=True,
            ),
            LENGTH,
            ENTROPY,
        ),
    ),
    Page(
        "ratios",
        "Importance ratios and clipping",
        (
            Panel(
                "Sequence ratio",
                "ratio − 1",
                (("ratio/sequence/", ""),),
                kind="fan",
                floor="ratio/noise_floor",
            ),
            CLIP_SEQUENCE,
            Panel("Token ratio", "ratio − 1", (("ratio/token/", ""),), kind="fan"),
            CLIP_TOKEN,
        ),
    ),
    Page(
        "optimizer",
        "Optimizer",
        (
            LOSS,
            GRAD_NORM,
            Panel("Learning rate", "learning rate", (("lr", "learning rate"),), noisy=False),
            Panel("Divergence", "nats", (("kl/", ""),)),
            Panel(
                "Rollout against training",
                "log-prob difference",
                (
                    ("mismatch/abs_mean", "mean size"),
                    ("mismatch/k1", "k1"),
                    ("mismatch/k3", "k3"),
                ),
            ),
        ),
    ),
    Page(
        "routing",
        "Expert routing",
        (
            VOLATILITY,
            Panel("Load imbalance", "max violation", (("routing/max_violation", "violation"),)),
            Panel("Dead experts", "experts", (("routing/dead_experts", "dead"),)),
        ),
    ),
    Page(
        "timing",
        "Time and memory",
        (
            STEP_TIME,
            THROUGHPUT,
            Panel("Peak memory", "GiB", (("perf/peak_memory_bytes", "peak"),), scale=1 / 2**30),
        ),
    ),
    Page(
        "warm_start",
        "Warm start (supervised)",
        (
            Panel("Loss", "cross-entropy, nats per token", (("loss", "loss"),)),
            GRAD_NORM,
            ACCURACY,
        ),
        phase=WARM_START,
    ),
    *(
        Page(
            phase,
            title,
            (
                Panel(
                    "Loss",
                    "cross-entropy, nats per token",
                    (("loss", "batch"), ("evaluation/loss", "held out")),
                ),
                GRAD_NORM,
                Panel("Learning rate", "learning rate", (("lr", "learning rate"),), noisy=False),
                THROUGHPUT,
            ),
            phase=phase,
        )
        for phase, title in (
            (PRETRAINING, "Pre-training"),
            (FINE_TUNING, "Supervised fine-tuning"),
        )
    ),
)

_TIME = Panel("Time of a step", "seconds", (("perf/step_seconds", "step"),))
_CROSS_ENTROPY = "cross-entropy, nats per token"

# What is laid over each other when runs are compared, by the phase that they are about.
COMPARISONS = {
    RL: Page(
        "comparison",
        "Comparison",
        (
            REWARD,
            ACCURACY,
            ENTROPY,
            CLIP_SEQUENCE,
            CLIP_TOKEN,
            GRAD_NORM,
            LENGTH,
            VOLATILITY,
            _TIME,
        ),
    )
} | {
    phase: Page(
        "comparison",
        f"Comparison: {title}",
        (
            Panel("Held-out loss", _CROSS_ENTROPY, (("evaluation/loss", "held out"),)),
            Panel("Loss", _CROSS_ENTROPY, (("loss", "batch"),)),
            GRAD_NORM,
            Panel("Learning rate", "learning rate", (("lr", "learning rate"),), noisy=False),
            THROUGHPUT,
            _TIME,
        ),
        phase,
    )
    for phase, title in ((PRETRAINING, "pre-training"), (FINE_TUNING, "supervised fine-tuning"))
}
