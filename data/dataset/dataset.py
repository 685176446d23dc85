"""The dataset of a run: what every step trains on, as a pure function of (index, config, seed, step).

dataset = Dataset.open(config.data, geometry, seed=0)
step = dataset.step(41)                 # the items of step 41, for any number of workers
job = step.items[0].job                 # what a decoder needs to read it
token = dataset.token(42)               # saved with committed step 41; dataset.resume(token) continues there
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.buckets import BatchSize, BucketTable, Choice, ClipShape, Refusal, available_frames, last_start, planned_batch
from data.config import DataConfig, SegmentConfig
from data.dataset.index import Index, IndexRow, build_index
from data.dataset.order import (
    DROP,
    PICK,
    START,
    BatchDraw,
    BatchSizes,
    DataToken,
    OrderState,
    Population,
    SampleDraw,
    SampleOrder,
    Stage,
    digest,
    uniform,
)
from data.dataset.positions import Positions
from data.errors import DataError
from data.ledger import DrawsRecord, Fault, Ledger, LedgerRecord, Reason
from data.types import Bucket, Clip, DataItem, DecodeJob, SampleRef, StepOfItems
from ops.geometry import Geometry

log = logging.getLogger(__name__)

KEPT_STEPS = 64  # steps with their samples, and counts of draws before the last steps
NO_DRAWS: DrawsRecord = {"sources": {}}
MOST_AHEAD = 1024  # steps that an engine may have planned when the token of an earlier one is asked for


class Dataset:
    """Steps, tokens and accounts of one run. Not thread-safe; one process plans, any number decodes."""

    def __init__(
        self,
        config: DataConfig,
        indexes: Sequence[Index],
        seed: int,
        geometry: Geometry,
        ledger: Ledger,
        timed: BatchSize | None = None,
    ) -> None:
        """Use `open`."""
        if not indexes:
            raise DataError("data.sources is empty. Give at least one source with its path.")
        self.config, self.indexes, self.seed = config, tuple(indexes), seed
        self.geometry, self.ledger, self.timed = geometry, ledger, timed
        self.shapes, codes = _shapes(self.indexes)
        segments = config.segments or (SegmentConfig(until_step=0),)
        self.tables = [BucketTable.build(segment.buckets or config.buckets, geometry) for segment in segments]
        self.options = [_choices(table, self.shapes, config.fps) for table in self.tables]
        self.codes = self._admit(codes)
        self.batches = [self._planned_batches(table, segment) for table, segment in zip(self.tables, segments)]
        self._warn_of_single_samples(segments)
        stages = [self._stage(number, segment) for number, segment in enumerate(segments)]
        populations = [
            Population(name=index.name, shard_bounds=index.shard_bounds, shape=shape, window=source.shuffle_window)
            for index, shape, source in zip(self.indexes, self.codes, config.sources)
        ]
        self.planner = SampleOrder(populations, stages, seed, self._identity())
        self._positions = self._known(self.planner.start())
        self._steps: OrderedDict[int, StepOfItems] = OrderedDict()
        self._draws: OrderedDict[int, DrawsRecord] = OrderedDict({0: ledger.draw_state()})  # of the steps before

    @classmethod
    def open(
        cls,
        config: DataConfig,
        geometry: Geometry,
        seed: int,
        *,
        bad_list: str | Path | None = None,
        timed: BatchSize | None = None,
    ) -> Dataset:
        """Load or build the index of every source, then plan. Raises DataError when no item can be formed or more is
        bad than data.limits allow, ValueError for settings that make no sense.

        `bad_list`: where bad.jsonl goes. `timed` sizes the batches of buckets with a `target_s`.
        """
        ledger = Ledger(config.limits, bad_list)
        indexes = [
            build_index(
                source, Path(source.index) if source.index else None, ledger, limits=config.limits, ordinal=ordinal
            )
            for ordinal, source in enumerate(config.sources)
        ]
        dataset = cls(config, indexes, seed, geometry, ledger, timed)
        ledger.check()
        ledger.check_limits()
        return dataset

    # steps

    def step(self, index: int) -> StepOfItems:
        """The items of a step. In sequence this costs O(its samples); a jump replays from the nearest position."""
        if index not in self._steps:
            state = self._positions.at(index)
            micros = self.planner.advance(state)
            self._positions.keep(state)
            self._keep_step(
                StepOfItems(
                    index=index, items=tuple(self._item(f"s{index}.{slot}", micro) for slot, micro in enumerate(micros))
                )
            )
        return self._steps[index]

    # position

    def token(self, step: int) -> DataToken:
        """JSON of the position before `step`: everything up to step - 1 is trained, `step` comes next. With it the
        counts of the ledger at that point, where this process handed the steps out."""
        return {**self.planner.token(self._positions.at(step)), "draws": self._draws.get(step)}

    def resume(self, token: DataToken) -> int:
        """Stand where `token` was made; returns its step. Raises DataError if the index or the settings differ."""
        state = self.planner.restore(token)
        self._positions = self._known(state)
        self._steps.clear()
        draws = token.get("draws")
        self._draws = OrderedDict({state.step: draws} if draws else {})
        if draws:
            self.ledger.restore_draws(draws)
        return state.step

    def resize(self, decision: BatchSizes) -> None:
        """Batches have these sizes from a step on; what is known of later steps is forgotten. The token of every step
        says so from now on."""
        self._positions.forget_after(decision.from_step)
        self.planner.adopt([decision])
        self._steps = OrderedDict((n, step) for n, step in self._steps.items() if n < decision.from_step)

    def count_draws(self, step: int, faults: Sequence[Fault]) -> None:
        """Counts the draws of a step that is handed to training; `faults` are its bad ones. Raises DataError when more
        are bad than the limits allow."""
        if step + 1 not in self._draws:
            self._walk_draws(step)
            self._file_draws(Counter(ref.source for item in self.step(step).items for ref in item.samples), faults)
            self._keep_draws(step + 1)
        self.ledger.check()
        self.ledger.check_limits()

    def rewind_draws(self, step: int) -> None:
        """Training continues with `step`. Sets the counts to those of the steps before it; later ones are forgotten."""
        for later in [held for held in self._draws if held > step]:
            del self._draws[later]
        self._walk_draws(step)
        self.ledger.restore_draws(self._draws[step])

    def _walk_draws(self, step: int) -> None:
        """Counts before `step`, from the nearest known ones. The order of the data says how many samples the steps in
        between have. Which of them were bad is lost with the process that counted, so all count as delivered."""
        if step in self._draws:
            return
        known = max((held for held in self._draws if held < step), default=None)
        start = self._positions.first if known is None else known
        self.ledger.restore_draws(self._draws[start] if known is not None else NO_DRAWS)
        log.warning("the counts of bad samples in steps %d to %d are lost; they count as good", start, step - 1)
        for between in range(start, step):
            self._file_draws(self._count(between), ())
        self._keep_draws(step)

    def _file_draws(self, scheduled: Mapping[int, int], faults: Sequence[Fault]) -> None:
        """`scheduled`: samples by source."""
        for fault in faults:
            self.ledger.skip(fault)
        bad = Counter(fault.source for fault in faults)
        for source, count in scheduled.items():
            self.ledger.schedule(count, source)
            self.ledger.deliver(count - bad[source], source)

    def _count(self, step: int) -> Counter[int]:
        """Samples of a step by source, from the plan alone."""
        state = self._positions.at(step)
        micros = self.planner.advance(state)
        self._positions.keep(state)
        return Counter(draw.source for micro in micros for draw in micro.draws)

    def _keep_draws(self, step: int) -> None:
        self._draws[step] = self.ledger.draw_state()
        kept = [held for held in self._draws if held != self._positions.first]
        for held in kept[:-KEPT_STEPS]:  # those of the first position stay: earlier ones are counted from there
            del self._draws[held]

    # accounts

    def accounting(self) -> LedgerRecord:
        """The ledger as JSON: indexed, planned, rejected by reason; scheduled, delivered, skipped. Costs nothing."""
        return self.ledger.summary()

    def refusal(self, source: int, row: int) -> Refusal:
        """Why no bucket of the last segment takes a row that the index admits."""
        columns = self.indexes[source].columns("height", "width", "num_frames", "fps", "image")
        shape = _shape(*(columns[name][row].item() for name in ("height", "width", "num_frames", "fps", "image")))
        refused = self.tables[-1].choices(shape, self.config.fps)
        assert isinstance(refused, Refusal), f"row {row} of source {source} fits {refused}"
        return refused

    def batch_sizes(self, stage: int = 0) -> dict[Bucket, int]:
        """Clips per batch of every bucket of a curriculum segment."""
        return dict(self.planner.stages[stage].batch)

    # inside

    def _known(self, state: OrderState) -> Positions:
        """Positions from a state on; the recent ones reach back over what an engine plans ahead of training."""
        engine, items = self.config.engine, min(stage.items_per_step for stage in self.planner.stages)
        return Positions(self.planner, state, min(KEPT_STEPS + 2 * engine.window * engine.feeders // items, MOST_AHEAD))

    def _keep_step(self, step: StepOfItems) -> None:
        self._steps[step.index] = step
        while len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)

    def _item(self, name: str, micro: BatchDraw) -> DataItem:
        drawn = [self._sample(draw, micro.bucket) for draw in micro.draws]
        job = DecodeJob(
            item=name,
            bucket=micro.bucket,
            clips=tuple(clip for _, clip in drawn),
            fps=self.config.fps,
            crop=self.config.buckets.oversize == "crop",
            limits=self.config.limits,
            decoder=self.config.engine.decoder,
        )
        return DataItem(job=job, samples=tuple(sample for sample, _ in drawn))

    def _sample(self, draw: SampleDraw, bucket: Bucket) -> tuple[SampleRef, Clip]:
        """What chance decides about a clip, and where it lies."""
        row = self.indexes[draw.source].row(draw.row)
        who = (self.seed, draw.source, draw.epoch, draw.row)
        drop = uniform(*who, DROP) < self.config.caption_dropout
        shape = ClipShape(frames=row.num_frames, height=row.height, width=row.width, fps=0.0 if row.image else row.fps)
        latest = last_start(shape, bucket, self.config.fps) if self.config.start_frame == "random" else 0
        chosen = uniform(*who, PICK)
        sample = SampleRef(
            source=draw.source,
            epoch=draw.epoch,
            row=draw.row,
            key=row.key,
            content=row.content,
            start_frame=int(uniform(*who, START) * (latest + 1)),
            caption_pick=chosen,
            caption_drop=drop,
            caption_chars=0 if drop else _caption_chars(row, chosen),
        )
        return sample, row.clip(sample.start_frame, chosen, drop)

    def _admit(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Shape codes with -1 where the index, a filter or every table refuses the row; refusals go to the ledger."""
        fits = np.array(
            [
                any(not isinstance(options[shape], Refusal) for options in self.options)
                for shape in range(len(self.shapes))
            ]
            + [False]
        )
        admitted = []
        for index, source, code in zip(self.indexes, self.config.sources, codes):
            alive = index.columns("ok")["ok"].copy()
            for rule in source.filters:
                passes = index.filter_mask(rule)
                self.ledger.reject_many(Reason.FILTERED, int((alive & ~passes).sum()), rule, index.ordinal)
                alive &= passes
            for shape, count in zip(*np.unique(code[alive & ~fits[code]], return_counts=True)):
                refusal = self.options[-1][shape]
                assert isinstance(refusal, Refusal)
                reason = Reason.TOO_FEW_FRAMES if refusal.reason == "too_short" else Reason.NO_BUCKET
                self.ledger.reject_many(reason, int(count), refusal.summary, index.ordinal)
            alive &= fits[code]
            self.ledger.add_planned(int(alive.sum()), index.ordinal)
            admitted.append(np.where(alive, code, -1).astype(np.int32))
        if not any((code >= 0).any() for code in admitted):
            raise DataError(self._nothing_fits(codes))
        return admitted

    def _nothing_fits(self, codes: Sequence[np.ndarray]) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.ledger.rejected.most_common(4))
        usable = np.concatenate([code[index.columns("ok")["ok"]] for index, code in zip(self.indexes, codes)])
        sentence = f"no sample can be trained: of {self.ledger.indexed} indexed, {counts or 'none is left'}. "
        refused = {shape: option for shape, option in enumerate(self.options[-1]) if isinstance(option, Refusal)}
        shapes = Counter(code for code in usable.tolist() if code in refused)
        if not shapes:
            return sentence + "Relax the filters."
        reasons = Counter[str]()
        for code, count in shapes.items():
            reasons[refused[code].reason] += count
        ((reason, number),) = reasons.most_common(1)
        usual = next(code for code, _ in shapes.most_common() if refused[code].reason == reason)
        shape = self.shapes[usual]
        near = ", ".join(f"{name}: {bucket}" for name, bucket in self.tables[-1].nearest_by_class(shape).items())
        return (
            f"{sentence}Buckets refuse {number} as {reason}, most often {shape.width}x{shape.height} with "
            f"{shape.frames} frames ({refused[usual].detail}). Nearest bucket of each resolution class: {near}. "
            f"Widen data.buckets or relax the filters."
        )

    def _stage(self, number: int, segment: SegmentConfig) -> Stage:
        table, options, config = self.tables[number], self.options[number], self.config
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
            settings=digest(asdict(segment.buckets or config.buckets)),
        )

    def _planned_batches(self, table: BucketTable, segment: SegmentConfig) -> dict[Bucket, tuple[int, str]]:
        limits = segment.batch or self.config.batch
        return {bucket: planned_batch(table, bucket, limits, self.geometry, self.timed) for bucket in table.buckets}

    def _warn_of_single_samples(self, segments: Sequence[SegmentConfig]) -> None:
        """A batch has one sample at least: where that alone is above the limit, it does not protect the device."""
        for table, segment in zip(self.tables, segments):
            limits = segment.batch or self.config.batch
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
        return self.geometry.tokens(bucket.frames, bucket.height, bucket.width)

    def _weights(self, segment: SegmentConfig, choices: Sequence[Sequence[Choice]]) -> tuple[float, ...]:
        """Shares of the sources: the segment's, the sources', or by their number of samples that fit."""
        if segment.weights:
            return segment.weights
        given = tuple(source.weight for source in self.config.sources)
        if any(given):
            return given
        takes = np.array([bool(options) for options in choices] + [False])
        counts = [int(takes[code].sum()) for code in self.codes]
        return tuple(count / max(sum(counts), 1) for count in counts)

    def _identity(self) -> dict[str, str]:
        config = self.config
        rules = [(source.filters, source.shuffle_window, source.caption) for source in config.sources]
        return {
            "index": digest([index.hash for index in self.indexes]),
            "sources": digest(rules),
            "samples": digest([config.fps, config.start_frame, config.caption_dropout]),
        }


def _choices(table: BucketTable, shapes: Sequence[ClipShape], fps: float) -> list[tuple[Choice, ...] | Refusal]:
    """Of every shape. A million clips have a hundred thousand shapes, but few differ in size and in the bucket lengths
    that they fill."""
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
    names = ("height", "width", "num_frames", "fps", "image")
    numbers: dict[tuple[int, int, int, float, bool], int] = {}
    codes = []
    for index in indexes:
        columns = index.columns(*names)
        inverse, count = _joint_codes([columns[name] for name in names])
        first = np.full(count, -1, np.int64)
        first[inverse[::-1]] = np.arange(len(inverse) - 1, -1, -1)
        keys = [tuple(columns[name][row].item() for name in names) for row in first]
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


def _caption_chars(row: IndexRow, chosen: float) -> int:
    """Length of the caption that will be used, as far as the index knows it without reading the caption."""
    if not row.captions:
        return 0
    caption = row.captions[int(chosen * len(row.captions))]
    if caption.text is not None:
        return len(caption.text)
    return caption.size if not caption.field else int(row.caption_chars)
