"""Where every sample went: a closed set of reasons, counts that add up, and the limits that stop a run.

Two identities hold at every moment, and `check()` asserts them:

    indexed   == planned   + rejected(reason)              rows of the index: each is admitted or named
    scheduled == delivered + skipped(reason) + pending     draws of the plan: each ends in exactly one state

Data faults are properties of the bytes, the same on every try. I/O faults are not data: they raise DataIOError.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from data.config import LimitsConfig
from data.errors import DataError, DataIOError


class Severity(StrEnum):
    """What a reason means for the limits."""

    SAMPLE = "sample"  # a broken sample: counts towards max_bad_fraction
    SHARD = "shard"  # a broken shard or manifest: counts towards max_bad_shards
    ABSENT = "absent"  # normal in an index (dead URLs): counted and reported only; a draw that is gone is a broken one
    CHOICE = "choice"  # the user's own filters and buckets left it out
    NOTE = "note"  # a member that belongs to no sample; no sample is lost


class Reason(StrEnum):
    """Everything that can happen to a sample, a member or a shard."""

    # found in the tar, manifest or caption
    TRUNCATED_MEMBER = "truncated_member"
    EMPTY_MEMBER = "empty_member"
    MEMBER_TOO_LARGE = "member_too_large"
    NO_CAPTION = "no_caption"
    CAPTION_NOT_UTF8 = "caption_not_utf8"
    CAPTION_TOO_LARGE = "caption_too_large"
    BAD_JSON = "bad_json"
    SPLIT_KEY = "split_key"
    UNSAFE_NAME = "unsafe_name"
    AMBIGUOUS_MEDIA = "ambiguous_media"
    BAD_ROW = "bad_row"
    BAD_TIMESTAMP = "bad_timestamp"
    RANGE_OUTSIDE_VIDEO = "range_outside_video"
    # found in the media header
    NOT_MP4 = "not_mp4"
    NOT_MEDIA = "not_media"
    NO_VIDEO_TRACK = "no_video_track"
    TRUNCATED_VIDEO = "truncated_video"
    HEADER_TOO_LARGE = "header_too_large"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MANY_FRAMES = "too_many_frames"
    TOO_LONG = "too_long"
    # found at decode
    DECODE_ERROR = "decode_error"
    DECODER_CRASH = "decoder_crash"
    DECODE_TIMEOUT = "decode_timeout"
    # the media of a listed sample is not there
    NO_MEDIA = "no_media"
    FILE_MISSING = "file_missing"
    # left out by the settings
    FILTERED = "filtered"
    NO_BUCKET = "no_bucket"
    TOO_FEW_FRAMES = "too_few_frames"
    # shards and manifests
    TRUNCATED_TAR = "truncated_tar"
    GARBAGE_HEADER = "garbage_header"
    UNREADABLE_TAR = "unreadable_tar"
    UNREADABLE_MANIFEST = "unreadable_manifest"
    # members that are not samples
    DUPLICATE_PART = "duplicate_part"
    NO_SUFFIX = "no_suffix"
    LINK_MEMBER = "link_member"
    SPECIAL_MEMBER = "special_member"
    PICKLE_MEMBER = "pickle_member"

    @property
    def severity(self) -> Severity:
        return _SEVERITY.get(self, Severity.SAMPLE)


_SEVERITY = {
    **dict.fromkeys((Reason.NO_MEDIA, Reason.FILE_MISSING), Severity.ABSENT),
    **dict.fromkeys((Reason.FILTERED, Reason.NO_BUCKET, Reason.TOO_FEW_FRAMES), Severity.CHOICE),
    **dict.fromkeys(
        (Reason.TRUNCATED_TAR, Reason.GARBAGE_HEADER, Reason.UNREADABLE_TAR, Reason.UNREADABLE_MANIFEST), Severity.SHARD
    ),
    **dict.fromkeys(
        (Reason.DUPLICATE_PART, Reason.NO_SUFFIX, Reason.LINK_MEMBER, Reason.SPECIAL_MEMBER, Reason.PICKLE_MEMBER),
        Severity.NOTE,
    ),
}


class BadSample(Exception):
    """A data fault found while reading one sample. Raised by parsers and decoders, answered by counting."""

    def __init__(self, reason: Reason, detail: str = "", offset: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason, self.detail, self.offset = reason, detail, offset

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.reason, self.detail, self.offset))


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of bad.jsonl."""

    reason: Reason
    shard: str
    key: str = ""
    offset: int | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "key": self.key,
            "offset": self.offset,
            "reason": str(self.reason),
            "detail": self.detail,
        }

    @property
    def where(self) -> str:
        key = f" key {self.key}" if self.key else ""
        return f"shard {self.shard}{key} ({self.reason}{': ' + self.detail if self.detail else ''})"


