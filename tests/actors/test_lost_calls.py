"""A call that did not run is noticed before its step is applied, on every worker and under any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.plan.types import Cascade, Item
from actors.run.dispatch import Holdings, calls_of, finish_of
from actors.worker.executor import Executor
from actors.worker.handoff import HandoffError
from ops.geometry import Geometry
from ops.update.engine import StepIncomplete
from ops.waiting import GroupError
from tests.actors.exactness import Host, items_of, make_hosts, one_worker, random_cascades, run_step, train_config
from tests.actors.fakes import step_items

ITEMS = [Item(id=f"s0.{n}", batch=2, frames=5, height=32, width=32, text_tokens=12) for n in range(2)]


def weights(executor: Executor) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in executor.modules.dit.parameters()]).clone()


def spread(items: list[Item]) -> list[Cascade]:
    """Encodes on worker 0, DiT cascades on worker 1: every result travels."""
    return [replace(c, workers=(1,)) if c.module == "dit" else c for c in one_worker(items)]


def assert_refused(hosts: list[Host], items: list[Item], plan: list[Cascade], lost: Cascade) -> None:
    """The worker that was to run it says so, which ends the others' wait for it; nobody has applied the step."""
    before = [weights(host.executor) for host in hosts]
    with pytest.raises((StepIncomplete, HandoffError, GroupError)):
        run_step(hosts, items, plan, lost=frozenset((worker, lost.id) for worker in lost.workers))
    assert any(isinstance(host.error, StepIncomplete | HandoffError) for host in hosts)
    for host, expected in zip(hosts, before, strict=True):
        assert host.error is not None and torch.equal(weights(host.executor), expected)


@pytest.mark.parametrize("module", ["text", "vae", "dit"])
def test_a_step_is_not_applied_by_anybody_when_one_call_did_not_run(module: str) -> None:
    hosts, plan = make_hosts(2, torch.float32, train_config()), spread(ITEMS)
    assert_refused(hosts, ITEMS, plan, next(c for c in plan if c.module == module))


def test_an_early_encode_that_did_not_run_is_noticed_at_the_end_of_the_step_that_should_have_run_it() -> None:
    hosts = make_hosts(1, torch.float32, train_config())
    early = [replace(c, step=1) for c in one_worker([replace(ITEMS[0], id="s1.0")]) if c.module == "vae"]
    geometry = hosts[0].executor.modules.geometry
    steps = {s: step_items(s, [(f"s{s}.0", (5, 32, 32), ["a", "b"])], geometry, "sample") for s in (0, 1)}
    calls = calls_of([*one_worker(ITEMS[:1]), *early], steps, 1, 0, Holdings())
    finish = finish_of(0, calls, 1, 0, export=False)
    assert early[0].id in finish.cascades and finish.weight == pytest.approx(1)
    run_step(hosts, ITEMS[:1], one_worker(ITEMS[:1]), finish=False)
    with pytest.raises(StepIncomplete, match=early[0].id):
        hosts[0].executor.finish(finish)


@pytest.mark.parametrize("seed", range(8))
def test_the_loss_of_any_one_call_of_any_plan_ends_the_step_on_all_workers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items, hosts = items_of(rng, 3), make_hosts(2, torch.float32, train_config())
    plan = random_cascades(rng, items, 2)
    assert_refused(hosts, items, plan, plan[int(rng.integers(len(plan)))])


@pytest.mark.parametrize("seed", range(10))
def test_what_the_workers_must_have_run_is_the_whole_step_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items = items_of(rng, 3)
    shapes = [(i.id, (i.frames, i.height, i.width), ["k"] * i.batch) for i in items]
    plan = random_cascades(rng, items, 4)
    samples = step_items(0, shapes, Geometry(vae_stride=(4, 8, 8)), "token")
    calls = calls_of(plan, {0: samples}, 1, 0, Holdings())
    finishes = [finish_of(rank, calls, 1, 0, export=False) for rank in range(4)]
    assert sum(finish.weight for finish in finishes) == pytest.approx(1, rel=1e-12)
    named = sorted((rank, cascade) for rank, finish in enumerate(finishes) for cascade in finish.cascades)
    assert named == sorted((worker, c.id) for c in plan for worker in c.workers)
