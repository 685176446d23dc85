"""Part (h) of `heddle bench runtime`: memory of nodes that train, against what is asked of them (actors.state.hosts).

Two runs on the same nodes of this machine, of a tiny model and of one with some 50 M weights: how much more all
processes of the machine take for the larger one is to be what `host_need` says of its nodes, and the weights, which
each CPU worker has for itself. Memory is the proportional set size (PSS) of this process and all below it, Ray's with
them: shared pages count once, whoever maps them, also those of the object stores.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from actors.state.hosts import host_need
from app.bench.lab import OPEN_END, Lab
from app.settings.config import RunConfig
from ops.models.load import num_trained
from ops.shards import bytes_per_weight
from ops.units import GIB

LAYOUTS = ((2,), (1, 1))  # workers of each node
TOLERANCE = 0.1  # of what is asked for
_STORE_MIB = 1024
_STEPS = 6  # until every page of both versions, and of their copies, has been written
_LOOKS, _PAUSE_S = 5, 1.0
_DATA = {"items_per_step": 2, "buckets": {"table": ["1x64x96"], "short_videos": "image"}}
_LARGE = {"dit": {"num_layers": 3, "num_heads": 8, "head_dim": 128, "ffn_dim": 4096}}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFigures:
    """GiB of all nodes of one layout together."""

    nodes: tuple[int, ...]  # workers of each
    weights: int
    asked: float  # of host memory, by `host_need`
    replicas: float  # of the weights, which the workers have besides
    found: float  # that the processes took

    @property
    def ratio(self) -> float:
        """What was found of host memory, over what was asked for."""
        return (self.found - self.replicas) / self.asked


def measure(lab: Lab) -> list[HostFigures]:
    """Every layout, on nodes that are added to the laboratory and removed again."""
    found: list[HostFigures] = []
    for layout in LAYOUTS:
        nodes = [lab.add_node(workers=count, store_mib=_STORE_MIB) for count in layout]
        settings: dict[str, Mapping[str, object]] = {
            "train": {"steps": OPEN_END},
            "workers": {"min": sum(layout), "max": sum(layout)},
            "data": _DATA,
        }
        name = "x".join(map(str, layout))
        small = lab.config(f"small-{name}", **settings)
        large = lab.config(f"large-{name}", **settings, model=_LARGE)
        _taken(lab, lab.config(f"warm-{name}", **settings))
        before = _taken(lab, small)
        after = _taken(lab, large)
        more = num_trained(large.model.dit) - num_trained(small.model.dit)
        found.append(
            HostFigures(
                nodes=layout,
                weights=num_trained(large.model.dit),
                asked=_asked(large, layout) - _asked(small, layout),
                replicas=4 * more * sum(layout) / GIB,
                found=after - before,
            )
        )
        for node in nodes:
            lab.cluster.remove_node(node, allow_graceful=True)
            lab.nodes.remove(node)
    return found


def table(found: Sequence[HostFigures]) -> str:
    """Markdown, a row for each layout."""
    lines = [
        "| workers of each node | weights | host memory asked for, GiB | found, GiB | ratio | must |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        lines.append(
            f"| {' + '.join(map(str, one.nodes))} | {one.weights / 1e6:.1f} M | {one.asked:.3f} | "
            f"{one.found - one.replicas:.3f} | {one.ratio:.3f} | 1 within {TOLERANCE:.0%} |"
        )
    return "\n".join(lines)


def _asked(config: RunConfig, layout: Sequence[int]) -> float:
    """GiB, of all nodes."""
    weight = bytes_per_weight(config.train.optimizer)
    state_gib = num_trained(config.model.dit) * weight / GIB
    workers, nodes = sum(layout), len(layout)
    return sum(
        host_need(state_gib, weight, config.snapshot, here=here, workers=workers, nodes=nodes, node_gradient=True).total
        for here in layout
    )


def _taken(lab: Lab, config: RunConfig) -> float:
    """GiB that a run of this config takes after some steps: the most of a few looks."""
    run = lab.start(config)
    run.wait_for_step(_STEPS)
    looks: list[float] = []
    for _ in range(_LOOKS):
        looks.append(_pss_bytes() / GIB)
        time.sleep(_PAUSE_S)
    run.stop()
    return max(looks)


def _pss_bytes() -> int:
    """Proportional memory of this process and all below it."""
    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total
