import csv
import io
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import webdataset

from data.tools import synthetic
from data.tools.synthetic import (
    COLORS,
    DIRECTIONS,
    KOALA_COLUMNS,
    KOALA_TABLE,
    Scene,
    SynthConfig,
    encode,
    make_scenes,
    mask,
    synthesize,
)

CONFIG = SynthConfig(clips=48, images=12, shards=3, seed=1, frames=(9, 17, 21))


def samples(folder: Path) -> list[dict[str, bytes]]:
    shards = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
    return list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))


def test_the_same_seed_gives_the_same_bytes(clips: Path, tmp_path: Path) -> None:
    synthesize(tmp_path, CONFIG)
    for path in sorted(p for p in clips.rglob("*") if p.is_file() and p.suffix in (".tar", ".csv", ".mp4")):
        assert path.read_bytes() == (tmp_path / path.relative_to(clips)).read_bytes(), path


def test_shards_hold_what_the_webdataset_library_reads(clips: Path) -> None:
    found = samples(clips)
    assert len(found) == 60
    assert sum("mp4" in sample for sample in found) == 48
    for sample in found:
        about = json.loads(sample["json"])
        assert sample["txt"].decode() == about["caption"] == about["captions"][0]
        assert about["color"] in sample["txt"].decode()


def test_headers_agree_with_the_json(clips: Path) -> None:
    shapes = set()
    for sample in samples(clips):
        about = json.loads(sample["json"])
        if "mp4" not in sample:
            continue
        with av.open(io.BytesIO(sample["mp4"])) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height, stream.frames) == (
                about["width"],
                about["height"],
                about["num_frames"],
            )
            assert float(stream.average_rate) == about["fps"]
        shapes.add((about["width"], about["height"], about["num_frames"], about["fps"]))
    assert len(shapes) > 15


def test_pixels_show_what_the_caption_says() -> None:
    for scene in [s for s in make_scenes(CONFIG) if s.fps][:12]:
        with av.open(io.BytesIO(encode(scene))) as container:
            stream = container.streams.video[0]
            stream.thread_count, stream.thread_type = 1, "NONE"
            frames = [frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(stream)]
        inside = mask(scene, 0)
        color = frames[0][inside].mean(axis=0)
        nearest = min(COLORS, key=lambda name: np.abs(color - np.array(COLORS[name])).sum())
        assert nearest == scene.color
        centers = [np.argwhere(mask(scene, index)).mean(axis=0) for index in (0, scene.frames - 1)]
        moved = np.sign(np.round(centers[1] - centers[0]))
        assert tuple(moved) == DIRECTIONS[scene.direction]


def test_the_koala_table_has_its_columns_and_one_file_per_row(clips: Path) -> None:
    with (clips / "koala" / "Koala_36M_1.csv").open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        assert tuple(table.fieldnames or ()) == KOALA_COLUMNS
        rows = list(table)
    assert len(rows) == 48
    assert {(clips / "koala" / "videos" / f"{row['videoID']}.mp4").is_file() for row in rows} == {True}
    assert len({row["videoID"] for row in rows}) == 48


def test_a_folder_with_shards_is_not_overwritten(clips: Path) -> None:
    with pytest.raises(ValueError, match="not empty"):
        synthesize(clips, CONFIG)


def test_two_processes_that_make_a_set_at_once_have_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removed what the other had begun, and one shard of several stayed as the set. Here one begins and ends while
    the other makes its second shard."""
    config = replace(CONFIG, clips=6, images=3, frames=(5,))
    synthesize(tmp_path / "alone", config)
    made: list[dict[str, object]] = []

    def encoded(scene: Scene, stable: bool = True) -> bytes:
        if scene.number == 1 and not made:
            made.append({})
            made.append(synthesize(tmp_path / "set", config))
        return encode(scene, stable)

    monkeypatch.setattr(synthetic, "encode", encoded)
    assert synthesize(tmp_path / "set", config) == made[1]
    files = [path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*") if path.is_file()]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["koala", "shards"]
    for file in files:
        assert (tmp_path / "set" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file


def test_a_set_of_a_process_that_was_killed_before_its_shards_had_their_name_is_made_whole(tmp_path: Path) -> None:
    config = replace(CONFIG, clips=3, images=1, shards=1, frames=(5,))
    synthesize(tmp_path, config)
    shutil.rmtree(tmp_path / "shards")
    with pytest.raises(ValueError, match="koala is not empty"):
        synthesize(tmp_path, replace(config, seed=2))
    table = (tmp_path / "koala" / KOALA_TABLE).stat()
    synthesize(tmp_path, config)
    assert len(samples(tmp_path)) == 4
    assert (tmp_path / "koala" / KOALA_TABLE).stat() == table, "nothing of it is removed: it might be somebody's own"


def test_what_a_killed_process_has_left_goes_a_day_later(tmp_path: Path) -> None:
    for name, age_s in (("later", 2 * 86400), ("now", 0)):
        (tmp_path / f".synthetic-part-{name}").mkdir()
        os.utime(tmp_path / f".synthetic-part-{name}", (time.time() - age_s,) * 2)
    synthesize(tmp_path, replace(CONFIG, clips=1, images=0, shards=1, frames=(5,), koala=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".synthetic-part-now", "shards"]


def test_nothing_to_make_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to make"):
        replace(CONFIG, clips=0, images=0)
