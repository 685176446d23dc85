"""The page of `heddle bench peers`: for each set of buckets what a step takes, what a CPU second gives, what else it
costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from app.bench.page import BLUE, GREY, document, folded, legend, section, single_bars, tiles
from app.bench.peers.figures import HEAD, REFERENCE, PeerFigures, Rounds, agree, ratios_of, rows_of
from app.drawing.svg import BarRow, bars

LEAD = (
    "The same model from the same weights on the same clips, in the same order, with the same noise, on this machine's "
    "workers. Grey is what users run today, blue is Heddle, with its planning and snapshots. Medians over the rounds."
)


def html(found: Mapping[str, Rounds], glue: Mapping[str, int | None], command: Callable[[str], str], facts: str) -> str:
    """One file, no external assets. `found` is by set of buckets, whose command line `command` has."""
    parts = [tiles(_first(found))]
    parts += [_set(name, rounds, glue, command(name)) for name, rounds in found.items()]
    return document("Heddle beside other ways to train", facts, LEAD, parts)


def _first(found: Mapping[str, Rounds]) -> list[tuple[str, str]]:
    """What a reader takes away: the best of Heddle beside the reference on each set, and whether all train the same."""
    figures = []
    for name, rounds in found.items():
        ratios = {peer: median(ratios_of(peer, rounds)) for peer in rounds if _ours(peer)}
        if ratios:
            best = max(ratios, key=ratios.__getitem__)
            figures.append((f"{ratios[best]:.2f}", f"of {REFERENCE}'s clips per CPU second: {best}, {name} buckets"))
    same = all(agree(rounds) for rounds in found.values())
    figures.append(("equal" if same else "not equal", "losses of all ways, step by step, to 1e-5"))
    return figures


def _set(name: str, rounds: Rounds, glue: Mapping[str, int | None], command: str) -> str:
    def of(figure: Callable[[PeerFigures], float], text: Callable[[float], str]) -> str:
        values = {peer: median(map(figure, runs)) for peer, runs in rounds.items()}
        return single_bars((peer, _css(peer), value, text(value)) for peer, value in values.items())

    ratios = {peer: ratios_of(peer, rounds) for peer in rounds}
    beside = single_bars((peer, _css(peer), median(own), _spread(own)) for peer, own in ratios.items())
    cpu = bars(
        [
            BarRow(
                label=peer,
                bars=[
                    ("theirs", median(r.cpu_s for r in runs), f"{median(r.cpu_s for r in runs):.2f}"),
                    ("f3", median(r.trained_s for r in runs), f"{_share(runs):.0%} train"),
                ],
            )
            for peer, runs in rounds.items()
        ]
    )
    colours = legend([(GREY, "what users run today"), (BLUE, "Heddle")])
    pictures = [
        ("seconds per step, less is better", colours + of(lambda r: r.step_s, "{:.2f}".format)),
        (f"clips per CPU second beside {REFERENCE}'s, more is better", beside),
        (
            "CPU seconds of a step",
            legend([(GREY, "all processes"), ("var(--vae)", "those that train; others decode, plan, serve")]) + cpu,
        ),
        ("seconds from the command to the first step", of(lambda r: r.start_s, "{:.0f}".format)),
        ("GiB of private memory, all processes", of(lambda r: r.memory_mib / 1024, "{:.2f}".format)),
    ]
    numbers = folded(["", *HEAD], rows_of(rounds, glue))
    return section(f"{name} buckets".capitalize(), pictures, command, numbers)


def _share(runs: Sequence[PeerFigures]) -> float:
    """How much of the CPU seconds the processes that train take."""
    return median(run.trained_s / run.cpu_s for run in runs)


def _spread(ratios: Sequence[float]) -> str:
    shown = f"{median(ratios):.2f}"
    return f"{shown} ({min(ratios):.2f} to {max(ratios):.2f})" if min(ratios) < max(ratios) else shown


def _ours(peer: str) -> bool:
    return peer.startswith("heddle ")


def _css(peer: str) -> str:
    return "ours" if _ours(peer) else "theirs"
