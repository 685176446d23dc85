"""The engine on Ray Data: microbatches are read and decoded by tasks anywhere in the cluster, ahead of the training.

    from_items(jobs of a window of microbatches) -> map_batches(decode one of them) -> references, in plan order

One block is one microbatch. Whoever makes the engine (the feeder actor) owns the blocks; consumers get references and
see the pixels in shared memory. Ray Data holds no position worth saving: the plan is the position, and the engine may
start at any step. This is the only module that imports ray.data. What it relies on beyond Ray's stable interface, each
held by a test: `iter_internal_ref_bundles`, `BlockEntry.ref`, `target_max_block_size=None`, and what stands in
`data.engines.executions`.

How far decoding runs ahead is decided here and not by Ray Data's backpressure, whose scheduling loop spins on a core
for as long as finished output waits: every decode task asks a gate before it begins, and finished blocks are taken at
once. A waiting task costs nothing; Ray gives its CPU away while it waits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypedDict

import pyarrow as pa
import ray

# A thread that fetches what blocks are like delays the start of the next task by a tick of the scheduling loop or two:
# 15 % of the time of decoding. Read when ray.data is imported.
os.environ.setdefault("RAY_DATA_METADATA_PREFETCH_ON_THREAD", "0")

import ray.data
from ray.data import ExecutionResources

from data.buckets import BatchSize
from data.config import DataConfig, EngineConfig
from data.dataset.dataset import Dataset
from data.dataset.order_token import DataToken
from data.decode import decode_job
from data.engines.blocks import fault_from_json, fault_to_json, to_block
from data.engines.child import decode_isolated
from data.engines.executions import ExecutionNames, await_executions, call_it, forget_ended, remove_log
from data.engines.gate import Gate, GateHandle, RemoteMethod
from data.engines.machine import DecodeNode, asks, number_of, settled
from data.engines.placement import beside_me, elsewhere, kill
from data.errors import DataIOError
from data.ledger import LedgerRecord
from data.types import DataItem, DecodeJob, NeedsPixels
from ops.geometry import Geometry

log = logging.getLogger(__name__)

_AT_A_TIME = 100_000  # calls of a gate, of which two windows of decode tasks wait; Ray alone serves 1,000

StepShare = tuple[list["ray.ObjectRef[object]"], list[str]]  # of a step: references to its blocks, faults found in them


class JobColumns(TypedDict):
    """A block of decode work, column by column, of one row."""

    number: Sequence[int]
    job: Sequence[DecodeJob]


class ShareHandle(Protocol):
    """A further feeder as the first one sees it."""

    @property
    def start(self) -> RemoteMethod[[DataToken, Sequence[str]], None]: ...
    @property
    def take(self) -> RemoteMethod[[int], StepShare]: ...
    @property
    def release(self) -> RemoteMethod[[int], None]: ...


def decode_block(rows: JobColumns, gate: GateHandle, clip_timeout_s: float) -> pa.Table:
    """The decode task: one job in, one block out. A data fault never leaves as an exception."""
    (number,), (job,) = rows["number"], rows["job"]
    admitted = ray.get(gate.begin.remote(int(number), job.item))
    if admitted is None:
        return pa.table({"item": pa.array([], pa.string())})
    earlier, pixels = admitted
    job = replace(job, pixels=pixels)
    try:
        if earlier:
            batch = decode_isolated(job, clip_timeout_s)
        else:
            with ends_within(clip_timeout_s * len(job.clips)):
                batch = decode_job(job)
    except (DataIOError, ValueError) as error:  # ValueError: a decoder that cannot be imported
        ray.get(gate.fail.remote(error.with_traceback(None)))
        raise
    told = gate.end.remote(job.item, [fault_to_json(fault) for fault in batch.faults])
    if batch.faults:  # the one that gets the block asks the gate for them
        ray.get(told)
    return to_block(batch)


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Ends this process if it is still inside after these seconds; Ray then starts the task again. The watchdog is a C
    thread: a dead-locked libav may hold the interpreter lock."""
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class RayEngine:
    """See `data.engines.engine.Engine`. `batches` returns references to blocks, which `as_batch` in blocks.py reads.

    Above some 80 microbatches per second one Ray Data execution is not enough: with `data.engine.feeders` above 1
    further actors each run an engine for their share of the slots, slot % feeders == number.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig | None = None,
        needs_pixels: NeedsPixels = lambda item: True,
        share: tuple[int, int] | None = None,
    ) -> None:
        """`needs_pixels` is asked as the work on an item begins; `share` is (number, feeders) of an engine that is one
        of several: the first one makes the others, which decode all pixels."""
        self.dataset, self._needs_pixels = dataset, needs_pixels
        self.config = (config or dataset.config).engine  # `start` has numbers for what is `auto`
        self.share = share or (0, self.config.feeders)
        self._leads = share is None
        self._others: list[ShareHandle] = []
        self._avoid: Sequence[str] = ()
        self._gate: GateHandle | None = None
        self._blocks: Blocks | None = None
        self._held: dict[int, StepShare] = {}  # by step
        self._next = 0
        self._names = ExecutionNames()

    def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
        self._close_blocks()
        self.config = _settled(self.config)
        gate = self._gate = _start_gate()
        if avoid != self._avoid:
            self._avoid = avoid
            while self._others:
                kill(self._others.pop())
        if self._leads and not self._others:
            self._others = [self._other(number) for number in range(1, self.share[1])]
        self.dataset.rewind_draws(first_step)
        started = [other.start.remote(self._shared_position(first_step), avoid) for other in self._others]
        self._held, self._next = {}, first_step
        work = self._work(first_step)
        self._blocks = Blocks(work, self._needs_pixels, self.config, gate, self._ahead, self._names, avoid)
        ray.get(started)

    def batches(self, step: int) -> list[ray.ObjectRef[object]]:
        asked = [other.take.remote(step) for other in self._others]
        parts = [self.take(step), *ray.get(asked)]
        items = self.dataset.step(step).items
        references = [parts[item.slot % len(parts)][0][item.slot // len(parts)] for item in items]
        faults = [fault_from_json(text) for _, found in parts for text in found]
        self.dataset.count_draws(step, faults)
        return references

    def take(self, step: int) -> StepShare:
        """References of this engine's share of a step, and the faults found in them."""
        if self._blocks is None or self._gate is None:
            raise RuntimeError("RayEngine.batches before start.")
        if step not in self._held and step < self._next:
            raise RuntimeError(f"step {step} is released; {self._next} comes next. Start the engine at {step} again.")
        while step not in self._held:
            items = self._items(self._next)
            references = [self._blocks.next(item) for item in items]
            self._held[self._next] = references, ray.get(self._gate.take_faults.remote(items))
            self._next += 1
        return self._held[step]

    def release(self, step: int) -> None:
        for other in self._others:
            other.release.remote(step)
        self._held = {held: parts for held, parts in self._held.items() if held > step}

    def counts(self) -> LedgerRecord:
        return self.dataset.ledger.summary()

    def stop(self) -> None:
        for other in self._others:
            kill(other)
        self._others = []
        self._close_blocks()
        self._held = {}

    def _other(self, number: int) -> ShareHandle:
        data = self.dataset
        actor: Any = ray.remote(ShareOfFeeder)  # its type says nothing of options and methods
        settings = (data.config, data.geometry, data.seed, data.timed, (number, self.share[1]))
        handle: ShareHandle = actor.options(num_cpus=0, label_selector=elsewhere(self._avoid)).remote(*settings)
        return handle

    def _shared_position(self, step: int) -> DataToken:
        """Where a further feeder starts. Nobody tells it of decisions on batch sizes later, so it gets all of them,
        where a token has those of its near future."""
        position = self.dataset.token(step)
        if decided := self.dataset.planner.resized:
            position["resized"] = [one.to_json() for one in decided]
        return position

    def _close_blocks(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        if self._gate is not None:
            kill(self._gate)
            self._gate = None

    @property
    def _ahead(self) -> int:
        """Microbatches of this engine's share decoded ahead of what is asked for, memory permitting."""
        slots = max(stage.items_per_step for stage in self.dataset.planner.stages)
        return max(self.config.lookahead * -(-slots // self.share[1]), 2 * number_of(self.config.decode_workers))

    def _items(self, step: int) -> list[str]:
        return [item.id for item in self.dataset.step(step).items if item.slot % self.share[1] == self.share[0]]

    def _work(self, first_step: int) -> Iterator[DataItem]:
        for step in itertools.count(first_step):
            for item in self.dataset.step(step).items:
                if item.slot % self.share[1] == self.share[0]:
                    yield item


def _settled(config: EngineConfig) -> EngineConfig:
    """With numbers for what is `auto`, by the nodes that there are now; a run has given those beside its workers."""
    if not asks(config):
        return config
    return settled(config, [DecodeNode.of(node["Resources"]) for node in ray.nodes() if node["Alive"]])


def _start_gate() -> GateHandle:
    actor: Any = ray.remote(Gate)  # its type says nothing of options and methods
    placed = {"num_cpus": 0, "scheduling_strategy": beside_me()}
    handle: GateHandle = actor.options(**placed, max_concurrency=_AT_A_TIME).remote()
    return handle


class ShareOfFeeder:
    """A further feeder: plans the same steps, decodes its share of their slots, owns these blocks."""

    def __init__(
        self, config: DataConfig, geometry: Geometry, seed: int, timed: BatchSize | None, share: tuple[int, int]
    ) -> None:
        self._engine = RayEngine(Dataset.open(config, geometry, seed, timed=timed), share=share)

    def start(self, token: DataToken, avoid: Sequence[str]) -> None:
        self._engine.start(self._engine.dataset.resume(token), avoid)

    def take(self, step: int) -> StepShare:
        return self._engine.take(step)

    def release(self, step: int) -> None:
        self._engine.release(step)


class Blocks:
    """An endless ordered stream of block references out of finite executions, the next one started ahead.

    One microbatch, and at most `ahead` of them and `object_store_mb` of their pixels, are begun and not yet asked for.
    """

    def __init__(
        self,
        items: Iterator[DataItem],
        needs_pixels: NeedsPixels,
        config: EngineConfig,
        gate: GateHandle,
        ahead: int,
        names: ExecutionNames,
        avoid: Sequence[str] = (),
    ) -> None:
        self._names, self._avoid = names, avoid
        self._items, self._config, self._gate, self._ahead = items, config, gate, ahead
        self._needs_pixels = needs_pixels
        self._numbers = itertools.count()
        self._coming: deque[DataItem] = deque()  # in a window, not yet admitted by the gate
        self._begun: deque[int] = deque()  # bytes of the microbatches that have passed the gate, oldest first
        self._opened = 0
        self._failure: Exception | None = None  # what ended the stream; every later call raises it again
        # the first window is short: making its jobs is part of the wait for the first batch
        self._windows = [self._open(min(config.window, 4 * number_of(config.decode_workers) + 2 * ahead))]
        self._admit()

    def next(self, item: str) -> ray.ObjectRef[object]:
        """The next reference; `item` is only named in alarms and errors. Raises DataIOError or RuntimeError. Each later
        call raises the same error, since nothing more will come."""
        waited = time.monotonic()
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                value = self._windows[0].references.get(timeout=self._config.stall_s)
            except queue.Empty:
                log.warning(
                    "data stall: item %s is not decoded after %.0f s; %s",
                    item,
                    time.monotonic() - waited,
                    self._windows[0].state(),
                )
                continue
            if isinstance(value, BaseException):
                self._failure = self._named(value, item)
                raise self._failure from value
            if value is None:
                self._windows.pop(0)
            if not self._windows or (self._windows[0].ends_soon and len(self._windows) == 1):
                self._windows.append(self._open(self._config.window))
            if value is not None:
                self._begun.popleft()
                self._admit()
                return value

    def close(self) -> None:
        for window in self._windows:
            window.abandon()
        self._gate.dismiss.remote()
        for window in self._windows:
            window.join()

    def _open(self, size: int) -> DecodeWindow:
        items = list(itertools.islice(self._items, size))
        self._coming.extend(items)
        work = [(number, item.job) for item, number in zip(items, self._numbers)]
        return DecodeWindow(work, self._config, self._gate, self._names, self._avoid)

    def _admit(self) -> None:
        """Open the gate as far as the bounds allow. Whether pixels are wanted is asked now, not when the window was
        made: meanwhile an item's latents may have been cached."""
        before, spared = self._opened, []
        while self._coming and len(self._begun) < self._ahead:
            item = self._coming[0]
            wanted = self._needs_pixels(item)
            size = pixel_bytes(item) if wanted else 0
            if self._begun and sum(self._begun) + size > number_of(self._config.object_store_mb) << 20:
                break
            self._coming.popleft()
            self._begun.append(size)
            self._opened += 1
            if not wanted:
                spared.append(item.id)
        if self._opened > before:
            self._gate.open.remote(self._opened, spared)

    def _named(self, error: BaseException, item: str) -> Exception:
        """Ray reports what a task raised as an error of its own; the tasks said before what it was."""
        failure = ray.get(self._gate.failure.remote())
        return failure or RuntimeError(f"Ray Data failed at or after item {item}: {error}")


def pixel_bytes(item: DataItem) -> int:
    return item.batch * item.bucket.frames * item.bucket.area * 3


class DecodeWindow:
    """One Ray Data execution over a list of numbered jobs, and the thread that drains it."""

    def __init__(
        self,
        work: list[tuple[int, DecodeJob]],
        config: EngineConfig,
        gate: GateHandle,
        names: ExecutionNames,
        avoid: Sequence[str],
    ) -> None:
        self._elsewhere = elsewhere(avoid)
        self._work, self._config, self._gate, self._names = work, config, gate, names
        # blocks in order, then None; or the error that ended them
        self.references: queue.SimpleQueue[ray.ObjectRef[object] | Exception | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._taken = 0
        self._thread = threading.Thread(target=self._drain, daemon=True, name=f"decode window {work[0][1].item}")
        self._thread.start()

    @property
    def ends_soon(self) -> bool:
        """So few are left that decoders would idle while the next execution comes up (0.3 s)."""
        return len(self._work) - self._taken <= 4 * number_of(self._config.decode_workers)

    def state(self) -> str:
        return f"{self._taken} of {len(self._work)} microbatches of its window are done"

    def abandon(self) -> None:
        self._abandoned.set()

    def join(self) -> None:
        self._thread.join(timeout=30)

    def _drain(self) -> None:
        try:
            microbatches, name = self._microbatches(), self._names.take()
            call_it(microbatches, name)
            try:
                self._take(microbatches.iter_internal_ref_bundles())
            finally:
                has_ended = await_executions(microbatches.get_dataset_id())
            remove_log(microbatches.get_dataset_id())  # that of one that failed stays, and its name is not used again
            if has_ended:
                self._names.give_back(name)
            forget_ended()
        except Exception as error:  # handed to whoever waits for the next reference
            self.references.put(error)

    def _take(self, bundles: Iterator[Any]) -> None:  # Ray Data's, whose reference is of another class to mypy
        """All references, or those until the window is abandoned. An execution ends when its iterator is dropped."""
        for bundle in bundles:
            if self._abandoned.is_set():
                return
            for entry in bundle.blocks:
                self.references.put(entry.ref)
                self._taken += 1
        self.references.put(None)

    def _microbatches(self) -> ray.data.Dataset:
        with _CONTEXT_LOCK:  # the context is process-wide, and sealed when the dataset is made
            context = ray.data.DataContext.get_current()
            _quiet(context)
            context.target_max_block_size = None  # one block in, one block out: a microbatch is never cut
            context.execution_no_progress_timeout_s = -1  # the consumer may pause for a checkpoint; `stall_s` watches
            context.memory_usage_poll_interval_s = None  # a thread per task that reads /proc, for a metric
            options = context.execution_options
            options.preserve_order = True
            # never reached: the gate bounds what waits, to the byte
            options.resource_limits = ExecutionResources(
                object_store_memory=4 * number_of(self._config.object_store_mb) << 20
            )
            rows = [{"number": number, "job": job} for number, job in self._work]
            jobs = ray.data.from_items(rows, override_num_blocks=len(rows))
            decode: Any = decode_block  # Ray's type for functions leaves no room for fn_kwargs
            return jobs.map_batches(
                decode,
                batch_size=None,
                batch_format="numpy",
                num_cpus=self._config.decode_cpus,
                # Else it is the mean size of what came so far, and nearly each task is of a kind of its own to Ray,
                # which keeps all kinds: 1.2 KiB each here, and some in the raylet.
                memory=0,
                concurrency=number_of(self._config.decode_workers),
                fn_kwargs={"gate": self._gate, "clip_timeout_s": self._config.clip_timeout_s},
                label_selector=self._elsewhere,
            )


_CONTEXT_LOCK = threading.Lock()


def _quiet(context: ray.data.DataContext) -> None:
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
