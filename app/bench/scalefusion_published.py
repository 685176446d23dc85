"""ScaleFusion's published figures beside the simulator's: strong scaling, speed-ups, the choice of N and L.

The paper gives averages and maxima in its text; the bars of its figures carry no numbers. Hardware: A100s, eight in a
machine with NVSwitch, machines joined by 400 Gb/s. One figure is taken from the paper to set the ratio of link to
computation: DSP's share of communication for 1080p, 8 s on two machines (34 %, section 3). All others follow.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ops.spatial_temporal.choice import choose
from ops.spatial_temporal.schedule import DSP, Schedule, intra
from ops.spatial_temporal.simulate import Forecast, LayerCosts, best_schedule, simulate, ulysses_forecast

PAIRS, HEADS, WIDTH = 28, 16, 1152  # STDiT3-XL/2
RATE = 312e12 * 0.45  # bf16 of an A100 times what large products reach; only ratios of times matter below
GPUS = 8  # of a machine
NVSWITCH = 250e9  # bytes/s of a GPU within its machine
PART_S, SLICE_S = 40e-6, 300e-6  # an all-to-all's start; a slice's: some thirty kernels of 10 us that are not hidden
TRIED = (2, 3, 4, 6, 8)  # N of Fig. 10
CALIBRATED = 0.34  # DSP's share of communication, 1080p, 8 s, two machines
MACHINES = (1, 2, 4)
STEPS = 30  # of a sampled clip, two forwards each (guidance)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSize:
    """A video as STDiT3 sees it: latent frames, and patches of 16 pixels."""

    name: str
    frames: int
    height: int  # rows of patches
    width: int

    @property
    def positions(self) -> int:
        """Positions of a frame."""
        return self.height * self.width


def _clip(height: int, width: int, seconds: int) -> ClipSize:
    name = f"{'4k' if height > 2000 else f'{height}p'} {seconds} s"
    # Open-Sora's 4 s are 102 frames, which its VAE turns into 30: 5 for each 17
    return ClipSize(name=name, frames=seconds * 15 // 2, height=-(-height // 16), width=-(-width // 16))


SIZES = ((720, 1280), (1080, 1920), (2160, 3840))
WORKLOADS = tuple(_clip(height, width, seconds) for height, width in SIZES for seconds in (4, 8, 16))
REFERENCE = _clip(1080, 1920, 8)


def flops(clip: ClipSize) -> tuple[float, float]:
    """FLOPs of a spatial and of a temporal block, forward: projections of self- and cross-attention, MLP of four times
    the width, and the two attention products."""
    tokens = clip.frames * clip.positions
    linear = 2 * tokens * WIDTH**2 * (4 + 2 + 8)
    return linear + 4.0 * tokens * clip.positions * WIDTH, linear + 4.0 * tokens * clip.frames * WIDTH


@lru_cache
def machine_bandwidth() -> float:
    """Bytes/s of a machine's network such that DSP spends the calibrated share on communication."""
    low, high = 1e9, 1e12
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        found = simulate(REFERENCE.frames, REFERENCE.positions, 2 * GPUS, DSP, _costs(REFERENCE, 2, middle))
        low, high = (middle, high) if found.exposed_s / found.total_s > CALIBRATED else (low, middle)
    return low


def costs_of(clip: ClipSize, machines: int) -> LayerCosts:
    """Costs of a layer on `machines` machines of eight A100s."""
    return _costs(clip, machines, machine_bandwidth())


def _costs(clip: ClipSize, machines: int, bandwidth: float) -> LayerCosts:
    spatial, temporal = flops(clip)
    ranks = machines * GPUS
    held = clip.frames * clip.positions * WIDTH * 2 / machines  # bytes of a machine's GPUs together
    across = held * (1 - 1 / machines) / bandwidth
    within = held / GPUS * (GPUS - 1) / ranks / NVSWITCH
    return LayerCosts(
        spatial_s=spatial / RATE,
        temporal_s=temporal / RATE,
        exchange_s=max(across, within),
        slice_s=SLICE_S,
        part_s=PART_S,
    )


def seconds(clip: ClipSize, machines: int, schedule: Schedule) -> float:
    """One forward of all blocks."""
    return simulate(clip.frames, clip.positions, machines * GPUS, schedule, costs_of(clip, machines), PAIRS).total_s


def gains(clips: Sequence[ClipSize], machines: Sequence[int], slow: Schedule, fast: Schedule) -> list[float]:
    """How many times faster one schedule is than another, for each clip on each number of machines."""
    return [seconds(clip, count, slow) / seconds(clip, count, fast) for clip in clips for count in machines]


