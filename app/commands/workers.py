"""`heddle workers`: shows, drains, adds, scales, kills and stops the workers of a live run. All but a kill and a
machine that joins is asked of the run's monitor actor."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from actors.outcome import Exit
from app.run.operator import ANSWER_S, NoMonitor, answer, ask_to_leave_lora_files, how_it_ended, lives, monitor
from app.settings.terminal import say
from ops.counted import counted
from ops.typed import ConfigError

if TYPE_CHECKING:
    from actors.pool.monitor import MonitorReport

QUIET_S = 10.0  # workers that live are heard every second or two

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Run = Annotated[Path, typer.Argument(help="Run directory, e.g. runs/demo.")]


@app.command("list")
def list_workers(run: Run) -> None:
    """Every worker with what it does right now, and where its GPU sits."""
    report = answer(run, monitor(run).report.remote())
    warn_if_quiet(run, report)
    print(f"generation {report.generation}" if report.generation >= 0 else "no generation yet")
    if report.trouble:
        print(report.trouble)
    for name, seen in sorted(report.seen.items()):
        progress, age = seen.progress, report.now - seen.at
        leaving = "  leaving" if progress.leaving or name in report.wishes.drain else ""
        phase = f" ({progress.phase})" if progress.phase not in ("", progress.activity) else ""
        doing = f"{progress.activity}{phase} for {max(report.now - seen.since, 0):.1f} s"
        step = str(progress.step) if progress.step >= 0 else "-"
        place = f"  [{progress.place}]" if progress.place.known else ""
        host = f"  on {progress.host}" if progress.host else ""
        print(f"{name:8} step {step:<6} heard {age:4.1f} s ago  {doing}{host}{place}{leaving}")


@app.command()
def drain(
    run: Run,
    names: Annotated[list[str], typer.Argument(help="Names from `heddle workers list`, e.g. w2.")],
    wait_s: Annotated[float, typer.Option(help="Seconds to wait until they are gone; 0 does not wait.")] = 60.0,
) -> None:
    """Let these workers finish their work, hand over their state and leave at a step boundary. Exit code 75 where they
    are still there when the wait is over."""
    actor = monitor(run)
    report = answer(run, actor.report.remote())
    known = report.seen
    warn_if_quiet(run, report)
    if missing := [name for name in names if name not in known]:
        there = ", ".join(sorted(known)) or "none yet"
        raise ConfigError(f"worker {', '.join(missing)} is not in the run; it has {there}.")
    answer(run, actor.drain.remote(tuple(names)))
    _say_wait(wait_s, f"{', '.join(names)} to leave")
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        left = [name for name in names if name in answer(run, actor.report.remote()).seen]
        if not left:
            print(f"{', '.join(names)} left")
            return
        time.sleep(0.5)
    print(f"{', '.join(names)} will leave at the end of the step")
    _not_yet(wait_s)


@app.command("kill")
def kill_one(run: Run, name: Annotated[str, typer.Argument(help="Name from `heddle workers list`, e.g. w2.")]) -> None:
    """End a worker's process without a word, as a fault would: to see what the run does then."""
    from app.run.fault import kill_worker

    found = kill_worker(run, name)
    print(f"killed {found.worker} (process {found.pid} on {found.host})")