class Ledger:
    """Counts of one run. Thread-safe. Fill it with rows (index, filters, buckets) and with draws (decode).

    ledger.add_indexed(1000); ledger.reject(fault); ledger.add_planned(999)          # rows
    ledger.schedule(64); ledger.deliver(63); ledger.skip(fault)                      # draws of a step
    """

    def __init__(self, limits: LimitsConfig | None = None, path: str | Path | None = None) -> None:
        """`path`: where bad.jsonl is appended; without it faults are only counted. A resumed run counts the faults of
        its index again, but the file lists them already."""
        self.limits = limits or LimitsConfig()
        self.path = Path(path) if path else None
        self._resumed = self.path is not None and self.path.exists() and self.path.stat().st_size > 0
        self.indexed = self.planned = self.scheduled = self.delivered = 0
        self.rejected: Counter[Reason] = Counter()
        self.skipped: Counter[Reason] = Counter()
        self.shard_faults: Counter[Reason] = Counter()
        self.notes: Counter[Reason] = Counter()
        self.details: Counter[str] = Counter()  # per rule or bucket, such as "aesthetic_score >= 4.5"
        self.bad_shards: set[str] = set()
        self.last: Fault | None = None
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    # rows of the index

    def add_indexed(self, count: int) -> None:
        with self._lock:
            self.indexed += count

    def add_planned(self, count: int) -> None:
        with self._lock:
            self.planned += count

    def reject(self, fault: Fault) -> None:
        """One row that is in the index and not in the plan."""
        with self._lock:
            self.rejected[fault.reason] += 1
            self._record(fault)

    def reject_many(self, reason: Reason, count: int, detail: str = "") -> None:
        """Rows left out by a rule (a filter, no bucket, missing files): counted, not listed one by one."""
        with self._lock:
            self.rejected[reason] += count
            if detail:
                self.details[f"{reason}({detail})"] += count

    # shards and stray members

    def shard_fault(self, fault: Fault) -> None:
        with self._lock:
            self.shard_faults[fault.reason] += 1
            self.bad_shards.add(fault.shard)
            self._record(fault)

    def note(self, fault: Fault) -> None:
        """A member that belongs to no sample; listed, without effect on any limit."""
        with self._lock:
            self.notes[fault.reason] += 1
            if not self._resumed:
                self._write(fault)

    def record(self, fault: Fault) -> None:
        """File a fault of the index where its severity says."""
        severity = fault.reason.severity
        if severity is Severity.SHARD:
            self.shard_fault(fault)
        elif severity is Severity.NOTE:
            self.note(fault)
        else:
            self.reject(fault)

    def add_line(self, fault: Fault) -> None:
        """A line of bad.jsonl for what `reject_many` has counted."""
        with self._lock:
            self._write(fault)

    # draws of the plan

    def schedule(self, count: int) -> None:
        with self._lock:
            self.scheduled += count

    def deliver(self, count: int) -> None:
        with self._lock:
            self.delivered += count

    def skip(self, fault: Fault) -> None:
        """One draw whose slot stays with weight 0."""
        with self._lock:
            self.skipped[fault.reason] += 1
            self.last = fault
            self._write(fault)

    # answers

    @property
    def pending(self) -> int:
        return self.scheduled - self.delivered - sum(self.skipped.values())

    def check(self) -> None:
        """Assert both identities."""
        with self._lock:
            rejected = sum(self.rejected.values())
            assert self.indexed == self.planned + rejected, (
                f"ledger: indexed {self.indexed} != planned {self.planned} + rejected {rejected} {dict(self.rejected)}"
            )
            assert self.pending >= 0, (
                f"ledger: scheduled {self.scheduled} < delivered {self.delivered} + skipped {dict(self.skipped)}"
            )

    def check_limits(self) -> None:
        """Raise DataError when more is bad than the limits allow: shards, rows of the index, or draws."""
        with self._lock:
            if len(self.bad_shards) > self.limits.max_bad_shards:
                raise DataError(
                    self._sentence(
                        f"{len(self.bad_shards)} shards with faults > max_bad_shards {self.limits.max_bad_shards}",
                        self.shard_faults,
                    )
                )
            absent = sum(count for reason, count in self.rejected.items() if reason.severity is Severity.ABSENT)
            broken = Counter(
                {reason: count for reason, count in self.rejected.items() if reason.severity is Severity.SAMPLE}
            )
            self._check_fraction(broken, self.indexed - absent)
            self._check_fraction(self.skipped, self.delivered + sum(self.skipped.values()))

    def summary(self) -> dict[str, Any]:
        """Everything as JSON, for reports and logs."""
        with self._lock:
            return {
                "indexed": self.indexed,
                "planned": self.planned,
                "rejected": _plain(self.rejected),
                "scheduled": self.scheduled,
                "delivered": self.delivered,
                "skipped": _plain(self.skipped),
                "pending": self.pending,
                "shard_faults": _plain(self.shard_faults),
                "notes": _plain(self.notes),
                "details": dict(sorted(self.details.items())),
                "bad_shards": len(self.bad_shards),
            }

    def draw_state(self) -> dict[str, Any]:
        """Counts of the draws, saved beside the resume token (rows are recounted from the index)."""
        with self._lock:
            return {"scheduled": self.scheduled, "delivered": self.delivered, "skipped": _plain(self.skipped)}

    def restore_draws(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self.scheduled, self.delivered = int(state["scheduled"]), int(state["delivered"])
            self.skipped = Counter({Reason(name): int(count) for name, count in state["skipped"].items()})

    def close(self) -> None:
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None

    # inside

    def _check_fraction(self, faults: Counter[Reason], seen: int) -> None:
        bad = sum(faults.values())
        if bad and seen >= self.limits.bad_after and bad / seen > self.limits.max_bad_fraction:
            raise DataError(
                self._sentence(
                    f"{bad} of {seen} samples ({bad / seen:.1%} > {self.limits.max_bad_fraction:.1%})", faults
                )
            )

    def _sentence(self, what: str, counts: Counter[Reason]) -> str:
        worst = ", ".join(f"{count} {reason}" for reason, count in counts.most_common(3))
        last = f"; last: {self.last.where}" if self.last else ""
        listed = f" Full list: {self.path}" if self.path else ""
        return f"bad data: {what}; worst: {worst}{last}.{listed}"

    def _record(self, fault: Fault) -> None:
        if fault.reason.severity in (Severity.SAMPLE, Severity.SHARD):
            self.last = fault
        if not self._resumed:
            self._write(fault)

    def _write(self, fault: Fault) -> None:
        if self.path is None:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(fault.to_json(), ensure_ascii=True) + "\n")
            self._file.flush()
        except OSError as error:
            self._file = None  # what it still holds would fail again when it is closed
            raise DataIOError(
                f"the list of faults {self.path} cannot be written: {error}. Free space, or name another "
                f"folder; no fault goes unlisted."
            ) from error


def _plain(counts: Counter[Reason]) -> dict[str, int]:
    return {str(reason): count for reason, count in sorted(counts.items())}
