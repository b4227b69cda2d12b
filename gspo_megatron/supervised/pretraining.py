"""Makes batches of samples of equal length from corpora, with Megatron-Core's datasets.

Rank 0 builds the index of the samples in the run folder; the other ranks map it into memory. Sample
number n has the same tokens on any layout. A step takes the next `batch_size` samples.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
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
from gspo_megatron.data.inputs import PretrainingInputs, corpus_tokens, evaluation_documents
from gspo_megatron.errors import DataError
from gspo_megatron.files import make_folder
from gspo_megatron.models.build import Policy
from gspo_megatron.models.policy import HeadInputs
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.supervised.batches import SupervisedBatch

INDEX = "samples"  # folder in the run folder
_WHOLE = "whole"  # a file in INDEX; it is absent while an index is being written
_NO_TOKEN = -1  # GPTDataset masks this padding, so it must not be the id of a real token

Samples = GPTDataset | BlendedDataset


class PretrainingBatches:
    """The batches of a run, with the interface of `FineTuningBatches`."""

    def __init__(
        self,
        config: PretrainingConfig,
        policy: Policy,
        inputs: PretrainingInputs,
        *,
        resumed: bool = False,
    ) -> None:
        """Build or open the index. All ranks call this together.

        With `resumed`, an index in the run folder is used again. Raises DataError if the evaluation
        data have less than one batch.
        """
        self.config, self.policy = config, policy
        self.batch_size = config.training.batch_size
        self.device = torch.device(torch.cuda.current_device())
        index = run_folder(config) / INDEX
        on_main(lambda: _open_index(index, resumed))
        self.samples = _training_samples(config, inputs)
        self.evaluation_samples = _evaluation_samples(config, inputs)
        on_main((index / _WHOLE).touch)
        self.num_evaluation_batches = 0
        if self.evaluation_samples is not None:
            count = len(self.evaluation_samples)
            whole = count // self.batch_size
            if not whole:
                raise DataError(
                    f"the evaluation data hold {count} samples of {config.sequence_length()} "
                    f"tokens; training.batch_size = {self.batch_size} takes more"
                )
            self.num_evaluation_batches = min(whole, config.training.evaluation_batches)
        self.drawn = 0  # number of samples used so far

    def next(self) -> SupervisedBatch:
        """Return the next `batch_size` samples as a batch."""
        start = self.drawn
        self.drawn += self.batch_size
        return self.batch(self.samples, start)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "order": _order(self.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        order, other = _order(self.samples), state["order"]
        is_read_once = all(epochs == 1 for epochs, _ in [*order, *other])
        if len(order) != len(other) or (order != other and not is_read_once):
            raise DataError(
                "training.steps has changed, and the order of the samples depends on it because a "
                "corpus is read more than once; set it back to continue"
            )
        self.drawn = state["drawn"]

    def evaluation(self) -> Iterator[SupervisedBatch]:
        for number in range(self.num_evaluation_batches):
            yield self.batch(self.evaluation_samples, number * self.batch_size)

    def batch(self, samples: Any, start: int) -> SupervisedBatch:
        """Return the `batch_size` samples from number `start` on. Each rank reads its share of
        them."""
        dp = parallel_state.get_data_parallel_world_size()
        share = self.batch_size // dp
        first = start + parallel_state.get_data_parallel_rank() * share
        length = self.config.sequence_length()
        # The largest equal micro-batches within the token budget. An interleaved pipeline schedule
        # needs a certain multiple of micro-batches.
        cp = self.policy.config.context_parallel_size
        most = self.config.training.micro_batch_tokens * cp // length
        size = largest_equal_share(share, most, micro_batch_multiple(self.policy))
        micro_batches = [
            self._micro_batch([samples[n] for n in range(at, at + size)])
            for at in range(first, first + share, size)
        ]
        num_learned = self.batch_size * length
        if self.config.data.mask_end_of_document:
            count = sum(int(m.packed.response_lengths.sum()) for m in micro_batches)
            total = torch.tensor(count, device=self.device)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            num_learned = int(total)
        return SupervisedBatch(
            micro_batches=micro_batches,
            num_micro_batches=len(micro_batches) * dp,
            num_learned=num_learned,
            num_tokens=self.batch_size * length,
        )

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
    """Pack samples of equal length into a micro-batch, one row for each sample, without padding.

    tokens: [samples, length] int64
    labels: [samples, length] int64, the next token of each token
    learned: [samples, length] bool, True on labels in the loss
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
        # Hidden states are [tokens of a row, rows, hidden size].
        token_rows=rows % size[1] * count + rows // size[1],
        targets=labels.flatten()[numbers][rows],
        sequence_index=rows // size[1],
        response_index=numbers[rows],
        response_lengths=learned.sum(1),
        members=tuple(range(count)),
    )


