"""Commands take a run's checkpoint by the number of steps that have made it, and say which there are."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.outcome import Exit
from actors.state.checkpoint_files import LaterFormat, is_complete, seal, trained_parameters
from app.cli import app
from app.inputs.checkpoints import check_same_weights, checkpoint_folder, steps_begun
from app.plan.dry_run import dry_run
from app.sampling.model import saved_model
from app.sampling.sample import default_out
from app.settings.errors import exit_code, one_line
from app.settings.resume import check_resume
from app.settings.sections import RunSection
from app.settings.written_by import VERSION
from ops.models.folders import resolve
from ops.typed import ConfigError
from tests.app.test_sample import tiny_run, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints after 250, 500 and 750 steps."""
    for steps in (250, 500, 750):
        write_checkpoint(tmp_path / "one", tiny_run(), steps - 1)
    return tmp_path / "one"


def test_the_checkpoint_after_as_many_steps_is_meant(run: Path) -> None:
    for given in (run, run / "checkpoints"):
        assert checkpoint_folder(given, 250) == run / "checkpoints" / "step-249"
        assert checkpoint_folder(given) == run / "checkpoints" / "step-749"


def test_those_that_there_are_are_named(run: Path) -> None:
    there = r"There are those after 250 \(step-249\), 500 \(step-499\), 750 \(step-749\) steps\."
    with pytest.raises(ConfigError, match=rf"one has no checkpoint after 300 steps\. {there}"):
        checkpoint_folder(run, 300)
    with pytest.raises(ConfigError, match=rf"step-250 does not exist\. {there}"):
        checkpoint_folder(run / "checkpoints" / "step-250")


def test_of_many_the_newest_are_named(tmp_path: Path) -> None:
    for step in range(14):
        write_checkpoint(tmp_path, tiny_run(), step)
    with pytest.raises(
        ConfigError, match=r"There are older ones, and those after 3 \(step-2\), 4 .*14 \(step-13\) steps"
    ):
        checkpoint_folder(tmp_path, 100)


def test_a_run_that_has_none_and_a_checkpoint_that_is_one_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no checkpoint after 1 step\. There is none\."):
        checkpoint_folder(tmp_path / "empty", 1)
    with pytest.raises(ConfigError, match=r"step-249 is one checkpoint, after 250 steps: give its run"):
        checkpoint_folder(run / "checkpoints" / "step-249", 500)


def test_a_damaged_one_is_not_taken(run: Path) -> None:
    shard = next((run / "checkpoints" / "step-499").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match=r"step-499 is damaged: .*There are those after 250 .*, 750 "):
        checkpoint_folder(run, 500)


def test_one_of_a_later_version_ends_each_command_with_a_sentence(run: Path) -> None:
    """`export` made an older one, and `train --resume` went on from there and removed this one at its step."""
    newest = run / "checkpoints" / "step-749"
    marker = newest / "COMPLETE"
    marker.write_text(json.dumps({**json.loads(marker.read_bytes()), "format": [2, 2]}))
    for command in ("export --to out", "sample --out clips"):
        for checkpoint in (run, newest):
            ended = CliRunner().invoke(app, [*command.split(), "--checkpoint", str(checkpoint)])
            assert isinstance(ended.exception, LaterFormat) and exit_code(ended.exception) == Exit.USAGE
            assert "step-749 was written by a later version" in one_line(ended.exception)
    resumed = replace(tiny_run(), run=RunSection(name="one", dir=str(run.parent)))
    with pytest.raises(LaterFormat, match="step-749 was written by a later version"):
        check_resume(resumed)
    assert steps_begun(resumed) == 750 and checkpoint_folder(run, 500).name == "step-499"
    assert not check_resume(resumed, checkpoint=run / "checkpoints" / "step-499"), "a run may go back"


