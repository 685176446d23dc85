"""Where every sample went: a closed set of reasons, counts that add up, and the limits that stop a run.

Counts are kept by source; totals are their sums. The limits hold for the whole and for each source, as in a run of that
source alone: one that is a thousandth of the data is missed as soon as one that is all of it.

Two identities hold at every moment, and `check()` asserts them:

    indexed   == planned   + rejected(reason)              rows of the index: each is admitted or named
    scheduled == delivered + skipped(reason) + pending     draws of the plan: each ends in exactly one state

Data faults are properties of the bytes, the same on every try. I/O faults are not data: they raise DataIOError.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NotRequired, TypedDict, final

from data.config import LimitsConfig
from data.errors import DataError, DataIOError
from ops.line_file import LineFile
from ops.standard_out import is_stdout

EARLIER = -1  # number of the draws that a token of version 0.1 counts without their sources
_MOST_LATE = 1000  # lines of bad draws that wait for a disk that takes none; their clips train nothing meanwhile
LEAST_IN_A_ROW = 20  # a source counts as gone after at least this many bad draws in a row, however small it is
# A source that has delivered nothing ends the run after this many times the bad draws by which a source is judged, of
# draws that are left out by choice, or after two epochs where these are fewer.
LEFT_OUT_FOR = 10


class Severity(StrEnum):
    """What a reason means for the limits."""

    SAMPLE = "sample"  # a broken sample: counts towards max_bad_fraction
    SHARD = "shard"  # a broken shard or manifest: counts towards max_bad_shards
    ABSENT = "absent"  # normal in an index (dead URLs), so only counted there; as a draw it is a broken sample
    CHOICE = "choice"  # left out by the user's own filters and buckets, or as no kind that is trained: without a limit
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
    HDR = "hdr"
    # found at decode
    DECODE_ERROR = "decode_error"
    DECODER_CRASH = "decoder_crash"
    DECODE_TIMEOUT = "decode_timeout"
    # found in the cache, by a run that takes all from it
    NOT_CACHED = "not_cached"
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
    **dict.fromkeys((Reason.FILTERED, Reason.NO_BUCKET, Reason.TOO_FEW_FRAMES, Reason.HDR), Severity.CHOICE),
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

    def __reduce__(self) -> tuple[type[BadSample], tuple[Reason, str, int | None]]:
        return (type(self), (self.reason, self.detail, self.offset))


class FaultRecord(TypedDict):
    """A line of bad.jsonl. `source` only between processes; in the file the shard names it."""

    shard: str
    key: str
    offset: int | None
    reason: str
    detail: str
    source: NotRequired[int]


@final
class DrawRecord(TypedDict):
    """Counts of the draws of a source as JSON. Those in a row are left out where they are 0."""

    scheduled: int
    delivered: int
    skipped: dict[str, int]
    bad_in_a_row: NotRequired[int]
    left_out_in_a_row: NotRequired[int]


class SourceRecord(TypedDict):
    """Everything counted of one source as JSON."""

    name: str
    indexed: int
    planned: int
    rejected: dict[str, int]
    scheduled: int
    delivered: int
    skipped: dict[str, int]
    bad_in_a_row: NotRequired[int]
    left_out_in_a_row: NotRequired[int]


@final
class DrawsRecord(TypedDict):
    """Counts of the draws as a resume token holds them, by number of the source (a string, as JSON wants)."""

    sources: dict[str, DrawRecord]


class LedgerRecord(TypedDict):
    """The whole ledger as JSON."""

    indexed: int
    planned: int
    rejected: dict[str, int]
    scheduled: int
    delivered: int
    skipped: dict[str, int]
    pending: int
    shard_faults: dict[str, int]
    notes: dict[str, int]
    details: dict[str, int]
    bad_shards: int
    sources: list[SourceRecord]


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of bad.jsonl."""

    reason: Reason
    shard: str
    key: str = ""
    offset: int | None = None
    detail: str = ""
    source: int = 0  # its number in data.sources; not in bad.jsonl, where the shard names it

    def to_json(self) -> FaultRecord:
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


