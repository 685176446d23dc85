"""Whole runs of every family, through Ray and through the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.settings.config import RunConfig
from data.tools.synthetic import SynthConfig, synthesize
from tests.families.registry import MODELS, WHOLE_RUNS

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
SAME = 1e-5  # another plan, another order of sums


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("families")
    synthesize(made / "data", SynthConfig(clips=16, images=8, shards=2, koala=False))
    return made


def losses(folder: Path, case: str, name: str) -> list[float]:
    """Losses of the steps of a run on a Ray of its own."""
    model = MODELS[case]
    place = case.replace(" ", "-")
    first = 5 if model.dit.starts_from_image else 1
    table = "[1x64x96, 1x32x48]" if model.dit.images_only else f"[{first}x64x96, 9x64x96]"
    config = RunConfig.from_yaml(f"""
run: {{name: {name}, dir: {folder}/runs-{place}}}
data:
  sources: [{{path: "{folder}/data/shards/{{00000..00001}}.tar"}}]
  buckets: {{table: {table}, short_videos: image}}
  batch: {{memory_tokens: 400, text_tokens: 40, max_batch: 3}}
  items_per_step: 4
  caption_dropout: 0.3
  fps: {model.dit.clip_rate or 0}
  engine: {{decode_workers: 1, decode_cpus: 0.2}}
  cache: {{path: {folder}/cache-{place}}}
train: {{steps: 4, optimizer: {{learning_rate: 1.0e-3}}}}
workers: {{min: 2, max: 2, cpus_per_worker: 0.5, device: cpu}}
""")
    file = folder / f"{place}.yaml"
    file.write_text(replace(config, model=model).to_yaml())
    command = [sys.executable, "-m", "app.train", "--config", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / f"runs-{place}" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("case", WHOLE_RUNS)
def test_a_run_from_the_cache_is_the_same(case: str, clips: Path) -> None:
    first = losses(clips, case, "first")
    assert len(first) == 4 and len(set(first)) == 4
    assert losses(clips, case, "cached") == pytest.approx(first, rel=SAME)
