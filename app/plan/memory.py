"""The memory of a GPU before one is touched: states, what is left, and what the planned cascades need of it.

Shown by `heddle plan` and `--dry-run` where the size of a device is known: from a cluster file, from
`workers.memory_gib`, or of this machine. A run that cannot fit is refused with the changes that would help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.config import TrainConfig
from actors.plan.costs.needs import Samples
from actors.plan.costs.profile import Profile
from actors.plan.types import MODULES, USABLE, Cascade, Cluster, Item, Plan, PlanError
from actors.planning.memory import (
    CONTEXT_GIB,
    MemoryForecast,
    Shape,
    clips_of,
    communicators_gib,
    forecast,
    least_workers,
    too_little,
)
from actors.state.hosts import HostNeed, host_need, refuse_short_hosts
from app.inputs.batches import device_gib, placed
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig

_MOST_WORKERS = 64  # that are suggested where fewer are too few


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryView:
    """What is known of a device of this run. `cuda`: it is a GPU, with a context and communicators."""

    found: MemoryForecast
    memory_gib: float | None
    workers: int
    bags_gib: float
    cuda: bool
    nodes: int = 1
    host: HostNeed | None = None  # of the node with the most workers; None where its memory is the device
    host_gib: float = 0.0  # of each node; 0: unknown

    @property
    def room_gib(self) -> float | None:
        """GiB for cascades; None where the size of the device is unknown."""
        if self.memory_gib is None:
            return None
        return self.found.room_gib(self.memory_gib, self.workers, self.bags_gib, self.cuda)


def view_memory(
    config: RunConfig, model: ModelConfig, geometry: Geometry, profile: Profile, cluster: Cluster
) -> MemoryView | None:
    """Predicts what cascades need, for the profile too; None where no device has a known size and none is a GPU.

    Raises PlanError when a clip of some bucket fits on no worker, or not on `workers.min` of them.
    """
    memory, cuda = device_gib(config, cluster.memory_gib)
    if memory is None and not cuda:
        return None
    clips, degrees = clips_of(config.data, geometry), profile.degrees.get("dit", (1,))
    degrees = config.planner.degrees or degrees
    found = forecast(model, geometry, config.train, clips, degrees, cuda)
    profile.needs = found.needs
    if cuda and memory is not None:
        found = placed(found, config, model, geometry, clips, degrees, memory, max(cluster.nodes))
    view = MemoryView(
        found=found,
        memory_gib=memory,
        workers=cluster.num_workers,
        bags_gib=communicators_gib(degrees, cluster.num_workers, config.planner.bag_peers) if cuda else 0.0,
        cuda=cuda,
        nodes=len(cluster.nodes),
    )
    if memory is not None:
        _check_workers(config, model, geometry, view, clips, degrees)
    if not cuda:
        return view
    view = replace(view, host=_host_need(config, found, cluster), host_gib=cluster.host_gib)
    assert view.host is not None
    refuse_short_hosts([("a node", view.host, cluster.host_gib or None)])
    return view


def _host_need(config: RunConfig, found: MemoryForecast, cluster: Cluster) -> HostNeed:
    return host_need(
        found.trained * found.state_bytes / 2**30,
        found.state_bytes,
        config.snapshot,
        here=max(cluster.nodes),
        workers=cluster.num_workers,
        nodes=len(cluster.nodes),
        state_on_host=found.places.state == "host",
        node_gradient=found.gradient_on_host,
        copies=2,  # beside the GPU's work
        weights_gib=found.host_weights_gib,
        encoders_gib=found.host_encoders_gib,
    )


def with_room(cluster: Cluster, view: MemoryView | None) -> Cluster:
    """The cluster with what its workers have for cascades."""
    if view is None or view.room_gib is None:
        return cluster
    return replace(cluster, room_gib=(view.room_gib,) * cluster.num_workers)


def _check_workers(
    config: RunConfig,
    model: ModelConfig,
    geometry: Geometry,
    view: MemoryView,
    clips: Sequence[Shape],
    degrees: Sequence[int],
) -> None:
    memory, room = view.memory_gib, view.room_gib
    assert memory is not None and room is not None
    tokens = min(config.data.batch.text_tokens, model.text.most_tokens)

    def least(found: MemoryForecast, most: int) -> int | None:
        return least_workers(found, geometry, clips, tokens, degrees, memory, most, config.planner.bag_peers, view.cuda)

    fewest = least(view.found, max(view.workers, _MOST_WORKERS))
    per_node = view.found.per_node
    if fewest is not None and fewest <= view.workers:
        if fewest > config.workers.min:
            raise PlanError(
                f"workers.min {config.workers.min} is too few: a clip of some bucket fits a GPU of {memory:g} GiB only "
                f"on {fewest} workers or more. Set workers.min to {fewest}."
            )
        return
    remedies = [f"{fewest} workers"] if fewest is not None else []
    for name, other_model, train in _alternatives(config, model):
        changed = forecast(other_model, geometry, train, clips, degrees, view.cuda)
        if any(least(one, view.workers) is not None for one in changed.possible(train, per_node)):
            remedies.append(name)
    raise too_little(view.found, memory, view.workers, room, remedies)


def _alternatives(config: RunConfig, model: ModelConfig) -> list[tuple[str, ModelConfig, TrainConfig]]:
    """Single changes of the settings, the smallest first."""
    train, found = config.train, []
    if not model.dit.gradient_checkpointing:
        changed = replace(model, dit=replace(model.dit, gradient_checkpointing=True))
        found.append(("model.dit.gradient_checkpointing: true", changed, train))
    if train.parameter_dtype == "float32":
        half = replace(train, parameter_dtype="bfloat16", autocast="bfloat16")
        found.append(("train.parameter_dtype and train.autocast: bfloat16", model, half))
    if train.optimizer.ema_decay:
        bare = replace(train, optimizer=replace(train.optimizer, ema_decay=0.0))
        found.append(("train.optimizer.ema_decay: 0", model, bare))
    if model.vae.dtype_on("cuda") == "float32" and model.vae.kind == "diffusers":
        found.append(("model.vae.dtype: bfloat16", replace(model, vae=replace(model.vae, dtype="bfloat16")), train))
    if model.vae.kind == "diffusers" and not model.vae.tiling:
        found.append(("model.vae.tiling: true", replace(model, vae=replace(model.vae, tiling=True)), train))
    if train.memory.state != "host" and train.sync == "flat":
        found.append(("train.memory.state: host", model, replace(train, memory=replace(train.memory, state="host"))))
    if train.memory.gradients == "own" and train.sync == "flat":
        found.append(
            ("train.memory.gradients: auto", model, replace(train, memory=replace(train.memory, gradients="auto")))
        )
    if model.dit.fetchable and train.memory.parameters == "replicated" and train.sync == "flat":
        fetched = replace(train, memory=replace(train.memory, parameters="node"))
        found.append(("train.memory.parameters: node", model, fetched))
    if not (model.dit.lora_rank or model.dit.train_only):
        found.append(("model.dit.lora_rank: 16", replace(model, dit=replace(model.dit, lora_rank=16)), train))
    return found


def memory_lines(view: MemoryView, plan: Plan, items: dict[tuple[int, str], Item], profile: Profile) -> list[str]:
    """The table of one GPU: states, the worst planned cascade of each module, communicators, what stays free."""
    states = view.found.states(view.workers)
    size = f" of {view.memory_gib:g}" if view.memory_gib is not None else ""
    places = f" ({view.found.places.describe()})" if view.cuda and not view.found.deepspeed else ""
    lines = [
        f"memory    GiB of a GPU{size} on {view.workers} workers{places}, predicted",
        f"          states {states.total:.2f} ({states.describe()}), VAE in {view.found.vae_dtype}",
    ]
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
    host = view.found.host_gib(view.workers, view.nodes)
    if host:
        parts = [
            *(["optimizer state"] if view.found.places.state == "host" else []),
            *(["gradients"] if view.found.gradient_on_host else []),
            *(["weights"] if view.found.fetches else []),
            *(["text encoder"] if view.found.host_encoders_gib else []),
        ]
        lines.append(f"          in memory of each node {host:.2f} ({' and '.join(parts)})")
    if view.host is not None:
        size = f" of {view.host_gib:g}" if view.host_gib else ""
        lines.append(f"          host memory of a node {view.host.total:.2f}{size} ({view.host.describe()})")
    if view.cuda:
        lines.append(
            f"          CUDA and the world's communicator {CONTEXT_GIB:.2f}, "
            f"communicators of bags at most {view.bags_gib:.2f}"
        )
    if view.room_gib is not None:
        lines.append(
            f"          free {view.room_gib - worst:.2f} of {view.room_gib:.2f} for cascades, with "
            f"{100 * (1 - USABLE):.0f}% for fragments"
        )
    return lines


def cascade_gib(cascade: Cascade, items: dict[tuple[int, str], Item], profile: Profile) -> float | None:
    """What a planned cascade needs beside the states."""
    parts = [(part.count, items[cascade.step, part.item]) for part in cascade.parts]
    samples = [
        Samples(count=count, frames=i.frames, height=i.height, width=i.width, text_tokens=i.text_tokens)
        for count, i in parts
    ]
    return profile.needs.gib(profile.footprint(cascade.module, samples, cascade.degree))
