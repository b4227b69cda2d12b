"""Check where Transformer Engine's source has the demands of the kept contract.

python tools/te_contract.py VERSION FOLDER...

FOLDERs are those whose files the contract names: `transformer_engine` of an unpacked wheel of
transformer-engine, and the unpacked source of transformer-engine-torch, which has `csrc`. A place
is a file, a line and a hash of the line's words: of the source itself nothing is kept. For a new
version the tool says to which line each demand of the latest known version has moved; what it does
not find, a reader has to.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = ROOT / "tests/cuda_rehearsal/engine/contract.json"


def hash_of(line: str) -> str:
    return hashlib.sha256(line.strip().encode()).hexdigest()[:8]


def misplaced(contract: Path, version: str, folders: Sequence[Path]) -> Iterator[str]:
    """A line for each place that is not where the contract says, with the lines that it may be."""
    found = [(n, d) for n, listed in json.loads(contract.read_text()).items() for d in listed]
    is_new = not any(version in demand["where"] for _, demand in found)
    for name, demand in found:
        where = demand["where"]
        if version not in where and not is_new:
            continue
        latest = max(where, key=lambda known: [int(part) for part in known.split(".")])
        file, _, rest = where.get(version, where[latest]).rpartition(":")
        number, _, kept = rest.partition(" ")
        paths = [folder / file for folder in folders if (folder / file).is_file()]
        lines = paths[0].read_text().splitlines() if paths else []
        at = [i + 1 for i, line in enumerate(lines) if hash_of(line) == kept]
        if int(number) not in at:
            yield f"{name}: {demand['demand']}: {file}:{number}, found at {at or 'none'}"


def main(version: str, *folders: str) -> int:
    lines = list(misplaced(CONTRACT, version, [Path(folder) for folder in folders]))
    print(*lines, sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
