"""What becomes of the samples of a data set, for `heddle plan` and `heddle train --dry-run`: as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from app.settings.config import RunConfig
from data.dataset.coverage import Accounting
from data.in_words import LIST_ALL, dropped_sentence
from data.types import Bucket
from ops.counted import counted
from ops.geometry import Geometry

NAMED = 12  # dropped samples that a terminal lists by name


def account_lines(account: Accounting, most_named: int = NAMED) -> list[str]:
    """How many samples are trained, repeated or dropped and why, per bucket, and how often the run draws them."""
    lines = [
        f"data      {account.identity}",
        f"          {100 * account.coverage:.1f}% of the indexed samples are trained within "
        f"{counted(account.steps, 'step')}, {account.repeated} of them more than once",
    ]
    if account.forecast is not None:
        lines.append(f"          {account.forecast.sentence}")
    if sentence := dropped_sentence(account.indexed, account.planned, account.reasons):
        lines.append(f"          {sentence}")
    lines += [f"          {count} refused: {rule}" for rule, count in Counter(account.rules).most_common()]
    lines.append(f"{'bucket':>16} {'batch':>6} {'set by':>14} {'tokens':>8} {'samples':>8} {'items':>6} {'short':>6}")
    lines += [
        f"{row.bucket!s:>16} {row.batch:>6} {row.limit:>14} {row.tokens:>8} {row.samples:>8} {row.items:>6} "
        f"{row.short_items:>6}"
        for row in account.buckets
    ]
    lines.append("          short: items that were trained before they were full (data.max_wait)")
    named = account.dropped[:most_named]
    lines += [f"dropped   {dropped.source} {dropped.key}: {dropped.why}" for dropped in named]
    if more := sum(account.rejected.values()) - len(named):
        lines.append(f"          {'and ' if named else ''}{more:,} more; {LIST_ALL} lists all")
    return lines


def account_json(account: Accounting) -> dict[str, object]:
    """The account as other programs read it; of the dropped samples those that it names, and how many there are."""
    buckets = [asdict(row) | {"bucket": str(row.bucket)} for row in account.buckets]
    more = {"num_dropped": sum(account.rejected.values()), "coverage": account.coverage}
    return asdict(account) | {"buckets": buckets} | more


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
