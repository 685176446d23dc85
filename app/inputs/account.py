"""Prints what becomes of the samples of a data set, for `heddle plan` and `heddle train --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping

from app.settings.config import RunConfig
from data.dataset.coverage import Accounting
from data.errors import DataError
from data.types import Bucket
from ops.counted import counted
from ops.geometry import Geometry

NAMED = 12  # dropped samples listed by name


def print_account(account: Accounting, min_coverage: float) -> None:
    """How many samples are trained, repeated or dropped and why, per bucket. Raises DataError below `min_coverage`."""
    print(f"data      {account.identity}")
    print(
        f"          {100 * account.coverage:.1f}% of the indexed samples are trained within "
        f"{counted(account.steps, 'step')}, {account.repeated} of them more than once"
    )
    for rule, count in sorted(account.rules.items(), key=lambda pair: -pair[1]):
        print(f"          {count} refused: {rule}")
    print(f"{'bucket':>16} {'batch':>6} {'set by':>14} {'tokens':>8} {'samples':>8} {'items':>6} {'short':>6}")
    for row in account.buckets:
        print(
            f"{row.bucket!s:>16} {row.batch:>6} {row.limit:>14} {row.tokens:>8} {row.samples:>8} {row.items:>6} "
            f"{row.short_items:>6}"
        )
    named, total = account.dropped[:NAMED], sum(account.rejected.values())
    for dropped in named:
        print(f"dropped   {dropped.source} {dropped.key}: {dropped.reason}")
    if total > len(named):
        print(f"          {'and ' if named else ''}{total - len(named)} more are not listed here")
    if account.coverage < min_coverage:
        raise DataError(
            f"only {100 * account.coverage:.1f}% of the indexed samples are trained; data.min_coverage "
            f"asks for {100 * min_coverage:g}%. Widen data.buckets or lower data.min_coverage."
        )


def print_buckets(batches: Mapping[Bucket, tuple[int, str]], config: RunConfig, geometry: Geometry) -> None:
    """Batch size of every bucket, what sets it, the tokens of a sample, and what either limit alone would allow."""
    limits = config.data.batch
    by_compute = limits.compute > 0 and (limits.auto or not limits.target_s)  # which a target takes the place of
    print(f"{'bucket':>16} {'batch':>6} {'set by':>14} {'tokens':>8} {'by memory':>10} {'by compute':>10}")
    for bucket, (batch, limit) in batches.items():
        tokens = geometry.tokens(bucket.frames, bucket.height, bucket.width) + limits.text_tokens
        compute = f"{limits.compute / tokens**limits.exponent:.2f}" if by_compute else "-"
        print(f"{bucket!s:>16} {batch:>6} {limit:>14} {tokens:>8} {limits.memory_tokens / tokens:>10.2f} {compute:>10}")
    if by_compute:
        print(
            f"limits    M_mem {limits.memory_tokens:,.0f} tokens, M_comp {limits.compute:.4g}, p {limits.exponent:g}"
            + (f" ({limits.target_s:.3g} s a batch)" if limits.auto and limits.target_s else "")
        )
