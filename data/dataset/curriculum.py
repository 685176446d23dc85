"""What may be drawn in each segment of a run: the rows that fit a bucket, batch sizes, shares of the sources.

`SampleOrder` draws from it. It is made once, from the columns of the indexes alone: no row is read.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from data.buckets import BatchSize, BucketTable, Choice, ClipShape, Refusal, available_frames, planned_batch
from data.config import DataConfig, SegmentConfig
from data.dataset.index import Index
from data.dataset.order import digest
from data.dataset.order_state import Population, Stage
from data.errors import DataError
from data.ledger import Ledger, Reason
from data.types import Bucket
from ops.geometry import Geometry

log = logging.getLogger(__name__)

SHAPE = ("height", "width", "num_frames", "fps", "image")  # columns that decide which buckets take a row


class Curriculum:
    """`codes` has the number of the shape of every row of each source, -1 for rows that are never drawn; `batches` the
    size of a batch of each bucket and what sets it, by segment; `populations` and `stages` are what is drawn from."""

    def __init__(
        self,
        config: DataConfig,
        indexes: Sequence[Index],
        geometry: Geometry,
        ledger: Ledger,
        timed: BatchSize | None = None,
    ) -> None:
        """What is refused goes to the `ledger`; `timed` sizes the batches of buckets with a `target_s`. Raises
        DataError when no item can be formed."""
        if not indexes:
            raise DataError("data.sources is empty. Give at least one source with its path.")
        self._config, self._indexes, self._geometry, self._ledger = config, indexes, geometry, ledger
        self._timed = timed
        self._shapes, codes = _shapes(indexes)
        segments = config.stages
        self.tables = [BucketTable.build(table, geometry) for table in config.tables]
        self._options = [_choices(table, self._shapes, config.fps) for table in self.tables]
        self.codes = self._admit(codes)
        self.batches = [self._planned_batches(table, segment) for table, segment in zip(self.tables, segments)]
        self._warn_of_single_samples(segments)
        self.stages = [self._stage(number, segment) for number, segment in enumerate(segments)]
        self.populations = [
            Population(name=index.name, shard_bounds=index.shard_bounds, shape=shape, window=source.shuffle_window)
            for index, shape, source in zip(indexes, self.codes, config.sources)
        ]

    def refusal(self, height: int, width: int, num_frames: int, fps: float, image: bool) -> Refusal:
        """Why no bucket of the last segment takes a row of this SHAPE that the index admits."""
        shape = _shape(height, width, num_frames, fps, image)
        refused = self.tables[-1].choices(shape, self._config.fps)
        assert isinstance(refused, Refusal), f"{shape} fits {refused}"
        return refused

    def _admit(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Shape codes with -1 where the index, a filter or every table refuses the row; refusals go to the ledger."""
        fits = np.array(
            [
                any(not isinstance(options[shape], Refusal) for options in self._options)
                for shape in range(len(self._shapes))
            ]
            + [False]
        )
        admitted = []
        for index, source, code in zip(self._indexes, self._config.sources, codes):
            alive = index.columns("ok")["ok"].copy()
            for rule in source.filters:
                passes = index.filter_mask(rule)
                self._ledger.reject_many(Reason.FILTERED, int((alive & ~passes).sum()), rule, index.ordinal)
                alive &= passes
            for shape, count in zip(*np.unique(code[alive & ~fits[code]], return_counts=True)):
                refusal = self._options[-1][shape]
                assert isinstance(refusal, Refusal)
                self._ledger.reject_many(refusal.ledger_reason, int(count), refusal.summary, index.ordinal)
            alive &= fits[code]
            self._ledger.add_planned(int(alive.sum()), index.ordinal)
            admitted.append(np.where(alive, code, -1).astype(np.int32))
        if not any((code >= 0).any() for code in admitted):
            raise DataError(self._nothing_fits(codes))
        return admitted

    def _nothing_fits(self, codes: Sequence[np.ndarray]) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self._ledger.rejected.most_common(4))
        usable = np.concatenate([code[index.columns("ok")["ok"]] for index, code in zip(self._indexes, codes)])
        sentence = f"no sample can be trained: of {self._ledger.indexed} indexed, {counts or 'none is left'}. "
        refused = {shape: option for shape, option in enumerate(self._options[-1]) if isinstance(option, Refusal)}
        shapes = Counter(code for code in usable.tolist() if code in refused)
        if not shapes:
            return sentence + "Relax the filters."
        reasons = Counter[str]()
        for code, count in shapes.items():
            reasons[refused[code].reason] += count
        ((reason, number),) = reasons.most_common(1)
        usual = next(code for code, _ in shapes.most_common() if refused[code].reason == reason)
        shape = self._shapes[usual]
        near = ", ".join(f"{name}: {bucket}" for name, bucket in self.tables[-1].nearest_by_class(shape).items())
        return (
            f"{sentence}Buckets refuse {number} as {reason}, most often {shape.width}x{shape.height} with "
            f"{shape.frames} frames ({refused[usual].detail}). Nearest bucket of each resolution class: {near}. "
            f"Widen data.buckets or relax the filters."
        )

    def _stage(self, number: int, segment: SegmentConfig) -> Stage:
        table, options, config = self.tables[number], self._options[number], self._config
        limits = segment.batch or config.batch
        batch = {bucket: size for bucket, (size, _) in self.batches[number].items()}
        choices = tuple(() if isinstance(option, Refusal) else option for option in options)
        return Stage(
            until_step=segment.until_step,
            choices=choices,
            batch=batch,
            weights=self._weights(segment, choices),
            tokens={bucket: limits.text_tokens + self._visual_tokens(bucket) for bucket in table.buckets},
            items_per_step=segment.items_per_step or config.items_per_step,
            max_wait=config.max_wait or 10 * max(batch.values()) * len(batch),
            by_tokens=config.mixture == "tokens",
            crop=(segment.buckets or config.buckets).oversize == "crop",
            settings=digest(asdict(segment.buckets or config.buckets)),
        )

    def _planned_batches(self, table: BucketTable, segment: SegmentConfig) -> dict[Bucket, tuple[int, str]]:
        limits = segment.batch or self._config.batch
        return {bucket: planned_batch(table, bucket, limits, self._geometry, self._timed) for bucket in table.buckets}

    def _warn_of_single_samples(self, segments: Sequence[SegmentConfig]) -> None:
        """A batch has one sample at least: where that alone is above the limit, it does not protect the device."""
        for table, segment in zip(self.tables, segments):
            limits = segment.batch or self._config.batch
            sizes = {bucket: limits.text_tokens + self._visual_tokens(bucket) for bucket in table.buckets}
            above = {bucket: size for bucket, size in sizes.items() if size > limits.memory_tokens}
            if above and not limits.from_table:
                bucket = max(above, key=above.__getitem__)
                log.warning(
                    "one sample of bucket %s has %d tokens, more than data.batch.memory_tokens %g allows at "
                    "once (so do %d of %d buckets): batches of 1 are made all the same. Raise memory_tokens if "
                    "the device holds it, or leave the bucket out.",
                    bucket,
                    above[bucket],
                    limits.memory_tokens,
                    len(above),
                    len(sizes),
                )

    def _visual_tokens(self, bucket: Bucket) -> int:
        return self._geometry.tokens(bucket.frames, bucket.height, bucket.width)

    def _weights(self, segment: SegmentConfig, choices: Sequence[Sequence[Choice]]) -> tuple[float, ...]:
        """Shares of the sources: the segment's, the sources', or by their number of samples that fit."""
        if segment.weights:
            return segment.weights
        given = tuple(source.weight for source in self._config.sources)
        if any(given):
            return given
        takes = np.array([bool(options) for options in choices] + [False])
        counts = [int(takes[code].sum()) for code in self.codes]
        return tuple(count / max(sum(counts), 1) for count in counts)


