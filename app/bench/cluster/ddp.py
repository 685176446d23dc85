"""DistributedDataParallel on the machines of a virtual cluster, as most trainers run it: evaluated, not executed.

All GPUs form groups of one sequence-parallel degree, within nodes where they fit. A bucketed loader hands each group
batches of a bucket, which it encodes and trains; all groups wait for the slowest at the end, where the gradients, which
were summed under the last backward, are applied. The batches are the items of the virtual workers' steps in their
order, as many in a step as theirs, and not fewer than there are groups. What a cascade takes, with its noise and
stragglers, and what the end of a step takes is that of virtual workers (`Physics`); nothing is counted for loading, and
nothing for what a controller would do.

    ddp                   the degree at which most samples are trained in a second, of those that hold every bucket
    ddp, least degree     the smallest that holds every bucket, where that is another
    ddp, a bucket a step  as loaders do that draw one bucket for all groups: nobody waits, and each bucket has the
                          degree that suits it; but no step has more than one bucket, so it is another training
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.types import Cluster, Item, Module
from app.bench.cluster.physics import Physics
from app.bench.cluster.setups import SETTLED, Setup, workload
from app.bench.workload import scaled_profile

OWN, LEAST, COMMON = "ddp", "ddp, least degree", "ddp, a bucket a step"


class NoDegree(ValueError):
    """No group of these GPUs holds every bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpFigures:
    """What a way to run DDP comes to; times are virtual seconds."""

    way: str
    workers: int
    degrees: tuple[int, ...]  # that its groups have
    steps: float  # evaluated
    mean_step_s: float
    samples_per_s: float
    idle: float  # share of the GPUs' time outside of cascades
    same_steps: bool  # as many items in a step as the virtual workers have


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A cluster on which batches are trained; `profile` is in virtual seconds."""

    profile: Profile
    physics: Physics
    topology: Topology

    def degrees(self, item: Item) -> list[int]:
        """At which the batch can be trained, and text and clips be encoded by a group."""
        batch = Samples.of(item.batch, item.shape, self.physics.text_tokens)
        least = min(self.profile.legal_degrees("vae", batch), default=math.inf)
        most = self.topology.num_workers
        return [k for k in self.profile.legal_degrees("dit", batch) if least <= k <= most]

    def batch_s(self, item: Item, group: Sequence[int], key: str) -> tuple[float, float]:
        """What a group takes for a batch: (seconds until it is done, seconds of GPUs inside of cascades). Text is
        encoded by one of the group, clips by as many as are quickest. Virtual workers, too, wait for the link only
        where results come from outside of a bag."""
        text = self._cascade_s("text", item, group[:1], key)
        batch = Samples.of(item.batch, item.shape, self.physics.text_tokens)
        modes = [mode for mode in self.profile.modes("vae", batch) if mode[0] <= len(group)]
        encoders = group[: min(modes, key=lambda mode: mode[1])[0]]
        vae = self._cascade_s("vae", item, encoders, key)
        dit = self._cascade_s("dit", item, group, key)
        return text + vae + dit, text + vae * len(encoders) + dit * len(group)

    def _cascade_s(self, module: Module, item: Item, bag: Sequence[int], key: str) -> float:
        samples = {item.shape: item.batch}
        return self.physics.cascade_s(self.profile, self.topology, module, samples, bag, f"{key}/{module}")

    def groups(self, degree: int) -> list[list[int]]:
        """Consecutive GPUs, within nodes where they fit; those that do not fill a group stay idle."""
        nodes = self.topology.workers
        if degree > max(map(len, nodes)):
            nodes = [list(range(self.topology.num_workers))]
        return [node[i : i + degree] for node in nodes for i in range(0, len(node) - degree + 1, degree)]


def ddp_of(setup: Setup) -> list[DdpFigures]:
    """What DDP makes of the items of the steps that count of an undisturbed run. Raises NoDegree."""
    items = workload(setup)
    cluster = Cluster(nodes=(setup.gpus,) * setup.nodes)
    return ddp_figures(items[SETTLED:] or items, scaled_profile(1.0), setup.physics, cluster)


def ddp_figures(
    steps: Sequence[Sequence[Item]], profile: Profile, physics: Physics, cluster: Cluster
) -> list[DdpFigures]:
    """Each way on the items of these steps, `ddp` first. Raises NoDegree where no degree holds every bucket."""
    trainer = Trainer(profile=profile, physics=physics, topology=Topology(cluster, profile.cross_node))
    items = [item for step in steps for item in step]
    fitting = set.intersection(*(set(trainer.degrees(item)) for item in items))
    if not fitting:
        raise NoDegree(
            f"no sequence-parallel degree of at most {cluster.num_workers} GPUs holds every bucket, and DDP has one "
            f"for all; give more GPUs, or leave ddp out."
        )
    own = [_own_batches(trainer, items, len(steps[0]), degree) for degree in sorted(fitting)]
    best = max(own, key=lambda one: one.samples_per_s)
    least = [replace(own[0], way=LEAST)] if own[0] is not best else []
    return [best, *least, _common_bucket(trainer, items)]


def _own_batches(trainer: Trainer, items: Sequence[Item], count: int, degree: int) -> DdpFigures:
    """Every group trains batches of its own, at least `count` in a step together."""
    groups = trainer.groups(degree)
    size = max(count, len(groups))
    whole = [items[first : first + size] for first in range(0, max(1, len(items) - size + 1), size)]
    elapsed, busy = 0.0, 0.0
    for step, taken in enumerate(whole):
        ends = [0.0] * len(groups)
        for number, item in enumerate(taken):
            seconds, used = trainer.batch_s(item, groups[number % len(groups)], f"ddp{degree}/{step}/{number}")
            ends[number % len(groups)] += seconds
            busy += used
        elapsed += max(ends) + trainer.physics.update_s
    return DdpFigures(
        way=OWN,
        workers=trainer.topology.num_workers,
        degrees=(degree,),
        steps=len(whole),
        mean_step_s=elapsed / len(whole),
        samples_per_s=sum(item.batch for taken in whole for item in taken) / elapsed,
        idle=1.0 - busy / (elapsed * trainer.topology.num_workers),
        same_steps=size == count,
    )


def _common_bucket(trainer: Trainer, items: Sequence[Item]) -> DdpFigures:
    """All groups train the same bucket in a step. A step of n groups counts as an n-th for each item, so that buckets
    come as often as among the items."""
    calm = Trainer(
        profile=trainer.profile, physics=replace(trainer.physics, noise=0.0, stragglers=0.0), topology=trainer.topology
    )
    elapsed, busy, steps, used_degrees = 0.0, 0.0, 0.0, set()
    for number, item in enumerate(items):

        def share_s(degree: int, item: Item = item) -> float:
            groups = calm.groups(degree)
            return (calm.batch_s(item, groups[0], "")[0] + calm.physics.update_s) / len(groups)

        degree = min(trainer.degrees(item), key=share_s)
        groups = trainer.groups(degree)
        took = [trainer.batch_s(item, group, f"common/{number}/{n}") for n, group in enumerate(groups)]
        elapsed += (max(seconds for seconds, _ in took) + trainer.physics.update_s) / len(groups)
        busy += sum(used for _, used in took) / len(groups)
        steps += 1.0 / len(groups)
        used_degrees.add(degree)
    return DdpFigures(
        way=COMMON,
        workers=trainer.topology.num_workers,
        degrees=tuple(sorted(used_degrees)),
        steps=steps,
        mean_step_s=elapsed / steps,
        samples_per_s=sum(item.batch for item in items) / elapsed,
        idle=1.0 - busy / (elapsed * trainer.topology.num_workers),
        same_steps=False,
    )
