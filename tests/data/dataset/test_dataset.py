import json
import re
import tarfile
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.buckets import first_frames
from data.cache import latent_keys
from data.config import BatchConfig, BucketsConfig, CacheConfig, DataConfig, SegmentConfig, SourceConfig
from data.dataset.coverage import account
from data.dataset.dataset import Dataset
from data.decode import decode_job
from data.errors import DataError
from data.ledger import Fault, Reason
from data.readers.part import opened
from data.types import Bucket, StepOfItems
from ops.geometry import Geometry
from tests.data import making

TABLE = ("1x64x96", "1x96x64", "1x80x80", "9x64x96", "9x96x64", "9x80x80", "17x64x96", "17x96x64", "17x80x80")


def config(clips: Path, **changes: object) -> DataConfig:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    usual = DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=TABLE),
        items_per_step=3,
        batch=BatchConfig(memory_tokens=600, text_tokens=48),
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def dataset(clips: Path, seed: int = 0, **changes: object) -> Dataset:
    return Dataset.open(config(clips, **changes), Geometry(), seed)


def names(step: StepOfItems) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(item.id, str(item.bucket), tuple(sample.key for sample in item.samples)) for item in step.items]


def test_a_step_is_the_same_whoever_asks_and_in_whatever_order(clips: Path) -> None:
    forwards, backwards = dataset(clips), dataset(clips)
    expected = [forwards.step(index) for index in range(12)]
    assert [backwards.step(index) for index in reversed(range(12))] == expected[::-1]
    assert forwards.step(3) == expected[3]


def test_a_step_that_was_planned_ahead_is_not_made_again_when_it_is_trained(clips: Path) -> None:
    """An engine plans two windows ahead, of which one has 256 items."""
    data = dataset(clips, items_per_step=2)
    planned = [data.step(index) for index in range(256)]
    assert all(data.step(index) is step for index, step in enumerate(planned))


