"""How many microbatches are decoded at a time, and how many pixels may wait, where the settings leave it to the
machine. Pure: the caller says what the nodes have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from data.config import EngineConfig

_MOST = 16  # decoders of a node
_MOST_MB = 16384
_STORE_SHARE = 1 / 4  # of an object store; results of encoders and copies of the state lie there, too
_MEMORY_BYTES = 4 << 30  # of a node for each decoder: its process, and the pixels of its microbatch twice
_SLACK = 1e-6  # fractions of a core add up to a whole one


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeNode:
    """What a node leaves to decoding."""

    cpus: float
    memory_bytes: float = 0.0  # 0: unknown
    store_bytes: float = 0.0  # of its object store; 0: unknown

    @staticmethod
    def of(resources: Mapping[str, float], taken_cpus: float = 0.0) -> DecodeNode:
        """By the resources that Ray lists of it, of which workers reserve `taken_cpus`."""
        return DecodeNode(
            cpus=max(0.0, resources.get("CPU", 0.0) - taken_cpus),
            memory_bytes=resources.get("memory", 0.0),
            store_bytes=resources.get("object_store_memory", 0.0),
        )


def asks(config: EngineConfig) -> bool:
    """Whether anything is left to the machine."""
    return "auto" in (config.decode_workers, config.object_store_mb)


def settled(config: EngineConfig, nodes: Sequence[DecodeNode]) -> EngineConfig:
    """The settings with numbers for what is `auto`."""
    workers, store_mb = config.decode_workers, config.object_store_mb
    if workers == "auto":
        workers = max(1, sum(_decoders(node, config.decode_cpus) for node in nodes))
    if store_mb == "auto":
        least = min((node.store_bytes for node in nodes if node.store_bytes), default=0.0)
        store_mb = max(1, min(_MOST_MB, int(_STORE_SHARE * least) >> 20)) if least else 512
    return replace(config, decode_workers=workers, object_store_mb=store_mb)


def number_of(setting: int | Literal["auto"]) -> int:
    """The number of a setting that is settled."""
    assert setting != "auto", "an engine gets numbers"
    return setting


def _decoders(node: DecodeNode, cpus_each: float) -> int:
    most = min(_MOST, node.cpus / cpus_each + _SLACK)
    return int(min(most, max(1.0, node.memory_bytes / _MEMORY_BYTES)) if node.memory_bytes else most)
