"""Work of low priority beside the steps of a worker, in turns: clips that show what the model makes by now.

    asides = Asides(modules, device, meter)
    report = asides.turn(task)          # on the task thread, in the gap at the end of the worker's step

An aside runs in a thread of its own, so that its autograd mode is never that of training; it draws no random number
from PyTorch, and stands before no piece under autocast, whose casts of weights all threads share. It stands still but
for its turns, in which the task thread waits: the two never compute at the same time. Only its weights are read
meanwhile.

**Which weights.** Those of the checkpoint that asks for it, its EMA where the run keeps one: a worker holds the trained
parameters of the step it has reached, which may be some steps later, and of the EMA its own shard alone. In a turn the
transformer's trained parameters point at them; after it they point at their own storage again, which nobody has
touched. On a GPU they are copied there for the turn and dropped, so that cascades have the room that they were planned
with. A GPU without room for both has them in the place of the trained ones, which lie in host memory for the turn; the
copies there and back are part of it. So has one on which a piece runs out of memory beside both: that piece is made
again, and the rest of the aside, with its weights in that place (`with_room`). A worker that cannot have its own back
ends: others hold its state.

**How much.** An aside runs piece by piece: the prompt with the first denoising step, each further step, the decode. A
piece begins while it fits, by what its kind took last, into the planned gap and what the worker has saved up: `share`
of the time that has passed, less what earlier turns took beyond their gaps (`Allowance`). Weights are brought only for
a piece that fits after that, which counts, too. So a run pays that share of its time and a piece more, at most. An
aside that waits for others between two pieces (`WAITS`) ends its turn, and has none until it goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from actors.aside_turns import MORE_ROOM, WAITS, AsideWork, NoMoreRoom, TurnReport, TurnTask
from actors.worker.loading import Modules
from actors.worker.meter import Meter, NoMeter, ran_out, release
from ops.units import GIB
from ops.update.flat_vector import trainable

log = logging.getLogger(__name__)

_LATEST = 0.05  # seconds between looks whether a thread that reads its weights is ready

T = TypeVar("T")


def with_room(make: Callable[[], T], before: Callable[[str], None]) -> T:
    """Call `make`. If memory runs out, make room by `before(MORE_ROOM)` and call it once more. Raises what `make`
    raises, also if no more room can be made."""
    try:
        return make()
    except Exception as error:
        if not ran_out(error):
            raise
        release(error)
        try:
            before(MORE_ROOM)
        except NoMoreRoom:
            raise error from None
    return make()


class Allowance:
    """Seconds that a worker may take from its steps.

    allowance.passed(0.4)                       # since the last turn: a share of it is saved
    allowance.allows(0.1, gap_s=0.2, took_s=0)  # whether a piece of 0.1 s may begin when the turn has taken so much
    allowance.took(0.3, gap_s=0.2)              # a turn has ended: what its gap did not hold is paid
    """

    def __init__(self) -> None:
        self.saved_s = 0.0  # below 0: a piece took longer than it was expected to

    def passed(self, seconds: float, share: float) -> None:
        self.saved_s += share * seconds

    def allows(self, piece_s: float, gap_s: float, took_s: float) -> bool:
        """A piece of a kind that has not run is expected to take no time: it begins unless there are debts."""
        gap_left_s = max(0.0, gap_s - took_s)
        saved_s = self.saved_s - max(0.0, took_s - gap_s)
        if saved_s < 0 and not gap_left_s:
            return False
        return piece_s <= gap_left_s + max(saved_s, 0.0)

    def took(self, seconds: float, gap_s: float) -> None:
        self.saved_s -= max(0.0, seconds - gap_s)


class Asides:
    """The asides of one worker, one at a time. All methods are the task thread's."""

    def __init__(
        self,
        modules: Modules,
        device: torch.device,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle` returns when nothing reads the trained parameters any more, as a snapshot's copy does."""
        self._modules, self._device, self._meter, self._clock = modules, device, meter or NoMeter(), clock
        self._settle = settle
        self._beside_host = device.type != "cpu"  # a CPU points at weights where they have been read to
        self._now: AsideThread | None = None
        self._last = TurnReport(aside="")  # of the aside that has ended here last: turns for it may still come
        self._allowance = Allowance()
        self._seen_at = 0.0
        self._expected: dict[str, float] = {}  # kind of piece -> seconds of the last one
        self._bring_s = self._back_s = 0.0  # of the last turn: until weights were there, until its own were back
        self._kept: dict[str, Tensor] = {}  # host memory for the trained parameters of a turn
        self._are_beside = False  # the weights of this turn, with the trained ones, on a device that has room for both

    def turn(self, task: TurnTask) -> TurnReport:
        """Let the task's aside go on for as long as the turn allows, and say what has become of it."""
        if task.aside.name == self._last.aside:
            return self._last
        now = self._clock()
        if self._now is None or self._now.work.name != task.aside.name:
            self.drop()
            self._now, self._seen_at = AsideThread(task.aside, self._modules, self._device), now
        one = self._now
        self._allowance.passed(now - self._seen_at, task.share)
        self._seen_at = now
        began, took_s = self._clock(), 0.0
        if one.is_ready(wait=task.whole) and self._fits(one, task, self._bring_s + self._back_s):
            try:
                with self._lent(one.weights, one.in_place):
                    one.may_have_room = self._are_beside
                    self._pieces(one, task, began)
            except Exception as error:  # the weights found no room after all, or they are other ones
                if self._are_beside and ran_out(error):
                    release(error)
                    one.in_place = True
                else:
                    one.end()
                    one.failure = error
            took_s = self._clock() - began
        if not task.whole:
            self._allowance.took(took_s, task.gap_s)
        return self._report(one, took_s)

    def drop(self) -> None:
        """Forget the aside that is being made."""
        if self._now is not None:
            self._now.end()
            self._now = None
        self._kept.clear()

    def _fits(self, one: AsideThread, task: TurnTask, took_s: float) -> bool:
        """Whether the next piece may begin when the turn has taken so long."""
        if (kind := one.next_piece) is None:
            return False
        return task.whole or self._allowance.allows(self._expected.get(kind, 0.0), task.gap_s, took_s)

    def _pieces(self, one: AsideThread, task: TurnTask, began: float) -> None:
        """Make the pieces that fit into the turn, which began then; one does, as weights have been brought for it."""
        more = True
        while more and (kind := one.next_piece) is not None and not (one.in_place and self._are_beside):
            piece = self._clock()
            one.run_piece()
            now = self._clock()
            self._expected[kind] = now - piece
            more = self._fits(one, task, now - began + self._back_s)

    def _report(self, one: AsideThread, took_s: float) -> TurnReport:
        if not one.has_ended:
            return TurnReport(aside=one.work.name, took_s=took_s)
        why, short = "", False
        if (error := one.failure) is not None:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            short = ran_out(error)
            release(error)
        self._now = None
        self._kept.clear()
        self._last = TurnReport(
            aside=one.work.name, took_s=took_s, ended=True, made=one.made, failed=why, no_room=short
        )
        return self._last

    @contextmanager
    def _lent(self, weights: Mapping[str, Tensor], in_place: bool = False) -> Iterator[None]:
        """The transformer's trained parameters are `weights`, where its own are: on the device or, of blocks that are
        fetched, in host memory. On a device without room for both, or if asked for, in place of them."""
        began, on_device = self._clock(), self._device.type
        parameters = dict(trainable(self._modules.dit))
        size = sum(p.nbytes for p in parameters.values() if p.device.type == on_device)
        in_place = self._beside_host and (in_place or self._is_short_of(size))
        self._are_beside = self._beside_host and not in_place and size > 0
        if in_place:
            self._settle()
        homes: dict[str, Tensor] = {}  # own storage of parameters that point at another
        kept: dict[str, Tensor] = {}  # own values of parameters in whose storage others are
        try:
            for name, parameter in parameters.items():
                if in_place and parameter.device.type == on_device:
                    memory = self._kept.setdefault(name, torch.empty_like(parameter, device="cpu"))
                    kept[name] = memory.copy_(parameter.data)
                    parameter.data.copy_(weights[name])
                else:
                    homes[name] = parameter.data
                    parameter.data = weights[name].to(parameter.device, parameter.dtype)
            self._wait_for_device()
            self._bring_s = self._clock() - began
            yield
        finally:
            began = self._clock()
            for name, home in homes.items():
                parameters[name].data = home
            self._put_back(parameters, kept)
            self._back_s = self._clock() - began

    def _put_back(self, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, Tensor]) -> None:
        """The trained parameters have their own values again. Ends the process where that fails: it would train on, and
        hand over, the weights of a clip."""
        try:
            for name, values in kept.items():
                parameters[name].data.copy_(values)
            self._wait_for_device()
        except Exception:
            log.critical("the trained weights did not come back after an aside: this worker ends", exc_info=True)
            os._exit(1)

    def _wait_for_device(self) -> None:
        """What has been queued there is done, but for a gradient sum: on a stream of its own it waits for the slowest
        worker, and an aside runs in that time."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _is_short_of(self, size: int) -> bool:
        """Whether the device has no room for `size` bytes more."""
        room_gib = self._meter.room_gib()
        return room_gib is not None and size > room_gib * GIB


class AsideThread:
    """One aside under way. It stands still before each of its pieces until `run_piece`."""

    def __init__(self, work: AsideWork, modules: Modules, device: torch.device) -> None:
        self.work = work
        self.weights: Mapping[str, Tensor] = {}
        self.next_piece: str | None = None  # the kind of the piece that it stands before
        self.has_ended = False
        self.made: object = None
        self.failure: BaseException | None = None
        self.may_have_room = False  # its weights take memory that they would not take in place of the trained ones
        self.in_place = False  # that is where they go from the next turn on
        self._modules, self._device = modules, device
        self._change = threading.Condition()
        self._go = self._abandoned = self._waits = False
        self._thread = threading.Thread(target=self._run, name=f"heddle-aside-{work.name}", daemon=True)
        self._thread.start()

    def is_ready(self, wait: bool) -> bool:
        """Whether the aside stands before a piece; otherwise it reads its weights or waits for others, which may take
        minutes, or has failed."""
        with self._change:
            while wait and self.next_piece is None and not self.has_ended:
                self._change.wait(_LATEST)
            return self.next_piece is not None

    def run_piece(self) -> None:
        """Returns when the piece is over."""
        with self._change:
            self.next_piece, self._go, self._waits = None, True, False
            self._change.notify_all()
            while self.next_piece is None and not self._waits and not self.has_ended:
                self._change.wait()

    def end(self) -> None:
        """The aside is not wanted any more: it ends where it stands, or once its weights are read."""
        with self._change:
            self._abandoned = self.has_ended = True
            self.next_piece = None
            self._change.notify_all()

    def _before(self, kind: str) -> None:
        """Called by the work before each piece, in its own thread. Raises NoMoreRoom (`MORE_ROOM`)."""
        if self._device.type == "cuda":
            # What the piece before has queued belongs to it. Not the whole device: the task thread may be capturing a
            # graph, which no mode of CUDA lets live through a wait for all streams.
            torch.cuda.current_stream(self._device).synchronize()
        with self._change:
            if self._abandoned:
                raise _AbandonedAside
            if kind == MORE_ROOM:
                if self.in_place or not self.may_have_room:
                    raise NoMoreRoom
                self.in_place = True
            self._waits = kind in (WAITS, MORE_ROOM)
            self.next_piece = None if self._waits else kind
            self._change.notify_all()
            if self._waits:
                return
            while not self._go and not self._abandoned:
                self._change.wait()
            self._go = False
            if self._abandoned:
                raise _AbandonedAside

    def _run(self) -> None:
        made: object = None
        failure: BaseException | None = None
        try:
            self.weights = self.work.weights(self._modules)
            made = self.work.make(self._modules, self._device, self._before)
        except _AbandonedAside:
            return
        except BaseException as error:  # a panic of a library in Rust is no Exception: whoever waits must hear of it
            failure = error
        with self._change:
            if not self._abandoned:
                self.made, self.failure, self.has_ended, self.next_piece = made, failure, True, None
            self._change.notify_all()


class _AbandonedAside(BaseException):
    """Ends the thread of an aside that is not wanted any more."""
