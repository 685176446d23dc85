"""`heddle bench memory`: what gradients and parameters in a node's memory save and cost, against those on each worker.

    heddle bench memory --elements 200000000 --workers 4

Workers are processes on this machine that talk over Gloo. A step is as uneven as cascades are: of four workers one runs
three backward passes, one two, one one and one none; then the sums, AdamW with clipping and EMA, and the parameters for
all. A pass costs next to nothing but its gradients (a real one computes with every parameter for every token), so the
ratio of the seconds is the worst that a run can see. The ways take turns, step by step in the same processes.

Memory is the proportional set size (PSS) of each worker above what it is before the model: shared pages count once,
divided by those who map them. Each way is measured in processes of its own; beside it stands what the layout asks for,
and how far all workers together are from it. Exit code 1 if that is more than a tenth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import psutil
import torch
import typer
from torch import Tensor, nn

from app.bench.optimizer import FULL
from app.bench.ranks import rank_main, run_ranks
from ops.comm.collectives import Group
from ops.counted import counted
from ops.heap import give_back
from ops.update.gradient_places import GradientMemory
from ops.update.parameters import ParameterMemory
from ops.update.sync import FlatSync
from ops.update.sync_places import SyncPlaces

WAYS: dict[str, tuple[GradientMemory, ParameterMemory]] = {  # gradients, parameters
    "own": ("own", "replicated"),
    "node": ("node", "replicated"),
    "node, parameters too": ("node", "node"),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PASSES = (3, 1, 0, 2)
_TOLERANCE = 0.1  # of the memory that the layout asks for
_LAYERS = 64
_WAIT_S = 1800.0  # for all ranks together, and of a rank for another


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What one worker measured: per way the seconds of each step and those of its end, or the bytes of one way."""

    step_s: dict[str, list[float]]
    end_s: dict[str, list[float]]
    pss_bytes: int


class Layer(nn.Module):
    """A block of one weight."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, factor: Tensor) -> Tensor:
        """[n] -> []"""
        return self.weight @ factor[: len(self.weight)]


class Layers(nn.Module):
    """A model of equal blocks, random numbers that are the same on every rank, and a weight outside of them."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fetched: Callable[[nn.Module], Callable[..., Tensor]] | None = None
        self.scale = nn.Parameter(torch.ones(16, dtype=dtype))
        values = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.layers = nn.ModuleList(Layer(part) for part in values.chunk(_LAYERS))

    def all_blocks(self) -> list[nn.Module]:
        """All layers."""
        return list(self.layers)

    def forward(self, factor: Tensor) -> Tensor:
        """[n] -> []"""
        calls = [layer if self.fetched is None else self.fetched(layer) for layer in self.layers]
        # layer by layer, as backward goes through a model: no two large products are held at a time
        return self.scale.sum() * torch.stack([call(factor) for call in calls]).sum()


class Steps:
    """A model of equal layers and its steps; backward gives every parameter a gradient without computing much."""

    def __init__(self, group: Group, elements: int, dtype: torch.dtype, way: str) -> None:
        self._model, self._group = Layers(elements, dtype), group
        gradients, parameters = WAYS[way]
        self._sync = FlatSync(
            self._model, FULL, total_steps=1000, places=SyncPlaces(gradients=gradients, parameters=parameters)
        )
        self._sync.form(group, None)
        self._sync.begin_step()
        longest = max(parameter.numel() for parameter in self._model.parameters())
        self._factor = torch.randn(longest, generator=torch.Generator().manual_seed(group.rank)).to(dtype)

    def run(self, step: int) -> tuple[float, float]:
        """Seconds of the step, and of its end: what comes after the last backward of the slowest worker."""
        self._group.barrier()
        begin = time.perf_counter()
        passes = _PASSES[(self._group.rank + step) % len(_PASSES)]
        for number in range(passes):
            if number == passes - 1:
                self._sync.watch_backward()
            self._model(self._factor).backward()
        self._sync.start_sum()
        computed = time.perf_counter()
        self._sync.finish_step(step, 1.0, 1.0, float(self._group.size), lambda phase: None)
        self._sync.begin_step()
        give_back()  # as workers do
        end = time.perf_counter()
        return end - begin, end - computed


