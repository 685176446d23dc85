"""Parts of a run for tests that bring up no cluster: each answers as it was set up, and remembers what it was asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.config import CheckpointConfig, PlannerConfig, RuntimeConfig, SnapshotConfig, TrainConfig, WorkersConfig
from actors.feed.step_source import StepSource
from actors.held_state import HeldShard, Origin, Snapshot
from actors.outcome import Events
from actors.plan.types import Item
from actors.pool.membership import Membership
from actors.pool.membership_types import Limits
from actors.records.events import RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.run.assemble import put_together
from actors.run.controller import Controller, LookPace
from actors.run.skips import Skips
from actors.run.step_metrics import StepAccount
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper import Standing
from actors.state.keeper_fleet import Base
from actors.state.recovery import CommitLog, KeeperInventory
from actors.state.run_state import RunState
from actors.step import DataLost, DrawnItem, StepItems
from data.config import DataConfig, SourceConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.shards import ARRAYS


class Remote:
    """A method of an actor in this process: it answers at once, and `asked` holds the arguments of every call."""

    def __init__(self, answer: Callable[..., Any] = lambda *arguments: None) -> None:
        self._answer, self.asked = answer, []  # type: ignore[var-annotated]

    def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return self._answer(*arguments)

    def options(self, **options: Any) -> Remote:
        return self


class Handle:
    """An actor in this process: every method that is not given answers None."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, answer in methods.items():
            setattr(self, name, Remote(answer))

    def __getattr__(self, name: str) -> Remote:
        made = Remote()
        setattr(self, name, made)
        return made


