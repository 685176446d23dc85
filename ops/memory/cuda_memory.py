"""CUDA memory that processes lend each other, and host memory that a GPU reads: calls of the driver, and nothing else.

The driver's own allocations and handles (cuMemAlloc, cuIpcGetMemHandle), not PyTorch's: the allocator cuts its blocks
out of segments, of which with `expandable_segments` no handle can be had in a container. A handle is opened for the
receiver's own device, also where CUDA_VISIBLE_DEVICES hides the sender's, as Ray has it. libcuda.so.1 comes with the
driver and keeps these calls as they are.

A GPU may reach another's memory and still lose additions there: over PCIe there are no atomic additions of floats. CUDA
tells it of two visible devices alone, NVML (libnvidia-ml.so.1, of the driver too) of any two of the node.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ops.kernels.base import backend
from ops.kernels.push.op import push
from ops.units import GIB

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_P2P_ATOMICS = 3  # NVML_P2P_CAPS_INDEX_ATOMICS
_PAGE_BYTES = 4096
# At a time: a copy whose bytes lie in two registrations may be refused (sglang #26691, vLLM #51081), and no tensor is
# as large as this; a call that takes 512 GiB fails (LMCache #5177).
_PIN_BYTES = 256 << 30
_GRANULE_BYTES = 2 << 20  # smaller allocations share a block with others, and a handle is of the whole block


class DriverError(RuntimeError):
    """An error of the driver, with its word for what went wrong and its number."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _RawMemory:
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
        """As `PeerMemory.allocate`, fp32 alone. Raises RuntimeError without triton, whose kernel adds."""
        if dtype != torch.float32 or not backend.has_triton():
            raise RuntimeError(f"a sum of {dtype} in memory of other GPUs needs fp32 and triton")
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._over = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.wait()
        torch.cuda.empty_cache()  # what the allocator keeps for later is no room for the driver
        num_bytes = elements * dtype.itemsize
        memory = torch.as_tensor(_RawMemory(_taken(num_bytes), num_bytes), device=self.device).view(dtype).zero_()
        self.wait()  # before another process learns of it
        return memory

    def free(self, memory: Tensor) -> None:
        """Nobody uses it, here or elsewhere."""
        _call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))

    def lend(self, memory: Tensor) -> bytes:
        """As `PeerMemory.lend`: the driver's handle, and after it which GPU this is."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
        return bytes(handle) + _bus_id()

    def borrow(self, handle: bytes) -> int:
        """As `PeerMemory.borrow`."""
        _check_additions(_bus_id(), handle[_HANDLE_BYTES:])
        address = ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def give_back(self, address: int) -> None:
        """Give memory back, also that of a process that has died: what the driver says then changes nothing."""
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
            self._beside.synchronize()

    def wait(self) -> None:
        """As `PeerMemory.wait`. It also makes the device's context this thread's, which the driver's calls need."""
        torch.cuda.synchronize(self.device)


class CudaHostCopy:
    """`HostCopy` of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """As `HostCopy.to_host`: in the current stream, into pinned memory that PyTorch keeps for the next copies."""
        copy = self.room(gradient)
        copy.copy_(gradient, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter adds, and spins on no core
        arrived.record(torch.cuda.current_stream(self.device))
        return copy, arrived.synchronize

    def room(self, like: Tensor) -> Tensor:
        """As `HostCopy.room`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        """As `pin`."""
        pin(memory, self.device)

    def unpin(self, memory: Tensor) -> None:
        """As `unpin`."""
        unpin(memory, self.device)


class CudaBlockCopies:
    """`BlockCopies` of one GPU, in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def pin(self, memory: Tensor) -> None:
        """As `pin`."""
        pin(memory, self.device)

    def unpin(self, memory: Tensor) -> None:
        """As `unpin`."""
        unpin(memory, self.device)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], turn: int) -> None:
        """As `BlockCopies.copy`."""
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside), torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._arrived[turn].record(self._beside)

    def arrived(self, turn: int) -> None:
        """As `BlockCopies.arrived`."""
        torch.cuda.current_stream(self.device).wait_event(self._arrived[turn])

    def wait(self) -> None:
        """As `BlockCopies.wait`. An encode that goes on beside the end of a step is not waited for."""
        self._beside.synchronize()


def pin(memory: Tensor, device: torch.device) -> None:
    """The device reads this host memory itself from now on: whole pages. Without it copies go through a buffer of the
    driver."""
    torch.cuda.current_stream(device).synchronize()  # the driver's calls need a context; an encode beside it goes on
    pinned: list[int] = []
    try:
        for address, num_bytes in _pieces(memory):
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _REGISTER_PORTABLE)
            pinned.append(address)
    except DriverError as error:
        log.warning("%.1f GiB of host memory are not pinned, and copies take longer: %s", memory.nbytes / GIB, error)
        _unpin(pinned)


def unpin(memory: Tensor, device: torch.device) -> None:
    """Where it was pinned. Nothing that was launched here reads it any more."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log.debug("the device can no longer be waited for: %s", error)
    _unpin([address for address, _ in _pieces(memory)])


def _unpin(addresses: Sequence[int]) -> None:
    try:
        for address in addresses:
            _call("cuMemHostUnregister", ctypes.c_void_p(address))
    except DriverError as error:
        log.debug("host memory was not pinned: %s", error)


def _pieces(memory: Tensor) -> list[tuple[int, int]]:
    """Address and bytes of the pages that the tensor touches, cut for calls that take no more than 512 GiB."""
    first = memory.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
    last = -(-(memory.data_ptr() + memory.nbytes) // _PAGE_BYTES) * _PAGE_BYTES
    return [(start, min(last, start + _PIN_BYTES) - start) for start in range(first, last, _PIN_BYTES)]


def _taken(num_bytes: int) -> int:
    """Address of new memory in a block of its own. Raises MemoryError without room for it."""
    address, whole = ctypes.c_uint64(), -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
    try:
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
    except DriverError as error:
        if error.code != _OUT_OF_MEMORY:
            raise
        raise MemoryError(f"no room for {whole / GIB:.2f} GiB on a GPU: {error}") from None
    return address.value


def _bus_id() -> bytes:
    """The PCI address of this thread's GPU: its name in every process of the node."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    _call("cuCtxGetDevice", ctypes.byref(device))
    _call("cuDeviceGetPCIBusId", name, ctypes.c_int(len(name)), device)
    return name.value


def _check_additions(one: bytes, other: bytes) -> None:
    """Raises RuntimeError where additions of one GPU in memory of the other could be lost, OSError without NVML."""
    if one == other:
        return
    status = ctypes.c_uint()
    _ask("nvmlDeviceGetP2PStatus", _gpu(one), _gpu(other), ctypes.c_uint(_P2P_ATOMICS), ctypes.byref(status))
    if status.value:
        raise RuntimeError(
            f"the link between the GPUs {one.decode()} and {other.decode()} has no atomic additions (NVML's "
            f"P2P status {status.value})"
        )


def _gpu(bus_id: bytes) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    _ask("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(bus_id), ctypes.byref(device))
    return device


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if result := library.nvmlInit_v2():
        raise RuntimeError(f"nvmlInit_v2: {result}")
    return library


def _call(name: str, *arguments: object) -> None:
    """Raises DriverError."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        word = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(word))
        raise DriverError(f"{name}: {(word.value or b'unknown').decode()} ({result})", result)


def _ask(name: str, *arguments: object) -> None:
    """Raises RuntimeError with NVML's number for what went wrong."""
    if result := getattr(_nvml(), name)(*arguments):
        raise RuntimeError(f"{name}: NVML error {result}")
