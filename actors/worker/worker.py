"""The actor that owns one GPU (or CPU slot): hosts text encoder, VAE and DiT, runs one cascade per call, in order.

A worker has one task thread, so calls of the controller run in submission order, which is what keeps the collectives
of overlapping bags in one order everywhere. A second thread sends heartbeats; the answer says when the current
generation has ended, and then it cancels the collective the task thread may be waiting in.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from actors.aside_turns import TurnReport, TurnTask
from actors.held_state import Snapshot
from actors.messages import (
    SNAPSHOTS,
    CascadeTask,
    FailedStart,
    FinishTask,
    FormTask,
    Handover,
    HostGpu,
    OutOfReach,
    PublishedResult,
    StaleGeneration,
    StepReport,
    WorkerInfo,
    WorkerSettings,
)
from actors.plan.spared import comes_whole
from actors.plan.types import ENCODED, Module
from actors.progress import ASIDE
from actors.ray_calls import bar, get, given_gpu, node_address, node_id, own_handle, wait
from actors.refs import Ref
from actors.state.checkpoint_files import checksum_or_gone
from actors.worker.aside import Asides
from actors.worker.caching import ResultCache, host_copy
from actors.worker.encoding import Encoding
from actors.worker.executor import Executor
from actors.worker.gpu_place import place_of
from actors.worker.handoff import EncodeResult, HostCopies, PinnedCopy
from actors.worker.heartbeat import Heartbeat, Mailbox
from actors.worker.home import Entry, HomeMemory
from actors.worker.loading import (
    FirstWeights,
    GpuUnusable,
    build_modules,
    build_sync,
    device_of,
    fit_graphs,
    late_sizes,
    peak_tflops,
)
from actors.worker.meter import freed, keep, meter_of, peak_rss_gib
from actors.worker.near_cores import stay_near
from actors.worker.run_clock import own_clock
from actors.worker.work_done import FinishedStep
from actors.worker.worker_facts import gpu_gib, peak_gib, room_gib, worker_info
from data.cache import Cache, CacheWriter
from data.engines.blocks import as_batch
from data.types import Batch
from ops.attention.sdpa import leave_out_cudnn
from ops.comm.collectives import free_ended
from ops.comm.groups import Groups
from ops.comm.reach import door_at
from ops.cores import usable_cores
from ops.heap import give_back
from ops.models.weights import checksums
from ops.packed.uploads import expect
from ops.passing import passes
from ops.precision import allow_tf32
from ops.shards import shard_bounds
from ops.units import GIB
from ops.update.flat_vector import trainable
from ops.update.shard_export import ShardExport
from ops.waiting import CancelToken, Patience, first_line, patient

log = logging.getLogger(__name__)

_GATHER_BYTES_PER_S = 1e8  # of a network that is slow but works
_LOOK_S = 0.25  # between looks whether an encode call has failed instead of leaving a result


class Worker:
    """The methods that a generation calls, in the order `form`, cascades, `finish_step`, `hand_over`. A plain class, of
    which `actors.pool.workers` makes a Ray actor."""

    def __init__(self, name: str, settings: WorkerSettings, monitor: Mailbox) -> None:
        """A failure to start is not raised but returned by `info`, with node and GPU: an exception in an actor's
        constructor would not carry them."""
        self.name, self.settings = name, settings
        self._here = HostGpu(node=node_id(), host=socket.gethostname(), gpu=given_gpu())
        self._failed: FailedStart | None = None
        try:
            self._start(monitor)
        except Exception as error:
            log.exception("worker %s does not start", name)
            kind = "" if isinstance(error, GpuUnusable) else f"{type(error).__name__}: "
            why = f"{kind}{first_line(error)}"
            self._failed = FailedStart(worker=name, why=why, where=self._here, passes=passes(error))

    def _start(self, monitor: Mailbox) -> None:
        name, settings = self.name, self.settings
        torch.set_num_threads(settings.workers.torch_threads)
        allow_tf32(settings.train.allows_tf32)
        leave_out_cudnn()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.heartbeat = Heartbeat(name, settings.workers, monitor, self._here.host, self._here.node)
        self._home = HomeMemory()
        self._rank = 0
        self._last: Snapshot | None = None  # of the state in this worker, once others know of it
        self._copying: dict[tuple[int, int], ShardExport] = {}  # by generation and step, until it is waited for
        self._exporting: ShardExport | None = None  # the last one, whose copy may still be made
        self._holds: int | None = None  # the step whose finished state is in this worker; None in the middle of one
        self._first = FirstWeights(settings.train)
        self._on_sigterm()
        self.heartbeat.start()  # before the first call to a GPU, which may not return
        self.device = self._device()
        self.heartbeat.waits_on_device = self.device.type == "cuda"
        self._door = door_at(node_address())
        self._place = place_of(self.device)
        self.heartbeat.sits(self._place)
        self._host_cores = usable_cores() // 2 if self.device.type == "cuda" else None  # of all memory nodes
        if settings.workers.numa_binding == "auto":
            stay_near(self._place.numa)
        if self.device.type == "cuda":
            expect(self.device, settings.largest_upload)
        self.executor = self._load()
        self.heartbeat.on_device = self.executor.on_device
        self.encoding = self._encoding()
        modules = self.executor.modules
        self._frozen, self._late = modules.digests(), late_sizes(modules, self.device, settings.spared)
        self._late_digests: dict[str, str] = {}  # of encoders that were made after the start
        self._store: torch.distributed.Store | None = None  # of the generation
        self._first_sums = checksums(trainable(modules.dit))
        if settings.train.init_from:  # compared among workers before the first step, as these are; not read later
            self._first_sums += (("train.init_from", checksum_or_gone(Path(settings.train.init_from))),)
        self.executor.meter.settled()
        self._asides = Asides(modules, self.device, self.executor.meter, settle=self._copied)
        self._peak_tflops = peak_tflops(self.device, settings.train)
        keep(self.device)
        self.heartbeat.idle()

    # -- life ----------------------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo | FailedStart:
        """Answers once the modules are loaded."""
        if self._failed is not None:
            return self._failed
        return worker_info(
            self.executor,
            self.settings,
            self._late,
            worker=self.name,
            here=self._here,
            frozen=self._frozen,
            first=self._first_sums,
            lends=self._home.lends,
            place=self._place,
            door=None if self._door is None else self._door.address,
        )

    def form(self, task: FormTask) -> None:
        """Leave the old process groups, build the new ones in this process, take this worker's range of the training
        state.

        The node's keeper learns which part of it came from elsewhere: another keeper, a checkpoint, the first weights.
        """
        if self.device.type == "cpu" and self.settings.workers.memory_gib:
            self._asides.drop()  # its weights would count with the worker's states
        fetching = Patience(limit_s=self.settings.workers.state_timeout_s, why="workers.state_timeout_s")
        self.heartbeat.activity(f"form g{task.generation}", "form", -1, fetching.limit_s, fetching)
        self._holds, self._last, self._rank = None, None, task.rank
        self.executor.leave()  # watched by the heartbeat: it may hang
        self._home.leave()
        cancel = self.heartbeat.begin(task.generation)
        groups = self._connected(task, cancel)
        if task.origin is not None:
            self._first.trained()
        entered = self._entered(task, patient(cancel, fetching, "fetching the state"))
        groups.meet("waiting until all hold the state", fetching)
        free_ended()  # by now all have left the last generation
        self._gather(task, groups, entered)
        self._holds = task.origin.step if task.origin is not None else -1
        mine = ShardExport(shard=entered.shard, bank=entered.banks.current)
        self._last = self._snapshot(self._holds, entered.made_in, mine)
        task.home.put.remote((self._last,))
        self.executor.meter.settled()
        self.heartbeat.idle()

    def _connected(self, task: FormTask, cancel: CancelToken) -> Groups:
        """The process groups of the generation. Raises OutOfReach before anything waits for a node beyond reach."""
        timeout_s = self.settings.workers.collective_timeout_s
        store = torch.distributed.TCPStore(*task.store, is_master=False, timeout=timedelta(seconds=timeout_s))
        self._store = store
        self._compare_late()
        if (apart := self.heartbeat.surroundings.enter(task)) is not None:
            raise OutOfReach(apart)
        return Groups(
            store,
            task.rank,
            tuple(range(task.world)),
            "nccl" if self.device.type == "cuda" else "gloo",
            task.generation,
            timeout_s,
            cancel,
            address=node_address(),
            nodes=task.nodes or None,
            device=self.device,
            world_ctas=self.settings.train.sum_ctas,
            bag_ctas=self.settings.train.bag_ctas,
        )

    def _entered(self, task: FormTask, go_on: Callable[[], None]) -> Entry:
        """This worker's range of the training state, in the memory of its node."""
        sync, modules = self.executor.sync, self.executor.modules
        lo, hi = shard_bounds(sync.layout[-1].hi, task.world)[task.rank]
        first = self._first.source(modules.dit, modules.config.dit)
        return self._home.enter(task, lo, hi, sync.state_names, first, go_on)

    def _gather(self, task: FormTask, groups: Groups, entered: Entry) -> None:
        """Take up training from the ranges of all workers: every one gets the parameters of the others."""
        gathering = self._gathering()
        self.heartbeat.activity(f"form g{task.generation}", "gather", -1, 0.0, gathering)
        groups.allow(gathering)
        self.heartbeat.groups = groups
        try:
            self.executor.form(task.generation, groups, [entered.shard], entered.banks)
        finally:
            self._first.trained()  # the module's own are gone, also where the others did not come

    def hand_over(self, step: int | None) -> Handover:
        """The generation has ended: close its groups, drop half-done work.

        `step`: it ended cleanly after this step, whose state is handed out, whether a snapshot of it was due or not.
        Raises RuntimeError when the device has failed: the worker would break each generation that it joins.
        """
        generation, snapshot = self.executor.generation, None
        if step is not None and self._holds == step and generation >= 0:
            snapshot = self._last if self._last is not None and self._last.step == step else None
            if snapshot is None:
                export = self.executor.sync.begin_export(step)
                export.wait()
                snapshot = self._snapshot(step, generation, export)
        self.executor.leave()
        self._home.leave()
        self.heartbeat.groups = None
        self.heartbeat.idle()
        self.executor.check_device()
        return Handover(worker=self.name, snapshot=snapshot)

    def prepare(
        self, generation: int, bags: tuple[tuple[int, ...], ...], closed: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        """Leave the `closed` bags, and begin to connect others in the background: the cascades that need them come
        later in this queue."""
        if generation != self.executor.generation or self.executor.groups is None or self.executor.broken is not None:
            return
        for bag in closed:
            self.executor.leave_bag(bag)
        self.executor.groups.prepare(bags)

    # -- cascades ------------------------------------------------------------------------------------------------------

    def encode_text(self, task: CascadeTask, *batches: object) -> list[PublishedResult]:
        """Arguments: the data batch of each item of the task, in order of first appearance."""
        self._ready("text", task)
        self._activity_of(task)
        batch_of = _by_item(task, [as_batch(value) for value in batches])
        captions = [batch_of[s.item].captions[s.index] for s in task.samples]
        seen = task.samples if self.executor.modules.config.text.sees_picture else ()
        pictures = [batch_of[s.item].video[s.index, 0] for s in seen]
        ok = [batch_of[s.item].ok[s.index] for s in seen]
        return self._encoded(task, lambda: self.encoding.text(task, captions, pictures, ok))

    def encode_vae(self, task: CascadeTask, block: object) -> list[PublishedResult]:
        self._ready("vae", task)
        self._activity_of(task)
        first = task.samples[0].index
        batch = as_batch(block)
        video = batch.video[first : first + len(task.samples)]
        ok = batch.ok[first : first + len(task.samples)]
        return self._encoded(task, lambda: self.encoding.vae(task, video, ok))

    def outlasted(self, task: CascadeTask) -> list[PublishedResult]:
        """The end of an encode that was begun with `outlasts`: comes after the end of the step that it outlasts, and
        answers as the encode itself does otherwise."""
        self._activity_of(task)
        with bar(task.name), freed():  # Ray forgets what is shown in a thread of our own: its bar begins here
            return self._done(task, self.executor.end_outlasting(task))

    def published(self, task: CascadeTask, encode: Sequence[Ref[list[PublishedResult]]]) -> list[PublishedResult]:
        """What an encode call left for other workers, on a worker that `publishes_later`. Runs beside the task thread.

        `encode` holds the reference of that call: when it fails, also for a lost argument, this call fails with the
        same error. A wait for it here, unlike a reference as an argument, does not hold back the calls after this one.
        """
        assert self.executor.copies is not None, "this worker returns its results from the encode call"
        while True:
            ended = bool(wait(encode, timeout=0)[0])
            found = self.executor.copies.take((task.generation, task.cascade), _LOOK_S)
            if found is not None:
                return _published(task.module, found)
            if ended:
                get(encode[0])
                raise StaleGeneration(f"results of {task.name} were dropped: generation {task.generation} has ended.")

    def dit(self, task: CascadeTask, *published: list[PublishedResult]) -> None:
        """Arguments: what other workers published for samples of this task."""
        wanted = {s.id for s in task.samples}
        found = [one for results in published for one in results if one.id in wanted]
        fetch_s = self._seconds_since(max((one.at for one in found), default=0.0))
        self._activity_of(task)
        fetched = {(p.module, p.id): EncodeResult(id=p.id, rows=torch.from_numpy(p.rows), ok=p.ok) for p in found}
        with bar(task.name), freed():
            self.executor.dit(task, fetched, fetch_s)
        self.heartbeat.idle()

    def turn(self, task: TurnTask) -> TurnReport:
        """Some work on an aside, as much as the turn allows; none where its generation has ended."""
        executor = self.executor
        if task.generation != executor.generation or executor.broken is not None:
            return TurnReport(aside=task.aside.name)
        for module in ENCODED:
            if module not in self.settings.spared:
                self._ready(module, task)
        self.heartbeat.activity(f"aside s{task.step}", ASIDE, task.step, 0.0, task.patience)
        executor.settle()
        with bar(f"aside s{task.step}"):
            report = self._asides.turn(task)
        self.heartbeat.idle()
        return report

    def finish_step(self, task: FinishTask) -> tuple[StepReport, Snapshot | None]:
        """Gradient sum, update, snapshot."""
        name = f"finish s{task.step}"
        self.heartbeat.activity(name, "reduce", task.step, 0.0, task.patience)
        self._holds = None
        self._first.trained()
        with self.executor.beside_encodes():
            with bar(name):
                done = self.executor.finish(task)
            self._holds = task.step
            started = time.perf_counter()
            export = done.result.export
            snapshot = self._handed_out(task.step, export) if export is not None else None
        if self.device.type == "cpu":
            give_back()
        spent_s = time.perf_counter() - started + done.copy_s + done.result.held_up_s
        report = self._report(task, done, snapshot_s=spent_s)
        self.heartbeat.idle()
        return report, snapshot

    def copied(self, generation: int, step: int) -> None:
        """Returns when the copy of this worker's state after a step has ended. Runs beside the task thread, in thread
        group SNAPSHOTS."""
        self._copying.pop((generation, step)).wait()

    def parameters_digest(self) -> str:
        """SHA-256 of all parameters: equal on all workers after every step."""
        import hashlib

        digest = hashlib.sha256()
        for parameter in self.executor.modules.dit.parameters():
            digest.update(parameter.detach().cpu().float().numpy().tobytes())
        return digest.hexdigest()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _encoded(self, task: CascadeTask, encode: Callable[[], list[EncodeResult]]) -> list[PublishedResult]:
        """Run an encode and return what it publishes. One that may outlast its step is only begun, and publishes
        nothing yet (see `outlasted`)."""
        if task.outlasts:
            self.executor.begin_outlasting(task, encode)
            return []
        with bar(task.name), freed():
            return self._done(task, encode())

    def _copied(self) -> None:
        """Returns when the last snapshot has been copied: own parameters may be part of the state."""
        if self._exporting is not None:
            self._exporting.wait()
            self._exporting = None

    def _ready(self, module: Module, task: CascadeTask | TurnTask) -> None:
        """Load an encoder that was left out because a cache should have its results, and lacks one. Raises
        StaleGeneration if the task may not run."""
        modules = self.executor.modules
        if not modules.lacks(module):
            return
        self.executor.admit(task.generation)
        log.info("step %d has something for the %s encoder, which is loaded now", task.step, module)
        limit_s = self.settings.workers.start_patience_s(round(sum(self._late) * GIB))
        patience = Patience(limit_s=limit_s, why="workers.start_s, to load an encoder")
        self.heartbeat.activity(f"load {module} encoder", "load", task.step, limit_s, patience)
        modules.ready(module)
        self.executor.meter.settled()
        self._late = late_sizes(modules, self.device, self.settings.spared)
        self._late_digests |= dict(modules.digests([module]))
        self._compare_late()

    def _compare_late(self) -> None:
        """Raises ValueError if another worker has loaded an encoder with other weights after its start. Weights that
        were there at the start have been compared."""
        for part, digest in self._late_digests.items():
            if self._store is None:
                return
            found = self._store.compare_set(f"frozen {part}", "", digest).decode()
            if found != digest:
                raise ValueError(
                    f"the weights of {part} on {self.name} on {socket.gethostname()} are not those of other workers. "
                    f"Give all nodes the same files there, and --resume."
                )

    def _device(self) -> torch.device:
        return device_of(self.settings.workers, self._here)

    def _load(self) -> Executor:
        limits = [gib for gib in (gpu_gib(self.device), self.settings.workers.memory_gib) if gib]
        device_gib = min(limits, default=0.0) if self.device.type == "cuda" else 0.0
        modules = build_modules(self.settings, self.device, device_gib)
        sync = build_sync(modules.dit, self.settings.train, device_gib, self.settings.least_gib, self._host_cores)
        fit_graphs(modules.dit, self.settings, device_gib)
        return Executor(
            modules,
            sync,
            self.settings.train,
            self.device,
            self._phase,
            copies=self._host_copies(),
            meter=meter_of(self.device, self.settings.workers.memory_gib),
            name=self.name,
        )

    def _encoding(self) -> Encoding:
        cache = self.settings.cache
        if not cache.path or comes_whole(cache):
            return Encoding(self.executor)
        writer = CacheWriter(Cache(cache))
        if self.device.type == "cpu":
            return Encoding(self.executor, ResultCache(writer, host_copy))
        return Encoding(self.executor, ResultCache(writer, PinnedCopy(self.device), self.executor.check_of))

    def _gathering(self) -> Patience:
        """The patience for the first collectives of a generation, in which all get all parameters."""
        least, weights = self.settings.workers.collective_timeout_s, trainable(self.executor.modules.dit)
        moved_s = sum(p.numel() * p.element_size() for _, p in weights) / _GATHER_BYTES_PER_S
        why = f"workers.collective_timeout_s, and {moved_s:.0f} s for the parameters at 0.1 GB/s"
        return Patience(limit_s=round(least + moved_s, 3), why=why)

    def _host_copies(self) -> HostCopies | None:
        """On CUDA, published results are copied while the next cascades run."""
        return HostCopies(PinnedCopy(self.device)) if self.device.type == "cuda" else None

    def _handed_out(self, step: int, export: ShardExport) -> Snapshot:
        """The snapshot of this worker's state after this step, for the controller. On CUDA its copy may still go on:
        then `Snapshot.copied` resolves when it has ended."""
        self._phase("snapshot")
        generation, copied = self.executor.generation, None
        self._exporting = export
        if not export.has_ended:
            self._copying[generation, step] = export
            copied = own_handle().copied.options(concurrency_group=SNAPSHOTS).remote(generation, step)
        self._last = self._snapshot(step, generation, export, copied)
        return self._last

    def _snapshot(self, step: int, generation: int, export: ShardExport, copied: Ref[None] | None = None) -> Snapshot:
        shard = export.shard
        assert export.bank is not None, "the state is handed out in memory of the node"
        return Snapshot(
            step=step,
            generation=generation,
            rank=self._rank,
            lo=shard.lo,
            hi=shard.hi,
            total=shard.total,
            bank=export.bank,
            names=tuple(shard.arrays),
            updates=shard.updates,
            part_updates=shard.part_updates,
            distances=shard.distances,
            copied=copied,
        )

    def _report(self, task: FinishTask, done: FinishedStep, snapshot_s: float) -> StepReport:
        r = done.result
        return StepReport(
            worker=self.name,
            step=task.step,
            loss=r.loss,
            weight=r.weight,
            grad_norm=r.grad_norm,
            lr=r.lr,
            d=r.d,
            applied=r.applied,
            spans=done.spans,
            peak_memory_gib=peak_gib(self.device),
            rss_gib=peak_rss_gib(),
            room_gib=room_gib(self.executor, self._late),
            snapshot_s=snapshot_s,
            bad_weight=r.bad_weight,
            bad_samples=done.bad_samples,
            item_losses=done.item_losses,
            peak_tflops=self._peak_tflops,
        )

    def _done(self, task: CascadeTask, published: list[EncodeResult]) -> list[PublishedResult]:
        self.heartbeat.idle()
        return _published(task.module, published)

    def _seconds_since(self, published_at: float) -> float | None:
        """How long a published result took to get here, or None when this worker was busy for a part of that time."""
        idle, ended_at = self.heartbeat.progress, self.executor.ended_at()
        if not published_at or idle.activity != "idle" or ended_at is None:
            return None
        if max(idle.since, ended_at) > published_at:
            return None
        return max(0.0, own_clock.now() - published_at)  # clocks agree to some ms

    # -- progress ------------------------------------------------------------------------------------------------------

    def _activity_of(self, task: CascadeTask) -> None:
        planned_s = task.planned_end_s - task.planned_start_s
        self.heartbeat.activity(task.name, task.module, task.step, planned_s, task.patience)

    def _phase(self, phase: str) -> None:
        self.heartbeat.phase(phase)

    def _on_sigterm(self) -> None:
        """A preemption notice: finish the running step, then leave. Seen even while the task thread sits in C++, and on
        a node whose processes were started with SIGTERM blocked (app/run/join.py)."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

        def watch() -> None:
            while True:
                if signal.SIGTERM in os.read(reader, 64):
                    self.heartbeat.leaving = True

        threading.Thread(target=watch, name="sigterm", daemon=True).start()


def _published(module: str, results: Sequence[EncodeResult]) -> list[PublishedResult]:
    now = own_clock.now()
    return [PublishedResult(module=module, id=e.id, rows=e.rows.numpy(), ok=e.ok, at=now) for e in results]


def _by_item(task: CascadeTask, batches: Sequence[Batch]) -> dict[str, Batch]:
    items = list(dict.fromkeys(s.item for s in task.samples))
    assert len(items) == len(batches), f"{task.name} has {len(items)} items but {len(batches)} batches"
    return dict(zip(items, batches))
