"""One worker of `heddle data cache` as an actor, and what it gets and answers (`app.caching.fill`).

It encodes as a worker of the run does (`actors.worker.encoding`), with one encoder on its device at a time. Several
calls run in it at once: while one encodes, others decode and write.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.config import TrainConfig, WorkersConfig
from actors.messages import FailedStart, HostGpu
from actors.plan.types import Module
from actors.ray_calls import given_gpu, node_id
from actors.refs import Method
from actors.worker.encoding import NoMeasure, encode_clips, encode_texts
from actors.worker.loading import EncoderSet, GpuUnusable, device_of
from actors.worker.measure import in_halves
from actors.worker.meter import collect
from data.cache import Cache, EntryKind
from data.config import CacheConfig
from data.engines.child import DecodeProcess, DecoderDied, DecoderHung, decode_isolated
from data.ledger import BadSample, Fault
from data.types import Batch, DecodeJob
from ops.attention.sdpa import leave_out_cudnn
from ops.comm.collectives import Group
from ops.models.config import ModelConfig
from ops.models.first_frame import FirstFrame
from ops.models.folders import resolve
from ops.packed.uploads import expect
from ops.precision import allow_tf32
from ops.waiting import first_line

log = logging.getLogger(__name__)

MODULES: dict[EntryKind, Module] = {"latents": "vae", "text": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FillJob:
    """What every worker gets: the run's settings, as far as they decide what an entry is."""

    model: ModelConfig
    train: TrainConfig
    workers: WorkersConfig
    cache: CacheConfig
    clip_timeout_s: float
    sign: str  # a file in the folder of the cache, which whoever has the same folder sees
    largest_upload: int = 0  # bytes of the pixels that a VAE takes to its device at once


@dataclass(frozen=True, kw_only=True, slots=True)
class FillUnit:
    """Entries of one kind that are made together: of the clips of a job, one for each of its slots, or of captions."""

    number: int
    kind: EntryKind
    keys: tuple[str, ...]
    captions: tuple[str, ...] = ()  # of texts
    job: DecodeJob | None = None  # the clips; None: texts that no pixels are needed for


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledUnit:
    """What became of its entries, by their places in the unit."""

    number: int
    kept: tuple[int, ...]
    num_bytes: int = 0  # of these
    there: tuple[int, ...] = ()  # that another process has made meanwhile
    faults: tuple[tuple[int, Fault], ...] = ()
    failed: tuple[int, ...] = ()  # that the disk did not take
    why: str = ""  # it did not, or does not any more
    full: bool = False  # nor will it take others


class Unshared(RuntimeError):
    """The folder of the cache is another one on this worker's node."""


class _Unloaded(RuntimeError):
    """An encoder cannot be loaded, for the reason that is its cause."""


class _Parts(NoMeasure):
    """Encodes as many samples at once as memory allows."""

    def in_parts(self, encode: Callable[[range], list[Tensor]], samples: range) -> list[Tensor]:
        return in_halves(encode, samples)