@app.command()
def join(
    run: Annotated[
        Path | None, typer.Argument(help="Run directory of a run that lives or will start.", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster instead, HOST:PORT.", show_default=False)
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Address of this machine, as the others reach it; default: the one that reaches the cluster."
        ),
    ] = "",
    wait_s: Annotated[float, typer.Option(help="Seconds to wait for a cluster to answer.")] = 3600.0,
    leave_s: Annotated[
        float, typer.Option(help="Seconds that workers of this machine have to finish, once it is to leave.")
    ] = 120.0,
    to_the_end: Annotated[
        bool, typer.Option("--to-the-end", help="Leave when the cluster ends and no sooner: signals are for the run.")
    ] = False,
    temp_dir: Annotated[
        Path | None,
        typer.Option(
            help="Of Ray's files on this machine alone, removed at the end; its logs stay where the run has failed. "
            "Default: a folder of the same name as on the cluster's head, and they stay.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Add this machine to the Ray cluster of a run until the run has ended, also when it starts anew; SIGTERM, SIGUSR1
    or Ctrl-C: its workers finish the steps that they were given, then it leaves."""
    from app.run.join import Joining, join_until_told

    if (run is None) == (cluster is None):
        raise typer.BadParameter("give the folder of a run or --cluster HOST:PORT, one of the two.")
    given = Joining(
        run=run,
        cluster=cluster,
        address=address,
        wait_s=wait_s,
        leave_s=leave_s,
        to_the_end=to_the_end,
        temp_dir=temp_dir,
    )
    raise typer.Exit(join_until_told(given))


@app.command()
def scale(run: Run, count: Annotated[int, typer.Argument(help="Workers to keep from now on.", min=1)]) -> None:
    """Grow or shrink the pool, within workers.min and workers.max of the config."""
    actor = monitor(run)
    warn_if_quiet(run, answer(run, actor.report.remote()))
    answer(run, actor.scale.remote(count))
    print(f"the run keeps {_within_limits(run, count)} from the next step boundary on")


def _within_limits(run: Path, count: int) -> str:
    """'3 workers'; or what the limits in the run's config make of the count, and why."""
    try:
        limits = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["workers"]
        least, most = int(limits["min"]), int(limits["max"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return f"{counted(count, 'worker')}, within workers.min and workers.max,"
    if least <= count <= most:
        return counted(count, "worker")
    name, limit = ("min", least) if count < least else ("max", most)
    return f"{counted(limit, 'worker')} (workers.{name}, not {count})"


@app.command()
def stop(
    run: Run, wait_s: Annotated[float, typer.Option(help="Seconds to wait for the end; 0 does not wait.")] = 300.0
) -> None:
    """End a run after its running steps: it writes a checkpoint and ends with exit code 75, and `--resume` continues
    it. One that has taken its last step no longer waits for LoRA files.

    This command's own exit code is 0 once the run has ended (with --wait-s 0 at once), and 75 where it still lives when
    the wait is over: nothing may copy its folder yet.
    """
    was_seen = lives(run)  # not where its folder alone is mounted: its lock lies beside it

    def has_ended() -> bool:
        return bool(how_it_ended(run)) or (was_seen and not lives(run))

    try:
        actor = monitor(run)
    except NoMonitor:
        if not (was_seen and ask_to_leave_lora_files(run)):
            raise
        _say_wait(wait_s, "the end of the run, which has taken its last step")
        _await_the_end(
            has_ended,
            wait_s,
            time.monotonic() + wait_s,
            meanwhile="the run has taken its last step, and ends without the LoRA files that it waits for",
            then="the run has ended; a --resume makes the LoRA files that it has not made",
        )
        return
    ask_to_leave_lora_files(run)
    from ray.exceptions import GetTimeoutError

    from actors.ray_calls import GONE, get

    warn_if_quiet(run, answer(run, actor.report.remote()))
    answer(run, actor.stop.remote("stopped by `heddle workers stop`"))
    _say_wait(wait_s, "the running steps and the checkpoint of the run")
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            get(actor.ping.remote(), timeout=ANSWER_S)
        except GONE:  # which the run ends before it writes its last files
            _await_the_end(
                has_ended,
                wait_s,
                deadline,
                meanwhile="the run has ended its steps and is still writing",
                then="the run has ended; continue it with --resume",
            )
            return
        except GetTimeoutError:  # a busy host
            continue
        if has_ended():  # its monitor stays where keepers alone hold the last step
            print("the run has ended; continue it with --resume")
            return
        time.sleep(0.5)
    print("the run will end after its running steps")
    _not_yet(wait_s)


def _say_wait(wait_s: float, what: str) -> None:
    if wait_s > 0:
        say(f"waiting up to {wait_s:g} s for {what}", sys.stdout)


def _not_yet(wait_s: float) -> None:
    """The wait is over, and what was waited for has not come: a command after && may not go on from it."""
    if wait_s > 0:
        raise typer.Exit(Exit.RESUMABLE)


def _await_the_end(has_ended: Callable[[], bool], wait_s: float, deadline: float, *, meanwhile: str, then: str) -> None:
    """Wait until the run has ended, and say `then`, or `meanwhile` where it lives at the deadline."""
    while not has_ended():
        if time.monotonic() >= deadline:
            print(meanwhile)
            _not_yet(wait_s)
            return
        time.sleep(0.5)
    print(then)


def warn_if_quiet(run: Path, report: MonitorReport) -> None:
    """The monitor outlives a run that was killed on a standing cluster, and takes wishes that nobody will meet."""
    quiet_s = min((report.now - seen.at for seen in report.seen.values()), default=0.0)
    if quiet_s > QUIET_S:
        print(
            f"warning: no worker of {run} has been heard for {quiet_s:.0f} s; if the run was killed, nobody acts on "
            f"this. `heddle train --resume` continues it.",
            file=sys.stderr,
        )
