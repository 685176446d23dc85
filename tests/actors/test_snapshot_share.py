"""Snapshots of whole runs by default: every step where they cost little, else as often as they may. Real runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from actors.held_state import Snapshot
from actors.records.events import SnapshotsSpaced, StepsLost, WorkerDied
from actors.state.snapshot_interval import SHARE
from actors.worker.worker import Worker
from app.bench.lab import OPEN_END, Lab
from ops.update.shard_export import ShardExport

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
COPY_S = 0.15  # of a snapshot that is large
STEP_S = 3.0  # of a step that is long: a snapshot of the tiny model takes less than a fiftieth


class LargeStateWorker(Worker):
    """Copies its state for long."""

    def _handed_out(self, step: int, export: ShardExport) -> Snapshot:
        time.sleep(COPY_S)
        return super()._handed_out(step, export)


class SlowWorker(Worker):
    """Takes long for its update."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if phase == "update":
            time.sleep(STEP_S)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=2)
        made.add_node(workers=1)
        yield made


def test_snapshots_of_a_large_state_take_no_more_than_their_share_of_a_run(lab: Lab) -> None:
    run = lab.start(
        lab.config("large", train={"steps": 150}, workers={"min": 2, "max": 2}, snapshot={"every": "auto"}),
        LargeStateWorker,
    )
    assert run.join(600).code == 0
    spaced = [event for event in run.events if isinstance(event, SnapshotsSpaced)]
    assert spaced and spaced[0].every > 5 and "2% of the steps' time" in spaced[0].why
    since = next(metrics.step for metrics in run.metrics if metrics.time > spaced[0].time) + 1
    later = [metrics for metrics in run.metrics if metrics.step >= since]
    taken = [metrics for metrics in later if metrics.snapshot_s > COPY_S / 2]
    share = sum(metrics.snapshot_s for metrics in later) / sum(metrics.step_s for metrics in later)
    print(f"{len(taken)} snapshots in {len(later)} steps, {100 * share:.2f} % of their time")
    assert 0 < len(taken) <= len(later) / 5
    one_more = max(metrics.snapshot_s for metrics in later)  # the last interval may not be over
    assert share <= 1.5 * SHARE + one_more / sum(metrics.step_s for metrics in later)


def test_where_snapshots_cost_little_every_step_is_held_and_a_loss_costs_none(lab: Lab) -> None:
    train = {"steps": OPEN_END}
    run = lab.start(
        lab.config("slow", train=train, workers={"min": 1, "max": 2}, snapshot={"every": "auto"}), SlowWorker
    )
    run.wait_for_workers(2)
    run.wait_for_more_steps(6)
    run.signal_worker(0)
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(2)
    run.stop()
    assert not [event for event in run.events if isinstance(event, SnapshotsSpaced | StepsLost)]
    assert [event for event in run.events if isinstance(event, WorkerDied)]
    assert run.steps() == list(range(len(run.steps()))), "no step comes twice"
