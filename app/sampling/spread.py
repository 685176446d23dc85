"""`heddle sample --workers N`: many prompts on many workers, or every clip by all of them together.

Workers are Ray actors that load the checkpoint once. Apart, each takes a few neighbouring prompts whenever it is free;
one that dies gives its prompts back and is replaced. Together, all denoise every clip as one bag (Ulysses) and decode
its tiles, where its VAE has any (`ops.models.decoding`), so that the first one is there sooner. A clip depends on its
prompt and seed alone, to rounding, so it does not matter who makes it.

Every finished clip is a file and a line in STEM.clips.jsonl; the same command continues after whatever stopped it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from actors.ray_calls import node_address, resources
from app.drawing.video import contact_sheet, read_mp4, sheet_frames, write_mp4
from app.sampling.clips import ClipOrder, ClipSettings, clip_files, make_clips
from app.sampling.model import load_model
from app.sampling.occupancy import Occupancy
from ops.models.base.config import DiTConfig
from ops.sampling import SamplerConfig
from ops.typed import ConfigError
from ops.waiting import GroupError

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # of workers while they make one prompt; then it is the prompt that ends them
START_S = 900.0  # a worker's process and weights may take this long
_LOOK_S = 5.0
_COLLECTIVE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipJob:
    """What every worker is told. `checkpoint` is one complete checkpoint or an exported folder, seen by all nodes."""

    checkpoint: str
    other: str | None = None
    ema: bool
    device: str
    settings: ClipSettings

    @staticmethod
    def of(order: ClipOrder, device: str) -> ClipJob:
        """On "cpu", "cuda" or "auto"."""
        other = None if order.other is None else str(order.other)
        return ClipJob(
            checkpoint=str(order.checkpoint), other=other, ema=order.ema, device=device, settings=order.settings
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipWork:
    """Neighbouring prompts for a worker, and the pictures that their clips start from, if any."""

    number: int  # of the first of them
    prompts: tuple[str, ...]
    first: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeClip:
    """A clip as it leaves its worker: the file's bytes, and the frames that a contact sheet shows."""

    mp4: bytes
    shown: np.ndarray
    seconds: float = 0.0  # that its worker computed for it, of those for all clips that it made together


