"""A run's figures as gauges of Ray, for Prometheus, Grafana and alerts."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from actors.names import label_of
from app.records.rundir import METRICS
from app.records.tails import last_line, number_in
from app.records.tracker import Scalars, Tracker

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

    from actors.records.events import RunEvent

_GAUGES_S = 5.0  # from one setting of gauges to the next
# Gauges that stand: tag, section, name
SETTINGS = (("run/steps", "train", "steps"), ("checkpoint/every", "checkpoint", "every"))
CHECKPOINT = "checkpoint/step"  # tag of the newest checkpoint's step
EVENT_TIME = "heddle_event_time"  # a gauge: unix seconds of the newest event of a kind


class RayTracker(Tracker):
    """Gauges of Ray (`ray.util.metrics`), which its nodes export to Prometheus; docker/grafana/heddle.json shows them.

    The tag perf/mfu is the gauge `heddle_perf_mfu`, which Prometheus sees as `ray_heddle_perf_mfu`, with the label
    `run`. Curves of workers and of buckets have the label `of`: workers/tflops/w0 is `heddle_workers_tflops{of="w0"}`.
    A worker that has left is 0 once, and is then forgotten. In a process without Ray nothing collects them.

    Ray's nodes forget a gauge that is not set for two of their reports, 20 s: all are set again until `close`, so a run
    whose steps are longer, or do not come, is seen as long as its process lives. `heddle_run_steps` is train.steps,
    `heddle_checkpoint_every` checkpoint.every; `heddle_step` of a run that goes on is its last one from the start. Of
    its end there is no gauge, which might not be exported any more: HeddleUnfinished looks at what is missing.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], *, repeat_s: float = _GAUGES_S) -> None:
        self._run, self._repeat_s = label_of(folder.name), repeat_s
        self._gauges: dict[str, Gauge] = {}
        self._labels: dict[str, set[str]] = {}  # that a gauge had last
        self._latest = int(number_in(last_line(folder / METRICS) or {}, "step", -1))
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}  # of (gauge, label)
        for tag, section, name in SETTINGS:
            found = config.get(section)
            if isinstance(found, Mapping) and name in found:
                self._values[gauge_of(tag)] = float(found[name])
        if self._latest >= 0:  # or a run of which Prometheus has forgotten the steps would seem to have made none
            self._values[gauge_of("step")] = float(self._latest)
        self._closed = threading.Event()
        self._repeats: threading.Thread | None = None
        self._repeat()  # HeddleNoFirstStep looks at a run that has these and no step

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        import ray

        if not ray.is_initialized():
            return
        self._latest = max(self._latest, step)  # figures of an earlier one may come late
        self._begin(step)
        labels: dict[str, set[str]] = {}
        for tag, value in [*scalars, ("step", float(self._latest))]:
            if not math.isfinite(value):
                continue
            name, label = gauge_of(tag)
            labels.setdefault(name, set()).add(label)
            self._set(name, label, value)
        for name, known in self._labels.items():
            for gone in known - labels.get(name, known):
                self._end(name, gone)
        self._labels |= labels

    def _begin(self, step: int) -> None:
        """The steps of this process begin here: before its first checkpoint that counts as one."""
        with self._lock:
            self._values.setdefault(gauge_of(CHECKPOINT), float(step - 1))

    def _set(self, name: str, label: str, value: float) -> None:
        with self._lock:
            self._values[name, label_of(label)] = value
            self._send(name, label_of(label), value)
        self._repeat()

    def _repeat(self) -> None:
        import ray

        if self._repeats is None and ray.is_initialized():
            self._repeats = threading.Thread(target=self._set_again, name="heddle-gauges", daemon=True)
            self._repeats.start()

    def _end(self, name: str, label: str) -> None:
        """0 once more, and never again: over a month of changes labels of workers that have left would be thousands."""
        with self._lock:
            self._values.pop((name, label_of(label)), None)
            self._send(name, label_of(label), 0.0)

    def _send(self, name: str, label: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description="Heddle: see docs/records.md, Metrics", tag_keys=("run", "of"))
        self._gauges[name].set(value, tags={"run": self._run, "of": label})

    def _set_again(self) -> None:
        import ray

        while True:
            if ray.is_initialized():
                with self._lock:
                    for (name, label), value in self._values.items():
                        self._send(name, label, value)
            if self._closed.wait(self._repeat_s):
                return

    def alert(self, event: RunEvent) -> None:
        """When it happened, in unix seconds: docker/prometheus/heddle.rules.yaml makes alerts of it."""
        import ray

        if ray.is_initialized():
            self._set(EVENT_TIME, event.event, event.time)

    def forget(self, step: int) -> None:
        """Gauges show the present alone."""
        self._latest = step - 1

    def close(self) -> None:
        self._closed.set()
        if self._repeats is not None:
            self._repeats.join()


def gauge_of(tag: str) -> tuple[str, str]:
    """(name of the gauge, label `of`) of a tag: "workers/tflops/w0" -> ("heddle_workers_tflops", "w0")."""
    parts = tag.split("/", 2)
    return "heddle_" + "_".join(parts[:2]), parts[2] if len(parts) > 2 else ""
