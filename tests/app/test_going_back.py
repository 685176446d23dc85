"""`heddle train --resume --back-to N` makes an earlier checkpoint the newest, and deletes nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from actors.state.checkpoint_files import begin, latest, step_folder
from app.inputs.checkpoints import earlier_checkpoint, later_folders
from app.records.rundir import RunDir
from app.run import launch
from app.run.going_back import set_aside
from app.settings.run_folder import run_dir
from ops.typed import ConfigError
from tests.app.test_sample import tiny_run, write_checkpoint

METRICS = "".join(f'{{"step": {step}}}\n' for step in range(31))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 31 steps with checkpoints after 10, 20 and 30, samples and plans."""
    monkeypatch.chdir(tmp_path)
    folder = run_dir(tiny_run())
    for step in (9, 19, 29):
        write_checkpoint(folder, tiny_run(), step)
    begin(step_folder(folder / "checkpoints", 30))  # torn
    for name in (
        *("samples/step-9-01.mp4", "samples/step-29-01.mp4", "samples/mine.mp4", "plans/step-7.json"),
        *("lora/step-9/a.safetensors", "lora/step-29/a.safetensors"),
    ):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)
    (folder / "plans" / "step-11.json").touch()
    (folder / "metrics.jsonl").write_text(METRICS)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_came_later_is_moved_aside_and_nothing_is_lost(run: Path) -> None:
    before = contents(run)
    earlier = earlier_checkpoint(tiny_run(), 10, resume=True)
    assert earlier is not None
    said = set_aside(run, earlier)
    assert (
        "goes back to 10 steps: what came later (step-19, step-29, step-30) lies in runs/tiny/later-than-10-steps"
        in said
    )
    assert latest(run / "checkpoints") == run / "checkpoints" / "step-9"
    aside = run / "later-than-10-steps"
    assert latest(aside / "checkpoints") == aside / "checkpoints" / "step-29", "a checkpoint, as it was"
    assert (aside / "metrics.jsonl").read_text() == METRICS
    there = sorted(
        str(path.relative_to(aside)) for name in ("lora", "samples", "plans") for path in (aside / name).iterdir()
    )
    assert there == ["lora/step-29", "plans/step-11.json", "samples/step-29-01.mp4"]
    after = {name.removeprefix("later-than-10-steps/"): data for name, data in contents(run).items()}
    assert after == before


def test_a_move_that_is_cut_short_leaves_the_run_at_this_checkpoint_or_a_later_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = run / "checkpoints" / "step-9"
    rename, moved = Path.rename, []

    def rename_some(path: Path, place: Path) -> Path:
        if len(moved) == 5:
            raise OSError("the machine is gone")
        moved.append(path)
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", rename_some)
    with pytest.raises(OSError, match="gone"):
        set_aside(run, earlier)
    assert latest(run / "checkpoints") == run / "checkpoints" / "step-19"


