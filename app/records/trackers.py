"""Where a run's curves and samples are seen besides its files: TensorBoard, Weights & Biases, MLflow, Ray's metrics.

`track: [tensorboard, wandb, mlflow, ray]` in a run file names them. metrics.jsonl is the truth; a tracker that fails is
left out for a while, with a warning, and never ends a run.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.names import id_in
from actors.outcome import Exit
from app.records.ray_gauges import RayTracker
from app.records.tracker import SampleFiles, Scalars, Tracker
from ops.whole_file import write_whole

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter

    from actors.records.events import RunEvent

log = logging.getLogger(__name__)

WANDB_ID = "wandb.id"  # in the run's folder: a resumed run continues its own page
MLFLOW_ID = "mlflow.id"  # the same
_ID_LENGTH = 32
_PARAMETERS_PER_CALL = 100  # MLflow's limits
_PARAMETER_LENGTH = 6000
# Of 64 workers and five figures of each, an event file grows by 10 kB in a step, 2 GB in a month of steps, of which
# TensorBoard shows a thousand points per curve: more of them than of 8 workers come in every tenth step.
_WORKERS, _CURVES_OF_WORKERS, _SELDOM = "workers/", 40, 10
_CLOCK_TOLERANCE_S = 2  # what a new event file waits for a second of its own
_ALERTS_S = 900  # W&B repeats an alert of one title no sooner
_TITLE_LENGTH = 63  # W&B's limit
_OPENING_S = 0.5  # that the run waits for a service that is tried again
_REST_S, _LONGEST_REST_S = 60.0, 3600.0  # of a tracker that has failed, each twice as long as the one before
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


class TensorBoardTracker(Tracker):
    """Event files in `events/` of the run's folder. Of samples it takes the contact sheet: it plays no MP4."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        self._folder = folder / "events"
        self._writer: SummaryWriter | None = None
        with self._taking() as writer:
            writer.add_text("report", str(folder / "report.html"))

    def _open(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, only where metrics are written

        self._wait_for_a_later_second()
        return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)

    @contextmanager
    def _taking(self) -> Iterator[SummaryWriter]:
        """What writes now. One that has failed, as on a full disk, takes nothing any more: its thread has ended."""
        writer = self._writer = self._writer or self._open(None)
        try:
            yield writer
        except Exception:
            self._writer = None
            raise

    def _wait_for_a_later_second(self) -> None:
        """TensorBoard reads files in the order of their names, which begin with the second they were opened in and end,
        unpadded, with process and writer: within one second a later file may come first, and what it purges stays."""
        newest = max((int(path.name.split(".")[3]) for path in self._folder.glob("events.out.tfevents.*")), default=0)
        if newest > time.time() + _CLOCK_TOLERANCE_S:
            log.warning(
                "%s holds a file of unix second %d, ahead of this machine's clock: TensorBoard may show steps that "
                "were computed again twice",
                self._folder,
                newest,
            )
            return
        while int(time.time()) <= newest:
            time.sleep(0.05)

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        """One record for all values: in records of their own, frame, time and step would take 30 bytes beside the 30 of
        each tag and value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = list(scalars)
        many = sum(tag.startswith(_WORKERS) for tag, _ in values) > _CURVES_OF_WORKERS
        shown = [one for one in values if not (many and step % _SELDOM and one[0].startswith(_WORKERS))]
        with self._taking() as writer:
            if shown and writer.file_writer is not None:  # it is None once it is closed
                told = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in shown])
                writer.file_writer.add_summary(told, step, time)

    def show(self, step: int, time: float, samples: SampleFiles) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(samples.sheet) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        with self._taking() as writer:
            writer.add_image("samples", pixels, step, walltime=time, dataformats="HWC")

    def forget(self, step: int) -> None:
        self.close()
        self._writer = self._open(step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases, with the settings as its config. WANDB_PROJECT, WANDB_ENTITY and the like are its own
    variables; without a key and without WANDB_MODE it writes to `wandb/` of the run's folder, for `wandb sync`.

    Its own step only ever grows, so curves are drawn over "step"; steps that are computed again stand there twice.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        import wandb

        known = folder / WANDB_ID
        if not id_in(known):
            write_whole(known, uuid.uuid4().hex[:12])
        wanted, has_key = os.environ.get("WANDB_MODE"), bool(wandb.api.api_key)
        self.quiet = "" if wanted or has_key else _no_key(folder)
        self._code = int(Exit.OK)
        # a Literal of wandb's, which refuses other words itself
        mode: Any = wanted or ("online" if has_key else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "heddle"),
            name=folder.name,
            id=id_in(known),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            notes=f"report: {folder / 'report.html'}",
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        self._run.log({"step": step, **dict(scalars)})

    def show(self, step: int, time: float, samples: SampleFiles) -> None:
        import wandb

        clips = {
            f"samples/{index}": wandb.Video(str(file), caption=prompt, format="mp4")
            for index, (file, prompt) in enumerate(zip(samples.clips, samples.prompts, strict=True))
        }
        self._run.log({"step": step, "samples/sheet": wandb.Image(str(samples.sheet)), **clips})

    def alert(self, event: RunEvent) -> None:
        """W&B writes an e-mail, or to Slack, as its user has set."""
        title = f"{event.event}: {self._run.name}"[:_TITLE_LENGTH]
        self._run.alert(title=title, text=event.describe(), wait_duration=_ALERTS_S)

    def end(self, code: int) -> None:
        self._code = code
        if code == Exit.RESUMABLE:
            self._run.mark_preempting()  # it then counts as preempted, not as failed

    def close(self) -> None:
        self._run.finish(exit_code=self._code)


def without_secrets(text: str) -> str:
    """What a service has said, for files and logs that others read: without keys, and without names and passwords in
    addresses."""
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)


def _no_key(folder: Path) -> str:
    return (
        f"there is no key on {socket.gethostname()}, where the run's controller is, so it writes to "
        f"{folder / 'wandb'}, for `wandb sync`. Export WANDB_API_KEY in the shell that starts the run and resume, or, "
        f"if that is meant, WANDB_MODE=offline"
    )


class MlflowTracker(Tracker):
    """A run on the tracking server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME or "heddle",
    with the settings as its parameters. Without that variable it writes to `mlruns/` of the run's folder.

    A server that does not answer holds up one step, by some seconds. Steps that are computed again stand there twice.
    """

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its own are seven, over minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow wants a server or a database by now
            uri = (folder.absolute() / "mlruns").as_uri()
        from mlflow.tracking import MlflowClient

        self._status = "FINISHED"
        self._client: MlflowClient = MlflowClient(tracking_uri=uri)
        known = folder / MLFLOW_ID
        self._run = id_in(known)
        if self._run and self._goes_on():
            try:
                self._tell(config)
            except Exception as error:  # of MLflow; it may have refused them before
                log.warning("mlflow has not taken all settings: %s", without_secrets(str(error)))
            return
        write_whole(known, self._run or " " * _ID_LENGTH)  # a full disk would cost a run on the server at each try
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "heddle")
        experiment = self._client.get_experiment_by_name(name)
        made = self._client.create_run(
            experiment.experiment_id if experiment else self._client.create_experiment(name),
            run_name=folder.name,
            tags={"mlflow.note.content": f"report: {folder / 'report.html'}"},
        )
        self._run = made.info.run_id
        write_whole(known, self._run)
        self._tell(config)

    def _goes_on(self) -> bool:
        """Whether the server has the run of an earlier start, which goes on there: one that began without a server, or
        on another, has another id here."""
        try:
            self._client.update_run(self._run, status="RUNNING")
        except Exception as error:  # of MLflow, which is imported as late as can be
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _tell(self, config: Mapping[str, object]) -> None:
        """Send the settings that the server lacks, as where it stopped to answer; it takes no second value for one."""
        from mlflow.entities import Param

        told = self._client.get_run(self._run).data.params
        settings = [Param(key, value[:_PARAMETER_LENGTH]) for key, value in flat(config) if key not in told]
        for first in range(0, len(settings), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run, params=settings[first : first + _PARAMETERS_PER_CALL])

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run, [Metric(tag, value, int(time * 1000), step) for tag, value in scalars])

    def show(self, step: int, time: float, samples: SampleFiles) -> None:
        for file in (*samples.clips, samples.sheet, samples.sheet.with_suffix(".json")):
            self._client.log_artifact(self._run, str(file), "samples")

    def end(self, code: int) -> None:
        self._status = {Exit.OK: "FINISHED", Exit.RESUMABLE: "KILLED"}.get(Exit(code), "FAILED")

    def close(self) -> None:
        self._client.set_terminated(self._run, status=self._status)


def flat(config: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    """Settings by their dotted names, as text: {"train": {"seed": 3}} -> ("train.seed", "3")."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)


