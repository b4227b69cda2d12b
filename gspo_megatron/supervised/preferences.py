"""The training of a preference model: batches of preferences, updates, and evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, forward_backward, head_outputs
from gspo_megatron.batching.plan import MiniBatch
from gspo_megatron.batching.scores import all_scores, score_micro_batch
from gspo_megatron.config.stages import PreferenceSection
from gspo_megatron.data.preferences import Preference, PreferenceData
from gspo_megatron.evaluation.preferences import Pairs, pair_figures, rating_figures
from gspo_megatron.models.build import Policy
from gspo_megatron.models.optimizer import Trainer, zero_gradients
from gspo_megatron.objectives.preference import bradley_terry, regression
from gspo_megatron.platform.groups import data_parallel_group
from gspo_megatron.platform.reduce_metrics import StepMetrics, from_last_stage
from gspo_megatron.supervised.batches import ExampleBatches


@dataclass
class ScoredRows:
    """The preferences of a micro-batch or of a file: pairs of branches, or ratings of branches."""

    chosen: Tensor  # [pairs] int64, the number of the chosen branch
    rejected: Tensor  # [pairs] int64, the number of the rejected branch
    values: Tensor  # [pairs] float64, margins; or [branches] float64, ratings
    weights: Tensor  # [pairs] float64, 1 / number of rejected responses to the prompt

    @classmethod
    def of(cls, preferences: Iterable[Preference]) -> ScoredRows:
        """Number the branches of the preferences in order."""
        chosen, rejected, values, weights, first = [], [], [], [], 0
        for each in preferences:
            count = len(each.lengths)
            others = range(first + 1, first + count)
            chosen += [first] * len(others)
            rejected += others
            weights += [1 / len(others)] * len(others) if others else []
            values += each.values.tolist()
            first += count
        numbers = torch.tensor(chosen, dtype=torch.long), torch.tensor(rejected, dtype=torch.long)
        fractions = torch.tensor(weights, dtype=torch.float64)
        return cls(*numbers, torch.tensor(values, dtype=torch.float64), fractions)

    def to(self, device: torch.device) -> ScoredRows:
        """Return a copy with the tensors on `device`."""
        return ScoredRows(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass
class PreferenceBatch:
    """The data of one optimizer update."""

    micro_batches: list[MicroBatch]  # the micro-batches of this rank
    rows: list[ScoredRows]  # the preferences of each micro-batch
    # For each micro-batch, the numbers of its branches within the batch, [branches] int64.
    branches: list[Tensor]
    num_micro_batches: int  # on all ranks together, without empty micro-batches
    num_preferences: int  # on all ranks together
    num_pairs: int
    num_branches: int
    num_tokens: int

    def counts(self) -> dict[str, float]:
        """Return the figures of the batch."""
        return {
            "batch/tokens": self.num_tokens,
            "batch/preferences": self.num_preferences,
            "batch/pairs": self.num_pairs,
        }


class PreferenceBatches(ExampleBatches[Preference, PreferenceBatch]):
    """Batches of preferences. The responses of a prompt stay in one micro-batch."""

    def batch(self, examples: Sequence[Preference]) -> PreferenceBatch:
        """Return a batch of the preferences, which must be the same on every rank."""
        lengths = [len(each.token_ids) for each in examples]
        branches = [each.lengths.tolist() for each in examples]
        plan = self.plan(lengths, [0] * len(lengths), branches)
        starts = np.cumsum([0, *map(len, branches)])
        mine = plan.micro_batches[parallel_state.get_data_parallel_rank()]
        device = self.builder.device
        numbers = [
            [int(starts[n]) + place for n in members for place in range(len(branches[n]))]
            for members in mine
        ]
        return PreferenceBatch(
            micro_batches=list(self._micro_batches(plan, examples, branches)),
            rows=[ScoredRows.of(examples[n] for n in members).to(device) for members in mine],
            branches=[torch.tensor(each, dtype=torch.long, device=device) for each in numbers],
            num_micro_batches=plan.num_micro_batches,
            num_preferences=len(examples),
            num_pairs=sum(len(each.values) for each in examples),
            num_branches=int(starts[-1]),
            num_tokens=sum(lengths),
        )

    def _micro_batches(
        self, plan: MiniBatch, examples: Sequence[Preference], branches: Sequence[Sequence[int]]
    ) -> Iterator[MicroBatch]:
        shape = self.builder.common_shape([plan], branches)
        for members in plan.micro_batches[parallel_state.get_data_parallel_rank()]:
            tokens = [torch.from_numpy(examples[n].token_ids.astype(np.int64)) for n in members]
            yield score_micro_batch(self.builder, members, tokens, branches, shape)


class PreferenceUpdater:
    """Does optimizer updates of a preference model, and evaluates it."""

    def __init__(
        self,
        policy: Policy,
        trainer: Trainer,
        section: PreferenceSection,
        evaluation: PreferenceData | None,
    ) -> None:
        """evaluation: the data of the batches that `evaluate` gets."""
        self.policy, self.trainer, self.section = policy, trainer, section
        self.device = torch.device(torch.cuda.current_device())
        self.data_group = data_parallel_group()
        self.evaluation = evaluation
        self.is_primary = parallel_state.get_context_parallel_rank() == 0

    def update(self, batch: PreferenceBatch) -> dict[str, float]:
        """Do one update. Returns the metrics of the update, which are the same on every rank."""
        zero_gradients(self.policy.chunks, self.trainer.optimizer)
        metrics = self.accumulate(batch)
        norm, rate = self.trainer.update()
        reduced = from_last_stage(lambda: metrics.reduce(self.data_group))
        return reduced | {"grad_norm": norm, "lr": rate}

    def accumulate(self, batch: PreferenceBatch) -> StepMetrics:
        """Add the gradients of a batch to the gradient buffers, and return the figures of the
        batch."""
        metrics = StepMetrics(self.device)
        columns = zip(batch.micro_batches, batch.rows, batch.branches, strict=True)
        # for each micro-batch: its rows, and the number of its branches
        parts = {id(each): (rows, len(branches)) for each, rows, branches in columns}

        def loss(micro_batch: MicroBatch, local: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            rows, count = parts[id(micro_batch)]
            return self._loss(all_scores(local, micro_batch, count), rows, batch.num_preferences)

        for means in forward_backward(
            self.policy, batch.micro_batches, loss, batch.num_micro_batches
        ):
            if self.is_primary:  # all context-parallel ranks have the same figures
                metrics.add_means(means)
            else:
                metrics.add_means({name: torch.zeros_like(pair) for name, pair in means.items()})
        return metrics

    def _loss(
        self, scores: Tensor, rows: ScoredRows, count: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's part of the loss, and the pair [numerator, denominator] of each
        metric. The parts of all ranks add up to the loss. count: number of preferences in the
        batch, on all ranks together."""
        values = rows.values.to(scores.dtype)
        if self.section.loss == "regression":
            total, pairs = regression(scores, values), torch.ones_like(scores)
            figures = {"preference/score": scores}
        else:
            chosen, rejected = scores[rows.chosen], scores[rows.rejected]
            pairs = rows.weights.to(scores.dtype)
            center = self.section.center_coefficient
            total = bradley_terry(chosen, rejected, values, pairs, center_coefficient=center)
            figures = {
                "preference/accuracy": (torch.sign(chosen - rejected) + 1) / 2,
                "preference/difference": chosen - rejected,
                "preference/chosen": chosen,
                "preference/rejected": rejected,
            }
        weight = pairs.detach().double()
        means = {
            name: torch.stack([(value.detach().double() * weight).sum(), weight.sum()])
            for name, value in figures.items()
        }
        means["loss"] = torch.stack([total.detach().double(), weight.sum()])
        return total / max(count, 1), means

    def evaluate(self, batches: Iterable[PreferenceBatch]) -> dict[str, float]:
        """Return the figures of the evaluation data, as evaluation/NAME. Returns an empty dict
        without batches."""
        data = self.evaluation
        if data is None:
            return {}
        scores = torch.zeros(len(data.lengths), dtype=torch.float64, device=self.device)
        first = 0
        for batch in batches:
            outputs = head_outputs(self.policy, batch.micro_batches)  # empty before the last stage
            for micro_batch, branches, output in zip(batch.micro_batches, batch.branches, outputs):
                places = first + branches[micro_batch.packed.sequence_index]
                scores[places] = output[0].double()
            first += batch.num_branches

        def figures() -> dict[str, float]:
            dist.all_reduce(scores, group=self.data_group)
            return self.figures(scores.cpu().numpy(), data)

        return from_last_stage(figures)

    def figures(self, scores: np.ndarray, data: PreferenceData) -> dict[str, float]:
        """Return the figures of all scores of `data`: evaluation/NAME, and source/SOURCE/NAME."""
        if self.section.loss == "regression":
            figures = rating_figures(scores, data.values, data.source_numbers, data.sources)
        else:
            rows = ScoredRows.of(data[number] for number in range(len(data)))
            counts = np.diff(data.branch_ends) - 1
            pairs = Pairs(
                rows.chosen.numpy(),
                rows.rejected.numpy(),
                rows.values.numpy(),
                rows.weights.numpy(),
                np.repeat(data.source_numbers, counts),
            )
            center = self.section.center_coefficient
            figures = pair_figures(scores, pairs, data.sources, center)
        return {
            name if name.startswith("source/") else f"evaluation/{name}": value
            for name, value in figures.items()
        }
