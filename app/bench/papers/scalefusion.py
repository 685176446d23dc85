"""ScaleFusion's figures by its schedule, on compute and communication shares that it measured."""

from __future__ import annotations

from app.bench.papers.figure import Reproduce, Reproduction
from app.bench.papers.overlap import pairs

SHARES = {"2 machines": 0.34, "4 machines": 0.44}  # of DSP's time that all-to-all takes: Fig. 4, 1080p, 8 s
MACHINES = {"2 machines": 2, "4 machines": 4}
ON_ONE = 0.03  # the same on one machine
SPATIAL, TEMPORAL = 1.2, 0.8  # compute of the layers of a pair: temporal ones are shorter (Section 5.3)
SLICES, TEMPORAL_LEAD, SPATIAL_LEAD = 4, 1, 3  # the paper's defaults
NOTE = (
    "An event simulation of the schedule in ops/spatial_temporal.py on the paper's own shares, those of a 1080p video "
    "of 8 s. Slicing costs no compute in it, so it is an upper end; the published figures are means over all videos."
)


def time_of(share: float, **schedule: int) -> float:
    """Seconds of all layers, in units of a layer's mean compute, when all-to-all is this share of DSP's time."""
    return pairs((SPATIAL, TEMPORAL), share / (1 - share), **schedule)


def whole(share: float) -> float:
    return time_of(share, slices=SLICES, temporal_lead=TEMPORAL_LEAD, spatial_lead=SPATIAL_LEAD)


def fig9(quick: bool) -> Reproduction:
    ours = {name: time_of(share) / whole(share) for name, share in SHARES.items()}
    inside = {name: time_of(share, slices=SLICES) for name, share in SHARES.items()}
    ours["slices inside layers alone"] = _mean([time_of(share) / inside[name] for name, share in SHARES.items()])
    ours["parts under the layer before"] = _mean([inside[name] / whole(share) for name, share in SHARES.items()])
    return Reproduction(way="simulation", ours=ours, note=NOTE)


def scaling(quick: bool) -> Reproduction:
    """Compute falls with the machines, all-to-all is what its share makes of it."""
    one = whole(ON_ONE)
    return Reproduction(
        way="simulation",
        ours={name: one / (whole(share) / MACHINES[name]) for name, share in SHARES.items()},
        note=NOTE,
    )


def fig10(quick: bool) -> Reproduction:
    share = SHARES["4 machines"]
    compute, all_to_all = time_of(0.0), time_of(share) - time_of(0.0)
    counts = (1, 2, 4, 8)
    left = [(time_of(share, slices=count) - compute) / all_to_all for count in counts]
    return Reproduction(
        way="simulation",
        ours={f"{count} slice{'s' * (count > 1)}": value for count, value in zip(counts, left, strict=True)},
        series={"not hidden": (tuple(map(float, counts)), tuple(left))},
        x_name="slices",
        note=NOTE,
    )


def fig11(quick: bool) -> Reproduction:
    share = SHARES["4 machines"]
    leads = range(SLICES + 1)
    values = [
        time_of(share) / time_of(share, slices=SLICES, temporal_lead=TEMPORAL_LEAD, spatial_lead=lead) for lead in leads
    ]
    return Reproduction(
        way="simulation",
        ours={f"L_S {lead}": value for lead, value in zip(leads, values, strict=True)},
        series={"speed-up": (tuple(map(float, leads)), tuple(values))},
        x_name="L_S",
        note=NOTE,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


FIGURES: dict[str, Reproduce] = {"fig9": fig9, "scaling": scaling, "fig10": fig10, "fig11": fig11}
