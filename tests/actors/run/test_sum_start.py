"""Where a worker starts its gradient sum: as early as it adds nothing more, and after its last bag of the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.messages import SumStart
from actors.plan.types import Cascade, Item, Part
from actors.run.dispatch import Holdings, calls_of, finish_of
from ops.geometry import Geometry
from tests.actors.exactness import execute, items_of, make_hosts, on_all, one_worker, random_cascades, train_config
from tests.actors.fakes import step_items

SHAPE = (1, 32, 32)
NEVER, BEFORE, DURING, AFTER = SumStart


def cascade(name: str, module: str, workers: tuple[int, ...], start: float, step: int = 0) -> Cascade:
    part = Part(item=f"{name[0]}{step}", first=0, count=1)
    return Cascade(id=name, module=module, step=step, parts=(part,), degree=len(workers), workers=workers,
                   start_s=start, end_s=start + 1)  # fmt: skip


def starts(*cascades: Cascade) -> dict[int, list[SumStart]]:
    """Per worker, what each of its calls says."""
    geometry = Geometry(vae_stride=(4, 8, 8))
    steps = {s: step_items(s, [(f"{n}{s}", SHAPE, ["k"]) for n in "abc"], geometry, "sample") for s in (0, 1)}
    found: dict[int, list[SumStart]] = {}
    for call in calls_of(cascades, steps, 1, 0, Holdings()):
        found.setdefault(call.rank, []).append(call.task.start_sum)
    return found


def encodes(name: str, worker: int) -> list[Cascade]:
    return [cascade(f"{name}/text", "text", (worker,), 0), cascade(f"{name}/vae", "vae", (worker,), 1)]


def test_the_last_dit_cascade_of_one_worker_starts_it_inside_its_backward() -> None:
    plan = [*encodes("a", 0), *encodes("b", 0), cascade("a", "dit", (0,), 2), cascade("b", "dit", (0,), 3)]
    assert starts(*plan)[0] == [NEVER, NEVER, NEVER, NEVER, NEVER, DURING]


def test_encodes_of_the_next_step_run_behind_the_start() -> None:
    assert starts(*encodes("a", 0), cascade("a", "dit", (0,), 2), cascade("b", "vae", (0,), 3, step=1))[0] == [
        NEVER, NEVER, DURING, NEVER,
    ]  # fmt: skip


def test_an_encode_that_another_worker_waits_for_holds_it_back() -> None:
    """On a GPU it would share its multiprocessors with a sum that cannot end before it."""
    later = [cascade("b/text", "text", (0,), 3), cascade("b/vae", "vae", (0,), 4), cascade("c", "vae", (0,), 5, step=1)]
    found = starts(*encodes("a", 0), cascade("a", "dit", (0,), 2), *later, cascade("b", "dit", (1,), 6))
    assert found == {0: [NEVER, NEVER, NEVER, NEVER, AFTER, NEVER], 1: [DURING]}


def test_a_bag_starts_it_behind_its_last_collective() -> None:
    found = starts(*encodes("a", 0), cascade("a", "dit", (0, 1), 2), cascade("b", "vae", (0,), 3, step=1))
    assert found == {0: [NEVER, NEVER, AFTER, NEVER], 1: [AFTER]}


def test_an_encode_bag_behind_the_last_dit_cascade_holds_it_back() -> None:
    other = [*encodes("c", 2), cascade("c", "dit", (2,), 4)]
    found = starts(*encodes("a", 0), cascade("a", "dit", (0,), 2), cascade("b", "vae", (0, 1), 3, step=1), *other)
    assert found == {0: [NEVER, NEVER, NEVER, AFTER], 1: [AFTER], 2: [NEVER, NEVER, DURING]}


def test_an_encode_bag_that_outlasts_the_step_holds_nothing_back() -> None:
    found = starts(*encodes("a", 0), cascade("a", "dit", (0,), 2), cascade("b", "vae", (0, 1), 2.5, step=1))
    assert found == {0: [NEVER, NEVER, DURING, NEVER], 1: [NEVER]}


def test_a_worker_without_gradient_starts_before_its_first_encode() -> None:
    found = starts(*encodes("a", 0), *encodes("b", 1), cascade("a", "dit", (0,), 2), cascade("b", "dit", (0,), 3))
    assert found[1] == [BEFORE, NEVER]


@pytest.mark.parametrize("seed", range(20))
def test_no_worker_joins_a_bag_or_adds_gradient_behind_its_start(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = items_of(rng, 3)
    shapes = [(i.id, (i.frames, i.height, i.width), ["k"] * i.batch) for i in items]
    samples = step_items(0, shapes, Geometry(vae_stride=(4, 8, 8)), "sample")
    calls = calls_of(random_cascades(rng, items, 4), {0: samples}, 1, 0, Holdings())
    for rank in {call.rank for call in calls}:
        mine = [call.task for call in calls if call.rank == rank]
        (at,) = [i for i, task in enumerate(mine) if task.start_sum != NEVER]
        after = mine[at:] if mine[at].start_sum == BEFORE else mine[at + 1 :]
        assert all(len(task.bag) == 1 and task.module != "dit" for task in after)
        assert mine[at].start_sum != DURING or len(mine[at].bag) == 1


def test_executors_start_as_they_are_told_and_finish_with_one_result() -> None:
    """Worker 0 in its backward, worker 1 before its encodes: all buckets are under way before the end of the step."""
    hosts = make_hosts(3, torch.float32, train_config())
    items = [Item(id="s0.0", batch=1, frames=5, height=32, width=32, text_tokens=12)]
    shapes = [(i.id, (i.frames, i.height, i.width), ["k"] * i.batch) for i in items]
    samples = step_items(0, shapes, hosts[0].executor.modules.geometry, "sample")
    text, vae, dit = one_worker(items)
    early = [cascade("b", "vae", (1,), 0, step=1)]
    steps = {0: samples, 1: step_items(1, [("b1", SHAPE, ["k"])], hosts[0].executor.modules.geometry, "sample")}
    calls = calls_of([text, vae, dit, *early], steps, 1, 0, Holdings())
    started: dict[int, int] = {}

    def run(rank: int) -> None:
        executor = hosts[rank].executor
        for call in [c for c in calls if c.rank == rank]:
            execute(hosts[rank].encoding, call, {}, frozenset())
        started[rank] = executor.sync.gradients.started
        executor.finish(finish_of(rank, calls, 1, 0, export=False))
        assert executor.sync.gradients.started == 0

    on_all(hosts, run)
    assert started[0] == started[1] > 2 and started[2] == 0
