"""The profile command measures every bucket and writes what planners read."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from app.device.choice import pick_device
from app.device.profile import run_profile, shapes_of
from app.settings.config import RunConfig
from ops.models.folders import resolve
from ops.typed import ConfigError

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"
TINY = ["data.buckets.table=[1x32x32, 5x32x48]", "data.batch.max_batch=3", "model.dit.num_layers=1"]


def test_every_bucket_is_measured_at_batch_1_and_at_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu")
    profile = read_profile(out)
    expected = {
        (module, batch, frames, 32, width, 1)
        for module in ("text", "vae", "dit")
        for frames, width in ((1, 32), (5, 48))
        for batch in (1, 3)
    }
    assert set(profile.measured) == expected
    assert all(seconds > 0 for seconds in profile.measured.values())
    assert profile.legal_degrees("dit", 3, 5, 32, 48, text_tokens=56) == (1, 2, 4)
    assert "dit      5f 32x48  b3" in capsys.readouterr().out


def test_a_transformer_that_is_told_a_vector_of_the_text_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    settings = ["data.buckets.table=[1x32x32]", "data.batch.max_batch=1"]
    run_profile(DEMO.with_name("flux-tiny.yaml"), settings, out, repeats=1, device="cpu")
    assert read_profile(out).measured["dit", 1, 1, 32, 32, 1] > 0


def test_segments_add_their_own_buckets() -> None:
    segments = "data.segments=[{until_step: 5}, {until_step: 0, buckets: {table: [9x32x32]}}]"
    config = RunConfig.load(DEMO, [*TINY, segments])
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    assert {shape.bucket.frames for shape in shapes_of(config, geometry, profile)} == {1, 5, 9}


def test_attention_that_the_device_lacks_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    wanted = [*TINY, "model.dit.attention=flash", "train.autocast=bfloat16"]
    with pytest.raises(ValueError, match=r"model.dit.attention flash cannot be used here: .* needs a CUDA device"):
        run_profile(DEMO, [*wanted, "workers.device=auto"], tmp_path / "p.json", repeats=1, device="cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="no usable CUDA device"):
        pick_device("cuda")
