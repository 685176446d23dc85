import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.buckets import (
    BucketTable,
    Choice,
    ClipShape,
    Refusal,
    available_frames,
    batch_size,
    binding_limit,
    last_start,
    pick,
    planned_batch,
)
from data.config import BatchConfig, BucketsConfig, DataConfig, SourceConfig
from data.types import Bucket
from ops.geometry import Geometry

GEOMETRY = Geometry()
OPEN_SORA = {"256px": {1: [1.0, 45], 33: [1.0, 12], 65: [1.0, 6], 129: [1.0, 3]}, "768px": {1: [0.5, 13]}}


def video(frames: int, height: int, width: int, fps: float = 16.0) -> ClipShape:
    return ClipShape(frames=frames, height=height, width=width, fps=fps)


def image(height: int, width: int) -> ClipShape:
    return ClipShape(frames=1, height=height, width=width, fps=0.0)


def table(*shapes: str, **settings: object) -> BucketTable:
    return BucketTable.build(BucketsConfig(table=shapes, **settings), GEOMETRY)


def chosen(found: tuple[Choice, ...] | Refusal) -> str:
    assert not isinstance(found, Refusal), found
    return str(found[0].bucket)


def refused(found: tuple[Choice, ...] | Refusal) -> tuple[str, str]:
    assert isinstance(found, Refusal), found
    return found.reason, str(found.nearest)


def _generated_with(ratio: str) -> BucketTable:
    return BucketTable.build(BucketsConfig(resolutions=("256px",), ratios=(ratio,), frames=(17,)), GEOMETRY)


def test_a_clip_takes_the_largest_resolution_it_has_the_pixels_for_and_the_longest_count_it_fills() -> None:
    buckets = table("17x64x96", "33x64x96", "17x128x192", "33x128x192")
    assert chosen(buckets.choices(video(40, 128, 192), 0)) == "33x128x192"
    assert chosen(buckets.choices(video(20, 128, 192), 0)) == "17x128x192"
    assert chosen(buckets.choices(video(40, 100, 150), 0)) == "33x64x96"
    assert chosen(buckets.choices(video(17, 1080, 1620), 0)) == "17x128x192"


def test_a_clip_takes_the_nearest_aspect_ratio() -> None:
    buckets = table("17x64x96", "17x96x64", "17x80x80")
    assert chosen(buckets.choices(video(17, 720, 1280), 0)) == "17x64x96"
    assert chosen(buckets.choices(video(17, 1280, 720), 0)) == "17x96x64"
    assert chosen(buckets.choices(video(17, 500, 510), 0)) == "17x80x80"


def test_images_take_one_frame_buckets_and_videos_the_others() -> None:
    buckets = table("1x64x96", "17x64x96")
    assert chosen(buckets.choices(image(64, 96), 0)) == "1x64x96"
    assert refused(buckets.choices(video(12, 64, 96), 0)) == ("too_short", "17x64x96")
    assert chosen(table("1x64x96", "17x64x96", short_videos="image").choices(video(12, 64, 96), 0)) == "1x64x96"
    assert refused(table("17x64x96").choices(image(64, 96), 0))[0] == "no_image_bucket"
    assert refused(table("1x64x96").choices(video(12, 64, 96), 0)) == ("too_short", "1x64x96")
    assert last_start(video(40, 64, 96), Bucket(1, 64, 96), 8.0) == 0, (
        "a video that stands as an image: its first frame"
    )


def test_a_refusal_names_the_nearest_bucket() -> None:
    buckets = table("17x64x96", "17x96x64")
    assert refused(buckets.choices(video(17, 32, 48), 0)) == ("too_small", "17x64x96")
    assert refused(buckets.choices(video(17, 64, 640), 0)) == ("no_ratio", "17x64x96")
    sizes = table("17x64x96", "17x128x192", oversize="drop").choices(video(17, 640, 960), 0)
    assert refused(sizes) == ("too_large", "17x128x192"), "of two with its ratio the one nearer in size"
    assert chosen(table("17x64x96", undersize="upscale").choices(video(17, 32, 48), 0)) == "17x64x96"
    assert refused(table("17x64x96", oversize="drop").choices(video(17, 640, 960), 0)) == ("too_large", "17x64x96")