def test_a_resume_under_which_the_model_lists_its_weights_otherwise_is_refused(run: Path) -> None:
    """Their sum was all that was compared: each weight was read in the place of another of as many numbers."""
    resumed = replace(tiny_run(), run=RunSection(name="one", dir=str(run.parent)))
    check_same_weights(resumed)
    newest = run / "checkpoints" / "step-749"
    meta = json.loads((newest / "meta.json").read_bytes())

    def has(listed: list[Any] | None) -> None:
        seal(newest, {**meta, "parameters": listed})

    whole = meta["parameters"]
    last, first = whole[-1]["name"], whole[0]["name"]
    has(whole[::-1])
    with pytest.raises(ConfigError, match=f"step-749 .*{last} lies there, {first} lies here.*Heddle {VERSION} "):
        check_same_weights(resumed)
    check_same_weights(resumed, run / "checkpoints" / "step-499")
    has(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{last} is missing there and \["):
        check_same_weights(resumed)
    lora = replace(resumed, model=replace(resumed.model, dit=replace(resumed.model.dit, lora_rank=2)))
    has(whole)
    with pytest.raises(ConfigError, match=r"lora.* is missing there and \["):
        check_same_weights(lora)
    has(trained_parameters(resolve(lora.model)[0]))  # type: ignore[arg-type]
    check_same_weights(lora)
    has(None)
    check_same_weights(resumed)


def test_a_dry_run_refuses_a_resume_under_which_the_model_lists_its_weights_otherwise(run: Path) -> None:
    """It passed what the start then refused."""
    newest = run / "checkpoints" / "step-749"
    meta = json.loads((newest / "meta.json").read_bytes())
    seal(newest, {**meta, "parameters": meta["parameters"][::-1]})
    (run / "config.yaml").write_text(tiny_run().to_yaml())
    with pytest.raises(ConfigError, match=r"step-749 .* lies there, .* lies here"):
        dry_run(run / "config.yaml", ["run.name=one", f"run.dir={run.parent}"], resume=True)


def test_a_resume_asks_the_checkpoint_before_one_whose_meta_json_has_changed(run: Path) -> None:
    """One bit, and it is JSON all the same: the start ended with code 2, or with a traceback."""
    resumed = replace(tiny_run(), run=RunSection(name="one", dir=str(run.parent)))
    other = replace(resumed, train=replace(resumed.train, seed=resumed.train.seed + 1))
    newest = run / "checkpoints" / "step-749" / "meta.json"
    name = json.loads(text := newest.read_bytes())["parameters"][0]["name"].encode()
    for was, becomes in ((name, bytes([name[0] ^ 1]) + name[1:]), (b'"shape"', b'"shapd"'), (b"seed: 0", b"seed: 1")):
        assert was in text
        newest.write_bytes(text.replace(was, becomes, 1))
        assert json.loads(newest.read_bytes()) and is_complete(newest.parent)
        check_same_weights(resumed)
        assert not check_resume(resumed)
        with pytest.raises(ConfigError, match="something else than the checkpoint after 500 steps"):
            check_resume(other)
    before = run / "checkpoints" / "step-499"
    seal(before, {**json.loads(text), "step": 499, "parameters": json.loads(text)["parameters"][:-1]})
    with pytest.raises(ConfigError, match=r"step-499 .* is missing there"):
        check_same_weights(resumed)


def keep_from_us(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A checkpoint that another user's run has written."""
    opened = open

    def given(name: Any, *more: Any, **named: Any) -> Any:
        if isinstance(name, str | Path) and Path(name).parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, *more, **named)

    monkeypatch.setattr("builtins.open", given)
    monkeypatch.setattr("io.open", given)


def test_a_checkpoint_that_may_not_be_read_hides_no_answer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_from_us(monkeypatch, run / "checkpoints" / "step-749")
    there = r"There are those after 250 \(step-249\), 500 \(step-499\) steps\."
    with pytest.raises(ConfigError, match=rf"one has no checkpoint after 300 steps\. {there}"):
        checkpoint_folder(run, 300)
    with pytest.raises(ConfigError, match=rf"step-250 does not exist\. {there}"):
        checkpoint_folder(run / "checkpoints" / "step-250")
    assert checkpoint_folder(run, 500).name == "step-499"
    refused = (
        rf"one.* cannot be read: .*step-749/COMPLETE.*Have it readable, or name another one by its folder\. {there}"
    )
    for given in (run, run / "checkpoints", run / "checkpoints" / "step-749"):
        with pytest.raises(ConfigError, match=refused):
            checkpoint_folder(given)


def test_steps_of_a_run_whose_storage_does_not_answer_are_those_that_are_known(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume waits for such a checkpoint, or goes on from another; asking for its step must not end it."""
    config = replace(tiny_run(), run=RunSection(name=run.name, dir=str(run.parent)))
    assert steps_begun(config) == 750

    def stale(folder: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(folder))

    for module in ("actors.state.checkpoint_files", "app.inputs.checkpoints"):
        monkeypatch.setattr(f"{module}.is_complete", stale)
    (run / "metrics.jsonl").write_text('{"step": 811, "generation": 3}\n')
    assert steps_begun(config) == 812
    with pytest.raises(OSError, match="Stale file handle"):
        checkpoint_folder(run)


def test_where_checkpoints_may_not_be_listed_it_is_said_what_to_do(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def given(folder: Path) -> list[str]:
        if Path(folder) == run / "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr("os.listdir", given)
    with pytest.raises(ConfigError, match=r"cannot be read: .*Permission denied.*Have it readable, or name another"):
        checkpoint_folder(run)


def said(*words: str) -> str:
    return " ".join(CliRunner().invoke(app, words).stderr.split())


@pytest.mark.parametrize(
    ("command", "body"),
    [
        ("sample --out clips", "app.sampling.sample.run"),
        ("export --to out", "app.export.export.run"),
        ("validate", "app.validation.checkpoint.validate"),
    ],
)
def test_each_command_hands_on_what_is_meant(
    run: Path, command: str, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant: list[Path] = []
    monkeypatch.setattr(body, lambda checkpoint, *rest, **named: meant.append(checkpoint))
    given = [*command.split(), "--checkpoint", str(run)]
    assert not said(*given, "--after", "500") and not said(*given)
    assert meant == [run / "checkpoints" / "step-499", run]


def test_samples_of_it_are_named_after_it(run: Path) -> None:
    assert default_out(checkpoint_folder(run, 250)) == run / "samples" / "step-249.mp4"
    assert saved_model(checkpoint_folder(run, 250)).step == 249


def test_a_published_folder_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").touch()
    assert "--after is of a run" in said("sample", "--from", str(tmp_path), "--after", "5")
