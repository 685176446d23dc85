"""`heddle families`: sizes as published, usual degrees, one sentence for a file without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.plan.families import PRESETS, print_families, size_of
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError
from tests.families.registry import CASES

# thousand millions of weights, counted with Diffusers' own classes on the meta device, or by the shapes of layers
PUBLISHED = {name: size for cases in CASES.values() for name, size in cases.presets.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    size = size_of(PRESETS / f"{name}.yaml")
    assert size.weights / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    if size.dit.spatial_temporal:  # no heads are dealt out
        assert size.degrees == "any" and size.dit.degrees(3) == (1, 2, 3)
        return
    degrees = list(map(int, size.degrees.split()))
    assert {1, size.dit.num_heads} <= set(degrees) and degrees[-1] == size.dit.num_heads


def test_every_family_and_every_preset_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    print_families([PRESETS / "tiny.yaml", PRESETS / "wan2.1-1.3b.yaml"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(FAMILIES)]] == list(FAMILIES)
    (row,) = [line for line in lines if line.startswith("wan2.1-1.3b")]
    assert " ".join(row.split()) == "wan2.1-1.3b wan 30 12 1536 1.42 B 2.6 GiB 21.1 GiB 1 2 3 4 6 8 12"
    tiny = {file.stem for file in PRESETS.glob("*tiny.yaml")}  # no model that was published
    assert set(PUBLISHED) == {file.stem for file in PRESETS.glob("*.yaml")} - tiny


def test_the_config_of_a_run_has_the_size_of_its_folder_and_the_state_of_what_it_trains(tmp_path: Path) -> None:
    size = size_of(PRESETS.parent / "runs" / "wan2.1-14b-lora-80gb.yaml")
    assert size.weights / 1e9 == pytest.approx(PUBLISHED["wan2.1-14b"], rel=0.01) and size.trained < size.weights / 50
    assert size.cells()[5:8] == ("14.29 B", "26.6 GiB", "1.1 GiB")
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(dit_json(WanConfig(num_layers=3, text_dim=64))))
    (tmp_path / "run.yaml").write_text(
        f"model: {{dit: {{path: {tmp_path}}}, vae: {{channels: 16}}, text: {{d_model: 64}}}}"
    )
    assert size_of(tmp_path / "run.yaml").dit.block_counts == (3,)


def test_a_file_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 3}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml has no section model"):
        size_of(tmp_path / "a.yaml")
