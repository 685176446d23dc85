"""What happens to the disturbed run of `heddle prove`: a worker is killed and comes back, the pool shrinks to half of
its workers and grows again, and at last the run is stopped. Some steps lie before each of these.

    with Disturber(folder, apart=6, least=1) as told:
        train(...)                       # many steps: it ends when all is done
    told.done                            # "after 6 steps: killed w2", ...

It acts from a process of its own, as an operator would: the run's Ray may be one of the machine, which takes all that
is connected to it along when it ends.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from actors.names import known_id
from actors.records.events import GenerationFormed
from app.records.rundir import METRICS, RunDir
from app.records.tails import last_line, number_in
from app.run.fault import kill_worker, seated
from app.run.operator import answer, monitor
from app.run.outcomes import ALL_HAPPENED
from app.run.signals import signals_wait
from app.settings.terminal import say
from ops.code_path import python_environment
from ops.counted import counted
from ops.typed import ConfigError

_LOOK_S = 0.05
_LEAVES_S = 5.0
_PATIENCE_S = 600.0  # for workers to leave or to come, with large models to load
_STANDS_S = 3600.0  # without another step: the run itself says long before that it hangs
_DONE, _ALL = "done: ", "all done"  # how its lines begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """What is done to a run: a worker is killed, or the pool gets another size. In the end it has `then` workers."""

    then: int
    kill: str = ""

    def on(self, run: Path) -> str:
        """Do it; returns what was done. Raises ConfigError where the run has ended."""
        if self.kill:
            kill_worker(run, self.kill)
            return f"killed {self.kill}"
        answer(run, monitor(run).scale.remote(self.then))
        return f"asked for {counted(self.then, 'worker')}"


def acts(workers: list[str], least: int) -> list[Act]:
    """What is done to a run of these workers, in order. Nothing shrinks below `least` (workers.min)."""
    number = len(workers)
    half = max(number // 2, least)
    kill = Act(kill=workers[-1], then=number)
    return [kill, Act(then=half), Act(then=number)] if half < number else [kill]


class Disturber:
    """The process that acts on a run, while that trains."""

    def __init__(self, run: Path, apart: int, least: int, *, leaves_s: float = _LEAVES_S) -> None:
        """`apart`: steps between one act and the next. The process has `leaves_s` to end."""
        self._leaves_s = leaves_s
        self._words = [str(run), str(apart), str(least), known_id(run)]
        self.done: list[str] = []
        self.all_done = False
        self.failed = ""  # why something could not be done; the run was stopped then
        self._leaves = False

    def __enter__(self) -> Disturber:
        with signals_wait():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app.proof.disturbance", *self._words],
                env={**os.environ, **python_environment()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaves = True
        self._process.terminate()
        try:
            self._process.wait(self._leaves_s)
        except subprocess.TimeoutExpired:  # it may be within Ray, which ends
            self._process.kill()
            self._process.wait()
        self._reader.join(self._leaves_s)  # what Ray has started for it may hold the pipe; it ends with this process

    def _read(self, lines: IO[str]) -> None:
        last = "it was ended"
        for line in lines:
            last = line.strip() or last
            if last.startswith(_DONE):
                self.done.append(last.removeprefix(_DONE))
                say(self.done[-1], sys.stdout)
            elif last == _ALL:
                self.all_done = True
        if not (self._leaves or self.all_done):  # the run would go on without an end
            self.failed = last
            os.kill(os.getpid(), signal.SIGTERM)


def main(words: list[str]) -> None:
    """The process itself, of the words RUN APART LEAST EARLIER, the last of which names the run that was in this folder
    before. On stdout a line for what was done, and in the end one that says that all was, or why not."""
    run, apart, least, earlier = Path(words[0]), int(words[1]), int(words[2]), words[3]
    _await_progress(lambda: int(known_id(run) not in ("", earlier)), lambda: 1, f"a run in {run}")
    _await_all(run, apart)
    for act in acts(list(seated(run)), least):
        steps, formed = _steps_done(run), len(_generations(run))
        print(f"{_DONE}after {counted(steps, 'step')}: {act.on(run)}", flush=True)
        _await_workers(run, act.then, formed)
        _await_steps(run, _steps_done(run) + apart)
    answer(run, monitor(run).stop.remote(ALL_HAPPENED))
    print(_ALL, flush=True)  # not before: if it cannot be stopped, somebody has to know


def _await_workers(run: Path, number: int, formed: int) -> None:
    """Until a generation after the first `formed` ones has this number. Raises ConfigError after ten minutes."""
    end = time.monotonic() + _PATIENCE_S
    while not any(len(one.workers) == number for one in _generations(run)[formed:]):
        if time.monotonic() > end:
            raise ConfigError(f"it has not had {counted(number, 'worker')} again in {_PATIENCE_S:.0f} s")
        time.sleep(_LOOK_S)


def _await_all(run: Path, steps: int) -> None:
    """Until a generation has done this number: workers may have come one after the other before it."""
    _await_steps(run, 1)
    _await_progress(
        lambda: _steps_done(run), lambda: _generations(run)[-1].from_step + steps, "another step of all workers"
    )


def _await_steps(run: Path, steps: int) -> None:
    """Until they are done, however long they take together."""
    _await_progress(lambda: _steps_done(run), lambda: steps, "another step")


def _await_progress(done: Callable[[], int], wanted: Callable[[], int], what: str) -> None:
    """Until `done` is `wanted`. Raises ConfigError where it has not changed for an hour."""
    seen, since = done(), time.monotonic()
    while (now := done()) < wanted():
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > _STANDS_S:
            raise ConfigError(f"{what} was awaited for {_STANDS_S:.0f} s. Look at the end of the run's logs.")
        time.sleep(_LOOK_S)


def _end_with_reader() -> None:
    """Whoever has started this process is gone, without an end of its own: another run may come into the folder."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    pipe.poll()
    os._exit(1)


def _generations(run: Path) -> list[GenerationFormed]:
    file = run / "events.jsonl"
    return _generations_in(run, file.stat().st_size if file.is_file() else 0)


@lru_cache(maxsize=1)
def _generations_in(run: Path, size: int) -> list[GenerationFormed]:
    """The generations in the run's events, which are read again when they have another size."""
    return [event for event in RunDir.open(run).events() if isinstance(event, GenerationFormed)]


def _steps_done(run: Path) -> int:
    file = run / METRICS
    return int(number_in(last_line(file) or {}, "step", -1)) + 1 if file.is_file() else 0


if __name__ == "__main__":
    threading.Thread(target=_end_with_reader, daemon=True).start()
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
