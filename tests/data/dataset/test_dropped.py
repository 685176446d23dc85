"""Samples that are never trained: each has a name and a reason, however many there are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import BatchConfig, BucketsConfig, DataConfig, LimitsConfig, SourceConfig
from data.dataset.coverage import check_coverage
from data.dataset.dataset import Dataset
from data.dataset.dropped import dropped_samples, write_dropped
from data.errors import DataError
from data.in_words import dropped_sentence, reasons_in_words
from data.ledger import Ledger, Reason
from ops.geometry import Geometry
from tests.data.making import clip, picture

RULE = "score >= 2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of clips that fit, and of one or two for every way in which they do not."""
    shapes = {
        "good0": clip(96, 64, 17),
        "good1": clip(96, 64, 17, seed=1),
        "low": clip(96, 64, 17),
        "short": clip(96, 64, 5),
        "small0": clip(48, 32, 17),
        "small1": clip(48, 32, 17),
        "wide": clip(192, 48, 17),
        "broken": b"<html>",
    }
    for name, data in shapes.items():
        (tmp_path / f"{name}.mp4").write_bytes(data)
    (tmp_path / "still.png").write_bytes(picture(96, 64))
    rows = [f"{name}.mp4" for name in shapes] + ["still.png", "gone.mp4"]
    lines = [json.dumps({"path": row, "text": row, "score": 1 if row == "low.mp4" else 3}) for row in rows]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    return tmp_path


def dataset(folder: Path, *paths: str) -> Dataset:
    sources = tuple(
        SourceConfig(path=str(folder / path), name=path, filters=(RULE,), index=str(folder / "index"))
        for path in paths or ("table.jsonl",)
    )
    config = DataConfig(
        sources=sources,
        buckets=BucketsConfig(table=("17x64x96",)),
        batch=BatchConfig(text_tokens=8),
        limits=LimitsConfig(max_bad_fraction=1.0),
    )
    return Dataset.open(config, Geometry(), seed=0)


def test_every_sample_that_is_not_planned_has_its_name_and_reason(folder: Path) -> None:
    data = dataset(folder)
    found = {
        Path(one.path or one.key).stem: (one.reason, one.detail)
        for one in dropped_samples(data.curriculum, data.indexes)
    }
    assert {name: reason for name, (reason, _) in found.items()} == {
        "low": Reason.FILTERED,
        "short": Reason.TOO_FEW_FRAMES,
        "small0": Reason.NO_BUCKET,
        "small1": Reason.NO_BUCKET,
        "wide": Reason.NO_BUCKET,
        "broken": Reason.TRUNCATED_VIDEO,
        "still": Reason.NO_BUCKET,
        "gone": Reason.FILE_MISSING,
    }
    assert found["low"][1] == RULE and "48x32 has less than 0.8" in found["small0"][1]
    assert "aspect ratio 4.00" in found["wide"][1] and "5 frames" in found["short"][1]
    ledger = data.ledger
    assert len(found) == ledger.indexed - ledger.planned == ledger.rejected.total()


def test_reasons_in_words_add_up_and_name_the_settings(folder: Path) -> None:
    ledger = dataset(folder).ledger
    reasons = reasons_in_words(ledger)
    assert sum(reasons.values()) == ledger.rejected.total() == 8
    assert next(iter(reasons.values())) == 2 == reasons["too small (data.buckets.min_area, undersize)"], "most first"
    assert reasons["too short (data.buckets.frames, short_videos)"] == 1
    assert reasons["refused by score >= 2 (data.sources filters)"] == 1
    assert reasons["without their file"] == 1 and reasons["truncated_video"] == 1
    assert any("aspect ratio" in words for words in reasons) and any("of one frame" in words for words in reasons)
    sentence = dropped_sentence(ledger.indexed, ledger.planned, reasons)
    assert sentence.startswith("8 of 10 samples are dropped: 2 too small (data.buckets.min_area, undersize), 1 ")
    assert dropped_sentence(5, 5, {}) == "" and "1 of 2 samples is dropped" in dropped_sentence(2, 1, {"too short": 1})


def test_a_list_has_a_line_for_each_and_is_no_file_where_there_is_none(folder: Path) -> None:
    data, path = dataset(folder), folder / "dropped.jsonl"
    assert write_dropped(path, dropped_samples(data.curriculum, data.indexes)) == 8
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    (small,) = (line for line in lines if line.get("path", "").endswith("small1.mp4"))
    assert small["width"] == 48 and small["height"] == 32 and small["num_frames"] == 17
    assert small["source"] == "table.jsonl" and small["reason"] == "no_bucket" and "detail" in small
    assert write_dropped(path, []) == 0 and not path.exists()


def test_a_limited_list_has_the_first_of_every_source(folder: Path) -> None:
    """One source with millions of them would hide those of the next."""
    (folder / "other.jsonl").write_text((folder / "table.jsonl").read_text())
    data = dataset(folder, "table.jsonl", "other.jsonl")
    found = list(dropped_samples(data.curriculum, data.indexes, most_of_a_source=3))
    assert [one.source for one in found] == ["table.jsonl"] * 3 + ["other.jsonl"] * 3


def test_a_list_is_made_group_by_group(folder: Path) -> None:
    """Rows of 100 million are never held together; those of every group have their own names."""
    whole = list(dropped_samples((data := dataset(folder)).curriculum, data.indexes))
    assert list(dropped_samples(data.curriculum, data.indexes, rows_at_once=2)) == whole


def test_too_little_of_the_data_is_refused_with_what_would_help(folder: Path) -> None:
    ledger = dataset(folder).ledger
    check_coverage(ledger, 0.0)
    check_coverage(ledger, 0.2)
    with pytest.raises(DataError, match=r"only 20.0% .*data.min_coverage asks for 25%. 8 of 10 .*heddle data lint"):
        check_coverage(ledger, 0.25)
    check_coverage(Ledger(), 0.9)


def test_a_source_whose_name_holds_brackets_and_lines_is_counted(folder: Path) -> None:
    data = dataset(folder)
    sources = (replace(data.config.sources[0], name="a (b)\nc, d"),)
    named = Dataset.open(replace(data.config, sources=sources), Geometry(), seed=0)
    assert reasons_in_words(named.ledger) == reasons_in_words(data.ledger)
