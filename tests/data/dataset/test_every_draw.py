"""What a run may draw holds everything that its steps draw, and no clip that they never do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data.config import BatchConfig, BucketsConfig, DataConfig, EngineConfig, SegmentConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.dataset.every_draw import every_row, item_of, told_clips
from data.dataset.index import Index
from data.decode import caption_of
from data.tools.synthetic import SynthConfig, synthesize
from ops.geometry import Geometry


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    synthesize(folder, SynthConfig(clips=14, images=6, shards=2, seed=3, koala=False))
    return folder


def config(clips: Path) -> DataConfig:
    sources = tuple(
        SourceConfig(
            path=str(clips / "shards" / f"0000{number}.tar"),
            caption="json:captions",
            caption_prefix="style, " * number,
            index=str(clips / "index"),
        )
        for number in range(2)
    )
    return DataConfig(
        sources=sources,
        buckets=BucketsConfig(table=("1x64x96", "9x64x96", "17x64x96")),
        items_per_step=2,
        start_frame="fixed",
        caption_dropout=0.5,
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        max_wait=8,
        engine=EngineConfig(kind="pool"),
    )


def segmented(data: DataConfig) -> DataConfig:
    """The second source rests at first; later clips are cut out of larger ones."""
    cropped = BucketsConfig(table=("1x64x96", "9x48x48"), oversize="crop")
    segments = (
        SegmentConfig(until_step=12, weights=(1.0, 0.0)),
        SegmentConfig(until_step=0, buckets=cropped, weights=(0.5, 0.5)),
    )
    return replace(data, segments=segments)


def by_chance(data: DataConfig) -> DataConfig:
    """A clip takes the longest bucket now and then."""
    return replace(data, buckets=BucketsConfig(open_sora={"64px": {1: [1.0, 4], 9: [0.6, 3], 17: [0.4, 2]}}))


def without_captions(data: DataConfig) -> DataConfig:
    return replace(data, caption_dropout=1.0)


def test_a_run_draws_what_was_listed(clips: Path) -> None:
    for change in (lambda data: data, segmented, by_chance, without_captions):
        data = change(config(clips))
        listed = Dataset.open(data, Geometry(), 0)
        cuts, texts = set(), set()
        for row, some in every_row(listed):
            cuts |= {(cut.source, cut.row, cut.bucket, cut.crop) for cut in some}
            assert all(cut.batch == listed.planner.stages[0].batch.get(cut.bucket, cut.batch) for cut in some)
            job = item_of(listed, "any", some[:1]).job
            texts |= {(row.source, row.row, caption_of(clip, job)) for clip in told_clips(listed, row)}
        drawn_cuts, drawn_texts = set(), set()
        for seed in (0, 1):
            run = Dataset.open(data, Geometry(), seed)
            for step in range(60):
                for item in run.step(step).items:
                    for sample, clip in zip(item.samples, item.job.clips, strict=True):
                        drawn_cuts.add((sample.source, sample.row, item.bucket, item.job.crop))
                        drawn_texts.add((sample.source, sample.row, caption_of(clip, item.job)))
        assert drawn_cuts == cuts, change
        assert drawn_texts == texts, change


def test_all_rows_are_read_group_by_group(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, and each twice, ten million took three hours."""
    dataset = Dataset.open(segmented(config(clips)), Geometry(), 0)
    rows = [dataset.indexes[row.source].row(row.row) for row, _ in every_row(dataset)]
    monkeypatch.setattr(Index, "row", lambda *given: pytest.fail("a row is decoded alone"))
    assert rows and [row for row, _ in every_row(dataset)] == rows
    assert all(item_of(dataset, "any", cuts[:1], [row]).samples for row, cuts in every_row(dataset))


def test_an_item_of_a_cut_is_that_of_a_step_but_for_its_caption(clips: Path) -> None:
    dataset = Dataset.open(config(clips), Geometry(), 0)
    known = {(cut.source, cut.row, cut.bucket): cut for _, cuts in every_row(dataset) for cut in cuts}
    for item in dataset.step(3).items:
        cuts = [known[sample.source, sample.row, item.bucket] for sample in item.samples]
        made = item_of(dataset, item.id, cuts)
        clips_of_step = tuple(replace(clip, caption_drop=True, caption_pick=0.0) for clip in item.job.clips)
        assert replace(made.job, clips=()) == replace(item.job, clips=()) and made.job.clips == clips_of_step
        assert [s.content for s in made.samples] == [s.content for s in item.samples]
        assert [s.start_frame for s in made.samples] == [s.start_frame for s in item.samples]


def test_clips_longer_than_their_bucket_move_where_every_draw_begins_anew(clips: Path) -> None:
    dataset = Dataset.open(replace(config(clips), start_frame="random"), Geometry(), 0)
    found = {(row.num_frames, cut.bucket.frames): cut.moves for row, cuts in every_row(dataset) for cut in cuts}
    assert set(found.values()) == {True, False}
    assert all(moves == (1 < bucket < frames) for (frames, bucket), moves in found.items())
