"""Pieces of tensors in a folder, and folders with untrusted contents."""

from __future__ import annotations

import datetime
import enum
import io
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from gspo_megatron.checkpoint import storage
from gspo_megatron.checkpoint.storage import Piece, read_index, read_pieces, write_pieces
from gspo_megatron.errors import DataError
from gspo_megatron.process.heartbeat import heard_by


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def halves(key: str, whole: Tensor, cut: int) -> list[Piece]:
    """Two pieces along the first axis, as views."""
    rest = (0,) * (whole.dim() - 1)
    shape = tuple(whole.shape)
    return [
        Piece(key, whole[:cut], shape, (0, *rest)),
        Piece(key, whole[cut:], shape, (cut, *rest)),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(5)
    write_pieces(tmp_path, halves("a", torch.randn(5, 3, generator=generator), 2))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_cut_in_one_way_and_read_in_another(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randint(0, 100, (7, 3)).to(dtype)
    scalar = torch.tensor(3.5)
    write_pieces(tmp_path, [*halves("a", whole, 2), Piece("b", scalar, (), ())])
    found, number = torch.zeros_like(whole), torch.zeros(())
    read_pieces(tmp_path, [*halves("a", found, 5), Piece("b", number, (), ())])
    assert torch.equal(found, whole) and number == 3.5


def test_a_folder_that_another_rank_made_and_this_node_sees_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_dir, looks = tmp_path / "model", Path.is_dir, iter([False, False])
    folder.mkdir()

    def late(path: Path, **more: bool) -> bool:
        return next(looks, True) if path == folder else is_dir(path, **more)

    monkeypatch.setattr(Path, "is_dir", late)
    whole = torch.randn(5, 3)
    write_pieces(folder, halves("a", whole, 2))
    found = torch.zeros_like(whole)
    read_pieces(folder, halves("a", found, 4))
    assert torch.equal(found, whole)


@pytest.mark.parametrize("limit", [8, 30, 1000])
def test_large_pieces_are_stored_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A reader holds only one block at a time. A row that is larger than a block is cut, too."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", limit)
    whole, empty = torch.randn(7, 3, 2), torch.zeros(0, 3)
    write_pieces(tmp_path, [*halves("a", whole, 2), Piece("b", empty, (0, 3), (0, 0))])
    chunks = read_index(tmp_path).state_dict_metadata["a"].chunks
    assert max(chunk.sizes.numel() * 4 for chunk in chunks) <= limit
    assert len(chunks) == {8: 21, 30: 7, 1000: 2}[limit]
    found = torch.zeros_like(whole)
    read_pieces(tmp_path, [*halves("a", found, 5), Piece("b", empty, (0, 3), (0, 0))])
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    "pieces",
    [
        lambda whole: halves("a", whole, 2)[:1],
        lambda whole: halves("a", whole, 2) + [Piece("a", whole[1:2], (5, 3), (1, 0))],
    ],
    ids=["gap", "overlap"],
)
def test_gaps_and_overlaps_are_not_written(
    tmp_path: Path, pieces: Callable[[Tensor], list[Piece]]
) -> None:
    with pytest.raises((AssertionError, ValueError)):
        write_pieces(tmp_path, pieces(torch.ones(5, 3)))
    assert not (tmp_path / ".metadata").exists()


def test_two_pieces_at_one_place(tmp_path: Path) -> None:
    first = halves("a", torch.ones(4, 3), 2)
    with pytest.raises(AssertionError, match="two pieces at one place"):
        write_pieces(tmp_path, [first[0], *first])


def test_further_files_lie_beside_an_index_that_does_not_tell_its_path(tmp_path: Path) -> None:
    write_pieces(tmp_path, halves("a", torch.ones(4, 3), 2), files={"more.json": b"{}"})
    assert (tmp_path / "more.json").read_bytes() == b"{}"
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()


def test_a_key_that_nobody_asks_for(folder: Path) -> None:
    write_pieces(
        folder / "two", [*halves("a", torch.ones(4, 2), 1), *halves("b", torch.ones(3), 1)]
    )
    with pytest.raises(DataError, match="two: b belongs to no part of the model"):
        read_pieces(folder / "two", halves("a", torch.zeros(4, 2), 3))


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    changed = change(index)
    path.write_bytes(pickle.dumps(index if changed is None else changed))


def _set_path(index: Any, path: str) -> None:
    for info in index.storage_data.values():
        info.relative_path = path


