"""The faults: what each does to a run, and what the run may do about it.

A fault strikes while steps are taken (`LIVE`), ends a start (`ENDS`), or is done to what lies there between two starts
(`BETWEEN`). It returns a few words about what it did, or "" when there was nothing to strike, which is not counted.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.blackbox import damage
from tests.blackbox.place import ROOT, Place
from tests.blackbox.processes import MARK, Processes, wait_for
from tests.blackbox.run import Deviation, Run

FAILURE, USAGE, DATA, RESUMABLE = 1, 2, 4, 75
FREEZE_S = (0.5, 14.0)  # some outlast place.SUSPECT_S
_ANSWER_S = 150.0  # a refusal comes within this time on a busy machine
_NEAR_END = 50  # steps, in which a run may end before another process has started

Undo = Callable[[], object]


@dataclass
class Scene:
    """A run in the hands of the faults."""

    place: Place
    run: Run
    rng: random.Random
    whole_disk: bool  # the run's folder is a small file system of its own
    damaged: dict[int, float] = field(default_factory=dict)  # step of a checkpoint -> when it was damaged
    undo: list[Undo] = field(default_factory=list)  # takes back what was done

    def pids(self, role: str) -> list[int]:
        assert self.run.processes is not None
        return self.run.processes.of(role)

    def heal(self) -> None:
        while self.undo:
            self.undo.pop()()

    def whole(self) -> list[int]:
        """Steps of checkpoints that a resume may choose, oldest first."""
        written = {event["step"]: event["time"] for event in self.run.events("checkpoint")}
        return [s for s in self.run.checkpoints() if s not in self.damaged or written.get(s, 0) > self.damaged[s]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`strike` does it. The rest is what the run may do."""

    name: str
    strike: Callable[[Scene], str]
    may_roll_back: bool = False  # steps may be lost that only keepers held
    may_end: tuple[int, ...] = ()  # exit codes with which this start may end
    keeps_last: bool = False  # what ends so has its last committed step on disk
    heal_first: bool = False  # the run cannot go on before the harness takes the fault back
    patience_s: float = 240.0


# Signals ------------------------------------------------------------------------------------------------------------


