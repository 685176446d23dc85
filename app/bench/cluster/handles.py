"""Relays and keepers of a virtual cluster, which live in hosts, as the controller and relays know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Concatenate, Generic, TypeVar

from actors.letters import NodeAnswer
from actors.messages import PublishedResult
from actors.refs import Method, Ref

if TYPE_CHECKING:
    from app.bench.cluster.host import HostHandle

R = TypeVar("R")


def node_number(node: str) -> int:
    """Of n0007 it is 7."""
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
