"""Updates of the weights while responses are generated. The recorded version of each token must be
the version that generated it. A simulation knows the right versions."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_megatron.rollout.vllm.in_flight import InFlightResponse, split_at_update, versions_of
from gspo_megatron.rollout.vllm.worker.gspo_vllm_answers import Response


@pytest.mark.parametrize("seed", range(20))
def test_each_token_has_the_version_of_its_draw(seed: int) -> None:
    draws = np.random.default_rng(seed)
    first = int(draws.integers(0, 5))
    lengths = draws.integers(1, 40, 8).tolist()
    responses = {InFlightResponse(first): length for length in lengths}
    drawn: dict[InFlightResponse, list[int]] = {each: [] for each in responses}
    for version in range(first, first + 6):
        for each, length in responses.items():
            more = int(draws.integers(0, 15))
            drawn[each] += [version] * min(more, length - len(drawn[each]))
        # The counts may also contain responses that have already ended.
        counts = {each.name: len(tokens) for each, tokens in drawn.items()}
        split_at_update(responses, counts, version + 1)
    for each, length in responses.items():
        drawn[each] += [first + 6] * (length - len(drawn[each]))
        assert each.versions(length).tolist() == drawn[each]
        assert each.versions(length).dtype == np.int32
        assert each.first_version == first and not each.is_taken_back


def test_a_request_that_has_no_token_is_taken_back_and_an_answer_stays_what_it_is() -> None:
    back: list[InFlightResponse] = []
    waits, answered, ended = (InFlightResponse(3, when_taken_back=back.append) for _ in range(3))
    answered.arrive(Response(np.arange(3), np.zeros(3), truncated=False))
    split_at_update([waits, answered, ended], {}, 4, {ended.name})
    assert back == [waits] and waits.is_taken_back
    split_at_update([waits], {}, 5)
    assert back == [waits]  # a response is not taken back a second time
    assert answered.versions(3).tolist() == answered.answer.versions.tolist() == [3, 3, 3]
    assert ended.versions(3).tolist() == [3, 3, 3]


def test_spans_that_do_not_cover_a_response_are_refused() -> None:
    assert versions_of([(1, 2), (4, 2), (7, 9)], 5).tolist() == [1, 1, 7, 7, 7]
    for spans in ([(1, 2)], [(1, 3), (2, 1)]):
        with pytest.raises(AssertionError):
            versions_of(spans, 5)
