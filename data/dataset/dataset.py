"""The dataset of a run: what every step trains on, as a pure function of (index, config, seed, step).

dataset = Dataset.open(config.data, geometry, seed=0)
step = dataset.step(41)                 # the items of step 41, for any number of workers
job = step.items[0].job                 # what a decoder needs to read it
token = dataset.token(42)               # saved with committed step 41; dataset.resume(token) continues there
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data.buckets import BatchSize, ClipShape, first_frames, last_start
from data.config import DataConfig, SourceConfig
from data.dataset.curriculum import Curriculum
from data.dataset.index import Index, IndexRow
from data.dataset.index_build import build_index
from data.dataset.order import DROP, PICK, START, SampleOrder, digest, uniform
from data.dataset.order_state import BatchDraw, BatchSizes, OrderState, SampleDraw
from data.dataset.order_token import DataToken
from data.dataset.positions import Positions
from data.ledger import DrawsRecord, Fault, Ledger, LedgerRecord
from data.types import Bucket, Clip, DataItem, DecodeJob, SampleRef, StepOfItems
from ops.geometry import Geometry

log = logging.getLogger(__name__)

KEPT_STEPS = 64  # steps with their samples, beside those planned ahead, and counts of draws before the last steps
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
        self.config, self.indexes, self.seed = config, tuple(indexes), seed
        self.geometry, self.ledger, self.timed = geometry, ledger, timed
        self.curriculum = Curriculum(config, self.indexes, geometry, ledger, timed)
        self.planner = SampleOrder(self.curriculum.populations, self.curriculum.stages, seed, self._identity())
        self._positions = self._known(self.planner.start())
        self._steps: OrderedDict[int, StepOfItems] = OrderedDict()
        self._draws: OrderedDict[int, DrawsRecord] = OrderedDict({0: ledger.draw_state()})  # of the steps before
        self._told: dict[int, tuple[Fault, ...]] = {}  # by step: bad draws that no decoder sees

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
            crop = self.planner.stages[state.stage].crop
            items = tuple(self._item(f"s{index}.{slot}", micro, crop) for slot, micro in enumerate(micros))
            self._keep_step(StepOfItems(index=index, items=items))
        return self._steps[index]

    # position

    def token(self, step: int) -> DataToken:
        """JSON of the position before `step`: everything up to step - 1 is trained, `step` comes next. With it the
        counts of the ledger at that point, where this process handed the steps out."""
        return {**self.planner.token(self._positions.at(step)), "draws": self._draws.get(step)}

    def epoch(self, step: int) -> float:
        """How often a sample has been drawn on average before `step`: 2.5 is half way through a third epoch."""
        state = self._positions.at(step)
        return (state.drawn - state.waiting) / self.ledger.planned

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
        """Batches have these sizes from a step on; what is known of later steps is forgotten. The tokens of steps whose
        near future depends on it say so from now on."""
        self._positions.forget_after(decision.from_step)
        self.planner.adopt([decision])
        self._steps = OrderedDict((n, step) for n, step in self._steps.items() if n < decision.from_step)

    def tell_bad(self, step: int, faults: Sequence[Fault]) -> None:
        """Draws of a step that are bad before anything of it is decoded: `count_draws` counts them with the others."""
        self._told[step] = tuple(faults)

    def count_draws(self, step: int, faults: Sequence[Fault]) -> None:
        """Counts the draws of a step that is handed to training; `faults` are its bad ones, beside those that
        `tell_bad` got. Raises DataError when more are bad than the limits allow."""
        seen = Counter((fault.source, fault.shard, fault.key) for fault in faults)
        told = self._told.pop(step, ())
        faults = [*faults, *_untold(told, seen)]
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
        """Count the samples of a step, `scheduled` by source, and its bad ones."""
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

    def batch_sizes(self) -> dict[Bucket, int]:
        """Clips per batch of every bucket of the curriculum's first segment."""
        return dict(self.planner.stages[0].batch)

    # also for items that are no step's (`data.dataset.every_draw`)

    def job(self, name: str, bucket: Bucket, clips: tuple[Clip, ...], crop: bool) -> DecodeJob:
        """How the clips of an item are decoded."""
        return DecodeJob(
            item=name,
            bucket=bucket,
            clips=clips,
            fps=self.config.fps,
            crop=crop,
            limits=self.config.limits,
            decoder=self.config.engine.decoder,
        )

    # inside

    def _known(self, state: OrderState) -> Positions:
        """Positions from a state on; the recent ones reach back over what an engine plans ahead of training."""
        return Positions(self.planner, state, self._num_recent())

    def _num_recent(self) -> int:
        """Steps that are asked for again: by an engine, which plans two windows of items ahead, then by training."""
        engine, items = self.config.engine, min(stage.items_per_step for stage in self.planner.stages)
        return min(KEPT_STEPS + 2 * engine.window * engine.feeders // items, MOST_AHEAD)

    def _keep_step(self, step: StepOfItems) -> None:
        self._steps[step.index] = step
        while len(self._steps) > self._num_recent():
            self._steps.popitem(last=False)

    def _item(self, name: str, micro: BatchDraw, crop: bool) -> DataItem:
        drawn = [self._sample(draw, micro.bucket) for draw in micro.draws]
        job = self.job(name, micro.bucket, tuple(clip for _, clip in drawn), crop)
        return DataItem(job=job, samples=tuple(sample for sample, _ in drawn))

    def _sample(self, draw: SampleDraw, bucket: Bucket) -> tuple[SampleRef, Clip]:
        """What chance decides about a clip, and where it lies."""
        row = self.indexes[draw.source].row(draw.row)
        who = (self.seed, draw.source, draw.epoch, draw.row)
        drop = uniform(*who, DROP) < self.config.caption_dropout
        shape = ClipShape(frames=row.num_frames, height=row.height, width=row.width, fps=0.0 if row.image else row.fps)
        starts = first_frames(last_start(shape, bucket, self.config.fps), self.config.start_frame)
        chosen = uniform(*who, PICK)
        sample = SampleRef(
            source=draw.source,
            epoch=draw.epoch,
            row=draw.row,
            key=row.key,
            content=row.content,
            start_frame=starts[int(uniform(*who, START) * len(starts))],
            caption_pick=chosen,
            caption_drop=drop,
            caption_chars=0 if drop else _caption_chars(row, chosen),
        )
        return sample, row.clip(sample.start_frame, chosen, drop)

    def _identity(self) -> dict[str, str]:
        config = self.config
        rules = [
            (source.filters, source.shuffle_window, source.caption, *_words_of(source)) for source in config.sources
        ]
        return {
            "index": digest([index.hash for index in self.indexes]),
            "sources": digest(rules),
            "samples": digest([config.fps, config.start_frame, config.caption_dropout]),
        }


def _untold(told: Sequence[Fault], seen: Counter[tuple[int, str, str]]) -> Iterator[Fault]:
    """Faults of draws whose decoder has not told them already (`seen`): a draw is bad once, whoever says it."""
    for fault in told:
        name = (fault.source, fault.shard, fault.key)
        if seen[name]:
            seen[name] -= 1
        else:
            yield fault


def _words_of(source: SourceConfig) -> tuple[dict[str, str | None], ...]:
    """What a source adds to the captions of its samples; () where it adds nothing, as before it could."""
    words = {"prefix": source.caption_prefix, "default": source.default_caption}
    return (words,) if source.caption_prefix or source.default_caption is not None else ()


def _caption_chars(row: IndexRow, chosen: float) -> int:
    """Length of the caption that will be used, as far as the index knows it without reading the caption."""
    if not row.captions:
        return 0
    caption = row.captions[int(chosen * len(row.captions))]
    if caption.text is not None:
        return len(caption.prefix) + len(caption.text)
    return len(caption.prefix) + caption.size if not caption.field else int(row.caption_chars)
