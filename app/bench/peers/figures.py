"""Turns what was seen of a running loop into its figures, and those of several rounds into tables."""

from __future__ import annotations

import ast
import io
import math
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from app.bench.markdown import markdown_table
from app.bench.tree import SERVICES, TreeLook

REFERENCE = "ddp"  # that the others stand beside
TRAINING = "training"  # the role of the processes that train
SAME = 1e-5  # relative; losses of the same arithmetic in another order, fp32
_LEAST_S = 0.005  # CPU seconds of a step, below which a role is not listed


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedLine:
    """One finished step of a loop."""

    step: int
    time: float  # unix seconds
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRun:
    """What was seen of one run of one loop: its processes, its steps, and the tree of processes over time."""

    started: float  # unix seconds
    pids: tuple[int, ...]  # the processes that train
    steps: tuple[FinishedLine, ...]
    looks: tuple[TreeLook, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFigures:
    """Figures of the counted steps of one run. CPU seconds are those of all its processes."""

    start_s: float  # from the command to the end of the first step, less one step
    step_s: float
    samples_per_s: float
    cpu_s: float  # for one step
    samples_per_cpu_s: float
    trained_s: float  # of `cpu_s`, what the processes that train took; the rest decodes, plans, keeps snapshots, serves
    roles_s: Mapping[str, float]  # `cpu_s` by what processes do, those that train first
    idle: float  # share of a step in which the processes that train do not run; other programs on the machine add to it
    memory_mib: float  # the most private memory of all processes together
    losses: tuple[float, ...]


Rounds = Mapping[str, Sequence[PeerFigures]]  # by the name of a peer


def figures_of(run: LoopRun, samples: Sequence[int], warm: int, left: int) -> PeerFigures:
    """`samples` of each step; the first `warm` and the last `left` steps are not counted, as nothing is loaded ahead
    at an end. Raises ValueError when no step is left."""
    counted = run.steps[warm : len(run.steps) - left]
    if warm < 1 or not counted:
        raise ValueError(f"{len(run.steps)} steps without the first {warm} and the last {left} leave none to count.")
    begin, end = run.steps[warm - 1].time, counted[-1].time
    wall, clips = end - begin, sum(samples[line.step] for line in counted)
    cpu = _between(run.looks, lambda look: sum(look.cpu_s.values()), begin, end)
    trained = _between(run.looks, lambda look: sum(look.cpu_s.get(pid, 0.0) for pid in run.pids), begin, end)
    roles = {TRAINING: trained} | {
        role: _between(run.looks, partial(_of_role, role=role, pids=run.pids), begin, end) for role in _roles(run)
    }
    step_s = wall / len(counted)
    return PeerFigures(
        start_s=run.steps[0].time - run.started - step_s,
        step_s=step_s,
        samples_per_s=clips / wall,
        cpu_s=cpu / len(counted),
        samples_per_cpu_s=clips / cpu,
        trained_s=trained / len(counted),
        roles_s={role: seconds / len(counted) for role, seconds in roles.items()},
        idle=1.0 - trained / (wall * len(run.pids)),
        memory_mib=max((look.private_mib for look in run.looks if look.time <= end), default=math.nan),
        losses=tuple(line.loss for line in run.steps),
    )


def _roles(run: LoopRun) -> list[str]:
    """What the processes do that do not train, as known at the last look."""
    return sorted({role for pid, role in run.looks[-1].roles_s if pid not in run.pids})


def _of_role(look: TreeLook, role: str, pids: Sequence[int]) -> float:
    return sum(seconds for (pid, own), seconds in look.roles_s.items() if own == role and pid not in pids)


def _between(looks: Sequence[TreeLook], of: Callable[[TreeLook], float], begin: float, end: float) -> float:
    """What a figure grew by from one time to another, straight lines between looks."""
    times, values = [look.time for look in looks], [of(look) for look in looks]
    return _at(times, values, end) - _at(times, values, begin)


def _at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    later = next((n for n, time in enumerate(times) if time >= when), len(times) - 1)
    if later == 0:
        return values[0]
    span = times[later] - times[later - 1]
    share = min(1.0, (when - times[later - 1]) / span) if span else 1.0
    return values[later - 1] + share * (values[later] - values[later - 1])


def lines_of_code(path: Path) -> int:
    """Lines that hold more than a comment or a docstring."""
    text = path.read_text(encoding="utf-8")
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in ignored
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            held -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(held)


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses, step by step."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, reference, strict=True))


HEAD = (
    "s / step",
    "clips / s",
    "clips / CPU-s",
    f"of {REFERENCE}'s",
    "CPU-s / step",
    "of them training",
    "Ray's services",
    "idle",
    "memory",
    "start",
    "code",
    "loss differs",
)


def table(title: str, rounds: Rounds, glue: Mapping[str, int | None]) -> str:
    """Markdown: medians over the rounds of every peer. Ratios are medians of those within a round."""
    return markdown_table((title, *HEAD), rows_of(rounds, glue))


def rows_of(rounds: Rounds, glue: Mapping[str, int | None]) -> list[list[str]]:
    """The rows of `table`."""
    rows = []
    for name, runs in rounds.items():
        ratios = ratios_of(name, rounds)
        lost = max(difference(r.losses, rounds[REFERENCE][0].losses) for r in runs)
        rows.append(
            [
                name,
                f"{median(r.step_s for r in runs):.2f}",
                f"{median(r.samples_per_s for r in runs):.2f}",
                f"{median(r.samples_per_cpu_s for r in runs):.2f}",
                f"{median(ratios):.3f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
                f"{median(r.cpu_s for r in runs):.2f}",
                f"{median(r.trained_s for r in runs):.2f}",
                f"{median(sum(r.roles_s.get(role, 0.0) for role in SERVICES) for r in runs):.2f}",
                f"{median(r.idle for r in runs):.0%}",
                f"{median(r.memory_mib for r in runs) / 1024:.2f} GiB",
                f"{median(r.start_s for r in runs):.0f} s",
                "-" if glue[name] is None else f"{glue[name]} lines",
                "-" if name == REFERENCE else f"{lost:.0e}" + ("" if lost <= SAME else " !"),
            ]
        )
    return rows


def roles_table(title: str, rounds: Rounds) -> str:
    """Markdown: CPU seconds of a step by what processes do, medians over the rounds; roles that take 5 ms of
    some peer, those that take most of any first."""
    taken = {
        role: [median(r.roles_s.get(role, 0.0) for r in runs) for runs in rounds.values()]
        for role in dict.fromkeys(role for runs in rounds.values() for run in runs for role in run.roles_s)
    }
    rows = [
        (role, *(f"{value:.3f}" for value in seconds))
        for role, seconds in sorted(taken.items(), key=lambda pair: -max(pair[1]))
        if max(seconds) >= _LEAST_S
    ]
    return markdown_table((f"{title}, CPU-s / step", *rounds), rows)


def agree(rounds: Rounds) -> bool:
    """Whether all losses are those of the reference."""
    wanted = rounds[REFERENCE][0].losses
    return all(difference(run.losses, wanted) <= SAME for runs in rounds.values() for run in runs)


def ratios_of(peer: str, rounds: Rounds) -> list[float]:
    """Clips per CPU-second of a peer beside those of the reference, round by round."""
    pairs = zip(rounds[peer], rounds[REFERENCE], strict=True)
    return [own.samples_per_cpu_s / other.samples_per_cpu_s for own, other in pairs]