def _open_index(folder: Path, resumed: bool) -> None:
    """Make an index folder, and remove files of another run or of a killed process from it.

    Megatron-Core would use every index file with the right name."""
    whole = folder / _WHOLE
    if not (resumed and whole.exists()):
        shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    whole.unlink(missing_ok=True)


def _training_samples(config: PretrainingConfig, inputs: PretrainingInputs) -> Samples:
    data, weights = config.data, None
    if len(data.train) > 1:
        weights = [float(w) for w in data.weights or map(corpus_tokens, data.train)]
    split = [(0.0, 1.0 - data.evaluation_share), None, None]
    assert config.training.steps is not None, "with_steps comes first"
    count = config.training.steps * config.training.batch_size
    return _build(config, inputs, data.train, weights, split, [count, 0, 0])


def _evaluation_samples(config: PretrainingConfig, inputs: PretrainingInputs) -> Samples | None:
    data = config.data
    prefixes, first = data.evaluation, 0.0
    if not prefixes and data.evaluation_share:
        prefixes = [prefix for prefix in data.train if evaluation_documents(config, prefix)]
        first = 1.0 - data.evaluation_share
    if not prefixes:
        return None
    return _build(config, inputs, prefixes, None, [None, (first, 1.0), None], [None] * 3)


def _build(
    config: PretrainingConfig,
    inputs: PretrainingInputs,
    prefixes: list[str],
    weights: list[float] | None,
    split: list[tuple[float, float] | None],  # shares of documents: training, evaluation, test
    # Number of samples of training, evaluation, test; None: the samples of one epoch.
    sizes: list[int | None],
) -> Samples:
    # The tokenizer attributes that GPTDataset reads; the names of its index files depend on them.
    identifiers = {"vocab_size": inputs.tokenizer.vocab_size, "eod": inputs.eod_id}
    tokenizer = SimpleNamespace(**identifiers, unique_identifiers=identifiers, pad=_NO_TOKEN)
    dataset_config = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.sequence_length(),
        blend=(prefixes, weights),
        split="1,1,1",  # `split_matrix` replaces it
        path_to_cache=str(run_folder(config) / INDEX),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.mask_end_of_document,
        create_attention_mask=False,
    )
    dataset_config.split_matrix = split
    builder = BlendedMegatronDatasetBuilder(
        cls=GPTDataset, sizes=sizes, is_built_on_rank=lambda: True, config=dataset_config
    )
    (samples,) = (part for part in builder.build() if part is not None)
    return samples


def _order(samples: Samples) -> list[list[int]]:
    """Return, for each corpus, the number of times that it is read, and its number of samples.

    The order of the samples depends on the configuration and on these two numbers. If a corpus is
    read only once, its order does not depend on the length of the run."""
    parts = samples.datasets if isinstance(samples, BlendedDataset) else [samples]
    return [
        [math.ceil(len(part.document_index) / len(part.indices)), len(part.shuffle_index)]
        for part in parts
    ]
