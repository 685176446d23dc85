"""One worker of `heddle sample --workers N` as an actor, and what it gets and answers (`app.sampling.spread`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from actors.ray_calls import node_address
from actors.refs import Method, Ref
from app.device.choice import device_name
from app.drawing.video import mp4_of, sheet_frames
from app.sampling.clips import ClipOrder, ClipSettings, groups_of, make_clips
from app.sampling.model import Model, SavedModel, saved_model
from app.sampling.prompts import EncodedPrompts, PromptRows
from app.sampling.ways import BagWay, Halves, cheapest_way, has_points
from ops.comm.collectives import Group
from ops.models.added_lora import LoraFile
from ops.models.base.flops import ALL_TRAINED

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from actors.plan.costs.profile import Profile
    from app.settings.config import RunConfig
    from ops.geometry import Geometry

log = logging.getLogger(__name__)

COLLECTIVE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipJob:
    """What every worker gets. `checkpoint` is one complete checkpoint or an exported folder, seen by all nodes."""

    checkpoint: str
    other: str | None = None
    loras: tuple[LoraFile, ...] = ()
    ema: bool
    device: str
    settings: ClipSettings
    halves: Halves = "auto"  # of workers that make each clip together: "auto", by what it costs

    @staticmethod
    def of(order: ClipOrder, device: str) -> ClipJob:
        """The job on "cpu", "cuda" or "auto"."""
        other = None if order.other is None else str(order.other)
        return ClipJob(
            checkpoint=str(order.checkpoint),
            other=other,
            loras=order.loras,
            ema=order.ema,
            device=device,
            settings=order.settings,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipWork:
    """What a worker makes of prompts of one kind: all but their texts, seeds and pictures is the same."""

    settings: ClipSettings
    seeds: tuple[int, ...]
    first: tuple[np.ndarray, ...] = ()  # the pictures that their clips start from, if any


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeClip:
    """A clip as it leaves its worker: the file's bytes, and the frames that a contact sheet shows."""

    mp4: bytes
    shown: np.ndarray
    seconds: float = 0.0  # that its worker computed for it: a share of those for the clips that it made together


class ClipWorker:
    """The actor: a checkpoint's modules on one device."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._job: ClipJob | None = None
        self._group: Group | None = None
        self._half: Group | None = None
        self._store: torch.distributed.TCPStore | None = None

    def encode(
        self, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray | None] = ()
    ) -> Iterator[PromptRows]:
        """The negative prompt, then the prompts, of each of the `groups_of` them: by one worker for all, before it
        loads the model. Raises what `saved_model` raises."""
        groups = groups_of(prompts, job.settings, first)
        asked = [(group.texts, group.settings.negative_prompt, group.first) for group in groups]
        for told in _saved(job).encode_each(asked):
            for rows in (told.negative, *told.prompts):  # noqa: UP028  (Ray drives no `yield from`)
                yield rows

    def load(self, job: ClipJob) -> None:
        """Raises what `saved_model` raises."""
        self._job, self._model = job, _saved(job).load()

    def serve(self) -> tuple[str, int]:
        """Where the others of a bag meet: a store in this process."""
        import torch.distributed as dist

        host = node_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        return host, self._store.port

    def way(self, workers: int) -> BagWay:
        """How `workers` like this one make each clip together. One of them says it, and all do it."""
        assert self._job is not None and self._model is not None, "load comes first"
        model = self._model
        profile = profile_for(model.config, model.geometry, model.device)
        return cheapest_way(workers, model.config.model, self._job.settings, model.geometry, profile, self._job.halves)

    def join(self, rank: int, way: BagWay, host: str, port: int) -> None:
        """Be one rank of a bag of all that make clips, and of the half of it that computes one branch of guidance; all
        call it at once."""
        import torch.distributed as dist

        from ops.comm.groups import Groups
        from ops.models.experts import slice_by
        from ops.waiting import CancelToken

        assert self._model is not None, "load comes first"
        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        backend = "nccl" if self._model.device.type == "cuda" else "gloo"
        address = node_address()
        members = tuple(range(way.workers))
        groups = Groups(store, rank, members, backend, 0, COLLECTIVE_S, CancelToken(), address)
        self._group = groups.get(members)
        slice_by(self._model.dit, way.rates)
        if way.bags == 2:
            self._half = groups.get(members[: way.size] if rank < way.size else members[way.size :])

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        """Clips of prompts that have been encoded. In a bag all call it at once, and rank 0 returns the clips."""
        assert self._job is not None and self._model is not None, "load comes first"
        begin = time.perf_counter()
        train = self._model.config.train
        # a published pipeline is in bfloat16 on a GPU, which the machine that makes clips may not have
        sampler = replace(work.settings.sampler, autocast=train.autocast == "bfloat16")
        settings = replace(work.settings, sampler=sampler)
        prompts = EncodedPrompts(prompts=told, negative=negative)
        videos = make_clips(
            self._model, prompts, settings, work.first, group=self._group, half=self._half, seeds=work.seeds
        )
        made = [MadeClip(mp4=mp4_of(video, settings.fps), shown=sheet_frames(video)) for video in videos]
        return [replace(clip, seconds=(time.perf_counter() - begin) / len(made)) for clip in made]


class EncodeMethod(Protocol):
    """A method whose rows come one after the other."""

    def options(self, *, num_returns: Literal["streaming"]) -> EncodeMethod: ...
    def remote(
        self, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray | None]
    ) -> Iterator[Ref[PromptRows]]: ...


class MakeMethod(Protocol):
    """A method that takes references to rows."""

    def remote(self, work: ClipWork, negative: Ref[PromptRows], *told: Ref[PromptRows]) -> Ref[list[MadeClip]]: ...


class ClipWorkerHandle(Protocol):
    """A `ClipWorker` as the command knows it."""

    @property
    def encode(self) -> EncodeMethod: ...
    @property
    def load(self) -> Method[[ClipJob], None]: ...
    @property
    def serve(self) -> Method[[], tuple[str, int]]: ...
    @property
    def way(self) -> Method[[int], BagWay]: ...
    @property
    def join(self) -> Method[[int, BagWay, str, int], None]: ...
    @property
    def make(self) -> MakeMethod: ...


def profile_for(config: RunConfig, geometry: Geometry, device: torch.device) -> Profile:
    """Costs of a run's model on a device: the run's own profile where passes of its transformer were measured on this
    one in the run's precision, else by the FLOPs of training all weights."""
    from actors.plan.types import PlanError
    from actors.planning.options import flop_profile, profile_of

    name = device_name(device) if device.type == "cuda" else "cpu"
    # clips are made of weights on the device, wherever those of a training lie
    train = replace(config.train, memory=replace(config.train.memory, parameters="auto"))
    if config.planner.profile:
        try:
            found = profile_of(config.planner, config.model, geometry, name, train)
            if has_points(found):
                return found
        except (OSError, PlanError) as error:  # of a file that is not here, or of other workers
            log.info("%s", error)
    return flop_profile(config.model, geometry, name, train=train, part=ALL_TRAINED)


def _saved(job: ClipJob) -> SavedModel:
    other = None if job.other is None else Path(job.other)
    saved = saved_model(Path(job.checkpoint), ema=job.ema, device=job.device, other=other, loras=job.loras)
    return saved.at_rate(job.settings.fps)
