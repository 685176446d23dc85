"""A run whose encodes outlast their steps: updates run beside them, and every step is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.feed.step_source import actor_factory
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Item
from app.bench.lab import Lab
from app.bench.runtime import TimedWorker, WorkloadFeeder

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 8
SHAPES = {"long": (33, 64, 64), "short": (5, 64, 64)}
SECONDS = {"text": (0.02, 0.02), "vae": (1.4, 0.1), "dit": (2.0, 0.5)}  # of a long and of a short clip, at degree 1


def profile() -> dict[str, object]:
    """A profile of machines on which the VAE of a long clip, begun beside the DiT of the step before, ends after it."""
    points = [
        {"module": module, "batch": 1, "frames": f, "height": h, "width": w, "degree": 1, "seconds": seconds}
        for module, both in SECONDS.items()
        for (f, h, w), seconds in zip(SHAPES.values(), both, strict=True)
    ]
    return {"model": "m", "device": "d", "degrees": {m: [1] for m in SECONDS}, "extrapolate": False, "latency": points}


def test_updates_run_beside_encodes_that_outlast_their_step(tmp_path: Path) -> None:
    items = [
        [
            Item(id=f"s{step}.{name}", batch=1, frames=shape[0], height=shape[1], width=shape[2], text_tokens=8)
            for name, shape in SHAPES.items()
        ]
        for step in range(STEPS)
    ]
    with Lab(tmp_path) as lab:
        lab.add_node(workers=2)
        config = lab.config(
            "outlasting",
            train={"steps": STEPS},
            workers={"min": 2, "max": 2},
            snapshot={"enabled": False},
            planner={"budget_s": 0.05, "lookahead": 1, "split": False},
        )
        run = lab.start(
            config,
            profile=read_profile(profile()),
            worker_class=TimedWorker,
            feeder=actor_factory(WorkloadFeeder, items),
        )
        outcome = run.join(600)
        assert outcome.code == 0, outcome.reason
        assert [metrics.step for metrics in run.metrics] == list(range(STEPS))
        spans = run.spans
    ends = {(s.worker, s.step): s for s in spans if s.module == "finish"}
    beside = [
        s
        for s in spans
        if s.module == "vae"
        and (e := ends.get((s.worker, s.step - 1))) is not None
        and s.start < e.start
        and s.end > e.end
    ]
    assert beside, "no update has run beside an encode of the next step"
