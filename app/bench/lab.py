"""A laboratory for elasticity: several Ray nodes on this machine, a small data set, and runs of a tiny model.

    with Lab(folder) as lab:
        lab.add_node(workers=2); lab.add_node(workers=1)
        run = lab.start(lab.config("losses", train={"steps": 20}))
        run.wait_for_step(5); run.signal_worker()
        print(run.join().code, run.losses())

The nodes are real raylets (ray.cluster_utils.Cluster), the workers real processes, the signals real signals.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import yaml

from actors.names import NAMESPACE
from actors.plan.types import StepPlan
from actors.records.events import GenerationFormed, RunEvent, StepsRecovered, WorkerReady
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.step import StepAssignment
from app.settings.config import RunConfig
from ops.code_path import ROOT

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    from actors.feed.step_source import FeederHandle
    from actors.outcome import Outcome
    from actors.plan.costs.profile import Profile
    from actors.run.asides import AsideSource
    from actors.run.steps import StepRunner
    from actors.worker.worker import Worker

log = logging.getLogger(__name__)
T = TypeVar("T")


class Replacements(TypedDict, total=False):
    """What takes the place of parts of a run, as `start_controller` says."""

    profile: Profile | None
    feeder: Callable[[], FeederHandle] | None
    asides: AsideSource | None


TINY: Mapping[str, Mapping[str, object]] = {
    "model": {
        "dit": {"num_layers": 2, "num_heads": 4, "head_dim": 16, "ffn_dim": 128, "freq_dim": 32},
        "vae": {"kind": "haar", "channels": 24},
        "text": {"max_length": 64, "d_model": 32, "num_layers": 1, "num_heads": 2},
    },
    "train": {"optimizer": {"learning_rate": 1e-3, "ema_decay": 0.9}, "flow": {"flow_shift": 1.0}},
    "planner": {"strategy": "cascade", "budget_s": 0.02},
    "snapshot": {"enabled": True, "every": 1},  # steps of a tiny model are shorter than fifty of its snapshots
    "checkpoint": {"every": 0, "keep_last": 2},
}


OPEN_END = 100_000  # steps of a run that the test or benchmark will stop
_PACE_S = 0.5  # seconds added to a step while something other than steps is awaited
_STARTS = 4  # of a Ray process that comes up too late
_PACE_SHARE = 1 / 8  # of the time already waited; the larger of both counts, so that few steps go by


class Timeout(RuntimeError):
    """A run did not reach in time what was awaited."""


class Lab:
    """Owns the cluster of this process; `close` ends everything it started."""

    def __init__(self, folder: Path) -> None:
        from data.tools.synthetic import SynthConfig, synthesize

        self.folder = folder
        self.data = folder / "data"
        if not self.data.exists():
            synthesize(self.data, SynthConfig(clips=60, images=12, shards=2, koala=False))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "32")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # workers die here on purpose
        self.cluster = patiently(_started_cluster)
        self.nodes: list[Node] = []
        self.runs: list[LabRun] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        import ray

        for run in self.runs:
            run.stop()
        ray.shutdown()
        self.cluster.shutdown()

    def add_node(self, workers: int, gpus: int = 0, store_mib: int = 150) -> Node:
        """A node with room for this many workers, with this many (logical) GPUs and so large an object store."""
        store = store_mib * 2**20
        node: Node = patiently(
            lambda: self.cluster.add_node(num_cpus=2 * workers, num_gpus=gpus, object_store_memory=store)
        )
        self.nodes.append(node)
        return node

    def kill_node(self, node: Node) -> None:
        """Remove the node without notice, with all its processes."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def config(self, name: str, **sections: Mapping[str, object]) -> RunConfig:
        """Settings of a tiny run; `sections` are merged over TINY, e.g. train={"steps": 20}."""
        shards = sorted(str(path) for path in (self.data / "shards").glob("*.tar"))
        tree: dict[str, Mapping[str, object]] = {
            "run": {"name": name, "dir": str(self.folder / "runs")},
            **TINY,
            "data": {
                "sources": [{"path": "::".join(shards)}],
                "items_per_step": 4,
                "buckets": {"table": ["1x64x96", "9x64x96", "17x64x96", "9x96x64"], "short_videos": "image"},
                "batch": {"memory_tokens": 300, "text_tokens": 40, "max_batch": 3},
                "engine": {"decode_workers": 1, "decode_cpus": 0.2},
            },
            "workers": {
                "min": 1,
                "max": 3,
                "cpus_per_worker": 2.0,
                "heartbeat_s": 0.2,
                "suspect_s": 6.0,
                "collective_timeout_s": 60.0,
                "device": "cpu",
            },
        }
        for section, values in sections.items():
            tree[section] = _merge(tree.get(section, {}), values)
        return RunConfig.from_yaml(yaml.safe_dump(tree))

    def start(
        self, config: RunConfig, worker_class: type[Worker] | None = None, **replacements: Unpack[Replacements]
    ) -> LabRun:
        """Begin a run in a thread of this process; `replacements` go to `start_controller`."""
        run = LabRun(config, worker_class, replacements)
        self.runs.append(run)
        return run


