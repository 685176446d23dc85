"""A bag of processes that `heddle profile` measures: one per device, connected as the workers of a run are.

with Bag(config, degree=2, device="cuda") as bag:
    point = bag.measure("dit", shape, repeats=3)    # raises MemoryError when it ran out on a member
    end = bag.update(repeats=3)                     # of a step: gradient sum, optimizer, new parameters
    seconds = bag.exchange(2**24)                   # all-to-all of 16 MiB of each member
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

from actors.plan.types import Module
from app.device.points import PointTimes, ProfiledShape, timed
from app.settings.config import RunConfig
from ops.spatial_temporal.choice import SliceRates
from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch

    from app.device.bench import Bench
    from ops.comm.collectives import Group

START_S = 600.0  # imports and weights of all members, on a busy machine
ANSWER_S = 600.0  # of one run of a cascade
_CAUSE_S = 5.0  # a member that fails may be one that another has left, which says why a moment later
_END_S = 30.0  # that a killed member may take to end, as the driver frees its memory
_WARM_UP = 1

Order = (
    tuple[Literal["measure"], Module, ProfiledShape, SliceRates | None, int]
    | tuple[Literal["exchange"], int, int]
    | tuple[Literal["update"], int]
)


class MeasuredBag:
    """`degree` members that run cascades together. The subclass that makes them says how calls and answers travel."""

    nodes = 1  # of its members

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def measure(
        self, module: Module, shape: ProfiledShape, repeats: int, rates: SliceRates | None = None
    ) -> PointTimes:
        """Forward and backward of a packed batch, or an encode with what its members then share. `rates`: by which
        spatial-temporal blocks are sliced, as a plan brings them. Raises MemoryError where a member ran out of memory:
        the bag cannot be used again."""
        answers = self._ask(("measure", module, shape, rates, repeats))
        times = [answer for answer in answers if isinstance(answer, PointTimes)]
        needs = [one.need_gib for one in times if one.need_gib is not None]
        longest = tuple(max(run) for run in zip(*(one.seconds for one in times), strict=True))
        return PointTimes(
            seconds=longest,
            need_gib=max(needs, default=None),
            gathered_bytes=max(one.gathered_bytes for one in times),
            gathered_s=max(one.gathered_s for one in times),
        )

    def update(self, repeats: int) -> PointTimes:
        """The end of a step with its members as all workers of the run. Raises MemoryError as `measure`."""
        times = [answer for answer in self._ask(("update", repeats)) if isinstance(answer, PointTimes)]
        return PointTimes(seconds=tuple(max(run) for run in zip(*(one.seconds for one in times), strict=True)))

    def exchange(self, num_bytes: int, repeats: int = 5) -> float:
        """Seconds of an all-to-all of `num_bytes` of each member."""
        answers = self._ask(("exchange", num_bytes, repeats))
        return max(statistics.median(one.seconds) for one in answers if isinstance(one, PointTimes))

    def close(self) -> None:
        """End the members."""
        raise NotImplementedError

    def _send(self, order: Order) -> None:
        """Tell all members."""
        raise NotImplementedError

    def _arrived(self, ranks: set[int], timeout_s: float) -> list[tuple[int, object]]:
        """The answers of some of these members, as soon as there is one; none when the time is over."""
        raise NotImplementedError

    def _ask(self, order: Order) -> list[object]:
        self._send(order)
        return self._answers(ANSWER_S * (_WARM_UP + order[-1]))

    def _answers(self, patience_s: float, cause_s: float = _CAUSE_S) -> list[object]:
        """Answers of all members, by rank. Raises MemoryError where any of them ran out: the others only wait for it,
        or fail as it leaves them. After a failure its cause is waited for another `cause_s`."""
        found: dict[int, object] = {}
        waiting = set(range(self.degree))
        until, failed = time.monotonic() + patience_s, ""
        while waiting and (arrived := self._arrived(waiting, max(0.0, until - time.monotonic()))):
            for rank, answer in arrived:
                waiting.discard(rank)
                found[rank] = answer
                if isinstance(answer, MemoryError):
                    raise answer
                if isinstance(answer, Exception):
                    failed = failed or f"member {rank} of a bag of {self.degree} failed: {answer}."
                    until = min(until, time.monotonic() + cause_s)
        if failed:
            raise ConfigError(failed)
        if waiting:
            raise ConfigError(
                f"member {min(waiting)} of a bag of {self.degree} has not answered in {patience_s:.0f} s. "
                f"Leave the degree out with --degrees, or measure fewer --repeats."
            )
        return [found[rank] for rank in range(self.degree)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PipedBag(MeasuredBag):
    """Members at the other ends of these pipes, by rank."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        super().__init__(len(pipes))
        self._pipes = pipes

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _send(self, order: Order) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # its process has ended, as `_heard` will say
                pipe.send(order)

    def _arrived(self, ranks: set[int], timeout_s: float) -> list[tuple[int, object]]:
        waiting = {self._pipes[rank]: rank for rank in ranks}
        return [
            (rank, self._heard(rank)) for rank in (waiting[cast(Connection, p)] for p in wait([*waiting], timeout_s))
        ]

    def _heard(self, rank: int) -> object:
        try:
            answer: object = self._pipes[rank].recv()
        except (EOFError, OSError):
            answer = RuntimeError("its process has ended")
        return answer


