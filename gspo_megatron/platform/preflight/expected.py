"""What a sound GPU of a known kind reaches at the very least, whatever its peers do.

Where every link of a job falls back to TCP, or every GPU is throttled, all are alike, and a median
says nothing. The figures are far below what is usual, so that no sound host is named.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Floor:
    """Of one rank or one group of them."""

    matmul: float  # TFLOP/s, bf16
    within: float  # GB/s of a group on one host
    across: float  # GB/s of a group over several


# matmul: 40% of the dense bf16 peak in NVIDIA's data sheets: A100 312, H100, H200 and H800 989,
# B200 and the B200 of a GB200 2,250 TFLOP/s. within: NVLink gives 300 GB/s in each direction to an
# A100, 450 to Hopper, 900 to Blackwell (an H800 has 200); PCIe 4 and 5 have at most 32 and 64.
# across: an adapter of 400 Gbit/s a GPU is 50 GB/s, and 50 Gbit/s a GPU, as in clouds with A100, 6;
# TCP over an adapter that eight GPUs share gives each of them about 1.
_AMPERE = Floor(matmul=125, within=25, across=2)
_HOPPER = Floor(matmul=395, within=40, across=5)
_BLACKWELL = Floor(matmul=900, within=40, across=5)
# By how torch calls the device; the boards with NVLink between all GPUs of a host alone. A name
# that goes on behind one of these, as that of a part of a GPU (MIG) does, is none.
_FLOORS = {
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H800": _HOPPER,
    "NVIDIA H200": _HOPPER,
    "NVIDIA B200": _BLACKWELL,
    "NVIDIA GB200": _BLACKWELL,
}


def expected(device: str, measure: str, ranks: int, hosts: int) -> float | None:
    """The smallest figure of a measure that is no sign of a defect; None: nobody knows. What one
    rank sends and receives may cross hosts or not: the smaller one then."""
    floor = _FLOORS.get(device)
    if floor is None:
        return None
    if measure == "matmul":
        return floor.matmul
    return floor.within if ranks > 1 and hosts == 1 else floor.across
