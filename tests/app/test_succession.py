"""A controller that Ray Train has given up lets go of the folder when the next one asks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from actors.outcome import Exit, Outcome
from app.run.controller_process import ControllerStart, controller_loop
from app.run.succession import Succession
from app.settings.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "runs" / "demo.yaml"
LONG_S = 60.0


def start_of(folder: Path, token: str) -> ControllerStart:
    return ControllerStart(
        yaml=RunConfig.load(DEMO).to_yaml(), run_dir=str(folder), token=token, changes=[], cluster=None
    )


@contextmanager
def controller_that_hangs(folder: Path, token: str) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(f"""
        import time
        from pathlib import Path
        import actors.run.assemble
        from app.run.controller_process import controller_loop
        from tests.app.test_succession import start_of

        def hang(*given, **named):
            print("holds", flush=True)
            time.sleep(600)

        actors.run.assemble.start_controller = hang
        controller_loop(start_of(Path({str(folder)!r}), {token!r}))
    """)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.wait()


class DoneController:
    """A controller whose run is over."""

    left = ""

    def train(self) -> Outcome:
        return Outcome(code=0, reason="done", last_step=4)


def test_the_next_controller_of_the_same_start_need_not_wait_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr("actors.run.assemble.start_controller", lambda *given, **named: DoneController())
    with controller_that_hangs(folder, "ours") as hanging:
        ended = controller_loop(start_of(folder, "ours"))
        assert ended is not None and ended["reason"] == "done"
        assert hanging.wait(LONG_S) == Exit.FAILURE
    assert [one.name for one in tmp_path.iterdir()] == ["run"], "nothing is left beside the folder"


def heard(succession: Succession) -> threading.Event:
    ended = threading.Event()
    succession.heed(ended.set, look_s=0.01)
    return ended


def asked_from_elsewhere(folder: Path, token: str, pid: int) -> None:
    (folder.parent / f".{folder.name}.successor").write_text(f'{{"token": "{token}", "host": "b", "pid": {pid}}}')


def test_another_start_of_the_run_is_not_heeded(tmp_path: Path) -> None:
    """It waits for the folder, and is refused where this one lives."""
    with closing(Succession(tmp_path / "run", "ours")) as succession:
        ended = heard(succession)
        asked_from_elsewhere(tmp_path / "run", "theirs", 1)
        time.sleep(0.2)
        assert not ended.is_set()
        asked_from_elsewhere(tmp_path / "run", "ours", 1)
        assert ended.wait(LONG_S)


def test_what_was_asked_before_this_controller_began_is_not_meant_for_it(tmp_path: Path) -> None:
    """Also where the one that asked was killed before it had the folder."""
    asked_from_elsewhere(tmp_path / "run", "ours", 1)
    with closing(Succession(tmp_path / "run", "ours")) as succession:
        succession.ask()
        ended = heard(succession)
        time.sleep(0.2)
        assert not ended.is_set()


def test_one_that_was_given_up_while_it_waited_ends_for_the_one_after_it(tmp_path: Path) -> None:
    """Three of them: the first holds the folder, the second asks and its host is cut off too, the third asks once."""
    with closing(Succession(tmp_path / "run", "ours")) as second:
        second.ask()
        asked_from_elsewhere(tmp_path / "run", "ours", 3)
        assert heard(second).wait(LONG_S)


def test_a_torn_file_asks_nothing(tmp_path: Path) -> None:
    with closing(Succession(tmp_path / "run", "ours")) as succession:
        ended = heard(succession)
        (tmp_path / ".run.successor").write_text('{"token": "ours"')
        time.sleep(0.2)
        assert not ended.is_set()
        asked_from_elsewhere(tmp_path / "run", "ours", 1)
        assert ended.wait(LONG_S)
