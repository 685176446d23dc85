import dataclasses
import importlib.metadata
import io
import json
import os
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from actors.outcome import Outcome
from actors.records.events import (
    CheckpointFailed,
    CheckpointWritten,
    HeldOutMeasured,
    RunEvent,
    SamplesMade,
    TrackerQuiet,
    WorkerReady,
)
from actors.records.metrics_line import StepMetrics
from app.plan.dry_run import dry_run
from app.records.metrics import TAGS, Metrics, held_out_scalars, scalars
from app.records.ray_gauges import EVENT_TIME, RayTracker, gauge_of
from app.records.rundir import RunDir
from app.records.tracker import SampleFiles
from app.records.trackers import TRACKERS, MlflowTracker, Trackers, WandbTracker
from app.run.recorder import Recorder
from app.run.tracker_environment import in_environment, tracker_environment
from app.sampling.clips import write_clips
from app.settings.config import RunConfig
from app.settings.packages import check_installed
from ops.typed import ConfigError
from tests.app.test_copies import full_disk
from tests.app.test_metrics import line
from tests.rays import local_ray

ROOT = Path(__file__).parents[2]
HELD_OUT = HeldOutMeasured(step=4, loss=1.0, clips=1, unread=0, by_bucket={}, by_noise={}, seconds=1.0)
RUN = "run: {name: tracked}\ndata: {sources: [{path: clips.tar}]}\n"


class Spy:
    """A tracker that remembers, and fails where it is made to."""

    made: list["Spy"] = []  # noqa: RUF012
    fails_at = ""
    quiet = ""

    def __init__(self, folder: Path, config) -> None:
        if self.fails_at == "open":
            raise OSError("no route to host")
        self.said: list[tuple] = [("open", folder.name, config.get("seed"))]
        Spy.made.append(self)

    def log(self, step: int, time: float, scalars) -> None:
        if self.fails_at == "log":
            raise RuntimeError("503")
        self.said.append((step, dict(scalars)["train/loss"]))

    def show(self, step: int, time: float, samples) -> None:
        if self.fails_at == "show":
            raise RuntimeError("413")
        self.said.append((step, samples.prompts, [file.name for file in samples.clips], samples.sheet.name))

    def alert(self, event: RunEvent) -> None:
        if self.fails_at == "alert":
            raise RuntimeError("429")
        self.said.append(("alert", event.event))

    def forget(self, step: int) -> None:
        self.said.append(("forget", step))

    def end(self, code: int) -> None:
        self.said.append(("end", code))

    def close(self) -> None:
        self.said.append(("close",))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> type[Spy]:
    monkeypatch.setitem(TRACKERS, "wandb", Spy)
    monkeypatch.setattr(Spy, "made", [])
    monkeypatch.setattr(Spy, "fails_at", "")
    return Spy


def test_a_tracker_hears_of_every_step_and_of_those_that_come_again(spy: type[Spy], tmp_path: Path) -> None:
    with Metrics(tmp_path, track=["wandb"], config={"seed": 7}) as metrics:
        for step, loss in ((0, 3.0), (1, 2.0), (2, 1.0), (1, 2.5)):
            metrics.step(line(step, loss=loss))
    (heard,) = spy.made
    assert heard.said == [
        ("open", tmp_path.name, 7), (0, 3.0), (1, 2.0), (2, 1.0), ("forget", 1), (1, 2.5), ("close",)
    ]  # fmt: skip


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_tracker_hears_how_the_run_has_ended(spy: type[Spy], tmp_path: Path, code: int) -> None:
    with Recorder(tmp_path, config=RunConfig.from_yaml(f"{RUN}track: [wandb]\n")) as recorder:
        recorder.ended(Outcome(code=code, reason="GPUs are gone", last_step=3))
    assert spy.made[0].said[-2:] == [("end", code), ("close",)]
    assert (("alert", "fail") in spy.made[0].said) == (code == 1) == (tmp_path / "events.jsonl").exists()


