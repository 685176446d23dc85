"""The memory of a GPU as a plan's preview shows it: states, what is left, and what the planned cascades need of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.types import MODULES, USABLE, Cascade, Cluster, Item, Plan
from actors.planning.memory import CONTEXT_GIB
from app.inputs.memory import MemoryView
from app.settings.config import RunConfig
from data.config import EngineConfig
from ops.counted import counted
from ops.units import GIB, MIB


def with_room(cluster: Cluster, view: MemoryView | None) -> Cluster:
    """The cluster with what its workers have for cascades."""
    if view is None or view.room_gib is None:
        return cluster
    return replace(cluster, room_gib=(view.room_gib,) * cluster.num_workers)


def state_lines(view: MemoryView) -> list[str]:
    """What is known of a GPU and its node before a step is planned: states, communicators, room for cascades."""
    states = view.found.states(view.workers)
    size = f" of {view.memory_gib:g}" if view.memory_gib is not None else ""
    places = f" ({view.found.places.describe()})" if view.cuda and not view.found.deepspeed else ""
    device = "GPU" if view.cuda else "worker"
    lines = [
        f"memory    GiB of a {device}{size} on {counted(view.workers, 'worker')}{places}, predicted",
        f"          states {states.total:.2f} ({states.describe()}), VAE in {view.found.vae_dtype}",
    ]
    if view.host is not None:
        size = f" of {view.host_gib:g}" if view.host_gib else ""
        lines.append(f"          host memory of a node {view.host.total:.2f}{size} ({view.host.describe()})")
        if not view.host_gib:
            lines.append("          which was not checked: host_gib in the cluster file says what a node has for it")
    if (copies := view.fetched).num_bytes:
        lines.append(
            f"          a pass copies {copies.num_bytes / GIB:.2f} of it to each GPU, for its forward and for its "
            f"backward: {2 * copies.way_s:.2f} s at least, at {copies.bytes_per_s / 1e9:.0f} GB/s (assumed)"
        )
    if view.host is not None and view.host.encoders:
        without = view.host.total - view.host.encoders
        lines.append(f"          host memory from a cache that `heddle data cache` has filled: at most {without:.2f}")
    if view.cuda:
        lines.append(
            f"          CUDA and the communicator of all {CONTEXT_GIB + view.found.exchange_gib(view.workers):.2f}, "
            f"communicators of bags at most {view.bags_gib:.2f}"
        )
    if view.found.graphs_gib and not view.found.has_graphs and view.memory_gib is not None:
        lines.append(f"          no room for CUDA graphs ({view.found.graphs_gib:.2f}): blocks run as written")
    if view.room_gib is not None:
        lines.append(f"          room {view.room_gib:.2f} for cascades, with {100 * (1 - USABLE):.0f}% for fragments")
    return lines


def pixel_line(steps: Sequence[Sequence[Item]], config: RunConfig) -> str:
    """What decoded clips take of the memory of all nodes, where they wait for a worker: those of the steps that a plan
    looks at and of the next one, by the largest of `steps`, and what is decoded ahead. "" where all latents come from
    the cache."""
    largest = max(
        sum(i.batch * i.frames * i.height * i.width * 3 for i in items if "vae" not in i.cached) for items in steps
    )
    if not largest:
        return ""
    asked, engine = config.planner.lookahead + 2, config.data.engine
    return (
        f"pixels    {in_words(asked * largest)} of decoded clips in memory of all nodes, {asked} steps of "
        f"{in_words(largest)};\n          decoded ahead of them: {_decoded_ahead(engine)}"
    )


def _decoded_ahead(engine: EngineConfig) -> str:
    if engine.kind == "pool":
        return f"{counted(engine.lookahead, 'step')} (data.engine.lookahead)"
    most = engine.object_store_mb
    bound = "a quarter of the smallest object store" if most == "auto" else in_words(most << 20)
    return f"at most {bound} (data.engine.object_store_mb)"


def in_words(num_bytes: float) -> str:
    """'0.38 GiB', and of a small model '2.7 MiB'."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / MIB:.1f} MiB"


def need_lines(view: MemoryView, plan: Plan, items: dict[tuple[int, str], Item], profile: Profile) -> list[str]:
    """The worst planned cascade of each module, and what it leaves free of the room."""
    lines = []
    worst = 0.0
    for module in MODULES:
        needs = [
            (need, cascade)
            for step in plan.steps
            for cascade in step.cascades
            if cascade.module == module and (need := cascade_gib(cascade, items, profile)) is not None
        ]
        if needs:
            need, cascade = max(needs, key=lambda pair: pair[0])
            worst = max(worst, need)
            item = items[cascade.step, cascade.parts[0].item]
            shape = f"{item.frames}f {item.height}x{item.width} b{cascade.batch}"
            lines.append(f"          worst {module} cascade {need:.2f} ({shape}, degree {cascade.degree})")
    if view.room_gib is not None:
        lines.append(f"          free {view.room_gib - worst:.2f} of {view.room_gib:.2f} for cascades")
    return lines


def cascade_gib(cascade: Cascade, items: dict[tuple[int, str], Item], profile: Profile) -> float | None:
    """What a planned cascade needs beside the states."""
    samples = [Samples.of_item(items[cascade.step, part.item], part.count) for part in cascade.parts]
    return profile.needs.gib(profile.footprint(cascade.module, samples, cascade.degree))
