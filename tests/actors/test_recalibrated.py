"""A run whose batch sizes follow what it measures: any number of workers and any resume train the same batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from actors.records.events import BatchesResized
from app.bench.lab import Lab, LabRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 24


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=2)
        yield made


def start(lab: Lab, name: str, workers: int, recalibrate: str) -> LabRun:
    """A target that the FLOP model thinks is easy and no cascade of this machine meets."""
    batch = {"target_s": 0.02, "recalibrate": recalibrate, "recalibrate_steps": 4}
    return lab.start(
        lab.config(
            name,
            data={"batch": batch},
            train={"steps": STEPS},
            workers={"min": workers, "max": workers},
            checkpoint={"every": 4, "keep_last": 5},
        )
    )


def sizes_at(run: LabRun, step: int) -> list[tuple[tuple[int, int, int], int]]:
    """Buckets and samples of the DiT cascades of a step, each bag once."""
    held = {s.cascade: s for s in run.spans if s.step == step and s.module == "dit"}
    by_item: dict[str, tuple[tuple[int, int, int], int]] = {}
    for span in held.values():
        for piece in span.pieces:
            _, before = by_item.get(piece.item, (piece.bucket, 0))
            by_item[piece.item] = piece.bucket, before + piece.batch
    return sorted(by_item.values())


def test_decided_sizes_are_the_same_for_any_number_of_workers_and_any_resume(lab: Lab) -> None:
    first = start(lab, "first", 2, "on")
    first.join()
    decided = [event for event in first.events if isinstance(event, BatchesResized)]
    assert decided and decided[0].applied
    at = decided[0].from_step
    kept = first.run_dir / "batches.json"
    assert json.loads(kept.read_text())[0]["from"] == at < STEPS
    assert max(batch for _, batch in sizes_at(first, 0)) > max(batch for _, batch in sizes_at(first, STEPS - 1)) == 1
    alone = lab.folder / "runs" / "alone"
    alone.mkdir(parents=True)
    shutil.copy(kept, alone)
    other = start(lab, "alone", 1, "off")
    other.join()
    assert other.losses() == pytest.approx(first.losses(), rel=1e-4)
    for step in range(STEPS):
        assert sizes_at(other, step) == sizes_at(first, step), step
    resumed = lab.folder / "runs" / "resumed"
    shutil.copytree(first.run_dir, resumed)
    for folder in resumed.glob("checkpoints/*"):
        if folder.is_dir() and int(folder.name.removeprefix("step-")) > at:
            shutil.rmtree(folder)
    again = start(lab, "resumed", 1, "on")
    again.join()
    begun = again.steps()[0]
    assert 0 < begun < STEPS, "it goes on from a checkpoint"
    assert again.losses() == pytest.approx(first.losses()[begun:], rel=1e-4)
    before, after = (json.loads((folder / "batches.json").read_text()) for folder in (first.run_dir, resumed))
    assert after[: len(before)] == before, "nothing is decided again; a busy machine may decide on later steps"
