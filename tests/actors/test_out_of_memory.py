"""Plans stay below what workers have of memory, and a clip that fits nowhere is named. Real runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actors.plan.types import PlanError
from actors.records.events import MemoryRanOut
from actors.worker.worker import Worker
from app.bench.lab import Lab, LabRun

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 12
# Legal degrees 1, 2, 3; captions of one length, so that a cascade's rows follow from its shape and batch.
MODEL = {"dit": {"num_heads": 6}, "text": {"max_length": 64, "pad_to": 64}}


class AlwaysShortWorker(Worker):
    """Never has the memory for the DiT of one bucket."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if phase == "backward" and " 17f " in self.heartbeat.progress.activity:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=2)
        yield made


def out_of_memory(run: LabRun) -> list[MemoryRanOut]:
    return [event for event in run.events if isinstance(event, MemoryRanOut)]


def test_plans_stay_below_the_limit_of_a_worker(lab: Lab) -> None:
    """Less than the largest cascade of a run without a limit took: others are planned, and the training is the same."""
    model = {"dit": {"num_heads": 6, "ffn_dim": 4096}}  # wide enough to need more than the other modules
    free = lab.start(
        lab.config(
            "counted",
            model=model,
            train={"steps": STEPS},
            workers={"min": 2, "max": 2, "memory_gib": 8.0},
            planner={"degrees": [1]},  # so that smaller cascades than the largest exist
        )
    )
    assert free.join(600).code == 0 and not out_of_memory(free)
    most = max(span.need_gib or 0.0 for span in free.spans)
    room = free.metrics[-1].room_gib
    assert most > 0 and room is not None
    limit = 8.0 - room + 0.9 * most  # below two short clips, above one long one
    run = lab.start(
        lab.config("limited", model=model, train={"steps": STEPS}, workers={"min": 2, "max": 2, "memory_gib": limit})
    )
    assert run.join(600).code == 0
    assert run.steps() == list(range(STEPS)) and run.losses() == pytest.approx(free.losses(), rel=FP32)
    needs = [span.need_gib for span in run.spans if span.need_gib is not None]
    least = min(metrics.room_gib for metrics in run.metrics if metrics.room_gib is not None)
    assert len(needs) > STEPS and max(needs) <= least + 1e-3


def test_a_clip_that_fits_nowhere_ends_the_run_and_is_named(lab: Lab) -> None:
    run = lab.start(
        lab.config("never", model=MODEL, train={"steps": STEPS}, workers={"min": 2, "max": 2}), AlwaysShortWorker
    )
    with pytest.raises(PlanError, match=r"17f 64x96.*ran out of memory 3 times at degree 2"):
        run.join(600)
    lab.runs.remove(run)  # it has ended, and would say why once more
    assert [e for e in out_of_memory(run) if e.degree == 2]
