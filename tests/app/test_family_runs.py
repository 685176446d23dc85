"""Whole runs of families with more than rows of a T5, or blocks of two kinds: through Ray and through the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.tools.synthetic import SynthConfig, synthesize

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
SAME = 1e-5  # another plan, another order of sums
MODELS = {
    # 20 numbers of CLIP in two rows of 16 behind those of the caption
    "hunyuan": """
  dit: {architecture: hunyuan, num_layers: 1, num_single_layers: 1, num_heads: 4, head_dim: 16, ffn_dim: 128}
  text: {kind: hunyuan, max_length: 40, d_model: 16, num_layers: 1, num_heads: 2, pooled_dim: 20}
""",
    # 16 patches of the first frame in 8 and in 4 rows before those of the caption
    "hunyuan-concat": """
  dit:
    {architecture: hunyuan, first_frame: latent_concat, num_layers: 1, num_single_layers: 1, num_heads: 4, head_dim: 16,
     ffn_dim: 128}
  text: {kind: hunyuan_i2v, max_length: 40, d_model: 16, num_layers: 1, num_heads: 2, pooled_dim: 20}
""",
    "hunyuan-replace": """
  dit:
    {architecture: hunyuan, first_frame: token_replace, num_layers: 1, num_single_layers: 1, num_heads: 4, head_dim: 16,
     ffn_dim: 128}
  text: {kind: hunyuan_i2v, max_length: 40, d_model: 16, num_layers: 1, num_heads: 2, pooled_dim: 20}
""",
    "flux": """
  dit: {architecture: flux, num_layers: 1, num_single_layers: 1, num_heads: 4, head_dim: 16, ffn_dim: 256}
  text: {kind: flux, max_length: 40, d_model: 16, num_layers: 1, num_heads: 2, pooled_dim: 20}
""",
    "cogvideox": """
  dit: {architecture: cogvideox, num_layers: 1, num_heads: 4, head_dim: 16, ffn_dim: 256, time_dim: 32, rotary: false}
  text: {max_length: 40, unmasked: 40, pad_to: 40, d_model: 16, num_layers: 1, num_heads: 2}
""",
    "mochi": """
  dit: {architecture: mochi, num_layers: 2, num_heads: 4, head_dim: 16, ffn_dim: 256, context_dim: 32}
  text: {max_length: 40, cleaned: false, empty: none, d_model: 16, num_layers: 1, num_heads: 2}
""",
    "stdit3": """
  dit: {architecture: stdit3, num_layers: 1, num_heads: 4, head_dim: 16, ffn_dim: 256, frame_rate: 8.0, caption_rows: 6}
  text: {max_length: 40, empty: none, d_model: 16, num_layers: 1, num_heads: 2}
""",
    "latte": """
  dit: {architecture: latte, num_layers: 1, num_heads: 4, head_dim: 16, ffn_dim: 256, sample_size: 12}
  text: {max_length: 40, d_model: 16, num_layers: 1, num_heads: 2}
""",
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("families")
    synthesize(made / "data", SynthConfig(clips=16, images=8, shards=2, koala=False))
    return made


def losses(folder: Path, family: str, name: str) -> list[float]:
    """Of the steps of a run on a Ray of its own."""
    file = folder / f"{family}.yaml"
    table = "[1x64x96, 1x32x48]" if family == "flux" else "[1x64x96, 9x64x96]"
    file.write_text(f"""
run: {{name: {name}, dir: {folder}/runs-{family}}}
model:{MODELS[family]}  vae: {{kind: haar, channels: 24}}
data:
  sources: [{{path: "{folder}/data/shards/{{00000..00001}}.tar"}}]
  buckets: {{table: {table}, short_videos: image}}
  batch: {{memory_tokens: 400, text_tokens: 40, max_batch: 3}}
  items_per_step: 4
  caption_dropout: 0.3
  fps: {8.0 if family == "stdit3" else 0.0}
  engine: {{decode_workers: 1, decode_cpus: 0.2}}
  cache: {{path: {folder}/cache-{family}}}
train: {{steps: 4, optimizer: {{learning_rate: 1.0e-3}}}}
workers: {{min: 2, max: 2, cpus_per_worker: 0.5, device: cpu}}
""")
    command = [sys.executable, "-m", "app.train", "--config", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / f"runs-{family}" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("family", MODELS)
def test_a_run_from_the_cache_is_the_same(family: str, clips: Path) -> None:
    first = losses(clips, family, "first")
    assert len(first) == 4 and len(set(first)) == 4
    assert losses(clips, family, "cached") == pytest.approx(first, rel=SAME)