def test_a_controller_that_is_lost_has_not_finished(spy: type[Spy], tmp_path: Path) -> None:
    config = RunConfig.from_yaml(f"{RUN}track: [wandb]\n")
    with suppress(RuntimeError), Recorder(tmp_path, config=config):
        raise RuntimeError("Ray does not answer")
    assert spy.made[0].said[-2:] == [("end", 1), ("close",)]


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (1, "FAILED"), (4, "FAILED"), (75, "KILLED")])
def test_mlflow_shows_how_a_run_has_ended(monkeypatch: pytest.MonkeyPatch, code: int, status: str) -> None:
    tracker, said = object.__new__(MlflowTracker), []
    tracker._run = "a run"
    tracker._client = SimpleNamespace(set_terminated=lambda run, status: said.append((run, status)))  # type: ignore[assignment]
    tracker.end(code)
    tracker.close()
    assert said == [("a run", status)]


@pytest.mark.parametrize(("code", "said"), [(0, [0]), (1, [1]), (75, ["preempting", 75])])
def test_wandb_shows_how_a_run_has_ended(code: int, said: list[object]) -> None:
    heard: list[object] = []
    tracker = object.__new__(WandbTracker)
    tracker._run = SimpleNamespace(
        finish=lambda exit_code: heard.append(exit_code), mark_preempting=lambda: heard.append("preempting")
    )
    tracker.end(code)
    tracker.close()
    assert heard == said


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_whose_id_a_full_disk_has_cut_off_gets_one_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    taken: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None: ...

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment: str, **described: object) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id="made"))

        def get_run(self, run: str) -> SimpleNamespace:
            return SimpleNamespace(data=SimpleNamespace(params={}))

        def log_batch(self, run: str, **settings: object) -> None: ...

        def update_run(self, run: str, status: str) -> None:
            taken.append(run)

    def init(id: str, **given: object) -> SimpleNamespace:
        taken.append(id)
        return SimpleNamespace(define_metric=lambda *given, **more: None)

    page = SimpleNamespace(init=init, api=SimpleNamespace(api_key="key"), Settings=lambda **given: None)
    monkeypatch.setitem(sys.modules, "wandb", page)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Param=lambda *given: None))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    for variable in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(variable, "1")  # the tracker sets them: they are put back
    (tmp_path / f"{name}.id").touch()  # as by a version that wrote it in place
    with monkeypatch.context() as patched:
        for method in ("write_text", "write_bytes"):
            patched.setattr(Path, method, full_disk)
        with pytest.raises(OSError, match="No space left"):
            TRACKERS[name](tmp_path, {})
    for _ in range(2):
        TRACKERS[name](tmp_path, {})
    (own,) = set(taken)
    assert own and own == (tmp_path / f"{name}.id").read_text()


def test_mlflow_makes_one_run_and_has_all_settings_whatever_fails_at_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params: dict[str, dict[str, str]] = {}  # by run
    fails = [3]  # calls until the server does not answer once

    class Client:
        def __init__(self, tracking_uri: str) -> None: ...

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment: str, **described: object) -> SimpleNamespace:
            params[run := f"made-{len(params)}"] = {}
            return SimpleNamespace(info=SimpleNamespace(run_id=run))

        def get_run(self, run: str) -> SimpleNamespace:
            return SimpleNamespace(data=SimpleNamespace(params=params[run]))

        def log_batch(self, run: str, params: Sequence[tuple[str, str]]) -> None:
            fails[0] -= 1
            if not fails[0]:
                raise OSError("504")
            assert not {key for key, _ in params} & self.get_run(run).data.params.keys(), "it takes a setting once"
            self.get_run(run).data.params.update(params)

        def update_run(self, run: str, status: str) -> None: ...

    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Param=lambda *given: given))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    for variable in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(variable, "1")  # the tracker sets them: they are put back
    settings = {f"n{number}": number for number in range(250)}
    with monkeypatch.context() as patched:
        for method in ("write_text", "write_bytes"):
            patched.setattr(Path, method, full_disk)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                TRACKERS["mlflow"](tmp_path, settings)
    with pytest.raises(OSError, match="504"):
        TRACKERS["mlflow"](tmp_path, settings)
    for _ in range(2):
        TRACKERS["mlflow"](tmp_path, settings)
    assert params == {"made-0": {key: str(value) for key, value in settings.items()}}