@dataclass(slots=True)
class SourceCounts:
    """What became of the rows and of the draws of one source."""

    name: str = ""
    indexed: int = 0
    planned: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)
    scheduled: int = 0
    delivered: int = 0
    skipped: Counter[Reason] = field(default_factory=Counter)
    bad_in_a_row: int = 0  # draws since the last good one, but for those that are left out by choice
    left_out_in_a_row: int = 0  # draws since the last good one that are left out by choice
    last: Fault | None = None

    @property
    def broken(self) -> Counter[Reason]:
        """Rejected rows that count towards max_bad_fraction."""
        return Counter({reason: n for reason, n in self.rejected.items() if reason.severity is Severity.SAMPLE})

    @property
    def broken_draws(self) -> Counter[Reason]:
        """Skipped draws that count towards max_bad_fraction."""
        return Counter({reason: n for reason, n in self.skipped.items() if reason.severity is not Severity.CHOICE})

    @property
    def present(self) -> int:
        """Rows of the index whose media is there."""
        return self.indexed - sum(n for reason, n in self.rejected.items() if reason.severity is Severity.ABSENT)

    @property
    def seen(self) -> int:
        """Draws that ended, good or bad."""
        return self.delivered + self.skipped.total()

    def summary(self) -> SourceRecord:
        return {
            "name": self.name,
            "indexed": self.indexed,
            "planned": self.planned,
            "rejected": _plain(self.rejected),
            **self.draw_state(),
        }

    def draw_state(self) -> DrawRecord:
        """Counts of the draws as JSON."""
        state: DrawRecord = {
            "scheduled": self.scheduled,
            "delivered": self.delivered,
            "skipped": _plain(self.skipped),
        }
        if self.bad_in_a_row:
            state["bad_in_a_row"] = self.bad_in_a_row
        if self.left_out_in_a_row:
            state["left_out_in_a_row"] = self.left_out_in_a_row
        return state

    def restore_draws(self, state: DrawRecord) -> None:
        self.scheduled, self.delivered = int(state["scheduled"]), int(state["delivered"])
        self.skipped = Counter({Reason(name): int(count) for name, count in state["skipped"].items()})
        self.bad_in_a_row = int(state.get("bad_in_a_row", 0))
        self.left_out_in_a_row = int(state.get("left_out_in_a_row", 0))