def test_all_columns_of_a_part_are_read_at_once(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Counter[Path] = Counter()

    def counting(file: Path) -> AbstractContextManager[pq.ParquetFile]:
        times[file] += 1
        return opened(file)

    monkeypatch.setattr("data.dataset.index.opened", counting)
    (source,) = config(clips).sources
    data = dataset(clips, sources=(replace(source, filters=("aesthetic_score >= 4", "num_frames >= 2")),))
    for part in data.indexes[0].parts:
        assert times[part.file] == 1 + bool(part.meta["rejects"]), "and once for the faults, where there are any"


def test_every_clip_is_in_the_bucket_it_fits_and_items_have_unique_names(clips: Path) -> None:
    data = dataset(clips)
    steps = [data.step(index) for index in range(30)]
    ids = [item.id for step in steps for item in step.items]
    assert len(set(ids)) == len(ids) and ids[:4] == ["s0.0", "s0.1", "s0.2", "s1.0"]
    for step in steps:
        assert len(step.items) == 3
        for item in step.items:
            assert item.batch <= data.batch_sizes()[item.bucket]
            for sample in item.samples:
                row = data.indexes[sample.source].row(sample.row)
                assert row.num_frames >= item.bucket.frames and row.image == (item.bucket.frames == 1)
                assert 0 <= sample.start_frame <= row.num_frames - item.bucket.frames


@given(st.integers(0, 2**31), st.integers(0, 25), st.sets(st.sampled_from(TABLE), min_size=3), st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_stop_and_resume_at_any_step_changes_nothing(
    clips: Path, seed: int, stop: int, table: set[str], items: int
) -> None:
    changes = {"buckets": BucketsConfig(table=tuple(table), max_ratio_error=4.0), "items_per_step": items}
    straight = dataset(clips, seed, **changes)
    expected = [straight.step(index) for index in range(stop + 8)]
    token = json.loads(json.dumps(straight.token(stop)))
    assert len(json.dumps(token)) < 8192
    resumed = dataset(clips, seed, **changes)
    assert resumed.resume(token) == stop
    assert [resumed.step(index) for index in range(stop, stop + 8)] == expected[stop:]


def test_a_token_far_back_is_the_one_that_was_given_then(clips: Path) -> None:
    data = dataset(clips)
    early = data.token(5)
    data.step(400)
    assert data.token(5) == early
    assert names(data.step(7)) == names(dataset(clips).step(7))


def test_a_step_before_the_resumed_one_is_an_error(clips: Path) -> None:
    data = dataset(clips)
    resumed = dataset(clips)
    resumed.resume(data.token(10))
    with pytest.raises(DataError, match="lies before step 10"):
        resumed.step(9)


def test_captions_are_dropped_and_chosen_in_their_shares(clips: Path) -> None:
    data = dataset(clips, caption_dropout=0.25)
    samples = [sample for index in range(150) for item in data.step(index).items for sample in item.samples]
    assert sum(s.caption_drop for s in samples) / len(samples) == pytest.approx(0.25, abs=0.05)
    assert all((s.caption_chars == 0) == s.caption_drop for s in samples)
    assert sum(s.caption_pick < 0.5 for s in samples) / len(samples) == pytest.approx(0.5, abs=0.06)
    assert not any(s.caption_drop for item in dataset(clips, caption_dropout=0.0).step(0).items for s in item.samples)


def test_fixed_starts_are_zero_and_random_starts_vary(clips: Path) -> None:
    def starts(data: Dataset) -> set[int]:
        return {s.start_frame for index in range(30) for item in data.step(index).items for s in item.samples}

    assert starts(dataset(clips, start_frame="fixed")) == {0}
    assert starts(dataset(clips)) >= {0, 1, 2, 3, 4}


def test_a_number_of_starts_are_the_first_and_the_last_frames_and_what_lies_evenly_between(clips: Path) -> None:
    found: dict[tuple[str, int], set[int]] = {}
    data = dataset(clips, start_frame=3)
    for index in range(60):
        for item in data.step(index).items:
            for sample in item.samples:
                found.setdefault((sample.key, item.bucket.frames), set()).add(sample.start_frame)
    several = [starts for (_, frames), starts in found.items() if frames > 1 and len(starts) == 3]
    assert several, "clips longer than their bucket are drawn from each of three parts"
    for low, middle, high in map(sorted, several):
        assert low == 0 and middle in (high // 2, (high + 1) // 2)
    assert max(map(len, found.values())) == 3
    assert first_frames(100, 5) == [0, 25, 50, 75, 100] and set(first_frames(0, 5)) == {0}


@pytest.mark.parametrize("number", [-1, 0, 1, 1001])
def test_a_number_of_starts_that_says_nothing_is_refused(clips: Path, number: int) -> None:
    with pytest.raises(ValueError, match=rf"data\.start_frame {number} must be a number of parts from 2 to 1,000; for"):
        config(clips, start_frame=number)


def test_the_account_adds_up_and_covers_every_admitted_sample(clips: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = dataset(clips, buckets=BucketsConfig(table=("1x64x96", "17x64x96")))
    caplog.clear()
    caplog.set_level("INFO", "data.dataset.coverage")
    found = account(data)
    assert found.indexed == 60
    assert found.indexed == found.planned + sum(found.rejected.values())
    assert found.planned == found.trained
    assert len(found.dropped) == sum(found.rejected.values())
    assert all("17x64x96" in dropped.why or "1x64x96" in dropped.why for dropped in found.dropped)
    assert all(dropped.why.startswith(f"{dropped.reason}: ") for dropped in found.dropped), "named as it is counted"
    assert sum(bucket.samples for bucket in found.buckets) == found.trained
    assert not caplog.records  # it took less than half a minute
    short = account(data, steps=2, line_s=0.0)
    told = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"account of the data: \d+ of \d+ samples are trained within 1 step", told[-1])
    assert short.planned == short.trained + short.waiting + short.not_reached + short.passed_over
    assert short.draws == sum(item.batch for index in range(2) for item in data.step(index).items)


def test_the_account_covers_every_segment_of_a_curriculum(clips: Path) -> None:
    small = BucketsConfig(table=("9x32x48", "9x48x32", "1x32x48", "1x48x32"), max_ratio_error=2.0)
    data = dataset(clips, segments=(SegmentConfig(until_step=1, buckets=small), SegmentConfig(until_step=0)))
    found = account(data)
    assert found.planned == found.trained == 60
    assert {row.bucket.area for row in found.buckets if row.items} == {32 * 48, 64 * 96, 80 * 80}
    assert found.draws == sum(item.batch for index in range(found.steps) for item in data.step(index).items)


def test_a_segment_says_whether_its_clips_are_cut_or_scaled(clips: Path) -> None:
    cut = replace(config(clips).buckets, oversize="crop")
    data = dataset(clips, segments=(SegmentConfig(until_step=2, buckets=cut), SegmentConfig(until_step=0)))
    assert [{item.job.crop for item in data.step(n).items} for n in range(4)] == [{True}, {True}, {False}, {False}]
    first, again = data.step(1).items[0], replace(data.step(1).items[0].job, crop=False)
    assert set(latent_keys(first, data.config, "vae")).isdisjoint(
        latent_keys(replace(first, job=again), data.config, "vae")
    ), "a cache keeps them apart"


def test_filters_are_counted_and_their_samples_named(clips: Path) -> None:
    rule = "aesthetic_score >= 4.75"
    source = replace(config(clips).sources[0], filters=(rule,))
    data = dataset(clips, sources=(source,))
    passing = int(data.indexes[0].filter_mask(rule).sum())
    assert 5 < passing < 55
    assert data.ledger.rejected["filtered"] == 60 - passing
    assert f"filtered({rule})" in {dropped.why for dropped in account(data).dropped}


def test_two_sources_are_mixed_by_their_weights(clips: Path) -> None:
    shards, table = (
        config(clips).sources[0],
        SourceConfig(
            path=str(clips / "koala" / "Koala_36M_1.csv"),
            media=str(clips / "koala" / "videos"),
            kind="koala",
            index=str(clips / "index-koala"),
            weight=0.25,
        ),
    )
    data = dataset(clips, sources=(replace(shards, weight=0.75), table))
    counts = Counter(s.source for index in range(60) for item in data.step(index).items for s in item.samples)
    assert counts[1] / counts.total() == pytest.approx(0.25, abs=0.02)
    assert sum(data.batch_sizes().values()) > 0


def test_a_segment_has_batches_and_shares_of_its_own_and_without_any_a_source_counts_by_what_fits(clips: Path) -> None:
    """Pictures of 24 video tokens: with 48 of text eight are 600 tokens, with none four are 100."""
    table = SourceConfig(
        path=str(clips / "koala" / "Koala_36M_1.csv"),
        media=str(clips / "koala" / "videos"),
        kind="koala",
        index=str(clips / "index-koala"),
    )
    small = BatchConfig(memory_tokens=100, text_tokens=0)
    segments = (SegmentConfig(until_step=10, batch=small, weights=(0.0, 1.0)), SegmentConfig(until_step=0))
    data = dataset(clips, sources=(config(clips).sources[0], table), segments=segments)
    early, late = [data.step(n) for n in range(10)], [data.step(n) for n in range(10, 60)]
    assert {s.source for step in early for item in step.items for s in item.samples} == {1}
    first, second = (stage.batch for stage in data.planner.stages)
    assert (first[Bucket(1, 64, 96)], second[Bucket(1, 64, 96)]) == (4, 8)
    assert [stage.tokens[Bucket(1, 64, 96)] for stage in data.planner.stages] == [24, 72]
    assert all(item.batch <= first[item.bucket] for step in early for item in step.items)
    counts = Counter(s.source for step in late for item in step.items for s in item.samples)
    fitting = [int((code >= 0).sum()) for code in data.curriculum.codes]
    assert counts[1] / counts.total() == pytest.approx(fitting[1] / sum(fitting), abs=0.03)


def test_a_curriculum_changes_buckets_and_batch_at_its_border(clips: Path) -> None:
    small = BucketsConfig(table=("9x32x48", "9x48x32", "1x32x48", "1x48x32"), max_ratio_error=2.0)
    segments = (SegmentConfig(until_step=6, buckets=small, items_per_step=2), SegmentConfig(until_step=0))
    data = dataset(clips, segments=segments)
    early, late = [data.step(index) for index in range(6)], [data.step(index) for index in range(6, 20)]
    assert {item.bucket.area for step in early for item in step.items} == {32 * 48}
    assert {item.bucket.area for step in late for item in step.items} <= {64 * 96, 80 * 80}
    assert {len(step.items) for step in early} == {2} and {len(step.items) for step in late} == {3}
    resumed = dataset(clips, segments=segments)
    resumed.resume(json.loads(json.dumps(data.token(4))))
    assert [resumed.step(index) for index in range(4, 20)] == [*early[4:], *late]


def test_batch_sizes_may_come_from_the_planner(clips: Path) -> None:
    given = config(clips, batch=BatchConfig(target_s=1.0))
    data = Dataset.open(given, Geometry(), 0, timed=lambda bucket, limits: 2)
    assert set(data.batch_sizes().values()) == {2} and {row.limit for row in account(data, 4).buckets} == {"target_s"}
    with pytest.raises(ValueError, match="target_s needs a profile"):
        Dataset.open(given, Geometry(), 0)
    assert {item.batch for index in range(10) for item in data.step(index).items} == {2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"buckets": BucketsConfig(table=("129x720x1280", "129x64x96"))},
            "no sample can be trained: of 60 indexed.*too_short.*: 129x64x96, 960px: 129x720x1280",
        ),
        ({"sources": ()}, "data.sources is empty"),
    ],
)
def test_data_of_which_no_item_can_be_formed_is_an_error_that_says_why(
    clips: Path, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        dataset(clips, **changes)


def test_a_changed_index_under_a_token_is_refused(clips: Path, tmp_path: Path) -> None:
    token = dataset(clips).token(3)
    for shard in sorted((clips / "shards").glob("*.tar"))[:2]:
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    source = SourceConfig(path=str(tmp_path), caption="json:captions", index=str(tmp_path / "index"))
    with pytest.raises(DataError, match="index changed since"):
        dataset(clips, sources=(source,)).resume(token)


def test_plans_of_different_seeds_differ(clips: Path) -> None:
    one, other = dataset(clips, 1), dataset(clips, 2)
    assert names(one.step(0)) != names(other.step(0))


def test_a_cropped_clip_takes_the_bucket_of_its_crop_and_has_a_latent_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(making.clip(width=96, height=64))
    rows = [{"path": "a.mp4", "cap": "whole"}, {"path": "a.mp4", "cap": "part", "crop": [8, 72, 0, 64]}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    source = SourceConfig(path=str(tmp_path / "list.json"), kind="manifest", index=str(tmp_path / "index"))
    table = BucketsConfig(table=("9x64x96", "9x64x64"))
    data = dataset(tmp_path, sources=(source,), buckets=table, cache=CacheConfig(path=str(tmp_path / "cache")))
    found = {sample.row: (item, slot) for item in data.step(0).items for slot, sample in enumerate(item.samples)}
    (whole, of_whole), (part, of_part) = found[0], found[1]
    assert (whole.bucket, part.bucket) == (Bucket(9, 64, 96), Bucket(9, 64, 64))
    both = (whole.samples[of_whole], part.samples[of_part])
    in_one_bucket = replace(part, samples=both, job=replace(part.job, clips=part.job.clips[:1] * 2))
    assert len(set(latent_keys(in_one_bucket, data.config, "vae"))) == 2
    pixels, cut = (decode_job(item.job).video for item in (whole, part))
    assert np.array_equal(cut[of_part], pixels[of_whole][:, :, 8:72])


def test_jobs_name_the_bytes_of_their_clips(clips: Path) -> None:
    data = dataset(clips)
    item = data.step(0).items[0]
    job = item.job
    assert job.item == item.id and job.bucket == item.bucket == Bucket.parse(str(item.bucket))
    for clip, sample in zip(job.clips, item.samples):
        with tarfile.open(clip.media) as shard:
            member = shard.extractfile(f"{sample.key}.{clip.suffix}")
            assert member is not None
            wanted = member.read()
        with open(clip.media, "rb") as file:
            file.seek(clip.offset)
            assert file.read(clip.size) == wanted
        assert clip.key == sample.key and clip.start_frame == sample.start_frame


def test_a_sample_above_the_memory_limit_is_told_with_its_bucket(clips: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset(clips)
    assert not caplog.records
    dataset(clips, batch=BatchConfig(memory_tokens=50, text_tokens=48))
    assert "one sample of bucket 17x80x80 has 173 tokens, more than data.batch.memory_tokens 50" in caplog.text


def test_a_clip_is_admitted_that_one_segment_takes_and_drawn_in_that_one_alone(clips: Path) -> None:
    """Pictures first, and then what is longer: 12 of the 60 are pictures, which no bucket of the videos takes."""
    pictures, videos = (
        BucketsConfig(table=(f"{n}x64x96", f"{n}x96x64", f"{n}x80x80"), max_ratio_error=2.0) for n in (1, 9)
    )
    assert [dataset(clips, buckets=buckets).ledger.planned for buckets in (pictures, videos)] == [12, 48]
    segments = (SegmentConfig(until_step=4, buckets=pictures), SegmentConfig(until_step=0, buckets=videos))
    data = dataset(clips, segments=segments)
    found = account(data)
    assert found.planned == found.trained == 60 and found.dropped == () and not data.ledger.rejected
    drawn = [{item.bucket.frames for item in data.step(number).items} for number in range(found.steps)]
    assert drawn == [{1}] * 4 + [{9}] * (found.steps - 4)
    assert sum(row.samples for row in found.buckets if row.bucket.frames == 1) == 12


def test_a_draw_that_cache_and_decoder_both_tell_is_bad_once(clips: Path) -> None:
    data = dataset(clips)
    first, second = [sample for item in data.step(0).items for sample in item.samples][:2]
    told = [Fault(Reason.DECODE_ERROR, "a.tar", sample.key) for sample in (first, second)]
    data.tell_bad(0, told)
    data.count_draws(0, told[:1])
    assert data.ledger.summary()["skipped"]["decode_error"] == 2