class LabRun:
    """A controller in a thread, what it has reported so far, and faults to inflict on it."""

    def __init__(self, config: RunConfig, worker_class: type[Worker] | None, replacements: Replacements) -> None:
        from actors.worker.worker import Worker

        self.config = config
        self.run_dir = Path(config.run.dir) / config.run.name
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics: list[StepMetrics] = []
        self.spans: list[SpanRecord] = []  # of the committed steps
        self.plans: list[StepPlan] = []  # the same
        self.events: list[RunEvent] = []
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self.controller: Any = None  # the faults below reach into its parts, of any type
        self._waiting_since: float | None = None
        self._hold, self._held = threading.Event(), threading.Event()  # set: go on; set: the run is being held
        self._hold.set()
        self._replacements = replacements
        self._worker_class = worker_class or Worker
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float = 300.0) -> Outcome:
        """Outcome of the run. Raises what the controller raised, or Timeout, or that a step is not whole."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise Timeout(
                f"run {self.run_dir.name} is at step {len(self.metrics)} after {timeout_s:g} s; "
                f"last events: {[e.event for e in self.events[-8:]]}"
            )
        if self.error is not None:
            raise self.error
        if self.torn_steps():
            raise RuntimeError(f"run {self.run_dir.name} committed steps without some samples: {self.torn_steps()}")
        assert self.outcome is not None
        return self.outcome

    def stop(self, timeout_s: float = 240.0) -> None:
        """End a run that is still going, at a committed step. Raises what the controller raised, or Timeout."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self.controller is not None:  # repeatedly, since a restarted monitor has forgotten the request
                self.controller.generations.monitor.stop.remote("stopped by the laboratory")
            self._thread.join(2)
        self.join(0)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
        """Wait until the condition holds. Meanwhile steps are slowed down, so that the run does not get far. Raises
        Timeout."""
        self._waiting_since = time.monotonic()
        try:
            self._poll(condition, what, timeout_s)
        finally:
            self._waiting_since = None

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> None:
        """Returns when the step is committed. Raises Timeout."""
        self._poll(lambda: bool(self.metrics) and self.metrics[-1].step >= step, f"step {step}", timeout_s)

    def _poll(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline or not self._thread.is_alive():
                last = [(e.event, getattr(e, "why", None)) for e in self.events[-8:]]
                state = "runs" if self._thread.is_alive() else f"has ended ({self.outcome})"
                raise Timeout(
                    f"waited for {what}; {len(self.metrics)} steps are committed, the run {state}, "
                    f"error {self.error!r}, last events: {last}"
                )
            time.sleep(0.02)

    def wait_for_workers(self, count: int) -> None:
        self.wait_for(lambda: bool(self.metrics) and self.metrics[-1].workers == count, f"{count} workers")

    def wait_for_more_steps(self, count: int) -> None:
        self.wait_for_step((self.metrics[-1].step if self.metrics else -1) + count)

    def wait_for_recoveries(self, count: int) -> None:
        self.wait_for(lambda: len(self.seconds_to_recover()) >= count, f"recovery {count}")

    def losses(self) -> list[float]:
        return [m.loss for m in self.metrics]

    def torn_steps(self) -> list[tuple[int, float]]:
        """Committed steps in which samples are missing, and the weight of the good ones. Every clip here decodes."""
        return [(m.step, m.good_weight) for m in self.metrics if m.good_weight != 1]

    def steps(self) -> list[int]:
        return [m.step for m in self.metrics]

    def seconds_to_recover(self) -> list[float]:
        return [e.seconds for e in self.events if isinstance(e, StepsRecovered)]

    # -- faults --------------------------------------------------------------------------------------------------------

    def active(self) -> list[tuple[str, int]]:
        """(name, pid) of the workers of the running generation."""
        pids = {e.worker: e.pid for e in self.events if isinstance(e, WorkerReady)}
        generations = [e for e in self.events if isinstance(e, GenerationFormed)]
        names = generations[-1].workers if generations else ()
        return [(name, pids[name]) for name in names]

    def generations(self) -> int:
        return sum(isinstance(e, GenerationFormed) for e in self.events)

    def nodes_of_active(self) -> list[str]:
        """Node ids of the workers of the running generation."""
        nodes = {e.worker: e.node for e in self.events if isinstance(e, WorkerReady)}
        return [nodes[name] for name, _ in self.active()]

    def pause(self) -> None:
        """Hold the run back until `go_on`: returns when all steps that were dispatched are committed."""
        self._hold.clear()
        self._poll(self._held.is_set, "a step to pause at", 240.0)

    def go_on(self) -> None:
        self._hold.set()

    def parameter_digests(self) -> list[str]:
        """SHA-256 of the parameters of every worker of the running generation, all after the same step."""
        import ray

        handles = [self.controller.generations.pool.handle(name) for name, _ in self.active()]
        return ray.get([handle.parameters_digest.remote() for handle in handles], timeout=120)

    def signal_worker(self, index: int = 0, number: int = signal.SIGKILL) -> str:
        name, pid = self.active()[index]
        os.kill(pid, number)
        return name

    def scale(self, target: int) -> None:
        """What `heddle workers scale` does."""
        import ray

        self.wait_for(lambda: self.controller is not None, "the controller")
        ray.get(self.controller.generations.monitor.scale.remote(target))

    def kill_actor(self, kind: str) -> None:
        """End the process of the "planner", "feeder", "monitor", of a "keeper", of all "keepers", or of a "relay", the
        last of its group, without notice."""
        from actors.ray_calls import kill

        controller = self.controller
        keepers, relays = controller.state.keepers.find, controller.generations.forming.relays
        handles: list[object] = {
            "planner": lambda: [controller.planner._actor],
            "feeder": lambda: [controller.source._feeder],
            "monitor": lambda: [controller.generations.monitor],
            "relay": lambda: [relays.known[relays.groups[0][-1]].handle],
            "keeper": lambda: list(keepers().values())[:1],
            "keepers": lambda: list(keepers().values()),
        }[kind]()
        for handle in handles:
            kill(handle, no_restart=kind != "monitor")  # Ray itself starts the monitor again

    # -- the controller's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        from actors.run.assemble import start_controller
        from app.run.controller_process import runtime_config

        try:
            self.controller = start_controller(
                runtime_config(self.config, self.run_dir),
                self,
                worker_class=self._worker_class,
                **self._replacements,
            )
            self.controller._dispatch = partial(self._dispatch, self.controller._dispatch)
            self.outcome = self.controller.train()
        except BaseException as error:
            self.error = error

    def newest_line(self) -> None:
        """A lab begins without any."""

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        self.spans.extend(timeline)
        self.metrics.append(metrics)
        self.plans.append(plan.step)
        if (since := self._waiting_since) is not None:
            now = time.monotonic()
            until = now + max(_PACE_S, _PACE_SHARE * (now - since))
            while time.monotonic() < until and self._waiting_since == since:
                time.sleep(0.02)

    def _dispatch(self, dispatch: Callable[[StepRunner], None], runner: StepRunner) -> None:
        """Dispatch in place of the controller's. It is held here, where no step runs: a worker that updates waits for
        the commit of the step before, and would not answer until then."""
        if not self._hold.is_set():
            if runner.running or self.controller.committer.num_open:
                return
            self._held.set()
            self._hold.wait()
            self._held.clear()
        dispatch(runner)

    def on_event(self, event: RunEvent) -> None:
        self.events.append(event)

    def before_checkpoint(self) -> None: ...
    def on_checkpoint(self, folder: Path, step: int) -> None: ...


def patiently(start: Callable[[], T]) -> T:
    """What `start` brings up of Ray, which gives each of its processes 30 s: on a busy machine one of them comes up too
    late, and it is tried again."""
    for _ in range(_STARTS - 1):
        try:
            return start()
        except Exception as error:  # Ray raises many kinds
            log.warning("Ray did not start (%s: %s); trying once more", type(error).__name__, error)
    return start()


def _started_cluster() -> Cluster:
    """A head that has room for decoding only: a worker takes two (logical) CPUs."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # what a start that failed has left
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 * 2**20},
    )
    try:
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except BaseException:
        cluster.shutdown()
        raise
    return cluster


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        merged[key] = _merge(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged
