"""Asides have their turns, take no more than their share, and leave nothing of themselves in training."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from actors.aside_turns import MORE_ROOM, WAITS, TurnReport, TurnTask
from actors.worker import aside
from actors.worker.aside import Allowance, Asides, AsideThread, with_room
from tests.actors.chaos import DeviceAsides

CPU = torch.device("cpu")


@given(
    share=st.floats(0, 0.5),
    turns=st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 1), st.floats(0.01, 3)), min_size=10, max_size=40),
)
def test_a_run_pays_its_share_and_a_piece_more_at_most(share: float, turns: list[tuple[float, float, float]]) -> None:
    """`turns` are (seconds since the last one, its gap, seconds of each of its pieces)."""
    allowance, paid, longest, passed = Allowance(), 0.0, 0.0, 0.0
    for passed_s, gap_s, piece_s in turns:
        allowance.passed(passed_s, share)
        passed += passed_s
        took, pieces = 0.0, 0
        while pieces < 5 and allowance.allows(piece_s, gap_s, took):
            took, pieces = took + piece_s, pieces + 1
        allowance.took(took, gap_s)
        paid += max(0.0, took - gap_s)
        longest = max(longest, piece_s)
    assert paid <= share * passed + 1e-9, "a piece begins only when it fits"
    assert longest == 0 or allowance.saved_s >= -1e-9


def test_a_piece_that_was_longer_than_expected_is_a_debt() -> None:
    allowance = Allowance()
    assert allowance.allows(0.0, 0.0, 0.0)
    allowance.took(1.0, gap_s=0.2)
    assert not allowance.allows(0.0, 0.0, 0.0) and allowance.allows(0.3, gap_s=0.3, took_s=0.0)
    allowance.passed(10.0, 0.05)
    assert not allowance.allows(0.0, 0.0, 0.0)
    allowance.passed(20.0, 0.05)
    assert allowance.allows(0.6, 0.0, 0.0) and not allowance.allows(0.8, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """An aside of `pieces` pieces, each of which adds up the weights that it sees, under another autograd mode."""

    name: str = "a"
    pieces: int = 3
    fault: Exception | None = None
    tick: Callable[[], None] = lambda: None

    def weights(self, modules: Any) -> Mapping[str, Tensor]:
        return {name: torch.full_like(p, 2.0) for name, p in modules.dit.named_parameters()}

    def make(self, modules: Any, device: torch.device, before: Callable[[str], None]) -> list[float]:
        found = []
        with torch.no_grad():
            for _ in range(self.pieces):
                before("piece")
                self.tick()
                found.append(float(modules.dit.weight.detach().sum()))
                if self.fault is not None:
                    raise self.fault
        return found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def second(self) -> None:
        self.now += 1.0


def asides(clock: Callable[[], float] = time.monotonic, meter: Any = None) -> tuple[Asides, nn.Linear]:
    dit = nn.Linear(2, 2, bias=False)
    nn.init.constant_(dit.weight, 0.5)
    return DeviceAsides(SimpleNamespace(dit=dit), CPU, meter, clock=clock), dit


def task(work: Any, **told: Any) -> TurnTask:
    return TurnTask(**{"generation": 1, "step": 3, "aside": work, "gap_s": 0.0, "share": 0.0, **told})


def begun(of: Asides, work: Any) -> None:
    """Returns when its weights are read."""
    of._allowance.saved_s = -1.0  # it may stand before its first piece already
    of.turn(task(work))
    assert of._now is not None and of._now.is_ready(wait=True)


def test_what_is_made_sees_its_own_weights_and_training_sees_none_of_it() -> None:
    of, dit = asides()
    weight, home, state = dit.weight, dit.weight.data_ptr(), torch.random.get_rng_state()
    report = of.turn(task(Steps(), whole=True))
    assert report == TurnReport(aside="a", took_s=report.took_s, ended=True, made=[8.0] * 3)
    assert dit.weight is weight and weight.data_ptr() == home and weight.tolist() == [[0.5, 0.5]] * 2
    assert torch.is_grad_enabled() and torch.equal(torch.random.get_rng_state(), state)
    assert of.turn(task(Steps())) is report, "a turn that was asked for earlier changes nothing"


def test_a_turn_ends_where_the_next_piece_does_not_fit() -> None:
    clock = Clock()
    of, dit = asides(clock)
    work = Steps(pieces=6, tick=clock.second)
    begun(of, work)
    of._allowance.saved_s = 0.0
    first = of.turn(task(work, gap_s=2.5))  # of unknown length, then of 1 s: two fit
    assert (first.took_s, first.ended) == (2.0, False) and float(dit.weight.detach().sum()) == 2.0
    assert of.turn(task(work)).took_s == 0.0, "no gap, nothing saved"
    clock.now += 20.0
    assert of.turn(task(work, share=0.05, gap_s=1.0)).took_s == 2.0, "the gap, and the share of 20 s"
    clock.now += 20.0
    assert of.turn(task(work, share=0.05)).took_s == 1.0
    last = of.turn(task(work, gap_s=9.0))
    assert (last.took_s, last.made) == (1.0, [8.0] * 6)


class Panic(BaseException):
    """As a library written in Rust raises it: no Exception."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["weights", "piece"])
