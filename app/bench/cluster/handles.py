"""Hosts of a virtual cluster, and the relays and keepers in them, as other processes know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from actors.held_state import HeldShard
from actors.messages import WorkerInfo
from actors.refs import Method, Ref
from app.bench.cluster.worker import MeetingKey


class HostHandle(Protocol):
    """A `Host` as other processes know it."""

    @property
    def know(self) -> Method[[Sequence[HostHandle]], None]: ...
    @property
    def add(self) -> Method[[str, str], WorkerInfo]: ...
    @property
    def call(self) -> Method[[str, str, int, str, Sequence[object]], object]: ...
    @property
    def relay(self) -> Method[[str, str, Sequence[object]], object]: ...
    @property
    def end_relay(self) -> Method[[str], None]: ...
    @property
    def end(self) -> Method[[Sequence[str]], None]: ...
    @property
    def closed(self) -> Method[[int], None]: ...
    @property
    def together(self) -> Method[[MeetingKey, int, int, float], float]: ...
    @property
    def keeper(self) -> Method[[str, str, Sequence[object]], object]: ...
    @property
    def inventory(self) -> Method[[], dict[str, list[HeldShard]]]: ...
    @property
    def begin(self) -> Method[[int], None]: ...


def host_of(node: str, hosts: Sequence[HostHandle]) -> HostHandle:
    """The process that hosts the workers of a node, by the number in its name: 7 of n0007."""
    return hosts[int(node[1:]) % len(hosts)]


class NodeHandle:
    """Looks like `actors.letters.RelayHandle`, or like `actors.state.keeper.KeeperHandle`: the relay of a node, or its
    keeper, which are in the process of its workers."""

    def __init__(self, kind: Literal["relay", "keeper"], node: str, host: HostHandle) -> None:
        self._kind, self._node, self._host = kind, node, host

    def __getattr__(self, method: str) -> NodeCall:
        if method.startswith("_"):
            raise AttributeError(method)
        return NodeCall(self._host.relay if self._kind == "relay" else self._host.keeper, self._node, method)


class NodeCall:
    """A method of a `NodeHandle`, by the protocol of `actors.refs.Method`."""

    __slots__ = ("_method", "_node", "_of_host")

    def __init__(self, of_host: Method[[str, str, Sequence[object]], object], node: str, method: str) -> None:
        self._of_host, self._node, self._method = of_host, node, method

    def options(self, *, name: str = "", concurrency_group: str = "") -> NodeCall:
        return NodeCall(self._of_host.options(name=name), self._node, self._method) if name else self

    def remote(self, *arguments: object) -> Ref[object]:
        return self._of_host.remote(self._node, self._method, arguments)
