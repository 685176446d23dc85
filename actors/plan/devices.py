"""What published devices can do: the peak that MFU divides by, and the FLOP model of a device nobody has measured.

Peaks are dense (data sheets of newer devices print twice that, with sparsity), in TFLOP/s: bf16 products with fp32
accumulation, and fp32 outside the tensor cores, which is what training without autocast uses. Sources: NVIDIA's data
sheets of each device (H100, H200, B200, A100, A10, A30, A40, L4, L40S, H20, V100, T4) and its architecture white papers
(Ada: RTX 4090, RTX 6000 Ada; Ampere GA102: RTX 3090, RTX A6000; Blackwell: RTX 5090, 5080). `link_gbps` is GB/s of a
GPU to the others of its node in one direction: NVLink as the data sheet counts it, halved; else PCIe x16. `host_gbps`
is the same from memory of its node: PCIe x16 as the data sheet has it, or the NVLink-C2C of a superchip, halved (of a
GB200 two GPUs share it). `memory_gib` is what PyTorch finds, measured for the H200 and as published
messages of full memory have it for the RTX 4090 and 5090, A30 and T4; for the others about that, and not looked up: a
cluster file's own counts before it. Of a device that is sold in two sizes it is the smaller one, unless its name says
which. The RTX 5080's peaks are those of its 10,752 cores at 2.617 GHz.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

_PCIE3, _PCIE4, _PCIE5 = 16.0, 32.0, 64.0
UNLISTED_LINK_GBPS = _PCIE4  # of a device that is in no table, assumed; also from memory of its node


ProductPrecision = Literal["bfloat16", "tf32", "float32"]
"""In what the numbers of matrix products are multiplied."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Peaks of a device."""

    bf16_tflops: float
    fp32_tflops: float
    link_gbps: float
    host_gbps: float
    memory_gib: float = 0.0  # 0: not known
    has_tf32: bool = True  # from Ampere on, at half the rate of bf16

    def peak_tflops(self, precision: ProductPrecision) -> float:
        """TFLOP/s of matrix products."""
        if precision == "tf32" and self.has_tf32:
            return self.bf16_tflops / 2
        return self.bf16_tflops if precision == "bfloat16" else self.fp32_tflops