class Listening:
    """Collects events."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.told: list[Any] = []  # events
        self.synced: list[int] = []  # how many steps there were when a checkpoint began
        self.checkpoints: list[int] = []

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: Any) -> None:
        self.steps.append(metrics.step)

    def newest_line(self) -> tuple[int, int] | None:
        return None

    def on_event(self, event: RunEvent) -> None:
        self.told.append(event)

    def before_checkpoint(self) -> None:
        self.synced.append(len(self.steps))

    def on_checkpoint(self, folder: Path, step: int) -> None:
        self.checkpoints.append(step)

    @property
    def kinds(self) -> list[type[RunEvent]]:
        return [type(event) for event in self.told]


def inventories_of(**held: list[HeldShard]) -> list[KeeperInventory]:
    """What keepers say that they hold, each of which is its name."""
    return [KeeperInventory(keeper=name, shards=shards) for name, shards in held.items()]  # type: ignore[arg-type]


class KeepersHere:
    """Stands for the keepers of a run, by their names: what each holds, and how far they know the run is."""

    def __init__(self, standing: Standing | None = None, **inventories: list[HeldShard]) -> None:
        self._inventories, self._standing = inventories_of(**inventories), standing or Standing()
        self.silent: tuple[str, ...] = ()
        self.told: list[tuple[Any, ...]] = []
        self.lost: list[str] = []  # nodes whose memory went with its keeper, as a repair finds
        self.on_draining: list[str] = []  # those whose nodes Ray drains

    def inventories(self, patience_s: float, is_enough: Any) -> list[KeeperInventory]:
        return self._inventories

    def standing(self, patience_s: float) -> Standing:
        return self._standing

    def home(self, rank: int) -> Any:
        return f"home of {rank}"

    def in_use(self) -> dict[str, Any]:
        return {}

    def leaving(self) -> list[str]:
        return [*self.on_draining]

    def gone(self) -> list[str]:
        return []

    def rested(self) -> list[str]:
        return []

    def prepare(self, nodes: Sequence[str], needs_bytes: int = 0, lenders: Any = None) -> list[str]:
        self.told.append(("prepare", tuple(nodes), lenders))
        return []

    def begin(self, base: Base) -> None:
        self.told.append(("begin", base))

    def hold(self, snapshots: Sequence[Snapshot], relays: object = None) -> list[Any]:
        self.told.append(("hold", *(one.step for one in snapshots)))
        return [f"held {one.step}" for one in snapshots]

    def repair(self, nodes: Sequence[str], give_up_s: float, needs_bytes: int = 0) -> list[str]:
        self.told.append(("repair",))
        return self.lost

    def commit(self, step: int, position: Any, pinned: Any = (), relays: Any = None) -> None:
        self.told.append(("commit", step, *pinned))

    def pin(self, steps: Sequence[int]) -> None:
        self.told.append(("pin", *steps))

    def close(self) -> None:
        self.told.append(("close",))


class Writing:
    """Stands for the writer of checkpoints; `write` puts one on disk."""

    def __init__(self, write: Callable[[int], Any] = lambda step: None, *, writes: bool = True) -> None:
        """Without `writes` keepers lose their state before it is written."""
        self._write, self._writes, self.saved = write, writes, []  # type: ignore[var-annotated]
        self.begun: list[Origin] = []

    @property
    def steps(self) -> list[int]:
        return []

    def due(self, step: int) -> bool:
        return False

    def has(self, step: int) -> bool:
        return False

    def save(self, version: Origin, meta: Mapping[str, Any]) -> None:
        assert meta["step"] == version.step
        self.begun.append(version)

    def save_origin(self, origin: Origin, meta: Mapping[str, Any]) -> bool:
        self.saved.append(origin.step)
        self._write(origin.step)
        return self._writes

    def go_back(self, step: int) -> None: ...
    def seal_last(self) -> None: ...
    def poll(self) -> None: ...
    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        look()

    def hurry(self) -> None:
        self.hurries = True


class NoPositions:
    """Nobody knows where the data stands."""

    def token(self, step: int) -> dict[str, Any]:
        raise DataLost("no feeder")


def config_of(run_dir: Path = Path("runs/fake"), **sections: Any) -> RuntimeConfig:
    """The settings of a small run."""
    defaults: dict[str, Any] = {
        "model": ModelConfig(),
        "data": DataConfig(sources=(SourceConfig(path="nowhere"),)),
        "train": TrainConfig(steps=6),
        "workers": WorkersConfig(min=1, max=4, device="cpu"),
        "planner": PlannerConfig(),
        "snapshot": SnapshotConfig(),
        "checkpoint": CheckpointConfig(),
    }
    return RuntimeConfig(run_dir=str(run_dir), **{**defaults, **sections})


def state_of(
    run_dir: Path = Path("runs/fake"),
    *,
    keepers: Any = None,
    writer: Any = None,
    positions: Any = None,
    listener: Listening | None = None,
    **sections: Any,
) -> RunState:
    """A run's state out of these parts; what is not given holds nothing."""
    keepers = keepers or KeepersHere()
    config, tell = config_of(run_dir, **sections), (listener or Listening()).on_event
    return RunState(
        config,
        config.model,
        keepers=keepers,
        standing=keepers.standing(config.snapshot.patience_s),
        writer=writer or Writing(),
        disk=CheckpointsOnDisk(run_dir, tell),
        positions=positions or NoPositions(),
        tell=tell,
    )


class StateHere:
    """Stands for a run's state: checkpoints are on disk up to the steps that `on_disk` gives one after the other."""

    def __init__(self, *on_disk: int, first: int = 5, frees: bool = True, full: Exception | None = None) -> None:
        """`first` is the step that the controller goes on from; `full` is what a write fails with."""
        self._on_disk, self._first, self._frees, self._full = list(on_disk), first, frees, full
        self.asked: list[str] = []
        self.standing, self.writer, self.writes_leaving = Standing(), Writing(), False

    def first(self, recorded: tuple[int, int] | None) -> Origin | None:
        self.recorded = recorded
        return Origin(step=self._first) if self._first >= 0 else None

    def data_token(self, committed: int) -> None: ...

    def step_on_disk(self, until: float = math.inf) -> int:
        return self._on_disk.pop(0) if len(self._on_disk) > 1 else self._on_disk[0]

    def save_leaving(self, committed: int) -> None: ...

    def keep_last(self, world: Sequence[Any], commits: CommitLog) -> int:
        self.asked.append("keep_last")
        if self._full is not None:
            raise self._full
        return -1

    def seal_last(self) -> None:
        self.asked.append("seal_last")

    def free_memory(self, committed: int) -> bool:
        self.asked.append("free_memory")
        return self._frees

    def newest_in_memory(self, committed: int) -> int:
        return committed


