"""One run through many faults to its end: struck while it trains, ended, damaged, resumed, and compared."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.blackbox.compare import Truth, deviations, largest_loss_difference
from tests.blackbox.damage import small_disk
from tests.blackbox.faults import BETWEEN, ENDS, LIVE, TWO_STARTS, Fault, Scene
from tests.blackbox.place import Place
from tests.blackbox.run import GONE_S, START_S, STEP_S, Deviation, Run

_DISK_MIB = 24
_TWO_STARTS = 0.3  # of the episodes begin so
_LEAST_LEFT = 4  # steps that a run must have ahead of it to be struck
_MAX_STARTS = 12
_UNDER_WAY = 3  # this number of steps may be committed that were dispatched before the fault


@dataclass(frozen=True)
class Struck:
    """A fault that took effect."""

    name: str
    detail: str
    step: int  # last committed one before it
    seconds: float | None  # to the next newly committed step; None: it ended the start, or was between two


@dataclass
class Result:
    """What came of an episode. `deviations` must be empty."""

    name: str
    seed: int
    struck: list[Struck] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)
    starts: int = 0
    loss_difference: float = 0.0
    seconds: float = 0.0


def reference(place: Place, name: str = "calm") -> Truth:
    """The run that nobody disturbs; one that was made here before is taken again."""
    run = Run(place, name)
    if len(run.events("finish")) == 1 and run.step() == place.steps - 1:
        return Truth.of(run)
    try:
        run.start("--overwrite")
        code = run.code(START_S + place.steps * 10)
        assert code == 0, f"the undisturbed run ended with {code}: {run.said()[-2000:]}"
        return Truth.of(run)
    finally:
        run.close()


class Episode:
    """Draws faults from a seed until `faults` of them struck, then lets the run end."""

    def __init__(
        self,
        place: Place,
        truth: Truth,
        seed: int,
        faults: int,
        only: Sequence[str] = (),
        deadline: float = float("inf"),
    ) -> None:
        """`only`: names of faults to draw from (all, when empty). After `deadline` (monotonic) no more are drawn."""
        self._place, self._truth, self._rng = place, truth, random.Random(seed)
        self._want, self._deadline, self._only = faults, deadline, set(only)
        self._decks: dict[str, list[Fault]] = {}
        self.result = Result(name=f"storm{seed}", seed=seed)

    def play(self) -> Result:
        started = time.monotonic()
        disk = self._place.folder / f"disk{self.result.seed}"
        with small_disk(disk, _DISK_MIB) as own:
            self._play(disk if own and self._rng.random() < 0.5 else None)
        self.result.seconds = time.monotonic() - started
        return self.result

    def _play(self, disk: Path | None) -> None:
        result, settings = self.result, self._settings()
        run = Run(self._place, result.name, settings, folder=disk)
        scene = Scene(place=self._place, run=run, rng=self._rng, whole_disk=disk is not None)
        self._say(f"{result.name}: {settings}")
        try:
            self._through(scene)
        except Deviation as error:
            self._deviates(run, str(error))
        finally:
            result.starts = run.starts
            scene.heal()
            run.close()
            if disk is not None and result.deviations:
                _keep(run.folder, self._place.folder / f"{result.name}.kept")

    def _settings(self) -> dict[str, object]:
        rng = self._rng
        settings: dict[str, object] = {
            "workers.max": rng.choice([2, 2, 3]),
            "planner.strategy": rng.choice(["cascade", "cascade", "knapsack"]),
        }
        if rng.random() < 0.5:
            settings["data.cache.path"] = str(self._place.folder / f"cache{self.result.seed}")
        return settings

    def _through(self, scene: Scene) -> None:
        run = scene.run
        expected = 0
        options = ["--overwrite"] if run.folder.exists() else []
        while True:
            number = len(run.events("start"))  # of earlier starts
            if run.starts == 0 and not self._only and self._rng.random() < _TWO_STARTS:
                self._count(TWO_STARTS, TWO_STARTS.strike(scene), -1, None)
            else:
                run.start(*options)
            self._begins(scene, number + 1, expected)
            if not self._storm(scene):
                break
            expected = self._between(scene)
            options = ["--resume"]
            if run.starts >= _MAX_STARTS:
                raise Deviation(f"{_MAX_STARTS} starts and no end")
        self._finish(scene)

    def _begins(self, scene: Scene, number: int, expected: int) -> None:
        run = scene.run
        if not run.wait_for_start(number):
            raise Deviation(f"start {run.starts} did not begin: exit code {run.code(0.1)}: {_words(run)}")
        begun = run.beginning()
        assert begun is not None
        if begun["from_step"] != expected:
            raise Deviation(
                f"start {run.starts} began at step {begun['from_step']} (state: {begun['origin']}), not at "
                f"{expected}; whole checkpoints {scene.whole()}, damaged {sorted(scene.damaged)}"
            )
        came = run.wait_for_step(min(expected + 1, self._place.steps - 1), START_S, since=begun["time"])
        if not came and run.alive:
            raise Deviation(f"no step in {START_S:.0f} s after start {run.starts}: {_words(run)}")

    # -- while it trains -----------------------------------------------------------------------------------------------

    def _storm(self, scene: Scene) -> bool:
        """Strike a few times; then end this start. False when the run goes to its end instead."""
        run, rng = scene.run, self._rng
        for _ in range(rng.randint(4, 12)):
            if not self._more(run):
                return False
            fault = self._draw(LIVE)
            if not self._strike(scene, fault):
                return True
            pause = min(run.step() + rng.randint(0, 2), self._place.steps - 1)
            if not run.wait_for_step(pause, STEP_S) and run.alive:
                raise Deviation(f"no step in {STEP_S:.0f} s after {self.result.struck[-1:]}: {_words(run)}")
            if fault is not None and fault.may_end and not run.alive and run.code(1) != 0:
                self._must_have_ended(scene, fault)  # some steps later
                return True
        return self._more(run) and self._end(scene)

    def _more(self, run: Run) -> bool:
        enough = len(self.result.struck) >= self._want or time.monotonic() > self._deadline
        return not enough and run.alive and run.step() < self._place.steps - 1 - _LEAST_LEFT

    def _draw(self, kinds: Sequence[Fault]) -> Fault | None:
        """Each kind once before one comes again."""
        deck = self._decks.setdefault(kinds[0].name, [])
        if not deck:
            deck.extend(fault for fault in kinds if not self._only or fault.name in self._only)
            self._rng.shuffle(deck)
        return deck.pop() if deck else None

    def _strike(self, scene: Scene, fault: Fault | None) -> bool:
        """False when the fault has ended this start, as it may."""
        if fault is None:
            return True
        run, at = scene.run, time.time()
        step, back = run.step(), len(run.events("fallback"))
        detail = self._do(scene, fault)
        if not detail:
            return True
        goal = min(run.step() + _UNDER_WAY + 1, self._place.steps - 1)  # from now on: striking has taken some steps
        came = run.wait_for_step(goal, fault.patience_s, since=at)
        if fault.heal_first and run.alive:
            came = run.wait_for_step(min(run.step() + 12, self._place.steps - 1), fault.patience_s, since=at)
        newer = [line["time"] - at for line in run.metrics() if line["time"] > at]
        self._count(fault, detail, step, min(newer, default=None))
        if not came and not (run.alive is False and run.code(1) == 0):
            self._must_have_ended(scene, fault)
            return False
        scene.heal()
        if len(run.events("fallback")) > back and not fault.may_roll_back:
            raise Deviation(f"{fault.name} ({detail}) cost steps: {run.events('fallback')[-1]}")
        return True

    def _do(self, scene: Scene, fault: Fault) -> str:
        try:
            return fault.strike(scene)
        except Deviation as error:
            self._count(fault, "deviated", scene.run.step(), None)
            self._deviates(scene.run, f"{fault.name}: {error}")
            return ""

    def _must_have_ended(self, scene: Scene, fault: Fault) -> None:
        """The fault has kept the run from going on: it must have ended, in a way that is allowed."""
        run = scene.run
        code = run.code(fault.patience_s if fault.may_end else 1.0)
        if code is None:
            raise Deviation(f"no step and no end {fault.patience_s:.0f} s after {fault.name}: {_words(run)}")
        if code not in fault.may_end and not (code > 128 and 128 - code in fault.may_end):
            self._deviates(run, f"{fault.name} ended the run with exit code {code}, not {fault.may_end}: {_words(run)}")
        if "Traceback" in run.said() and code != 0:
            self._deviates(run, f"{fault.name} ended with a traceback on the console: {_words(run)}")
        self._leaves_nothing(scene, fault)
        last, found = self._last_of_this_start(run), scene.whole()
        if fault.keeps_last and last is not None and (not found or found[-1] != last):
            self._deviates(run, f"{fault.name}: step {last} is committed, the newest checkpoint is {found[-1:]}")

    def _last_of_this_start(self, run: Run) -> int | None:
        """Its newest committed step; None before its first. Steps of a start that was killed may be lost with it."""
        begun = run.beginning()
        since = begun["time"] if begun is not None else time.time()
        return max((line["step"] for line in run.metrics() if line["time"] > since), default=None)

    def _leaves_nothing(self, scene: Scene, fault: Fault) -> None:
        assert scene.run.processes is not None
        if left := scene.run.processes.wait_until_gone(GONE_S):
            self._deviates(scene.run, f"{GONE_S:.0f} s after {fault.name} these live: {left}")
            scene.run.processes.end_all()

    def _end(self, scene: Scene) -> bool:
        """Strike so that this start ends. True: it did and there is something to resume."""
        fault = self._draw(ENDS)
        if fault is None:
            return False
        run, at = scene.run, time.time()
        step = run.step()
        detail = self._do(scene, fault)
        if not detail:
            return self._end(scene) if run.alive and not self._only else False
        code = run.code(max(fault.patience_s, 180.0))
        self._count(fault, detail, step, None)
        if code == 0 and run.step() == self._place.steps - 1:
            return False
        if code is None and run.events("finish") == [] and run.wait_for_step(step + 3, 30.0, since=at):
            scene.heal()  # it has outlived what may end it
            return self._end(scene)
        self._must_have_ended(scene, fault)
        return True

    # -- between two starts --------------------------------------------------------------------------------------------

    def _between(self, scene: Scene) -> int:
        """Damage what lies there. Returns the step at which the next start must begin."""
        scene.heal()
        for _ in range(self._rng.randint(0, 3)):
            if len(self.result.struck) >= self._want or time.monotonic() > self._deadline:
                break
            if (fault := self._draw(BETWEEN)) is not None and (detail := self._do(scene, fault)):
                self._count(fault, detail, scene.run.step(), None)
        return scene.whole()[-1] + 1 if scene.whole() else 0

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, scene: Scene) -> None:
        run = scene.run
        run.wait_for_step(self._place.steps - 1, STEP_S)
        code = run.code(STEP_S)
        if code != 0:
            raise Deviation(f"the run did not end: exit code {code} at step {run.step()}: {_words(run)}")
        assert run.processes is not None
        if left := run.processes.wait_until_gone(GONE_S):
            self._deviates(run, f"{GONE_S:.0f} s after the end these live: {left}")
        self.result.loss_difference = largest_loss_difference(run, self._truth)
        for words in deviations(run, self._truth, run.settings):
            self._deviates(run, words)

    def _count(self, fault: Fault, detail: str, step: int, seconds: float | None) -> None:
        self.result.struck.append(Struck(fault.name, detail, step, seconds))
        self._say(f"  {len(self.result.struck)}. step {step}: {detail}" + (f" -> {seconds:.1f} s" if seconds else ""))

    def _deviates(self, run: Run, words: str) -> None:
        self.result.deviations.append(words)
        self._say(f"  DEVIATION in {run.name} start {run.starts}: {words}")

    def _say(self, words: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def _words(run: Run) -> str:
    """The last that the run said."""
    return run.said()[-700:].strip()


def _keep(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to, dirs_exist_ok=True, ignore_dangling_symlinks=True)
