"""What is wrong with a cluster, in sentences: pure judgement on what `heddle check` has seen."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from app.check.facts import GpuFacts, NodeFacts, Talk
from ops.counted import counted

SLOW = 0.9  # of the median of GPUs of its name
TAKEN_GIB = 2.0  # of a GPU that Ray has given: a CUDA context takes less
CLOCK_S = 2.0  # between nodes; logs and Ray's timeline are of their own clocks, a run's times are not
LEAST_FILES = 4096  # that a process may have open; Ray's own advice is 65,536


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What the network is from one host."""

    host: str
    silent: tuple[str, ...] = ()  # hosts that it does not reach
    losing: Mapping[str, str] = field(default_factory=dict)  # by host: how it was seen that packets are lost


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """Everything that was seen."""

    nodes: tuple[NodeFacts, ...]
    mute: Mapping[str, str] = field(default_factory=dict)  # hosts that have not answered: why
    clocks: Mapping[str, float] = field(default_factory=dict)  # seconds by which each host is ahead, at least
    gpus: tuple[GpuFacts, ...] = ()
    gpus_there: Mapping[str, int] = field(default_factory=dict)  # by host, as Ray counts them
    reach: tuple[Reach, ...] = ()
    talk: Talk | None = None  # None: fewer than two processes, or it failed
    talk_failed: Mapping[str, str] = field(default_factory=dict)  # by member: why


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence; `fatal`: a run on this cluster would end, hang or be slow."""

    text: str
    fatal: bool = True


def findings(seen: ClusterFacts) -> list[Finding]:
    """What is wrong, or may be, most important first."""
    found = [Finding(text=f"{host} does not answer: {why}") for host, why in seen.mute.items()]
    found += [*_software(seen.nodes), *_files(seen.nodes), *_gpus(seen), *_network(seen), *_sizes(seen)]
    return sorted(found, key=lambda one: not one.fatal)


def _software(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    for name in sorted({name for node in nodes for name in node.software}):
        versions: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            versions[_compared(name, node.software.get(name, "none"))].append(node.host)
        if len(versions) == 1 or (name == "driver" and len(versions) == 2 and "none" in versions):
            continue  # nodes without GPUs have no driver
        told = ", ".join(f"{version} on {_named(hosts)}" for version, hosts in versions.items())
        remedy = "Give all nodes the same files" if name == "heddle" else "Install the same everywhere"
        yield Finding(text=f"{name} differs: {told}. {remedy}", fatal=name != "driver")


def _compared(name: str, version: str) -> str:
    """What of a version has to be the same: of Python the minor version, as Ray demands it; of packages not for which
    devices they were built, as a head without GPUs has a build for CPUs."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def _files(nodes: Sequence[NodeFacts]) -> Iterable[Finding]:
    unseen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in nodes:
        for path, why in node.hidden.items():
            unseen[path, why].append(node.host)
    for (path, why), hosts in unseen.items():
        yield Finding(text=f"{path} on {_named(hosts)}: {why}. All nodes must see the same files there")
    own: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        if node.own_cache:
            own[node.own_cache].append(node.host)
    for path, hosts in own.items():
        yield Finding(
            text=f"{path} on {_named(hosts)} is not the folder that the others see. A run trains by a whole copy, and "
            f"what one lacks it counts as bad draws (not_cached)",
            fatal=False,
        )
    for folder in sorted({folder for node in nodes for folder in node.folders}):
        digests: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            if folder in node.folders:
                digests[node.folders[folder]].append(node.host)
        if len(digests) > 1:
            told = "; ".join(_named(hosts) for hosts in digests.values())
            yield Finding(text=f"{folder} holds other files on some nodes than on others: {told}. Copy it anew")


def _gpus(seen: ClusterFacts) -> Iterable[Finding]:
    usual = {
        name: statistics.median(gpu.tflops for gpu in seen.gpus if gpu.name == name)
        for name in {gpu.name for gpu in seen.gpus if gpu.name}
    }
    for gpu in seen.gpus:
        if gpu.unusable:
            yield Finding(text=f"{gpu}: {gpu.unusable}")
        elif gpu.tflops < SLOW * usual[gpu.name]:
            yield Finding(
                text=f"{gpu} gives {gpu.tflops:.0f} TFLOP/s, others of its kind {usual[gpu.name]:.0f}: heat, a power "
                f"limit, or other work on it. Look at nvidia-smi -q -d PERFORMANCE there"
            )
        elif gpu.total_gib - gpu.free_gib > TAKEN_GIB:
            yield Finding(
                text=f"{gpu}: {gpu.total_gib - gpu.free_gib:.1f} of its {gpu.total_gib:.1f} GiB are taken by processes "
                f"that Ray does not know. End them"
            )
    for host, count in seen.gpus_there.items():
        if left := count - sum(gpu.host == host for gpu in seen.gpus):
            told = f"{counted(left, 'GPU')} of {host} could not be looked at: Ray has given them to others"
            yield Finding(text=told, fatal=False)


def _network(seen: ClusterFacts) -> Iterable[Finding]:
    for one in seen.reach:
        if one.silent:
            yield Finding(
                text=f"{one.host} does not reach {_named(one.silent)}: a firewall, a route, or another network than "
                f"that of --node-ip-address"
            )
        for other, how in one.losing.items():
            yield Finding(text=f"from {one.host} to {other} packets are lost ({how}): a cable, a port, a full switch")
    by_why: dict[str, list[str]] = defaultdict(list)
    for member, why in seen.talk_failed.items():
        by_why[why].append(member)
    for why, members in by_why.items():
        yield Finding(text=f"a sum over all failed on {_named(members)}: {why}")
    if seen.talk is not None and not seen.talk.right:
        yield Finding(text=f"a sum over {seen.talk.members} members is wrong: hardware computes or sends wrongly")


def _sizes(seen: ClusterFacts) -> Iterable[Finding]:
    for node in seen.nodes:
        if node.open_files < LEAST_FILES:
            yield Finding(
                text=f"{node.host}: a process may have {node.open_files} files open; Ray needs more. Set ulimit -n "
                f"65536 before ray start",
                fatal=False,
            )
        if node.shared_gib is not None and node.store_gib is not None and node.shared_gib < node.store_gib:
            yield Finding(
                text=f"{node.host}: /dev/shm has {node.shared_gib:.2f} GiB, less than Ray's object store of "
                f"{node.store_gib:.2f} GiB, which therefore lies on disk: clips and copies of the training state are "
                f"slow there, and a run whose copies need more is refused. Give the container more before Ray starts "
                f"(docker: --shm-size, Kubernetes: an emptyDir of medium Memory)"
            )
    ahead = seen.clocks
    if ahead and max(ahead.values()) - min(ahead.values()) > CLOCK_S:
        fastest, slowest = max(ahead, key=ahead.__getitem__), min(ahead, key=ahead.__getitem__)
        yield Finding(
            text=f"the clock of {fastest} is {ahead[fastest] - ahead[slowest]:.1f} s ahead of that of {slowest}: "
            f"logs and Ray's own timeline will not fit together. Run NTP",
            fatal=False,
        )


def _named(hosts: Iterable[str]) -> str:
    listed = list(hosts)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
