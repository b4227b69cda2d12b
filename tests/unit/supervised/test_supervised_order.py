"""The examples and tokens that a stage learns. The tests count them: each occurs the right number
of times, also after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gspo_megatron.batching.packing import PackSpec, pack
from gspo_megatron.config import check_config, parse_config
from gspo_megatron.config.stages import FineTuningConfig, PretrainingConfig
from gspo_megatron.data.examples import Counts, Example, SupervisedData
from gspo_megatron.data.inputs import PretrainingInputs
from gspo_megatron.errors import DataError
from gspo_megatron.models.build import Policy
from gspo_megatron.supervised.batches import FineTuningBatches
from gspo_megatron.supervised.loop import SupervisedBatch
from gspo_megatron.supervised.pretraining import PretrainingBatches, rows_of_samples
from tests.unit.data.datasets import write_indexed
from tests.unit.models.one_rank import tiny_policy

pytestmark = pytest.mark.usefixtures("one_rank")

VOCABULARY = 3000


@pytest.fixture(scope="module")
def policy(one_rank: None) -> Policy:
    return tiny_policy()


def targets(batch: SupervisedBatch) -> list[int]:
    return [int(t) for micro_batch in batch.micro_batches for t in micro_batch.head.targets]


# --- Fine-tuning ----------------------------------------------------------------------------------


def fine_tuning(policy: Policy, size: int, **training: object) -> FineTuningBatches:
    """Batches of examples. Example n has the tokens 2n and 2n + 1, of which the second is
    learned."""
    config = parse_config(
        {"data": {"tokenizer": "t", "examples": "e"}, "training": {"batch_size": 6, **training}},
        schema=FineTuningConfig,
    ).with_steps(size)
    examples = (
        Example(np.array([2 * n, 2 * n + 1], np.int32), np.array([False, True]), f"e:{n}")
        for n in range(size)
    )
    return FineTuningBatches(config, policy, 0, SupervisedData(examples, Counts()))


def learned(batches: FineTuningBatches, steps: int) -> list[int]:
    return [token // 2 for _ in range(steps) for token in targets(batches.next())]


@pytest.mark.parametrize(("size", "epochs"), [(20, 1), (20, 3), (6, 2), (4, 3), (25, 2)])
def test_every_example_is_learned_once_an_epoch(policy: Policy, size: int, epochs: int) -> None:
    batches = fine_tuning(policy, size, epochs=epochs)
    found = learned(batches, -(-size * epochs // min(size, 6)))
    assert Counter(found) == dict.fromkeys(range(size), epochs)
    assert found[:size] != sorted(found[:size])


@pytest.mark.parametrize("size", [20, 4])
def test_without_epochs_and_steps_every_example_is_learned_once(policy: Policy, size: int) -> None:
    batches = fine_tuning(policy, size)
    found = learned(batches, -(-size // 6))
    assert Counter(found) == dict.fromkeys(range(size), 1)


def test_a_batch_counts_its_tokens_and_those_that_are_learned(policy: Policy) -> None:
    """Each example has two tokens. The last batch has only one example."""
    batches = fine_tuning(policy, 7, epochs=1)
    counts = [batches.next().counts() for _ in range(2)]
    names = ("batch/tokens", "batch/learned_tokens")
    assert counts == [dict(zip(names, each)) for each in ((12, 6), (2, 1))]


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_resumed_run_learns_what_is_left(policy: Policy, stop: int) -> None:
    whole = learned(fine_tuning(policy, 17, epochs=2), 6)
    first = fine_tuning(policy, 17, epochs=2)
    begun = learned(first, stop)
    second = fine_tuning(policy, 17, epochs=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + learned(second, 6 - stop) == whole


@pytest.mark.parametrize("size", [4, 7, 9, 13, 17, 20])
@pytest.mark.parametrize("epochs", [(1, 2), (1, 3), (1, 2, 3)])
def test_a_prolonged_run_loses_nothing_of_its_short_last_step(
    policy: Policy, size: int, epochs: tuple[int, ...]
) -> None:
    found: list[int] = []
    done, state = 0, None
    for count in epochs:
        batches = fine_tuning(policy, size, epochs=count)
        if state is not None:
            batches.load_state_dict(state)
        steps = -(-size * count // min(size, 6))
        found += learned(batches, steps - done)
        assert Counter(found) == dict.fromkeys(range(size), count)
        done, state = steps, batches.state_dict()


def test_a_run_that_is_prolonged_by_steps_keeps_the_size_of_its_batches(policy: Policy) -> None:
    first = fine_tuning(policy, 20, epochs=1)
    assert len(learned(first, 4)) == 20
    second = fine_tuning(policy, 20, steps=7)
    second.load_state_dict(first.state_dict())
    assert [len(learned(second, 1)) for _ in range(3)] == [6, 6, 6]


# --- Pre-training ---------------------------------------------------------------------------------


class Corpora:
    """Two corpora. Each of their tokens has a value of its own."""

    def __init__(self, folder: Path, sizes: tuple[int, ...] = (40, 25)) -> None:
        self.folder, self.tokens = folder, []
        source, used = np.random.default_rng(4), 0
        for number, count in enumerate(sizes):
            lengths = source.integers(1, 30, size=count)
            ends = used + np.cumsum(lengths)
            documents = [np.arange(e - n, e, dtype=np.int32) for e, n in zip(ends, lengths)]
            write_indexed(documents, folder / str(number), VOCABULARY)
            self.tokens.append(set(range(used, int(ends[-1]))))
            used = int(ends[-1])
        assert used < VOCABULARY

    def prefixes(self) -> list[str]:
        return [str(self.folder / str(number)) for number in range(len(self.tokens))]

    def batches(
        self,
        policy: Policy,
        run: str = "run",
        resumed: bool = False,
        eod_id: int = 0,
        **sections: dict[str, object],
    ) -> PretrainingBatches:
        training = {"batch_size": 4, "steps": 6, "micro_batch_tokens": 32}
        data = {"tokenizer": "t", "train": self.prefixes(), "sequence_length": 16}
        config = parse_config(
            {
                "data": data | sections.get("data", {}),
                "training": training | sections.get("training", {}),
                "logging": {"dir": str(self.folder / run)},
            },
            schema=PretrainingConfig,
        )
        check_config(config, 1)
        inputs = PretrainingInputs(SimpleNamespace(vocab_size=VOCABULARY), eod_id)  # type: ignore[arg-type]
        return PretrainingBatches(config, policy, inputs, resumed=resumed)


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    return Corpora(tmp_path)


def drawn(batches: PretrainingBatches, steps: int) -> list[int]:
    return [token for _ in range(steps) for token in targets(batches.next())]


@pytest.mark.parametrize("stop", [1, 4])
def test_no_token_is_seen_twice_or_lost_over_a_resume(
    policy: Policy, corpora: Corpora, stop: int
) -> None:
    """The steps cover two thirds of a pass over the data. A resumed run continues with the same
    batches."""
    whole = drawn(corpora.batches(policy), 6)
    assert len(whole) == 6 * 4 * 16 == len(set(whole))
    first = corpora.batches(policy, "other")
    begun = drawn(first, stop)
    second = corpora.batches(policy, "other", resumed=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + drawn(second, 6 - stop) == whole


def test_a_pass_over_one_corpus_sees_every_token(policy: Policy, tmp_path: Path) -> None:
    """A pass lacks the first token, which nothing predicts, and the last tokens, which do not fill
    a sample."""
    corpora = Corpora(tmp_path, (60,))
    size = len(corpora.tokens[0])
    samples = (size - 1) // 16
    training = {"batch_size": 1, "steps": samples}
    found = drawn(corpora.batches(policy, training=training), samples)
    assert len(found) == len(set(found)) == samples * 16
    assert set(found) < corpora.tokens[0]


def test_weights_are_shares_of_samples(policy: Policy, corpora: Corpora) -> None:
    def found(batches: PretrainingBatches) -> Counter[int]:
        return Counter(int(batches.samples[n]["dataset_id"]) for n in range(24))

    assert found(corpora.batches(policy, data={"weights": [1.0, 3.0]})) == {0: 6, 1: 18}
    # Without given weights, the share of a corpus is its share of all tokens.
    share = len(corpora.tokens[0]) / sum(map(len, corpora.tokens))
    assert abs(found(corpora.batches(policy, "open"))[0] - 24 * share) <= 1


def test_held_out_documents_are_not_learned(policy: Policy, corpora: Corpora) -> None:
    batches = corpora.batches(policy, data={"evaluation_share": 0.3})
    held_out = {token for batch in batches.evaluation() for token in targets(batch)}
    again = [token for batch in batches.evaluation() for token in targets(batch)]
    assert set(again) == held_out and len(again) == len(held_out)
    assert held_out and not held_out & set(drawn(batches, 6))


def test_an_evaluation_that_fills_no_batch_is_refused(policy: Policy, corpora: Corpora) -> None:
    training = {"batch_size": 64, "steps": 1}
    with pytest.raises(DataError, match="training.batch_size = 64 takes more"):
        corpora.batches(policy, data={"evaluation_share": 0.05}, training=training)


def test_a_longer_run_keeps_the_order_of_the_first_pass_only(
    policy: Policy, corpora: Corpora
) -> None:
    state = corpora.batches(policy, training={"steps": 3}).state_dict()
    longer = corpora.batches(policy, training={"steps": 6})
    longer.load_state_dict(state)
    shorter = corpora.batches(policy, training={"steps": 3})
    assert drawn(longer, 3) == drawn(shorter, 3)
    with pytest.raises(DataError, match="training.steps has changed"):
        corpora.batches(policy, training={"steps": 60}).load_state_dict(state)


def test_a_damaged_index_of_a_killed_run_is_built_again(policy: Policy, corpora: Corpora) -> None:
    whole = drawn(corpora.batches(policy), 6)
    folder = corpora.folder / "run" / "samples"
    for path in folder.glob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:-40])
    (folder / "whole").unlink()  # this file does not exist while other files are written
    assert drawn(corpora.batches(policy, resumed=True), 6) == whole


def test_what_follows_the_end_of_a_document_may_be_left_out(
    policy: Policy, corpora: Corpora
) -> None:
    one = {"train": corpora.prefixes()[:1]}
    plain = corpora.batches(policy, data=one, training={"steps": 12}).next()
    end = int(plain.micro_batches[0].packed.input_ids[1, 5])  # any token of the data is suitable
    data = {**one, "mask_end_of_document": True}
    batches = corpora.batches(policy, data=data, training={"steps": 12}, eod_id=end)
    left_out = 0
    for batch in (batches.next() for _ in range(12)):
        for micro_batch in batch.micro_batches:
            ids = micro_batch.packed.input_ids
            predicts = torch.zeros(ids.numel(), dtype=torch.bool)
            predicts[micro_batch.head.rows] = True
            assert torch.equal(predicts.view(ids.t().shape).t(), ids != end)
            left_out += int((ids == end).sum())
        assert batch.num_learned == len(targets(batch))
    assert left_out


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_rows_are_those_of_the_packer(cp: int) -> None:
    """data.packing would make the same rows. The last token of a row has nothing to predict."""
    generator = torch.Generator().manual_seed(cp)
    length = 4 * cp
    tokens = torch.randint(99, (3, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((3, 1), 7)], dim=1)
    learned = torch.ones(3, length, dtype=torch.bool)
    learned[:, -1] = False
    for rank in range(cp):
        place = {"context_parallel_size": cp, "context_parallel_rank": rank}
        mine = rows_of_samples(tokens, labels, learned, **place)
        lengths = [length - 1] * 3
        spec = PackSpec(0, padded=True, **place)
        theirs = pack(spec, list(tokens), lengths, [0] * 3, range(3))
        names = ("input_ids", "position_ids", "boundaries", "token_rows", "targets")
        for name in (*names, "sequence_index"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert mine.longest == theirs.longest and theirs.padding_mask is None