def test_frame_rate_resampling_changes_how_long_a_clip_is() -> None:
    assert available_frames(video(49, 64, 96, fps=24), 8) == 17
    assert available_frames(video(17, 64, 96, fps=8), 16) == 33
    assert chosen(table("17x64x96", "33x64x96").choices(video(49, 64, 96, fps=24), 8)) == "17x64x96"


@given(st.integers(2, 400), st.floats(5, 60), st.sampled_from([0.0, 8.0, 16.0, 24.0]), st.integers(2, 129))
def test_every_start_leaves_enough_frames(frames: int, rate: float, fps: float, wanted: int) -> None:
    shape, bucket = video(frames, 64, 96, rate), Bucket(wanted, 64, 96)
    if available_frames(shape, fps) < wanted:
        return
    start = last_start(shape, bucket, fps)
    last_second = (start / rate + (wanted - 1) / fps) if fps else (start + wanted - 1) / rate
    assert start >= 0 and last_second <= (frames - 1) / rate + 1e-4


def test_generated_tables_have_every_resolution_length_and_ratio_in_legal_sizes() -> None:
    built = BucketTable.build(
        BucketsConfig(resolutions=("256px", "480p"), ratios=("16:9", "1:1"), frames=(1, 17)), GEOMETRY
    )
    assert len(built.buckets) == 8
    for bucket in built.buckets:
        assert bucket.height % 16 == 0 and bucket.width % 16 == 0
        nominal = 256 * 256 if bucket.area < 100_000 else 480 * 480 * 16 / 9
        assert bucket.area == pytest.approx(nominal, rel=0.1)


def test_an_open_sora_table_is_pasted_with_its_batch_sizes_and_probabilities() -> None:
    built = BucketTable.build(BucketsConfig(open_sora=OPEN_SORA), GEOMETRY)
    assert built.batches[Bucket(129, 256, 256)] == 3
    found = built.choices(image(1024, 1024), 0)
    assert not isinstance(found, Refusal)
    assert [(choice.resolution, choice.keep) for choice in found] == [("768px", 0.5), ("256px", 1.0)]
    assert str(pick(found, lambda use: 0.4)) == "1x768x768"
    assert str(pick(found, lambda use: 0.6)) == "1x256x256"
    assert chosen(built.choices(video(70, 720, 1280), 0)).startswith("65x")


def test_a_clip_that_does_not_take_an_entry_moves_on_with_the_second_probability() -> None:
    built = BucketTable.build(
        BucketsConfig(open_sora={"144p": {53: [1.0, 9]}, "360p": {53: [0.5, 4], 105: [[0.5, 0.3], 2]}}), GEOMETRY
    )
    found = built.choices(video(120, 360, 640), 0)
    assert not isinstance(found, Refusal)
    draws = {0: 0.9, 1: 0.2, 2: 0.1}
    assert pick(found, draws.__getitem__).frames == 53 and pick(found, draws.__getitem__).height > 300
    draws = {0: 0.9, 1: 0.5, 4: 0.0}
    assert pick(found, draws.__getitem__).height < 200


def test_a_sure_choice_ends_the_list_and_a_sure_step_down_draws_nothing() -> None:
    built = BucketTable.build(
        BucketsConfig(open_sora={"256px": {17: [1.0, 9], 33: [1.0, 4]}, "144p": {17: [1.0, 9]}}), GEOMETRY
    )
    found = built.choices(video(40, 360, 360), 0)
    assert not isinstance(found, Refusal) and [choice.bucket.frames for choice in found] == [33]
    unsure = replace(found[0], keep=0.5)
    shorter = replace(found[0], bucket=Bucket(17, 256, 256))
    assert pick([unsure, shorter], {0: 0.9}.__getitem__) == shorter.bucket


def test_no_bucket_when_no_probability_is_met() -> None:
    built = BucketTable.build(BucketsConfig(open_sora={"256px": {17: [0.25, 1]}}), GEOMETRY)
    found = built.choices(video(17, 256, 256), 0)
    assert not isinstance(found, Refusal)
    assert pick(found, lambda use: 0.3) is None


