"""The curricula that are shipped and documented: they load, and draw what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.settings.config import RunConfig
from data.dataset.dataset import Dataset
from data.tools.synthetic import SynthConfig, synthesize
from ops.models.folders import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    synthesize(folder, SynthConfig(clips=30, images=6, shards=2, koala=False))
    source = f"data.sources.0.path={folder}/shards/{{00000..00001}}.tar"
    config = RunConfig.load(ROOT / "configs" / "runs" / "demo-curriculum.yaml", [source])
    return Dataset.open(config.data, resolve(config.model)[1], 0)


def frames(data: Dataset, first: int, last: int) -> set[int]:
    return {item.bucket.frames for step in range(first, last + 1) for item in data.step(step).items}


def test_pictures_come_first_then_short_clips_then_long_ones(data: Dataset) -> None:
    assert frames(data, 70, 79) == {1} and {len(data.step(step).items) for step in (70, 79)} == {2}
    assert frames(data, 80, 130) == {1, 9} and len(data.step(80).items) == 3
    assert frames(data, 179, 179) <= {1, 9}
    assert frames(data, 180, 240) >= {1, 9, 17}


def test_the_curriculum_of_the_page_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"^```yaml\n(data:.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text("run: {name: t}\n" + written, encoding="utf-8")
    config = RunConfig.load(tmp_path / "run.yaml").data
    assert [segment.until_step for segment in config.segments] == [2000, 10_000, 0]
    assert all(len(segment.weights) == len(config.sources) == 2 for segment in config.segments)
    assert replace(config, segments=()).tables != config.tables
