"""Measures a cascade: when its bag has met, seconds of its phases, of work and of waiting, bytes that came, memory.

    measure = CascadeMeasure(task, groups, watch, meter, device, on_phase)   # it begins
    group = measure.meet()
    measure.phase("forward")
    ...                                                                      # queue its work
    need_gib = measure.stop()
    measure.worked()
    launched = measure.end(need_gib)     # its span has times when the device has come to its end

It decides nothing: what follows from a cascade that ran, or failed, is the executor's (`Executor.cascade`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from actors.messages import CascadeTask, Span
from actors.worker.meter import Meter, ran_out, release
from actors.worker.run_clock import own_clock
from actors.worker.stopwatch import Stopwatch
from actors.worker.work_done import Launched
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.update.engine import PhaseListener
from ops.waiting import Waited


def in_halves(
    encode: Callable[[range], list[Tensor]], samples: range, ran_short: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """`encode` of all samples at once or, where memory runs out, which `ran_short` hears, of half of them at a time.
    Encoders keep nothing of a call that failed, and a sample's result does not depend on its batch."""
    if not len(samples):
        return []
    try:
        return encode(samples)
    except RuntimeError as error:
        if not ran_out(error) or len(samples) == 1:
            raise
        failed = error
    release(failed)
    ran_short()
    middle = len(samples) // 2
    return [*in_halves(encode, samples[:middle], ran_short), *in_halves(encode, samples[middle:], ran_short)]


