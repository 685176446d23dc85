"""`heddle workers`: a person's hand on a live run and its workers. Talks to the run's monitor actor, no more."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from app.run.live_runs import OUTCOME, ClusterAddress, must_answer
from app.run.lock import holder, lock_path
from ops.typed import ConfigError

app = typer.Typer(no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="Run directory, e.g. runs/demo.")]


@app.command("list")
def list_workers(run: Run) -> None:
    """Every worker with what it does right now."""
    actor = monitor(run)
    import ray

    report = ray.get(actor.report.remote(), timeout=30)
    print(f"generation {report.generation}")
    for name, seen in sorted(report.seen.items()):
        progress, age = seen.progress, report.now - seen.at
        leaving = "  leaving" if progress.leaving or name in report.wishes.drain else ""
        doing = f"{progress.activity} ({progress.phase}) for {max(report.now - seen.since, 0):.1f} s"
        print(f"{name:8} step {progress.step:<6} heard {age:4.1f} s ago  {doing}{leaving}")


@app.command()
def drain(
    run: Run,
    names: Annotated[list[str], typer.Argument(help="Names from `heddle workers list`, e.g. w2.")],
    wait_s: Annotated[float, typer.Option(help="Wait this long until they are gone; 0 does not wait.")] = 60.0,
) -> None:
    """Let these workers finish their work, hand over their state and leave at a step boundary."""
    actor = monitor(run)
    import ray

    known = ray.get(actor.report.remote(), timeout=30).seen
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"worker {', '.join(missing)} is not in the run; it has {', '.join(sorted(known))}.")
    ray.get(actor.drain.remote(tuple(names)), timeout=30)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        left = [name for name in names if name in ray.get(actor.report.remote(), timeout=30).seen]
        if not left:
            print(f"{', '.join(names)} left")
            return
        time.sleep(0.5)
    print(f"{', '.join(names)} will leave at the end of the step")


@app.command()
def scale(run: Run, count: Annotated[int, typer.Argument(help="Workers to keep from now on.", min=1)]) -> None:
    """Grow or shrink the pool, within workers.min and workers.max of the config."""
    actor = monitor(run)
    import ray

    ray.get(actor.scale.remote(count), timeout=30)
    print(f"the run keeps {count} workers from the next step boundary on, within workers.min and workers.max")


@app.command()
def stop(
    run: Run, wait_s: Annotated[float, typer.Option(help="Wait this long for the end; 0 does not wait.")] = 300.0
) -> None:
    """End the run after its running steps: checkpoint written, exit code 75, `--resume` continues it."""
    actor = monitor(run)
    import ray

    ray.get(actor.stop.remote("stopped by `heddle workers stop`"), timeout=30)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            ray.get(actor.ping.remote(), timeout=30)
        except ray.exceptions.RayActorError:
            print("the run has ended; continue it with --resume")
            return
        time.sleep(0.5)
    print("the run will end after its running steps")


def how_it_ended(run: Path) -> str:
    """A sentence for a run that is over, by its own folder; "" for one that may be alive."""
    try:
        outcome = json.loads((run / OUTCOME).read_text(encoding="utf-8"))
        ended = f"run {run} has ended: {outcome['reason']} (exit code {outcome['code']})."
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return "" if holder(lock_path(run.absolute(), "driver")) is not None else ended


def monitor(run: Path) -> Any:
    """The monitor actor of a live run. Raises ConfigError when there is no such run, cluster or actor.

    To be called before anything imports Ray, which reads once whether it has to show a token.
    """
    if not (run / "run_id").is_file():
        raise ConfigError(f"{run} is not the folder of a run that was started.")
    if ended := how_it_ended(run):
        raise ConfigError(ended)
    address = address_of(run)
    must_answer(address)
    import ray

    from actors.names import NAMESPACE, find_monitor

    try:
        if not ray.is_initialized():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise ConfigError(
            f"no Ray cluster answers at {address}, or it wants a token. Set RAY_ADDRESS to the run's cluster, and "
            f"RAY_AUTH_MODE=token where it was started so; a local run's cluster always is."
        ) from None
    try:
        return find_monitor(run)
    except LookupError as error:
        raise ConfigError(str(error)) from None


def address_of(run: Path) -> str:
    """RAY_ADDRESS, or where the run says that its cluster answers, or any cluster of this machine."""
    known = ClusterAddress.read(run)
    given = os.environ.get("RAY_ADDRESS", "")
    if known is not None and (given == known.address or (not given and known.answers())):
        if known.auth:
            os.environ.setdefault("RAY_AUTH_MODE", known.auth)
        return known.address
    return given or "auto"
