"""Batch sizes follow what a run measures, and what was decided is never decided again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.outcome import Events
from actors.plan.costs.profile import Profile
from actors.planning.batching import best_sizes
from actors.records.events import BatchesResized
from actors.run.recalibrate import Recalibration, StageSizes, stages_of
from app.inputs.batches import with_limits
from app.settings.config import RunConfig
from app.settings.sections import RunSection
from data.config import BatchConfig, BucketsConfig, DataConfig, SegmentConfig
from data.errors import DataError
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.folders import resolve

IMAGE, CLIP = Bucket(1, 64, 96), Bucket(17, 64, 96)


class Answer:
    """The answer of a planner that takes its time."""

    def __init__(self, best: dict[Bucket, int] | None, late: int) -> None:
        self._best, self._late = best, late

    @property
    def there(self) -> bool:
        self._late -= 1
        return self._late < 0

    def sizes(self) -> dict[Bucket, int] | None:
        return self._best


class Asked:
    """A planner and a source: what they are asked and told."""

    def __init__(self, best: dict[Bucket, int] | None, late: int = 0) -> None:
        self.best, self.late, self.questions = best, late, 0
        self.resized: list[Any] = []
        self.next_unasked = 0
        self.events: list[BatchesResized] = []

    def ask_sizes(self, buckets: Any, limits: Any, room_gib: float) -> Any:
        self.questions += 1
        return Answer(self.best, self.late)

    def resize(self, record: Any) -> None:
        self.resized.append(record)

    def on_event(self, event: Any) -> None:
        self.events.append(event)


def loop(asked: Any, folder: Path, mode: str = "on", until_step: int = 0) -> Recalibration:
    limits = BatchConfig(target_s=1.0, recalibrate=mode, recalibrate_steps=10)  # type: ignore[arg-type]
    stages = [StageSizes(until_step, limits, {IMAGE: 20, CLIP: 4}, (IMAGE, CLIP))]
    if until_step:
        stages.append(StageSizes(0, BatchConfig(), {IMAGE: 8}, (IMAGE,)))
    return Recalibration.of(folder, stages, asked, asked, Events(asked))


def steps(found: Recalibration, asked: Any, last: int) -> None:
    for step in range(last):
        asked.next_unasked = step + 3  # the feeder is asked ahead
        found.collected(step)


def test_sizes_change_once_at_a_boundary_when_measured_costs_have_moved_them(tmp_path: Path) -> None:
    asked = Asked({IMAGE: 22, CLIP: 6}, late=2)
    steps(loop(asked, tmp_path), asked, 40)
    (decision,) = asked.resized
    assert decision == {"from": 15, "sizes": {"1x64x96": 22, "17x64x96": 6}}  # asked at 9, answered at 12
    (event,) = asked.events
    assert event.applied and event.sizes == {"17x64x96": (4, 6)}, "10 % more images are no reason"
    assert "from step 15 on: 17x64x96 4 -> 6" in event.describe()
    assert json.loads((tmp_path / "batches.json").read_text()) == [decision]
    assert asked.questions == 4  # at 9, 19, 29, 39


def test_a_decision_that_a_full_disk_does_not_keep_is_made_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked({IMAGE: 20, CLIP: 6})
    found = loop(asked, tmp_path)

    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("actors.feed.decisions.write_whole", full)
        steps(found, asked, 12)
    assert asked.questions == 1 and asked.resized == [] == asked.events
    for step in range(12, 25):
        asked.next_unasked = step + 3
        found.collected(step)
    assert [one["from"] for one in asked.resized] == [23] and len(asked.events) == 1


def test_a_resume_follows_what_was_decided_and_asks_again_only_for_later_steps(tmp_path: Path) -> None:
    first = Asked({IMAGE: 20, CLIP: 6})
    steps(loop(first, tmp_path), first, 20)
    second = Asked({IMAGE: 20, CLIP: 6})
    resumed = loop(second, tmp_path)
    assert second.resized == first.resized, "the feeder knows them before it is opened"
    steps(resumed, second, 20)
    assert second.events == [], "nothing has moved since"


@pytest.mark.parametrize(("mode", "applied"), [("suggest", 0), ("off", 0)])
def test_only_on_changes_anything(mode: str, applied: int, tmp_path: Path) -> None:
    asked = Asked({IMAGE: 40, CLIP: 8})
    steps(loop(asked, tmp_path, mode), asked, 40)
    assert len(asked.resized) == applied and not (tmp_path / "batches.json").exists()
    assert [event.applied for event in asked.events] == ([False] if mode == "suggest" else [])


def test_an_answer_that_never_comes_or_says_nothing_changes_nothing(tmp_path: Path) -> None:
    for asked in (Asked({IMAGE: 40, CLIP: 8}, late=10**9), Asked(None)):
        steps(loop(asked, tmp_path), asked, 40)
        assert asked.resized == []


def test_a_decision_does_not_reach_into_the_next_segment(tmp_path: Path) -> None:
    asked = Asked({IMAGE: 40, CLIP: 8})
    steps(loop(asked, tmp_path, until_step=12), asked, 40)
    assert asked.resized == [], "step 13 would be the first of its sizes, in a segment with sizes of its own"


def test_an_answer_to_a_question_of_one_segment_decides_nothing_in_the_next(tmp_path: Path) -> None:
    asked = Asked({IMAGE: 40, CLIP: 8}, late=4)  # asked at 9, answered at 14
    first, second = (BatchConfig(target_s=s, recalibrate="on", recalibrate_steps=r) for s, r in ((1.0, 10), (0.2, 99)))
    stages = [StageSizes(12, first, {IMAGE: 20, CLIP: 4}, (IMAGE, CLIP)), StageSizes(0, second, {IMAGE: 8}, (IMAGE,))]
    steps(Recalibration.of(tmp_path, stages, asked, asked, Events(asked)), asked, 40)  # type: ignore[arg-type]
    assert asked.resized == [], "40 images are for another target"


def test_steps_that_are_computed_again_have_the_sizes_that_they_had(tmp_path: Path) -> None:
    """From an old checkpoint, or after a feeder has begun again at the last committed step: a decision for an earlier
    step would form other batches than the run had, one for the same step others than the feeder knows."""
    decided = {"from": 15, "sizes": {"1x64x96": 20, "17x64x96": 6}}
    for begun_at in range(2, 14):  # a decision would come for the steps 5 to 16
        folder = tmp_path / str(begun_at)
        folder.mkdir()
        (folder / "batches.json").write_text(json.dumps([decided]))
        asked = Asked({IMAGE: 40, CLIP: 8})
        found = loop(asked, folder)
        for step in (9, begun_at):
            asked.next_unasked = begun_at + 3
            found.collected(step)
        told = [one["from"] for one in asked.resized]
        assert told == [15] if begun_at + 3 <= 15 else told == [15, begun_at + 3]


@pytest.mark.parametrize("sizes", [{"17x64x96": 0}, {"17 by 64": 2}, {"17x64x96": "many"}])
def test_a_decision_that_cannot_hold_ends_the_start(sizes: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "batches.json").write_text(json.dumps([{"from": 3, "sizes": sizes}]))
    with pytest.raises(DataError, match="which batches this run forms"):
        loop(Asked(None), tmp_path)


def test_decisions_that_cannot_be_read_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "batches.json").write_text('[{"from": 3')
    with pytest.raises(DataError, match="which batches this run forms"):
        loop(Asked(None), tmp_path)


def test_the_stages_are_sized_as_the_data_set_sizes_them() -> None:
    config = DataConfig(
        buckets=BucketsConfig(table=("1x64x96", "17x64x96")),
        batch=BatchConfig(memory_tokens=400, text_tokens=26),
        segments=(SegmentConfig(until_step=5), SegmentConfig(until_step=0, batch=BatchConfig(max_batch=2))),
    )
    first, second = stages_of(config, Geometry(), lambda bucket, limits: 1)
    assert first.sizes == {IMAGE: 8, CLIP: 2} and second.sizes == {IMAGE: 2, CLIP: 2}
    assert (first.until_step, second.until_step) == (5, 0)


def test_costs_that_have_not_moved_change_no_segment_of_a_run_whose_limits_are_found(tmp_path: Path) -> None:
    """The pictures of the first segment have limits that were found for the clips of the second, too."""
    pictures, clips = (BucketsConfig(table=table) for table in (("1x64x96",), ("17x64x96", "33x64x96")))
    batch = BatchConfig(auto=True, text_tokens=56, recalibrate="on", recalibrate_steps=2)
    segments = (SegmentConfig(until_step=10, buckets=pictures), SegmentConfig(until_step=0, buckets=clips))
    config = RunConfig(run=RunSection(name="curriculum"), data=DataConfig(batch=batch, segments=segments))
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    data = with_limits(config, model, geometry, profile)[0].data
    asked = Planned(profile)
    stages = stages_of(data, geometry, lambda bucket, limits: 1)
    assert stages[0].sizes[IMAGE] > 1
    steps(Recalibration.of(tmp_path, stages, asked, asked, Events(asked)), asked, 20)  # type: ignore[arg-type]
    assert asked.questions > 4 and not asked.resized and not asked.events


class Planned(Asked):
    """The planner's own answers."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(None)
        self.profile = profile

    def ask_sizes(self, buckets: Any, limits: Any, room_gib: float) -> Any:
        self.questions += 1
        return Answer(best_sizes(self.profile, buckets, limits, room_gib), 0)