def measure_rank(group: Group, elements: int, dtype: str, steps: int, way: str | None) -> dict[str, object]:
    """One worker's part: seconds of all ways in turns, or with `way` the memory of that one."""
    process = psutil.Process()
    before = process.memory_full_info().pss
    ways = tuple(WAYS) if way is None else (way,)
    made = {name: Steps(group, elements, _DTYPES[dtype], name) for name in ways}
    step_s: dict[str, list[float]] = {name: [] for name in ways}
    end_s: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 1):
        for name, model in made.items():
            whole, end = model.run(step)
            if step:  # the first one touches new pages
                step_s[name].append(whole)
                end_s[name].append(end)
    group.barrier()  # all pages are there, and nobody's are gone yet
    used = process.memory_full_info().pss - before
    group.barrier()
    return asdict(RankFigures(step_s=step_s, end_s=end_s, pss_bytes=used))


def measure(elements: int, workers: int, dtype: str, steps: int, way: str | None) -> list[RankFigures]:
    """Figures of every worker; with `way` those of its memory."""
    given = {"elements": elements, "dtype": dtype, "steps": steps, "way": way}
    return [RankFigures(**told) for told in run_ranks("app.bench.gradients", given, workers, _WAIT_S)]


def wanted_bytes(way: str, elements: int, workers: int, dtype: str) -> float:
    """Bytes of one worker by the layout: parameters, gradient, and its part of moments, EMA and, beside bf16, the
    master."""
    parameters, master = (4, 0) if dtype == "float32" else (2, 4)
    gradients, held = WAYS[way]
    gradient = 4 if gradients == "own" else 4 / workers
    weights = parameters if held == "replicated" else parameters / workers
    return elements * (weights + gradient + (12 + master) / workers)


def slowest(ranks: Sequence[RankFigures], way: str, end: bool = False) -> list[float]:
    """Per step, the seconds of the step; with `end` those that its last worker waits after its own backward."""
    if end:
        return [min(times) for times in zip(*(rank.end_s[way] for rank in ranks))]
    return [max(times) for times in zip(*(rank.step_s[way] for rank in ranks))]


def table(
    timed: Sequence[RankFigures], memory: dict[str, list[RankFigures]], sizes: tuple[int, int], dtype: str
) -> str:
    """Markdown; `sizes` are the elements of the timed model and of that whose memory is measured."""
    workers = len(timed)
    lines = [
        f"{counted(workers, 'worker')}, {dtype} parameters; seconds of {sizes[0] / 1e6:g} M, memory of "
        f"{sizes[1] / 1e6:g} M",
        "",
        "| gradients | step, median s | x own | end, median s | PSS per worker, MiB | by the layout | of the node "
        "| above the layout |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = slowest(timed, "own")
    for way in WAYS:
        seconds = slowest(timed, way)
        ratio = statistics.median(one / other for one, other in zip(seconds, base))
        used = [rank.pss_bytes / 2**20 for rank in memory[way]]
        lines.append(
            f"| {way} | {statistics.median(seconds):.3f} | {ratio:.2f} | "
            f"{statistics.median(slowest(timed, way, end=True)):.3f} | {min(used):.0f} to {max(used):.0f} | "
            f"{wanted_bytes(way, sizes[1], workers, dtype) / 2**20:.0f} | {sum(used):.0f} | "
            f"{100 * above_layout(memory[way], way, sizes[1], dtype):.1f} % |"
        )
    return "\n".join(lines)


def above_layout(ranks: Sequence[RankFigures], way: str, elements: int, dtype: str) -> float:
    """How far the memory of all workers lies above what the layout asks for, as a share of that; negative below it."""
    wanted = len(ranks) * wanted_bytes(way, elements, len(ranks), dtype)
    return sum(rank.pss_bytes for rank in ranks) / wanted - 1


def run(
    elements: Annotated[int, typer.Option(help="Weights of the model whose memory is measured.")] = 200_000_000,
    timed_elements: Annotated[int, typer.Option(help="Weights of the model whose steps are timed.")] = 50_000_000,
    workers: Annotated[int, typer.Option(help="Worker processes on this machine.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed steps of each way.")] = 12,
    dtype: Annotated[str, typer.Option(help="Of the parameters: float32 or bfloat16.")] = "float32",
) -> None:
    """Seconds of all ways in turns, then the memory of each; exit code 1 if one is a tenth off the layout."""
    timed = measure(timed_elements, workers, dtype, steps, None)
    memory = {way: measure(elements, workers, dtype, 2, way) for way in WAYS}
    print(table(timed, memory, (timed_elements, elements), dtype))
    if any(abs(above_layout(ranks, way, elements, dtype)) > _TOLERANCE for way, ranks in memory.items()):
        raise typer.Exit(1)


if __name__ == "__main__":
    rank_main(measure_rank)
