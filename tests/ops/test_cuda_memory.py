"""Calls of the driver as they arrive there: a driver in Python, called through the C calling convention, by raw
addresses as ctypes calls a library whose prototypes it does not know. What a GPU does is in `app.bench.gpu.ipc`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ops.memory.cuda_memory
from ops.memory.cuda_memory import CudaHostCopy, CudaPeers, _Handle, _taken
from ops.update.peer_sum import PeerSum

ADDRESS = 0x7F12_3456_7000  # beyond 32 bits, which an argument passed as an int would lose
BUSES = [b"0000:1B:00.0", b"0000:43:00.0", b"0000:BB:00.0"]
CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_MAP_FAILED = 2, 205
NVML_NOT_FOUND, P2P_NOT_SUPPORTED = 6, 5


class Library:
    """Functions of a shared library that take what cuda.h or nvml.h say."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def offer(self, name: str, prototype: Any, function: Callable[..., int]) -> None:
        made = prototype(function)
        self._kept.append(made)
        setattr(self, name, ctypes.CDLL(None)._FuncPtr(ctypes.cast(made, c_void_p).value))


class Driver:
    """What both libraries of one GPU's process answer; handles have the letters that `cuIpcGetMemHandle` gave."""

    def __init__(self, bus: int = 0) -> None:
        self.bus, self.fails = bus, 0
        self.taken: list[int] = []
        self.opened: list[tuple[bytes, int]] = []
        self.closed: list[int] = []
        self.freed: list[int] = []
        self.pinned: list[tuple[int, int, int]] = []
        self.pins_no_more = 0  # after this number of calls
        self.unpinned: list[int] = []
        self.unequal: set[frozenset[bytes]] = set()  # pairs of GPUs without atomic additions
        self.asked: list[int] = []
        self.cuda, self.nvml = Library(), Library()
        offer, size = self.cuda.offer, c_size_t
        offer("cuGetErrorName", CFUNCTYPE(c_int, c_int, POINTER(c_char_p)), self._error_name)
        offer("cuMemAlloc_v2", CFUNCTYPE(c_int, POINTER(c_uint64), size), self._alloc)
        offer("cuMemFree_v2", CFUNCTYPE(c_int, c_uint64), lambda address: self._note(self.freed, address))
        offer("cuIpcGetMemHandle", CFUNCTYPE(c_int, POINTER(_Handle), c_uint64), self._handle)
        offer("cuIpcOpenMemHandle_v2", CFUNCTYPE(c_int, POINTER(c_uint64), _Handle, c_uint), self._open)
        offer("cuIpcCloseMemHandle", CFUNCTYPE(c_int, c_uint64), lambda address: self._note(self.closed, address))
        offer("cuCtxGetDevice", CFUNCTYPE(c_int, POINTER(c_int)), self._device)
        offer("cuDeviceGetPCIBusId", CFUNCTYPE(c_int, POINTER(c_char), c_int, c_int), self._bus_id)
        offer("cuMemHostRegister_v2", CFUNCTYPE(c_int, c_uint64, size, c_uint), self._pin)
        offer("cuMemHostUnregister", CFUNCTYPE(c_int, c_uint64), lambda address: self._note(self.unpinned, address))
        offer = self.nvml.offer
        offer("nvmlDeviceGetHandleByPciBusId_v2", CFUNCTYPE(c_int, c_char_p, POINTER(c_void_p)), self._gpu)
        offer("nvmlDeviceGetP2PStatus", CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint, POINTER(c_uint)), self._p2p)

    def _note(self, where: list[int], address: int) -> int:
        where.append(address)
        return self.fails

    def _error_name(self, code: int, word: Any) -> int:
        words = {
            CUDA_ERROR_OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
            CUDA_ERROR_MAP_FAILED: b"CUDA_ERROR_MAP_FAILED",
        }
        word[0] = words[code]
        return 0

    def _alloc(self, address: Any, size: int) -> int:
        self.taken.append(size)
        address[0] = ADDRESS
        return self.fails

    def _handle(self, handle: Any, address: int) -> int:
        ctypes.memmove(handle, f"of {address:x}".encode().ljust(64, b"\0")[::-1], 64)  # zeros in front
        return self.fails

    def _open(self, address: Any, handle: Any, flags: int) -> int:
        self.opened.append((bytes(handle), flags))
        address[0] = ADDRESS
        return self.fails

    def _device(self, device: Any) -> int:
        device[0] = 3
        return 0

    def _bus_id(self, name: Any, length: int, device: int) -> int:
        assert device == 3 and length > len(BUSES[self.bus])
        ctypes.memmove(name, BUSES[self.bus] + b"\0", len(BUSES[self.bus]) + 1)
        return 0

    def _pin(self, address: int, size: int, flags: int) -> int:
        if self.pins_no_more and len(self.pinned) >= self.pins_no_more:
            return CUDA_ERROR_OUT_OF_MEMORY
        self.pinned.append((address, size, flags))
        return self.fails

    def _gpu(self, bus: bytes, device: Any) -> int:
        if bus not in BUSES:
            return NVML_NOT_FOUND
        device[0] = ADDRESS + BUSES.index(bus)
        return 0

    def _p2p(self, one: int, other: int, index: int, status: Any) -> int:
        self.asked.append(index)
        pair = frozenset(BUSES[device - ADDRESS] for device in (one, other))
        status[0] = P2P_NOT_SUPPORTED if pair in self.unequal else 0
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ops.memory.cuda_memory, "_driver", lambda: made.cuda)
    monkeypatch.setattr(ops.memory.cuda_memory, "_nvml", lambda: made.nvml)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    idle = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
    return made