class Bag(PipedBag):
    """`degree` processes of this machine, one per device. Closing it ends them."""

    def __init__(self, config: RunConfig, degree: int, device: str) -> None:
        """Raises ConfigError where a member does not come up."""
        import torch.distributed

        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(degree)]
        super().__init__([mine for mine, _ in ends])
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._members = []
        for rank, (_, theirs) in enumerate(ends):
            settings = (config.to_yaml(), rank, degree, device, self._store.port, theirs)
            member = context.Process(target=_member, args=settings, name=f"heddle-profile-{rank}", daemon=True)
            member.start()
            theirs.close()
            self._members.append(member)
        try:
            self._answers(START_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """A killed member, too, gives its GPU's memory back only as it ends."""
        super().close()
        for member in self._members:
            member.join(2.0)
            if member.is_alive():
                member.kill()
                member.join(_END_S)


def _member(config_yaml: str, rank: int, degree: int, device: str, port: int, pipe: Connection) -> None:
    """A member's process: comes up, says so, and carries out orders until its pipe is closed."""
    import torch.distributed

    made: list[tuple[Bench, Group]] = []

    def first() -> str:
        target = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        made.append(come_up(config_yaml, rank, (0,) * degree, target, store, "127.0.0.1"))
        return "ready"

    answer = answer_of(first)
    try:
        while not isinstance(answer, Exception):
            pipe.send(answer)
            order = pipe.recv()
            answer = answer_of(partial(carried_out, order, *made[0]))
        pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the command has ended
        return


def answer_of(work: Callable[[], object]) -> object:
    """The result of the work, or what went wrong in a form that other processes can read."""
    try:
        return work()
    except Exception as error:  # the process boundary: the command says why
        from actors.worker.meter import ran_out

        return MemoryError(str(error)) if ran_out(error) else RuntimeError(f"{type(error).__name__}: {error}")


def come_up(
    config_yaml: str,
    rank: int,
    nodes: tuple[int, ...],
    device: torch.device,
    store: torch.distributed.Store,
    address: str,
) -> tuple[Bench, Group]:
    """A member of a bag, as a worker of the run is set up. `nodes` of all members by rank, in any numbers; `address` of
    this one, as the others reach it. All call it at once."""
    import torch

    from app.device.bench import Bench
    from ops.comm.groups import Groups
    from ops.models.folders import resolve
    from ops.waiting import CancelToken

    config = RunConfig.from_yaml(config_yaml)
    torch.set_num_threads(config.workers.torch_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model, geometry = resolve(config.model)
    backend = "nccl" if device.type == "cuda" else "gloo"
    world = tuple(range(len(nodes)))
    ctas = config.train.bag_ctas
    groups = Groups(store, rank, world, backend, 0, ANSWER_S, CancelToken(), address, nodes, bag_ctas=ctas)
    group = groups.get(world)
    return Bench(config, model, geometry, device, group), group


def carried_out(order: Order, bench: Bench, group: Group) -> PointTimes:
    """A member's part of an order."""
    if order[0] == "measure":
        _, module, shape, rates, repeats = order
        return bench.measure(module, shape, repeats, rates)
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
        )[_WARM_UP:]
    )


def degrees_here(
    config: RunConfig, legal: Sequence[int], wanted: Sequence[int], device: str, over: Collection[int] = ()
) -> tuple[int, ...]:
    """Degrees above 1 that can be measured on this machine: `wanted` ones, or all legal ones that its devices hold.
    Raises ConfigError for a wanted one that is not legal or has too few devices, also `over` nodes."""
    import os

    import torch

    here = torch.cuda.device_count() if device == "cuda" else min(os.cpu_count() or 1, config.workers.max)
    for degree in wanted:
        if degree not in legal:
            raise ConfigError(f"--degrees {degree} is not legal for this model; use some of {list(legal)}.")
        if device == "cuda" and degree > here and degree not in over:
            raise ConfigError(f"--degrees {degree} needs as many GPUs, and this machine has {here}.")
    most = here if device == "cuda" else max(here, *wanted) if wanted else here
    return tuple(k for k in (wanted or legal) if 1 < k <= most)
