"""The memory of a run's GPUs and nodes before one is touched: does the run fit, and if not, what would make it fit?

Asked by `heddle plan`, `--dry-run` and, before anything is loaded, by `heddle train`, where the size of a device is
known: from a cluster file, from `workers.memory_gib`, of this machine, or from the nodes of the Ray cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.profile import Profile
from actors.plan.types import Cluster, PlanError
from actors.planning.demand import Demand
from actors.planning.forecasts import Forecasts, lora_files_gib, sizes_of
from actors.planning.memory import MemoryForecast, communicators_gib
from actors.planning.options import tell_fetched
from actors.state.hosts import HostNeed, aside_gib, host_need, refuse_short_hosts
from app.inputs.batches import device_gib, placed
from app.inputs.beside import makes_samples, spared
from app.inputs.remedies import MOST_WORKERS, TrainedSetup, advice
from app.settings.config import RunConfig
from ops.counted import counted
from ops.geometry import Geometry
from ops.models.config import ModelConfig


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
    fetched: FetchedWeights = ON_DEVICE  # weights that passes copy from host memory

    @property
    def room_gib(self) -> float | None:
        """GiB for cascades; None where the size of the device is unknown."""
        if self.memory_gib is None:
            return None
        return self.found.room_gib(self.memory_gib, self.workers, self.bags_gib)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRoom:
    """A node of the cluster: its name, how many workers it has room for, GiB that it could spare for training."""

    name: str
    workers: int
    gib: float | None  # None: unknown


def view_memory(
    config: RunConfig,
    model: ModelConfig,
    geometry: Geometry,
    profile: Profile,
    cluster: Cluster,
    hosts: Sequence[HostRoom] = (),
) -> MemoryView | None:
    """Predicts what cascades need, for the profile too; None where no device has a known size and none is a GPU.
    `hosts` are the cluster's nodes, where each is known by itself; they are filled one after the other.

    Raises PlanError when a clip of some bucket fits on no worker, or not on `workers.min` of them, or when a node has
    too little memory of its own: on all of them, on those that there are, or on `workers.min`.
    """
    memory, cuda = device_gib(config, cluster.memory_gib)
    if memory is None and not cuda:
        return None
    degrees = tuple(config.planner.degrees or profile.degrees.get("dit", (1,)))
    demand = Demand.of(config.data, model, geometry, config.planner.bag_peers)
    forecasts = Forecasts(geometry, demand.clips, cuda, spared(config))
    found = forecasts.of(model, config.train, degrees)
    profile.expect_needs(found.needs)
    if cuda and memory is not None:
        found = placed(found, config, demand, degrees, memory, max(cluster.nodes))
        counts = (config.workers.min, config.workers.max, cluster.num_workers)
        found = demand.with_graphs(found, degrees, counts, memory)
    if cuda:
        tell_fetched(profile, model, found, max(cluster.nodes))
    view = MemoryView(
        found=found,
        memory_gib=memory,
        workers=cluster.num_workers,
        bags_gib=communicators_gib(degrees, cluster.num_workers, config.planner.bag_peers) if cuda else 0.0,
        cuda=cuda,
        nodes=len(cluster.nodes),
        fetched=profile.fetched,
    )
    if memory is not None:
        known = tuple(profile.degrees.get("dit", (1,)))
        setup = TrainedSetup(model=model, train=config.train, degrees=degrees, known=tuple(sorted({*known, *degrees})))
        _refuse_misfits(config, view, memory, demand, setup, forecasts)
    if not cuda:
        return view
    files_gib = lora_files_gib(config.checkpoint, model)
    view = replace(view, host=_host_need(config, found, cluster.nodes, files_gib), host_gib=cluster.host_gib)
    assert view.host is not None
    refuse_short_hosts([("a node", view.host, cluster.host_gib or None)])
    there, least = sum(host.workers for host in hosts), min(config.workers.min, cluster.num_workers)
    for workers in dict.fromkeys((cluster.num_workers, min(max(there, least), cluster.num_workers), least)):
        _refuse_short_hosts(config, found, hosts, workers, files_gib)
    return view


def filled(rooms: Sequence[int], workers: int) -> tuple[int, ...]:
    """Workers of each node, `workers` in all, on nodes with room for `rooms`: one node is filled after the other; what
    has no room yet comes on nodes like the largest.

    >>> filled([8, 8, 2], 10), filled([8], 20), filled([], 4)
    ((8, 2), (8, 8, 4), (4,))
    """
    largest = max(rooms, default=0) or workers
    nodes, left = [], workers
    for room in [room for room in rooms if room] + [largest] * (workers // largest + 1):
        if left <= 0:
            break
        nodes.append(min(room, left))
        left -= room
    return tuple(nodes)


def _refuse_short_hosts(
    config: RunConfig, found: MemoryForecast, hosts: Sequence[HostRoom], workers: int, files_gib: float
) -> None:
    nodes = filled([host.workers for host in hosts], workers)
    refuse_short_hosts(
        [
            (f"node {host.name}", _host_need(config, found, nodes, files_gib, here), host.gib)
            for host, here in zip(hosts, nodes, strict=False)
        ]
    )


def _host_need(
    config: RunConfig, found: MemoryForecast, nodes: Sequence[int], files_gib: float, here: int = 0
) -> HostNeed:
    """What a node with `here` workers needs; 0: the one with the most. `files_gib`: of the task for LoRA files."""
    return host_need(
        found.state_gib,
        found.state_bytes,
        config.snapshot,
        here=here or max(nodes),
        workers=sum(nodes),
        nodes=len(nodes),
        node_gradient=found.places.gradients == "host",
        weights_gib=found.host_weights_gib,
        encoders_gib=found.host_encoders_gib,
        uploads_gib=found.host_uploads_gib,
        pinned_gib=found.host_pinned_gib,
        samples_gib=_aside_gib(config, found),
        lora_files_gib=files_gib,
    )


def _aside_gib(config: RunConfig, found: MemoryForecast) -> float:
    """Host memory of a sample that is made beside the run."""
    if not makes_samples(config):
        return 0.0
    return aside_gib(found.state_gib, found.state_bytes, found.parameter_bytes, gpu=True)


def _refuse_misfits(
    config: RunConfig, view: MemoryView, memory_gib: float, demand: Demand, setup: TrainedSetup, forecasts: Forecasts
) -> None:
    """Raises PlanError where a clip fits on none of the view's workers, or not on as few as the run may go on with."""
    found, degrees, least = view.found, setup.degrees, min(config.workers.min, view.workers)
    device = "GPU" if view.cuda else "worker"
    if demand.fits(found, degrees, view.workers, memory_gib):
        fewest = demand.fewest(found, degrees, memory_gib, least, view.workers)
        if fewest != least:
            raise PlanError(
                f"workers.min {config.workers.min} is too few: a clip of some bucket fits a {device} of {memory_gib:g} "
                f"GiB only on {fewest} workers or more. Set workers.min to {fewest}."
            )
        return

    def possible(changed: TrainedSetup) -> list[MemoryForecast]:
        bare = sizes_of(changed.model, changed.train, view.cuda).possible(changed.train, found.per_node)
        if all(one.room_gib(memory_gib, MOST_WORKERS, 0.0) <= 0 for one in bare):
            return []  # weights alone are too large: what cascades would need takes seconds to predict
        made = forecasts.of(changed.model, changed.train, changed.degrees)
        return made.possible(changed.train, found.per_node)

    def fits(changed: TrainedSetup) -> bool:
        return any(demand.fits(one, changed.degrees, view.workers, memory_gib) for one in possible(changed))

    def fewest_of(changed: TrainedSetup) -> int | None:
        counts = [
            demand.fewest(one, changed.degrees, memory_gib, view.workers + 1, MOST_WORKERS) for one in possible(changed)
        ]
        return min((count for count in counts if count is not None), default=None)

    room, states = view.room_gib, found.states(view.workers)
    assert room is not None
    on = f"on {counted(view.workers, 'worker')}"
    short = f"has {_gib(room)} for cascades {on}, which is too little"
    if room <= 0:
        short = f"lacks {_gib(-room)} {on} before any cascade runs"
    raise PlanError(
        f"a {device} of {memory_gib:g} GiB {short}: "
        f"{_gib(states.total)} are states ({states.describe()}). {advice(setup, fits, fewest_of)}"
        f"{_spared_advice(config, view, memory_gib, demand, setup)}"
    )


def _spared_advice(config: RunConfig, view: MemoryView, memory_gib: float, demand: Demand, setup: TrainedSetup) -> str:
    """What to do where it would fit without encoders; "" where it would not, or has none."""
    found = view.found
    if spared(config).cascades:
        return ""
    needs = replace(
        found.needs, predicted={key: line for key, line in found.needs.predicted.items() if key[0] == "dit"}
    )
    vae_gib = found.vae_gib if makes_samples(config) else 0.0
    bare = replace(found, vae_gib=vae_gib, text_gib=0.0, image_gib=0.0, needs=needs)
    alone = replace(demand, encoded=())
    possible = bare.possible(setup.train, found.per_node)
    if not any(alone.fits(one, setup.degrees, view.workers, memory_gib) for one in possible):
        return ""
    also = " and data.start_frame: fixed" if config.data.start_frame == "random" else ""
    return (
        f" Or train from a cache that `heddle data cache` has filled (data.cache.only: true{also}): it fits without "
        "encoders."
    )


def _gib(size: float) -> str:
    """Two digits and more: a size below a tenth of a GiB is not 0.0."""
    return f"{size:.1f} GiB" if size >= 1 else f"{size:.2g} GiB"
