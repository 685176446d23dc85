"""What is said of a run's data at its start: which samples are dropped, and how often the others are drawn.

Sentences and their figures alone: who shows the records of a run reads no data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from data.ledger import Ledger, Reason
from ops.counted import first_of, noun_of

DROPPED = "dropped.jsonl"  # the file of a run that lists them
LIST_ALL = "heddle data lint --config RUN.yaml --headers-only"  # a command that names all of them
UNEVEN = 1.2  # sources differ if one is drawn more often than another by this factor
_RULE = re.compile(r"(\w+)\((.*)\)", re.DOTALL)  # a key of the ledger's details: reason(rule or refusal)
_OF_BUCKETS = {  # reason of a refusal (`data.buckets.Refusal`) -> words
    "too_small": "too small (data.buckets.min_area, undersize)",
    "too_large": "too large (data.buckets.oversize)",
    "no_ratio": "far from the aspect ratio of every bucket (data.buckets.ratios, max_ratio_error)",
    "no_image_bucket": "of one frame, for which there is no bucket (data.buckets.frames)",
    "too_short": "too short (data.buckets.frames, short_videos)",
}
_WORDS = {
    Reason.NO_MEDIA: "without a clip or picture",
    Reason.FILE_MISSING: "without their file",
}


def part_of(kind: str) -> str:
    """What a part of such a source is called."""
    return {"pairs": "folder", "koala": "table", "panda": "table", "manifest": "table"}.get(kind, "shard")


def reasons_in_words(ledger: Ledger) -> dict[str, int]:
    """How many rows of the indexes are left out why, most first, with the settings that decide it."""
    found = Counter[str]()
    left = ledger.rejected
    for rule, count in ledger.details.items():
        match = _RULE.fullmatch(rule)
        assert match is not None, f"{rule} of the ledger is not reason(rule)"
        reason, detail = Reason(match[1]), match[2]
        if reason is Reason.FILTERED:
            words = f"refused by {detail} (data.sources filters)"
        elif (refusal := detail.partition(",")[0]) in _OF_BUCKETS:
            words = _OF_BUCKETS[refusal]
        else:
            continue  # counted below
        found[words] += count
        left[reason] -= count
    for reason, count in left.items():
        if count > 0:
            found[_WORDS.get(reason, str(reason))] += count
    return dict(found.most_common())


def dropped_sentence(indexed: int, planned: int, reasons: Mapping[str, int]) -> str:
    """ "37 of 120 samples are dropped: 31 too small (...), 6 too short (...)"; "" where none is."""
    if not (dropped := indexed - planned):
        return ""
    why = first_of([f"{count:,} {words}" for words, count in reasons.items()], most=6)
    verb = "is" if dropped == 1 else "are"
    return f"{dropped:,} of {indexed:,} {noun_of(indexed, 'sample')} {verb} dropped{f': {why}' if why else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochForecast:
    """What the steps of a run draw. Made at its start, and by previews of it."""

    steps: int
    draws: int  # samples of all steps
    samples: int  # that can be drawn
    sources: Mapping[str, float] = field(default_factory=dict)  # name -> epochs of its samples
    exact: bool = True  # every step was looked at

    @property
    def epochs(self) -> float:
        """How often a sample is drawn on average."""
        return self.draws / self.samples if self.samples else 0.0

    @property
    def sentence(self) -> str:
        """ "2,000 steps draw 8,000 samples, each of the 30 about 267 times", or "..., 4% of 200,000"."""
        about = "" if self.exact else "about "
        if self.epochs >= 1:
            each = f"each of the {self.samples:,} about {number_of_epochs(self.epochs)} times"
        else:
            percent = 100 * self.epochs
            each = f"{f'{percent:.0f}' if percent >= 1 else f'{percent:.2g}'}% of {self.samples:,}"
        found = self.sources.values()
        uneven = len(self.sources) > 1 and max(found) > UNEVEN * min(found)
        listed = ", ".join(f"{name} {number_of_epochs(epochs)}" for name, epochs in self.sources.items())
        return f"{self.steps:,} steps draw {about}{self.draws:,} samples, {each}{f' ({listed})' if uneven else ''}"


def number_of_epochs(epochs: float) -> str:
    """0.42, 3.1, 267."""
    return f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
