"""Makes batches of fine-tuning examples: balanced over ranks, packed or padded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state

from gspo_megatron.batching.micro_batches import MicroBatch, MicroBatchBuilder, micro_batch_multiple
from gspo_megatron.batching.plan import MiniBatch, plan_step
from gspo_megatron.config.model_rules import shares_prompts
from gspo_megatron.config.stages import ExamplesConfig, PreferenceConfig
from gspo_megatron.data.examples import Example
from gspo_megatron.data.loader import PromptLoader
from gspo_megatron.models.build import Policy
from gspo_megatron.models.policy import HeadInputs

E = TypeVar("E")  # the type of an example
E_co = TypeVar("E_co", covariant=True)
B = TypeVar("B")  # the type of a batch


class Rows(Protocol[E_co]):
    """All examples of a file by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> E_co: ...


@dataclass
class SupervisedBatch:
    """The data of one optimizer update."""

    micro_batches: list[MicroBatch]  # the micro-batches of this rank
    num_micro_batches: int  # over all ranks, without empty ones
    num_learned: int  # tokens in the loss, over all ranks
    num_tokens: int  # all tokens, over all ranks

    def counts(self) -> dict[str, float]:
        """Return the figures of the batch."""
        return {"batch/tokens": self.num_tokens, "batch/learned_tokens": self.num_learned}


class ExampleBatches(ABC, Generic[E, B]):
    """The batches of a run. Every layout has the same batches; their order depends only on the seed
    and the file. All ranks call `next` together."""

    def __init__(
        self,
        config: ExamplesConfig,
        policy: Policy,
        pad_id: int,
        train: Rows[E],
        evaluation: Rows[E] | None = None,
    ) -> None:
        training = config.training
        self.policy = policy
        self.train, self.evaluation_data = train, evaluation
        self.batch_size = config.examples_of_step(len(train))
        # Only responses to one prompt have a common beginning that is worth a search.
        share = isinstance(config, PreferenceConfig) and shares_prompts(config)
        padded = not training.packing
        self.builder = MicroBatchBuilder(policy, pad_id, 1.0, padded=padded, share_prompts=share)
        # The configured budget is for one rank. A context-parallel group shares a micro-batch.
        self.token_budget = training.micro_batch_tokens * policy.config.context_parallel_size
        self.loader = PromptLoader(
            len(train), self.batch_size, training.seed, shuffle=config.data.shuffle
        )
        self.num_examples = config.num_examples(len(train))  # the examples of the whole run
        self.by_epochs = training.epochs is not None
        self.drawn = 0

    def next(self) -> B:
        """Return the next `batch_size` examples as a batch. The last step has the examples that are
        left of the epochs: mostly fewer, but in a prolonged run there may be more of them."""
        # Take only `count` examples, so that a run with more steps continues with the next example.
        rest = self.num_examples - self.drawn
        step, steps = (-(-n // self.batch_size) for n in (self.drawn, self.num_examples))
        # If a run of one epoch is prolonged to two, its short last step is now in the middle. The
        # number of steps does not count this, so the last step makes up for it.
        is_last = self.by_epochs and step == steps - 1
        count = rest if is_last else min(self.batch_size, rest)
        assert count > 0, "all examples are drawn"
        self.drawn += count
        return self.batch([self.train[number] for number in self.loader.next(count)])

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as values that JSON can hold."""
        return {**self.loader.state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError if it was made with other data."""
        self.loader.load_state_dict(state)
        self.drawn = state["drawn"]

    def evaluation(self) -> Iterator[B]:
        """Yield all batches of the evaluation data. Each call yields the same batches."""
        data = self.evaluation_data
        for start in range(0, 0 if data is None else len(data), self.batch_size):
            assert data is not None
            numbers = range(start, min(start + self.batch_size, len(data)))
            yield self.batch([data[number] for number in numbers])

    @abstractmethod
    def batch(self, examples: Sequence[E]) -> B:
        """Return a batch of the examples, which must be the same on every rank."""

    def plan(
        self,
        lengths: Sequence[int],
        learned: Sequence[int],
        branches: Sequence[Sequence[int]] | None = None,
    ) -> MiniBatch:
        """Plan the micro-batches of a batch. See batching.plan.plan_step."""
        [plan] = plan_step(
            lengths,
            learned,
            mini_batches=1,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            token_budget=self.token_budget,
            micro_batch_multiple=micro_batch_multiple(self.policy),
            padded=self.builder.padded,
            branches=branches,
        )
        return plan


class FineTuningBatches(ExampleBatches[Example, SupervisedBatch]):
    """Batches of examples for supervised fine-tuning."""

    def batch(self, examples: Sequence[Example]) -> SupervisedBatch:
        """Return a batch of the examples, which must be the same on every rank."""
        lengths = [len(example.token_ids) for example in examples]
        # [1:], because the first token is never predicted.
        plan = self.plan(lengths, [int(each.loss_mask[1:].sum()) for each in examples])
        return SupervisedBatch(
            micro_batches=list(self._micro_batches(plan, examples, lengths)),
            num_micro_batches=plan.num_micro_batches,
            num_learned=plan.num_response_tokens,
            num_tokens=sum(lengths),
        )

    def _micro_batches(
        self, plan: MiniBatch, examples: Sequence[Example], lengths: Sequence[int]
    ) -> Iterator[MicroBatch]:
        shape = self.builder.common_shape([plan], [[length] for length in lengths])
        for numbers in plan.micro_batches[parallel_state.get_data_parallel_rank()]:
            members = [examples[n] for n in numbers]
            tokens = [torch.from_numpy(member.token_ids.astype(np.int64)) for member in members]
            # The builder predicts every token from the first learned one on (but never the first
            # token of a sequence). Tokens that are not learned, such as questions between several
            # answers, are removed below.
            masks = [member.loss_mask[1:] for member in members]
            tails = [mask[mask.argmax() :] if mask.any() else mask[:0] for mask in masks]
            counts = [len(tail) for tail in tails]
            offsets = [sum(counts[:place]) for place in range(len(counts))]
            built = self.builder.build(range(len(members)), tokens, counts, offsets, shape)
            learned = np.concatenate([np.empty(0, bool), *tails])  # [response tokens]
            if learned.all():
                yield built
                continue
            packed = built.packed
            keep = torch.from_numpy(learned).to(packed.response_index.device)[packed.response_index]
            names = ("token_rows", "targets", "sequence_index", "response_index")
            packed = replace(packed, **{name: getattr(packed, name)[keep] for name in names})
            head = HeadInputs(packed.token_rows, packed.targets, built.head.temperature)
            yield replace(built, packed=packed, head=head)
