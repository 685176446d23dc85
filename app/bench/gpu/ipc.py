"""Two processes on one device: one adds into the other's fp32 shard, without a call on the other's side.

Memory is handed over by torch.multiprocessing: CUDA IPC for tensors on a GPU, shared memory for those on a CPU, by the
same lines of code.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from app.bench.gpu.measurement import Earlier, Figures, Place

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import Queue

    Answers = Queue[tuple[str, list[float]]]

PATIENCE_S = 90.0
ELEMENTS, SMALL_ELEMENTS = 2**28, 2**16  # 1 GiB of fp32
ROUNDS = 8
BYTES_PER_ELEMENT = 4 + 2 + 4  # fp32 shard read and written, bf16 gradient read
MODULUS = 64  # small whole numbers: sums in fp32 are exact, whatever their order


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedAddition:
    """Checks that the owner finds the exact sum, and measures how fast the other process adds."""

    name: str = "ipc"
    estimate_s: float = 35.0

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> Figures:
        elements = place.pick(ELEMENTS, SMALL_ELEMENTS)
        shard = torch.zeros(elements, device=place.device)
        if place.device.type == "cpu":
            shard.share_memory_()
        context = multiprocessing.get_context("spawn")
        answers: Answers = context.Queue()
        gift: Queue[Tensor] = context.Queue()
        helper = context.Process(target=add_into, args=(gift, answers, ROUNDS), daemon=True)
        helper.start()
        try:
            gift.put(shard)
            word, seconds = _answer(answers, helper)
        finally:
            helper.join(10)
            if helper.is_alive():
                helper.kill()
        if word != "added":
            raise RuntimeError(f"the helper process could not add into the shard: {word}")
        place.synchronize()
        fastest = min(seconds)
        return {
            "right": torch.equal(shard, ROUNDS * gradient_of(elements, place.device).float()),
            "GiB": 4 * elements / 2**30,
            "seconds of an addition": fastest,
            "GB/s": BYTES_PER_ELEMENT * elements / fastest / 1e9,
        }


def gradient_of(elements: int, device: torch.device) -> Tensor:
    """bf16 [elements] of whole numbers below MODULUS, the same in both processes."""
    return (torch.arange(elements, device=device) % MODULUS).to(torch.bfloat16)


def add_into(gift: Queue[Tensor], answers: Answers, rounds: int) -> None:
    """The helper process: takes a shard that another process owns and adds a gradient `rounds` times."""
    try:
        shard = gift.get(timeout=PATIENCE_S)
        gradient = gradient_of(shard.numel(), shard.device)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            shard.add_(gradient)
            if shard.is_cuda:
                torch.cuda.synchronize(shard.device)
            seconds.append(time.perf_counter() - start)
        del shard  # before the owner may free it
        answers.put(("added", seconds))
    except Exception as error:  # told to the process that waits
        answers.put((f"{type(error).__name__}: {error}", []))


def _answer(answers: Answers, helper: BaseProcess) -> tuple[str, list[float]]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=0.5)
        except queue.Empty:
            if not helper.is_alive():
                return f"it ended with code {helper.exitcode}", []
    return f"no answer in {PATIENCE_S:.0f} s", []
