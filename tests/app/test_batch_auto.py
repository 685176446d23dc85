"""`data.batch: auto` becomes numbers once, in a run's config; `heddle profile --write` puts measured ones there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.planning.options import flop_profile
from app.device.write_limits import edited, flow, write_limits
from app.inputs.batches import is_open, with_limits, with_limits_of
from app.settings.config import RunConfig
from data.config import BatchConfig
from ops.models.folders import resolve
from ops.typed import ConfigError

BASE = """
run: {name: auto}
data:
  sources: [{path: clips.tar}]
  buckets: {table: [1x64x96, 17x64x96, 33x64x96]}
  batch: {text_tokens: 40, max_batch: 7}
"""


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "base.yaml").write_text(BASE)
    (folder / "run.yaml").write_text(f"base: base.yaml\n{text}")
    return RunConfig.load(folder / "run.yaml", overrides)


@pytest.mark.parametrize("text", ["data: {batch: auto}\n", "data: {batch: {auto: true}}\n"])
def test_auto_keeps_what_other_files_say_of_the_batch(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, text).data.batch == BatchConfig(auto=True, text_tokens=40, max_batch=7)
    assert load(tmp_path, "", "data.batch=auto").data.batch.auto


def test_auto_is_resolved_once_and_a_resume_takes_the_numbers_of_the_run(tmp_path: Path) -> None:
    config = load(tmp_path, "data: {batch: auto}\n")
    model, geometry = resolve(config.model)
    found, fit = with_limits(config, model, geometry, flop_profile(model, geometry))
    batch = found.data.batch
    assert fit is not None and batch.compute > 0 and batch.target_s == 0 and batch.max_batch == 7 and not is_open(batch)
    assert with_limits(found, model, geometry, flop_profile(model, geometry, "H100")) == (found, None), "it has them"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(found.to_yaml())
    assert with_limits_of(config, tmp_path / "run") == found, "whatever machine resumes it"
    assert with_limits_of(config, tmp_path / "nowhere") == config


def test_limits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing says how long a batch should take"):
        load(tmp_path, "data: {batch: {recalibrate: on}}\n".replace("on}", "'on'}"))
    with pytest.raises(ConfigError, match="Keep one"):
        load(tmp_path, "data: {batch: {auto: true, from_table: true}}\n")
    config = load(tmp_path, "data: {batch: {auto: true, target_s: 1.0e-9}}\n")
    model, geometry = resolve(config.model)
    with pytest.raises(ConfigError, match="any cascade takes"):
        with_limits(config, model, geometry, flop_profile(model, geometry))


FOUND = BatchConfig(memory_tokens=12345.0, compute=1.5e20, exponent=1.85, auto=True, target_s=3.0, text_tokens=40)


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: a}  # mine\n",
        "run: {name: a}\ndata: {items_per_step: 3}  # mine\n",
        "run: {name: a}\ndata: {batch: {compute: 3}, items_per_step: 3}  # mine\n",
        "run: {name: a}\ndata:\n  # mine\n  items_per_step: 3\n",
        "run: {name: a}\ndata:\n  batch:\n    compute: 3\n    text_tokens: 9\n  # mine\n  items_per_step: 3\n",
        "run: {name: a}\ndata:\n  batch: auto  # mine\n  items_per_step: 3\n",
    ],
)
def test_limits_are_written_into_a_file_as_it_stands(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    write_limits(path, FOUND)
    config = RunConfig.load(path)
    assert config.data.batch == replace(FOUND, auto=False, target_s=0.0)
    assert config.data.items_per_step == (3 if "items_per_step" in text else 4)
    assert "# mine" in path.read_text()


def test_a_file_that_cannot_be_edited_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a}\ndata: &here {batch: &b {compute: 3}}\nplanner: *b\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"Put this into it: data: \{batch: \{memory_tokens"):
        write_limits(path, FOUND)
    assert path.read_text() == before


def test_numbers_are_written_as_yaml_reads_them() -> None:
    assert flow(FOUND) == "{memory_tokens: 12345, compute: 1.5e+20, exponent: 1.85, text_tokens: 40}"
    assert flow(replace(FOUND, compute=2e20)).count("2.0e+20") == 1
    assert edited("", "{}") == "\n\ndata:\n  batch: {}\n"
