"""A key of a folder that a later Heddle has written names both versions, and a misspelt key is a misspelling."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path

import pytest

from app.inputs.checkpoints import run_config
from app.settings import written_by
from app.settings.config import RunConfig
from app.settings.written_by import VERSION
from ops.typed import ConfigError

ROOT = Path(__file__).parent.parent.parent


def text_of(version: str) -> str:
    """A config that this version has written, with a key that is not known here."""
    text = RunConfig.load(ROOT / "configs/runs/demo.yaml").to_yaml().replace(VERSION, version)
    return text.replace("\nworkers:\n", "\nworkers:\n  lanes: 3\n")


def test_an_unknown_key_of_another_process_keeps_its_sentence() -> None:
    with pytest.raises(ConfigError, match=r"workers\.lanes") as refused:
        RunConfig.from_yaml(text_of(VERSION))
    sent = pickle.loads(pickle.dumps(refused.value))
    assert type(sent) is type(refused.value) and str(sent) == str(refused.value)


def test_the_version_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


@pytest.mark.parametrize("version", ["0.3.0", "0.2.1", "0.10", "1.0.0"])
def test_a_key_of_a_later_version_names_both_versions(tmp_path: Path, version: str) -> None:
    text = text_of(version)
    told = rf"workers\.lanes.* is no setting of this Heddle, {VERSION}; the file was written by Heddle {version}\. Use"
    with pytest.raises(ConfigError, match=told):
        RunConfig.from_yaml(text)
    with pytest.raises(ConfigError, match=told):
        run_config({"config": text}, tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        RunConfig.load(tmp_path / "config.yaml")


@pytest.mark.parametrize("version", [VERSION, "0.1.0"])
def test_a_key_in_a_file_of_this_version_or_an_earlier_one_is_a_misspelling(version: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown key workers\.lanes"):
        RunConfig.from_yaml(text_of(version))


def test_between_two_versions_the_commit_tells_which_wrote_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_by, "_commit", lambda: "aaaaaaaaaa")
    text = text_of(VERSION)
    assert text.startswith(f"# Written by Heddle {VERSION}, commit aaaaaaaaaa.\n")
    with pytest.raises(ConfigError, match=r"unknown key workers\.lanes") as refused:
        RunConfig.from_yaml(text)
    assert "commit" not in str(refused.value)
    told = rf"unknown key workers\.lanes.* by Heddle {VERSION} at commit aaaaaaaaaa, and this one is at bbbbbbbbbb"
    monkeypatch.setattr(written_by, "_commit", lambda: "bbbbbbbbbb")
    with pytest.raises(ConfigError, match=told):
        RunConfig.from_yaml(text)
    monkeypatch.setattr(written_by, "_commit", lambda: "")  # installed from a wheel
    assert text_of(VERSION).startswith(f"# Written by Heddle {VERSION}.\n")
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_yaml(text)
    assert "commit" not in str(refused.value)


def test_a_key_that_was_typed_is_a_misspelling_whoever_wrote_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text_of("9.0").replace("  lanes: 3\n", ""))
    with pytest.raises(ConfigError, match=r"unknown key workers\.maxx .*did you mean workers\.max\?"):
        RunConfig.load(tmp_path / "config.yaml", ["workers.maxx=3"])
