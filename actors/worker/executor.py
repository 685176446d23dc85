"""Runs cascades on one device: admits them, DiT forward and backward, end of step. No Ray inside.

Encode cascades are in `actors.worker.encoding`; how all are measured is in `actors.worker.measure`. The worker actor
feeds them; tests run them in threads or alone. Every member of a bag calls the same method with its own view of the
same cascade, in the same order; partial gradients add up in the parameters until `finish`, whose one sum over all
workers is the exact gradient of the step (whatever the plan was).

On CUDA a cascade's call returns when all of it is queued: the host prepares and queues the next one while the device
runs it. What was measured is read when the device has come to its end (`actors.worker.work_done`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from actors.messages import (
    CascadeShape,
    CascadeTask,
    FinishTask,
    MemoryExceeded,
    OutOfMemory,
    SampleId,
    Span,
    StaleGeneration,
    StepSample,
    SumStart,
    shapes_of,
)
from actors.worker.attention_room import AttentionRoom
from actors.worker.handoff import EncodeResult, EncodeStore, HostCopies, gather_inputs
from actors.worker.loading import Modules
from actors.worker.measure import CascadeMeasure
from actors.worker.meter import Meter, NoMeter, freed, ran_out
from actors.worker.outlasting import OutlastingEncode
from actors.worker.passes import clean_frames, compute_dtype, conditions_of, pass_settings
from actors.worker.run_clock import own_clock
from actors.worker.stopwatch import stopwatch_of
from actors.worker.work_done import DeviceFailure, FinishedStep, Launched, WorkDone
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.flow.train_pass import PassClip, sequence_losses, train_pass
from ops.models.experts import by_graphs, code_made, keep_attention, pass_timing, slice_by, transformers
from ops.models.first_frame import FirstFrame
from ops.models.text_pair import split
from ops.packed.packing import FamilyPart, Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.shards import ShardState
from ops.update.engine import PhaseListener, StepIncomplete, Sync
from ops.update.own_state import ShardBanks

if TYPE_CHECKING:
    from actors.config import TrainConfig

_AHEAD_S = 2.0  # of planned work that is queued on the device; no launch takes the host as long
_LOOK_S = 0.005


class Executor:
    """The modules of one worker, its encode results, and its share of the step's gradient."""

    def __init__(
        self,
        modules: Modules,
        sync: Sync,
        train: TrainConfig,
        device: torch.device,
        on_phase: PhaseListener = lambda phase: None,
        copies: HostCopies | None = None,
        meter: Meter | None = None,
        name: str = "",
        ahead_s: float = _AHEAD_S,
    ) -> None:
        """`on_phase` is called with what the worker does now. With `copies`, on CUDA, published results are copied
        while the next cascades run, and taken from there. `name` is the worker's. The host queues at most `ahead_s` of
        planned work after the cascade that the device is in."""
        self.modules, self.sync, self.train, self.device = modules, sync, train, device
        self.on_phase, self.copies = on_phase, copies
        self.meter, self.name, self._ahead_s = meter or NoMeter(), name, ahead_s
        self.frame = FirstFrame.of(modules.config)
        self.attention = AttentionRoom.of(
            modules.config.dit, train.memory.attention, train.element_bytes, device.type == "cuda"
        )
        self.store = EncodeStore()
        self.generation = -1
        self.groups: Groups | None = None
        self.num_workers = 0  # of the last generation that it entered
        self.broken: str | None = None
        self._exceeded: MemoryExceeded | None = None  # what broke it, if memory ran out
        self.work = WorkDone()
        self.watch = stopwatch_of(device)
        self._seen: set[CascadeShape] = set()  # what has run here since the process began
        self._asked: frozenset[str | FamilyPart] = frozenset()  # parts of layouts that the transformer uses
        self._outlasting: OutlastingEncode | None = None
        self._stream: torch.cuda.Stream | None = None  # of what runs beside an encode

    # -- generations ---------------------------------------------------------------------------------------------------

    def form(
        self,
        generation: int,
        groups: Groups,
        shards: Sequence[ShardState] | None,
        banks: ShardBanks | None = None,
    ) -> None:
        """Enter a generation: leave the old groups, take this rank's range of the training state, forget half-done
        steps."""
        self.leave()
        self.groups, self.num_workers = groups, len(groups.world)
        self.sync.form(groups.world_group(), shards, banks)
        self.broken = self._exceeded = None
        self.sync.begin_step()
        groups.clock.take()  # what forming waited for is of no cascade
        self.generation = generation  # last: after a failure to get here no task of it is admitted

    def leave(self) -> None:
        """Close the groups and drop everything that belongs to unfinished steps."""
        if self.groups is not None:
            self.groups.close()
            if self._outlasting is not None:
                self._outlasting.abandon()
                self._outlasting = None
            self.groups = None
            self.sync.leave()
        self.store.clear()
        if self.copies is not None:
            self.copies.clear()
        self.work = WorkDone()
        self.generation = -1

    def check_device(self) -> None:
        """Returns when nothing is left of what was queued. Raises RuntimeError when the device has failed, which it has
        for good in this process."""
        self.watch.settle()

    def admit(self, generation: int) -> None:
        """Raise StaleGeneration unless a task of this generation may run."""
        if generation != self.generation:
            raise StaleGeneration(f"task of generation {generation}; this worker is in {self.generation}.")
        if self.groups is not None and (why := self.groups.ended):  # what is left in its queue would hold it up
            raise StaleGeneration(f"task of generation {generation}: {why}.")
        if self._exceeded is not None:
            raise OutOfMemory(self._exceeded)
        if self.broken is not None:
            raise StaleGeneration(f"an earlier task of generation {generation} failed here: {self.broken}")

    def ready(self, task: CascadeTask) -> None:
        """Make the encoder of a task that may run."""
        if self.modules.lacks(task.module):
            self.admit(task.generation)
            self.modules.ready(task.module)

    def _formed(self) -> Groups:
        assert self.groups is not None, "form() comes before the first task"
        return self.groups

    def _wait_as(self, task: CascadeTask | FinishTask) -> None:
        if self.groups is not None and task.patience is not None:
            self.groups.allow(task.patience)

    def leave_bag(self, bag: tuple[int, ...]) -> None:
        """Close a bag, when its collectives have ended here; its other members do the same."""
        groups = self._formed()
        try:
            if len(bag) > 1:
                self.watch.settle()
            groups.leave(bag)
        except Exception as error:
            self.broken = f"leaving bag {bag}: {error!r}"
            raise

    # -- cascades ------------------------------------------------------------------------------------------------------

    @contextmanager
    def cascade(self, task: CascadeTask) -> Iterator[CascadeMeasure]:
        """A context for the run of a cascade here. It refuses a stale one, measures it, starts the gradient sum and
        leaves the bag where the task says so. One that fails breaks this executor.

        Raises StaleGeneration, and OutOfMemory in the place of an error that says so.
        """
        outlasting = self.own_outlasting()
        if outlasting is None:
            self._come_near(task.generation)
            self._wait_as(task)
        if task.start_sum == SumStart.BEFORE and self.device.type != "cuda":
            self.sync.start_sum()  # an NCCL kernel would take SMs from the encodes until the others join
        codes = code_made(self.modules.dit)
        measure = CascadeMeasure(
            task,
            self._formed(),
            self.watch,
            self.meter,
            self.device,
            self.on_phase if outlasting is None else _unseen,
            gate=None if outlasting is None else outlasting.pass_gate,
        )
        try:
            yield measure
        except BaseException as error:
            self._failed(task, measure, error)
            raise
        need_gib = measure.stop()
        kept = task.module == "dit" and self.attention.keeps
        if task.module == "dit":
            need_gib = self.attention.end(need_gib)
        measure.worked()
        leaves = task.leave and outlasting is None
        if task.start_sum == SumStart.DURING or (task.start_sum == SumStart.AFTER and not leaves):
            self.sync.start_sum()
        shapes = shapes_of(task.module, task.pieces, len(task.bag))
        first_here = not shapes <= self._seen or code_made(self.modules.dit) != codes
        self._seen |= shapes
        launched = measure.end(need_gib, first_here=first_here, kept_attention=kept)
        if outlasting is not None:
            outlasting.launched = launched
            return
        self.add_cascade(launched)
        if leaves:
            self.leave_bag(task.bag)
            if task.start_sum == SumStart.AFTER:  # NCCL ends a communicator when the device has ended, so also this sum
                self.sync.start_sum()

    def _come_near(self, generation: int) -> None:
        """Returns when at most `ahead_s` of planned work is queued after the cascade that the device runs. Queued work
        cannot be cancelled, and a worker whose generation has ended answers only when its device has finished it.
        Raises as `admit`, and DeviceFailure."""
        while True:
            self.admit(generation)
            with self._blamed():
                self.work.read()
            if sum(one.predicted_s for one in self.work.under_way[1:]) <= self._ahead_s:
                return
            time.sleep(_LOOK_S)

    def _failed(self, task: CascadeTask, measure: CascadeMeasure, error: BaseException) -> None:
        """Marks this executor broken. Raises OutOfMemory if memory ran out, unless the cascade was keeping attention
        outputs: then keeping them is switched off, and the cascade is run again without."""
        taken_gib = measure.stop()
        self.broken = f"{task.name}: {error!r}{self._others(error)}"
        if task.module == "dit":
            if self.attention.keeps and ran_out(error):
                self.attention.give_up()
                return
            self.attention.failed()
        if ran_out(error):
            self._exceeded = MemoryExceeded(
                worker=self.name,
                step=task.step,
                name=task.name,
                module=task.module,
                degree=len(task.bag),
                pieces=task.pieces,
                peak_gib=taken_gib or 0.0,
                room_gib=measure.room_gib or 0.0,
            )
            raise OutOfMemory(self._exceeded)

    def _others(self, error: BaseException) -> str:
        """CUDA errors are asynchronous: they surface in the next call, even one from Triton or cuBLAS. Returns, and
        adds to the error, a note that names earlier, unfinished cascades that may be the real cause; "" if there are
        none."""
        of_device = isinstance(error, torch.AcceleratorError) or (
            isinstance(error, RuntimeError) and "CUDA" in str(error)
        )
        before = self.work.under_way if of_device and not ran_out(error) else ()
        if not before:
            return ""
        others = f"; or it is a failure of {', '.join(one.name for one in before)}, not known to have ended there"
        error.add_note(others.removeprefix("; "))
        return others

    def begin_outlasting(self, task: CascadeTask, encode: Callable[[], list[EncodeResult]]) -> None:
        """Begin an encode that may outlast its step. Nothing but the end of that step, `finish`, may follow before
        `end_outlasting`. `encode` is a call of `Encoding` with this task."""
        self.admit(task.generation)
        self.modules.ready(task.module)  # here, as the bag is connected here: the thread may do neither
        self._wait_as(task)
        self._formed().get(task.bag)

        def run() -> list[EncodeResult]:
            with freed():
                return encode()

        self._outlasting = OutlastingEncode(task, run)
        self._outlasting.start()

    def end_outlasting(self, task: CascadeTask) -> list[EncodeResult]:
        """Wait for it. From here on it has run here, as part of the step after the one it outlasted."""
        self.admit(task.generation)
        self._wait_as(task)
        one = self._outlasting
        if one is None or one.task.cascade != task.cascade:
            raise StepIncomplete(f"{task.name} was not begun here; its step is computed again.")
        try:
            results = one.end()
        finally:
            self._outlasting = None
        for result in one.kept:
            self.store.keep(task.module, result)
        assert one.launched is not None, "an encode that has ended was measured"
        begun = one.launched.span

        def planned_now() -> Span:
            return replace(begun(), planned_start_s=task.planned_start_s, planned_end_s=task.planned_end_s)

        self.add_cascade(replace(one.launched, span=planned_now))
        if task.leave:
            self.leave_bag(task.bag)
        return results

    @contextmanager
    def beside_encodes(self) -> Iterator[None]:
        """A context for the end of a step: on CUDA it does not wait for an encode that goes on. `finish` waits for the
        cascades of the step."""
        if self._outlasting is None or self.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        usual = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()
        except BaseException:
            with suppress(RuntimeError):  # of the device, which the error tells already
                usual.wait_stream(self._stream)  # an update of weights may be queued that the next generation writes
            raise

    def add_cascade(self, launched: Launched) -> None:
        """A cascade has been run here. Raises DeviceFailure when the device has failed in it or in one before."""
        with self._blamed():
            self.work.add_cascade(launched)

    def settle(self) -> None:
        """Returns when the device has ended all cascades. Raises DeviceFailure when it has failed."""
        with self._blamed():
            self.work.read(wait=True)

    def ended_at(self) -> float | None:
        """When the device ended the last cascade, in unix seconds; None while it has work. Raises DeviceFailure when it
        has failed."""
        with self._blamed():
            return self.work.ended_at

    def on_device(self) -> Launched | None:
        """The cascade that the device is in, of those whose calls have returned. Any thread may ask."""
        try:
            return next((one for one in self.work.under_way if not one.has_ended()), None)
        except RuntimeError:  # of the device: its next call says so
            return None

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except DeviceFailure as error:
            self.broken = str(error)
            raise

    def check_of(self, task: CascadeTask) -> Callable[[], None]:
        """What raises when the results of an encode that has ended on the device may be anything: its bag's collectives
        were cut short, or that is not known any more."""
        groups = self.groups
        return _whole if groups is None or len(task.bag) == 1 else partial(groups.check, task.name)

    def own_outlasting(self) -> OutlastingEncode | None:
        """The encode whose thread calls."""
        one = self._outlasting
        return one if one is not None and one.is_own() else None

    def dit(
        self, task: CascadeTask, fetched: dict[tuple[str, SampleId], EncodeResult], fetch_s: float | None = None
    ) -> None:
        """Forward and backward of one packed cascade; its share of the step's gradient stays in the parameters.

        `fetched` came through the object store, `fetch_s` after its producer's end, if that could be measured.
        """
        with self.cascade(task) as measure:
            group, modules = measure.meet(), self.modules
            measure.phase("handoff")
            inputs = gather_inputs(
                task.samples,
                task.sources,
                self.store,
                fetched,
                group,
                self.device,
                self.widths,
                compute_dtype(modules.dit),
                tail=self.frame.tail,
            )
            measure.received(inputs.bytes_received, inputs.bytes_fetched, fetch_s)
            texts, pooled = split(inputs.text, modules.config.text)
            layout = self._layout(task.samples, texts, group)
            clips = [
                PassClip(rows=rows, text=text, key=s.key, weight=s.weight * s.loss_weight if good else 0.0)
                for s, rows, text, good in zip(task.samples, inputs.rows, texts, inputs.ok, strict=True)
            ]
            slice_by(modules.dit, task.rates)
            keep_attention(modules.dit, self.attention.begin(layout, measure.room_gib))
            (expert,) = {s.expert for s in task.samples}
            transformer = transformers(modules.dit)[expert]
            done = train_pass(
                transformer,
                clips,
                layout,
                group,
                pass_settings(modules, self.train, expert, self.train.seed, task.step),
                conditions_of(self.frame, inputs.tails, pooled),
                phase=measure.phase,
                before_backward=self.sync.watch_backward if task.start_sum == SumStart.DURING else lambda: None,
            )
            measure.tell_seconds(pass_timing(transformer))
            measure.counts_memory = not by_graphs(transformer)  # whose own lies in a pool that is not counted
            self._asked = layout.asked
            losses = sequence_losses(done.predicted, done.target, layout, done.weights)
            self.work.add_losses(task, inputs.ok, done.loss, losses, counts=group.rank == 0)

    def finish(self, task: FinishTask) -> FinishedStep:
        """One sum over all workers, update, new parameters everywhere, and a copy of the state where the task asks for
        it. Every worker of the generation calls it.

        Raises StepIncomplete, before the sum, when a cascade that the task names has not run here.
        """
        self.admit(task.generation)
        self._wait_as(task)
        marks: dict[str, float] = {}
        try:
            self.settle()
            self.watch.settle()
            began = time.perf_counter()
            phase_of = _PhaseClock(marks, self.on_phase)
            self.work.check_complete(task)
            loss, weight, bad = self.work.take_losses(task.step)
            weights = self.work.take_expert_weights(task.step, len(self.modules.config.dit.experts))
            result = self.sync.finish_step(
                task.step,
                loss,
                weight,
                1.0,
                phase_of,
                bad_weight=bad,
                part_weights=weights,
                export=task.export,
            )
            if self.groups is not None:
                self.groups.check(f"finish of step {task.step}")
        except Exception as error:
            self.broken = f"finish of step {task.step}: {error!r}"
            raise
        phase_of("done")
        exposed_s = self.groups.clock.take().seconds if self.groups is not None else 0.0
        self.sync.begin_step()
        self.store.drop_before(task.step + 1)
        copy_s = marks.pop("snapshot", 0.0)  # of a snapshot, not of the end of a step, which plans learn
        ended = own_clock.now()
        started = ended - (time.perf_counter() - began)  # right also if the clock was set meanwhile
        self.work.add_span(
            Span(
                name=f"finish s{task.step}",
                module="finish",
                cascade="",
                step=task.step,
                start=started,
                end=ended - copy_s,
                degree=self.num_workers,
                phases=marks,
                exposed_s=exposed_s,
            )
        )
        return self.work.finished(result, copy_s)

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def widths(self) -> tuple[int, int]:
        """(P, E): width of a row of the VAE's results and of a text row."""
        return self.frame.width, self.modules.config.text.width

    def _layout(self, samples: Sequence[StepSample], texts: Sequence[Tensor], group: Group) -> Layout:
        """How these samples lie in one packed sequence."""
        flow, images, config = self.train.flow, self.frame.image_tokens, self.modules.config
        clean = [clean_frames(self.frame, flow, self.train.seed, s.step, s.key, s.grid) for s in samples]
        return Layout(
            [
                PackedSequence(s.grid, text.shape[0], images, frames, s.frame_rate, flow.by_frame)
                for s, text, frames in zip(samples, texts, clean, strict=True)
            ],
            group.size,
            group.rank,
            self.device,
            text_recurs=config.text.is_padded,
            beforehand=self._asked,
            in_halves=config.dit.in_halves,
        )


def _whole() -> None:
    """An encode of one worker: no other one could cut its results short."""


def _unseen(phase: str) -> None:
    """The worker is at the end of a step, and says so."""


class _PhaseClock:
    """Seconds between calls, booked on the phase that ended."""

    def __init__(self, marks: dict[str, float], then: PhaseListener) -> None:
        self._marks, self._then, self._current, self._since = marks, then, "", time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        if self._current:
            self._marks[self._current] = self._marks.get(self._current, 0.0) + now - self._since
        self._current, self._since = phase, now
        self._then(phase)