def _choices(table: BucketTable, shapes: Sequence[ClipShape], fps: float) -> list[tuple[Choice, ...] | Refusal]:
    """The choices of every shape. A million clips have a hundred thousand shapes, but few differ in size and in the
    bucket lengths that they fill."""
    lengths = sorted({entry.frames for entry in table.entries})
    known: dict[tuple[int, int, bool, int], tuple[Choice, ...] | Refusal] = {}
    found = []
    for shape in shapes:
        filled = bisect.bisect_right(lengths, available_frames(shape, fps))
        key = (shape.height, shape.width, shape.is_image, filled)
        option = known.get(key)
        if option is None or isinstance(option, Refusal):  # a refusal names its number of frames
            option = known[key] = table.choices(shape, fps)
        found.append(option)
    return found


def _shapes(indexes: Sequence[Index]) -> tuple[list[ClipShape], list[np.ndarray]]:
    """The distinct shapes of all sources, and the number of each row's shape."""
    numbers: dict[tuple[int, int, int, float, bool], int] = {}
    codes = []
    for index in indexes:
        columns = index.columns(*SHAPE, "ok", *index.filtered)  # at once: each read opens the file of every part
        inverse, count = _joint_codes([columns[name] for name in SHAPE])
        first = np.full(count, -1, np.int64)
        first[inverse[::-1]] = np.arange(len(inverse) - 1, -1, -1)
        keys = [tuple(columns[name][row].item() for name in SHAPE) for row in first]
        codes.append(
            np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)[inverse]
            if count
            else np.zeros(0, np.int32)
        )
    return [_shape(*key) for key in numbers], codes


def _shape(height: int, width: int, frames: int, fps: float, image: bool) -> ClipShape:
    """Rows the index rejected have zeros here; they are never looked up."""
    return ClipShape(
        frames=max(frames, 1), height=max(height, 1), width=max(width, 1), fps=0.0 if image else max(fps, 1e-3)
    )


def _joint_codes(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Numbers 0.. of the distinct combinations of values, and how many there are."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        codes = codes * max(len(values), 1) + inverse
        _, codes = np.unique(codes, return_inverse=True)  # keeps the product of the counts from overflowing
    return codes, int(codes.max()) + 1 if len(codes) else 0