def _send(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _signalled(role: str, number: signal.Signals) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        pids = scene.pids(role)
        if not pids:
            return ""
        pid = scene.rng.choice(pids) if role == "worker" else pids[-1]
        return f"{number.name} to {role} {pid}" if _send(pid, number) else ""

    return strike


def _two_workers(scene: Scene) -> str:
    pids = scene.pids("worker")
    if len(pids) < 2:
        return ""
    return f"SIGKILL to workers {[pid for pid in scene.rng.sample(pids, 2) if _send(pid, signal.SIGKILL)]}"


def _worker_and_keeper(scene: Scene) -> str:
    workers, keepers = scene.pids("worker"), scene.pids("keeper")
    if not workers or not keepers:
        return ""
    _send(workers[-1], signal.SIGKILL)
    _send(keepers[-1], signal.SIGKILL)
    return f"SIGKILL to worker {workers[-1]} and keeper {keepers[-1]}"


def _two_after_another(scene: Scene) -> str:
    """The second strikes while the run recovers from the first."""
    first, second = scene.rng.sample(["worker", "worker", "feeder", "planner", "monitor", "controller"], 2)
    struck = []
    for role in (first, second):
        if (pids := scene.pids(role)) and _send(pid := scene.rng.choice(pids), signal.SIGKILL):
            struck.append(f"{role} {pid}")
        time.sleep(scene.rng.uniform(0.0, 3.0))
    return f"SIGKILL to {', then '.join(struck)}" if struck else ""


def _frozen(role: str, longest_s: float = FREEZE_S[1]) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        pids = scene.pids(role)
        if not pids:
            return ""
        pid, seconds = scene.rng.choice(pids), round(scene.rng.uniform(FREEZE_S[0], longest_s), 1)
        if not _send(pid, signal.SIGSTOP):
            return ""
        time.sleep(seconds)
        _send(pid, signal.SIGCONT)
        return f"{role} {pid} stopped for {seconds} s"

    return strike


# A person's hands ---------------------------------------------------------------------------------------------------


def _heddle(scene: Scene, *words: str) -> subprocess.CompletedProcess[str]:
    done = scene.run.heddle("workers", *words)
    if done.returncode and "Traceback" in done.stderr:
        raise Deviation(f"heddle workers {' '.join(words)} ended with a traceback: {done.stderr[-300:]}")
    return done


def _scale(scene: Scene) -> str:
    target = scene.rng.randint(1, 3)
    done = _heddle(scene, "scale", str(scene.run.folder), str(target))
    return f"heddle workers scale {target}: exit code {done.returncode} {done.stderr[-100:]}"


def _drain(scene: Scene) -> str:
    generations = scene.run.events("generation")
    names = generations[-1]["workers"] if generations else []
    if len(names) < 2:
        return ""
    name = scene.rng.choice(names)
    done = _heddle(scene, "drain", str(scene.run.folder), name, "--wait-s", "0")
    return f"heddle workers drain {name}: exit code {done.returncode} {done.stderr[-100:]}"


def _stop(scene: Scene) -> str:
    done = _heddle(scene, "stop", str(scene.run.folder), "--wait-s", "0")
    return f"heddle workers stop: exit code {done.returncode} {done.stderr[-100:]}"


def _second_start(scene: Scene) -> str:
    """The same folder from another terminal: refused with a sentence, and the first one is not disturbed. A start that
    comes when the run has just ended has nothing to do, or trains the same anew; near the end none overwrites it."""
    option = scene.rng.choice(["--resume", "--overwrite", ""])
    if option == "--overwrite" and scene.place.steps - scene.run.step() < _NEAR_END:
        option = "--resume"
    config = (scene.run.folder / "config.yaml").read_bytes()
    done, output = _other_start(scene, *([option] if option else []))
    if done == 0 and option and not scene.run.alive and scene.run.code(0.1) == 0:
        return f"second start {option}: the run had just ended"
    if done != USAGE or "Traceback" in output:
        raise Deviation(f"{option or 'plain'} beside the live run was answered with {done}: {output[-400:]}")
    if (scene.run.folder / "config.yaml").read_bytes() != config:
        raise Deviation(f"{option or 'plain'} was refused, but has changed config.yaml")
    return f"second start {option}: refused"


def _other_start(scene: Scene, *more: str, settings: dict[str, object] | None = None) -> tuple[int | None, str]:
    """Exit code and output of another start in this folder; None when it has not ended in time. Nothing is left."""
    other = Other(scene, *more, settings=settings)
    if not wait_for(lambda: other.code() is not None, _ANSWER_S) and not scene.run.alive:
        wait_for(lambda: other.code() is not None, _ANSWER_S)  # it starts a Ray to look at a run that has ended
    return other.code(), other.close()


class Other:
    """Another start in the same folder."""

    def __init__(self, scene: Scene, *more: str, settings: dict[str, object] | None = None) -> None:
        mark = f"{scene.run.name}-other-{scene.rng.randrange(1 << 30)}"
        self._processes = Processes(mark)
        self._output = scene.place.folder / f"{mark}.out"
        command = scene.place.command(scene.run.name, *more, settings={**scene.run.settings, **(settings or {})})
        with self._output.open("wb") as file:
            self._driver = subprocess.Popen(
                command,
                cwd=ROOT,
                env=scene.place.environment(**{MARK: mark}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def code(self) -> int | None:
        return self._driver.poll()

    def close(self) -> str:
        """End it if it lives. Returns what it said."""
        self._processes.end_all()
        self._driver.wait()
        self._processes.close()
        said = self._output.read_text(errors="replace")
        self._output.unlink()
        return said


def _two_starts(scene: Scene) -> str:
    """Two terminals start the same new run at once: one trains, the other is refused with a sentence."""
    run, other = scene.run, Other(scene)
    run.start()
    wait_for(lambda: other.code() is not None or not run.alive, _ANSWER_S)
    first, second = run.code(0.1), other.code()
    wins = "the first" if second == USAGE and first is None else "the second" if first == USAGE else "nobody"
    said = other.close()
    if wins == "nobody" or "Traceback" in said:
        raise Deviation(f"two starts at once ended with {first} and {second}: {said[-300:]}")
    if wins == "the second":
        run.start("--overwrite")
    return f"two starts at once: {wins} trains"


# Files under a live run ---------------------------------------------------------------------------------------------


def _shard_away(scene: Scene) -> str:
    away = damage.Away(scene.rng.choice(scene.place.shards()))
    scene.undo.append(away.back)
    return f"{away.path.name} is gone"


def _cache_garbled(scene: Scene) -> str:
    return _cache(scene, damage.garble)


def _cache_cut(scene: Scene) -> str:
    return _cache(scene, damage.truncate)


def _cache_removed(scene: Scene) -> str:
    return _cache(scene, damage.remove)


def _cache(scene: Scene, harm: Callable[[Path, random.Random], str]) -> str:
    folder = str(scene.run.settings.get("data.cache.path", ""))
    entries = sorted(Path(folder).rglob("*.npy")) if folder else []
    chosen = scene.rng.sample(entries, min(len(entries), 1 + len(entries) // 4))
    done = []
    for path in chosen:
        with suppress(OSError):
            done.append(harm(path, scene.rng))
    return f"{len(done)} cache entries: {done[0]}" if done else ""


def _cache_locked(scene: Scene) -> str:
    folder = Path(str(scene.run.settings.get("data.cache.path", "/nowhere")))
    if not folder.is_dir():
        return ""
    locked = damage.Locked(folder)
    scene.undo.append(locked.back)
    if not locked.works:
        scene.heal()
        return ""
    return "the cache cannot be written"


def _old_checkpoint_away(scene: Scene) -> str:
    steps = scene.run.checkpoints()
    if len(steps) < 2:
        return ""
    with suppress(OSError):
        return damage.remove(scene.run.folder / "checkpoints" / f"step-{steps[0]}", scene.rng)
    return ""


def _disk_full(scene: Scene) -> str:
    """To the end: of two finished steps none is recorded."""
    if not scene.whole_disk:
        return ""
    full = damage.Full(scene.run.folder.parent)
    scene.undo.append(full.back)
    time.sleep(scene.rng.uniform(0.2, 10.0))
    scene.run.signal(signal.SIGTERM)
    return "the disk is full, and SIGTERM"


def _folder_locked(scene: Scene) -> str:
    locked = damage.Locked(scene.run.folder)
    scene.undo.append(locked.back)
    if not locked.works:
        scene.heal()
        return ""
    return "the run's folder cannot be written"


def _disk_full_for_a_while(scene: Scene) -> str:
    if not scene.whole_disk:
        return ""
    full = damage.Full(scene.run.folder.parent)
    seconds = scene.rng.choice((scene.rng.uniform(0.2, 3.0), scene.rng.uniform(3.0, 20.0)))
    time.sleep(seconds)
    full.back()
    return f"the disk was full for {seconds:.1f} s"


# Ends ---------------------------------------------------------------------------------------------------------------


def _to_driver(number: signal.Signals) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        scene.run.signal(number)
        return f"{number.name} to the driver"

    return strike


def _to_group(number: signal.Signals) -> Callable[[Scene], str]:
    """To the group of the process that was started, as a terminal, `timeout` and systemd do."""

    def strike(scene: Scene) -> str:
        os.killpg(scene.run.pid, number)
        return f"{number.name} to the driver's group"

    return strike


def _to_all(scene: Scene) -> str:
    """What a machine does that loses its power."""
    assert scene.run.processes is not None
    scene.run.processes.end_all()
    return "SIGKILL to every process"


# Between two starts -------------------------------------------------------------------------------------------------


def _newest_shard(harm: Callable[[Path, random.Random], str]) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        folder = _newest_folder(scene)
        shards = sorted(folder.glob("shard-*.safetensors")) if folder else []
        return _harm_checkpoint(scene, scene.rng.choice(shards), harm) if shards else ""

    return strike


def _newest_file(name: str, harm: Callable[[Path, random.Random], str]) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        folder = _newest_folder(scene)
        return _harm_checkpoint(scene, folder / name, harm) if folder else ""

    return strike


def _newest_removed(scene: Scene) -> str:
    folder = _newest_folder(scene)
    return _harm_checkpoint(scene, folder, damage.remove) if folder else ""


def _newest_folder(scene: Scene) -> Path | None:
    """The folder of the newest whole checkpoint; another whole one stays."""
    whole = scene.whole()
    return scene.run.folder / "checkpoints" / f"step-{whole[-1]}" if len(whole) > 1 else None


def _harm_checkpoint(scene: Scene, path: Path, harm: Callable[[Path, random.Random], str]) -> str:
    scene.damaged[scene.whole()[-1]] = time.time()
    return harm(path, scene.rng)


def _torn_metrics(scene: Scene) -> str:
    return damage.tear(scene.run.folder / "metrics.jsonl", scene.rng)


def _torn_events(scene: Scene) -> str:
    return damage.tear(scene.run.folder / "events.jsonl", scene.rng)


def _torn_timeline(scene: Scene) -> str:
    return damage.tear(scene.run.folder / "timeline.jsonl", scene.rng)


def _index(harm: Callable[[Path, random.Random], str]) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        files = sorted((scene.place.data / "shards" / ".heddle-index").glob("*.parquet"))
        return harm(scene.rng.choice(files), scene.rng) if files else ""

    return strike


def _left_aside(scene: Scene) -> str:
    """What a write leaves that was cut short: a checkpoint without COMPLETE, a file with its temporary name."""
    folder = scene.run.folder / "checkpoints" / f"step-{max(scene.run.checkpoints(), default=0) + 1}"
    if folder.exists():
        return ""
    folder.mkdir(parents=True)
    (folder / ".shard-0-10.safetensors.77.part").write_bytes(b"\0" * 1000)
    return f"{folder.name} with half a shard and no COMPLETE"


def _outcome_garbled(scene: Scene) -> str:
    (scene.run.folder / "outcome.json").write_text('{"code": ')
    return "outcome.json is half written"


def _other_workers(scene: Scene) -> str:
    count = scene.rng.choice([n for n in (1, 2, 3) if n != scene.run.settings.get("workers.max", 2)])
    scene.run.settings["workers.max"] = count
    return f"resume with {count} workers"


def _other_strategy(scene: Scene) -> str:
    strategy = scene.rng.choice(["static", "longest_first", "flexsp", "knapsack", "cascade", "genetic"])
    scene.run.settings["planner.strategy"] = strategy
    return f"resume with strategy {strategy}"


_OTHER_TRAININGS: tuple[dict[str, object], ...] = (
    {"train.seed": 5},
    {"model.dit.num_heads": 2, "model.dit.head_dim": 16},
    {"model.dit.num_layers": 3},
    {"model.dit.ffn_dim": 128},
    {"train.flow.flow_shift": 5.0},
    {"model.text.seed": 7},
    {"data.items_per_step": 3},
    {"data.buckets.table": "[1x32x48,5x32x48]"},
    {"train.optimizer.ema_decay": 0.0},
)


def _other_training(scene: Scene) -> str:
    """A resume with settings that would make another training of it: refused, nothing is changed."""
    changed = scene.rng.choice(_OTHER_TRAININGS)
    _must_be_refused(scene, f"a resume with {changed}", (USAGE, DATA), settings=changed)
    return f"resume with {changed}: refused"


def _another_schedule(scene: Scene) -> dict[str, object]:
    """A setting that a resume may change, and that a refused one must not."""
    return {"snapshot.every": scene.rng.randint(2, 9)}


def _shard_overwritten(scene: Scene) -> str:
    """A shard with other content than the run has trained on: refused; put back before the next start."""
    shards = scene.place.shards()
    path, other = scene.rng.sample(shards, 2)
    swapped = damage.Swapped(path, other.read_bytes())
    try:
        what = f"a resume after {path.name} was replaced by {other.name}"
        _must_be_refused(scene, what, (DATA, USAGE), settings=_another_schedule(scene))
    finally:
        swapped.back()
    return f"{path.name} was replaced by {other.name}: refused"


def _shard_missing(scene: Scene) -> str:
    away = damage.Away(scene.rng.choice(scene.place.shards()))
    try:
        _must_be_refused(scene, f"a resume without {away.path.name}", (DATA, USAGE), settings=_another_schedule(scene))
    finally:
        away.back()
    return f"resume without {away.path.name}: refused"


def _start_locked(scene: Scene) -> str:
    """A resume in a folder that cannot be written ends with a sentence."""
    locked = damage.Locked(scene.run.folder)
    try:
        if not locked.works:
            return ""
        _must_be_refused(scene, "a resume in a folder that cannot be written", (FAILURE, USAGE))
    finally:
        locked.back()
    return "resume in a folder that cannot be written: refused"


def _must_be_refused(
    scene: Scene, what: str, codes: tuple[int, ...], settings: dict[str, object] | None = None
) -> None:
    folder = scene.run.folder
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "events.jsonl")}
    code, output = _other_start(scene, "--resume", settings=settings)
    if code not in codes or "Traceback" in output:
        raise Deviation(f"{what} was answered with {code}, not {codes}: {output[-500:]}")
    for name in ("config.yaml", "metrics.jsonl"):
        if (folder / name).read_bytes() != before[name]:
            raise Deviation(f"{what} was refused, but has changed {name}")


def _live(name: str, strike: Callable[[Scene], str], **more: Any) -> Fault:
    return Fault(name=name, strike=strike, **more)


_KILL, _TERM, _HUP, _INT = signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT
_HELPERS = ("feeder", "planner", "keeper", "monitor", "controller")

TWO_STARTS = _live("two starts at once", _two_starts)

LIVE: tuple[Fault, ...] = (
    *(_live(f"kill {role}", _signalled(role, _KILL)) for role in ("worker", *_HELPERS)),
    *(_live(f"terminate {role}", _signalled(role, _TERM)) for role in ("worker", *_HELPERS)),
    _live("hang up worker", _signalled("worker", _HUP)),
    _live("kill two workers", _two_workers),
    _live("kill one after another", _two_after_another),
    _live("kill worker and keeper", _worker_and_keeper, may_roll_back=True),
    *(_live(f"freeze {role}", _frozen(role)) for role in ("worker", *_HELPERS, "train_controller", "driver")),
    _live("freeze raylet", _frozen("raylet", 6.0)),
    _live("scale", _scale),
    _live("drain", _drain),
    _live("second start", _second_start),
    _live("cache garbled", _cache_garbled),
    _live("cache cut", _cache_cut),
    _live("cache removed", _cache_removed),
    _live("cache locked", _cache_locked),
    _live("old checkpoint removed", _old_checkpoint_away),
    _live("disk full for a while", _disk_full_for_a_while),
    _live("shard gone", _shard_away, may_end=(FAILURE, DATA), keeps_last=True, heal_first=True),
)

ENDS: tuple[Fault, ...] = (
    *(
        _live(f"{name} driver", _to_driver(number), may_end=(RESUMABLE,), keeps_last=True)
        for name, number in (("terminate", _TERM), ("interrupt", _INT), ("hang up", _HUP))
    ),
    *(
        _live(f"{name} group", _to_group(number), may_end=(RESUMABLE,), keeps_last=True)
        for name, number in (("terminate", _TERM), ("hang up", _HUP))
    ),
    _live("stop", _stop, may_end=(RESUMABLE,), keeps_last=True),
    _live("kill driver", _to_driver(_KILL), may_end=(-9,)),
    _live("kill all", _to_all, may_end=(-9,)),
    _live("kill raylet", _signalled("raylet", _KILL), may_end=(FAILURE,)),
    _live("terminate raylet", _signalled("raylet", _TERM), may_end=(FAILURE, RESUMABLE)),
    _live("kill gcs", _signalled("gcs", _KILL), may_end=(FAILURE,)),
    _live("kill train_controller", _signalled("train_controller", _KILL), may_end=(FAILURE,), keeps_last=True),
    _live("disk full to the end", _disk_full, may_end=(RESUMABLE,)),
    _live("folder locked", _folder_locked, may_end=(FAILURE,)),
)

BETWEEN: tuple[Fault, ...] = (
    *(
        _live(f"checkpoint shard: {harm.__name__}", _newest_shard(harm))
        for harm in (damage.truncate, damage.flip, damage.zero_tail, damage.remove)
    ),
    *(
        _live(f"meta.json: {harm.__name__}", _newest_file("meta.json", harm))
        for harm in (damage.truncate, damage.flip, damage.remove)
    ),
    *(
        _live(f"COMPLETE: {harm.__name__}", _newest_file("COMPLETE", harm))
        for harm in (damage.truncate, damage.garble, damage.remove)
    ),
    _live("checkpoint removed", _newest_removed),
    _live("half a line of metrics", _torn_metrics),
    _live("half a line of events", _torn_events),
    _live("half a line of timeline", _torn_timeline),
    *(_live(f"index: {harm.__name__}", _index(harm)) for harm in (damage.truncate, damage.garble, damage.remove)),
    _live("torn checkpoint left", _left_aside),
    _live("outcome half written", _outcome_garbled),
    _live("cache garbled", _cache_garbled),
    _live("cache cut", _cache_cut),
    _live("other number of workers", _other_workers),
    _live("other strategy", _other_strategy),
    _live("another training", _other_training),
    _live("shard overwritten", _shard_overwritten),
    _live("shard missing", _shard_missing),
    _live("folder locked at start", _start_locked),
)
