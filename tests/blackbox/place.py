"""Where runs are tried: a small data set, a run file, Ray's folder, and the command line that starts a run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from data.tools.synthetic import SynthConfig, synthesize

ROOT = Path(__file__).resolve().parents[2]
SHARDS = 3
KEPT = 2  # checkpoint.keep_last
SUSPECT_S = 6.0


class Place:
    """A folder of its own with everything that runs share. `ray` has a short path: sockets lie below it."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.data, self.runs = folder / "data", folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.ray = Path(tempfile.mkdtemp(prefix="bb-"))
        if not self.data.exists():
            small = {"sizes": ((32, 48), (48, 32)), "frames": (5, 9)}
            synthesize(self.data, SynthConfig(clips=36, images=12, shards=SHARDS, koala=False, **small))
        self.config = folder / "run.yaml"
        self.config.write_text(self._yaml(), encoding="utf-8")

    def close(self) -> None:
        shutil.rmtree(self.ray, ignore_errors=True)

    def command(self, name: str, *more: str, settings: dict[str, object] | None = None) -> list[str]:
        """`python -m app.train`, with these settings on top of the run file."""
        given = {"run.name": name, **(settings or {})}
        pairs = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "app.train", "--config", str(self.config), *pairs, *more]

    def environment(self, **more: str) -> dict[str, str]:
        """One thread per process, Ray's files in `ray`; nothing that would lead to another cluster."""
        kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_JOB_ID")}
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_STATE_TRACKING": "0", "HF_HUB_OFFLINE": "1"}
        # other work on the machine must not make Ray end workers of this run
        quiet["RAY_memory_monitor_refresh_ms"] = "0"
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return {**kept, **quiet, **threads, "RAY_TMPDIR": str(self.ray), "RAY_ENABLE_AUTO_CONNECT": "0", **more}

    def shards(self) -> list[Path]:
        return sorted((self.data / "shards").glob("*.tar"))

    def _yaml(self) -> str:
        return f"""\
run: {{name: calm, dir: {self.runs}}}
model:
  dit: {{num_layers: 2, num_heads: 4, head_dim: 8, ffn_dim: 64, freq_dim: 16}}
  vae: {{kind: haar, temporal: 4, spatial: 4, channels: 8}}
  text: {{max_length: 64, d_model: 32, num_layers: 1, num_heads: 2}}
data:
  sources: [{{path: "{self.data}/shards/{{00000..{SHARDS - 1:05d}}}.tar"}}]
  buckets: {{table: [1x32x48, 1x48x32, 5x32x48, 9x48x32], short_videos: image}}
  batch: {{memory_tokens: 300, text_tokens: 40, max_batch: 2}}
  items_per_step: 4
  start_frame: fixed  # what the cache of latents asks for
  engine: {{decode_workers: 1, decode_cpus: 0.1}}
train:
  steps: {self.steps}
  optimizer: {{learning_rate: 1.0e-3, lr_scheduler: cosine, lr_warmup_steps: 5, ema_decay: 0.9}}
snapshot: {{every: 1}}
workers: {{min: 1, max: 2, cpus_per_worker: 0.3, device: cpu, suspect_s: {SUSPECT_S:g}, wait_s: 120}}
planner: {{strategy: cascade, budget_s: 0.02}}
checkpoint: {{every: 7, keep_last: {KEPT}}}
"""
