"""`heddle check` on Ray: an actor on each node and one on each GPU say what they see, reach each other, and make a sum.

The network is tried by connections that say within seconds what does not answer, before anything that would hang.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol, TypeVar

from actors.pool.own_gpu import own_gpu
from actors.ray_calls import get, given_gpu, kill, node_address, node_id, nodes, object_store_gib, remote_of, wait
from actors.refs import Method, RayNode, Ref
from app.check.facts import GpuFacts, NodeFacts, RunPaths, Talk, given_facts, gpu_facts, node_facts, talk
from app.check.findings import ClusterFacts, Reach
from ops.comm.reach import DoorAddress
from ops.counted import counted

NODES_S = 90.0  # for a process to start on a busy node, and import what it needs
GPUS_S = 180.0
TALK_S = 180.0
_LATE = "no answer within"
_GIVEN_S = 1.0  # for answers that have come long ago, if they come at all
_CLOCKS = 3  # calls, of which the fastest says most of the clock

T = TypeVar("T")
Name = TypeVar("Name")


class Look:
    """The actor: on a node, or on a GPU."""

    def __init__(self) -> None:
        self._own: object = None  # the store at which members of a sum meet

    def node(self, paths: RunPaths) -> NodeFacts:
        node = node_id()
        return node_facts(node, paths, object_store_gib(node))

    def given(self) -> GpuFacts:
        return given_facts(given_gpu())

    def gpu(self) -> GpuFacts:
        return gpu_facts(given_gpu())

    def clock(self) -> float:
        return time.time()

    def door(self) -> DoorAddress | None:
        from ops.comm.reach import door_at

        self._door = door_at(node_address())
        return None if self._door is None else self._door.address

    def reach(self, host: str, doors: Mapping[str, DoorAddress]) -> Reach:
        from ops.comm.reach import losing, out_of_reach

        silent = out_of_reach(doors)
        return Reach(
            host=host,
            silent=tuple(silent),
            losing=losing({name: door for name, door in doors.items() if name not in silent}),
        )

    def serve(self) -> tuple[str, int]:
        import torch.distributed as dist

        store = dist.TCPStore(node_address(), 0, is_master=True, wait_for_workers=False)
        self._own = store
        return node_address(), store.port

    def talk(self, store: tuple[str, int], rank: int, of_node: tuple[int, ...], cuda: bool) -> Talk:
        return talk(store if self._own is None else None, self._own, rank, of_node, cuda)


class LookHandle(Protocol):
    """A `Look` as the command knows it."""

    @property
    def node(self) -> Method[[RunPaths], NodeFacts]: ...
    @property
    def given(self) -> Method[[], GpuFacts]: ...
    @property
    def gpu(self) -> Method[[], GpuFacts]: ...
    @property
    def clock(self) -> Method[[], float]: ...
    @property
    def door(self) -> Method[[], DoorAddress | None]: ...
    @property
    def reach(self) -> Method[[str, Mapping[str, DoorAddress]], Reach]: ...
    @property
    def serve(self) -> Method[[], tuple[str, int]]: ...
    @property
    def talk(self) -> Method[[tuple[str, int], int, tuple[int, ...], bool], Talk]: ...


def look_at(paths: RunPaths, tell: Callable[[str], None]) -> ClusterFacts:
    """Everything that can be seen of the cluster to which Ray is connected. `tell` gets a line as each part begins."""
    there = [node for node in nodes() if node["Alive"]]
    tell(counted(len(there), "node"))
    with ExitStack() as ended:
        lookers = {node["NodeID"]: _started(node, ended) for node in there}
        answers = _answers({one: looker.node.remote(paths) for one, looker in lookers.items()}, NODES_S)
        names = _names(answers, there)
        seen = {one: replace(facts, host=names[one]) for one, facts in answers.items() if isinstance(facts, NodeFacts)}
        lookers = {one: lookers[one] for one in seen}
        clocks = {names[one]: ahead for one, looker in lookers.items() if (ahead := _ahead(looker)) is not None}
        if len(lookers) > 1:
            tell("the network between them")
        reach, silenced = _reach(lookers, names)
        gpus_there = {names[node["NodeID"]]: int(node["Resources"].get("GPU", 0)) for node in there}
        if any(gpus_there.values()):
            tell(counted(sum(gpus_there.values()), "GPU"))
        on_gpus = {
            (node["NodeID"], number): _started(node, ended, gpus=1)
            for node in there
            if node["NodeID"] in seen
            for number in range(gpus_there[names[node["NodeID"]]])
        }
        given = {one: looker.given.remote() for one, looker in on_gpus.items()}
        looked = _answers({one: looker.gpu.remote() for one, looker in on_gpus.items()}, GPUS_S)
        found = judged(looked, _answers(given, _GIVEN_S))
        gpus = {one: replace(facts, host=names[one[0]]) for one, facts in found.items()}
        if on_gpus:
            usable = [one for one, facts in gpus.items() if not facts.unusable]
            members = [(on_gpus[one], one[0], str(gpus[one])) for one in usable]
        else:
            members = [(looker, one, names[one]) for one, looker in lookers.items()]
        apart = any(one.silent for one in reach)
        said, failed = None, dict[str, str]()
        if len(members) > 1 and not apart:
            tell(f"a sum over {counted(len(members), 'GPU' if on_gpus else 'node')}")
            said, failed = _sum(members, bool(on_gpus))
    return ClusterFacts(
        nodes=tuple(seen.values()),
        mute={names[one]: str(why) for one, why in answers.items() if not isinstance(why, NodeFacts)} | silenced,
        clocks=clocks,
        gpus=tuple(gpus.values()),
        gpus_there={host: count for host, count in gpus_there.items() if count},
        reach=tuple(reach),
        talk=said,
        talk_failed=failed,
    )


def judged(looked: Mapping[Name, GpuFacts | str], given: Mapping[Name, GpuFacts | str]) -> dict[Name, GpuFacts]:
    """The GPUs that were looked at, and those whose process has ended, or hangs since Ray has given it one. Others are
    in use: no process has begun."""
    found: dict[Name, GpuFacts] = {}
    for one, facts in looked.items():
        own = given[one]
        if isinstance(facts, GpuFacts):
            found[one] = facts
        elif isinstance(own, GpuFacts) or not facts.startswith(_LATE):
            begun = own if isinstance(own, GpuFacts) else GpuFacts(host="", index="?")
            found[one] = replace(begun, unusable=f"{facts.removesuffix('.')}. Look at dmesg and nvidia-smi there")
    return found


def _names(answers: Mapping[str, NodeFacts | str], there: Sequence[RayNode]) -> dict[str, str]:
    """A name for each node: its host and, where several nodes have that, the first letters of Ray's name for it."""
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in there}
    hosts |= {one: facts.host for one, facts in answers.items() if isinstance(facts, NodeFacts)}
    count = Counter(hosts.values())
    return {one: host if count[host] == 1 else f"{host} {one[:6]}" for one, host in hosts.items()}