def test_a_run_that_went_on_where_a_move_was_cut_short_goes_back_and_nothing_is_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `--resume` alone: it has taken the steps again whose files were moved already."""
    earlier, aside = run / "checkpoints" / "step-9", run / "later-than-10-steps"
    rename = Path.rename
    moved: list[str] = []

    def rename_some(path: Path, place: Path) -> Path:
        moved.append(path.name)
        if path.name == "step-19":
            raise OSError("the machine is gone")
        return rename(path, place)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="gone"):
        patched.setattr(Path, "rename", rename_some)
        set_aside(run, earlier)
    assert "step-29" in moved
    write_checkpoint(run, tiny_run(), 29)
    (run / "samples" / "step-29-01.mp4").write_text("again")
    (run / "metrics.jsonl").write_text(again := METRICS.partition('{"step": 20}')[0] + '{"step": 20, "loss": 1}\n')
    before = set(contents(run).values())
    assert "what an earlier start had moved when it was cut short lies in runs/tiny/later-than-10-steps-2" in set_aside(
        run, earlier
    )
    assert latest(run / "checkpoints") == earlier
    assert [(folder / "metrics.jsonl").read_text() for folder in later_folders(run)] == [again, METRICS]
    assert [(folder / "samples" / "step-29-01.mp4").read_text() for folder in later_folders(run)] == [
        "again",
        "samples/step-29-01.mp4",
    ]
    assert latest(aside / "checkpoints") == aside / "checkpoints" / "step-29"
    assert before <= set(contents(run).values())
    assert not list(run.glob(".*.part"))


@pytest.mark.parametrize("name", ["lora", "samples", "plans", "checkpoints"])
def test_what_lies_on_another_file_system_stays_there_and_nothing_is_lost(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = tmp_path / "other"
    (run / name).rename(other)
    (run / name).symlink_to(other)
    earlier_time = other / "later-than-10-steps"  # whose folder in the run lies elsewhere by now
    earlier_time.mkdir()
    (earlier_time / "step-29").write_text("kept")
    rename, ends = Path.rename, [3]

    def on(path: Path) -> bool:
        return path.parent.resolve().is_relative_to(other)

    def within(path: Path, place: Path) -> Path:
        if on(path) != on(place):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        ends[0] -= 1
        if not ends[0]:
            raise OSError("the machine is gone")
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", within)
    (run / "config.yaml").touch()

    def all_files() -> list[tuple[str, bytes]]:
        found = [path for folder in (run, other) for path in folder.rglob("*") if path.is_file()]
        return sorted((path.name, path.read_bytes()) for path in found if path.name != "metrics.jsonl")

    before = all_files()
    with pytest.raises(OSError, match="gone"):
        set_aside(run, run / "checkpoints" / "step-9")
    assert set_aside(run, run / "checkpoints" / "step-9")
    assert latest(run / "checkpoints") == run / "checkpoints" / "step-9"
    aside = run / "later-than-10-steps"
    assert (aside / name).resolve() == other / "later-than-10-steps-2" and not (aside / name).readlink().is_symlink()
    assert latest(aside / "checkpoints") == aside / "checkpoints" / "step-29"
    there = {path.name for part in ("lora", "samples", "plans") for path in (aside / part).iterdir()}
    assert there == {"step-29", "step-11.json", "step-29-01.mp4"}
    assert [path.name for path in RunDir.open(run).samples()] == ["step-9-01.mp4", "mine.mp4"]
    assert (earlier_time / "step-29").read_text() == "kept"
    assert all_files() == before


def test_a_run_goes_back_to_a_checkpoint_once(run: Path) -> None:
    """Or a batch system that starts the same command again would throw it back each time."""
    earlier = earlier_checkpoint(tiny_run(), 20, resume=True)
    assert earlier is not None and set_aside(run, earlier)
    with pytest.raises(ConfigError, match=r"later-than-20-steps exists: the run has gone back to 20 steps before"):
        earlier_checkpoint(tiny_run(), 20, resume=True)
    assert earlier_checkpoint(tiny_run(), 10, resume=True) == run / "checkpoints" / "step-9"


def test_nothing_is_moved_where_nothing_came_later(run: Path) -> None:
    newest = write_checkpoint(run, tiny_run(), 40)
    before = contents(run)
    assert set_aside(run, newest) == "" and contents(run) == before


@pytest.mark.parametrize("inner", [False, True])
def test_a_start_reads_the_checkpoint_once_in_the_process_that_has_the_run(
    run: Path, inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of GB of it, from a shared disk: the outer process looks only whether it is there."""
    (run.parent.parent / "run.yaml").write_text(tiny_run().to_yaml())
    (run / "config.yaml").write_text(tiny_run().to_yaml())
    read: list[Path] = []

    def damage_of(folder: Path) -> str:
        read.append(folder)
        return ""

    def far_enough(*given: object, **more: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.inputs.checkpoints.damage", damage_of)
    monkeypatch.setattr(launch, "is_inner", lambda: inner)
    monkeypatch.setattr(launch, "run_apart", lambda words: 0)
    monkeypatch.setattr(launch, "with_limits_of", far_enough)
    if inner:
        with pytest.raises(KeyboardInterrupt):
            launch.train("run.yaml", resume=True, back_to=10)
        assert read == [run.absolute() / "checkpoints" / "step-9"]
    else:
        assert launch.train("run.yaml", resume=True, back_to=10) == 0 and read == []
        with pytest.raises(ConfigError, match="has no checkpoint after 15 steps"):
            launch.train("run.yaml", resume=True, back_to=15)


def test_what_is_no_resume_or_has_no_such_checkpoint_is_refused(run: Path) -> None:
    assert earlier_checkpoint(tiny_run(), None, resume=False) is None
    with pytest.raises(ConfigError, match=r"--back-to 10 .* give --resume, too"):
        earlier_checkpoint(tiny_run(), 10, resume=False)
    with pytest.raises(ConfigError, match=r"no checkpoint after 15 steps\. There are those after 10 \(step-9\), 20 "):
        earlier_checkpoint(tiny_run(), 15, resume=True)