TRACKERS: dict[str, Callable[[Path, Mapping[str, object]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "ray": RayTracker,
}


@dataclass(frozen=True, slots=True)
class _Rest:
    """How long a tracker that has failed is left out, and until when (monotonic seconds)."""

    seconds: float
    until: float
    why: str


class _Opening:
    """A tracker that is opened beside the run: a service that does not answer takes its own time-out."""

    def __init__(self, open_one: Callable[[], Tracker]) -> None:
        self._open = open_one
        self._made: Tracker | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heddle-tracker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._open()
        except Exception as error:  # foreign code, as in `Trackers`
            self._error = error

    def taken(self, timeout_s: float) -> Tracker | None:
        """The tracker, if it is open by then; None while it is not. Raises what kept it from opening."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self._made


class Trackers:
    """All trackers of a run as one that does not fail. One that does is tried again after a minute, then after two, up
    to an hour: a service that is started anew would else miss the rest of the run, and of its alerts."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, object] | None = None) -> None:
        self._folder, self._config = folder, config or {}
        self._open: dict[str, Tracker | None] = dict.fromkeys(names)  # None: it could not be opened yet
        self._rests: dict[str, _Rest] = {}  # of those that have failed, and have not taken anything since
        self._opening: dict[str, _Opening] = {}  # of those that are tried again
        self._forgets: dict[str, int] = {}  # the first step that each has to forget, and was not told yet
        self._all(lambda tracker: None)

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        values = list(scalars)
        self._all(lambda tracker: tracker.log(step, time, values))

    def show(self, step: int, time: float, samples: SampleFiles) -> None:
        self._all(lambda tracker: tracker.show(step, time, samples))

    def alert(self, event: RunEvent) -> None:
        self._all(lambda tracker: tracker.alert(event))

    def forget(self, step: int) -> None:
        for name in self._open:  # one that rests hears of it when it goes on
            self._forgets[name] = min(step, self._forgets.get(name, step))
        self._all(lambda tracker: None)

    def quiet(self) -> dict[str, str]:
        """Why nobody sees a tracker, by its name: it rests since it has failed, or lacks something for it."""
        why = {name: tracker.quiet for name, tracker in self._open.items() if tracker is not None and tracker.quiet}
        left = {name: f"it takes nothing for now ({one.why})" for name, one in self._rests.items()}
        return why | left

    def _all(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            rest = self._rests.get(name)
            if rest is not None and time.monotonic() < rest.until:
                continue
            try:
                if tracker is None:
                    tracker = self._opened(name)
                    if tracker is None:
                        continue
                if (step := self._forgets.get(name)) is not None:
                    tracker.forget(step)
                    del self._forgets[name]
                tell(tracker)
            except Exception as error:  # foreign code: a service that is down, a key that is refused
                self._leave(name, error)
            else:
                self._rests.pop(name, None)

    def _opened(self, name: str) -> Tracker | None:
        """None while its service does not answer. At the start of the run it is waited for."""
        open_one = partial(TRACKERS[name], self._folder, self._config)
        if name not in self._rests:
            tracker: Tracker | None = open_one()
        else:
            waits_s = 0.0 if name in self._opening else _OPENING_S
            opening = self._opening.pop(name, None) or _Opening(open_one)
            tracker = opening.taken(waits_s)
            if tracker is None:
                self._opening[name] = opening
        self._open[name] = tracker
        return tracker

    def end(self, code: int) -> None:
        self._all(lambda tracker: tracker.end(code))

    def close(self) -> None:
        for name, tracker in self._open.items():
            if tracker is None or name in self._rests:
                continue
            try:
                tracker.close()
            except Exception as error:
                log.warning("%s did not close: %s", name, without_secrets(str(error)))
        for opening in self._opening.values():  # one that has answered by now has begun a run of its service
            with suppress(Exception):
                if (late := opening.taken(0.0)) is not None:
                    late.close()
        self._open, self._opening = {}, {}

    def _leave(self, name: str, error: Exception) -> None:
        before = self._rests.get(name)
        seconds = _REST_S if before is None else min(2 * before.seconds, _LONGEST_REST_S)
        why = without_secrets(f"{type(error).__name__}: {error}")
        self._rests[name] = _Rest(seconds, time.monotonic() + seconds, why)
        log.warning("%s gets nothing of this run for %.0f s (%s); metrics.jsonl is whole", name, seconds, why)
