"""Calls to Ray, with types; its errors for an actor that is gone, and the cause of a task that failed."""

from __future__ import annotations

import ctypes
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RuntimeEnvSetupError,
)

from actors.plan.types import PlanError
from actors.refs import RayNode, Ref
from data.errors import DataError, DataIOError
from ops.units import GIB

# The last one is of an actor that cannot start: its node has no room for the files of a submitted job, for one.
FOR_GOOD = (ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RuntimeEnvSetupError)
GONE = (RayActorError, *FOR_GOOD)  # also one that is out of reach, and may answer again

T = TypeVar("T")
R = TypeVar("R")
_ray: Any = ray  # its types end at ObjectRef; ours begin here


def remote_of(
    plain: Callable[..., object], groups: Mapping[str, int] | None = None, *, once: bool = False
) -> Any:  # Ray gives it no type
    """Ray's class of actors, or task, of a plain class or function: `.options(...).remote(...)`. The caller names the
    protocol that its handles follow. `groups` are threads of an actor besides its own, by name. `once`: a task's
    process, in which others may have run before, ends with it, and so all that it has changed there."""
    if once:
        return _ray.remote(max_calls=1)(plain)
    return _ray.remote(concurrency_groups=dict(groups))(plain) if groups else _ray.remote(plain)


def get(reference: Ref[T], timeout: float | None = None) -> T:
    """The value. Raises what its task raised, or Ray's error for what is lost or late (seconds)."""
    value: T = _ray.get(reference) if timeout is None else _ray.get(reference, timeout=timeout)
    return value


def get_all(references: Sequence[Ref[T]], timeout: float | None = None) -> list[T]:
    """The values, by one call: a step of a thousand workers asks for thousands. Raises the first error of any."""
    listed = list(references)
    values: list[T] = _ray.get(listed) if timeout is None else _ray.get(listed, timeout=timeout)
    return values


async def answer_of(reference: Ref[T]) -> T:
    """As `get`, in a method of an asynchronous actor, which does other things meanwhile."""
    held: object = reference
    assert isinstance(held, Awaitable), f"{held!r} is no reference"
    value: T = await held
    return value


def wait(references: Sequence[R], *, num_returns: int = 1, timeout: float | None) -> tuple[list[R], list[R]]:
    """(done, not done) after `timeout` seconds, or as soon as `num_returns` are done. `references` are not empty."""
    answer: tuple[list[R], list[R]] = _ray.wait(list(references), num_returns=num_returns, timeout=timeout)
    return answer


def has_come(reference: Ref[object]) -> bool:
    """Whether its task has ended. Waits for nothing: its value stays where it is."""
    return bool(_ray.wait([reference], timeout=0, fetch_local=False)[0])


def put(value: T) -> Ref[T]:
    """The value in the object store; it lives as long as this process."""
    reference: Ref[T] = _ray.put(value)
    return reference


def own_handle() -> Any:  # Ray gives it no type
    """The handle of the actor that this process is, for calls that run in other threads of it."""
    return _ray.get_runtime_context().current_actor


def kill(handle: object, *, no_restart: bool = True) -> None:
    """End an actor's process without a word to it."""
    _ray.kill(handle, no_restart=no_restart)


def cancel(reference: Ref[object]) -> None:
    """End the process of a task that takes too long."""
    _ray.cancel(reference, force=True)


def node_address() -> str:
    """The address of this node, as the others of the cluster reach it."""
    address: str = _ray.util.get_node_ip_address()
    return address


def node_id() -> str:
    """Ray's name of this node."""
    name: str = _ray.get_runtime_context().get_node_id()
    return name


def node_of_process(handle: object) -> str:
    """The node on which an actor has a process, also one that has not begun to run the actor; "" while it waits for
    resources. Asks Ray, which takes a millisecond."""
    told = _ray._private.state.actors(attrgetter("_actor_id")(handle).hex())
    node: str = told["Address"]["NodeID"] if told.get("Pid") else ""  # while it waits, the node at which it does
    return node


