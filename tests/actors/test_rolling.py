"""Step after step as the runner does it: every DiT cascade finds the encode results it needs, early ones included."""

from __future__ import annotations

import numpy as np
import pytest

from actors.dispatch import Holdings, StepSamples, calls_of
from actors.plan.check import check
from actors.plan.planner import PlanOptions, make_plan, rolling_cut
from actors.plan.profile import Profile
from actors.plan.types import Cluster, Done, Item
from ops.config import DiTConfig, TextConfig, VAEConfig
from ops.geometry import Geometry

GEOMETRY = Geometry()
SHAPES = ((1, 64, 96), (5, 64, 64), (17, 64, 96), (33, 64, 96))


def items_of(step: int, seed: int) -> list[Item]:
    rng = np.random.default_rng([step, seed])
    return [
        Item(
            id=f"s{step}.{n}",
            batch=int(rng.integers(1, 9)),
            text_tokens=30,
            **dict(zip(("frames", "height", "width"), SHAPES[rng.integers(0, 4)], strict=True)),
        )
        for n in range(6)
    ]


@pytest.mark.parametrize("strategy", ["cascade", "longest_first", "static", "knapsack"])
@pytest.mark.parametrize("nodes", [(2,), (3,), (2, 2)])
def test_forty_rolling_steps_never_miss_an_encode_result(strategy: str, nodes: tuple[int, ...]) -> None:
    profile = Profile.from_flops(DiTConfig(), VAEConfig(), TextConfig(), GEOMETRY)
    options = PlanOptions(strategy=strategy, budget_s=0.01)
    holdings, done, early = Holdings(), [], 0
    for step in range(40):
        window = [items_of(step, len(nodes)), items_of(step + 1, len(nodes))]
        plan = make_plan(window, profile, Cluster(nodes=nodes), options, first_step=step, done=done)
        check(plan, window, profile, Cluster(nodes=nodes), done=done)
        cascades = rolling_cut(plan)
        samples = {
            s: StepSamples.of(
                s,
                [(i.id, (i.frames, i.height, i.width), [f"{s}/{i.id}/{n}" for n in range(i.batch)]) for i in items],
                GEOMETRY,
                "sample",
            )
            for s, items in zip((step, step + 1), window, strict=True)
        }
        calls = calls_of(cascades, samples, 1, step, holdings)
        trained = sorted(
            s.id for c in {c.task.cascade: c for c in calls if c.task.module == "dit"}.values() for s in c.task.samples
        )
        assert trained == sorted(s.id for of in samples[step].samples.values() for s in of)
        ahead = [c for c in cascades if c.step > step]
        early += len(ahead)
        done = [Done(item=p.item, module=c.module, workers=c.workers) for c in ahead for p in c.parts]
        holdings.drop_before(step + 1)
    assert early > 0 or strategy != "cascade", "the cascade strategy never used a gap"
