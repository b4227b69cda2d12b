"""Tasksets of the package verifiers. They run in an interpreter that has the package, with a
scripted policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from gspo_megatron.data.tokenizers import Tokenizer
from gspo_megatron.environments import verifiers, verifiers_bridge
from gspo_megatron.environments.episode import Episode, EpisodeLimits, EpisodeRunner, TurnRequest
from gspo_megatron.environments.transcript import Written
from gspo_megatron.environments.verifiers import Verifiers
from gspo_megatron.errors import EpisodeError, UnplayableError
from gspo_megatron.types import Prompt
from tests.tasksets import hangman_words, letters, sums_taskset
from tests.verifiers_environment import find_verifiers_python

HANGMAN = {"taskset": {"game": "Hangman-v0"}}
TURNS = 4


@dataclass
class Table:
    """Plays all episodes in one event loop, as a run does."""

    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop

    def play(
        self,
        environment: Verifiers,
        task: Any,
        *scripts: Sequence[str],
        tokens: int = 4000,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[list[Episode], list[TurnRequest]]:
        """Play several episodes of one task at the same time, with one script of turns for each."""
        asked: list[TurnRequest] = []
        runner = EpisodeRunner(environment, self.tokenizer, EpisodeLimits(TURNS, tokens, 4000))

        async def one(script: Sequence[str]) -> Episode:
            async def write(wanted: TurnRequest) -> Written:
                before()
                asked.append(wanted)
                ids = [*self.tokenizer.encode(script[wanted.turn]), self.tokenizer.eos_id]
                return Written(ids[: wanted.max_tokens], len(ids) > wanted.max_tokens)

            prompt = Prompt("?", None, "f:7", {"task": task}, token_ids=(9, 9))
            return await runner.run(prompt, write)

        async def all_of_them() -> list[Episode]:
            return await asyncio.gather(*map(one, scripts))

        return self.loop.run_until_complete(all_of_them()), asked


@pytest.fixture(scope="module")
def python() -> str:
    return str(find_verifiers_python())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    loop = asyncio.new_event_loop()
    yield Table(letters(tmp_path_factory.mktemp("letters")), loop)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    # asyncio.gather would need the thread's event loop, which another test may have closed.
    for task in left:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            loop.run_until_complete(task)
    loop.close()


@pytest.fixture(scope="module")
def hangman(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifiers]:
    """A game of hangman in which the word is always cat."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(hangman_words(tmp_path_factory.mktemp("nltk"), ["cat"])))
        yield Verifiers("textarena", python, **HANGMAN)


@pytest.fixture(scope="module")
def row(hangman: Verifiers) -> dict[str, Any]:
    zeroth, first = hangman.tasks(0, 2)
    assert zeroth["id"] != first["id"]
    return first


def test_a_game_of_textarena_is_played_and_captured(
    table: Table, hangman: Verifiers, row: dict[str, Any]
) -> None:
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert "Hangman" in row["prompt"][1]["content"]
    scripts = ["[c]", "[t]", "[a]"], ["[c]", "no move", "nor here"]
    (won, lost), asked = table.play(hangman, row["task"], *scripts)
    assert won.error is None and won.given == 1.0 and not won.client.is_cut
    assert lost.error is None and lost.given == pytest.approx(1 / 3)
    said = [message["content"] for message in won.client.messages]
    assert said[:2] == [message["content"] for message in row["prompt"]]
    assert said[2::2] == ["[c]", "[t]", "[a]"] and "C   _   _" in said[3]
    for episode, script in ((won, scripts[0]), (lost, scripts[1])):
        # the tokens in the request for each turn are exactly the tokens that are trained
        played = (*episode.client.transcript.prompt, *episode.transcript.response.tolist())
        ends = len(episode.client.transcript.prompt) + episode.client.transcript.turn_ends()
        contexts = [each.token_ids for each in asked]
        for end, text in zip(ends, script):
            written = [*table.tokenizer.encode(text), table.tokenizer.eos_id]
            assert played[: end - len(written)] in contexts
            assert list(played[end - len(written) : end]) == written
        assert episode.mask.sum() == sum(len(text) + 1 for text in script)