def ulysses_seconds(clip: ClipSize, machines: int) -> float | None:
    found = ulysses_forecast(clip.height, machines * GPUS, HEADS, costs_of(clip, machines), PAIRS)
    return None if found is None else found.total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A published figure and ours: "average (up to maximum)" where the paper has both."""

    what: str
    published: str
    simulated: str


def comparisons() -> Iterator[Comparison]:
    """Section by section of the paper."""
    two, four = (simulate(REFERENCE.frames, REFERENCE.positions, n * GPUS, DSP, costs_of(REFERENCE, n)) for n in (2, 4))
    one = simulate(REFERENCE.frames, REFERENCE.positions, GPUS, DSP, costs_of(REFERENCE, 1))
    yield Comparison(
        what="DSP, communication on 1, 2, 4 machines (1080p, 8 s)",
        published="up to 3 %, 34 %, 44 %",
        simulated=f"{_share(one)}, {_share(two)} (set), {_share(four)}",
    )
    alone = sum(flops(_clip(1080, 1920, 4))) / RATE * PAIRS * 2 * STEPS / 60
    yield Comparison(what="1080p, 4 s on one GPU", published="more than 5 minutes", simulated=f"{alone:.1f} minutes")
    for machines, told in ((2, "1.32 (up to 1.52)"), (4, "1.40 (up to 1.58)")):
        ratios = gains(WORKLOADS, (machines,), DSP, Schedule())
        yield Comparison(what=f"speed-up over DSP, {machines} machines", published=told, simulated=_spread(ratios))
    cases = [(clip, machines) for clip in WORKLOADS for machines in (2, 4)]
    within, across = gains(WORKLOADS, (2, 4), DSP, intra(4)), gains(WORKLOADS, (2, 4), intra(4), Schedule())
    yield Comparison(what="intra-layer alone over DSP", published="1.26 (up to 1.41)", simulated=_spread(within))
    yield Comparison(what="inter-layer over intra-layer", published="1.08 (up to 1.13)", simulated=_spread(across))
    for machines, told in ((2, "1.93"), (4, "3.60")):
        ratios = [seconds(clip, 1, Schedule()) / seconds(clip, machines, Schedule()) for clip in WORKLOADS]
        what = f"strong scaling from 1 to {machines} machines"
        yield Comparison(what=what, published=told, simulated=_spread(ratios))
    counts = [seconds(*case, intra(4)) / min(seconds(*case, intra(n)) for n in TRIED) for case in cases]
    yield Comparison(
        what="best N over N = 4, intra-layer alone (Fig. 10)", published="1.027", simulated=_spread(counts)
    )
    auto = [seconds(*case, Schedule()) / seconds(*case, best(*case)) for case in cases]
    yield Comparison(what="best N and L over N = 4, L = 1, 3 (Fig. 11)", published="1.007", simulated=_spread(auto))
    yield Comparison(what="Ulysses on 2, 4 machines", published="runs, cannot (16 heads)", simulated=_ulysses_runs())


def best(clip: ClipSize, machines: int) -> Schedule:
    """The shortest schedule of all that the simulator tries."""
    return best_schedule(clip.frames, clip.positions, machines * GPUS, costs_of(clip, machines))


def chosen(clip: ClipSize, machines: int) -> Schedule:
    """What `auto` takes there, by its cost model."""
    return choose(clip.frames, clip.positions, machines * GPUS, costs_of(clip, machines), False).schedule


def _share(found: Forecast) -> str:
    return f"{found.exposed_s / found.total_s:.0%}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.mean(ratios):.2f} (up to {max(ratios):.2f})"


def _ulysses_runs() -> str:
    over = [found / seconds(clip, 2, DSP) for clip in WORKLOADS if (found := ulysses_seconds(clip, 2)) is not None]
    four = all(ulysses_seconds(clip, 4) is None for clip in WORKLOADS)
    return f"{statistics.mean(over):.2f} x DSP's time, {'cannot' if four else 'runs'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRow:
    """One workload on a number of machines: seconds of a forward."""

    clip: ClipSize
    machines: int
    ulysses: float | None
    dsp: float
    intra: float
    inter: float
    auto: Schedule
    auto_seconds: float
    best_seconds: float  # of the simulator's best schedule


def scaling_rows() -> Iterator[ScalingRow]:
    """What Fig. 9 shows for its workloads."""
    for clip in WORKLOADS:
        for machines in MACHINES:
            schedule = chosen(clip, machines)
            yield ScalingRow(
                clip=clip,
                machines=machines,
                ulysses=ulysses_seconds(clip, machines),
                dsp=seconds(clip, machines, DSP),
                intra=seconds(clip, machines, intra(4)),
                inter=seconds(clip, machines, Schedule()),
                auto=schedule,
                auto_seconds=seconds(clip, machines, schedule),
                best_seconds=seconds(clip, machines, best(clip, machines)),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePoint:
    """Fig. 10 and 11 for the reference workload on two machines: a schedule and its seconds."""

    slices: int
    lead: int | None  # L_S with L_T = 1; None: intra-layer alone
    total_s: float
    compute_s: float
    exposed_s: float


def sensitivity() -> Iterator[SlicePoint]:
    """Computation and exposed communication by N, then by N and L_S."""
    for slices in (1, 2, 3, 4, 6, 8):
        for lead in (None, *range(1, slices + 1)):
            schedule = intra(slices)
            if lead is not None:
                schedule = replace(schedule, temporal_lead=1, spatial_lead=lead)
            found = simulate(REFERENCE.frames, REFERENCE.positions, 2 * GPUS, schedule, costs_of(REFERENCE, 2), PAIRS)
            yield SlicePoint(
                slices=slices, lead=lead, total_s=found.total_s, compute_s=found.compute_s, exposed_s=found.exposed_s
            )
