"""CUDA memory that processes lend each other, and host memory that a GPU reads: calls of the driver, and nothing else.

The driver's own allocations and handles (cuMemAlloc, cuIpcGetMemHandle), not PyTorch's: the allocator cuts its blocks
out of segments, of which with `expandable_segments` no handle can be had in a container. A handle is opened for the
receiver's own device, also where CUDA_VISIBLE_DEVICES hides the sender's, as Ray has it. libcuda.so.1 comes with the
driver and keeps these calls as they are.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.push.function import push

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1
_PAGE_BYTES = 4096


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _Raw:
    """What `torch.as_tensor` makes a tensor of, without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaPeers:
    """`PeerMemory` of one GPU. Its calls come from one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._beside: torch.cuda.Stream | None = None
        self._over: list[torch.cuda.Event] = []  # of each staging buffer's last push

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """fp32 alone. Raises RuntimeError without triton, whose kernel adds, and without room."""
        if dtype != torch.float32 or not backend.has_triton():
            raise RuntimeError(f"a sum of {dtype} in memory of other GPUs needs fp32 and triton")
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._over = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.wait()
        torch.cuda.empty_cache()  # what the allocator keeps for later is no room for the driver
        address, num_bytes = ctypes.c_uint64(), elements * dtype.itemsize
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        memory = torch.as_tensor(_Raw(address.value, num_bytes), device=self.device).view(dtype).zero_()
        self.wait()  # before another process is told of it
        return memory

    def free(self, memory: Tensor) -> None:
        """Nobody uses it, here or elsewhere."""
        _call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))

    def lend(self, memory: Tensor) -> bytes:
        """As `PeerMemory.lend`."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
        return bytes(handle)

    def borrow(self, handle: bytes) -> int:
        """As `PeerMemory.borrow`."""
        address = ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def give_back(self, address: int) -> None:
        """Of a process that has died, too: what the driver says then changes nothing."""
        try:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        except RuntimeError as error:
            log.warning("memory of another worker could not be given back: %s", error)

    def stage(self, turn: int) -> None:
        """As `PeerMemory.stage`."""
        torch.cuda.current_stream(self.device).wait_event(self._over[turn])

    def push(self, staged: Tensor, address: int, turn: int) -> None:
        """As `PeerMemory.push`, in a stream of its own."""
        assert self._beside is not None, "allocate comes first"
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            push(staged, address)
            self._over[turn].record(self._beside)

    def pushed(self) -> None:
        """As `PeerMemory.pushed`."""
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)

    def wait(self) -> None:
        """As `PeerMemory.wait`. It also makes the device's context this thread's, which the driver's calls need."""
        torch.cuda.synchronize(self.device)


class CudaHostCopy:
    """`HostCopy` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """In the current stream, into pinned memory that PyTorch keeps for the next copies."""
        copy = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        copy.copy_(gradient, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.device))
        return copy, arrived.synchronize

    def pin(self, memory: Tensor) -> None:
        """Whole pages; without it copies go through a buffer of the driver."""
        torch.cuda.synchronize(self.device)
        address, num_bytes = _pages(memory)
        try:
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _REGISTER_PORTABLE)
        except RuntimeError as error:
            log.warning("%.1f GiB of the node's gradient are not pinned: %s", num_bytes / 2**30, error)

    def unpin(self, memory: Tensor) -> None:
        """Where it was pinned."""
        try:
            _call("cuMemHostUnregister", ctypes.c_void_p(_pages(memory)[0]))
        except RuntimeError as error:
            log.debug("the node's gradient was not pinned: %s", error)


def _pages(memory: Tensor) -> tuple[int, int]:
    """Address and bytes of the pages that the tensor touches."""
    first = memory.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
    last = -(-(memory.data_ptr() + memory.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
    return first, last - first


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Raises RuntimeError with the driver's word for what went wrong."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        word = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(word))
        raise RuntimeError(f"{name}: {(word.value or b'unknown').decode()} ({result})")