class FillWorker:
    """The actor, on one device."""

    def __init__(self, name: str = "w0") -> None:
        self.name = name
        self._here = HostGpu(node=node_id(), host=socket.gethostname(), gpu=given_gpu())
        self._encoding = threading.Lock()  # of the device
        self._own = threading.local()  # each thread's decode process

    def load(self, job: FillJob) -> HostGpu | FailedStart:
        """Where it is, or what keeps it from starting, with the place where that is, which an error of an actor does
        not have."""
        try:
            self._load(job)
        except Exception as error:
            return self._failed(error)
        return self._here

    def _failed(self, error: Exception) -> FailedStart:
        log.exception("worker %s does not start", self.name)
        kind = "" if isinstance(error, GpuUnusable | Unshared) else f"{type(error).__name__}: "
        return FailedStart(worker=self.name, why=f"{kind}{first_line(error)}", where=self._here)

    def _load(self, job: FillJob) -> None:
        """Raises GpuUnusable, Unshared, and what reading the model's folders raises."""
        here = self._here
        self._job, self._cache = job, Cache(job.cache)
        if not (self._cache.root / job.sign).is_file():
            raise Unshared(
                f"data.cache.path {self._cache.root} on {here.host} is not the folder that this command writes to. "
                f"Give one that all nodes share."
            )
        torch.set_num_threads(job.workers.torch_threads)
        allow_tf32(job.train.allows_tf32)
        leave_out_cudnn()
        self._device = device_of(job.workers, here)
        if self._device.type == "cuda":
            expect(self._device, job.largest_upload)
        model, self._geometry = resolve(job.model)
        # Nothing lies beside an encoder here, and a call would bring as much there for every unit.
        self._model = replace(model, text=replace(model.text, place="device"))
        self._encoders = self._none_made()
        self._made: Module | None = None

    def fill(self, unit: FillUnit) -> FilledUnit | FailedStart:
        """Make the entries of a unit that are not there; what keeps the encoder from being loaded is the answer. Raises
        DataIOError where storage fails."""
        try:
            return self._fill(unit)
        except _Unloaded as error:
            assert isinstance(error.__cause__, Exception), "raised from what loading has raised"
            return self._failed(error.__cause__)

    def _fill(self, unit: FillUnit) -> FilledUnit:
        there = tuple(place for place, key in enumerate(unit.keys) if self._cache.has(unit.kind, key))
        wanted = [place for place in range(len(unit.keys)) if place not in there]
        if not wanted:
            return FilledUnit(number=unit.number, kept=(), there=there)
        batch = self._decoded(unit.job, wanted) if unit.job is not None else None
        captions = [unit.captions[place] for place in wanted] if unit.captions else []
        good = [index for index in range(len(wanted)) if batch is None or batch.ok[index]]
        rows = self._encoded(unit.kind, captions, batch, good) if good else {}
        kept, failed, size = [], [], 0
        for index, array in rows.items():
            if self._cache.put(unit.kind, unit.keys[wanted[index]], array):
                kept.append(wanted[index])
                size += array.nbytes
            else:
                failed.append(wanted[index])
        faults, unmarked = self._marked(unit, wanted, batch)
        failed += unmarked
        full = self._cache.full  # another thread may have met its end
        return FilledUnit(
            number=unit.number,
            kept=tuple(kept),
            num_bytes=size,
            there=there,
            faults=faults,
            failed=tuple(failed),
            why=self._cache.why_not if failed or full else "",
            full=full,
        )

    def _decoded(self, job: DecodeJob, wanted: Sequence[int]) -> Batch:
        """The clips at these places, in a process of this thread's own. One that ends it is named."""
        some, limit_s = replace(job, clips=tuple(job.clips[place] for place in wanted)), self._job.clip_timeout_s
        if not hasattr(self._own, "decoder"):
            self._own.decoder = DecodeProcess()
        decoder: DecodeProcess = self._own.decoder
        try:
            return decoder.decode(some, limit_s * len(wanted))
        except (DecoderDied, DecoderHung) as error:
            log.warning("%s in %s; its clips are decoded one by one", error, job.item)
            return decode_isolated(some, limit_s)

    def _encoded(
        self, kind: EntryKind, captions: Sequence[str], batch: Batch | None, good: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """The rows of what is good, in fp32 as a run keeps them."""
        solo, measure, device = Group.solo(), _Parts(), self._device
        with self._encoding:
            self._host(MODULES[kind])
            encoders = self._encoders
            if kind == "text":
                texts = [captions[index] for index in good]
                seen = [batch.video[index, 0] for index in good] if batch is not None else []
                rows = encode_texts(encoders.text, texts, solo, measure, device, seen)
            else:
                assert batch is not None, "latents are made of pixels"
                pixels = torch.from_numpy(batch.video[list(good)] if len(good) < len(batch.ok) else batch.video)
                rows = encode_clips(encoders, FirstFrame.of(self._model), pixels, solo, measure, device)
            found = [row.float().cpu().numpy() for row in rows]
        return dict(zip(good, found, strict=True))

    def _marked(
        self, unit: FillUnit, wanted: Sequence[int], batch: Batch | None
    ) -> tuple[tuple[tuple[int, Fault], ...], list[int]]:
        """The faults of clips that were not decoded, marked in the cache, and places whose mark was not written."""
        if batch is None:
            return (), []
        bad = [index for index, good in enumerate(batch.ok) if not good]
        marked, unmarked = [], []
        for index, fault in zip(bad, batch.faults, strict=True):
            error, place = BadSample(fault.reason, fault.detail, fault.offset), wanted[index]
            if self._cache.mark(unit.kind, unit.keys[place], error):
                marked.append((place, fault))
            else:
                unmarked.append(place)
        return tuple(marked), unmarked

    def _host(self, module: Module) -> None:
        """Have this encoder on the device, and no other: a device too small for both has room for one. Raises
        _Unloaded."""
        if self._made == module:
            return
        self._encoders, self._made = self._none_made(), None
        collect()
        try:
            self._encoders.ready(module)
        except Exception as error:
            raise _Unloaded from error
        self._made = module

    def _none_made(self) -> EncoderSet:
        return EncoderSet.late(self._model, self._geometry, self._device)


class FillWorkerHandle(Protocol):
    """A `FillWorker` as the command knows it."""

    @property
    def load(self) -> Method[[FillJob], HostGpu | FailedStart]: ...
    @property
    def fill(self) -> Method[[FillUnit], FilledUnit | FailedStart]: ...