class Ledger:
    """Counts of one run. Thread-safe. Fill it with rows (index, filters, buckets) and with draws (decode).

    ledger.add_indexed(1000, source); ledger.reject(fault); ledger.add_planned(999, source)          # rows
    ledger.schedule(64, source); ledger.skip(fault); ledger.deliver(63, source)                      # draws of a step

    `source` is a number in data.sources; a fault carries its own. Of a step, file the faults before what is delivered:
    a good draw resets the count of bad ones in a row, which tells a source that is gone from one with bad samples.
    """

    def __init__(self, limits: LimitsConfig | None = None, path: str | Path | None = None) -> None:
        """`path`: where bad.jsonl is appended; without it faults are only counted. A resumed run counts the faults of
        its index again, but the file lists them already, or the first of them where the start before was killed. What
        lies in the file of `>> FILE` is no such list."""
        self.limits = limits or LimitsConfig()
        self.path = Path(path) if path else None
        resumed = self.path is not None and self.path.exists() and self.path.stat().st_size > 0
        resumed = resumed and not is_stdout(self.path)
        self._listed = _whole_lines(self.path) if self.path is not None and resumed else None  # by an earlier start
        self.sources: defaultdict[int, SourceCounts] = defaultdict(SourceCounts)
        self.shard_faults: Counter[Reason] = Counter()
        self.notes: Counter[Reason] = Counter()
        self.details: Counter[str] = Counter()  # per rule or bucket, such as "aesthetic_score >= 4.5"
        self.bad_shards: set[str] = set()
        self.last: Fault | None = None
        self._lock = threading.Lock()
        self._file = LineFile(self.path) if self.path is not None else None
        self._late: list[str] = []  # lines that the disk has not taken yet

    # totals

    @property
    def indexed(self) -> int:
        return sum(counts.indexed for counts in self.sources.values())

    @property
    def planned(self) -> int:
        return sum(counts.planned for counts in self.sources.values())

    @property
    def scheduled(self) -> int:
        return sum(counts.scheduled for counts in self.sources.values())

    @property
    def delivered(self) -> int:
        return sum(counts.delivered for counts in self.sources.values())

    @property
    def rejected(self) -> Counter[Reason]:
        return sum((counts.rejected for counts in self.sources.values()), Counter[Reason]())

    @property
    def skipped(self) -> Counter[Reason]:
        return sum((counts.skipped for counts in self.sources.values()), Counter[Reason]())

    # rows of the index

    def name_source(self, source: int, name: str) -> None:
        """How people know a source."""
        with self._lock:
            self.sources[source].name = name

    def add_indexed(self, count: int, source: int = 0) -> None:
        with self._lock:
            self.sources[source].indexed += count

    def add_planned(self, count: int, source: int = 0) -> None:
        with self._lock:
            self.sources[source].planned += count

    def reject(self, fault: Fault) -> None:
        """One row that is in the index and not in the plan."""
        with self._lock:
            self.sources[fault.source].rejected[fault.reason] += 1
            self._record(fault)

    def reject_many(self, reason: Reason, count: int, detail: str = "", source: int = 0) -> None:
        """Rows left out by a rule (a filter, no bucket, missing files): counted, not listed one by one."""
        with self._lock:
            self.sources[source].rejected[reason] += count
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
            self._write_once(fault)

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

    def schedule(self, count: int, source: int = 0) -> None:
        with self._lock:
            self.sources[source].scheduled += count

    def skip(self, fault: Fault) -> None:
        """One draw whose slot stays with weight 0."""
        with self._lock:
            counts = self.sources[fault.source]
            counts.skipped[fault.reason] += 1
            if fault.reason.severity is Severity.CHOICE:  # its source is there, and is not without other clips
                counts.left_out_in_a_row += 1
            else:
                counts.bad_in_a_row += 1
            counts.last = self.last = fault
            self._write(fault, most_late=_MOST_LATE)

    def deliver(self, count: int, source: int = 0) -> None:
        with self._lock:
            self.sources[source].delivered += count
            if count:
                self.sources[source].bad_in_a_row = self.sources[source].left_out_in_a_row = 0
            if self._late:
                self._list(_MOST_LATE)

    # answers

    @property
    def pending(self) -> int:
        return self.scheduled - self.delivered - self.skipped.total()

    def check(self) -> None:
        """Assert both identities."""
        with self._lock:
            rejected = self.rejected
            assert self.indexed == self.planned + rejected.total(), (
                f"ledger: indexed {self.indexed} != planned {self.planned} + rejected {rejected.total()} "
                f"{dict(rejected)}"
            )
            assert self.pending >= 0, (
                f"ledger: scheduled {self.scheduled} < delivered {self.delivered} + skipped {dict(self.skipped)}"
            )

    def check_limits(self) -> None:
        """Raise DataError when more is bad than the limits allow, of the whole or of a source: shards, rows of the
        index, or draws. Also when nothing of a source can be read any more, however little of it was drawn."""
        with self._lock:
            if len(self.bad_shards) > self.limits.max_bad_shards:
                raise DataError(
                    self._sentence(
                        f"{len(self.bad_shards)} shards with faults > max_bad_shards {self.limits.max_bad_shards}",
                        self.shard_faults,
                        self.last,
                    )
                )
            known = list(self.sources.values())
            broken = sum((counts.broken for counts in known), Counter[Reason]())
            self._check_fraction(broken, sum(counts.present for counts in known), self.last)
            broken = sum((counts.broken_draws for counts in known), Counter[Reason]())
            self._check_fraction(broken, sum(counts.seen for counts in known), self.last)
            for source, counts in self.sources.items():
                if source != EARLIER:
                    self._check_source(counts)

    def summary(self) -> LedgerRecord:
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
                "sources": [counts.summary() for _, counts in sorted(self.sources.items())],
            }

    def draw_state(self) -> DrawsRecord:
        """Counts of the draws, saved beside the resume token (rows are recounted from the index)."""
        with self._lock:
            drawn = {source: counts for source, counts in sorted(self.sources.items()) if counts.scheduled}
            return {"sources": {str(source): counts.draw_state() for source, counts in drawn.items()}}

    def restore_draws(self, state: DrawsRecord | DrawRecord) -> None:
        """Stand where `draw_state` was asked. Totals without sources, as version 0.1 wrote them, stay totals."""
        if "sources" in state:
            held = {int(source): counts for source, counts in state["sources"].items()}
        else:
            held = {EARLIER: state}
        with self._lock:
            for source in {*self.sources, *held}:
                self.sources[source].restore_draws(held.get(source, _NO_DRAWS))
            if EARLIER not in held:
                self.sources.pop(EARLIER, None)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()

    # inside

    def _check_source(self, counts: SourceCounts) -> None:
        whose = f"source {counts.name}: " if counts.name else ""
        self._check_fraction(counts.broken, counts.present, counts.last, whose)
        self._check_fraction(counts.broken_draws, counts.seen, counts.last, whose)
        if self.limits.max_bad_fraction == 1:
            return
        enough = max(min(self.limits.bad_after, max(counts.planned, LEAST_IN_A_ROW)), 1)
        if counts.bad_in_a_row >= enough:
            what = f"{whose}none of its last {counts.bad_in_a_row} draws could be read"
            remedy = " See whether its files are where data.sources says, then resume."
            raise DataError(self._sentence(what, counts.skipped, counts.last) + remedy)
        # Many draws left out in a row say nothing, as shards may be of one kind. Two epochs of them say that the source
        # has nothing else, and so do the first thousands of it.
        bound = 2 * counts.planned
        if not counts.delivered:
            bound = min(bound, LEFT_OUT_FOR * max(self.limits.bad_after, LEAST_IN_A_ROW))
        if counts.left_out_in_a_row >= max(enough, bound):
            what = f"{whose}none of its last {counts.left_out_in_a_row + counts.bad_in_a_row} draws could be trained"
            raise DataError(self._sentence(what, counts.skipped, counts.last))

    def _check_fraction(self, faults: Counter[Reason], seen: int, last: Fault | None, whose: str = "") -> None:
        bad = faults.total()
        if bad and seen >= self.limits.bad_after and bad / seen > self.limits.max_bad_fraction:
            what = f"{whose}{bad} of {seen} samples ({bad / seen:.1%} > {self.limits.max_bad_fraction:.1%})"
            raise DataError(self._sentence(what, faults, last))

    def _sentence(self, what: str, counts: Counter[Reason], last: Fault | None) -> str:
        worst = ", ".join(f"{count} {reason}" for reason, count in counts.most_common(3))
        named = f"; last: {last.where}" if last else ""
        listed = f" Full list: {self.path}" if self.path else ""
        return f"bad data: {what}; worst: {worst}{named}.{listed}"

    def _record(self, fault: Fault) -> None:
        if fault.reason.severity in (Severity.SAMPLE, Severity.SHARD):
            self.sources[fault.source].last = self.last = fault
        self._write_once(fault)

    def _write_once(self, fault: Fault) -> None:
        """A line for a fault of the index, unless an earlier start has listed it. Each start finds them in one order: a
        list that ends among them is of one that was killed, and one that goes on with something else has them all."""
        if self._listed is not None:
            try:
                line = next(self._listed, None)
            except OSError as error:
                raise DataIOError(f"the list of faults {self.path} cannot be read: {error}.") from error
            if line is not None:
                if line != _line_of(fault):
                    self._listed = itertools.repeat(line)
                return
            self._listed = None
        self._write(fault)

    def _write(self, fault: Fault, most_late: int = 0) -> None:
        """A line of bad.jsonl. As many as `most_late` may wait for a disk that is full for a while."""
        self._late.append(_line_of(fault))
        self._list(most_late)

    def _list(self, most_late: int) -> None:
        if self._file is None:
            self._late.clear()
            return
        try:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.add(self._late)
            self._late.clear()
        except OSError as error:
            if len(self._late) <= most_late:
                return
            raise DataIOError(
                f"the list of faults {self.path} cannot be written: {error}. Free space, or name another "
                f"folder; no fault goes unlisted."
            ) from error


def _line_of(fault: Fault) -> str:
    return json.dumps(fault.to_json(), ensure_ascii=True)


def _whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file but for the last one where only a part of it was written: what is added takes its place."""
    with path.open(encoding="ascii", errors="replace", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield line[:-1]


def _plain(counts: Counter[Reason]) -> dict[str, int]:
    return {str(reason): count for reason, count in sorted(counts.items())}


_NO_DRAWS = SourceCounts().draw_state()
