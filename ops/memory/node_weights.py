"""Frozen weights once in the memory of a node: the first of its processes that asks for them reads them, the others map
what it has read.

    held = NodeWeights.of(key, read)            # in every process that wants them; `read` runs in one of them
    module.load_state_dict(held.tensors, assign=True)

Whoever has the address that belongs to the key (abstract, so the kernel gives it to one process at a time, and frees it
when that process ends) reads, and lends the memory from then on (ops.memory.lending). Others connect and wait; who has
mapped it lends it at an address of its own. When the first one has ended, who comes next has its address, looks for the
memory at those of the others, and reads if none of them lives. If it ends while it reads, one that waits reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.memory.lending import Lender, borrow, claim
from ops.memory.node_memory import NodeMemory

log = logging.getLogger(__name__)

_ALIGNED = 64  # bytes to a multiple of which a tensor begins: what vector instructions and a GPU's copies like
_LENGTH_BYTES = 8  # at the beginning of the memory: how long the table of tensors is
_TRIES = 20  # that a lender may end or refuse while it is asked
_PAUSE_S = 0.05
_HOLDERS = 128  # processes of a node that lend what they have mapped; a look at an address without one takes 0.01 ms
_PATIENCE_S = 3600.0  # for a process to read all


class ReadTensor(NamedTuple):
    """A tensor as it was read, and the dtype that it is to have in the node's memory. Where something else is made of
    it there, `made` does it, one tensor at a time, and `shape` is what that has."""

    tensor: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    made: Callable[[Tensor], Tensor] | None = None

    @property
    def there(self) -> tuple[int, ...]:
        """Its shape in the node's memory."""
        return tuple(self.tensor.shape) if self.shape is None else self.shape


ReadWeights = Callable[[], Mapping[str, ReadTensor]]


class NodeWeights:
    """Tensors that processes of this node and user share; nobody writes into them. They live until the last process
    that has asked for them ends."""

    def __init__(self, memory: NodeMemory, read_here: bool) -> None:
        self.read_here = read_here
        self.tensors = _tensors_in(memory)
        self._memory = memory
        self._lender: Lender | None = None

    @staticmethod
    def of(key: str, read: ReadWeights, *, tries: int = _TRIES, patience_s: float = _PATIENCE_S) -> NodeWeights:
        """The tensors of `read`. `key` says all that they depend on. Tensors that are one share memory here, too.
        A process that lends is waited for `patience_s`, and up to `tries` are asked.

        Raises what `read` raises, MemoryError where the node has no room, and ConnectionError where another process
        has the address and does not lend.
        """
        number = _number_of(key)
        for _ in range(tries):
            address = claim(number)
            if address is not None:
                try:
                    memory, read_here = _memory_with_address(key, read)
                except BaseException:
                    address.close()  # who waits reads, or meets the same error
                    raise
                found = NodeWeights(memory, read_here)
                found._lend(address, number)
                return found
            try:
                memory = borrow(number, patience_s)
            except ConnectionError as error:  # it has ended, or does not listen yet
                log.info("weights of this node: %s", error)
                time.sleep(_PAUSE_S)
                continue
            found = NodeWeights(memory, read_here=False)
            for own in _holders(key):
                if (address := claim(own)) is not None:
                    found._lend(address, own)
                    break
            return found
        raise ConnectionError("another process of this node has the address of these weights and does not lend them")

    @property
    def bytes(self) -> Tensor:
        """All of the node's memory: uint8 [bytes]."""
        return torch.frombuffer(self._memory.buffer, dtype=torch.uint8)

    def _lend(self, address: socket.socket, number: int) -> None:
        """Serve the memory to every process that asks for it from now on."""
        self._lender = Lender(self._memory, number, address)


def _number_of(key: str) -> int:
    own = f"{os.getuid()} {key}"  # another user's process, which would lend nothing here, does not have the address
    return int.from_bytes(hashlib.sha256(own.encode()).digest()[:7], "little") + 1


def _holders(key: str) -> Iterator[int]:
    """Numbers of the addresses at which processes lend that have mapped what another one has read."""
    return (_number_of(f"{key} holder {place}") for place in range(_HOLDERS))


def _memory_with_address(key: str, read: ReadWeights) -> tuple[NodeMemory, bool]:
    """Memory of a process that has mapped it and lives, else what is read here now, and whether it was read: for the
    process that has the address of the key."""
    for number in _holders(key):
        with contextlib.suppress(ConnectionError):  # nobody has this address, or who has it ends
            return borrow(number), False
    return _memory_of(read()), True


def _memory_of(found: Mapping[str, ReadTensor]) -> NodeMemory:
    """New memory with a table of the tensors, and the tensors after it, each copied once."""
    table: dict[str, tuple[str, tuple[int, ...], int]] = {}  # name -> dtype, shape, bytes from the end of the table
    offsets: dict[object, int] = {}
    end = 0
    for name, one in found.items():
        tensor, dtype, shape = one.tensor, one.dtype, one.there
        same = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, dtype, shape, one.made
        if same not in offsets:
            offsets[same] = end
            end = _aligned(end + prod(shape) * dtype.itemsize)
        table[name] = str(dtype).removeprefix("torch."), shape, offsets[same]
    text = json.dumps(table).encode()
    memory = NodeMemory.create("weights", _aligned(_LENGTH_BYTES + len(text)) + end)
    memory.buffer[: _LENGTH_BYTES + len(text)] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    copied: set[int] = set()
    for name, view in _tensors_in(memory).items():
        offset = table[name][2]
        if view.numel() and offset not in copied:
            one = found[name]
            view.copy_(one.tensor if one.made is None else one.made(one.tensor))
            copied.add(offset)
    return memory


def _tensors_in(memory: NodeMemory) -> dict[str, Tensor]:
    length = int.from_bytes(memory.buffer[:_LENGTH_BYTES], "little")
    table = json.loads(memory.buffer[_LENGTH_BYTES : _LENGTH_BYTES + length])
    start = _aligned(_LENGTH_BYTES + length)
    found: dict[str, Tensor] = {}
    for name, (kind, shape, offset) in table.items():
        dtype, count = getattr(torch, kind), prod(shape)
        if not count:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        found[name] = torch.frombuffer(memory.buffer, dtype=dtype, count=count, offset=start + offset).view(shape)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
