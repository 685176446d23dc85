"""A bag of processes that `heddle profile` measures: one per device, connected as the workers of a run are.

with Bag(config, degree=2, device="cuda") as bag:
    point = bag.measure("dit", shape, repeats=3)    # raises MemoryError when it ran out on a member
    end = bag.update(repeats=3)                     # of a step: gradient sum, optimizer, new parameters
    seconds = bag.exchange(2**24)                   # all-to-all of so many bytes of a member
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast

from actors.plan.types import Module
from app.device.points import PointTimes, ProfiledShape, timed
from app.settings.config import RunConfig
from ops.typed import ConfigError

if TYPE_CHECKING:
    from app.device.bench import Bench
    from ops.comm import Group

_START_S = 600.0  # imports and weights of all members, on a busy machine
_ANSWER_S = 600.0  # of one run of a cascade
_CAUSE_S = 5.0  # a member that fails may be one that another has left, which says why a moment later
_WARM_UP = 1

Order = (
    tuple[Literal["measure"], Module, ProfiledShape, int]
    | tuple[Literal["exchange"], int, int]
    | tuple[Literal["update"], int]
)


class Bag:
    """`degree` processes that run cascades together. Closing it ends them."""

    def __init__(self, config: RunConfig, degree: int, device: str) -> None:
        """Raises ConfigError where a member does not come up."""
        import torch.distributed

        self.degree = degree
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._members = []
        for rank in range(degree):
            mine, theirs = context.Pipe()
            settings = (config.to_yaml(), rank, degree, device, self._store.port, theirs)
            member = context.Process(target=_member, args=settings, name=f"heddle-profile-{rank}", daemon=True)
            member.start()
            theirs.close()
            self._pipes.append(mine)
            self._members.append(member)
        try:
            self._answers(_START_S)
        except BaseException:
            self.close()
            raise

    def measure(self, module: Module, shape: ProfiledShape, repeats: int) -> PointTimes:
        """Forward and backward of a packed batch, or an encode with what its members then share. Raises MemoryError
        where a member ran out of memory: the bag is of no use then."""
        answers = self._ask(("measure", module, shape, repeats))
        times = [answer for answer in answers if isinstance(answer, PointTimes)]
        peaks = [one.peak_gib for one in times if one.peak_gib is not None]
        longest = tuple(max(run) for run in zip(*(one.seconds for one in times), strict=True))
        return PointTimes(seconds=longest, peak_gib=max(peaks, default=None))

    def update(self, repeats: int) -> PointTimes:
        """The end of a step with its members as all workers of the run. Raises MemoryError as `measure`."""
        times = [answer for answer in self._ask(("update", repeats)) if isinstance(answer, PointTimes)]
        return PointTimes(
            seconds=tuple(max(run) for run in zip(*(one.seconds for one in times), strict=True)), peak_gib=None
        )

    def exchange(self, num_bytes: int, repeats: int = 5) -> float:
        """Seconds of an all-to-all of so many bytes of each member."""
        answers = self._ask(("exchange", num_bytes, repeats))
        return max(statistics.median(one.seconds) for one in answers if isinstance(one, PointTimes))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for member in self._members:
            member.join(2.0)
            if member.is_alive():
                member.kill()

    def _ask(self, order: Order) -> list[object]:
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(_ANSWER_S * (_WARM_UP + order[-1]))

    def _answers(self, patience_s: float) -> list[object]:
        """Of all members, by rank. Raises MemoryError where any of them ran out: the others only wait for it, or fail
        as it leaves them."""
        found: dict[int, object] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        until, failed = time.monotonic() + patience_s, ""
        while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(cast(Connection, pipe))
                answer: object
                try:
                    answer = found[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    answer = RuntimeError("its process has ended")
                if isinstance(answer, MemoryError):
                    raise answer
                if isinstance(answer, Exception):
                    failed = failed or f"member {rank} of a bag of {self.degree} failed: {answer}."
                    until = min(until, time.monotonic() + _CAUSE_S)
        if failed:
            raise ConfigError(failed)
        if waiting:
            raise ConfigError(
                f"member {min(waiting.values())} of a bag of {self.degree} has not answered in {patience_s:.0f} s. "
                f"Leave the degree out with --degrees, or measure fewer --repeats."
            )
        return [found[rank] for rank in range(self.degree)]

    def __enter__(self) -> Bag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _member(config_yaml: str, rank: int, degree: int, device: str, port: int, pipe: Connection) -> None:
    """A member's process: comes up, says so, and carries out orders until its pipe is closed."""
    try:
        bench, group = _come_up(config_yaml, rank, degree, device, port)
        pipe.send("ready")
        while True:
            pipe.send(_carried_out(pipe.recv(), bench, group))
    except EOFError:
        return
    except Exception as error:  # the process boundary: the command says why
        from actors.worker.meter import ran_out

        pipe.send(MemoryError(str(error)) if ran_out(error) else RuntimeError(f"{type(error).__name__}: {error}"))


def _come_up(config_yaml: str, rank: int, degree: int, device: str, port: int) -> tuple[Bench, Group]:
    import torch

    from app.device.bench import Bench
    from ops.groups import Groups
    from ops.models.folders import resolve
    from ops.waiting import CancelToken

    config = RunConfig.from_yaml(config_yaml)
    torch.set_num_threads(config.workers.torch_threads)
    target = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    model, geometry = resolve(config.model)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if device == "cuda" else "gloo"
    world = tuple(range(degree))
    groups = Groups(store, rank, world, backend, 0, _ANSWER_S, CancelToken(), "127.0.0.1")
    return Bench(config, model, geometry, target, groups.world_group()), groups.world_group()


def _carried_out(order: Order, bench: Bench, group: Group) -> PointTimes:
    if order[0] == "measure":
        return bench.measure(order[1], order[2], order[3])
    if order[0] == "update":
        return bench.update(order[1])
    import torch

    _, num_bytes, repeats = order
    count = num_bytes // 4 // group.size * group.size
    sent, received = (torch.zeros(count, device=bench.device) for _ in range(2))
    splits = [count // group.size] * group.size
    return PointTimes(
        seconds=tuple(
            timed(lambda: group.all_to_all(received, sent, splits, splits), bench.device, group)
            for _ in range(_WARM_UP + repeats)
        )[_WARM_UP:],
        peak_gib=None,
    )


def degrees_here(config: RunConfig, legal: Sequence[int], wanted: Sequence[int], device: str) -> tuple[int, ...]:
    """Degrees above 1 that can be measured on this machine: `wanted` ones, or all legal ones that its devices hold.
    Raises ConfigError for a wanted one that is not legal or has too few devices."""
    import os

    import torch

    here = torch.cuda.device_count() if device == "cuda" else min(os.cpu_count() or 1, config.workers.max)
    for degree in wanted:
        if degree not in legal:
            raise ConfigError(f"--degrees {degree} is not legal for this model; use some of {list(legal)}.")
        if device == "cuda" and degree > here:
            raise ConfigError(f"--degrees {degree} needs as many GPUs, and this machine has {here}.")
    return tuple(k for k in (wanted or [k for k in legal if k <= here]) if k > 1)
