"""Plans count on what a GPU will have left, also while bags connect and take memory: whole runs, simulated."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.messages import WorkerHandle, WorkerInfo
from actors.plan.costs.needs import NeedLine
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.places import Places
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import USABLE, Cascade, Item
from actors.planning.make_plan import make_plan
from actors.planning.memory import BARE_CONTEXT_GIB, CONTEXT_GIB, PEER_GIB, MemoryForecast
from actors.planning.room import GenerationRoom
from actors.run.communicators import Communicators
from actors.run.forming import cluster_of, seats_of
from actors.run.steps import StepRunner
from ops.geometry import Geometry
from ops.models.wan.config import WanConfig
from ops.update.node_routes import peers

GEOMETRY, DEVICE_GIB, BAG_PEERS, WORKERS = Geometry(), 79.2, 11, 8
SIZES = MemoryForecast(
    parameters=14_288_491_584,
    trained=14_288_491_584,
    parameter_bytes=2,
    state_bytes=16,
    vae_gib=0.5,
    places=Places("node", "host"),
)


class OutOfMemory(Exception):
    pass


class Gpus:
    """Eight 80 GB GPUs of each node: what a cascade finds, by the rules of the allocator and the price of a peer."""

    def __init__(self, workers: int) -> None:
        self.account = Communicators(BAG_PEERS)
        self.open: set[tuple[int, ...]] = set()
        self.met = peers([rank // 8 for rank in range(workers)])
        self.states = SIZES.states(workers).total

    def room_gib(self, rank: int) -> float:
        """As a worker measures it."""
        bags = sum(len(bag) - 1 for bag in self.open if rank in bag)
        return USABLE * (DEVICE_GIB - CONTEXT_GIB - PEER_GIB * (bags + self.met[rank])) - self.states

    def run(self, cascades: tuple[Cascade, ...], promised_gib: float) -> None:
        """One step; raises OutOfMemory where a cascade that takes all that its plan counted on would."""
        bags = [tuple(sorted(cascade.workers)) for cascade in cascades]
        step = self.account.step(bags)
        self.open.difference_update(step.closed)
        self.open.update(step.connected)
        for position, bag in enumerate(bags):
            if len(bag) > 1:
                self.open.add(bag)
            if promised_gib > min(map(self.room_gib, bag)):
                raise OutOfMemory(f"{promised_gib:.2f} of {min(map(self.room_gib, bag)):.2f} GiB")
            if position in step.left:
                self.open.remove(bag)


def profile_of() -> Profile:
    made = Profile.from_flops(
        WanConfig(num_layers=40, num_heads=40, head_dim=128), geometry=GEOMETRY, tflops=400.0, degrees=(1, 2, 4, 8)
    )
    for kind in ("solo", "bag"):  # of Wan2.1-14B
        made.needs.predicted["dit", kind] = NeedLine(fixed_gib=0.2, gib_per_unit=0.67 / 1024)
    return made


def items_of(source: random.Random, step: int) -> tuple[Item, ...]:
    shapes = [(81, 720, 1280), (65, 720, 1280), (49, 720, 1280), (33, 720, 1280), (81, 480, 832)]
    chosen = [source.choice(shapes) for _ in range(WORKERS)]
    return tuple(
        Item(id=f"s{step}.{n}", batch=source.randint(1, 2), frames=f, height=h, width=w, text_tokens=400)
        for n, (f, h, w) in enumerate(chosen)
    )


def need(cascade: Cascade, items: dict[str, Item], profile: Profile) -> float:
    samples = [Samples.of_item(items[part.item], part.count) for part in cascade.parts]
    return profile.needs.gib(profile.footprint(cascade.module, samples, cascade.degree)) or 0.0


def simulate(workers: int, steps: int, first: bool = True, later: bool = True) -> tuple[Gpus, float]:
    """A run of `steps` steps, and the share of the room that its largest cascade took. `first`: its first plans know
    what the generation takes; `later`: the others know what bags will take."""
    gpus, profile, source = Gpus(workers), profile_of(), random.Random(0)
    room = GenerationRoom(sizes=SIZES, degrees=(1, 2, 4, 8), bag_peers=BAG_PEERS)
    ready = USABLE * (DEVICE_GIB - BARE_CONTEXT_GIB) - SIZES.loaded_gib
    infos = [
        WorkerInfo(worker=f"w{rank}", node=f"n{rank // 8}", host="h", pid=1, device="cuda:0",
                   room_gib=ready, gradients="node", state_on_host=True)
        for rank in range(workers)
    ]  # fmt: skip
    world = seats_of(infos, lambda name: cast(WorkerHandle, None), room)
    bags_gib = room.bags_gib(workers) if later else 0.0
    runner: Any = SimpleNamespace(cluster=cluster_of(world), bags_gib=bags_gib)
    if not first:
        runner.cluster = replace(runner.cluster, room_gib=(ready,) * workers)
    fullest = 0.0
    for step in range(steps):
        items = items_of(source, step)
        plan = make_plan(
            [items],
            profile,
            runner.cluster,
            PlanOptions(budget_s=0.002, counted=True, bag_peers=BAG_PEERS),
            first_step=step,
        )
        check(plan, [items], profile, runner.cluster)
        by_id, cascades = {item.id: item for item in items}, plan.steps[0].cascades
        needs = [need(cascade, by_id, profile) for cascade in cascades]
        gpus.run(cascades, min(runner.cluster.room_gib))
        fullest = max(fullest, max(needs) / min(map(gpus.room_gib, range(workers))))
        done: Any = SimpleNamespace(
            running=SimpleNamespace(open_peers=tuple(gpus.account.peers(rank) for rank in range(workers))),
            reports=[SimpleNamespace(room_gib=gpus.room_gib(rank)) for rank in range(workers)],
        )
        left = StepRunner.count_on_room(runner, done)
        if later:
            assert max(left) - min(left) < 0.01, "peers that will come count as those that are there"
    return gpus, fullest


@pytest.mark.parametrize(("workers", "steps"), [(8, 8), (16, 3)])
def test_no_cascade_runs_out_of_memory_while_bags_connect(workers: int, steps: int) -> None:
    gpus, fullest = simulate(workers, steps)
    assert gpus.account.most_seen > 7, "bags of several sizes are open"
    assert fullest > 0.7, "plans use what there is"


@pytest.mark.parametrize("known", ["first", "later"])
def test_plans_that_count_on_what_is_measured_run_out_of_memory(known: str) -> None:
    with pytest.raises(OutOfMemory):
        simulate(8, 4, first=known == "first", later=known == "later")