def _chunks(index: Any) -> Any:
    return index.state_dict_metadata["a"].chunks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: _set_path(index, "../other/__0_0.distcp"), "is not a file of this folder"),
        (lambda index: _set_path(index, "/etc/hostname"), "is not a file of this folder"),
        (lambda index: _set_path(index, "__9_9.distcp"), "__9_9.distcp: no such file"),
        (lambda index: _chunks(index).pop() and None, "a is not whole: 6 of 15"),
        (lambda index: index.storage_data.popitem() and None, "a is not whole"),
        (lambda index: setattr(_chunks(index)[1], "offsets", torch.Size((1, 0))), "a is not whole"),
        (lambda index: setattr(index, "storage_data", None), "not an index of a checkpoint"),
        (lambda _: {"some": "dictionary"}, "not an index of a checkpoint: it is a dict"),
        (lambda _: print, "it names builtins.print"),
        (lambda _: torch.load, "it names torch.serialization.load"),
        (lambda _: torch.save, "it names torch.serialization.save"),
    ],
)
def test_foreign_index(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(folder, change)
    with pytest.raises(DataError) as caught:
        read_index(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)


def _shift(index: Any) -> None:
    """Change the pieces so that some elements come twice while their total number stays right."""
    [second] = [place for place in index.storage_data if place.offset[0] == 2]
    info = index.storage_data.pop(second)
    moved = torch.Size((1, 0))
    index.storage_data[type(second)("a", moved)] = info
    index.state_dict_metadata["a"].chunks[1].offsets = moved


def test_index_with_a_gap(folder: Path) -> None:
    edit(folder, _shift)
    with pytest.raises(DataError, match=r"pieces of \['a', 'a'\] overlap or leave gaps"):
        read_pieces(folder, halves("a", torch.zeros(5, 3), 2))


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_something_does_not(folder: Path) -> None:
    edit(folder, lambda _: _Runs(folder / "intruded"))
    with pytest.raises(DataError, match="it names "):
        read_pieces(folder, halves("a", torch.zeros(5, 3), 2))
    assert not (folder / "intruded").exists()


class _AsAttributes(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


class _Attribute:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return getattr, self.arguments


def test_members_of_enums_in_any_pythons_pickles(folder: Path) -> None:
    """Python 3.11.2 pickles members of enums as attributes of their class, other versions by their
    value."""
    path = folder / ".metadata"
    content = io.BytesIO()
    _AsAttributes(content).dump(pickle.loads(path.read_bytes()))
    path.write_bytes(content.getvalue())
    assert b"getattr" in content.getvalue()
    piece = halves("a", torch.zeros(5, 3), 2)
    read_pieces(folder, piece)
    properties = read_index(folder).state_dict_metadata["a"].properties
    assert properties.memory_format is torch.contiguous_format

    for attribute in (_Attribute(Metadata, "__init__"), _Attribute(TensorProperties, "create")):
        edit(folder, lambda _, attribute=attribute: attribute)
        wrong = "it reads an attribute by getattr, which no checkpoint needs"
        with pytest.raises(DataError, match=wrong):
            read_pieces(folder, piece)


def test_common_file_is_never_read(folder: Path) -> None:
    """Stock Megatron-Core unpickles common.pt. The package stores nothing in this file."""
    (folder / "common.pt").write_bytes(pickle.dumps(_Runs(folder / "intruded")))
    read_pieces(folder, halves("a", torch.zeros(5, 3), 2))
    assert not (folder / "intruded").exists()


def test_a_cut_of_the_index_is_noticed(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    cuts = [whole[:length] for length in [*range(0, len(whole), 29), len(whole) - 1]]
    for content in (*cuts, b"not a pickle"):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match="not an index of a checkpoint"):
            read_index(folder)
    with pytest.raises(DataError, match="is this the folder of a checkpoint"):
        read_index(folder / "nowhere")


def test_piece_beyond_the_tensor(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a has shape \[5, 3\]; the model has \[6, 3\]"):
        read_pieces(folder, halves("a", torch.zeros(6, 3), 2))


def test_each_tensor_that_is_written_or_read_is_a_sign_of_life(tmp_path: Path) -> None:
    signs: list[str] = []
    with heard_by(lambda: signs.append("written")):
        write_pieces(tmp_path, halves("a", torch.ones(5, 3), 2))
    with heard_by(lambda: signs.append("read")):
        read_pieces(tmp_path, halves("a", torch.zeros(5, 3), 2))
    assert [signs.count(what) for what in ("written", "read")] == [2, 2]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses files beyond 1 MB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("count", [270_000, 3_000_000], ids=["at its end", "in the middle"])
@pytest.mark.usefixtures("small_files")
def test_full_disk(tmp_path: Path, count: int) -> None:
    whole = torch.zeros(count)
    with pytest.raises(DataError, match="part: rank 0 cannot write: File too large"):
        write_pieces(tmp_path / "part", [Piece("a", whole, (count,), (0,))])
    assert not (tmp_path / "part" / ".metadata").exists()


def test_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("a file")
    with pytest.raises(DataError, match="part: rank 0 cannot write: "):
        write_pieces(tmp_path / "part", halves("a", torch.zeros(6, 3), 2))