class At:
    """A tensor of a GPU, as far as these calls look at it."""

    def __init__(self, address: int, nbytes: int = 0) -> None:
        self._address, self.nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address


def peers() -> CudaPeers:
    return CudaPeers(torch.device("cuda", 0))


def test_what_one_process_lends_another_opens_by_the_same_64_bytes(driver: Driver) -> None:
    handle = peers().lend(At(ADDRESS))  # type: ignore[arg-type]
    driver.bus = 1
    assert peers().borrow(handle) == ADDRESS
    ((opened, flags),) = driver.opened
    assert opened == handle[:64] == f"of {ADDRESS:x}".encode().ljust(64, b"\0")[::-1]
    assert flags == 1, "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that is allowed"
    peers().give_back(ADDRESS)
    peers().free(At(ADDRESS))  # type: ignore[arg-type]
    assert driver.closed == [ADDRESS] and driver.freed == [ADDRESS]


@pytest.mark.parametrize("num_bytes", [4, 2 << 20, (2 << 20) + 4, 5 << 30])
def test_memory_that_is_lent_shares_no_block_with_other_memory(driver: Driver, num_bytes: int) -> None:
    assert _taken(num_bytes) == ADDRESS
    (taken,) = driver.taken
    assert taken % (2 << 20) == 0 and num_bytes <= taken < num_bytes + (2 << 20)


def test_gpus_whose_link_would_lose_additions_do_not_borrow(driver: Driver) -> None:
    handle = peers().lend(At(ADDRESS))  # type: ignore[arg-type]
    driver.unequal = {frozenset(BUSES[:2])}
    driver.bus = 1
    with pytest.raises(RuntimeError, match=r"GPUs 0000:43:00\.0 and 0000:1B:00\.0 has no atomic additions .* 5\)"):
        peers().borrow(handle)
    assert not driver.opened and driver.asked == [3], "NVML_P2P_CAPS_INDEX_ATOMICS"
    driver.bus = 2
    assert peers().borrow(handle) == ADDRESS
    driver.bus = 0  # two workers on one GPU: nothing to ask
    assert peers().borrow(handle) == ADDRESS and driver.asked == [3, 3]


