"""The report of `heddle bench ops`: tables, the targets they answer, and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from app.bench.ops_blocks import BlockResult
from app.bench.timing import Timing

LONG, SHORT = 32768, 8192  # tokens: where shares of the ceiling are promised, and where launches weigh most
SHARES = {"forward": 0.92, "backward": 0.85}
PAPER = (
    "AdaptiveLoad, Table 1, whole steps of its own model, all its kernels: 62 -> 56 s (-10.7 %), and 3 GB less or "
    "10 % more tokens."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsRow:
    """One measurement."""

    op: str
    layout: str
    width: int
    tokens: int
    direction: str
    variant: str
    timing: Timing
    useful_bytes: int
    peak: int | None  # None: an ablation of the backward alone

    @property
    def case(self) -> tuple[str, str, int, int]:
        return self.op, self.layout, self.width, self.tokens


class Results:
    """All rows with the copy ceiling. A later row of the same case, variant and direction replaces an earlier one."""

    def __init__(self, rows: Iterable[OpsRow], copy_speed: float) -> None:
        self.copy_speed = copy_speed
        self.rows = {(*row.case, row.variant, row.direction): row for row in rows}

    def get(self, case: tuple[str, str, int, int], variant: str, direction: str) -> OpsRow | None:
        return self.rows.get((*case, variant, direction))

    def share(self, row: OpsRow) -> float:
        """Useful bytes per second as a share of the copy ceiling."""
        return row.useful_bytes / row.timing.seconds / self.copy_speed

    def gain(self, row: OpsRow, over: str) -> float | None:
        """How many times faster than another variant of the same case and direction."""
        other = self.get(row.case, over, row.direction)
        return None if other is None else other.timing.seconds / row.timing.seconds

    def fused(self, direction: str) -> list[OpsRow]:
        return [row for row in self.rows.values() if row.variant == "fused" and row.direction == direction]


def tables(results: Results) -> list[str]:
    """One Markdown table per op; a line has both directions of one variant."""
    lines: list[str] = []
    for op in dict.fromkeys(row.op for row in results.rows.values()):
        lines += [
            "",
            f"## {op}",
            "",
            "| layout | D | N | variant | forward ms | of copy | x eager | backward ms | of copy | x eager | peak MB |",
            "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        cases = dict.fromkeys(row.case for row in results.rows.values() if row.op == op)
        for case in cases:
            for variant in dict.fromkeys(row.variant for row in results.rows.values() if row.case == case):
                pair = [results.get(case, variant, direction) for direction in SHARES]
                peak = next((row.peak for row in pair if row is not None and row.peak is not None), None)
                cells = [cell for row in pair for cell in _cells(results, row)]
                lines.append("| " + " | ".join([*map(str, case[1:]), variant, *cells, _megabytes(peak)]) + " |")
    return lines


def _cells(results: Results, row: OpsRow | None) -> list[str]:
    if row is None:
        return ["-", "-", "-"]
    gain = results.gain(row, "eager")
    return [
        f"{1e3 * row.timing.seconds:.3f} ({row.timing.spread:.0%})",
        f"{results.share(row):.0%}",
        "-" if gain is None else f"{gain:.2f}",
    ]


def targets(results: Results) -> list[str]:
    """What was promised for one H200, with the worst case that was measured."""
    lines = ["", "## Targets (worst measured case)", "", "| target | worst | met |", "|---|---:|---|"]

    def add(text: str, goal: float, rows: list[OpsRow], value: Callable[[OpsRow], float | None], form: str) -> None:
        found = [(v, row) for row in rows if (v := value(row)) is not None]
        if not found:
            lines.append(f"| {text} | not measured | open |")
            return
        worst, row = min(found, key=lambda pair: pair[0])
        where = f"{row.op}, {row.layout}, D={row.width}, N={row.tokens}"
        lines.append(f"| {text} | {worst:{form}} ({where}) | {'yes' if worst >= goal else 'no'} |")

    eager = partial(results.gain, over="eager")
    for direction, goal in SHARES.items():
        rows = results.fused(direction)
        long, short = [row for row in rows if row.tokens >= 0.99 * LONG], [row for row in rows if row.tokens <= SHORT]
        add(f"{direction} >= {goal:.0%} of copy at N >= 32k", goal, long, results.share, ".0%")
        add(f"{direction} >= 3x eager at N >= 32k", 3.0, long, eager, ".2f")
        add(f"{direction} never slower than eager at 8k", 1.0, short, eager, ".2f")
    backward = results.fused("backward")
    for text, goal, single in (("B=1", 1.2, True), ("B>=4, per frame, packed", 1.7, False)):
        rows = [row for row in backward if (row.layout == "B=1") == single]
        compiled = partial(results.gain, over="torch.compile")
        add(f"backward >= {goal}x torch.compile, {text}", goal, rows, compiled, ".2f")
    return lines


def block_table(results: list[BlockResult]) -> list[str]:
    """Whole blocks, forward and backward, each beside eager, and the paper's system figures."""
    lines = [
        "",
        "## Transformer blocks, forward and backward",
        "",
        "| block | tokens | checkpointing | variant | ms | time | peak MB | peak |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    for r in results:
        eager = next(e for e in results if (e.block, e.checkpointing, e.variant) == (r.block, r.checkpointing, "eager"))
        time = f"{r.timing.seconds / eager.timing.seconds - 1:+.1%}" if r is not eager else ""
        peak = ""
        if r is not eager and eager.peak_bytes:
            peak = f"{r.peak_bytes / eager.peak_bytes - 1:+.1%}"
        lines.append(
            f"| {r.block} | {r.tokens} | {'yes' if r.checkpointing else 'no'} | {r.variant} "
            f"| {1e3 * r.timing.seconds:.2f} ({r.timing.spread:.0%}) | {time} | {_megabytes(r.peak_bytes)} "
            f"| {peak} |"
        )
    return [*lines, "", PAPER]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}" if size < 1e8 else f"{size / 1e6:.0f}"
