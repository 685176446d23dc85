"""`heddle sample --workers N`: many prompts on many workers, or every clip by all of them together.

Workers are Ray actors. The first of them encodes all prompts before any weights of the transformer are there; then all
load the checkpoint once. Apart, each takes a few neighbouring prompts whenever it is free; one that dies gives its
prompts back and is replaced. Together, all denoise every clip as one bag or two (`app.sampling.ways`) and decode its
tiles, where its VAE has any (`ops.models.decoding`), so that the first one is there sooner. A clip depends on its
prompt and seed alone, to rounding, so it does not matter which worker makes it.

Every finished clip is a file and a line in STEM.clips.jsonl; the same command continues after whatever stopped it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from actors.memory_kills import in_short
from actors.ray_calls import get, get_all, kill, node_address, put, remote_of, resources, wait
from actors.refs import Method, Ref
from app.device.choice import device_name
from app.drawing.video import contact_sheet, read_mp4, sheet_frames, write_mp4
from app.sampling.clips import ClipOrder, ClipSettings, clip_files, make_clips
from app.sampling.model import Model, SavedModel, saved_model
from app.sampling.occupancy import Occupancy
from app.sampling.prompts import EncodedPrompts, PromptRows
from app.sampling.ways import BagWay, Halves, cheapest_way
from ops.comm.collectives import Group
from ops.counted import counted
from ops.typed import ConfigError
from ops.waiting import GroupError
from ops.whole_file import write_whole

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from actors.plan.costs.profile import Profile
    from app.settings.config import RunConfig
    from ops.geometry import Geometry

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # of workers while they make one prompt; then it is the prompt that ends them
START_S = 900.0  # a worker's process and weights may take this long
_LOOK_S = 5.0
_COLLECTIVE_S = 600.0

T = TypeVar("T")


class CrewError(RuntimeError):
    """Workers that make clips have died, or do not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipJob:
    """What every worker gets. `checkpoint` is one complete checkpoint or an exported folder, seen by all nodes."""

    checkpoint: str
    other: str | None = None
    ema: bool
    device: str
    settings: ClipSettings
    halves: Halves = "auto"  # of workers that make each clip together: "auto", by what it costs

    @staticmethod
    def of(order: ClipOrder, device: str) -> ClipJob:
        """The job on "cpu", "cuda" or "auto"."""
        other = None if order.other is None else str(order.other)
        return ClipJob(
            checkpoint=str(order.checkpoint), other=other, ema=order.ema, device=device, settings=order.settings
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipWork:
    """Which neighbouring prompts a worker makes, and the pictures that their clips start from, if any."""

    number: int  # of the first of them
    first: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeClip:
    """A clip as it leaves its worker: the file's bytes, and the frames that a contact sheet shows."""

    mp4: bytes
    shown: np.ndarray
    seconds: float = 0.0  # that its worker computed for it, of those for all clips that it made together


class PromptQueue:
    """Which prompts are still to be made, and which workers have lost some. Chunks are neighbours, and become smaller
    to the end, so that all workers end at about the same time."""

    def __init__(self, total: int, finished: Iterable[int], limit: int, max_losses: int = MAX_LOSSES) -> None:
        done = set(finished)
        self._waiting = deque(index for index in range(total) if index not in done)
        self._limit, self.max_losses = limit, max_losses
        self._losses: dict[int, int] = {}
        self.unfinished = len(self._waiting)

    @property
    def waits(self) -> bool:
        """Whether a prompt waits to be given out."""
        return bool(self._waiting)

    def take(self, workers: int) -> list[int]:
        """The next chunk for one of `workers` workers; empty when nothing waits."""
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
        """The chunk's worker died: the chunk waits again, first. Returns prompts that have ended too many workers."""
        for index in chunk:
            self._losses[index] = self._losses.get(index, 0) + 1
        self._waiting.extendleft(reversed(chunk))
        return [index for index in chunk if self._losses[index] >= self.max_losses]


class ClipRecord:
    """Which clips of a job are finished: the job on the first line, a number on every further one."""

    def __init__(self, path: Path, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray] = ()) -> None:
        self.path = path
        pictures = [hashlib.sha256(picture.tobytes()).hexdigest() for picture in first]
        self._header = json.dumps({**asdict(job), "prompts": list(prompts), "first": pictures}, sort_keys=True)

    def finished(self) -> set[int]:
        """Numbers of the clips that the same job has finished; none where the record is of another one, which is begun
        anew."""
        try:
            header, *lines = self.path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            header, lines = "", []
        same = header == self._header
        found = {int(line) for line in lines[:-1] if line.isdigit()} if same else set()  # the last one may be torn
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "\n".join([self._header, *map(str, sorted(found)), ""]))
        return found

    def add(self, index: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")


class ClipWorker:
    """The actor: a checkpoint's modules on one device."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._job: ClipJob | None = None
        self._group: Group | None = None
        self._half: Group | None = None
        self._store: torch.distributed.TCPStore | None = None

    def encode(self, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray] = ()) -> Iterator[PromptRows]:
        """The negative prompt, then all prompts in their order: by one worker for all, before it loads the model.
        Raises what `saved_model` raises."""
        told = _saved(job).encode(prompts, job.settings.negative_prompt, first)
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
        groups = Groups(store, rank, members, backend, 0, _COLLECTIVE_S, CancelToken(), address)
        self._group = groups.get(members)
        slice_by(self._model.dit, way.rates)
        if way.bags == 2:
            self._half = groups.get(members[: way.size] if rank < way.size else members[way.size :])

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        """Clips of prompts that have been encoded. In a bag all call it at once, and rank 0 returns the clips."""
        assert self._job is not None and self._model is not None, "load comes first"
        begin = time.perf_counter()
        given, train = self._job.settings, self._model.config.train
        # a published pipeline is in bfloat16 on a GPU, which the machine that makes clips may not have
        sampler = replace(given.sampler, autocast=train.autocast == "bfloat16")
        settings = replace(given, seed=given.seed + work.number, sampler=sampler)
        prompts = EncodedPrompts(prompts=told, negative=negative)
        videos = make_clips(self._model, prompts, settings, work.first, group=self._group, half=self._half)
        made = [MadeClip(mp4=mp4_of(video, settings.fps), shown=sheet_frames(video)) for video in videos]
        return [replace(clip, seconds=(time.perf_counter() - begin) / len(made)) for clip in made]


class EncodeMethod(Protocol):
    """A method whose rows come one after the other."""

    def options(self, *, num_returns: Literal["streaming"]) -> EncodeMethod: ...
    def remote(
        self, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray]
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
    """Costs of a run's model on a device: the run's own profile where it is of this one, else by its FLOPs."""
    from actors.plan.types import PlanError
    from actors.planning.options import flop_profile, profile_of

    name = device_name(device) if device.type == "cuda" else "cpu"
    try:
        return profile_of(config.planner, config.model, geometry, name)
    except (OSError, PlanError) as error:  # of a file that is not here, or of other workers
        log.info("%s", error)
        return flop_profile(config.model, geometry, name)


def _saved(job: ClipJob) -> SavedModel:
    other = None if job.other is None else Path(job.other)
    saved = saved_model(Path(job.checkpoint), ema=job.ema, device=job.device, other=other)
    return saved.at_rate(job.settings.fps)


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
    max_losses: int = MAX_LOSSES,
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """Makes what is missing of the prompts' clips on the Ray that this process has joined; returns the files: the clips
    in order, then their contact sheet. Apart, a worker makes up to `batch` clips at once. A prompt that has cost
    `max_losses` workers is given up, and the job with it.

    Raises ConfigError where the cluster has no room for all workers asked for, what a worker raised, and CrewError.
    What is finished stays, and the same call continues.
    """
    files, sheet = clip_files(out, len(prompts))
    record = ClipRecord(sheet.with_name(f"{sheet.stem}.clips.jsonl"), job, prompts, first)
    finished = {index for index in record.finished() if index < len(files) and files[index].is_file()}
    if finished:
        tell(f"note: there already: {len(finished)} of {counted(len(prompts), 'clip')}")
    shown = {index: sheet_frames(read_mp4(files[index])) for index in finished}
    queue = PromptQueue(len(prompts), finished, 1 if together else batch, max_losses)
    begin = time.monotonic()

    def keep(chunk: Sequence[int], clips: Sequence[MadeClip]) -> None:
        for index, clip in zip(chunk, clips, strict=True):
            write_whole(files[index], clip.mp4)
            record.add(index)
            shown[index] = clip.shown
        made = len(shown) - len(finished)
        left = (time.monotonic() - begin) / made * (len(prompts) - len(shown))
        tell(f"{len(shown)}/{counted(len(prompts), 'clip')}, {timedelta(seconds=round(left))} left")

    if queue.unfinished:
        if queue.unfinished < workers and not together:
            tell(f"note: {counted(queue.unfinished, 'prompt')} to make: as many of the {workers} workers start")
        crew = _Crew(job, worker_class, workers if together else min(workers, queue.unfinished))
        wanted = [index for index in range(len(prompts)) if index not in finished]
        try:
            orders = _Orders.encoded(crew, prompts, first, wanted)
            if together:
                _make_together(crew, queue, orders, keep, tell)
            elif line := _make_apart(crew, queue, orders, keep, tell).summary():
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
    """The actors of a job: their processes start with it."""

    def __init__(self, job: ClipJob, worker_class: type, size: int) -> None:
        self.job, self.size = job, size
        offered = resources(free=False)
        gpus = offered.get("GPU", 0)
        self._gpu = job.device == "cuda" or (job.device == "auto" and gpus > 0)
        kind, have = ("GPU", gpus) if self._gpu else ("CPU", offered.get("CPU", 0))
        if have < size:
            raise ConfigError(f"--workers {size} need a {kind} each, and this Ray has {have:g}; use at most {have:g}.")
        options = {"num_cpus": 1, "num_gpus": 1 if self._gpu else 0, "max_restarts": 0}
        # without a GPU of its own a worker would still see those of the node
        self._job = replace(job, device="cuda" if self._gpu else "cpu")
        self._start: Callable[[], ClipWorkerHandle] = remote_of(worker_class).options(**options).remote
        self._unused = [self._start() for _ in range(size)]  # of the members: they have no task yet
        self.members = list(self._unused)

    def encode(self, prompts: Sequence[str], first: Sequence[np.ndarray]) -> list[Ref[PromptRows]]:
        """References to the rows of the negative prompt and of all prompts, by the first member, which loads the model
        afterwards. They are this process's own: no worker's end loses them."""
        import ray

        stream = self._unused[0].encode.options(num_returns="streaming").remote(self._job, prompts, first)
        waited: Any = stream  # Ray waits for one, too, which its types leave out
        rows: list[Ref[PromptRows]] = []
        while len(rows) <= len(prompts):
            ready, _ = ray.wait([waited], timeout=START_S, fetch_local=False)
            if not ready:
                raise CrewError(f"the prompts are not encoded after {START_S:.0f} s.")
            try:
                rows.append(put(get(next(stream))))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                raise CrewError(f"a worker died while it encoded the prompts: {_line(error)}") from None
        return rows

    def start(self) -> tuple[ClipWorkerHandle, Ref[None]]:
        """(a new worker, its loading under way)"""
        if self._unused:
            handle = self._unused.pop(0)
        else:
            handle = self._start()
            self.members.append(handle)
        return handle, handle.load.remote(self._job)

    def close(self) -> None:
        for handle in self.members:
            kill(handle)
        self.members.clear()
        self._unused.clear()


@dataclass(frozen=True, slots=True)
class _Orders:
    """All that is to be made, encoded."""

    prompts: Sequence[str]
    first: Sequence[np.ndarray]
    negative: Ref[PromptRows]
    rows: dict[int, Ref[PromptRows]]  # by number of the prompt

    @staticmethod
    def encoded(crew: _Crew, prompts: Sequence[str], first: Sequence[np.ndarray], wanted: Sequence[int]) -> _Orders:
        """The orders with the prompts of these numbers."""
        pictures = [first[index] for index in wanted] if first else []
        negative, *rows = crew.encode([prompts[index] for index in wanted], pictures)
        return _Orders(prompts, first, negative, dict(zip(wanted, rows, strict=True)))

    def begin(self, handle: ClipWorkerHandle, chunk: Sequence[int]) -> Ref[list[MadeClip]]:
        """Has a worker make the clips of these prompts."""
        pictures = tuple(self.first[index] for index in chunk) if self.first else ()
        work = ClipWork(number=chunk[0], first=pictures)
        return handle.make.remote(work, self.negative, *(self.rows[index] for index in chunk))


def _make_apart(
    crew: _Crew,
    queue: PromptQueue,
    orders: _Orders,
    keep: Callable[[Sequence[int], Sequence[MadeClip]], None],
    tell: Callable[[str], None],
) -> Occupancy:
    import ray

    started, occupancy = time.monotonic(), Occupancy()
    idle: list[ClipWorkerHandle] = []
    # answer that is awaited -> its worker, its chunk (none: it loads)
    busy: dict[Ref[list[MadeClip] | None], tuple[ClipWorkerHandle, list[int]]] = {}
    loading = crew.size

    def employ(handle: ClipWorkerHandle) -> None:
        chunk = queue.take(crew.size)
        occupancy.given_out(queue.waits, time.monotonic())
        if chunk:
            busy[orders.begin(handle, chunk)] = (handle, chunk)
        else:
            idle.append(handle)

    def hire() -> None:
        handle, loading = crew.start()
        busy[loading] = (handle, [])

    for _ in range(crew.size):
        hire()
    while queue.unfinished:
        ready, _ = wait(list(busy), timeout=_LOOK_S)
        if not ready:
            if time.monotonic() - started > START_S and not any(chunk for _, chunk in busy.values()):
                raise CrewError(f"no worker has loaded {crew.job.checkpoint} within {START_S:.0f} s.")
            continue
        handle, chunk = busy.pop(ready[0])
        try:
            clips = get(ready[0]) or []
        except ray.exceptions.RayActorError as error:
            if not chunk:  # it died before it could be asked: its replacement would, too
                raise CrewError(f"a worker died while it loaded {crew.job.checkpoint}: {_line(error)}") from None
            _take_back(queue, chunk, orders.prompts, error)
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
            loading -= 1
            if not loading:
                tell(f"note: {crew.size} worker(s) have loaded the model")
        employ(handle)  # before its clips are written: it need not wait for the disk
        if chunk:
            keep(chunk, clips)
            queue.finish(chunk)
    return occupancy


def _make_together(
    crew: _Crew,
    queue: PromptQueue,
    orders: _Orders,
    keep: Callable[[Sequence[int], Sequence[MadeClip]], None],
    tell: Callable[[str], None],
) -> None:
    import ray

    while queue.unfinished:
        chunk: list[int] = []
        try:
            members = _form(crew, tell)
            while queue.unfinished:
                chunk = queue.take(crew.size)
                answers = [orders.begin(handle, chunk) for handle in members]
                keep(chunk, _first_of(answers))
                queue.finish(chunk)
            return
        except ray.exceptions.RayTaskError as error:
            # what is not an exchange that failed is a fault of its own: it would come again
            if not isinstance(error.cause, GroupError | TimeoutError) or not _somebody_died(crew):
                raise error.cause from None
            _take_back(queue, chunk, orders.prompts, error)
        except ray.exceptions.RayActorError as error:
            if not chunk:
                raise CrewError(f"a worker died while it loaded {crew.job.checkpoint}: {_line(error)}") from None
            _take_back(queue, chunk, orders.prompts, error)
        log.warning("a worker died with prompts %s; all start again", chunk)
        crew.close()


def _first_of(answers: Sequence[Ref[T]]) -> T:
    """What the first rank has made, when all have ended. Raises what any of them has raised, at once: the others may
    still wait for it in an exchange."""
    waiting = list(answers)
    while waiting:
        done, waiting = wait(waiting, timeout=None)
        get_all(done)
    return get(answers[0])


def _form(crew: _Crew, tell: Callable[[str], None]) -> list[ClipWorkerHandle]:
    """Workers that have loaded the job and are one bag, or two. One more may have no place in them."""
    _answers(crew, [crew.start()[1] for _ in range(crew.size)], START_S, "loaded the model")
    first = crew.members[0]
    (way,) = _answers(crew, [first.way.remote(crew.size)], START_S, "said what a clip costs")
    ((host, port),) = _answers(crew, [first.serve.remote()], _COLLECTIVE_S, "opened a port")
    members = crew.members[: way.workers]
    joins = [handle.join.remote(rank, way, host, port) for rank, handle in enumerate(members)]
    _answers(crew, joins, _COLLECTIVE_S, "met the others")
    left = crew.size - way.workers
    tell(f"note: each clip is made by {way.describe()}{f'; {left} worker is left over' if left else ''}")
    return members


def _answers(crew: _Crew, calls: Sequence[Ref[T]], patience_s: float, what: str) -> list[T]:
    """Results of calls to workers. Raises what any of them has raised, at once, and CrewError, naming the workers that
    have not answered."""
    waiting, until = list(calls), time.monotonic() + patience_s
    while waiting:
        done, waiting = wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not done:
            late = ", ".join(str(calls.index(one)) for one in waiting)
            raise CrewError(f"worker(s) {late} of {crew.size} have not {what} within {patience_s:.0f} s.")
        get_all(done)
    return get_all(calls)


def _somebody_died(crew: _Crew) -> bool:
    """Whether a survivor's error comes of a peer that is gone: its collective failed."""
    import ray

    for handle in crew.members:
        actor: Any = handle  # a method that Ray gives every actor
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=_LOOK_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return True
    return False


def _take_back(queue: PromptQueue, chunk: Sequence[int], prompts: Sequence[str], error: Exception) -> None:
    """The prompts of a worker that has died wait again. Raises CrewError where one of them has cost too many."""
    if hopeless := queue.lose(chunk):
        raise CrewError(
            f"{queue.max_losses} worker(s) died while they made prompt {hopeless[0]} ({prompts[hopeless[0]]!r}): "
            f"{_line(error)} Clips that are finished stay; make smaller ones (--frames, --height, --width)."
        )


def _line(error: Exception) -> str:
    return " ".join(in_short(str(error)).split())[:300]