# Words that a device's name has, in the order in which they are looked for: what is more special comes first.
DEVICES: tuple[tuple[tuple[str, ...], DeviceSpeed], ...] = (
    (("GB200",), DeviceSpeed(2500.0, 80.0, 900.0, 225.0, 184.0)),
    (("B200",), DeviceSpeed(2250.0, 75.0, 900.0, _PCIE5, 178.3)),
    (("B100",), DeviceSpeed(1750.0, 60.0, 900.0, _PCIE5, 178.3)),
    (("GH200",), DeviceSpeed(989.4, 66.9, 450.0, 450.0, 94.5)),
    (("H200", "NVL"), DeviceSpeed(835.5, 60.0, 450.0, _PCIE5, 139.7)),
    (("H200",), DeviceSpeed(989.4, 66.9, 450.0, _PCIE5, 139.7)),
    (("H100", "PCIE"), DeviceSpeed(756.4, 51.2, _PCIE5, _PCIE5, 79.1)),
    (("H100", "NVL"), DeviceSpeed(835.5, 60.0, 300.0, _PCIE5, 93.0)),
    (("H100",), DeviceSpeed(989.4, 66.9, 450.0, _PCIE5, 79.1)),
    (("H800", "PCIE"), DeviceSpeed(756.4, 51.2, _PCIE5, _PCIE5, 79.1)),
    (("H800",), DeviceSpeed(989.4, 66.9, 200.0, _PCIE5, 79.1)),
    (("H20",), DeviceSpeed(148.0, 44.0, 450.0, _PCIE5, 95.0)),
    (("A100", "PCIE"), DeviceSpeed(312.0, 19.5, _PCIE4, _PCIE4, 39.3)),
    (("A100",), DeviceSpeed(312.0, 19.5, 300.0, _PCIE4, 39.3)),
    (("A800", "PCIE"), DeviceSpeed(312.0, 19.5, _PCIE4, _PCIE4, 39.3)),
    (("A800",), DeviceSpeed(312.0, 19.5, 200.0, _PCIE4, 39.3)),
    (("A30",), DeviceSpeed(165.0, 10.3, _PCIE4, _PCIE4, 23.5)),
    (("A40",), DeviceSpeed(149.7, 37.4, _PCIE4, _PCIE4, 44.3)),
    (("A10G",), DeviceSpeed(70.0, 35.0, _PCIE4, _PCIE4, 22.0)),
    (("A10",), DeviceSpeed(125.0, 31.2, _PCIE4, _PCIE4, 22.0)),
    (("L40S",), DeviceSpeed(362.1, 91.6, _PCIE4, _PCIE4, 44.4)),
    (("L40",), DeviceSpeed(181.0, 90.5, _PCIE4, _PCIE4, 44.4)),
    (("L4",), DeviceSpeed(121.0, 30.3, _PCIE4, _PCIE4, 22.0)),
    (("RTX", "6000", "ADA"), DeviceSpeed(364.2, 91.1, _PCIE4, _PCIE4, 47.3)),
    (("RTX", "A6000"), DeviceSpeed(154.8, 38.7, _PCIE4, _PCIE4, 47.3)),
    (("RTX", "5090"), DeviceSpeed(209.5, 104.8, _PCIE5, _PCIE5, 31.3)),
    (("RTX", "5080"), DeviceSpeed(112.6, 56.3, _PCIE5, _PCIE5, 15.5)),
    (("RTX", "4090"), DeviceSpeed(165.2, 82.6, _PCIE4, _PCIE4, 23.6)),
    (("RTX", "3090"), DeviceSpeed(71.0, 35.6, _PCIE4, _PCIE4, 23.6)),
    (("V100",), DeviceSpeed(125.0, 15.7, 150.0, _PCIE3, 15.7, has_tf32=False)),  # fp16: it has no bf16 tensor cores
    (("T4",), DeviceSpeed(65.0, 8.1, _PCIE3, _PCIE3, 14.5, has_tf32=False)),  # fp16, too
)

_SIZES = {"16GB": 15.7, "32GB": 31.7, "40GB": 39.3, "80GB": 79.1}  # words of names -> memory_gib


def device_speed(
    name: str, measured: Mapping[str, float] | None = None, precision: ProductPrecision = "bfloat16"
) -> DeviceSpeed | None:
    """The speed of a device by the name that its driver gives, such as "NVIDIA H100 80GB HBM3"; of several, with "+"
    between their names, the slowest one in this precision, which the others wait for. None where one is neither listed
    nor among the `measured`, bf16 TFLOP/s by name."""
    speeds = [_one_speed(one.strip(), measured or {}) for one in name.split("+")]
    known = [speed for speed in speeds if speed is not None]
    return min(known, key=lambda speed: speed.peak_tflops(precision)) if len(known) == len(speeds) else None


def nearest_device(name: str) -> str:
    """The listed device whose name is most like this one."""
    makers = ("NVIDIA", "GEFORCE", "TESLA", "QUADRO")
    own = " ".join(word for word in _words(name) if word not in makers)
    names = [" ".join(words) for words, _ in DEVICES]
    return max(names, key=lambda one: difflib.SequenceMatcher(None, own, one).ratio())


def _one_speed(name: str, measured: Mapping[str, float]) -> DeviceSpeed | None:
    if name in measured:
        # fp32 is half of bf16 on cards of GeForce and workstations, which most of those are that are not listed
        return DeviceSpeed(measured[name], measured[name] / 2, UNLISTED_LINK_GBPS, UNLISTED_LINK_GBPS)
    words = _words(name)
    for wanted, speed in DEVICES:
        if all(word in words for word in wanted):
            sizes = [gib for size, gib in _SIZES.items() if size in words]
            return replace(speed, memory_gib=sizes[0]) if sizes else speed
    return None


def _words(name: str) -> list[str]:
    return name.upper().replace("-", " ").replace("_", " ").split()