@pytest.mark.full
def test_limits_end_the_game(table: Table, hangman: Verifiers, row: dict[str, Any]) -> None:
    (of_turns,), asked = table.play(hangman, row["task"], ["[x]", "[y]", "[z]", "[v]"])
    assert of_turns.error is None and of_turns.given == 0.0
    assert len(asked) == TURNS and of_turns.client.is_cut
    (of_tokens,), asked = table.play(hangman, row["task"], ["[c]"], tokens=10)
    assert of_tokens.error is None and of_tokens.given == 0.0
    assert len(asked) == 1 and of_tokens.client.is_cut


def test_an_episode_that_takes_too_long_has_failed(
    table: Table, hangman: Verifiers, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table.play(hangman, row["task"], ["[cat]"])  # starts the process, which takes seconds, too
    monkeypatch.setattr(hangman, "_seconds", 0.0)
    (late,), _ = table.play(hangman, row["task"], ["[c]"])
    assert "took longer than environment.options.seconds = 0; f:7" in str(late.error)


def test_a_row_that_is_no_task_is_named(table: Table, hangman: Verifiers) -> None:
    (episode,), _ = table.play(hangman, {"prompt": 3}, ["x"])
    assert "ValidationError" in str(episode.error) and "TextArenaData" in str(episode.error)


def bridges() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if each.cmdline()[2:3] and each.cmdline()[2].endswith("verifiers_bridge.py"):
                found.append(each)
    return found


def test_a_process_that_dies_costs_its_episodes_alone(
    table: Table, hangman: Verifiers, row: dict[str, Any]
) -> None:
    def kill() -> None:
        (bridge,) = bridges()
        started.extend(bridge.children(recursive=True))
        bridge.kill()

    started: list[psutil.Process] = []
    (episode,), _ = table.play(hangman, row["task"], ["[c]", "[t]", "[a]"], before=kill)
    assert "its process ended with exit code 137" in str(episode.error)
    assert started and not any(each.is_running() for each in started) and not bridges()
    (episode,), _ = table.play(hangman, row["task"], ["[cat]"])
    assert episode.error is None and episode.given == 1.0


SPEAKER = """#!{python}
import socket, sys, time
lines = socket.socket(fileno=int(sys.argv[4])).makefile("rw")
lines.readline()
time.sleep({wait})
lines.write("{{}}\\n")
lines.flush()
lines.readline()
lines.write({said} + "\\n")
lines.flush()
time.sleep(999)
"""


def speaker(folder: Path, said: str, wait: float = 0.0) -> str:
    """Return a program that takes the place of the interpreter and of the taskset."""
    program = folder / "python"
    program.write_text(SPEAKER.format(python=sys.executable, said=said, wait=wait))
    program.chmod(0o700)
    return str(program)


def test_an_answer_that_cannot_be_read_ends_the_episode(table: Table, tmp_path: Path) -> None:
    """The episode waited until its time was over, and the process went on."""
    others = bridges()
    for said in ("'x' * (1 << 25)", "'x'", "'{}'"):
        environment = Verifiers("any", speaker(tmp_path, said))
        (episode,), _ = table.play(environment, {}, ["x"])
        assert (
            "its process sent what cannot be read: " in str(episode.error) and bridges() == others
        )


def test_a_process_that_cannot_be_started_leaves_no_file_open(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Verifiers("any", speaker(tmp_path, "''"))
    table.loop.run_until_complete(environment._gateway.url())
    monkeypatch.setattr(verifiers, "command_under_keeper", lambda *_: ["/no/such/program"])
    before = len(os.listdir("/proc/self/fd"))
    (episode,), _ = table.play(environment, {}, ["x"])
    assert "FileNotFoundError" in str(episode.error)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_never_ready_is_named(table: Table, tmp_path: Path) -> None:
    environment = Verifiers("any", speaker(tmp_path, "''", wait=9.0), seconds=0.2)
    (episode,), _ = table.play(environment, {}, ["x"])
    assert "not ready after environment.options.seconds = 0.2; f:7" in str(episode.error)


WAITER = """#!{python}
import asyncio, contextlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("bridge", sys.argv[2])
bridge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bridge)
class Taskset:
    task_type = staticmethod(lambda: None)
class Environment:
    taskset, serving = Taskset(), contextlib.nullcontext
async def waits(*_):
    await asyncio.sleep(999)
bridge.load, bridge.Bridge._play = lambda _: Environment(), waits
asyncio.run(bridge.play(int(sys.argv[4])))
"""


def test_aborted_episodes_give_their_keys_back(table: Table, tmp_path: Path) -> None:
    """verifiers holds a client for each key."""
    program = tmp_path / "python"
    program.write_text(WAITER.format(python=sys.executable))
    program.chmod(0o700)
    environment = Verifiers("any", str(program))
    process = table.loop.run_until_complete(environment._start(TURNS))
    environment._process, environment._seconds = process, 0.0
    keys: list[str] = []

    async def has_keys() -> None:
        while not process.free_keys:
            await asyncio.sleep(0.01)

    for _ in range(2):
        (late,), _ = table.play(environment, {}, ["x"])
        assert "took longer than environment.options.seconds = 0; f:7" in str(late.error)
        table.loop.run_until_complete(asyncio.wait_for(has_keys(), 60))
        keys += process.free_keys
    assert len(keys) == 2 and keys[0] == keys[1]
    assert process.reading is not None
    process.end()
    table.loop.run_until_complete(process.reading)


def test_a_long_error_of_a_taskset_is_cut_and_an_exit_is_an_error() -> None:
    bridge, said = verifiers_bridge.Bridge.__new__(verifiers_bridge.Bridge), []
    for error in (ValueError("a" + "x" * (1 << 25) + "b"), SystemExit(0)):

        async def raises(*_: Any, error: BaseException = error) -> dict[str, Any]:
            raise error

        bridge._play, bridge.playing = raises, {3: None}
        asyncio.run(bridge._answer({"id": 3, "task": {}, "key": ""}, Mock(write=said.append)))
    long, end = (json.loads(line)["error"] for line in said)
    assert long.startswith("ValueError: ax") and long.endswith("xb") and len(long) < 2100
    assert end == "SystemExit: 0"


@pytest.mark.full  # tests/e2e plays whole runs
def test_a_taskset_of_the_scaffold_plays_as_it_is(
    table: Table, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sums_taskset(python, tmp_path))
    environment = Verifiers("my-sums", python, taskset={"num_tasks": 3})
    rows = list(environment.tasks(1, 9))
    assert [row["task"]["answer"] for row in rows] == ["3", "5"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "1+2?"}]
    (right, wrong, failing), _ = table.play(environment, rows[0]["task"], ["3"], ["4"], ["fail"])
    assert (right.given, wrong.given) == (1.0, 0.0)
    assert "TaskError" in str(failing.error) and "I cannot score this" in str(failing.error)
    del environment  # deleting it ends all processes that it has started
    for each in bridges():
        if str(tmp_path) == each.cwd():
            each.wait(timeout=60)


def test_settings_that_verifiers_refuses_end_the_run(table: Table, python: str) -> None:
    environment = Verifiers("no-such-taskset", python)
    problem = "environment.verifiers = no-such-taskset: ModuleNotFoundError: taskset"
    with pytest.raises(UnplayableError, match=problem):
        table.play(environment, {}, ["a"])
    with pytest.raises(EpisodeError, match="verifiers gives no tasks"):
        list(Verifiers("textarena", python, **HANGMAN, players=2).tasks(0, 1))
