"""The actor that owns one GPU (or CPU slot): hosts text encoder, VAE and DiT, runs one cascade per call, in order.

A worker has one task thread, so calls of the controller run in submission order, which is what keeps the collectives
of overlapping bags in one order everywhere. A second thread sends heartbeats; their answer tells it when the current
generation has ended, and then it cancels the collective the task thread may be waiting in.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch

from actors.bars import bar
from actors.config import TrainConfig, WorkersConfig
from actors.messages import (
    LOADING,
    CascadeTask,
    FinishTask,
    FormTask,
    Handover,
    Progress,
    PublishedResult,
    Snapshot,
    StaleGeneration,
    StepReport,
    WorkerInfo,
    WorkerSettings,
)
from actors.process import birth
from actors.state.checkpoint_files import load
from actors.worker.executor import Executor, FinishedStep, Modules, peak_rss_gib
from actors.worker.handoff import EncodeResult
from actors.worker.meeting import fetch, meet
from actors.worker.transfer import HostCopies, PinnedCopy
from data.cache import Cache, CacheWriter, Kind
from data.engines.blocks import as_batch
from ops.comm import CancelToken, Groups
from ops.models.config import ModelConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.weights import frozen_digests
from ops.shards import ShardState, cut, shard_bounds
from ops.sync import initial_shard, trainable

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between looks whether an encode call has failed instead of leaving a result


class Worker:
    """Plain class; `actors.pool.workers` makes the actor of it."""

    def __init__(self, name: str, settings: WorkerSettings, monitor: Any) -> None:
        torch.set_num_threads(settings.workers.torch_threads)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self.name, self.settings, self._monitor = name, settings, monitor
        self.device = _device(settings.workers)
        self._progress = Progress(
            worker=name,
            generation=-1,
            step=-1,
            activity=LOADING,
            phase="",
            since=time.time(),
            predicted_s=0.0,
            collectives=0,
            waiting_in="",
        )
        self._cancel = CancelToken()
        self._leaving = False
        self._snapshot_to: tuple[Any, ...] = ()
        self._exports: list[Snapshot] = []
        self._holds: int | None = None  # the step whose finished state is in this worker; None in the middle of one
        self._as_built = True  # the DiT has its first weights
        self._first: list[tuple[str, torch.Tensor]] | None = None  # these in fp32, while it computes in another dtype
        self._since = time.monotonic()  # of the activity; the wall clock may be set meanwhile
        self._writer = CacheWriter(Cache(settings.cache)) if settings.cache.path else None
        self._on_sigterm()
        threading.Thread(target=self._heartbeats, name="heartbeat", daemon=True).start()
        self.executor = self._load()
        modules = self.executor.modules
        self._frozen = frozen_digests(modules.config, modules.dit, modules.vae, modules.text)
        if self._writer is not None:
            self.executor.on_encoded = self._to_cache
        self._idle()

    # -- life ----------------------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        """Answers once the modules are loaded."""
        memory = (
            torch.cuda.get_device_properties(self.device).total_memory / 2**30 if self.device.type == "cuda" else 0.0
        )
        return WorkerInfo(
            worker=self.name,
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            born=birth(os.getpid()),
            device=str(self.device),
            gpu_memory_gib=memory,
            publishes_later=self.executor.copies is not None,
            frozen=self._frozen,
        )

    def form(self, task: FormTask) -> Snapshot | None:
        """Leave the old process groups, build the new ones in this process, take my range of the training state.

        Returns a snapshot of it when nobody else holds that state in memory (a new run, or one from a checkpoint).
        """
        patience = self.settings.workers.state_timeout_s
        self._activity(f"form g{task.generation}", "form", task.generation, -1, patience)
        self._holds = None
        self.executor.leave()
        self._cancel = CancelToken()
        self._progress = replace(self._progress, generation=task.generation)
        timeout = self.settings.workers.collective_timeout_s
        store = torch.distributed.TCPStore(*task.store, is_master=False, timeout=timedelta(seconds=timeout))
        world = tuple(range(task.world))
        groups = Groups(
            store,
            task.rank,
            world,
            "nccl" if self.device.type == "cuda" else "gloo",
            task.generation,
            timeout,
            self._cancel,
            address=ray.util.get_node_ip_address(),
        )
        self._snapshot_to = task.snapshot_to
        origin = task.origin
        if origin is not None:
            self._as_built, self._first = False, None
        shards = self._shards(task)
        meet(store, task.generation, task.rank, task.world, self._cancel, patience)
        self._activity(f"form g{task.generation}", "gather", task.generation, -1, 0.0)
        self.executor.form(task.generation, groups, world, shards)
        self._holds = origin.step if origin is not None else -1
        fresh = origin is None or origin.checkpoint is not None
        snapshot = self._send_snapshot(self._holds) if fresh else None
        self._idle()
        return snapshot

    def retire(self) -> Handover:
        """The generation has ended: close its groups, forget half-done work, say what state is held here."""
        self.executor.leave()
        self._idle()
        return Handover(worker=self.name, exports=tuple(self._exports))

    def hand_over(self, step: int) -> Handover:
        """A clean end after `step`: offer the state of exactly this step, whether a snapshot of it was due or not."""
        wanted = (step, self.executor.generation)  # parts of one generation fit together
        if self._holds == step and all((e.step, e.generation) != wanted for e in self._exports):
            self._snapshot_to = ()
            self._send_snapshot(step)
        return self.retire()

    def prepare(self, generation: int, bags: tuple[tuple[int, ...], ...]) -> None:
        """Begin to connect these bags in the background; the cascades that need them come later in this queue."""
        if generation == self.executor.generation and self.executor.groups is not None:
            self.executor.groups.prepare(bags)

    # -- cascades ------------------------------------------------------------------------------------------------------

    def encode_text(self, task: CascadeTask, *batches: Any) -> list[PublishedResult]:
        """Arguments: the data batch of each item of the task, in order of first appearance."""
        self._activity_of(task)
        batch_of = _by_item(task, [as_batch(value) for value in batches])
        captions = [batch_of[s.item].captions[s.index] for s in task.samples]
        with bar(task.name):
            return self._done(task, self.executor.text(task, captions))

    def encode_vae(self, task: CascadeTask, block: Any) -> list[PublishedResult]:
        self._activity_of(task)
        first = task.samples[0].index
        batch = as_batch(block)
        video = batch.video[first : first + len(task.samples)]
        ok = batch.ok[first : first + len(task.samples)]
        with bar(task.name):
            return self._done(task, self.executor.vae(task, video, ok))

    def published(self, task: CascadeTask, encode: Sequence[Any]) -> list[PublishedResult]:
        """What an encode call left for other workers, on a worker that `publishes_later`. Runs beside the task thread.

        `encode` holds the reference of that call: its failure, also to get its arguments, becomes this one's. A wait
        for it here, unlike a reference as an argument, does not hold back the calls behind this one.
        """
        assert self.executor.copies is not None, "this worker returns its results from the encode call"
        while True:
            ended = bool(ray.wait(list(encode), timeout=0)[0])
            found = self.executor.copies.take((task.generation, task.cascade), _LOOK_S)
            if found is not None:
                return _published(task.module, found)
            if ended:
                ray.get(list(encode))
                raise StaleGeneration(f"results of {task.name} were dropped: generation {task.generation} has ended.")

    def dit(self, task: CascadeTask, *published: list[PublishedResult]) -> None:
        """Arguments: what other workers published for samples of this task."""
        wanted = {s.id for s in task.samples}
        found = [one for results in published for one in results if one.id in wanted]
        fetch_s = self._seconds_since(max((one.at for one in found), default=0.0))
        self._activity_of(task)
        fetched = {(p.module, p.id): EncodeResult(id=p.id, rows=torch.from_numpy(p.rows), ok=p.ok) for p in found}
        with bar(task.name):
            self.executor.dit(task, fetched, fetch_s)
        self._idle()

    def finish_step(self, task: FinishTask) -> tuple[StepReport, Snapshot | None]:
        """Gradient sum, update, snapshot."""
        name = f"finish s{task.step}"
        self._activity(name, "reduce", task.generation, task.step, 0.0)
        self._holds, self._as_built, self._first = None, False, None
        with bar(name):
            done = self.executor.finish(task)
        self._holds = task.step
        started = time.perf_counter()
        snapshot = self._send_snapshot(task.step) if task.export else None
        report = self._report(task, done, snapshot_s=time.perf_counter() - started)
        self._idle()
        return report, snapshot

    def set_keepers(self, keepers: tuple[Any, ...]) -> Snapshot | None:
        """Other keepers from now on; they get what the lost ones may have held of uncommitted steps at once."""
        self._snapshot_to = keepers
        if not self._exports:
            return None
        return replace(
            self._exports[-1],
            acknowledgements=tuple(k.put.remote(e.step, e.shard, e.generation) for e in self._exports for k in keepers),
        )

    def parameters_digest(self) -> str:
        """SHA-256 of all parameters: equal on all workers after every step."""
        import hashlib

        digest = hashlib.sha256()
        for parameter in self.executor.modules.dit.parameters():
            digest.update(parameter.detach().cpu().float().numpy().tobytes())
        return digest.hexdigest()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _load(self) -> Executor:
        settings = self.settings
        model, geometry = resolve(settings.model)
        modules = Modules(
            config=model,
            geometry=geometry,
            dit=self._compute_dit(model),
            vae=build_vae(model.vae, self.device),
            text=build_text(model.text, self.device),
        )
        modules.dit.train()
        executor = Executor(modules, _sync(modules.dit, settings.train), settings.train, self.device, self._phase)
        if self.device.type == "cuda":
            executor.copies = HostCopies(PinnedCopy(self.device))
        return executor

    def _compute_dit(self, model: ModelConfig) -> torch.nn.Module:
        """The transformer as this worker computes with it; its first weights are kept as they were read."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.settings.train.parameter_dtype]
        dit = build_dit(model.dit, self.settings.train.seed)
        if dtype != torch.float32:
            self._first = [(name, p.detach()) for name, p in trainable(dit)]  # `to` gives the module other memory
        return dit.to(self.device, dtype)

    def _first_values(self) -> list[tuple[str, torch.Tensor]]:
        """What is trained, before the first update and in fp32."""
        modules = self.executor.modules
        if not self._as_built:
            return list(trainable(build_dit(modules.config.dit, self.settings.train.seed)))
        return self._first or list(trainable(modules.dit))

    def _shards(self, task: FormTask) -> list[ShardState]:
        """Parts of the state that cover my range."""
        origin = task.origin
        lo, hi = shard_bounds(self.executor.sync.layout[-1].hi, task.world)[task.rank]
        if origin is None:  # also when everything was lost: then this worker's own weights may have been trained
            return [initial_shard(self._first_values(), lo, hi)]
        if origin.checkpoint is not None:
            return [cut(load(Path(origin.checkpoint))[1], lo, hi)]
        patience = self.settings.workers.state_timeout_s
        parts: list[ShardState] = fetch(list(origin.exports), self._cancel, patience)
        for held in fetch([k.get.remote(origin.step, lo, hi) for k in origin.keepers], self._cancel, patience):
            parts.extend(held)
        return parts

    def _send_snapshot(self, step: int) -> Snapshot:
        """Put my shard in the object store and have the keepers copy it; the last two stay offered by this worker."""
        self._phase("snapshot")
        shard = self.executor.sync.export_shard()
        reference = ray.put(shard)
        generation = self.executor.generation
        snapshot = Snapshot(
            step=step,
            generation=generation,
            lo=shard.lo,
            hi=shard.hi,
            total=shard.total,
            shard=reference,
            acknowledgements=tuple(k.put.remote(step, reference, generation) for k in self._snapshot_to),
        )
        self._exports = [*(e for e in self._exports if e.step < step), snapshot][-2:]
        return snapshot

    def _report(self, task: FinishTask, done: FinishedStep, snapshot_s: float) -> StepReport:
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else 0.0
        r = done.result
        return StepReport(
            worker=self.name,
            step=task.step,
            loss=r.loss,
            weight=r.weight,
            grad_norm=r.grad_norm,
            lr=r.lr,
            applied=r.applied,
            spans=done.spans,
            peak_memory_gib=peak,
            rss_gib=peak_rss_gib(),
            snapshot_s=snapshot_s,
            bad_weight=r.bad_weight,
            bad_samples=done.bad_samples,
            item_losses=done.item_losses,
        )

    def _to_cache(self, task: CascadeTask, results: list[EncodeResult]) -> None:
        """Keep good results for later epochs and other runs; the first worker of the bag writes, behind the compute."""
        groups, writer = self.executor.groups, self._writer
        if groups is None or groups.rank != task.bag[0] or writer is None:
            return
        kind: Kind = "latents" if task.module == "vae" else "text"
        if not (writer.cache.config.latents if kind == "latents" else writer.cache.config.text):
            return
        for sample, result in zip(task.samples, results, strict=True):
            key = sample.latent_key if kind == "latents" else sample.text_key
            if result.ok and key:
                writer.submit(kind, key, result.rows.float().cpu().numpy().copy())

    def _done(self, task: CascadeTask, published: list[EncodeResult]) -> list[PublishedResult]:
        self._idle()
        return _published(task.module, published)

    def _seconds_since(self, published_at: float) -> float | None:
        """How long a published result took to get here, or None when this worker was busy for a part of that time."""
        idle = self._progress
        if not published_at or idle.activity != "idle" or idle.since > published_at:
            return None
        return max(0.0, time.time() - published_at)  # clocks of two nodes may differ

    # -- progress and heartbeats ---------------------------------------------------------------------------------------

    def _activity_of(self, task: CascadeTask) -> None:
        self._activity(task.name, task.module, task.generation, task.step, task.planned_end_s - task.planned_start_s)

    def _activity(self, activity: str, phase: str, generation: int, step: int, predicted_s: float) -> None:
        self._since = time.monotonic()  # first: the heartbeat thread must not see a new activity with an old time
        self._progress = replace(
            self._progress,
            activity=activity,
            phase=phase,
            generation=generation,
            step=step,
            since=time.time(),
            predicted_s=predicted_s,
        )

    def _phase(self, phase: str) -> None:
        self._progress = replace(self._progress, phase=phase)

    def _idle(self) -> None:
        self._since = time.monotonic()
        self._progress = replace(self._progress, activity="idle", phase="idle", since=time.time(), predicted_s=0.0)

    def _heartbeats(self) -> None:
        while True:
            try:
                self._beat()
            except ray.exceptions.RayError as error:  # the monitor is being restarted
                log.debug("heartbeat of %s not delivered: %r", self.name, error)
            time.sleep(self.settings.workers.heartbeat_s)

    def _beat(self) -> None:
        cancel = self._cancel  # before the generation that it is for: `form` changes them in the other order
        progress = self._progress
        groups = self.executor.groups if hasattr(self, "executor") else None
        if groups is not None:
            bags = groups.progress.values()
            waiting = [bag.name for bag in bags if bag.name]
            progress = replace(
                progress, collectives=sum(bag.sequence for bag in bags), waiting_in=waiting[0] if waiting else ""
            )
        orders = ray.get(self._monitor.beat.remote(replace(progress, leaving=self._leaving)), timeout=10)
        if orders.generation > progress.generation >= 0:
            cancel.set(f"generation {orders.generation} has begun")
        elif groups is not None and self._hangs_on_device(progress):
            cancel.set(f"{progress.activity!r} has not ended within {self.settings.workers.collective_timeout_s:g} s")
        if orders.dump_stack:
            self._monitor.stack.remote(self.name, _stacks())

    def _hangs_on_device(self, progress: Progress) -> bool:
        """Waits for NCCL are the device's: they have no time-out but this one."""
        waited = time.monotonic() - self._since
        return (
            self.device.type == "cuda"
            and progress.activity != "idle"
            and waited > max(self.settings.workers.collective_timeout_s, 2 * progress.predicted_s)
        )

    def _on_sigterm(self) -> None:
        """A preemption notice: finish the running step, then leave. Seen even while the task thread sits in C++."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

        def watch() -> None:
            while True:
                if signal.SIGTERM in os.read(reader, 64):
                    self._leaving = True

        threading.Thread(target=watch, name="sigterm", daemon=True).start()


def _published(module: str, results: Sequence[EncodeResult]) -> list[PublishedResult]:
    now = time.time()
    return [PublishedResult(module=module, id=e.id, rows=e.rows.numpy(), ok=e.ok, at=now) for e in results]


def _by_item(task: CascadeTask, batches: Sequence[Any]) -> dict[str, Any]:
    items = list(dict.fromkeys(s.item for s in task.samples))
    assert len(items) == len(batches), f"{task.name} has {len(items)} items but {len(batches)} batches"
    return dict(zip(items, batches))


def _device(workers: WorkersConfig) -> torch.device:
    cuda = torch.cuda.is_available() if workers.device == "auto" else workers.device == "cuda"
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def _sync(dit: torch.nn.Module, train: TrainConfig) -> Any:
    if train.sync == "deepspeed":
        from ops.deepspeed_sync import DeepSpeedSync

        return DeepSpeedSync(dit, train.optimizer, train.steps)
    from ops.sync import FlatSync

    return FlatSync(dit, train.optimizer, train.steps)


def _stacks() -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
