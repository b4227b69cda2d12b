"""Which weights drew which tokens of responses that updates interrupt: against a simulation that
writes the version down with every token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gspo_megatron.rollout.service.flight import Flight, split, versions_of


@pytest.mark.parametrize("seed", range(20))
def test_each_token_has_the_version_of_its_draw(seed: int) -> None:
    draws = np.random.default_rng(seed)

    async def simulate() -> None:
        first = int(draws.integers(0, 5))
        lengths = draws.integers(1, 40, 8).tolist()
        flights = {Flight(first): length for length in lengths}
        drawn: dict[Flight, list[int]] = {flight: [] for flight in flights}
        for flight in flights:
            flight.call = asyncio.create_task(asyncio.Event().wait())
        for version in range(first, first + 6):
            for flight, length in flights.items():
                more = int(draws.integers(0, 15))
                drawn[flight] += [version] * min(more, length - len(drawn[flight]))
            # the server may still know those that have ended
            counts = {each.name: len(tokens) for each, tokens in drawn.items()}
            split(flights, counts, version + 1)
        for flight, length in flights.items():
            drawn[flight] += [first + 6] * (length - len(drawn[flight]))
            assert flight.versions(length).tolist() == drawn[flight]
            assert flight.versions(length).dtype == np.int32
            assert flight.first_version == first and not flight.is_taken_back
            flight.call.cancel()

    asyncio.run(simulate())


def test_a_request_that_has_no_token_is_taken_back_and_an_answer_stays_what_it_is() -> None:
    async def work() -> None:
        waits, answered = Flight(3), Flight(3)
        waits.call = asyncio.create_task(asyncio.Event().wait())
        answered.call = asyncio.create_task(asyncio.sleep(0))
        await answered.call
        split([waits, answered], {}, 4)
        assert waits.is_taken_back and not answered.is_taken_back
        with pytest.raises(asyncio.CancelledError):
            await waits.call
        assert answered.versions(3).tolist() == [3, 3, 3]

    asyncio.run(work())


def test_spans_that_do_not_cover_a_response_are_refused() -> None:
    assert versions_of([(1, 2), (4, 2), (7, 9)], 5).tolist() == [1, 1, 7, 7, 7]
    for spans in ([(1, 2)], [(1, 3), (2, 1)]):
        with pytest.raises(AssertionError):
            versions_of(spans, 5)
