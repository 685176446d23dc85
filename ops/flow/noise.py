"""Gaussian noise as a function of a key and a place: equal on every device, and any part of it can be had alone.

The bits are those of Philox4x64-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2,
3"), a cipher of a counter: no word needs another one. On the CPU they come from numpy's generator of that name, on CUDA
from a Triton kernel. Each word of 64 bits gives two numbers by the transform of Box and Muller, in fp64 and rounded to
fp32, so that two libraries' logarithms round to equal numbers (but for one in about 10^8, by its last bit).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORDS = 4  # of 64 bits, that one value of the counter gives
NUMBERS = 2 * WORDS
_HALF = np.float64(2.0**-33)  # the middle of a step of 2^-32: no logarithm of zero


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """128 bits: another key is another, independent stream."""

    low: int
    high: int

    @classmethod
    def of(cls, seed: int, step: int, sample: str) -> NoiseKey:
        """The noise key of the sample with the key `sample` at this step."""
        digest = hashlib.blake2b(f"{seed}/{step}/noise/{sample}".encode(), digest_size=16).digest()
        return cls(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


@dataclass(frozen=True, slots=True)
class ScaledNoise:
    """Standard normal numbers of a key, times sigma."""

    sigma: float
    key: NoiseKey


def normal(key: NoiseKey, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Numbers `first` to `first + count` of the key's stream of standard normals: fp32 [count]."""
    if first < 0 or count < 0:
        raise ValueError(f"noise from place {first} on, {count} numbers: neither may be negative.")
    place = torch.device(device)
    start = first // NUMBERS  # the counter of the first number
    blocks = -(-(first + count) // NUMBERS) - start if count else 0
    if place.type == "cuda":
        from ops.flow.noise_kernel import fill  # Triton is loaded where there is a GPU

        numbers = fill(key.low, key.high, start, blocks, place)
    else:
        numbers = torch.from_numpy(_numbers(key, start, blocks)).to(place)
    offset = first - start * NUMBERS
    return numbers[offset : offset + count]


def rows(key: NoiseKey, chunk: slice, width: int, device: torch.device | str = "cpu") -> Tensor:
    """Rows `chunk` of a sample's noise as token rows: fp32 [n, width]. All chunks together are the whole's rows."""
    return normal(key, chunk.start * width, (chunk.stop - chunk.start) * width, device).view(-1, width)


def _numbers(key: NoiseKey, start: int, blocks: int) -> np.ndarray:
    """fp32 [blocks * NUMBERS], from counter `start` on."""
    # numpy counts up before it enciphers, so its first block of counter c is that of c + 1.
    before = (start - 1) % 2**256
    philox = np.random.Philox(key=key.low + (key.high << 64), counter=before)
    words = philox.random_raw(blocks * WORDS)
    radius = np.sqrt(-2.0 * np.log((words >> np.uint64(32)) * 2.0**-32 + _HALF))
    angle = ((words & np.uint64(0xFFFFFFFF)) * 2.0**-32 + _HALF) * (2.0 * math.pi)
    pairs = np.empty((words.size, 2), np.float32)
    pairs[:, 0] = radius * np.cos(angle)
    pairs[:, 1] = radius * np.sin(angle)
    return pairs.reshape(-1)
