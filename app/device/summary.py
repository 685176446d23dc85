"""What `heddle profile` says of what it has measured, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from actors.plan.costs.exchange import exchange_speed
from actors.plan.costs.fit import POOR_RESIDUAL, fit_form, knapformer_constants
from actors.plan.costs.handoff import Handoff, estimate_of
from actors.plan.costs.profile import Profile
from actors.plan.costs.spanning import OVERLAP
from actors.plan.types import MODULES
from app.inputs.limits import largest_batches, longest_clips
from ops.counted import counted
from ops.models.config import ModelConfig

_WIDE = 0.5  # a spread of runs that says that the machine did something else meanwhile
_JITTER_S = 1e-3  # unless they differ by less than this


def summary_lines(profile: Profile, model: ModelConfig) -> Iterator[str]:
    """All lines, in the order of a plan: cascades, what is beside them, limits, memory, what to doubt."""
    for module in MODULES:
        if fit := profile.model_of(module):
            told = fit.unseen is not None or not fit.poor
            yield f"{module:4}  missing points: {fit.source}{f', {fit.quality}' if told else ''}"
    yield from _figure_lines(profile)
    for line in [*longest_clips(profile), *largest_batches(profile)]:
        yield f"limit {line}"
    yield from _gamma_line(profile, model)
    yield from need_lines(profile)
    yield from _spread_notes(profile)
    for note in profile.notes:
        yield f"note: {note}"


def _gamma_line(profile: Profile, model: ModelConfig) -> Iterator[str]:
    loads, seconds = profile.points("dit")
    if len(loads) < 2:
        return
    try:
        found = fit_form("knapformer", loads, seconds, "")
        _, gamma = knapformer_constants(found, model.dit.dim)
    except ValueError as error:
        yield f"      gamma of KnapFormer: {error}"
        return
    doubt = f"; not to be trusted, its fit is {found.worst:.0%} off" if found.worst > POOR_RESIDUAL else ""
    yield f"      gamma of KnapFormer (attention FLOPs cost so much of linear ones): {gamma:.2f}{doubt}"


def _spread_notes(profile: Profile) -> Iterator[str]:
    """Notes of points whose runs differ: in long ones the machine was busy, short ones wait for launches."""
    wide = [key for key, spread in profile.spread.items() if spread > _WIDE]
    busy = [key for key in wide if profile.spread[key] * profile.measured.get(key, 1.0) > _JITTER_S]
    if busy:
        yield (
            f"note: runs of {len(busy)} of {len(profile.spread)} points differ by more than {_WIDE:.0%} of their "
            f"median: was the machine busy? --fresh measures them again"
        )
    if len(wide) > len(busy):
        yield (
            f"note: runs of {len(wide) - len(busy)} of {len(profile.spread)} points differ by more than {_WIDE:.0%} of "
            f"their median, but by less than {1e3 * _JITTER_S:g} ms: so short a cascade waits for its launches, which "
            f"vary"
        )


def need_lines(profile: Profile) -> list[str]:
    """What cascades need of a worker's memory beside the states, by measured peaks: one line for each kind."""
    units = {"dit": "row", "text": "token", "vae": "clip"}
    return [
        f"needs {module} {kind}: {round(line.fixed_gib, 3) + 0.0:.3f} GiB and {1024 * line.gib_per_unit:.4g} MiB "
        f"a {units[module]}, by {len(profile.needs.measured[module, kind])} peaks"
        for (module, kind), line in sorted(profile.needs.lines().items())
    ]


def _figure_lines(profile: Profile) -> Iterator[str]:
    """The end of a step, all-to-alls, bags over nodes, handoffs."""
    for point in profile.update.points:
        each = point.seconds / max(profile.update.weights, 1) * 1e9
        yield f"update  {counted(point.workers, 'worker')}: {point.seconds:.4f} s, {each:.3g} ns a weight"
    if found := exchange_speed(profile.exchanges):
        yield f"a2a   {found[1] / 1e9:.2f} GB/s of a member after {1e6 * found[0]:.0f} us"
    if found := exchange_speed(profile.exchanges, across=True):
        yield f"a2a   across nodes {found[1] / 1e9:.2f} GB/s of a member after {1e6 * found[0]:.0f} us"
    if profile.over_nodes:
        yield f"nodes a bag over nodes takes {profile.cross_node.factor(OVERLAP):.3g} times as long as inside one"
    if profile.cross_node.by_rows:
        row_s, peer_s = (
            profile.cross_node.fall(OVERLAP) * profile.cross_node.sending(*one) for one in ((1, 0), (0, 1))
        )
        yield (
            f"nodes in plans: {1e6 * row_s:.3g} us more for a row that a member sends, {1e3 * peer_s:.3g} ms for a peer"
        )
    for nodes in sorted({point.nodes for point in profile.handoffs}):
        cost = estimate_of([point for point in profile.handoffs if point.nodes == nodes]).cost(0.0)
        if cost is not None:
            yield f"handoff  {'on two nodes' if nodes > 1 else 'on one node'}: {_handoff(cost)}"
    if profile.handoffs:
        yield f"handoff  in plans: {_handoff(profile.handoff)}"


def _handoff(cost: Handoff) -> str:
    if not cost.latency_s and not cost.gib_per_s:
        return "nothing, less than a hundredth of a usual DiT cascade"
    return (f"{cost.gib_per_s:.3g} GiB/s after " if cost.gib_per_s else "") + f"{1e3 * cost.latency_s:.2f} ms"