def _started(node: RayNode, ended: ExitStack, gpus: int = 0) -> LookHandle:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    looker: LookHandle = remote_of(Look).options(num_cpus=0, scheduling_strategy=place, **own_gpu(gpus)).remote()
    ended.callback(kill, looker)
    return looker


def _answers(asked: Mapping[Name, Ref[T]], patience_s: float) -> dict[Name, T | str]:
    """The answer of each, or why there is none."""
    import ray

    left, until = {reference: one for one, reference in asked.items()}, time.monotonic() + patience_s
    found: dict[Name, T | str] = {}
    while left and (wait_s := until - time.monotonic()) > 0:
        done, _ = wait(list(left), timeout=wait_s)
        for reference in done:
            try:
                found[left[reference]] = get(reference)
            except ray.exceptions.RayError as error:
                found[left[reference]] = _why(error)
            del left[reference]
    return found | dict.fromkeys(left.values(), f"{_LATE} {patience_s:.0f} s")


def _why(error: Exception) -> str:
    """The last line of an error of Ray, which is what was raised where it happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _ahead(looker: LookHandle) -> float | None:
    """Seconds by which a node's clock is ahead of this one's; None where it does not answer."""
    found: list[tuple[float, float]] = []
    for _ in range(_CLOCKS):
        began = time.time()
        answer = _answers({"": looker.clock.remote()}, NODES_S)[""]
        ended = time.time()
        if isinstance(answer, float):
            found.append((ended - began, answer - (began + ended) / 2))
    return min(found)[1] if found else None


def _reach(lookers: Mapping[str, LookHandle], names: Mapping[str, str]) -> tuple[list[Reach], dict[str, str]]:
    """What the network is from each node, all at once; and the hosts that answer no more, with why."""
    opened = _answers({one: looker.door.remote() for one, looker in lookers.items()}, NODES_S)
    doors = {names[one]: door for one, door in opened.items() if isinstance(door, tuple)}
    asked = {
        one: looker.reach.remote(names[one], {name: door for name, door in doors.items() if name != names[one]})
        for one, looker in lookers.items()
        if len(doors) > 1
    }
    answers = _answers(asked, NODES_S)
    failed = {names[one]: why for said in (opened, answers) for one, why in said.items() if isinstance(why, str)}
    return [one for one in answers.values() if isinstance(one, Reach)], failed


def _sum(members: Sequence[tuple[LookHandle, str, str]], cuda: bool) -> tuple[Talk | None, dict[str, str]]:
    """A sum over all of these (actor, node, name). Returns what the slowest member says, or by name why some failed."""
    number = {node: place for place, node in enumerate(dict.fromkeys(node for _, node, _ in members))}
    of_node = tuple(number[node] for _, node, _ in members)
    served = _answers({"": members[0][0].serve.remote()}, NODES_S)[""]
    if not isinstance(served, tuple):
        return None, {members[0][2]: str(served)}
    asked = {name: looker.talk.remote(served, rank, of_node, cuda) for rank, (looker, _, name) in enumerate(members)}
    answers = _answers(asked, TALK_S)
    failed = {name: str(answer) for name, answer in answers.items() if not isinstance(answer, Talk)}
    talks = [answer for answer in answers.values() if isinstance(answer, Talk)]
    if failed or not talks:
        return None, failed
    slowest = min(talks, key=lambda one: one.gb_per_s)
    return Talk(members=slowest.members, right=all(one.right for one in talks), gb_per_s=slowest.gb_per_s), {}