class CascadeMeasure:
    """Times one cascade, and counts its memory."""

    def __init__(
        self,
        task: CascadeTask,
        groups: Groups,
        watch: Stopwatch,
        meter: Meter,
        device: torch.device,
        on_phase: PhaseListener,
        gate: Callable[[], None] | None,
    ) -> None:
        """The cascade begins. With a `gate` it may outlast its step: before it exchanges anything it calls `gate`,
        which returns when the step has ended (`actors.worker.outlasting`)."""
        self.counts_memory = True
        self._task, self._groups, self._watch, self._meter, self._gate = task, groups, watch, meter, gate
        self._cuda, self._device = device.type == "cuda", device
        self._moved: tuple[int, int] | None = None  # bytes of its inputs through the group and the object store
        self._fetch_s: float | None = None
        self._exceeded_gib: float | None = None
        self._tell: Callable[[float], None] = _untold
        self._held_s = 0.0  # at the gate
        self._since = own_clock.now()
        self._phases = _PhaseMarks(watch, on_phase)
        self.room_gib = meter.start()
        self._came = self._met = self._phase_began = self._gathering = self._gathered = self._worked = watch.mark()

    # While it goes on ------------------------------------------------------------------------------------------------

    def meet(self) -> Group:
        """The group of the cascade's bag, once all members have come (on CUDA the stream waits, the host goes on). That
        wait is due to what the members ran before, so it does not count for this cascade."""
        if self._gate is not None:
            return self._groups.get(self._task.bag)
        if len(self._task.bag) > 1:
            self._phases("wait")  # also for the others to connect
        group = self._groups.get(self._task.bag)
        if group.size > 1:
            group.barrier(self._device)
            self._met = self._watch.mark()
            if not self._cuda:
                group.clock.take()  # what was waited until here is `wait_s`
        return group

    def phase(self, name: str) -> None:
        """A phase begins, and the one before ends."""
        if self._gate is not None and name == "handoff":
            self._hold(self._gate)
        self._phase_began = self._phases(name)

    def _hold(self, gate: Callable[[], None]) -> None:
        """Until the end of the step that the encode outlasts."""
        self._watch.settle()
        self._phases("wait")
        began = time.perf_counter()
        gate()
        self._held_s += time.perf_counter() - began

    def received(self, through_group: int, through_store: int, fetch_s: float | None) -> None:
        """Book bytes gathered since the last phase began, through the bag's group and through the object store. The
        latter took `fetch_s`; None: not measured."""
        self._moved, self._fetch_s = (through_group, through_store), fetch_s
        self._gathering, self._gathered = self._phase_began, self._watch.mark()

    def tell_seconds(self, tell: Callable[[float], None]) -> None:
        """Have `tell` called with the seconds of the cascade's work once they are known."""
        self._tell = tell

    def in_parts(self, encode: Callable[[range], list[Tensor]], samples: range) -> list[Tensor]:
        """As `in_halves`."""
        return in_halves(encode, samples, self._note_exceeded)

    def _note_exceeded(self) -> None:
        """Memory ran out: what was taken until then was too much."""
        taken = self._meter.stop() or 0.0
        self._exceeded_gib = min(taken, self._exceeded_gib or taken)
        self._meter.start()

    # Its end ---------------------------------------------------------------------------------------------------------

    def stop(self) -> float | None:
        """Stop counting memory. Returns the GiB that the cascade took, or None where memory is not counted."""
        taken_gib = self._meter.stop()
        return taken_gib if self.counts_memory else None

    def worked(self) -> None:
        """Its work is queued. What comes now, such as the start of a gradient sum, waits for other workers."""
        self._worked = self._watch.mark()

    def end(self, need_gib: float | None, *, first_here: bool = False, kept_attention: bool = False) -> Launched:
        """The cascade ends here, before the copies of published results. What this returns keeps none of the inputs."""
        ended = self._phases("idle")
        waited, self._gate, task = self._groups.clock.take(), None, self._task
        span = Span(
            name=task.name,
            module=task.module,
            cascade=task.cascade,
            step=task.step,
            start=0.0,
            end=0.0,
            batch=len(task.samples),
            degree=len(task.bag),
            pieces=task.pieces,
            planned_start_s=task.planned_start_s,
            planned_end_s=task.planned_end_s,
            need_gib=need_gib,
            exceeded_gib=self._exceeded_gib,
            bag=task.bag,
            first_here=first_here,
            kept_attention=kept_attention,
        )
        return Launched(
            name=task.name,
            cascade=task.cascade,
            step=task.step,
            since=self._since,
            predicted_s=task.planned_end_s - task.planned_start_s,
            has_ended=partial(self._watch.has_come, ended),
            span=partial(self._timed, span, ended, waited),
        )

    def _timed(self, span: Span, ended: object, waited: Waited) -> Span:
        """The span with its times, when the cascade has ended."""
        watch = self._watch
        watch.wait(ended)
        wait_s, exposed_s = watch.seconds(self._came, self._met) + self._held_s, waited.seconds
        if self._cuda:
            exposed_s = max(0.0, exposed_s - wait_s)
        work_s = watch.seconds(self._met, self._worked) - self._held_s
        self._tell(work_s)
        end = watch.unix(ended)
        timed = replace(
            span,
            start=end - watch.seconds(self._came, ended),
            end=end,
            phases=self._phases.seconds(),
            work_s=work_s,
            wait_s=wait_s,
            exposed_s=exposed_s,
        )
        if self._moved is None:
            return timed
        gathered_s = watch.seconds(self._gathering, self._gathered) if any(self._moved) else 0.0
        received, fetched = self._moved
        return replace(
            timed,
            handoff_bytes=received + fetched,
            handoff_s=gathered_s + (self._fetch_s or 0.0),
            fetched_bytes=fetched,
            fetch_s=self._fetch_s if fetched else None,
        )


def _untold(seconds: float) -> None:
    """Nobody asks how long it took."""


class _PhaseMarks:
    """Seconds of a cascade's phases, by marks where they begin."""

    def __init__(self, watch: Stopwatch, then: PhaseListener) -> None:
        self._watch, self._then = watch, then
        self._begun: list[tuple[str, object]] = []

    def __call__(self, phase: str) -> object:
        mark = self._watch.mark()
        self._begun.append((phase, mark))
        self._then(phase)
        return mark

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase but the one that goes on, when that has begun."""
        found: dict[str, float] = {}
        for (phase, began), (_, ended) in pairwise(self._begun):
            found[phase] = found.get(phase, 0.0) + self._watch.seconds(began, ended)
        return found
