"""A cascade that runs out of memory is a measurement: no step is lost, the losses are the same, it is avoided."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.plan.types import PlanError
from actors.records.events import GenerationEnded, MemoryRanOut, StepsLost, WorkerDied
from actors.worker.worker import Worker
from app.bench.lab import Lab, LabRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 12
# Legal degrees 1, 2, 3; captions of one length, so that a cascade's rows follow from its shape and batch.
MODEL = {"dit": {"num_heads": 6}, "text": {"max_length": 64, "pad_to": 64}}
FOLDER = "HEDDLE_OOM_FOLDER"
INJECTED = 8
PHASES = ("encode", "forward", "backward")


class ShortWorker(Worker):
    """Runs out of memory in cascades drawn at random, INJECTED times in all of a run, in each kind of cascade once: the
    smallest may not run out of it three times."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        folder = Path(os.environ[FOLDER])
        if phase in PHASES and np.random.default_rng().random() < 0.15 and len(list(folder.iterdir())) < INJECTED:
            kind = self.heartbeat.progress.activity.rpartition(" ")[0]
            try:
                (folder / kind.replace(" ", "-")).touch(exist_ok=False)
            except FileExistsError:
                return
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")


class AlwaysShortWorker(Worker):
    """Never has the memory for the DiT of one bucket."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if phase == "backward" and " 17f " in self.heartbeat.progress.activity:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("injected"))
    with Lab(folder) as made:
        made.add_node(workers=2)
        yield made


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> list[float]:
    """Losses of one worker that nobody disturbs."""
    run = lab.start(lab.config("undisturbed", model=MODEL, train={"steps": STEPS}, workers={"max": 1}))
    assert run.join().code == 0
    return run.losses()


def out_of_memory(run: LabRun) -> list[MemoryRanOut]:
    return [event for event in run.events if isinstance(event, MemoryRanOut)]


def assert_nothing_lost(run: LabRun, expected: list[float]) -> None:
    assert run.steps() == list(range(STEPS))
    assert run.losses() == pytest.approx(expected, rel=FP32)
    assert not [e for e in run.events if isinstance(e, StepsLost | WorkerDied)]
    ended = [e for e in run.events if isinstance(e, GenerationEnded) and not e.clean]
    assert 0 < len(ended) <= len(out_of_memory(run)), "nothing else has broken a generation"


def assert_avoided(run: LabRun, event: MemoryRanOut) -> None:
    """From then on nothing as large of that shape ran; one clip may be tried again at the highest degree, and where
    as much fits then, the limit is none."""
    found = re.fullmatch(r"(\w+) (\d+)f (\d+)x(\d+) b(\d+) sp(\d+) s\d+", event.cascade)
    assert found is not None, event
    frames, height, width, batch, degree = map(int, found.groups()[1:])
    for span in sorted((s for s in run.spans if s.start > event.time), key=lambda s: s.start):
        pixels = math.prod(span.bucket or ()) * span.batch
        if span.module == found[1] == "dit" and span.batch == 1 and pixels >= frames * height * width * batch:
            return
        same = (span.module, span.bucket, span.degree) == (found[1], (frames, height, width), degree)
        assert not (same and span.batch >= batch > 1), f"{span.name} after {event}"


def test_random_cascades_run_out_of_memory_and_the_training_is_the_same(lab: Lab, undisturbed: list[float]) -> None:
    run = lab.start(lab.config("short", model=MODEL, train={"steps": STEPS}, workers={"min": 2, "max": 2}), ShortWorker)
    assert run.join(600).code == 0
    # Two that come at once end one generation, which may be told by one of them.
    assert len(out_of_memory(run)) > 3, "more than max_breaks would allow"
    assert_nothing_lost(run, undisturbed)
    for event in out_of_memory(run):
        assert_avoided(run, event)


@pytest.mark.long
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


@pytest.mark.long
def test_a_clip_that_fits_nowhere_ends_the_run_and_is_named(lab: Lab) -> None:
    run = lab.start(
        lab.config("never", model=MODEL, train={"steps": STEPS}, workers={"min": 2, "max": 2}), AlwaysShortWorker
    )
    with pytest.raises(PlanError, match=r"17f 64x96.*ran out of memory 3 times at degree 2"):
        run.join(600)
    lab.runs.remove(run)  # it has ended, and would say why once more
    assert [e for e in out_of_memory(run) if e.degree == 2]