class SourceHere:
    """Stands for the data; `open` fails where an error is given."""

    def save_learned(self) -> None: ...
    def ask_learned(self) -> None: ...
    def poll(self) -> None: ...

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed = error, False
        self.avoid: tuple[str, ...] = ()

    def open(self, first_step: int, token: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {}

    def ledger(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


def source_of(feeder: Any) -> StepSource:
    """The controller's side of this feeder; None is one that is not open."""
    made = StepSource(lambda: feeder, Geometry(), "sample", 10, 60.0, nodes=list)
    made._feeder = feeder
    return made


def pool_here(**parts: Any) -> Any:
    """A pool without workers; `parts` replace what it has."""
    defaults: dict[str, Any] = {
        "close": lambda: None,
        "rest": lambda: None,
        "start": lambda count: None,
        "names": [],
        "pending": [],
    }
    return SimpleNamespace(**{**defaults, **parts})


def controller_of(state: Any, **parts: Any) -> Controller:
    """A controller whose parts start nothing; `parts` replace what it has."""
    listener = Listening()
    defaults: dict[str, Any] = {
        "events": Events(listener),
        "pool": pool_here(),
        "monitor": Handle(),
        "lookout": SimpleNamespace(
            look=list, stop="", hopeless="", frozen={}, last_heard=lambda name: "", late=lambda: ""
        ),
        "membership": Membership(Limits(min=1, max=4), generation=1),
        "source": SourceHere(),
        "planner": SourceHere(),
        "new_store": lambda: SimpleNamespace(host="here", port=1),
        "account": StepAccount(geometry=Geometry(), node_of=lambda name: ""),
        "skips": Skips(10, listener.on_event),
        "look_pace": LookPace(least_s=0.0, longest_s=0.0),
    }
    return put_together(**{"config": config_of(), "state": state, **defaults, **parts})


def collected(step: int, generation: int, *snapshots: Snapshot, at: float = 0.0) -> Any:
    """A step that all workers have finished."""
    return SimpleNamespace(
        running=SimpleNamespace(step=step, generation=generation, assignment=None),
        snapshots=snapshots,
        reports=(),
        collected_at=at,
        finished_at=at,
    )


def step_items(
    step: int,
    shapes: Iterable[tuple[str, tuple[int, int, int], Sequence[str]]],
    geometry: Geometry,
    loss_weight: str = "sample",
    experts: Mapping[str, int] | None = None,
    frame_rate: float = 0.0,
    loss_weights: Callable[[str], float] = lambda key: 1.0,
) -> StepItems:
    """A step of these items: id, (frames, height, width), and keys of the samples; `experts` by id; `frame_rate` of all
    clips; `loss_weights` of samples by their keys."""
    drawn = [
        DrawnItem(
            plan=Item(id=item, batch=len(keys), frames=t, height=h, width=w, expert=(experts or {}).get(item, 0)),
            keys=tuple(keys),
            frame_rates=(frame_rate,) * len(keys),
            loss_weights=tuple(map(loss_weights, keys)),
        )
        for item, (t, h, w), keys in shapes
    ]
    return StepItems.of(step, drawn, geometry, loss_weight)


def snapshot(step: int, total: int = 10, generation: int = 1, **more: Any) -> Snapshot:
    """One shard that is the whole state."""
    shard: dict[str, Any] = {"rank": 0, "lo": 0, "hi": total, "bank": 0, "names": ARRAYS, "updates": step + 1, **more}
    return Snapshot(step=step, generation=generation, total=total, **shard)