class PromptQueue:
    """Which prompts are still to be made, and who has lost some. Chunks are neighbours, and become smaller to the end,
    so that all workers end at about the same time."""

    def __init__(self, total: int, finished: Iterable[int], limit: int) -> None:
        done = set(finished)
        self._waiting = deque(index for index in range(total) if index not in done)
        self._limit = limit
        self._losses: dict[int, int] = {}
        self.unfinished = len(self._waiting)

    @property
    def waits(self) -> bool:
        """Whether a prompt waits to be given out."""
        return bool(self._waiting)

    def take(self, workers: int) -> list[int]:
        """The next chunk for one of so many workers; empty when nothing waits."""
        size = max(1, min(self._limit, len(self._waiting) // (2 * workers)))
        if self._waiting and self._waiting[0] in self._losses:
            size = 1  # which of the chunk was it?
        chunk: list[int] = []
        while self._waiting and len(chunk) < size and (not chunk or self._waiting[0] == chunk[-1] + 1):
            chunk.append(self._waiting.popleft())
        return chunk

    def finish(self, chunk: Sequence[int]) -> None:
        self.unfinished -= len(chunk)

    def lose(self, chunk: Sequence[int]) -> list[int]:
        """Its worker died: the chunk waits again, first. Returns prompts that have ended too many workers."""
        for index in chunk:
            self._losses[index] = self._losses.get(index, 0) + 1
        self._waiting.extendleft(reversed(chunk))
        return [index for index in chunk if self._losses[index] >= MAX_LOSSES]


class ClipRecord:
    """Which clips of a job are finished: the job on the first line, a number on every further one."""

    def __init__(self, path: Path, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray] = ()) -> None:
        self.path = path
        pictures = [hashlib.sha256(picture.tobytes()).hexdigest() for picture in first]
        self._header = json.dumps({**asdict(job), "prompts": list(prompts), "first": pictures}, sort_keys=True)

    def finished(self) -> set[int]:
        """Of the same job; none where the record is of another one, which is begun anew."""
        try:
            header, *lines = self.path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            header, lines = "", []
        same = header == self._header
        found = {int(line) for line in lines[:-1] if line.isdigit()} if same else set()  # the last one may be torn
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text("\n".join([self._header, *map(str, sorted(found)), ""]), encoding="utf-8")
        os.replace(part, self.path)
        return found

    def add(self, index: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")


class ClipWorker:
    """The actor: a checkpoint's modules on one device."""

    def __init__(self) -> None:
        self._model: Any = None
        self._job: ClipJob | None = None
        self._group: Any = None
        self._half: Any = None
        self._store: Any = None

    def load(self, job: ClipJob) -> None:
        """Raises what `load_model` raises."""
        other = None if job.other is None else Path(job.other)
        self._job = job
        self._model = load_model(Path(job.checkpoint), ema=job.ema, device=job.device, other=other)

    def serve(self) -> tuple[str, int]:
        """Where the others of a bag meet: a store in this process."""
        import torch.distributed as dist

        host = node_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        return host, self._store.port

    def join(self, rank: int, size: int, host: str, port: int) -> None:
        """Be one rank of a bag of all workers, and of the half of it that computes one branch of guidance; all call it
        at once."""
        import torch.distributed as dist

        from actors.planning.options import flop_profile
        from ops.groups import Groups
        from ops.models.experts import slice_by
        from ops.waiting import CancelToken

        store = self._store or dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        backend = "nccl" if self._model.device.type == "cuda" else "gloo"
        address = node_address()
        members = tuple(range(size))
        groups = Groups(store, rank, members, backend, 0, _COLLECTIVE_S, CancelToken(), address)
        self._group = groups.get(members)
        assert self._job is not None, "load comes first"
        model = self._model.config.model
        if model.dit.spatial_temporal:  # nothing is measured; equal on all ranks, whatever GPUs they have
            device = "H100" if self._model.device.type == "cuda" else "cpu"
            slice_by(self._model.dit, flop_profile(model, self._model.geometry, device).slice_rates())
        if in_halves(size, self._model.config.model.dit, self._job.settings.sampler):
            middle = size // 2
            self._half = groups.get(members[:middle] if rank < middle else members[middle:])

    def make(self, work: ClipWork) -> list[MadeClip]:
        """In a bag all call it at once, and rank 0 returns the clips."""
        assert self._job is not None, "load comes first"
        begin = time.perf_counter()
        told, train = self._job.settings, self._model.config.train
        # a published pipeline is in bfloat16 on a GPU, which who asks for clips may not have
        sampler = replace(told.sampler, autocast=train.autocast == "bfloat16")
        settings = replace(told, seed=told.seed + work.number, sampler=sampler)
        videos = make_clips(self._model, work.prompts, settings, work.first, group=self._group, half=self._half)
        made = [MadeClip(mp4=mp4_of(video, settings.fps), shown=sheet_frames(video)) for video in videos]
        return [replace(clip, seconds=(time.perf_counter() - begin) / len(made)) for clip in made]


def in_halves(workers: int, dit: DiTConfig, sampler: SamplerConfig) -> bool:
    """Whether workers that make each clip together are two bags, for guidance's two branches: as much is computed as by
    one bag, and exchanges have half the ends."""
    return sampler.is_guided and not dit.takes_guidance and workers % 2 == 0


def check_together(workers: int, dit: DiTConfig, sampler: SamplerConfig, grid: tuple[int, int, int]) -> None:
    """Raises ConfigError for more workers than one bag, or two halves, can have for clips of this token grid."""
    if not dit.spatial_temporal:
        return
    frames, positions = grid[0], grid[1] * grid[2]
    most = max(frames, positions) * (2 if in_halves(workers, dit, sampler) else 1)
    if workers > most:
        raise ConfigError(
            f"--workers {workers} --together: a clip has {frames} frames of {positions} positions, which are dealt "
            f"to at most {most} workers here. Use {most} or fewer, or larger clips."
        )


def mp4_of(video: np.ndarray, fps: float) -> bytes:
    """The bytes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_mp4(path, video, fps)
        return path.read_bytes()


def spread(
    job: ClipJob,
    prompts: Sequence[str],
    out: Path,
    workers: int,
    *,
    first: Sequence[np.ndarray] = (),
    batch: int = 1,
    together: bool = False,
    worker_class: type = ClipWorker,
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """Makes what is missing of the prompts' clips on the Ray that this process has joined; returns the files: the clips
    in order, then their contact sheet. Apart, a worker makes up to `batch` clips at once.

    Raises ConfigError where the cluster has no room for so many workers, and what a worker raised. What is finished
    stays, and the same call continues.
    """
    files, sheet = clip_files(out, len(prompts))
    record = ClipRecord(sheet.with_name(f"{sheet.stem}.clips.jsonl"), job, prompts, first)
    finished = {index for index in record.finished() if index < len(files) and files[index].is_file()}
    if finished:
        tell(f"note: {len(finished)} of {len(prompts)} clips are there already")
    shown = {index: sheet_frames(read_mp4(files[index])) for index in finished}
    queue = PromptQueue(len(prompts), finished, 1 if together else batch)
    begin = time.monotonic()

    def work_of(chunk: Sequence[int]) -> ClipWork:
        pictures = tuple(first[index] for index in chunk) if first else ()
        return ClipWork(number=chunk[0], prompts=tuple(prompts[index] for index in chunk), first=pictures)

    def keep(chunk: Sequence[int], clips: Sequence[MadeClip]) -> None:
        for index, clip in zip(chunk, clips, strict=True):
            part = files[index].with_name(f"{files[index].name}.part")
            part.write_bytes(clip.mp4)
            os.replace(part, files[index])
            record.add(index)
            shown[index] = clip.shown
        made = len(shown) - len(finished)
        left = (time.monotonic() - begin) / made * (len(prompts) - len(shown))
        tell(f"{len(shown)}/{len(prompts)} clips, {timedelta(seconds=round(left))} left")

    if queue.unfinished:
        if queue.unfinished < workers and not together:
            tell(f"note: {queue.unfinished} prompt(s) to make: as many of the {workers} workers start")
        crew = _Crew(job, worker_class, workers if together else min(workers, queue.unfinished))
        try:
            if together:
                _make_together(crew, queue, work_of, keep)
            elif line := _make_apart(crew, queue, work_of, keep).summary():
                tell(line)
        finally:
            crew.close()
    contact_sheet(
        sheet, [shown[index] for index in range(len(prompts))], prompts, columns=1 if len(prompts) <= 4 else 2
    )
    sheet.with_suffix(".json").write_text(json.dumps(list(prompts)), encoding="utf-8")
    record.path.unlink()
    return [*files, sheet]


class _Crew:
    """The actors of a job."""

    def __init__(self, job: ClipJob, worker_class: type, size: int) -> None:
        import ray

        self.job, self.size = job, size
        offered = resources(free=False)
        gpus = offered.get("GPU", 0)
        self._gpu = job.device == "cuda" or (job.device == "auto" and gpus > 0)
        kind, have = ("GPU", gpus) if self._gpu else ("CPU", offered.get("CPU", 0))
        if have < size:
            raise ConfigError(f"--workers {size} need a {kind} each, and this Ray has {have:g}; use at most {have:g}.")
        options = {"num_cpus": 1, "num_gpus": 1 if self._gpu else 0, "max_restarts": 0}
        self._actor: Any = ray.remote(worker_class).options(**options)
        self.members: list[Any] = []

    def start(self) -> tuple[Any, Any]:
        """(a new worker, its loading under way)"""
        # without a GPU of its own a worker would still see those of the node
        job = replace(self.job, device="cuda" if self._gpu else "cpu")
        handle = self._actor.remote()
        self.members.append(handle)
        return handle, handle.load.remote(job)

    def close(self) -> None:
        import ray

        for handle in self.members:
            ray.kill(handle)
        self.members.clear()


def _make_apart(
    crew: _Crew,
    queue: PromptQueue,
    work_of: Callable[[Sequence[int]], ClipWork],
    keep: Callable[[Sequence[int], Sequence[MadeClip]], None],
) -> Occupancy:
    import ray

    started, occupancy = time.monotonic(), Occupancy()
    idle: list[Any] = []
    busy: dict[Any, tuple[Any, list[int]]] = {}  # answer that is awaited -> its worker, its chunk (none: it loads)

    def employ(handle: Any) -> None:
        chunk = queue.take(crew.size)
        occupancy.given_out(queue.waits, time.monotonic())
        if chunk:
            busy[handle.make.remote(work_of(chunk))] = (handle, chunk)
        else:
            idle.append(handle)

    def hire() -> None:
        handle, loading = crew.start()
        busy[loading] = (handle, [])

    for _ in range(crew.size):
        hire()
    while queue.unfinished:
        ready, _ = ray.wait(list(busy), timeout=_LOOK_S)
        if not ready:
            if time.monotonic() - started > START_S and not any(chunk for _, chunk in busy.values()):
                raise TimeoutError(f"no worker has loaded {crew.job.checkpoint} within {START_S:.0f} s.")
            continue
        handle, chunk = busy.pop(ready[0])
        try:
            clips = ray.get(ready[0])
        except ray.exceptions.RayActorError as error:
            if not chunk:  # it died before it could be asked: its replacement would, too
                raise RuntimeError(f"a worker died while it loaded {crew.job.checkpoint}: {_line(error)}") from None
            _give_up(queue.lose(chunk), work_of, error)
            occupancy.given_out(queue.waits, time.monotonic())
            occupancy.died(handle)
            log.warning("a worker died with prompts %s; another one makes them", chunk)
            crew.members.remove(handle)
            started = time.monotonic()
            hire()
            for waiting in [idle.pop() for _ in range(len(idle))]:
                employ(waiting)
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if chunk:
            occupancy.answered(handle, sum(clip.seconds for clip in clips), time.monotonic())
        else:
            occupancy.ready(handle, time.monotonic())
        employ(handle)  # before its clips are written: it need not wait for the disk
        if chunk:
            keep(chunk, clips)
            queue.finish(chunk)
    return occupancy


def _make_together(
    crew: _Crew,
    queue: PromptQueue,
    work_of: Callable[[Sequence[int]], ClipWork],
    keep: Callable[[Sequence[int], Sequence[MadeClip]], None],
) -> None:
    import ray

    while queue.unfinished:
        chunk: list[int] = []
        try:
            _form(crew)
            while queue.unfinished:
                chunk = queue.take(crew.size)
                answers = [handle.make.remote(work_of(chunk)) for handle in crew.members]
                keep(chunk, _first_of(answers))
                queue.finish(chunk)
            return
        except ray.exceptions.RayTaskError as error:
            # what is not an exchange that failed is a fault of its own: it would come again
            if not isinstance(error.cause, GroupError | TimeoutError) or not _somebody_died(crew):
                raise error.cause from None
            _give_up(queue.lose(chunk), work_of, error)
        except ray.exceptions.RayActorError as error:
            if not chunk:
                raise RuntimeError(f"a worker died while it loaded {crew.job.checkpoint}: {_line(error)}") from None
            _give_up(queue.lose(chunk), work_of, error)
        log.warning("a worker died with prompts %s; all start again", chunk)
        crew.close()


def _first_of(answers: Sequence[Any]) -> Any:
    """What the first rank has made, when all have ended. Raises what any of them has raised, at once: the others may
    still wait for it in an exchange."""
    import ray

    waiting = list(answers)
    while waiting:
        done, waiting = ray.wait(waiting)
        ray.get(done)
    return ray.get(answers[0])


def _form(crew: _Crew) -> None:
    """Workers that have loaded the job and are one bag."""
    import ray

    ray.get([crew.start()[1] for _ in range(crew.size)], timeout=START_S)
    host, port = ray.get(crew.members[0].serve.remote(), timeout=_COLLECTIVE_S)
    joins = [handle.join.remote(rank, crew.size, host, port) for rank, handle in enumerate(crew.members)]
    ray.get(joins, timeout=_COLLECTIVE_S)


def _somebody_died(crew: _Crew) -> bool:
    """Whether a survivor's error comes of a peer that is gone: its collective failed."""
    import ray

    for handle in crew.members:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=_LOOK_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return True
    return False


def _give_up(hopeless: Sequence[int], work_of: Callable[[Sequence[int]], ClipWork], error: Exception) -> None:
    if hopeless:
        (prompt,) = work_of(hopeless[:1]).prompts
        raise RuntimeError(
            f"{MAX_LOSSES} worker(s) died while they made prompt {hopeless[0]} ({prompt!r}): "
            f"{_line(error)} Clips that are finished stay; make smaller ones (--frames, --height, --width)."
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