def test_gauges_say_how_far_the_run_and_its_checkpoints_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A continued run, whose earlier checkpoints this process has not written, begins with the newest of them."""
    shown: dict[str, float] = {}

    class Gauge:
        def __init__(self, name: str, **described: object) -> None:
            self.name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            shown[self.name] = value

    def wait_for(name: str) -> None:
        until = time.monotonic() + 30
        while name not in shown and time.monotonic() < until:
            time.sleep(0.01)

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    monkeypatch.setitem(TRACKERS, "ray", partial(RayTracker, repeat_s=0.01))
    config = {"train": {"steps": 500}, "checkpoint": {"every": 10}}
    with Metrics(tmp_path, track=["ray"], config=config) as metrics:
        wait_for("heddle_checkpoint_every")
        assert shown == {"heddle_run_steps": 500, "heddle_checkpoint_every": 10}, "before the first step"
        metrics.step(line(20))
        wait_for("heddle_checkpoint_step")
        assert shown["heddle_step"] == 20 and shown["heddle_checkpoint_step"] == 19
        metrics.step(line(29))
        metrics.event(CheckpointWritten(time=1.0, step=29, folder="step-30"))
        metrics.step(line(30))
        assert shown["heddle_step"] == 30 and shown["heddle_checkpoint_step"] == 29


def test_a_run_that_goes_on_shows_its_last_step_from_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HeddleNoFirstStep called for a finished run that was started again: its steps were of days ago."""
    shown: list[tuple[str, float]] = []

    class Gauge:
        def __init__(self, name: str, **described: object) -> None:
            self.name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            shown.append((self.name, value))

    with Metrics(tmp_path, track=[]) as metrics:
        metrics.step(line(498))
        metrics.step(line(499))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    monkeypatch.setitem(TRACKERS, "ray", partial(RayTracker, repeat_s=0.01))
    with Metrics(tmp_path, track=["ray"], config={"train": {"steps": 500}}) as metrics:
        until = time.monotonic() + 30
        while shown.count(("heddle_run_steps", 500)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert set(shown) == {("heddle_run_steps", 500), ("heddle_step", 499)}
        metrics.step(line(450))
        assert ("heddle_step", 450) in shown, "it is computed again"


def made_samples(run: Path) -> SamplesMade:
    """Samples of a live run, in its folder."""
    prompts = ["a red circle", "a blue square"]
    videos = [np.full((5, 32, 48, 3), value, np.uint8) for value in (40, 200)]
    files = write_clips(run / "samples" / "step-4.mp4", enumerate(videos), prompts, 8.0)
    return SamplesMade(time=1.7e9, step=4, samples=tuple(str(f.relative_to(run)) for f in files), seconds=2.0)


def test_a_tracker_gets_the_samples_of_a_live_run(spy: type[Spy], tmp_path: Path) -> None:
    made = made_samples(tmp_path)
    with Recorder(tmp_path, config=RunConfig.from_yaml(f"{RUN}track: [wandb]\n")) as recorder:
        recorder.on_event(made)
        (tmp_path / "samples" / "step-4.json").unlink()
        recorder.on_event(made)
    shown = [said for said in spy.made[0].said if len(said) == 4]
    assert shown == [(4, ("a red circle", "a blue square"), ["step-4-00.mp4", "step-4-01.mp4"], "step-4.png")], (
        "once: the second time a file was gone, and the run went on"
    )


def test_tensorboard_shows_the_sheet(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path, track=["tensorboard"]) as metrics:
        metrics.samples(made_samples(tmp_path))
    curves = EventAccumulator(str(tmp_path / "events"), size_guidance={"images": 0})
    curves.Reload()
    (shown,) = curves.Images("samples")
    with (
        Image.open(io.BytesIO(shown.encoded_image_string)) as one,
        Image.open(tmp_path / "samples/step-4.png") as other,
    ):
        assert shown.step == 4 and np.array_equal(np.asarray(one), np.asarray(other.convert("RGB")))


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_when_its_folder_is_back(tmp_path: Path) -> None:
    """Its thread ends with the first write that fails, as on a full disk."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, away = tmp_path / "events", tmp_path / "away"
    tracker = TRACKERS["tensorboard"](tmp_path, {})
    tracker.log(0, 0.0, [("loss", 1.0)])
    while "loss" not in EventAccumulator(str(events)).Reload().Tags()["scalars"]:
        time.sleep(0.1)
    events.rename(away)
    with pytest.raises(OSError):
        while True:
            tracker.log(1, 1.0, [("loss", 1.0)])
            time.sleep(0.05)
    away.rename(events)
    tracker.log(2, 2.0, [("loss", 1.0)])
    tracker.close()
    assert [one.step for one in EventAccumulator(str(events)).Reload().Scalars("loss")] == [0, 2]


def test_a_tracker_hears_of_events_at_which_somebody_should_look(spy: type[Spy], tmp_path: Path) -> None:
    with Recorder(tmp_path, config=RunConfig.from_yaml(f"{RUN}track: [wandb]\n")) as recorder:
        recorder.on_event(WorkerReady(worker="w0", node="n", pid=1, host="a"))
        recorder.on_event(CheckpointFailed(step=4, why="no space left on device"))
    assert [said for said in spy.made[0].said if said[0] == "alert"] == [("alert", "checkpoint_failed")]


@pytest.mark.parametrize("where", ["open", "log", "show", "alert"])
def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    where: str, spy: type[Spy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spy, "fails_at", where)
    with Metrics(tmp_path, track=["wandb", "tensorboard"]) as metrics:
        for step in range(3):
            metrics.step(line(step))
        metrics.samples(made_samples(tmp_path))
        metrics.event(CheckpointFailed(step=2, why=""))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert list((tmp_path / "events").iterdir()), "the other tracker got nothing"
    assert [record.message for record in caplog.records if "wandb gets nothing of this run for 60 s" in record.message]
    assert len([record for record in caplog.records if "gets nothing" in record.message]) == 1


@pytest.mark.parametrize("where", ["open", "log"])
def test_a_tracker_whose_service_is_back_goes_on_with_the_run(
    where: str, spy: type[Spy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A month of a run sees its tracking server started anew; the alerts of that month are to reach somebody."""
    now = time.monotonic()
    monkeypatch.setattr(spy, "fails_at", where)
    with Metrics(tmp_path, track=["wandb"], config={"seed": 7}) as metrics:
        for step, later in enumerate((0, 59, 61, 120, 180, 182)):  # it fails at 0, 61 and 182 s
            monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
            metrics.step(line(step, loss=1.0))
        monkeypatch.setattr(spy, "fails_at", "")
        for step, later in ((6, 423), (7, 424)):  # after four minutes more
            monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
            metrics.step(line(step, loss=1.0))
    (heard,) = spy.made
    assert heard.said == [("open", tmp_path.name, 7), (6, 1.0), (7, 1.0), ("close",)]
    waits = re.findall(r"for (\d+) s", "\n".join(record.message for record in caplog.records))
    assert waits == ["60", "120", "240"]


def test_a_tracker_that_rests_forgets_what_is_computed_again_before_it_goes_on(
    spy: type[Spy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    with Metrics(tmp_path, track=["wandb"], config={"seed": 7}) as metrics:
        for step in range(3):
            metrics.step(line(step, loss=1.0))
        monkeypatch.setattr(spy, "fails_at", "log")
        metrics.step(line(3, loss=1.0))
        monkeypatch.setattr(spy, "fails_at", "")
        for step in (2, 1, 2):  # it rests, and the run goes back twice
            metrics.step(line(step, loss=2.0))
        monkeypatch.setattr(time, "monotonic", lambda: now + 100)
        metrics.step(line(3, loss=2.0))
        metrics.step(line(4, loss=2.0))
    (heard,) = spy.made
    went_back = [said for said in heard.said if said[0] == "forget"]
    assert went_back == [("forget", 1)] and heard.said.index(("forget", 1)) < heard.said.index((3, 2.0))


def test_tensorboard_shows_no_step_twice_that_was_computed_again_while_its_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    now, trackers = time.monotonic(), Trackers(["tensorboard"], tmp_path)
    for step in range(4):
        trackers.log(step, 1.0, [("loss", float(step))])

    def full(*given: Any, **more: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("torch.utils.tensorboard.FileWriter.add_summary", full)
        trackers.log(4, 1.0, [("loss", 4.0)])
    trackers.forget(2)
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    for step in (2, 3, 4):
        trackers.log(step, 1.0, [("loss", 10.0 + step)])
    trackers.close()
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(0, 0), (1, 1), (2, 12), (3, 13), (4, 14)]


def test_a_service_that_does_not_answer_when_it_is_tried_again_takes_no_time_of_the_run(
    spy: type[Spy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, answers = time.monotonic(), threading.Event()

    def slow(folder: Path, config: Mapping[str, object]) -> Spy:
        answers.wait(60)
        return spy(folder, config)

    monkeypatch.setattr(spy, "fails_at", "open")
    trackers = Trackers(["wandb"], tmp_path, {"seed": 7})
    monkeypatch.setattr(spy, "fails_at", "")
    monkeypatch.setitem(TRACKERS, "wandb", slow)
    begin = time.perf_counter()
    for step in range(5):
        monkeypatch.setattr(time, "monotonic", lambda step=step: now + 61 + step)
        trackers.log(step, 1.0, [("train/loss", 1.0)])
    assert time.perf_counter() - begin < 20 and not spy.made
    answers.set()
    deadline = time.perf_counter() + 60
    while not spy.made and time.perf_counter() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    trackers.log(5, 1.0, [("train/loss", 1.0)])
    trackers.log(6, 1.0, [("train/loss", 1.0)])
    trackers.close()
    (heard,) = spy.made
    assert heard.said[0][0] == "open" and heard.said[-1] == ("close",) and len(heard.said) >= 3


def test_trackers_are_named_in_the_run_file_and_may_change_on_resume() -> None:
    from app.settings.resume import kind_of

    assert RunConfig.from_yaml(RUN).track == ("tensorboard", "ray")
    assert RunConfig.from_yaml(RUN + "track: [tensorboard, wandb]\n").track == ("tensorboard", "wandb")
    assert RunConfig.from_yaml(RUN + "track: []\n").track == ()
    assert kind_of("track") == "free"


def test_an_unknown_tracker_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"track.*comet.*tensorboard.*wandb"):
        RunConfig.from_yaml(RUN + "track: [comet]\n")
    with pytest.raises(ConfigError, match="track"):
        RunConfig.from_yaml(RUN + "report_to: wandb\n")


def test_every_tracker_that_a_run_file_may_name_is_there() -> None:
    assert set(TRACKERS) == {"tensorboard", "wandb", "mlflow", "ray"}
    RunConfig.from_yaml(RUN + f"track: [{', '.join(TRACKERS)}]\n")


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed(["tensorboard"])

    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    with pytest.raises(ConfigError, match=r'track has wandb, whose package is not installed.*"\.\[wandb\]"'):
        check_installed(["wandb"])
    with pytest.raises(ConfigError, match="track has mlflow, whose package is not installed"):
        dry_run(ROOT / "configs/runs/demo.yaml", [f"run.dir={tmp_path}", "track=[mlflow]"])  # tells it as a run would


def test_wandb_writes_a_run_of_its_own_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no.netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "tracked"
    folder.mkdir()
    for start in (0, 2):  # the second time as a resumed run does
        trackers = Trackers(["wandb"], folder, {"train": {"seed": 3}})
        assert "Export WANDB_API_KEY in the shell" in trackers.quiet()["wandb"]
        for step in range(start, start + 2):
            trackers.log(step, 1.7e9 + step, [("train/loss", 1.0 / (step + 1))])
        if start:
            trackers.show(4, 1.7e9, SampleFiles.of(folder, made_samples(folder).samples))
            trackers.alert(CheckpointFailed(step=3, why="no space left on device"))
        trackers.close()
        time.sleep(1.1)  # W&B names what it writes by the second
    runs = list((folder / "wandb").glob("offline-run-*"))
    assert runs and all((folder / "wandb.id").read_text() in run.name for run in runs)
    stored = b"".join(file.read_bytes() for run in runs for file in run.glob("*.wandb"))
    assert b"train/loss" in stored and b"report.html" in stored
    assert b"samples/1" in stored and b"a blue square" in stored
    assert b"checkpoint_failed: tracked" in stored and b"no space left on device" in stored
    held = {file.suffix for run in runs for file in run.glob("files/media/**/*") if file.is_file()}
    assert held == {".mp4", ".png"}


def test_a_tracker_that_nobody_sees_is_told_at_the_start_and_no_key_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A controller on another node has the environment of that node: no key, and a server that refuses."""
    secret = "0123456789abcdef"

    class Refused(Spy):
        def __init__(self, folder: Path, config) -> None:
            raise RuntimeError(f"401 of https://me:{secret}@tracking.example, key {secret}")

    class Keyless(Spy):
        quiet = "there is no key"

    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setitem(TRACKERS, "mlflow", Refused)
    monkeypatch.setitem(TRACKERS, "wandb", Keyless)
    with Recorder(tmp_path, config=RunConfig.from_yaml(f"{RUN}track: [tensorboard, wandb, mlflow]\n")):
        pass
    events = list(RunDir(tmp_path).events())
    assert all(isinstance(event, TrackerQuiet) and event.time > 0 for event in events)
    assert [event.describe() for event in events] == [
        "warning: track wandb: there is no key",
        "warning: track mlflow: it takes nothing for now (RuntimeError: 401 of https://***@tracking.example, key ***)",
    ]
    told = (tmp_path / "events.jsonl").read_text() + caplog.text
    assert secret not in told and "401 of" in caplog.text


def test_mlflow_writes_a_run_of_its_own_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # the tracker sets them: they are put back
        monkeypatch.delenv(name)
    folder = tmp_path / "tracked"
    folder.mkdir()
    settings = {"train": {"seed": 3}, "long": "x" * 7000, "many": {f"n{n}": n for n in range(250)}}
    for start in (0, 2):  # the second time as a resumed run does
        trackers = Trackers(["mlflow"], folder, settings)
        for step in range(start, start + 2):
            trackers.log(step, 1.7e9 + step, [("train/loss", 1.0 / (step + 1)), ("loss/9x64x96", float("nan"))])
        if start:
            trackers.show(4, 1.7e9, SampleFiles.of(folder, made_samples(folder).samples))
        trackers.close()
    client = tracking.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("heddle").experiment_id])
    assert run.info.run_name == "tracked" and run.info.status == "FINISHED"
    assert run.data.params["train.seed"] == "3" and run.data.params["many.n249"] == "249"
    assert "report.html" in run.data.tags["mlflow.note.content"]
    names = {file.path for file in client.list_artifacts(run.info.run_id, "samples")}
    assert names == {f"samples/step-4{end}" for end in ("-00.mp4", "-01.mp4", ".png", ".json")}
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(p.step, p.value, p.timestamp) for p in points] == [
        (s, 1 / (s + 1), (1_700_000_000 + s) * 1000) for s in range(4)
    ]


def test_a_run_that_began_without_a_server_is_made_on_one_that_it_is_given_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "1")  # the tracker sets them: they are put back
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    TRACKERS["mlflow"](tmp_path, {}).close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    for _ in range(2):  # the second one goes on
        TRACKERS["mlflow"](tmp_path, {"train": {"seed": 3}}).close()
    server = tracking.MlflowClient(tracking_uri=(tmp_path / "server").as_uri())
    (run,) = server.search_runs([server.get_experiment_by_name("heddle").experiment_id])
    assert run.data.params == {"train.seed": "3"}


def test_a_tracking_server_that_is_down_is_left_soon_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    trackers = Trackers(["mlflow"], tmp_path, {})
    trackers.log(0, 1.7e9, [("train/loss", 1.0)])
    trackers.close()
    assert [r.message for r in caplog.records if "mlflow gets nothing of this run for" in r.message]


def test_gauges_of_ray_are_named_by_their_tags_and_labelled_by_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import ray.util.metrics

    told: dict[tuple[str, str, str], float] = {}

    class FakeGauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            told[self.name, tags["run"], tags["of"]] = value

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util.metrics, "Gauge", FakeGauge)
    tracker = TRACKERS["ray"](Path("runs/demo"), {})
    for step, workers in ((0, {"w0": 1.5, "w1": 2.5}), (1, {"w0": 1.25})):
        tracker.log(step, 0.0, scalars(line(step, loss=0.5, mfu=0.25, tflops_by_worker=workers)))
    assert told["heddle_perf_mfu", "demo", ""] == 0.25 and told["heddle_train_loss", "demo", ""] == 0.5
    assert told["heddle_workers_tflops", "demo", "w0"] == 1.25
    assert told["heddle_workers_tflops", "demo", "w1"] == 0.0, "it has left"
    assert told["heddle_step", "demo", ""] == 1.0
    tracker.alert(CheckpointFailed(time=1.7e9, step=3, why=""))
    assert told[EVENT_TIME, "demo", "checkpoint_failed"] == 1.7e9
    tracker.log(2, 0.0, scalars(line(2, loss=0.5)))
    assert told[EVENT_TIME, "demo", "checkpoint_failed"] == 1.7e9, "it stays until the next one"
    TRACKERS["ray"](Path("runs/Übung 日"), {}).log(0, 0.0, scalars(line(0, loss=0.5)))
    assert told["heddle_train_loss", "_bung _", ""] == 0.5, "Ray's labels are ASCII"


def test_gauges_of_ray_are_set_again_while_no_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's nodes forget a gauge that nobody sets for 20 s: a run that stands would not be seen."""
    import ray
    import ray.util.metrics

    told: list[tuple[str, float]] = []

    class FakeGauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            told.append((self.name, value))

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util.metrics, "Gauge", FakeGauge)
    tracker = RayTracker(Path("runs/demo"), {}, repeat_s=0.01)
    tracker.log(6, 0.0, [("workers/tflops/w1", 2.5)])
    tracker.log(7, 0.0, [("workers/tflops/w0", 1.5)])
    left = told.index(("heddle_workers_tflops", 0.0))
    tracker.alert(CheckpointFailed(time=1.7e9, step=3, why=""))
    until = time.monotonic() + 20
    while time.monotonic() < until and min(told.count(("heddle_step", 7.0)), told.count((EVENT_TIME, 1.7e9))) < 3:
        time.sleep(0.01)
    tracker.close()
    assert min(told.count(("heddle_step", 7.0)), told.count((EVENT_TIME, 1.7e9))) >= 3
    after = len(told)
    time.sleep(0.05)
    assert len(told) == after, "a run that has ended is not seen"
    again = {value for name, value in told[left + 1 :] if name == "heddle_workers_tflops"}
    assert again == {1.5}, "a worker that has left is 0 once: over a month there would be thousands of them"


def test_the_dashboard_asks_for_gauges_that_there_are() -> None:
    board = json.loads((ROOT / "docker/grafana/heddle.json").read_text())
    values = dict.fromkeys(("mfu", "hfu", "corr_tokens", "corr_load"), 0.5) | {"loss": 1.0, "step_s": 1.0, "workers": 2}
    of_workers = ("tflops", "mfu", "hfu", "wait_sync", "exposed")
    values |= {f"{name}_by_worker": {"w0": 1.0} for name in of_workers}  # type: ignore[misc]
    gauges = {f"ray_{gauge_of(tag)[0]}" for tag, _ in scalars(line(0, **values))}
    gauges |= {f"ray_{gauge_of(tag)[0]}" for tag, _ in held_out_scalars(HELD_OUT)}
    asked = {target["expr"].partition("{")[0] for panel in board["panels"] for target in panel["targets"]}
    assert asked and asked <= gauges
    assert {f"ray_heddle_workers_{name}" for name in of_workers} <= asked


@pytest.mark.cluster
@pytest.mark.long
def test_the_port_of_a_node_serves_every_gauge_that_the_dashboard_asks_for() -> None:
    """Read as Prometheus does, with the run and the worker as labels; a worker that has left stands at 0."""
    import ray

    board = json.loads((ROOT / "docker/grafana/heddle.json").read_text())
    asked = {target["expr"].partition("{")[0] for panel in board["panels"] for target in panel["targets"]}
    names = {field.name for field in dataclasses.fields(StepMetrics)} & set(TAGS)
    figures = dict.fromkeys(names, 1)
    with local_ray(num_cpus=1, log_to_driver=False, _system_config={"metrics_report_interval_ms": 500}):
        (node,) = ray.nodes()
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        tracker = TRACKERS["ray"](Path("runs/demo"), {})

        def served(workers: Mapping[str, float], wanted: Callable[[dict[tuple[str, str], float]], bool]) -> bool:
            values = figures | {
                f"{name}_by_worker": workers for name in ("tflops", "mfu", "hfu", "wait_sync", "exposed")
            }
            until = time.monotonic() + 120
            while time.monotonic() < until:
                tracker.log(9, 0.0, scalars(line(9, **values)))  # type: ignore[arg-type]
                tracker.log(4, 0.0, held_out_scalars(HELD_OUT))  # of a checkpoint, late: no other gauge changes
                with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                    if wanted(gauges_of(answer.read().decode(), "demo")):
                        return True
                time.sleep(0.5)
            return False

        assert served({"w0": 0.25, "w1": 0.75}, lambda found: asked <= {name for name, _ in found})
        mfu = "ray_heddle_workers_mfu"
        assert served({"w0": 0.5}, lambda found: (found.get((mfu, "w0")), found.get((mfu, "w1"))) == (0.5, 0.0))
        assert served({"w0": 0.5}, lambda found: found.get(("ray_heddle_step", "")) == 9)
        tracker.alert(CheckpointFailed(time=1.7e9, step=3, why=""))
        assert served({"w0": 0.5}, lambda found: found.get((f"ray_{EVENT_TIME}", "checkpoint_failed")) == 1.7e9)


def gauges_of(text: str, run: str) -> dict[tuple[str, str], float]:
    """(name, label `of`) -> value of a run's gauges in Prometheus's text format."""
    found = {}
    for name, labels, value in re.findall(r"^(ray_heddle_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if label["run"] == run:
            found[name, label["of"]] = float(value)
    return found


def test_the_controller_gets_what_trackers_read_in_the_shell_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that it runs: what stands beside it, Ray shows to all who see the cluster."""
    import ray.cloudpickle

    shell = {"WANDB_API_KEY": "k", "WANDB_PROJECT": "films", "WANDB_SERVICE": "3-17-tcp", "MLFLOW_TRACKING_URI": "u"}
    shell |= {"HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "s"}
    assert tracker_environment(["tensorboard"], shell) == {}
    found = tracker_environment(["tensorboard", "wandb"], shell)
    assert found == {"WANDB_API_KEY": "k", "WANDB_PROJECT": "films"}
    assert tracker_environment(["mlflow"], shell) == {"MLFLOW_TRACKING_URI": "u"}
    for name, there in (("WANDB_API_KEY", ""), ("WANDB_PROJECT", "of the node")):
        monkeypatch.setenv(name, there)
    sent = ray.cloudpickle.dumps(in_environment(lambda settings: os.environ["WANDB_PROJECT"] + settings, found))
    assert ray.cloudpickle.loads(sent)("!") == "films!" and os.environ["WANDB_API_KEY"] == "k"
