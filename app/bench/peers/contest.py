"""`heddle bench peers`: other ways to train the same model on the same clips, on this machine's workers, in one run.

Every way trains from the same weights, in the same order, with the same noise, so the losses must agree step by step.
All of them are commands of their own; this one starts one after the other, looks at its processes, and writes a table,
and with `--out page.html` a page:

    ddp              torchrun, DistributedDataParallel over a bucketed DataLoader       app/bench/peers/ddp.py
    ray + deepspeed  Ray Train's TorchTrainer, DeepSpeed's ZeRO-1, Ray Data             app/bench/peers/ray_deepspeed.py
    ddp + ulysses    DistributedDataParallel, static sequence parallelism               app/bench/peers/ddp_sequence.py
    heddle NAME      `heddle train` with that strategy, snapshots and planning included

Rounds take turns, so that what else a machine does strikes all alike; ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml

from app.bench.page import command_of, facts_of
from app.bench.peers.figures import (
    REFERENCE,
    FinishedLine,
    LoopRun,
    PeerFigures,
    agree,
    figures_of,
    lines_of_code,
    roles_table,
    table,
)
from app.bench.peers.page import html
from app.bench.tree import Tree
from app.bench.whole_lines import whole_lines
from app.run.signals import signals_wait, unwinds_on_signal
from app.settings.out_files import check_writable
from ops.code_path import ROOT
from ops.counted import counted
from ops.typed import ConfigError

HERE = Path(__file__).resolve().parent
CONFIG = ROOT / "configs" / "bench" / "peers.yaml"
SETS = {
    "uniform": ["17x64x96"],
    "mixed": ["1x64x96", "9x64x96", "17x64x96", "33x64x96"],
}
STRATEGIES = ("static", "cascade", "knapsack")
LEFT = 2  # last steps that are not counted: nothing is decoded or encoded ahead of an end
_CLIPS = 120
_PATIENCE_S = 900.0  # without another finished step
_END_S = 120.0
_TAIL = 40  # lines of the log of a peer that failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A way to train: how its command is made, which file holds it, and how its steps are read."""

    name: str
    command: Callable[[Path, int, Path, int], list[str]]  # (config, steps, lines, workers)
    file: str | None = None  # beside this one
    strategy: str = ""  # Heddle's own


class PeerFailed(RuntimeError):
    """A loop ended early, or did not get on. `said` is the end of its log, whole lines."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


def run(
    steps: Annotated[int, typer.Option(min=1, help="Steps that are counted, of every peer in every round.")] = 12,
    warm: Annotated[int, typer.Option(min=1, help="Steps before them; the first one begins when all is started.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often every peer runs.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train; not more than items in a step.")] = 2,
    only: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME", help=f"A peer to run besides {REFERENCE}; default: all. Repeatable."),
    ] = None,
    buckets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME", help=f"One of {', '.join(SETS)}; default: all. Repeatable."),
    ] = None,
    config: Annotated[Path, typer.Option(help="Model, data and training of all peers.")] = CONFIG,
    out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A page if it ends in .html, else JSON with all figures. Repeatable."),
    ] = None,
) -> None:
    """Train all ways in turn and print one table per set of buckets; exit code 1 if losses differ."""
    peers = _chosen("--peer", only, PEERS)
    sets = _chosen("--set", buckets, SETS)
    if REFERENCE not in peers:
        peers = [REFERENCE, *peers]
    if not config.is_file():
        raise ConfigError(f"--config {config} is no file; {CONFIG} is an example.")
    check_writable(out or [])
    found: dict[str, dict[str, list[PeerFigures]]] = {}
    glue = {name: lines_of_code(HERE / file) if (file := PEERS[name].file) else None for name in peers}
    # a peer that runs has a session of its own and would train on, beside a folder that nobody removes
    with unwinds_on_signal(), tempfile.TemporaryDirectory() as folder:
        for name in sets:
            own = Path(folder) / name
            path, samples = prepare(own, config, SETS[name], warm + steps + LEFT, workers)
            found[name] = {peer: [] for peer in peers}
            for turn, peer in _turns(peers, rounds):
                print(f"{name}, round {turn + 1} of {rounds}: {peer}", file=sys.stderr, flush=True)
                seen = _trained(PEERS[peer], path, len(samples), workers, own / f"{peer.replace(' ', '')}-{turn}")
                found[name][peer].append(figures_of(seen, samples, warm, LEFT))
            print(table(f"{name}, {counted(workers, 'worker')}", found[name], glue), end="\n\n", flush=True)
            print(roles_table(name, found[name]), end="\n\n", flush=True)
    for written in out or []:
        if written.suffix == ".html":
            options: list[tuple[str, object]] = [("--steps", steps), ("--warm", warm), ("--rounds", rounds)]
            options += [("--workers", workers), ("--peer", only), ("--config", None if config == CONFIG else config)]
            command = partial(_command, [*options, ("--out", written.name)])
            page = html(found, glue, command, facts_of(counted(workers, "worker")))
            written.write_text(page, encoding="utf-8")
        else:
            plain = {name: {peer: [asdict(r) for r in runs] for peer, runs in of.items()} for name, of in found.items()}
            written.write_text(json.dumps({"figures": plain, "glue": glue}, indent=1))
    if not all(agree(of) for of in found.values()):
        raise typer.Exit(1)


def _turns(peers: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, peer) of every run in order; each round begins with another peer."""
    for turn in range(rounds):
        first = turn % len(peers)
        yield from ((turn, peer) for peer in (*peers[first:], *peers[:first]))


