"""The workers of `heddle sample --workers N`: started, loaded, given their orders, and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from actors.memory_kills import in_short
from actors.pool.own_gpu import own_gpu
from actors.ray_calls import GONE, get, get_all, kill, put, remote_of, resources, wait
from actors.refs import Ref
from app.sampling.clip_worker import COLLECTIVE_S, ClipJob, ClipWork, ClipWorkerHandle, MadeClip
from app.sampling.clips import ClipSettings, groups_of
from app.sampling.prompts import PromptRows
from app.sampling.ways import BagWay
from ops.counted import counted
from ops.typed import ConfigError

log = logging.getLogger(__name__)

START_S = 900.0  # a worker's process and weights may take this long
LOOK_S = 5.0

T = TypeVar("T")


class CrewError(RuntimeError):
    """Workers that make clips have died, or do not answer."""


class ClipCrew:
    """The actors of a job: their processes start with it."""

    def __init__(self, job: ClipJob, worker_class: type, size: int) -> None:
        self.job, self.size = job, size
        offered = resources(free=False)
        gpus = offered.get("GPU", 0)
        self._gpu = job.device == "cuda" or (job.device == "auto" and gpus > 0)
        kind, have = ("GPU", gpus) if self._gpu else ("CPU", offered.get("CPU", 0))
        if have < size:
            raise ConfigError(f"--workers {size} need a {kind} each, and this Ray has {have:g}; use at most {have:g}.")
        options = {"num_cpus": 1, "max_restarts": 0, **own_gpu(1 if self._gpu else 0)}
        # without a GPU of its own a worker would still see those of the node
        self._job = replace(job, device="cuda" if self._gpu else "cpu")
        self._start: Callable[[], ClipWorkerHandle] = remote_of(worker_class).options(**options).remote
        self._unused = [self._start() for _ in range(size)]  # of the members: they have no task yet
        self.members = list(self._unused)

    def encode(
        self, prompts: Sequence[str], first: Sequence[np.ndarray | None], count: int, max_losses: int
    ) -> list[Ref[PromptRows]]:
        """References to the `count` rows of negative prompts and prompts (`ClipWorker.encode`), by the first member,
        which loads the model afterwards. They are this process's own: no worker's end loses them. Where a member dies
        over them the next one encodes all; raises CrewError when `max_losses` have died."""
        deaths = 0
        while True:
            try:
                return self._encoded(self._unused[0], prompts, first, count)
            except GONE as error:
                deaths += 1
                check_deaths(deaths, max_losses, "encoding the prompts", error)
                gone = self._unused.pop(0)
                kill(gone)  # it may be out of reach alone, and would keep its place
                self.members.remove(gone)
                self._unused.append(self._start())
                self.members.append(self._unused[-1])

    def _encoded(
        self, handle: ClipWorkerHandle, prompts: Sequence[str], first: Sequence[np.ndarray | None], count: int
    ) -> list[Ref[PromptRows]]:
        """The rows, by this member. Raises Ray's error where it dies."""
        import ray

        stream = handle.encode.options(num_returns="streaming").remote(self._job, prompts, first)
        waited: Any = stream  # Ray waits for one, too, which its types leave out
        rows: list[Ref[PromptRows]] = []
        while len(rows) < count:
            ready, _ = ray.wait([waited], timeout=START_S, fetch_local=False)
            if not ready:
                raise CrewError(f"the prompts are not encoded after {START_S:.0f} s.")
            try:
                rows.append(put(get(next(stream))))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
        return rows

    def start(self) -> tuple[ClipWorkerHandle, Ref[None]]:
        """(a new worker, its loading under way)"""
        if self._unused:
            handle = self._unused.pop(0)
        else:
            handle = self._start()
            self.members.append(handle)
        return handle, handle.load.remote(self._job)

    def together(self) -> tuple[list[ClipWorkerHandle], BagWay]:
        """(workers that have loaded the job and are one bag or two, how they make a clip). One more may have no place
        in them."""
        self._answers([self.start()[1] for _ in range(self.size)], START_S, "loaded the model")
        first = self.members[0]
        (way,) = self._answers([first.way.remote(self.size)], START_S, "said what a clip costs")
        ((host, port),) = self._answers([first.serve.remote()], COLLECTIVE_S, "opened a port")
        bag = self.members[: way.workers]
        joins = [handle.join.remote(rank, way, host, port) for rank, handle in enumerate(bag)]
        self._answers(joins, COLLECTIVE_S, "met the others")
        return bag, way

    def has_lost_one(self) -> bool:
        """Whether a member is gone, so that an exchange of another has failed."""
        import ray

        for handle in self.members:
            actor: Any = handle  # a method that Ray gives every actor
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=LOOK_S)
            except (*GONE, ray.exceptions.GetTimeoutError):
                return True
        return False

    def close(self) -> None:
        for handle in self.members:
            kill(handle)
        self.members.clear()
        self._unused.clear()

    def _answers(self, calls: Sequence[Ref[T]], patience_s: float, what: str) -> list[T]:
        """Results of calls to members. Raises what any of them has raised, at once, and CrewError, naming the members
        that have not answered."""
        waiting, until = list(calls), time.monotonic() + patience_s
        while waiting:
            done, waiting = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not done:
                late = ", ".join(str(calls.index(one)) for one in waiting)
                raise CrewError(f"worker(s) {late} of {self.size} have not {what} within {patience_s:.0f} s.")
            get_all(done)
        return get_all(calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedJob:
    """All that is to be made, encoded. All but `prompts` is by number of the prompt."""

    prompts: Sequence[str]
    first: dict[int, np.ndarray]
    settings: dict[int, ClipSettings]  # with the seed of each
    groups: dict[int, int] = field(default_factory=dict)  # prompts of one may be made together
    negative: dict[int, Ref[PromptRows]] = field(default_factory=dict)
    rows: dict[int, Ref[PromptRows]] = field(default_factory=dict)

    @staticmethod
    def of(
        crew: ClipCrew,
        prompts: Sequence[str],
        first: Sequence[np.ndarray | None],
        wanted: Sequence[int],
        max_losses: int,
    ) -> EncodedJob:
        """The prompts of the numbers `wanted`, encoded. Raises as `ClipCrew.encode`."""
        given, settings = [prompts[index] for index in wanted], crew.job.settings.of_each(prompts)
        pictures = [first[index] for index in wanted] if first else []
        groups = groups_of(given, crew.job.settings, pictures)
        rows = iter(crew.encode(given, pictures, len(wanted) + len(groups), max_losses))
        found = EncodedJob(
            prompts=prompts,
            first={index: one for index, one in enumerate(first) if one is not None},
            settings=dict(enumerate(settings)),
        )
        for name, group in enumerate(groups):
            negative = next(rows)
            for index in (wanted[number] for number in group.numbers):
                found.groups[index], found.negative[index], found.rows[index] = name, negative, next(rows)
        return found

    def work(self, chunk: Sequence[int]) -> float:
        """What each clip of the chunk costs."""
        return self.settings[chunk[0]].work

    def begin(self, handle: ClipWorkerHandle, chunk: Sequence[int]) -> Ref[list[MadeClip]]:
        """Has a worker make the clips of these prompts, which are of one group."""
        work = ClipWork(
            settings=self.settings[chunk[0]],
            seeds=tuple(self.settings[index].seed for index in chunk),
            first=tuple(self.first[index] for index in chunk if index in self.first),
        )
        return handle.make.remote(work, self.negative[chunk[0]], *(self.rows[index] for index in chunk))


def check_deaths(deaths: int, most: int, doing: str, error: Exception) -> None:
    """A machine may be taken away while a worker begins. Where `most` in a row die, the next one would, too.
    Raises CrewError then."""
    if deaths >= most:
        raise CrewError(f"{counted(deaths, 'worker')} died in a row while {doing}: {line_of(error)}")
    log.warning("a worker died while %s; another one does that", doing)


def line_of(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(in_short(str(error)).split())[:300]
