"""Corpora as batches: Megatron-Core's own datasets, samplers and index files, read on every rank.

Rank 0 builds the index of the samples in the run folder, the others map it into memory. Sample
number n is the same tokens on any layout; a step takes the next `batch_size` numbers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor

from gspo_megatron.batching.micro_batches import MicroBatch, micro_batch_multiple
from gspo_megatron.batching.packing import PackedBatch, zigzag_shard
from gspo_megatron.batching.plan import largest_equal_share
from gspo_megatron.checkpoint.resume import run_folder
from gspo_megatron.config.stages import PretrainingConfig
from gspo_megatron.data.inputs import (
    PretrainingInputs,
    corpus_tokens,
    evaluation_documents,
)
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.supervised.loop import SupervisedBatch

INDEX = "samples"  # below the run folder
_WHOLE = "whole"  # a file in it, while nothing is being written there
_NO_TOKEN = -1  # what GPTDataset fills up with; a real id would be left out where it is text

Samples = GPTDataset | BlendedDataset


class PretrainingBatches:
    """The batches of a run; see supervised.Batches."""

    def __init__(
        self,
        config: PretrainingConfig,
        policy: Policy,
        inputs: PretrainingInputs,
        *,
        goes_on: bool = False,
    ) -> None:
        """Every rank builds it. The index of a run that `goes_on` is used again. Raises DataError
        where the held-out data hold no whole batch."""
        self.config, self.policy = config, policy
        self.batch_size = config.training.batch_size
        self.device = torch.device(torch.cuda.current_device())
        index = run_folder(config) / INDEX
        on_main(lambda: _open_index(index, goes_on))
        self.samples = _training_samples(config, inputs)
        self.held_out = _held_out_samples(config, inputs)
        on_main((index / _WHOLE).touch)
        self.num_held_out = 0
        if self.held_out is not None:
            whole = len(self.held_out) // self.batch_size
            if not whole:
                raise DataError(
                    f"the evaluation data hold {len(self.held_out)} samples of "
                    f"{config.sequence_length()} tokens; training.batch_size = {self.batch_size} "
                    "takes more"
                )
            self.num_held_out = min(whole, config.training.evaluation_batches)
        self.drawn = 0  # samples

    def next(self) -> SupervisedBatch:
        """The next `batch_size` samples."""
        start = self.drawn
        self.drawn += self.batch_size
        return self.batch(self.samples, start)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "order": _order(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = _order(self.samples)
        once = all(epochs == 1 for epochs, _ in [*mine, *state["order"]])
        if len(mine) != len(state["order"]) or (mine != state["order"] and not once):
            raise DataError(
                "the order of the samples depends on their number where a corpus is read more than "
                "once, and training.steps has changed; set it back to go on"
            )
        self.drawn = state["drawn"]

    def evaluation(self) -> Iterator[SupervisedBatch]:
        for number in range(self.num_held_out):
            yield self.batch(self.held_out, number * self.batch_size)

    def batch(self, samples: Any, start: int) -> SupervisedBatch:
        """The samples from number `start` on; a data-parallel rank reads its own."""
        dp = parallel_state.get_data_parallel_world_size()
        own = self.batch_size // dp
        first = start + parallel_state.get_data_parallel_rank() * own
        size = self._micro_batch_size(own)
        micro_batches = [
            self._micro_batch([samples[n] for n in range(at, at + size)])
            for at in range(first, first + own, size)
        ]
        length = self.config.sequence_length()
        return SupervisedBatch(
            micro_batches=micro_batches,
            num_micro_batches=len(micro_batches) * dp,
            num_learned=self._count(micro_batches),
            num_tokens=self.batch_size * length,
        )

    def _micro_batch_size(self, own: int) -> int:
        """The most samples within the token budget that make micro-batches of one size, as many as
        an interleaved schedule wants."""
        cp = self.policy.config.context_parallel_size
        most = self.config.training.micro_batch_tokens * cp // self.config.sequence_length()
        return largest_equal_share(own, most, micro_batch_multiple(self.policy))

    def _count(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Learned tokens of all ranks."""
        if not self.config.data.mask_end_of_document:
            return self.batch_size * self.config.sequence_length()
        count = sum(int(m.packed.response_lengths.sum()) for m in micro_batches)
        total = torch.tensor(count, device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return int(total)

    def _micro_batch(self, samples: Sequence[dict[str, Tensor]]) -> MicroBatch:
        packed = rows_of_samples(
            torch.stack([sample["tokens"] for sample in samples]),
            torch.stack([sample["labels"] for sample in samples]),
            torch.stack([sample["loss_mask"] for sample in samples]) > 0,
            context_parallel_size=self.policy.config.context_parallel_size,
            context_parallel_rank=parallel_state.get_context_parallel_rank(),
        ).to(self.device)
        return MicroBatch(packed, None, HeadInputs(packed.token_rows, packed.targets))


def rows_of_samples(
    tokens: Tensor,
    labels: Tensor,
    learned: Tensor,
    *,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
) -> PackedBatch:
    """Samples of one length as a micro-batch with a row for each, and no padding.

    tokens, labels [samples, length] int64: what each token is followed by; learned [samples,
    length] bool: which labels count.
    """
    count, length = tokens.shape
    cp = context_parallel_size
    boundaries = list(range(0, count * length + 1, length))
    numbers = torch.arange(count * length)
    if cp > 1:
        numbers = zigzag_shard(boundaries, cp, context_parallel_rank)
    size = (count, length // cp)
    rows = learned.flatten()[numbers].nonzero()[:, 0]
    return PackedBatch(
        input_ids=tokens.flatten()[numbers].view(size),
        position_ids=(numbers % length).view(size),
        boundaries=torch.tensor(boundaries, dtype=torch.int32),
        longest=length,
        padding_mask=None,
        token_index=numbers.view(size),
        # hidden states come with the tokens of a row first: [tokens, rows]
        token_rows=rows % size[1] * count + rows // size[1],
        targets=labels.flatten()[numbers][rows],
        sequence_index=rows // size[1],
        response_index=numbers[rows],
        response_lengths=learned.sum(1),
        members=tuple(range(count)),
    )


@dataclass
class _TokenizerFacts:
    """All that GPTDataset asks of a tokenizer; its index files are named after this too."""

    vocab_size: int
    eod: int
    pad: int = _NO_TOKEN
    unique_identifiers: dict[str, Any] = field(default_factory=dict)


def _open_index(folder: Path, goes_on: bool) -> None:
    """Megatron-Core takes any file of the right name for whole, and of this run: what another run
    or a killed process left there goes."""
    whole = folder / _WHOLE
    if not (goes_on and whole.exists()):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    whole.unlink(missing_ok=True)


def _training_samples(config: PretrainingConfig, inputs: PretrainingInputs) -> Samples:
    data = config.data
    count = config.training.steps * config.training.batch_size
    weights = None
    if len(data.train) > 1:
        weights = [float(w) for w in data.weights or map(corpus_tokens, data.train)]
    wanted = _dataset_config(config, inputs, (data.train, weights), data.evaluation_share)
    wanted.split_matrix = [(0.0, 1.0 - data.evaluation_share), None, None]
    return _build([count, 0, 0], wanted)[0]


def _held_out_samples(config: PretrainingConfig, inputs: PretrainingInputs) -> Samples | None:
    data = config.data
    if data.evaluation:
        wanted = _dataset_config(config, inputs, (data.evaluation, None), 1.0)
        wanted.split_matrix = [None, (0.0, 1.0), None]
    elif data.evaluation_share:
        prefixes = [prefix for prefix in data.train if evaluation_documents(config, prefix)]
        wanted = _dataset_config(config, inputs, (prefixes, None), data.evaluation_share)
        wanted.split_matrix = [None, (1.0 - data.evaluation_share, 1.0), None]
    else:
        return None
    return _build([None, None, None], wanted)[1]


def _dataset_config(
    config: PretrainingConfig,
    inputs: PretrainingInputs,
    blend: tuple[list[str], list[float] | None],
    held_out: float,
) -> GPTDatasetConfig:
    facts = _TokenizerFacts(inputs.tokenizer.vocab_size, inputs.eod_id)
    facts.unique_identifiers = {"vocab_size": facts.vocab_size, "eod": facts.eod}
    return GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.sequence_length(),
        blend=blend,
        split=f"{1.0 - held_out},{held_out},0",
        path_to_cache=str(run_folder(config) / INDEX),
        tokenizer=facts,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.mask_end_of_document,
        create_attention_mask=False,
    )


def _build(sizes: list[int | None], config: GPTDatasetConfig) -> list[Any]:
    return BlendedMegatronDatasetBuilder(
        cls=GPTDataset, sizes=sizes, is_built_on_rank=lambda: True, config=config
    ).build()


def _order(samples: Samples) -> list[list[int]]:
    """What the order of the samples depends on besides the configuration: how often each corpus is
    read, and to how many samples. Read once, a corpus has one order, of which a shorter run takes
    the beginning."""
    parts = samples.datasets if isinstance(samples, BlendedDataset) else [samples]
    return [
        [math.ceil(len(part.document_index) / len(part.indices)), len(part.shuffle_index)]
        for part in parts
    ]