def _trained(peer: Peer, config: Path, steps: int, workers: int, folder: Path) -> LoopRun:
    """As `train`. The log of one that fails is shown, as it goes with its folder."""
    try:
        return train(peer, config, steps, workers, folder)
    except PeerFailed as failed:
        print(failed.said, file=sys.stderr)
        raise


def _command(options: Sequence[tuple[str, object]], name: str) -> str:
    """The command line of one set."""
    return command_of("peers", [("--set", name), *options])


def _chosen(option: str, given: list[str] | None, known: Mapping[str, object]) -> list[str]:
    if unknown := [name for name in given or [] if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}.", param_hint=option)
    return [name for name in known if not given or name in given]


def prepare(
    folder: Path, config: Path, buckets: Sequence[str], steps: int, workers: int, clips: int = _CLIPS
) -> tuple[Path, list[int]]:
    """Make clips and their index, and the run file that all peers read. Returns it, and the samples of each step.

    Raises ConfigError for more workers than items in a step: a rank of a loop without one has no backward pass, and the
    others would wait in theirs for its gradients.
    """
    from app.bench.recipe import Recipe
    from data.tools.synthetic import SynthConfig, synthesize

    synthesize(folder / "data", SynthConfig(clips=clips, images=clips // 4, shards=2, koala=False))
    shards = sorted(str(path) for path in (folder / "data" / "shards").glob("*.tar"))
    tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    tree["run"] = {"name": "peers", "dir": str(folder / "runs")}
    tree["data"] |= {"sources": [{"path": "::".join(shards)}], "buckets": {"table": list(buckets)}}
    tree["train"] = {**tree.get("train", {}), "steps": steps}
    tree["workers"] = {**tree.get("workers", {}), "min": workers, "max": workers}
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    taken = Recipe(path).steps(steps)
    if (fewest := min(map(len, taken))) < workers:
        raise ConfigError(
            f"{counted(workers, 'worker')} train steps of {counted(fewest, 'item')}; every worker needs one of its own "
            f"in each step. Give --workers {fewest} or fewer, or raise data.items_per_step in {config}."
        )
    return path, [sum(len(micro.keys) for micro in step) for step in taken]


def train(peer: Peer, config: Path, steps: int, workers: int, folder: Path) -> LoopRun:
    """Run one peer to its end and look at its processes. Raises PeerFailed where it does not get there."""
    folder.mkdir(parents=True)
    lines, log = folder / "lines.jsonl", folder / "log.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("RAY_ADDRESS", None)
    started = time.time()
    with log.open("w") as said:
        process = None
        try:
            with signals_wait():
                process = subprocess.Popen(
                    peer.command(config, steps, lines, workers),
                    env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                )  # fmt: skip
            with Tree(1.0, process.pid, course=True) as tree:
                _await_end(process, peer.name, lambda: len(_finished(peer, folder)), log)
        finally:
            if process is not None:
                _end(process)
    finished = _finished(peer, folder)
    if process.returncode or len(finished) != steps:
        raise PeerFailed(
            f"{peer.name} ended with exit code {process.returncode} after {len(finished)} of {steps} steps; the end of "
            f"its log stands above.",
            _tail(log),
        )
    return LoopRun(started=started, pids=_pids(peer, folder), steps=tuple(finished), looks=tuple(tree.looks))


def _await_end(process: subprocess.Popen[bytes], name: str, done: Callable[[], int], log: Path) -> None:
    count, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        if (now := done()) > count:
            count, since = now, time.monotonic()
        elif time.monotonic() - since > _PATIENCE_S:
            raise PeerFailed(
                f"{name} finished no step for {_PATIENCE_S:g} s after {count}; the end of its log stands above.",
                _tail(log),
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])


def _finished(peer: Peer, folder: Path) -> list[FinishedLine]:
    path = folder / ("runs/peers/metrics.jsonl" if peer.strategy else "lines.jsonl")
    return [FinishedLine(step=o["step"], time=o["time"], loss=o["loss"]) for o in whole_lines(path) if "loss" in o]


def _pids(peer: Peer, folder: Path) -> tuple[int, ...]:
    if peer.strategy:
        return tuple(o["pid"] for o in whole_lines(folder / "runs/peers/events.jsonl") if o["event"] == "ready")
    return tuple(whole_lines(folder / "lines.jsonl")[0]["pids"])


def _torchrun(name: str) -> Callable[[Path, int, Path, int], list[str]]:
    def command(config: Path, steps: int, lines: Path, workers: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        logs = f"--log-dir={lines.parent / 'torchrun'}"  # else a folder of its own, which nothing removes
        return [*torchrun, logs, "-m", f"app.bench.peers.{name}", str(config), str(steps), str(lines)]

    return command


def _ray_train(config: Path, steps: int, lines: Path, workers: int) -> list[str]:
    return [sys.executable, "-m", "app.bench.peers.ray_deepspeed", str(config), str(steps), str(lines), str(workers)]


def _heddle(strategy: str) -> Callable[[Path, int, Path, int], list[str]]:
    def command(config: Path, steps: int, lines: Path, workers: int) -> list[str]:
        settings = {"run.dir": lines.parent / "runs", "planner.strategy": strategy}
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "app.cli", "train", "--config", str(config), *options]

    return command


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(name=REFERENCE, command=_torchrun("ddp"), file="ddp.py"),
        Peer(name="ray + deepspeed", command=_ray_train, file="ray_deepspeed.py"),
        Peer(name="ddp + ulysses", command=_torchrun("ddp_sequence"), file="ddp_sequence.py"),
        *(Peer(name=f"heddle {name}", command=_heddle(name), strategy=name) for name in STRATEGIES),
    )
}
