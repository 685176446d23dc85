"""All measurements, most valuable first, since a budget cuts off the end."""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.gpu import (
    attention_right,
    attention_speed,
    cascades,
    counting,
    dit_right,
    graphs,
    kernels_right,
    launches,
    longest,
    lora_blocks,
    ops_speed,
    slices,
    train_step,
    vae_speed,
)
from app.bench.gpu.ceilings import Ceilings
from app.bench.gpu.copies import SnapshotCopies
from app.bench.gpu.host_update import HostUpdate
from app.bench.gpu.ipc import OneSidedAddition
from app.bench.gpu.measurement import Measurement, Place
from app.bench.gpu.muon_update import MuonUpdate
from app.bench.gpu.prodigy_update import ProdigyUpdate
from app.bench.gpu.push import PushedAddition
from app.bench.gpu.together import GpusTogether

FEW = 6  # measurements of a list that come early, the rest of it at the end
LIKE_OTHERS = ("16x1024", "packed-8k")  # packs of equal and of unequal lengths, of which others are measured


def catalogue(place: Place) -> list[Measurement]:
    """All measurements in the order in which they run where none is asked for by name; names are unique."""
    ops, attention = ops_speed.measurements(), attention_speed.measurements()
    small, large = train_step.measurements("wan-1.3b"), train_step.measurements("wan-14b")
    tuned = launches.measurements()  # for those who make rows of the launch tables
    if place.rehearse:  # other sizes of the same code
        ops = [one for one in ops if (one.width, one.tokens) == (ops[0].width, ops[0].tokens)]
        attention = [one for one in attention if one.pack not in LIKE_OTHERS]
        large = large[:1]  # which is as wide as the small one there
        tuned = tuned[:2]  # a forward and a backward
    found: list[Measurement] = [
        Ceilings(),  # by which the seconds of all others are expected
        *kernels_right.measurements(),
        *attention_right.measurements(),
        *dit_right.measurements(),
        GpusTogether(),
        *small[:2],
        *large[:2],
        *attention[:FEW],
        *ops[: FEW - 1],
        MuonUpdate(),
        ProdigyUpdate(),
        *slices.measurements(),
        *lora_blocks.measurements(),
        *small[2:],
        *cascades.measurements(),
        *graphs.measurements(),
        OneSidedAddition(),
        PushedAddition(),
        SnapshotCopies(),
        HostUpdate(),
        *large[2:],
        *ops[FEW - 1 :],
        *attention[FEW:],
        *vae_speed.measurements(),
        *counting.measurements(),
        *longest.measurements(),
        *tuned,
    ]
    assert len({one.name for one in found}) == len(found)
    return found


def chosen(measurements: Sequence[Measurement], prefixes: Sequence[str]) -> list[Measurement]:
    """The measurements whose name begins with one of the prefixes, in the order of these: what is asked for first runs
    first, where a budget cuts off the end. Raises ValueError for a prefix that none has."""
    found: dict[str, Measurement] = {}
    for prefix in prefixes:
        named = {one.name: one for one in measurements if one.name.startswith(prefix)}
        if not named:
            subjects = dict.fromkeys(one.name.split(".")[0] for one in measurements)
            raise ValueError(f"--only {prefix} fits no measurement; their names begin with {', '.join(subjects)}.")
        found |= {name: one for name, one in named.items() if name not in found}
    return list(found.values())
