"""Ways on from a run, as a person takes them: a new run from its checkpoint, and back within it with other data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.state.checkpoint_files import load
from data.tools.synthetic import SynthConfig, synthesize
from ops.shards import ShardState, cut

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
NO_RATE = 1e-30  # adds less to a weight than its last bit, but for one that is 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two workers, with a checkpoint after each."""
    made = tmp_path_factory.mktemp("branches")
    synthesize(made / "data", SynthConfig(clips=24, images=8, shards=2, koala=False))
    (made / "run.yaml").write_text(f"""
run: {{name: one, dir: {made}/runs}}
model:
  dit: {{num_layers: 2, num_heads: 4, head_dim: 16, ffn_dim: 128, freq_dim: 32}}
  vae: {{kind: haar, channels: 24}}
  text: {{max_length: 64, d_model: 32, num_layers: 1, num_heads: 2}}
data:
  sources: [{{path: "{made}/data/shards/{{00000..00001}}.tar"}}]
  buckets: {{table: [1x64x96, 9x64x96, 17x64x96], short_videos: image}}
  batch: {{memory_tokens: 300, text_tokens: 40, max_batch: 3}}
  items_per_step: 3
  engine: {{decode_workers: 1, decode_cpus: 0.2}}
train: {{steps: 4, optimizer: {{learning_rate: 1.0e-3, ema_decay: 0.9}}}}
workers: {{min: 2, max: 2, cpus_per_worker: 0.5, device: cpu}}
checkpoint: {{every: 2, keep_last: 0}}
track: []
""")
    train(made)
    return made


def train(folder: Path, *more: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "app.train", "--config", str(folder / "run.yaml"), *more]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def state(checkpoint: Path) -> ShardState:
    shards = load(checkpoint)[1]
    return cut(shards, 0, shards[0].total)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def num_items(run: Path, step: int) -> int:
    """Batches of an executed step."""
    plan = json.loads((run / "plans" / f"step-{step}.json").read_text())
    return len({part["item"] for cascade in plan["cascades"] if cascade["step"] == step for part in cascade["parts"]})


def test_a_new_run_goes_on_with_other_data_from_the_very_bits_of_a_checkpoint(folder: Path) -> None:
    """On another number of workers, and with settings that a resume refuses."""
    one = folder / "runs" / "one" / "checkpoints" / "step-3"
    changes = ["run.name=branch", f"train.init_from={folder}/runs/one", "train.steps=1", "train.seed=9"]
    changes += [f"train.optimizer.learning_rate={NO_RATE}", "workers.min=1", "workers.max=1"]
    changes += ["data.caption_dropout=0.4", "data.buckets.table=[1x64x96, 9x64x96]"]
    said = train(folder, *(word for change in changes for word in ("--set", change)))
    assert f"step 0 begins with the weights, moments and EMA of {one}, after 4 steps" in said
    assert f"starting at step 0 (state: new, with what {one} has learned)" in said
    before, after = state(one), state(folder / "runs" / "branch" / "checkpoints" / "step-0")
    assert after.updates == before.updates + 1 == 5
    nonzero = before.arrays["master"] != 0
    assert nonzero.mean() > 0.5 and np.array_equal(after.arrays["master"][nonzero], before.arrays["master"][nonzero])
    np.testing.assert_allclose(after.arrays["master"], before.arrays["master"], rtol=0, atol=100 * NO_RATE)
    decay = 6 / 15  # of the fifth update: (1 + 5) / (10 + 5)
    expected = decay * before.arrays["ema"] + (1 - decay) * before.arrays["master"]
    np.testing.assert_allclose(after.arrays["ema"], expected, rtol=1e-5, atol=1e-7)
    kept = 0.95 * before.arrays["exp_avg_sq"]  # by the second of train.optimizer.betas, beside what the step adds
    assert (after.arrays["exp_avg_sq"] >= 0.999 * kept).all()


def test_a_run_goes_back_and_on_with_another_stage_of_its_curriculum(folder: Path) -> None:
    run = folder / "runs" / "one"
    before = lines(run)
    segments = "data.segments=[{until_step: 2}, {until_step: 0, items_per_step: 2}]"
    said = train(folder, "--resume", "--back-to", "2", "--set", segments)
    assert f"the run goes back to 2 steps: what came later (step-3) lies in {run}/later-than-2-steps" in said
    after = lines(run)
    assert [line["step"] for line in after] == [0, 1, 2, 3] and after[:2] == before[:2]
    assert [bool(line.get("recomputed")) for line in after] == [False, False, True, True]
    assert lines(run / "later-than-2-steps") == before
    assert [num_items(run, step) for step in range(4)] == [3, 3, 2, 2]
    assert (run / "later-than-2-steps" / "checkpoints" / "step-3" / "COMPLETE").is_file()
    assert state(run / "checkpoints" / "step-3").updates == 4
