"""Copies of host tensors to a device: `ops/packed/uploads.py`, and what layouts send with it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from threading import Thread
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.packed import uploads
from ops.packed.packing import Layout, Sequence
from ops.packed.uploads import LargeUploads, expect, upload, upload_all, upload_numbers
from ops.spatial_temporal.choice import SlicingRule
from ops.spatial_temporal.packed import Rest
from ops.spatial_temporal.slicing import WHOLE_LAYERS
from ops.upload_room import BLOCK, SMALL, most_blocks, uploads_gib

DTYPES = (torch.int64, torch.int32, torch.float64, torch.bfloat16, torch.bool, torch.uint8)
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@pytest.mark.parametrize("small", [SMALL, 0])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 99))
def test_tensors_that_travel_together_arrive_as_they_were(
    small: int, kinds: list[tuple[tuple[int, ...], torch.dtype]], seed: int
) -> None:
    """Also as a large upload, in pieces of 96 bytes, where a part may be cut and a piece hold several."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape, dtype in kinds]
    sent = [one.mT if one.dim() > 1 else one for one in drawn]
    with patch.multiple(uploads, SMALL=small, BLOCK=96), patch.dict(uploads.large_by_device, clear=True):
        got = uploads._together(sent, torch.device("cpu"))
    assert len(got) == len(sent)
    for one, other in zip(got, sent):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.storage_offset() * one.element_size() % 256 == 0, "kernels read whole words"


def test_what_is_held_twice_travels_once_and_numbers_keep_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def together(tensors: list[torch.Tensor], device: object) -> list[torch.Tensor]:
        sent.append(len(tensors))
        return uploads._together(tensors, torch.device("cpu"))

    monkeypatch.setattr(uploads, "upload", together)
    one, other = torch.arange(3), torch.arange(4)
    found = upload_all({"a": one, "b": [other, one], "c": 5}, "meta")
    assert sent == [2] and found["c"] == 5
    assert found["a"] is found["b"][1] and torch.equal(found["a"], one) and torch.equal(found["b"][0], other)  # type: ignore[index]
    levels, weights = upload_numbers([[0.5, 0.25], [1.0]], torch.float64, "meta")
    assert levels.tolist() == [0.5, 0.25] and weights.tolist() == [1.0] and weights.dtype == torch.float64


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert upload([tensor], "cpu")[0] is tensor


class LateDevice:
    """Makes the copies that are queued, in their order, when a test says so or a host waits. Reads the staged memory no
    earlier."""

    def __init__(self) -> None:
        self.queued: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.asked, self.made, self.waits, self.most_under_way = 0, 0, 0, 0

    def copy(self, there: torch.Tensor, staged: torch.Tensor) -> LateMark:
        self.queued.append((there, staged))
        self.asked += 1
        self.most_under_way = max(self.most_under_way, sum(len(one) for _, one in self.queued))
        return LateMark(self, self.asked)

    def make(self, count: int) -> None:
        for _ in range(min(count, len(self.queued))):
            there, staged = self.queued.popleft()
            there.copy_(staged)
            self.made += 1


class LateMark:
    """After one of its copies."""

    def __init__(self, device: LateDevice, place: int) -> None:
        self.device, self.place = device, place

    def query(self) -> bool:
        return self.device.made >= self.place

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits += 1
            self.device.make(self.place - self.device.made)


@pytest.fixture
def small_blocks() -> Iterator[list[int]]:
    """Blocks of 64 bytes; sizes of those that are made."""
    made: list[int] = []

    def staged(size: int, device: torch.device) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    with patch.multiple(uploads, BLOCK=64, staging=staged):
        yield made


def counted_bytes(size: int, first: int) -> torch.Tensor:
    return (torch.arange(size) + first).to(torch.uint8)


def sent(large: LargeUploads, size: int, first: int) -> torch.Tensor:
    return large.send([(0, counted_bytes(size, first))], size)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 400), st.integers(0, 9)), min_size=1, max_size=12))
def test_however_far_a_host_is_ahead_what_is_under_way_stays_within_its_blocks(
    most: int, steps: list[tuple[int, int]]
) -> None:
    """Uploads of any size, larger than all blocks too, on a device that comes on a little after each of them."""
    device, made = LateDevice(), []

    def staged(size: int, device: torch.device) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    with patch.multiple(uploads, BLOCK=64, staging=staged):
        large = LargeUploads(torch.device("cpu"), device.copy, most)
        there = []
        for first, (size, come) in enumerate(steps):
            there.append(sent(large, size, first))
            device.make(come)
    assert set(made) == {64} and len(made) <= most, "blocks of one size, which nothing rounds up"
    assert device.most_under_way <= 64 * most
    device.make(len(device.queued))
    for first, ((size, _), got) in enumerate(zip(steps, there, strict=True)):
        assert torch.equal(got, counted_bytes(size, first)), "memory was written before the device had read it"


