"""Executors in threads as workers of a generation, without Ray: what the exactness tests run their plans on."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from actors.config import TrainConfig
from actors.messages import SumStart
from actors.plan.places import StatePlace
from actors.plan.types import Cascade, Item, Part
from actors.run.communicators import Communicators
from actors.run.dispatch import Call, Holdings, calls_of, finish_of
from actors.worker.encoding import Encoded, Encoding, nobody
from actors.worker.executor import Executor
from actors.worker.loading import Modules
from actors.worker.work_done import FinishedStep
from ops.comm.groups import Groups
from ops.config import FlowConfig, OptimizerConfig
from ops.models.config import ModelConfig
from ops.models.experts import parts_of
from ops.models.folders import resolve
from ops.models.load import build_dit, build_image, build_text, build_vae
from ops.shards import ShardState
from ops.update.gradient_places import GradientMemory, GradientsOf
from ops.update.parameter_places import ParametersOf
from ops.update.parameters import ParameterMemory
from ops.update.sync import FlatSync
from ops.waiting import CancelToken
from tests.actors.fakes import step_items
from tests.families.kit import MODEL
from tests.ops.placed import placed

SUM_ELEMENTS = 4000  # the model's gradient is summed in several buckets
HANGS_S = 120.0  # what waits for longer waits for ever, also on a busy machine
CAPTIONS = ("a red circle moves right", "", "two blue squares drift slowly upwards", "a dot")


@dataclass
class Host:
    """One executor, its encodes, and what came of it."""

    executor: Executor
    encoding: Encoding
    error: BaseException | None = None
    done: FinishedStep | None = None  # of the last step


def train_config(**changes: object) -> TrainConfig:
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1.0, ema_decay=0.9)
    return TrainConfig(**{"steps": 100, "seed": 3, "optimizer": optimizer, "flow": FlowConfig(), **changes})


_MADE: list[Host] = []


def close_hosts() -> None:
    """Give back the connections of every executor made since the last call."""
    while _MADE:
        _MADE.pop().executor.leave()


def make_hosts(
    world: int,
    dtype: torch.dtype,
    train: TrainConfig,
    generation: int = 1,
    config: ModelConfig = MODEL,
    nodes: Sequence[int] | None = None,
    shards: Sequence[ShardState] | None = None,
    gradients: GradientMemory | GradientsOf = "own",
    parameters: ParameterMemory | ParametersOf = "replicated",
    executor: type[Executor] = Executor,
    on_encoded: Encoded = nobody,
    **hooks: Any,
) -> list[Host]:
    """Executors that have formed one generation; `hooks` go to each of them. `nodes` are the nodes of each of them,
    in whose memory they may add their `gradients` and have their `parameters`. Optimizer state lies where the settings
    say. With `shards` they go on from that state."""
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANGS_S)
    )
    model, geometry = resolve(config)
    hosts = []
    state: StatePlace = "host" if train.memory.state == "host" else "device"
    for _ in range(world):
        dit = build_dit(model.dit, train.seed).to(dtype)
        # A DiT starts with zero gates; random ones let every parameter receive a gradient.
        torch.manual_seed(0)
        for parameter in dit.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        text: Any = build_text(model.text, "cpu")
        if model.text.sees_picture and dtype == torch.float64:
            text.encoder.double()  # a prompt as long as a picture is rounded otherwise in another batch
        modules = Modules(
            config=model,
            geometry=geometry,
            dit=dit,
            vae=build_vae(model.vae, "cpu"),
            text=text,
            image=build_image(model.image, "cpu"),
        )
        sync = FlatSync(
            dit,
            train.optimizer,
            train.steps,
            places=placed(gradients=gradients, parameters=parameters, state=state, sum_elements=SUM_ELEMENTS),
            parts=parts_of(dit),
        )
        made = executor(modules, sync, train, torch.device("cpu"), **hooks)
        hosts.append(Host(made, Encoding(made, on_encoded)))
    everyone = tuple(range(world))

    def form(rank: int) -> None:
        groups = Groups(store, rank, everyone, "gloo", generation, HANGS_S, CancelToken(), "127.0.0.1", nodes)
        hosts[rank].executor.form(generation, groups, shards)

    on_all(hosts, form)
    _MADE.extend(hosts)
    return hosts


def on_all(hosts: Sequence[Host], run: Callable[[int], None]) -> None:
    """Run on every host in a thread of its own; raise the first error."""

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            hosts[rank].error = error
            for host in hosts:  # a failed peer must not leave the others waiting
                if host.executor.groups is not None:
                    host.executor.groups.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS_S + 30)
        assert not thread.is_alive(), f"a worker hangs:\n{''.join(stack_of(thread))}"
    errors = [host.error for host in hosts if host.error is not None]
    if errors:
        raise errors[0]


def stack_of(thread: threading.Thread) -> list[str]:
    """Where a thread stands."""
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.format_stack(frame) if frame is not None else ["it has ended meanwhile"]


def items_of(rng: np.random.Generator, count: int, step: int = 0, images: bool = False) -> list[Item]:
    shapes = [(1, 32, 32), (5, 32, 48), (5, 48, 32), (9, 32, 32)]
    if images:
        shapes = [(1, 32, 32), (1, 48, 64), (1, 64, 48)]
    chosen = rng.integers(0, len(shapes), count)
    return [
        Item(
            id=f"s{step}.{i}",
            batch=int(rng.integers(1, 4)),
            frames=shapes[c][0],
            height=shapes[c][1],
            width=shapes[c][2],
            text_tokens=12,
        )
        for i, c in enumerate(chosen)
    ]


def run_step(
    hosts: Sequence[Host],
    items: Sequence[Item],
    cascades: Sequence[Cascade],
    step: int = 0,
    *,
    finish: bool = True,
    bad: frozenset[tuple[str, int]] = frozenset(),
    lost: frozenset[tuple[int, str]] = frozenset(),
    loss_weight: str = "sample",
    generation: int = 1,
    account: Communicators | None = None,
    frame_rate: float = 0.0,
    loss_weights: Callable[[str], float] = lambda key: 1.0,
) -> float:
    """Execute one planned step as the controller and the workers would. Returns the loss after `finish`.

    `bad` are clips (item, index) that did not decode; `lost` are calls (rank, cascade) that never reach their worker,
    nor do those that wait for their results. `account` closes and opens bags as the controller does.
    """
    geometry = hosts[0].executor.modules.geometry
    samples = step_items(
        step,
        [(i.id, (i.frames, i.height, i.width), [f"0/0/{i.id}/{n}" for n in range(i.batch)]) for i in items],
        geometry,
        loss_weight,
        {i.id: i.expert for i in items},
        frame_rate,
        loss_weights,
    )
    bags = (account or Communicators(0)).step([tuple(sorted(cascade.workers)) for cascade in cascades])
    on_all(hosts, lambda rank: [hosts[rank].executor.leave_bag(bag) for bag in bags.closed if rank in bag] and None)
    calls = calls_of(cascades, {step: samples}, generation, step, Holdings(), bags.left)
    if not finish:  # the caller looks at partial gradients, or runs more cascades before the end
        calls = [replace(call, task=replace(call.task, start_sum=SumStart.NEVER)) for call in calls]
    published: dict[str, list] = {}
    ready = {call.task.cascade: threading.Event() for call in calls}
    losses: dict[int, float] = {}
    gone: set[str] = set()

    def run(rank: int) -> None:
        executor = hosts[rank].executor
        for call in [c for c in calls if c.rank == rank]:
            if (rank, call.task.cascade) in lost:
                gone.add(call.task.cascade)
                ready[call.task.cascade].set()
                continue
            for needed in call.needs:
                assert ready[needed].wait(timeout=HANGS_S), f"{needed} was never published"
            if gone & set(call.needs):
                continue
            results = execute(hosts[rank].encoding, call, published, bad)
            if call.task.publish:
                published[call.task.cascade] = results or []
                ready[call.task.cascade].set()
        if finish:
            done = executor.finish(finish_of(rank, calls, generation, step, export=False))
            hosts[rank].done, losses[rank] = done, done.result.loss
            assert done.result.weight + done.result.bad_weight == pytest.approx(1), "the step is not whole"
            assert (done.result.bad_weight == 0) == (not bad)

    on_all(hosts, run)
    assert len(set(losses.values())) <= 1, "all workers must report the same loss"
    return next(iter(losses.values()), float("nan"))


def execute(encoding: Encoding, call: Call, published: dict[str, list], bad: frozenset[tuple[str, int]]) -> list | None:
    task, executor = call.task, encoding.executor
    if task.module in ("text", "vae"):
        buckets = {piece.item: piece.bucket for piece in task.pieces}
        clips = [
            np.random.default_rng(list(s.key.encode())).integers(0, 256, (*buckets[s.item], 3), dtype=np.uint8)
            for s in task.samples
        ]
        ok = [(s.item, s.index) not in bad for s in task.samples]
    if task.module == "text":
        seen = clips if executor.modules.config.text.sees_picture else []
        captions = [CAPTIONS[(len(s.key) + s.index) % len(CAPTIONS)] for s in task.samples]
        return encoding.text(task, captions, [clip[0] for clip in seen], ok if seen else [])
    if task.module == "vae":
        return encoding.vae(task, np.stack(clips), ok)
    fetched = {("text" if "/text/" in needed else "vae", e.id): e for needed in call.needs for e in published[needed]}
    executor.dit(task, fetched)
    return None


def random_cascades(rng: np.random.Generator, items: Sequence[Item], world: int, step: int = 0) -> list[Cascade]:
    """A random legal plan: any split, any degree up to 4, any workers, any order that respects needs."""
    plan: list[Cascade] = []
    clock = 0.0
    pieces = [Part(item=i.id, first=a, count=b - a) for i in items for a, b in _cuts(rng, i.batch)]
    rng.shuffle(pieces)
    groups = []
    while pieces:
        take = int(rng.integers(1, 3)) if rng.random() < 0.4 else 1
        groups.append([pieces.pop() for _ in range(min(take, len(pieces)))])
    for number, parts in enumerate(groups):
        for part in parts:
            for module in ("text", "vae"):
                degree = int(rng.choice([d for d in (1, 2, 3, 4) if d <= world]))
                workers = tuple(int(w) for w in rng.choice(world, degree, replace=False))
                plan.append(
                    Cascade(
                        id=f"{part.item}/{module}/{number}/{part.first}",
                        module=module,
                        step=step,
                        parts=(part,),
                        degree=degree,
                        workers=workers,
                        start_s=clock,
                        end_s=clock + 1,
                    )
                )
                clock += 1
        degree = int(rng.choice([d for d in (1, 2, 3, 4) if d <= world]))
        workers = tuple(int(w) for w in rng.choice(world, degree, replace=False))
        plan.append(
            Cascade(
                id=f"d/dit/{number}",
                module="dit",
                step=step,
                parts=tuple(parts),
                degree=degree,
                workers=workers,
                start_s=clock,
                end_s=clock + 1,
            )
        )
        clock += 1
    return plan


def _cuts(rng: np.random.Generator, batch: int) -> list[tuple[int, int]]:
    if batch == 1 or rng.random() < 0.5:
        return [(0, batch)]
    at = int(rng.integers(1, batch))
    return [(0, at), (at, batch)]


def one_worker(items: Sequence[Item], step: int = 0) -> list[Cascade]:
    """The reference: every item whole, one after the other, on worker 0."""
    plan, clock = [], 0.0
    for item in items:
        for module in ("text", "vae", "dit"):
            plan.append(
                Cascade(
                    id=f"{item.id}/{module}/0",
                    module=module,
                    step=step,
                    parts=(Part(item=item.id, first=0, count=item.batch),),
                    degree=1,
                    workers=(0,),
                    start_s=clock,
                    end_s=clock + 1,
                )
            )
            clock += 1
    return plan