def test_an_aside_that_ends_in_a_panic_is_told_and_holds_nobody_up(where: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Panics(Steps):
        def weights(self, modules: Any) -> Mapping[str, Tensor]:
            if where == "weights":
                raise Panic("index out of bounds")
            return super().weights(modules)

    def tick() -> None:
        raise Panic("index out of bounds")

    of, _ = asides()
    report = of.turn(task(Panics(tick=tick), whole=True))
    assert (report.ended, report.failed) == (True, "index out of bounds")
    assert of.turn(task(Steps(name="b"), whole=True)).made == [8.0] * 3


class Brought(dict[str, Tensor]):
    """Weights that take a second to be copied to a device."""

    def __init__(self, weights: Mapping[str, Tensor], tick: Callable[[], None]) -> None:
        super().__init__(weights)
        self.tick, self.times = tick, 0

    def __getitem__(self, name: str) -> Tensor:
        self.tick()
        self.times += 1
        return super().__getitem__(name)


def test_weights_are_brought_for_a_piece_that_fits_and_their_copy_counts() -> None:
    clock = Clock()
    of, _ = asides(clock)
    work = Steps(pieces=4, tick=clock.second)
    begun(of, work)
    assert of._now is not None
    of._now.weights = brought = Brought(of._now.weights, clock.second)
    of._allowance.saved_s = 0.0
    assert of.turn(task(work, gap_s=3.5)).took_s == 3.0, "a second for the weights, and two for pieces"
    assert of.turn(task(work, gap_s=1.5)).took_s == 0.0 and brought.times == 1, "nothing fits after them"
    assert of.turn(task(work, gap_s=2.0)).took_s == 2.0 and brought.times == 2
    clock.now += 40.0
    assert of.turn(task(work, share=0.05)).took_s == 2.0 and brought.times == 3


def test_a_failure_is_told_and_the_next_aside_is_made() -> None:
    of, dit = asides()
    failed = of.turn(task(Steps(fault=OSError("no such file")), whole=True))
    assert (failed.ended, failed.failed, failed.no_room) == (True, "no such file", False)
    short = of.turn(task(Steps(name="b", fault=RuntimeError("CUDA out of memory")), whole=True))
    assert short.no_room and float(dit.weight.detach().sum()) == 2.0
    assert of.turn(task(Steps(name="c", pieces=1), whole=True)).made == [8.0]


def test_an_aside_that_is_dropped_ends_where_it_stands() -> None:
    of, _ = asides()
    begun(of, Steps())
    thread = of._now._thread if of._now else None
    assert of.turn(task(Steps(name="b"), whole=True)).made == [8.0] * 3
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


@dataclass(frozen=True, kw_only=True)
class Decoded(Steps):
    """An aside that waits between two pieces until something is decoded."""

    decoded: threading.Event

    def make(self, modules: Any, device: torch.device, before: Callable[[str], None]) -> list[float]:
        before("piece")
        first = float(modules.dit.weight.detach().sum())
        before(WAITS)
        assert self.decoded.wait(60)
        before("piece")
        return [first, float(modules.dit.weight.detach().sum())]


def test_a_worker_does_not_wait_for_what_an_aside_waits_for() -> None:
    of, dit = asides()
    work = Decoded(decoded=threading.Event())
    begun(of, work)
    of._allowance.saved_s = 9.0
    for _ in range(3):
        report = of.turn(task(work, gap_s=9.0))  # returns: its first piece is over
        assert not report.ended and report.took_s < 9.0 and float(dit.weight.detach().sum()) == 2.0
    assert of._now is not None and of._now.next_piece is None
    work.decoded.set()
    assert of.turn(task(work, whole=True)).made == [8.0, 8.0]


def test_an_aside_never_waits_for_a_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to its first piece while the task thread trains, and may be capturing a CUDA graph: that ends by a
    cudaDeviceSynchronize of any thread, in all modes of capture (CUDA's rules of it; NVIDIA/TensorRT#2888)."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append("device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    modules: Any = SimpleNamespace(dit=nn.Linear(2, 2, bias=False))
    one = AsideThread(Steps(pieces=2), modules, torch.device("cuda", 0))
    while one.is_ready(wait=True):
        one.run_piece()
    assert one.failure is None and waited == ["stream"] * 2
    of, _ = asides()
    of._device = torch.device("cuda", 0)
    of._wait_for_device()  # its weights have come, beside a gradient sum that waits for the slowest worker
    assert waited == ["stream"] * 3


class Short:
    """A meter of a device that has no room beside training."""

    room = 0.0

    def room_gib(self) -> float:
        return self.room


@dataclass(frozen=True, kw_only=True)
class Storage(Steps):
    """Notes where the weights lie that a piece sees."""

    seen: list[int] = field(default_factory=list)

    def make(self, modules: Any, device: torch.device, before: Callable[[str], None]) -> list[float]:
        def noting(kind: str) -> None:
            before(kind)
            self.seen.append(modules.dit.weight.data_ptr())

        return super().make(modules, device, noting)


def trained() -> Tensor:
    return torch.tensor([[0.1, -0.2], [float("nan"), 1e-30]])


def test_without_room_the_weights_of_a_clip_are_written_in_place_of_the_trained_ones() -> None:
    """The bits of these are the same again after every turn, also when there is room in between."""
    clock = Clock()
    of, dit = asides(clock, Short())
    with torch.no_grad():
        dit.weight.copy_(trained())
    home, work = dit.weight.data_ptr(), Storage(tick=clock.second)
    begun(of, work)
    for room in (0.0, 1.0, 0.0):
        of._meter.room = room  # type: ignore[attr-defined]
        of._allowance.saved_s = 0.0
        of._expected.clear()
        report = of.turn(task(work, gap_s=0.5))
        assert dit.weight.data_ptr() == home
        assert torch.equal(dit.weight.view(torch.int32), trained().view(torch.int32))
    assert report.made == [8.0] * 3 and work.seen[0] == work.seen[2] == home != work.seen[1]
    assert not of._kept, "its host memory is free"


def test_weights_that_break_off_in_the_middle_of_a_swap_leave_the_trained_ones() -> None:
    """The first parameter has been written over when the second one fails; a turn before has left its own copies."""

    class Half(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "1.weight":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__getitem__(name)

    dit = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    of = DeviceAsides(SimpleNamespace(dit=dit), CPU, Short())
    of._kept = {f"{n}.weight": torch.full((2, 2), -7.0) for n in (0, 1)}
    before = [p.detach().clone() for p in dit.parameters()]
    with pytest.raises(torch.OutOfMemoryError), of._lent(Half({f"{n}.weight": torch.ones(2, 2) for n in (0, 1)})):
        raise AssertionError("there are no weights to work with")
    assert all(torch.equal(one, p) for one, p in zip(before, dit.parameters(), strict=True))


def test_a_swap_waits_for_who_reads_the_trained_weights_and_both_its_copies_count() -> None:
    clock, settled = Clock(), []

    class SlowCopies(DeviceAsides):
        def _wait_for_device(self) -> None:
            clock.second()  # for the weights, then for the trained ones

    dit = nn.Linear(2, 2, bias=False)
    nn.init.constant_(dit.weight, 0.5)
    modules: Any = SimpleNamespace(dit=dit)
    of = SlowCopies(modules, CPU, Short(), clock=clock, settle=lambda: settled.append(float(dit.weight.detach()[0, 0])))
    work = Steps(pieces=4, tick=clock.second)
    begun(of, work)
    of._allowance.saved_s = 0.0
    assert of.turn(task(work, gap_s=1e-9)).took_s == 3.0, "of unknown length, so one piece begins"
    assert settled == [0.5], "before anything was written"
    of._allowance.saved_s = 0.0
    assert of.turn(task(work, gap_s=2.9)).took_s == 0.0 and len(settled) == 1
    assert of.turn(task(work, gap_s=3.0)).took_s == 3.0
    last = of.turn(task(work, gap_s=4.0))
    assert (last.took_s, last.made) == (4.0, [8.0] * 4) and settled == [0.5] * 3


def test_a_worker_that_cannot_have_its_own_weights_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on with those of a clip, and hand them over as its state."""
    dit, ended = nn.Linear(2, 2, bias=False), list[int]()
    of = DeviceAsides(SimpleNamespace(dit=dit), CPU, Short())
    monkeypatch.setattr(aside.os, "_exit", ended.append)
    with of._lent({"weight": torch.ones(2, 2)}):
        of._kept["weight"].resize_(3, 3)  # what the copy back reads is torn
        assert not ended
    assert ended == [1]


def test_a_cpu_never_writes_over_weights_which_others_of_its_node_may_read() -> None:
    dit = nn.Linear(2, 2, bias=False)
    home = dit.weight.data_ptr()
    with Asides(SimpleNamespace(dit=dit), CPU, Short())._lent({"weight": torch.ones(2, 2)}):  # type: ignore[arg-type]
        assert dit.weight.data_ptr() != home
    assert dit.weight.data_ptr() == home


class Fails(dict[str, Tensor]):
    """Weights that are read, and then find no room on the device."""

    def __getitem__(self, name: str) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


class NoCopy(Steps):
    def weights(self, modules: Any) -> Mapping[str, Tensor]:
        return Fails()


def test_weights_that_find_no_room_after_all_are_told_and_let_go_of() -> None:
    of, dit = asides()
    assert not of.turn(task(NoCopy(), whole=True)).ended, "they may find some in place of the trained ones"
    assert float(dit.weight.detach().sum()) == 2.0
    report = of.turn(task(NoCopy(), whole=True))
    assert report.ended and report.no_room and of._now is None
    assert float(dit.weight.detach().sum()) == 2.0
    assert of.turn(task(Steps(name="b"), whole=True)).made == [8.0] * 3


@dataclass(frozen=True, kw_only=True)
class Large(Storage):
    """Runs out of memory in its second piece, unless its weights are in the place of the trained ones, at `home`; with
    `home` 0 wherever they are."""

    home: int

    def make(self, modules: Any, device: torch.device, before: Callable[[str], None]) -> list[float]:
        return with_room(lambda: self._made(modules, before), before)

    def _made(self, modules: Any, before: Callable[[str], None]) -> list[float]:
        found = []
        for number in range(self.pieces):
            before("piece")
            self.tick()
            self.seen.append(modules.dit.weight.data_ptr())
            if number == 1 and self.seen[-1] != self.home:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
            found.append(float(modules.dit.weight.detach().sum()))
        return found


def is_trained(dit: nn.Linear) -> bool:
    return torch.equal(dit.weight.view(torch.int32), trained().view(torch.int32))


def made_in_turns(of: Asides, work: Any) -> TurnReport:
    """Every turn leaves the trained weights as they were, bit for bit, where they were."""
    dit = of._modules.dit
    with torch.no_grad():
        dit.weight.copy_(trained())
    home = dit.weight.data_ptr()
    for _ in range(9):
        report = of.turn(task(work, whole=True))
        assert dit.weight.data_ptr() == home and is_trained(dit)
        if report.ended:
            return report
        assert of._now is not None and of._now.is_ready(wait=True)
    raise AssertionError("it does not end")


def test_a_piece_that_runs_out_of_memory_is_made_again_in_place_of_the_trained_weights() -> None:
    of, dit = asides()
    home = dit.weight.data_ptr()
    work = Large(home=home)
    report = made_in_turns(of, work)
    assert report.made == [8.0] * 3 and not report.failed
    assert home not in work.seen[:2] and work.seen[2:] == [home] * 3, "it begins again there, and stays"
    beside = Large(name="b", home=home, pieces=1)
    made_in_turns(of, beside)
    assert home not in beside.seen, "the next aside has the room that it finds"


def test_memory_that_runs_out_again_fails_and_leaves_the_trained_weights() -> None:
    of, _ = asides()
    work = Large(home=0)
    report = made_in_turns(of, work)
    assert report.no_room and report.failed.startswith("CUDA out of memory. Tried to allocate 3.00 GiB")
    assert len(work.seen) == 4 and not of._kept, "two pieces beside, two in place"


@pytest.mark.parametrize("why", ["are in place already", "belong to a host", "are all fetched"])
def test_memory_that_runs_out_fails_at_once_where_no_swap_gives_any_back(why: str) -> None:
    of, _ = asides(meter=Short() if why == "are in place already" else None)
    of._beside_host = why != "belong to a host"
    if why == "are all fetched":
        of._device = torch.device("meta")  # no parameter is on the device
    work = Large(home=0)
    assert made_in_turns(of, work).no_room and len(work.seen) == 2


def test_a_retry_takes_no_piece_of_the_turn_in_which_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may stand before the next piece by then, and the turn have time left: its weights are beside."""
    run_piece = AsideThread.run_piece

    def slowly(self: AsideThread) -> None:
        run_piece(self)
        self.is_ready(wait=True)

    monkeypatch.setattr(AsideThread, "run_piece", slowly)
    clock = Clock()
    of, dit = asides(clock)
    work = Large(home=dit.weight.data_ptr(), tick=clock.second)
    begun(of, work)
    of._allowance.saved_s = 0.0
    assert of.turn(task(work, gap_s=99.0)).took_s == 2.0
    report = of.turn(task(work, gap_s=99.0))
    assert report.made == [8.0] * 3 and report.took_s == 3.0


def test_what_ran_out_of_memory_is_free_before_it_is_tried_again() -> None:
    class Tensors:
        """As a clip's, in a frame of the piece."""

    left: list[weakref.ref[Tensors]] = []

    def make() -> int:
        held = Tensors()
        left.append(weakref.ref(held))
        if len(left) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 3

    def before(piece: str) -> None:
        assert piece == MORE_ROOM and left[0]() is None

    assert with_room(make, before) == 3


def test_an_error_that_is_not_of_memory_is_not_tried_again() -> None:
    def make() -> None:
        raise ValueError("the caption is no text")

    with pytest.raises(ValueError, match="no text"):
        with_room(make, lambda piece: pytest.fail("nothing is asked for"))