def test_a_gpu_that_nvml_does_not_know_is_not_believed(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match="nvmlDeviceGetHandleByPciBusId_v2: NVML error 6"):
        peers().borrow(b"x" * 64 + b"0000:FF:00.0")


def test_errors_are_told_by_the_drivers_word(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.fails = CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(MemoryError, match=r"no room for 0\.00 GiB on a GPU: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEM"):
        _taken(1)
    driver.fails = CUDA_ERROR_MAP_FAILED
    with pytest.raises(RuntimeError, match=r"cuMemAlloc_v2: CUDA_ERROR_MAP_FAILED \(205\)"):
        _taken(1)
    with pytest.raises(RuntimeError, match=r"cuIpcOpenMemHandle_v2: CUDA_ERROR_MAP_FAILED \(205\)"):
        peers().borrow(b"x" * 64 + BUSES[0])
    peers().give_back(ADDRESS)
    assert "could not be given back: cuIpcCloseMemHandle: CUDA_ERROR_MAP_FAILED" in caplog.text


def test_the_end_of_a_step_waits_for_the_pushes_and_not_for_an_encode_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append("all of the device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    gpu = CudaPeers(torch.device("cpu"))
    gpu._beside = SimpleNamespace(synchronize=lambda: waited.append("the pushes"))  # type: ignore[assignment]
    PeerSum(8, torch.float32, torch.float32, gpu).flush()
    assert waited == ["the pushes"]


def test_host_memory_is_pinned_in_whole_pages(driver: Driver) -> None:
    copies, memory = CudaHostCopy(torch.device("cuda", 0)), torch.zeros(5000)[1000:3000]
    copies.pin(memory)
    copies.unpin(memory)
    ((address, num_bytes, flags),) = driver.pinned
    assert flags == 1, "CU_MEMHOSTREGISTER_PORTABLE"
    assert address % 4096 == 0 and num_bytes % 4096 == 0
    assert address <= memory.data_ptr() and memory.data_ptr() + memory.nbytes <= address + num_bytes
    assert driver.unpinned == [address]


def test_memory_is_pinned_beside_an_encode_that_goes_on(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise AssertionError("it waits for all streams")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    CudaHostCopy(torch.device("cuda", 0)).pin(torch.zeros(5000))
    assert len(driver.pinned) == 1


def test_no_copy_reads_memory_of_two_registrations(driver: Driver) -> None:
    """The driver may refuse it: 14 billion weights in fp32, or 19 in bf16, are one tensor of host memory each."""
    copies = CudaHostCopy(torch.device("cuda", 0))
    for gib in (36, 53, 213):
        copies.pin(At(ADDRESS + 100, gib << 30))  # type: ignore[arg-type]
    assert len(driver.pinned) == 3


def test_more_than_a_call_takes_is_pinned_in_pieces_side_by_side(driver: Driver) -> None:
    gib = 1 << 30
    copies, memory = CudaHostCopy(torch.device("cuda", 0)), At(ADDRESS + 100, 613 * gib)
    copies.pin(memory)  # type: ignore[arg-type]
    assert max(size for _, size, _ in driver.pinned) < 512 * gib
    ends = [address + size for address, size, _ in driver.pinned]
    assert [address for address, _, _ in driver.pinned[1:]] == ends[:-1], "no gap, nothing twice"
    assert driver.pinned[0][0] <= ADDRESS + 100 and ADDRESS + 100 + 613 * gib <= ends[-1]
    copies.unpin(memory)  # type: ignore[arg-type]
    assert driver.unpinned == [address for address, _, _ in driver.pinned]


def test_where_a_piece_cannot_be_pinned_none_stays_so(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.pins_no_more = 2
    CudaHostCopy(torch.device("cuda", 0)).pin(At(ADDRESS, 613 << 30))  # type: ignore[arg-type]
    assert driver.unpinned == [address for address, _, _ in driver.pinned] and len(driver.unpinned) == 2
    assert "613.0 GiB of host memory are not pinned" in caplog.text