def test_a_look_whether_a_block_is_read_keeps_no_other_thread_out(
    small_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own does, the heartbeat's thread among them, for as long as the driver loads a kernel."""
    asked: list[int] = []

    def not_ready(handle: ctypes.c_void_p) -> int:
        asked.append(handle.value or 0)
        return 600

    class Event:
        cuda_event = 7

        def query(self) -> bool:
            pytest.fail("PyTorch was asked")

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr("ops.waiting._driver", lambda: SimpleNamespace(cuEventQuery=not_ready))
    large = LargeUploads(torch.device("cpu"), lambda there, staged: Event(), 2)
    for first in range(3):
        sent(large, 60, first)
    assert set(asked) == {7}


def test_two_of_the_largest_uploads_wait_for_nothing_and_the_third_for_the_first(small_blocks: list[int]) -> None:
    device, largest = LateDevice(), 300
    pieces = -(-largest // 64)
    large = LargeUploads(torch.device("cpu"), device.copy, 2 * pieces)
    there = [sent(large, largest, first) for first in range(2)]
    assert (device.waits, device.made) == (0, 0) and len(small_blocks) == 2 * pieces
    there.append(sent(large, largest, 2))
    assert (device.waits, device.made) == (pieces, pieces), "the second is whole ahead of the device"
    device.make(2 * pieces)
    assert all(torch.equal(got, counted_bytes(largest, first)) for first, got in enumerate(there))


def test_blocks_that_the_device_has_read_are_used_again_and_small_pieces_share_one(small_blocks: list[int]) -> None:
    device = LateDevice()
    large = LargeUploads(torch.device("cpu"), device.copy, 8)
    for first in range(20):
        sent(large, 60, first)
        device.make(1)
    assert len(small_blocks) == 1, "never more than are under way"
    for first in range(6):
        sent(large, 20, first)
    assert len(small_blocks) == 2 and device.waits == 0, "three of 20 bytes in each"


def test_threads_that_upload_at_once_do_not_mix_their_bytes(small_blocks: list[int]) -> None:
    """An encode that outlasts its step has a thread of its own."""
    device = LateDevice()
    large = LargeUploads(torch.device("cpu"), device.copy, 2)
    found: dict[int, list[torch.Tensor]] = {first: [] for first in range(4)}
    threads = [Thread(target=lambda n=n: found[n].extend(sent(large, 1000, n) for _ in range(5))) for n in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.make(len(device.queued))
    assert len(small_blocks) == 2
    assert all(torch.equal(got, counted_bytes(1000, n)) for n, several in found.items() for got in several)


def test_clips_of_any_number_take_the_pinned_memory_that_is_counted_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each took a block of its own, rounded up to a power of two, until the device had read it."""
    taken: list[int] = []
    device, place, largest = LateDevice(), torch.device("meta"), 70 << 20

    def staged(size: int, device: torch.device) -> torch.Tensor:
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(uploads, "staging", staged)
    monkeypatch.setattr(uploads, "queue_copy", device.copy, raising=False)
    clip = torch.zeros(1, largest, dtype=torch.uint8)
    with patch.dict(uploads.large_by_device, clear=True):
        expect(place, largest)
        for _ in range(6):
            upload([clip], place)
    assert sum(taken) == most_blocks(largest) * BLOCK == uploads_gib(largest) * 2**30 and device.waits > 0
    assert all(size & (size - 1) == 0 for size in taken)
    upload([clip[0, :SMALL]], place)
    assert taken[-1] == SMALL, "a small one is a copy of its own"


MIXED = [Sequence((2, 4, 4), 5, clean_frames=1), Sequence((1, 3, 3), 0), Sequence((3, 2, 4), 7, image_tokens=2)]


@pytest.mark.parametrize("degree", [1, 3])
def test_parts_sent_beforehand_are_those_that_follow_one_by_one(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of a device keeps values here, so that they can be compared."""
    copies: list[int] = []

    def together(tensors: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
        if torch.device(device).type == "cpu":  # the layout in host memory
            return tensors
        copies.append(len(tensors))
        return uploads._together(tensors, torch.device("cpu"))

    properties = [name for name in vars(Layout) if type(vars(Layout)[name]).__name__ == "cached_property"]
    every = [name for name in properties if not name.startswith("_")]
    families = ((longest_text, (3,)), (Rest.of, (SlicingRule(slicing=WHOLE_LAYERS), 4)))
    assert len(every) > 12 and Layout(MIXED).asked == frozenset()
    for rank in range(degree):
        plain = Layout(MIXED, degree, rank)
        wanted = {name: getattr(plain, name) for name in every}
        made = [plain.made(make, *settings) for make, settings in families]
        assert plain.asked == frozenset([*every, *families])
        with monkeypatch.context() as patch:
            patch.setattr(uploads, "upload", together)
            sent = Layout(MIXED, degree, rank, "meta", beforehand=plain.asked)
        assert sent.asked == frozenset(every), "a family's parts that nobody has used yet are not asked for again"
        for name, part in wanted.items():
            assert_same(getattr(sent, name), part)
        for (make, values), part in zip(families, made, strict=True):
            assert_same(sent.made(make, *values), part)
        assert sent.asked == plain.asked
    assert len(copies) == degree, "one for all parts of a layout, those of families included"


def longest_text(layout: Layout, times: int) -> torch.Tensor:
    """A part that a family makes, as one tensor."""
    assert layout.device.type == "cpu"
    return torch.tensor([times * max(layout.text_lengths)])


def assert_same(one: object, other: object) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(other, list | tuple):
        assert isinstance(one, list | tuple) and len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif is_dataclass(other):
        for field in fields(other):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif not hasattr(other, "shape"):
        assert one == other