def given_gpu() -> str:
    """The GPU of this node that this actor has, as Ray counts them; "" of an actor without one."""
    ids: list[str] = _ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return ",".join(ids)


def nodes() -> list[RayNode]:
    """All that have ever been in the cluster."""
    listed: list[RayNode] = _ray.nodes()
    return listed


def gpus_of_a_node() -> int:
    """GPUs of the largest node that lives; 8 before one with GPUs has come."""
    return int(max((one["Resources"].get("GPU", 0.0) for one in nodes() if one["Alive"]), default=0.0)) or 8


def object_store_gib(node_id: str) -> float | None:
    """Size of a node's object store; None when Ray does not say."""
    sizes = [one["Resources"].get("object_store_memory") for one in nodes() if one["NodeID"] == node_id]
    return None if not sizes or sizes[0] is None else sizes[0] / GIB


def resources(*, free: bool) -> dict[str, float]:
    """What the cluster offers, or of it what is unused now, by Ray's names: "CPU", "GPU"."""
    found: dict[str, float] = _ray.available_resources() if free else _ray.cluster_resources()
    return found


def free_outside(nodes: Sequence[str]) -> dict[str, float]:
    """What is unused now on all nodes but these, which are named by their ids."""
    if not nodes:
        return resources(free=True)
    found: Counter[str] = Counter()
    by_node = _ray._private.state.available_resources_per_node()  # what Ray's own sum is made of
    for node, free in by_node.items():
        found.update({} if node in nodes else free)
    return dict(found)


def draining_nodes() -> frozenset[str]:
    """Ids of nodes that are about to leave the cluster, on which Ray starts nothing more: their pod is being deleted,
    an autoscaler or a provider takes them, or somebody has called `ray drain-node`."""
    return frozenset(_ray._private.state.state.get_draining_nodes())


def drain(address: str, node: str, seconds: float, why: str) -> None:
    """Have Ray start nothing more on a node, which leaves the cluster once idle, as `ray drain-node` does. Ray tells
    who asks that the node goes after these seconds, and does not end it then. `address` is the cluster's."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made by Cython
    from ray.core.generated import autoscaler_pb2

    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    GcsClient(address=address).drain_node(node, preempted, why, int((time.time() + seconds) * 1000))


def unwrap(call: Callable[[], T]) -> T:
    """Run `get` and raise a known cause of a task's failure as itself, so that callers can answer it."""
    try:
        return call()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | DataIOError | PlanError):
            raise error.cause from None
        raise


def bar(name: str) -> AbstractContextManager[object]:
    """Shows the block on Ray's own timeline (`ray timeline`, and the dashboard's button for it), in the row of this
    worker process: a bar `name`, such as "dit 17f 64x96 b4 sp1 s12".

    Ray keeps some 5 KB for every name of a call it has ever seen, in the caller and in the actor: calls named after
    steps made both grow by 0.2 MiB per step. A profile event's label is data: Ray keeps a bounded number of them.
    """
    from ray._private.worker import global_worker  # `ray._private.profiling` does this only under RAY_PROFILING

    worker: Any = global_worker  # its type leaves out what a connected one has
    return worker.core_worker.profile_event(b"cascade", {"name": name}) if worker.connected else nullcontext()


def end_when_terminated() -> None:
    """Makes SIGTERM end an actor's process at once, whichever of its threads calls this; elsewhere nothing changes.

    Ray would first wait for the tasks that the actor has submitted. Where these wait for the actor neither would end,
    and its callers would get no answer. Python's own `signal` can be called in the main thread alone.
    """
    if _ray.is_initialized() and _ray.get_runtime_context().get_actor_id() is not None:
        ctypes.CDLL(None).signal(signal.SIGTERM.value, signal.SIG_DFL.value)
