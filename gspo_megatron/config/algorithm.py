"""The sections `objective` and `routing`: what is maximised, with which experts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gspo_megatron.config.section import ImportPath, Positive, Section


class ObjectiveSection(Section):
    """What is maximised: an objective by name, of which every part and number can be replaced."""

    name: Literal[
        "gspo",
        "gspo_token",
        "grpo",
        "dapo",
        "dr_grpo",
        "cispo",
        "sapo",
        "gmpo",
        "luspo",
        "minirl",
        "reinforce_leave_one_out",
    ] = Field("gspo", description="the objective; docs/objectives.md has their formulas")
    import_path: ImportPath | None = Field(
        None, description="an objective of your own, package.module:function; replaces name"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of an objective of your own"
    )
    # the parts; null stands for the one that `name` has
    ratio: Literal["token", "sequence", "sequence_token", "sequence_product"] | None = Field(
        None, description="of single tokens, or of a sequence: geometric mean, or product"
    )
    rule: (
        Literal["min_clip", "dual_clip", "capped", "soft_gate", "masked", "geometric_clip"] | None
    ) = Field(None, description="what is done with a ratio far from 1")
    aggregation: Literal["sequence_mean", "token_mean", "token_sum", "constant_length"] | None = (
        Field(
            None,
            description="sequences weigh the same; or tokens do, with the mini-batch's tokens as "
            "divisor, its sequences, or its sequences times max_response_tokens",
        )
    )
    advantage: Literal["group_mean_std", "group_mean", "batch_std", "leave_one_out"] | None = Field(
        None,
        description="reward minus the group's mean, divided by the group's std, by nothing, or by "
        "the batch's std; or minus the mean of the group's others",
    )
    correction: (
        Literal[
            "none",
            "token_tis",
            "icepop",
            "sequence_tis",
            "sequence_mask",
            "sequence_product_tis",
            "k3_mask",
        ]
        | None
    ) = Field(None, description="for old log-probs that differ from the rollout engine's")
    # the numbers; null stands for the one of the chosen parts
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="the ratio is clipped below at 1 - clip_low"
    )
    clip_high: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the ratio is clipped above at 1 + clip_high"
    )
    allow_wide_clip: bool = Field(
        False, description="allow a token-sized clip range with a sequence ratio"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="largest ratio that counts where the advantage is negative"
    )
    tau_positive: Annotated[float, Field(gt=0)] | None = Field(
        None, description="temperature of the soft gate for advantages above 0"
    )
    tau_negative: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same for the others"
    )
    log_clip: Annotated[float, Field(gt=0)] | None = Field(
        None, description="bound of a token's log-ratio in the geometric mean"
    )
    correction_low: Annotated[float, Field(gt=0)] | None = Field(
        None, description="smallest ratio of old policy to rollout that counts"
    )
    correction_high: Annotated[float, Field(gt=0)] | None = Field(
        None, description="largest one: a cap, or the bound of a mask"
    )
    off_policy_mask: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="sequences with a negative advantage are dropped when the mean of log(old / "
        "new policy) over their tokens exceeds this; null: none are",
    )
    old_logprobs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="the ratio's denominator: a forward pass of the trainer before the first "
        "mini-batch, or what the rollout engine reported",
    )
    mini_batches: Positive = Field(4, description="optimizer steps on each batch of responses")
    advantage_std: Literal["sample", "population"] = Field(
        "sample", description="divide by the number of rewards minus 1, or by it, in a std"
    )
    advantage_import_path: ImportPath | None = Field(
        None, description="an advantage of your own, package.module:function; replaces advantage"
    )
    kl: Literal["none", "k1", "k2", "k3"] = Field(
        "none", description="estimator of the KL divergence to the policy that RL started from"
    )
    kl_coefficient: Annotated[float, Field(gt=0)] | None = Field(None, description="its weight")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="where it goes: a term of each token's loss, or off the reward"
    )
    reference_offload: bool = Field(
        False, description="keep the reference policy's weights in host memory while not in use"
    )
    entropy_coefficient: Annotated[float, Field(ge=0)] = Field(
        0.0, description="weight of a bonus on the mean entropy of the response tokens"
    )


class RoutingSection(Section):
    """Which experts the new policy uses."""

    replay: Literal["off", "r2", "r3"] = Field(
        "off", description="replay the experts of the old policy (r2) or of the rollout (r3)"
    )
    reference_replay: Literal["off", "r2", "r3"] = Field(
        "off", description="the same for the reference policy, whatever the policy replays"
    )
    store_on_host: bool = Field(
        False, description="keep recorded routes in host memory until their micro-batch"
    )
    volatility: bool = Field(
        False, description="measure how many experts change during a step, by layer"
    )
    rollout_noise: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="std of Gaussian noise on the routers' scores while rolling out, to stand for "
        "an engine whose experts differ from the trainer's; 0.0: none",
    )

    @property
    def modes(self) -> frozenset[str]:
        """Whose routes are replayed, by the policy or by the reference policy: r2, r3, both or
        none."""
        return frozenset({self.replay, self.reference_replay} - {"off"})
