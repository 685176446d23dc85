"""Hosts of a virtual cluster, and the relays and keepers in them, as other processes know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Concatenate, Generic, Protocol, TypeVar

from actors.held_state import HeldShard, Snapshot
from actors.letters import CommitCall, KeeperCall, Letter, NodeAnswer
from actors.messages import PublishedResult, WorkerInfo
from actors.refs import Method, Ref
from app.bench.cluster.worker import MeetingKey

R = TypeVar("R")


class HostHandle(Protocol):
    """A `Host` as other processes know it."""

    @property
    def know(self) -> Method[[Sequence[HostHandle]], None]: ...
    @property
    def add(self) -> Method[[str, str], WorkerInfo]: ...
    @property
    def call(self) -> Method[[str, str, int, str, Sequence[object]], object]: ...
    @property
    def relay_step(self) -> Method[[str, Letter], NodeAnswer]: ...
    @property
    def relay_deliver(self) -> Method[[str, Sequence[Letter]], NodeAnswer]: ...
    @property
    def relay_published(self) -> Method[[str, int, str], list[PublishedResult]]: ...
    @property
    def relay_here(self) -> Method[[str], None]: ...
    @property
    def end_relay(self) -> Method[[str], None]: ...
    @property
    def end(self) -> Method[[Sequence[str]], None]: ...
    @property
    def closed(self) -> Method[[int], None]: ...
    @property
    def together(self) -> Method[[MeetingKey, int, int, float], float]: ...
    @property
    def inventory(self) -> Method[[], dict[str, list[HeldShard]]]: ...
    @property
    def relay_hold(self) -> Method[[str, Sequence[KeeperCall]], bool]: ...
    @property
    def relay_commit(self) -> Method[[str, CommitCall], list[str]]: ...
    @property
    def keep(self) -> Method[[str, Sequence[Snapshot]], bool]: ...
    @property
    def copy(self) -> Method[[str, Sequence[tuple[Snapshot, VirtualKeeper]]], bool]: ...
    @property
    def committed(self) -> Method[[str, int, int, object, object], None]: ...
    @property
    def begin(self) -> Method[[int], None]: ...


def node_number(node: str) -> int:
    """The number in its name: 7 of n0007."""
    return int(node[1:])


def host_of(node: str, hosts: Sequence[HostHandle]) -> HostHandle:
    """The process that hosts the workers of a node."""
    return hosts[node_number(node) % len(hosts)]


class VirtualRelay:
    """Looks like `actors.letters.RelayHandle`: the relay of a node, which is in the process of its workers."""

    def __init__(self, node: str, host: HostHandle) -> None:
        self._node, self.host = node, host

    @property
    def step(self) -> OfNode[NodeAnswer]:
        return OfNode(self._node, self.host.relay_step)

    @property
    def deliver(self) -> OfNode[NodeAnswer]:
        return OfNode(self._node, self.host.relay_deliver)

    @property
    def published(self) -> OfNode[list[PublishedResult]]:
        return OfNode(self._node, self.host.relay_published)

    @property
    def hold(self) -> OfNode[bool]:
        return OfNode(self._node, self.host.relay_hold)

    @property
    def commit(self) -> OfNode[list[str]]:
        return OfNode(self._node, self.host.relay_commit)

    @property
    def here(self) -> OfNode[None]:
        return OfNode(self._node, self.host.relay_here)


class OfNode(Generic[R]):
    """A method of a host that wants the name of a node first."""

    def __init__(self, node: str, method: Method[Concatenate[str, ...], R]) -> None:
        self._node, self._method = node, method

    def options(self, *, name: str = "", concurrency_group: str = "") -> OfNode[R]:
        return OfNode(self._node, self._method.options(name=name)) if name else self

    def remote(self, *arguments: object) -> Ref[R]:
        return self._method.remote(self._node, *arguments)


class VirtualKeeper:
    """The keeper of a node."""

    def __init__(self, node: str, host: HostHandle) -> None:
        self.node, self._host = node, host

    @property
    def put(self) -> OfNode[bool]:
        return OfNode(self.node, self._host.keep)

    @property
    def hold(self) -> OfNode[bool]:
        return OfNode(self.node, self._host.copy)

    @property
    def commit(self) -> OfNode[None]:
        return OfNode(self.node, self._host.committed)