@given(st.floats(100, 1e6), st.floats(1, 1e9), st.floats(1, 2.5), st.integers(0, 512))
@settings(max_examples=200)
def test_batch_sizes_obey_both_limits(memory: float, compute: float, exponent: float, text: int) -> None:
    bucket = Bucket(17, 64, 96)
    tokens = text + GEOMETRY.tokens(17, 64, 96)
    limits = BatchConfig(memory_tokens=memory, compute=compute, exponent=exponent, text_tokens=text)
    size = batch_size(bucket, limits, GEOMETRY)
    assert size == max(1, min(math.floor(memory / tokens), math.floor(compute / tokens**exponent)))
    if size > 1:
        assert size * tokens <= memory and size * tokens**exponent <= compute * (1 + 1e-9)


def test_no_batch_is_larger_than_the_cap_nor_smaller_than_one_clip() -> None:
    bucket = Bucket(17, 64, 96)
    tokens = GEOMETRY.tokens(17, 64, 96)
    for most, size in ((3, 3), (5, 5), (7, 5), (0, 5)):
        assert (
            batch_size(bucket, BatchConfig(memory_tokens=5.5 * tokens, text_tokens=0, max_batch=most), GEOMETRY) == size
        )
    exact, capped = BatchConfig(memory_tokens=tokens, text_tokens=0), BatchConfig(memory_tokens=1e6, max_batch=3)
    assert batch_size(bucket, exact, GEOMETRY) == 1 and binding_limit(bucket, exact, GEOMETRY) == "memory"
    assert binding_limit(bucket, capped, GEOMETRY) == "cap"


def test_a_pasted_table_sets_its_own_batches_and_other_buckets_follow_the_limits() -> None:
    pasted = BucketTable.build(BucketsConfig(open_sora={"256px": {17: [1.0, 9], 33: [1.0, None]}}), GEOMETRY)
    listed, other = Bucket(17, 256, 256), Bucket(33, 256, 256)
    limits = BatchConfig(memory_tokens=1e4, text_tokens=0, from_table=True)
    sized = (batch_size(other, limits, GEOMETRY), "memory")
    assert planned_batch(pasted, listed, limits, GEOMETRY) == (9, "table")
    assert planned_batch(pasted, other, limits, GEOMETRY) == sized
    limits = replace(limits, from_table=False)
    assert planned_batch(pasted, listed, limits, GEOMETRY) == (batch_size(listed, limits, GEOMETRY), "memory")
    timed = replace(limits, target_s=1.0)
    assert planned_batch(pasted, listed, timed, GEOMETRY, lambda bucket, config: 7) == (7, "target_s")
    with pytest.raises(ValueError, match="target_s needs a profile"):
        planned_batch(pasted, listed, timed, GEOMETRY)


def test_the_binding_limit_is_named() -> None:
    bucket = Bucket(17, 64, 96)
    assert binding_limit(bucket, BatchConfig(memory_tokens=1000), GEOMETRY) == "memory"
    assert binding_limit(bucket, BatchConfig(memory_tokens=1e6, compute=1e5), GEOMETRY) == "compute"
    assert binding_limit(bucket, BatchConfig(memory_tokens=10), GEOMETRY) == "one (memory)"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: BucketTable.build(BucketsConfig(), GEOMETRY), "data.buckets is empty"),
        (lambda: table("17x64x100"), "not a multiple"),
        (lambda: table("18x64x96"), "4\\*k\\+1"),
        (lambda: BucketsConfig(table=("17-64-96",)), "FRAMESxHEIGHTxWIDTH"),
        (lambda: BucketsConfig(table=("17x64x96",), open_sora=OPEN_SORA), "exclude each other"),
        (lambda: BucketTable.build(BucketsConfig(open_sora={"256px": {1: 5}}), GEOMETRY), "probability, batch size"),
        (
            lambda: DataConfig(sources=(SourceConfig(path="a", weight=3.0), SourceConfig(path="b", weight=1.0))),
            "sum to 4, not 1. Use 0.75, 0.25",
        ),
        (lambda: SourceConfig(path="pipe:cat x.tar"), "refused"),
        (lambda: _generated_with("0:9"), "is not WIDTH:HEIGHT"),
        (lambda: _generated_with("16:0"), "is not WIDTH:HEIGHT"),
    ],
)
def test_bad_settings_are_one_clear_sentence(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()  # type: ignore[operator]
