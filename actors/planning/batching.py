"""Batch sizes from a profile: AdaptiveLoad's dual constraint with its limits found instead of guessed. Pure.

`TargetBatch`: as many clips as train in `data.batch.target_s` seconds, by the profile's prices as they stand.
`fitted_limits`: M_mem, M_comp and p of `data.batch.auto`. `best_sizes`: what either of them says now. `moved`: whether
that is far enough from the sizes that a run has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from actors.plan.costs.fit import BETTER, LEAST_POINTS, Fit, fit_form
from actors.plan.costs.forms import Load
from actors.plan.costs.left_out import LeftOut, left_out
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from data.buckets import batch_size
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry

_MOST = 4096  # clips of the smallest image bucket; more would not train better
_TRIED = (1, 2, 4)  # clips of a bucket whose prices are fitted


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetBatch:
    """`data.buckets.BatchSize`: a pure function of the profile, so run and preview agree."""

    profile: Profile
    geometry: Geometry

    def __call__(self, bucket: Bucket, limits: BatchConfig) -> int:
        tokens = limits.text_tokens + self.geometry.tokens(*bucket.shape)
        most = min(int(limits.memory_tokens // tokens), limits.max_batch or _MOST)
        low, high = 1, max(1, most)
        while low < high:  # seconds grow with the batch
            middle = (low + high + 1) // 2
            if self._seconds(middle, bucket, limits.text_tokens) <= limits.target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _seconds(self, batch: int, bucket: Bucket, text_tokens: int) -> float:
        """Seconds on the fewest workers that hold it; infinite where the profile knows no legal degree."""
        modes = self.profile.modes("dit", Samples.of(batch, bucket.shape, text_tokens))
        return modes[0][1] if modes else float("inf")


def fitted_limits(
    profile: Profile, buckets: Sequence[Bucket], limits: BatchConfig, room_gib: float = inf
) -> tuple[BatchConfig, Fit]:
    """(the limits with M_mem, M_comp and p filled in; the fit that gave them), AdaptiveLoad sec. 3.2.

    seconds = a + b B S^p is fitted to the DiT's prices of these buckets, p on [1.6, 2.4] for the best R^2, and
    M_comp = (target_s - a) / b. Where that fit is poor, as small batches cost a GPU what their launches do, it is
    fitted to all measured points, with the p of the limits unless the points tell another. The paper presets target_s.
    If `target_s` is 0, the target is the predicted time of one clip of the longest bucket, so M_comp = S^p of that
    bucket (more if launch overhead dominates, see `_worth_launching`). The setting itself stays 0: a target derived
    from one cost model is not valid for another. M_mem are the rows that fit `room_gib` of a worker; where no limit of
    memory is known, `memory_tokens` stays. Raises ValueError where the profile prices nothing, and for a target that no
    batch can meet.
    """
    loads, seconds = [], []
    for bucket in buckets:
        for batch in _TRIED:
            part = Samples.of(batch, bucket.shape, limits.text_tokens)
            modes = profile.modes("dit", part)
            if modes:
                loads.append(profile.load_of("dit", part, modes[0][0]))
                seconds.append(modes[0][1])
    if len(loads) < 3:
        raise ValueError(
            f"the profile prices {len(loads)} of the buckets' batches, too few to fit data.batch.auto. Measure them "
            f"with heddle profile, or set data.batch.compute and auto: false."
        )
    fit = fit_form("adaptiveload", loads, seconds, f"fitted to {len(loads)} prices of {profile.device}")
    if fit.poor:
        fit = _by_all_points(profile, fit, limits.exponent)
    fixed, slope = fit.coefficients
    longest = max(profile.tokens(*b.shape) for b in buckets) + limits.text_tokens
    if slope <= 0 and limits.target_s:
        raise ValueError(
            f"seconds of the DiT do not grow with B S^p ({fit.source}), so they limit no batch. Measure more or larger "
            f"buckets with heddle profile, or set data.batch.compute and auto: false."
        )
    if limits.target_s and limits.target_s <= fixed:
        raise ValueError(
            f"data.batch.target_s is {limits.target_s:g} s, and any cascade takes {fixed:g} s (the constant of the "
            f"fit). Set it to more, or to 0 for what one clip of the longest bucket takes."
        )
    if limits.target_s:
        compute = (limits.target_s - fixed) / slope
    else:
        compute = _worth_launching(float(longest) ** fit.exponent, fit, profile.points("dit")[0])
    rows = profile.needs.most_rows(room_gib) if isfinite(room_gib) else inf
    found = replace(
        limits,
        compute=float(f"{compute:.6g}"),
        exponent=fit.exponent,
        memory_tokens=float(int(rows)) if isfinite(rows) and rows >= 1 else limits.memory_tokens,
    )
    return found, fit


def _worth_launching(of_longest: float, fit: Fit, measured: Sequence[Load]) -> float:
    """M_comp without a target: one clip of the longest bucket, doubled until its work takes no less than what any
    cascade takes (launches), and not beyond the largest load that was measured. Whole doublings, as a constant that is
    most of all seconds leaves the slope to noise, and sizes should not follow that; where seconds do not grow at all,
    the largest measured load is as quick as any."""
    fixed, slope = fit.coefficients
    most = max((load.batch * load.length**fit.exponent / load.degree for load in measured), default=0.0)
    compute = of_longest
    while slope * compute < fixed and 2 * compute <= most:
        compute *= 2
    return compute


def _by_all_points(profile: Profile, of_prices: Fit, exponent: float) -> Fit:
    """The fit to all measured points of the DiT, whatever their batch, at this p or at the one that they tell: where
    they are noisy, the p of the best R^2 is only noise, and batches would follow it. Returns the fit `of_prices` where
    few are measured."""
    loads, seconds = profile.points("dit")
    if len(loads) < LEAST_POINTS:
        return of_prices
    source = f"fitted to {len(loads)} points of {profile.device}"
    free = fit_form("adaptiveload", loads, seconds, source)
    plain = fit_form("adaptiveload", loads, seconds, source, exponents=(exponent,))
    errors = [_errors(loads, seconds, one.exponent) for one in (free, plain)]
    found, error = (free, errors[0]) if errors[0].log_error < BETTER * errors[1].log_error else (plain, errors[1])
    return replace(found, unseen=error)


def _errors(loads: Sequence[Load], seconds: Sequence[float], exponent: float) -> LeftOut:
    return left_out(
        lambda some, of: fit_form("adaptiveload", some, of, "", exponents=(exponent,)).predict, loads, seconds
    )


def seconds_of(limits: BatchConfig, fit: Fit) -> float:
    """What a batch at M_comp takes by the fit."""
    fixed, slope = fit.coefficients
    return fixed + slope * limits.compute


def best_sizes(
    profile: Profile, buckets: Sequence[Bucket], limits: BatchConfig, room_gib: float = inf
) -> dict[Bucket, int]:
    """Clips per batch of every bucket as this profile has it now."""
    if not limits.auto:
        timed = TargetBatch(profile=profile, geometry=profile.geometry)
        return {bucket: timed(bucket, limits) for bucket in buckets}
    found, _ = fitted_limits(profile, buckets, limits, room_gib)
    return {bucket: batch_size(bucket, found, profile.geometry) for bucket in buckets}


def moved(now: Mapping[Bucket, int], best: Mapping[Bucket, int], change: float) -> dict[Bucket, tuple[int, int]]:
    """(size now, best size) of the buckets whose best size is off by more than this share of the size now."""
    return {
        bucket: (size, best[bucket])
        for bucket, size in sorted(now.items())
        if bucket in best and abs(best[bucket] / size - 1.0) > change
    }
