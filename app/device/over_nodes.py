"""What `heddle profile` measures with Ray actors: bags over the nodes of a cluster, and handoffs by the object store.

with LentRay(partial(borrowed_ray, None, 2), has_nodes=False) as ray:
    cluster = MeasuredCluster.of(ray, config, legal=(1, 2, 4, 8), wanted=(), device="cuda")
    with BagOverNodes(config, cluster.bags[8], "cuda") as bag: ...     # as app.device.bag.Bag
    found = timed_handoffs(cluster.ends(2), "cuda", repeats=3)         # from one node to another
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from actors.messages import PublishedResult
from actors.plan.costs.handoff import HandoffPoint
from actors.pool.own_gpu import own_gpu
from actors.pool.room import Need
from actors.ray_calls import get, kill, node_address, nodes, remote_of, wait
from actors.refs import Method, Ref
from app.device.bag import ANSWER_S, START_S, MeasuredBag, Order, answer_of, carried_out, come_up
from app.settings.config import RunConfig
from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch.distributed

    from app.device.bench import Bench
    from ops.comm.collectives import Group

HANDOFFS = (2**16, 2**22, 2**26)  # bytes: a long caption's rows, the latents of a clip and of a batch of long ones
_WARM_UP = 1
_SHORTEST_S = 1e-6  # a clock that was set back meanwhile

T = TypeVar("T")


class LentRay:
    """The Ray of a command, begun by the first `join` and left at the end."""

    def __init__(self, begin: Callable[[], AbstractContextManager[None]], has_nodes: bool) -> None:
        """`has_nodes`: it runs already, and may have several; else it is one of this machine."""
        self.has_nodes = has_nodes
        self._begin, self._stack, self._joined = begin, ExitStack(), False

    def join(self) -> None:
        """Raises ConfigError where no cluster answers."""
        if not self._joined:
            self._stack.enter_context(self._begin())
            self._joined = True

    def __enter__(self) -> LentRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCluster:
    """Where actors of a profile run: the nodes of a cluster, or this machine."""

    ray: LentRay
    seats: Mapping[str, int]  # workers that have room on each node; empty: it is this machine alone
    bags: Mapping[int, tuple[str, ...]]  # over nodes, by degree: the node of each member

    @classmethod
    def of(
        cls, ray: LentRay, config: RunConfig, legal: Sequence[int], wanted: Sequence[int], device: str
    ) -> MeasuredCluster:
        """Bags of the `wanted` degrees, or of all legal ones. Raises ConfigError where no cluster answers."""
        seats = {}
        if ray.has_nodes:
            ray.join()
            need = Need(config.workers.cpus_per_worker, 1.0 if device == "cuda" else 0.0)
            found = {node["NodeID"]: need.capacity(node["Resources"]) for node in nodes() if node["Alive"]}
            seats = {node: room for node, room in found.items() if room > 0}
        over = {degree: shares(seats, degree) for degree in (wanted or legal) if degree in legal}
        return cls(ray=ray, seats=seats, bags={degree: nodes for degree, nodes in over.items() if nodes is not None})

    def handoffs(self, workers: int, device: str) -> tuple[int, ...]:
        """1 where two workers of a node, 2 where workers of two nodes can hand over to each other. `workers`: the most
        that the run has."""
        import torch

        here = torch.cuda.device_count() if device == "cuda" else 2
        inside = max(self.seats.values(), default=here) >= 2
        return tuple(count for count, has in ((1, inside), (2, len(self.seats) > 1)) if has and workers > 1)

    def ends(self, count: int) -> tuple[str, str]:
        """The nodes of two workers on one node, or on two."""
        import ray

        self.ray.join()
        order = sorted(self.seats, key=lambda node: (-self.seats[node], node)) or [
            ray.get_runtime_context().get_node_id()
        ]
        return order[0], order[count - 1]


def shares(seats: Mapping[str, int], degree: int) -> tuple[str, ...] | None:
    """The node of every member of a bag over as few nodes as hold it, two at least, in shares as equal as can be. None
    where they do not."""
    order = sorted(seats, key=lambda node: (-seats[node], node))
    for count in range(2, min(len(order), degree) + 1):
        sizes = [degree // count + (number < degree % count) for number in range(count)]
        if all(seats[node] >= size for node, size in zip(order, sizes)):
            return tuple(node for node, size in zip(order, sizes) for _ in range(size))
    return None


class BagMember:
    """The actor: a member of a bag over nodes."""

    def __init__(self) -> None:
        self._store: torch.distributed.TCPStore | None = None
        self._bench: Bench | None = None
        self._group: Group | None = None

    def serve(self) -> tuple[str, int]:
        """Where the members meet: a store in this process."""
        import torch.distributed

        host = node_address()
        self._store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def come_up(
        self, config_yaml: str, rank: int, nodes: tuple[int, ...], device: str, meet: tuple[str, int]
    ) -> object:
        """All call it at once. "ready", or what went wrong."""
        import torch.distributed

        def work() -> object:
            store = self._store or torch.distributed.TCPStore(*meet, is_master=False)
            target = torch.device("cuda:0" if device == "cuda" else "cpu")  # Ray shows an actor its own GPU alone
            self._bench, self._group = come_up(config_yaml, rank, nodes, target, store, node_address())
            return "ready"

        return answer_of(work)

    def carry_out(self, order: Order) -> object:
        assert self._bench is not None and self._group is not None, "come_up comes first"
        bench, group = self._bench, self._group
        return answer_of(lambda: carried_out(order, bench, group))


class BagMemberHandle(Protocol):
    """A `BagMember` as the profile knows it."""

    @property
    def serve(self) -> Method[[], tuple[str, int]]: ...
    @property
    def come_up(self) -> Method[[str, int, tuple[int, ...], str, tuple[str, int]], object]: ...
    @property
    def carry_out(self) -> Method[[Order], object]: ...


class BagOverNodes(MeasuredBag):
    """Ray actors on these nodes, one for each member, that run cascades together. Closing it ends them."""

    def __init__(self, config: RunConfig, seats: Sequence[str], device: str) -> None:
        """Raises ConfigError where a member does not come up, MemoryError where it has no room for the weights."""
        super().__init__(len(seats))
        numbers = {node: number for number, node in enumerate(dict.fromkeys(seats))}
        self.nodes = len(numbers)
        cpus = config.workers.cpus_per_worker
        self._actors: list[BagMemberHandle] = [_actor_on(BagMember, node, cpus, device) for node in seats]
        self._waiting: dict[Ref[object], int] = {}
        try:
            meet = _answer(self._actors[0].serve.remote(), START_S, f"the first member of a bag of {self.degree}")
            of_node = tuple(numbers[node] for node in seats)
            self._expect(
                actor.come_up.remote(config.to_yaml(), rank, of_node, device, meet)
                for rank, actor in enumerate(self._actors)
            )
            self._answers(START_S)
        except BaseException:
            self.close()
            raise

    def _send(self, order: Order) -> None:
        self._expect(actor.carry_out.remote(order) for actor in self._actors)

    def _expect(self, references: Iterable[Ref[object]]) -> None:
        self._waiting = {reference: rank for rank, reference in enumerate(references)}

    def _arrived(self, ranks: set[int], timeout_s: float) -> list[tuple[int, object]]:
        waiting = [reference for reference, rank in self._waiting.items() if rank in ranks]
        done, _ = wait(waiting, timeout=timeout_s)
        return [(self._waiting[reference], _outcome(reference)) for reference in done]

    def close(self) -> None:
        for actor in self._actors:
            kill(actor)
        self._actors = []


def _outcome(reference: Ref[T]) -> T | Exception:
    """What a call has answered, or how it failed."""
    import ray

    try:
        return get(reference)
    except ray.exceptions.OutOfMemoryError as error:
        return MemoryError(str(error))
    except ray.exceptions.RayError as error:
        return RuntimeError(f"its actor has failed ({type(error).__name__}: {str(error).splitlines()[0]})")


def _answer(reference: Ref[T], patience_s: float, who: str) -> T:
    """Raises ConfigError where no worker answers."""
    if not wait([reference], timeout=patience_s)[0]:
        raise ConfigError(f"{who} has not answered in {patience_s:.0f} s: its node has no room, or is very busy.")
    found = _outcome(reference)
    if isinstance(found, Exception):
        raise ConfigError(f"{who} failed: {found}.")
    return found


def _actor_on(plain: type, node: str, cpus: float, device: str, *arguments: object) -> Any:  # Ray gives it no type
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpu = own_gpu(1 if device == "cuda" else 0)
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return remote_of(plain).options(num_cpus=cpus, scheduling_strategy=place, **gpu).remote(*arguments)


class HandoffEnd:
    """The actor: a device that makes encode results, or takes them."""

    def __init__(self, device: str) -> None:
        import torch

        from actors.worker.handoff import PinnedCopy

        self._device = torch.device("cuda:0" if device == "cuda" else "cpu")
        self._copy = PinnedCopy(self._device) if device == "cuda" else None

    def make(self, num_bytes: int) -> list[PublishedResult]:
        """One result of `num_bytes`, from its end on the device."""
        import torch

        rows = torch.ones(1, num_bytes // 4, device=self._device)
        self._settle()
        ended = time.time()
        if self._copy is not None:
            copying = self._copy(rows)
            copying.wait()
            rows = copying.host
        return [PublishedResult(module="vae", id=(0, "", 0), rows=rows.numpy(), ok=True, at=ended)]

    def take(self, published: list[PublishedResult]) -> float:
        """Seconds from the end of that result to its rows on this device."""
        import torch

        for one in published:
            torch.from_numpy(one.rows).to(self._device)
        self._settle()
        return time.time() - published[0].at

    def _settle(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


class HandoffEndHandle(Protocol):
    """A `HandoffEnd` as the profile knows it. What one has made reaches the other as its reference."""

    @property
    def make(self) -> Method[[int], list[PublishedResult]]: ...
    @property
    def take(self) -> Method[[Ref[list[PublishedResult]]], float]: ...


def timed_handoffs(places: tuple[str, str], device: str, repeats: int) -> list[HandoffPoint]:
    """Results of several sizes, handed from a worker on the one node to one on the other and back: the mean of both
    ways, as the clocks of two nodes may differ. Raises ConfigError where a worker does not answer."""
    ends: list[HandoffEndHandle] = [_actor_on(HandoffEnd, node, 0.0, device, device) for node in places]
    try:
        return [
            HandoffPoint(num_bytes=size, seconds=max(_SHORTEST_S, seconds), nodes=len(set(places)))
            for size in HANDOFFS
            for seconds in [_there_and_back(ends, size) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        ]
    finally:
        for end in ends:
            kill(end)


def _there_and_back(ends: Sequence[HandoffEndHandle], num_bytes: int) -> float:
    took = [
        _answer(taker.take.remote(maker.make.remote(num_bytes)), ANSWER_S, "a worker that takes a handoff")
        for maker, taker in (ends, ends[::-1])
    ]
    return sum(took) / 2
