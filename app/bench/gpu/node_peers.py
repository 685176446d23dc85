"""Memory of a node in the place of GPUs' memory, which processes lend each other alike: for rehearsals and tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ops.memory.lending import Lender, borrow
from ops.memory.node_memory import NodeMemory, RangeLock

_TOLD_S = 60.0  # a lender hears in a thread of its own that its memory was given back


@dataclass
class MappedMemory:
    """Memory of this process or borrowed, and how to let it go."""

    memory: NodeMemory
    tensor: Tensor
    lender: Lender | None = None


@dataclass
class NodePeers:
    """`PeerMemory` over a node's host memory; additions are exclusive, as a GPU's are."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    why_not: str = ""  # what borrowing fails with
    deaf: bool = False  # its additions arrive nowhere
    mapped: dict[int, MappedMemory] = field(default_factory=dict)
    before_push: Callable[[Tensor, int], None] = lambda staged, address: None

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        memory = NodeMemory.create("gpu", elements * dtype.itemsize)
        tensor = torch.frombuffer(memory.buffer, dtype=dtype)
        self.mapped[tensor.data_ptr()] = MappedMemory(memory, tensor)
        return tensor

    def free(self, memory: Tensor) -> None:
        gone = self.mapped.pop(memory.data_ptr())
        if gone.lender is None:
            return
        deadline = time.monotonic() + _TOLD_S
        while set(gone.lender.borrowers) - {os.getpid()}:
            if time.monotonic() > deadline:
                raise RuntimeError("freed while another process has it")
            time.sleep(0.01)
        gone.lender.close()

    def lend(self, memory: Tensor) -> bytes:
        mapped = self.mapped[memory.data_ptr()]
        mapped.lender = Lender(mapped.memory)
        return str(mapped.lender.number).encode()

    def borrow(self, handle: bytes) -> int:
        if self.why_not:
            raise RuntimeError(self.why_not)
        memory = borrow(int(handle))
        dtype = next(iter(self.mapped.values())).tensor.dtype
        tensor = torch.frombuffer(memory.buffer, dtype=dtype)
        self.mapped[tensor.data_ptr()] = MappedMemory(memory, tensor)
        return tensor.data_ptr()

    def give_back(self, address: int) -> None:
        self.mapped.pop(address).memory.close()

    def stage(self, turn: int) -> None: ...

    def push(self, staged: Tensor, address: int, turn: int) -> None:
        self.before_push(staged, address)
        if self.deaf:
            return
        base = next(at for at, one in self.mapped.items() if at <= address < at + one.tensor.nbytes)
        one = self.mapped[base]
        lock, lo = RangeLock(one.memory), address - base
        hi = lo + staged.numel() * one.tensor.itemsize
        lock.acquire(lo, hi, lambda: None)
        one.tensor[lo // one.tensor.itemsize : hi // one.tensor.itemsize].add_(staged)
        lock.close()

    def pushed(self) -> None: ...

    def wait(self) -> None: ...
