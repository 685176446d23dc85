"""The actor in front of the data layer: items of step t as metadata for the planner, and references to their pixels.

Everything it hands out is a pure function of (index, config, seed, step) and of what a cache holds when it is first
asked, so a new feeder continues where a dead one stopped: the controller starts it again at the first step that is not
committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import ray

from actors import process
from actors.feed.item_cache import CacheNames, ItemCache
from actors.feed.item_facts import ItemFacts
from actors.feed.pulse import AnsweringActor
from actors.messages import PublishedResult
from actors.plan.types import Module
from actors.ray_calls import end_when_terminated, put
from actors.refs import Ref
from actors.step import DrawnItem, Position, StepBatches
from data.buckets import BatchSize
from data.config import DataConfig
from data.dataset.coverage import check_coverage
from data.dataset.dataset import Dataset
from data.dataset.dropped import MOST_OF_A_SOURCE, dropped_samples, write_dropped
from data.dataset.epochs import forecast
from data.dataset.order_state import BatchSizes, SizesRecord
from data.engines.engine import Engine
from data.in_words import DROPPED, reasons_in_words
from data.ledger import Fault
from data.types import DataItem, NeedsPixels

log = logging.getLogger(__name__)


def _reference(value: object) -> Ref[object]:
    """A batch, or Ray's reference to one, as a reference."""
    return cast("Ref[object]", value) if isinstance(value, ray.ObjectRef) else put(value)  # it is Ray's own at run time


EngineOf = Callable[[Dataset, DataConfig, NeedsPixels], Engine]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownItem:
    """What a cache held of an item when it was first asked, and the results by module, which stay until its step is
    released."""

    names: CacheNames
    results: Mapping[Module, Ref[list[PublishedResult]]]
    faults: tuple[Fault, ...] = ()  # of samples that train nothing, as they come from the cache and are not in it


class Feeder(AnsweringActor):
    """Plain class; `actors.feed.step_source` makes the actor of it."""

    def __init__(
        self,
        config: DataConfig,
        facts: ItemFacts,
        seed: int,
        run_dir: str,
        engine_of: EngineOf,
        timed: BatchSize | None = None,
        steps: int = 0,
    ) -> None:
        """`engine_of` makes what decodes the items of a dataset; `timed` sizes the batches of buckets with a
        `target_s`. `steps`: of the run, to tell how often they draw its samples; 0: nobody asks."""
        self._steps = steps
        self._config, self._facts, self._seed, self._run_dir = config, facts, seed, run_dir
        self._engine_of, self._timed = engine_of, timed
        end_when_terminated()
        self._dataset: Dataset | None = None
        self._opening: Mapping[str, object] = {}  # what a start says of it, besides its counts
        self._engine: Engine | None = None
        self._started = False
        self._avoid: Sequence[str] = ()
        self._cache = ItemCache(config, facts.encoders, facts.geometry) if config.cache.path else None
        self._items: dict[int, tuple[DrawnItem, ...]] = {}  # told and not released
        self._known: dict[int, dict[str, KnownItem]] = {}  # by step and item, of steps that are not released

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "start() comes before the first step"
        return self._engine

    @property
    def dataset(self) -> Dataset:
        """Opened on first use, not by the constructor: an actor whose constructor fails cannot say why."""
        if self._dataset is None:
            self._dataset = Dataset.open(
                self._config,
                self._facts.geometry,
                self._seed,
                bad_list=f"{self._run_dir}/bad.jsonl",
                timed=self._timed,
            )
            self._opening = self._of_the_opening(self._dataset)
        return self._dataset

    def _of_the_opening(self, dataset: Dataset) -> Mapping[str, object]:
        """Lists the samples that are never trained. Returns how many are listed, why they are dropped, and how often
        the run draws the others. Raises DataError when these are too few."""
        ledger = dataset.ledger
        check_coverage(ledger, self._config.min_coverage)
        found: dict[str, object] = {"reasons": reasons_in_words(ledger)}
        dropped = dropped_samples(dataset.curriculum, dataset.indexes, MOST_OF_A_SOURCE)
        try:
            found["listed"] = write_dropped(Path(self._run_dir) / DROPPED, dropped)
        except OSError as error:  # the run needs no such list
            log.warning("the samples that are dropped are not listed: %s", error)
        if self._steps:
            found["forecast"] = asdict(forecast(dataset, self._steps))
        return found

    def prepare(self) -> None:
        """Open the data, which takes longest, before it is known at which step to `start`. Raises as that does."""
        self._prepared()

    def _prepared(self) -> Engine:
        if self._engine is None:
            self._engine = self._engine_of(self.dataset, self._config, self._needs_pixels)
        return self._engine

    def start(self, first_step: int, token: Position | None = None, avoid: Sequence[str] = ()) -> Mapping[str, object]:
        """Begin decoding at this step, on none of the nodes to `avoid`. Returns the dataset's accounting, shown once at
        the start of a run, with why samples are dropped, how many of them are `listed` in the run's folder, and a
        `forecast` of its epochs.

        Raises DataError when no item can be formed or fewer samples fit than `data.min_coverage` asks for, and with the
        `token` of a checkpoint when index or data settings have changed since.
        """
        self._forget_from(0)
        if token is not None:
            plain: Any = token  # JSON out of a checkpoint; `resume` checks its version and what it was made from
            self.dataset.resume(plain)
        self._avoid, self._started = avoid, True
        self._prepared().start(first_step, avoid)
        return {**self.dataset.accounting(), **self._opening}

    def resize(self, record: SizesRecord) -> None:
        """Batches have these sizes from a step on, before which all that was asked for has been handed out: what is
        decoded ahead is formed anew."""
        decision = BatchSizes.from_json(record)
        self.dataset.resize(decision)
        self._forget_from(decision.from_step)
        if self._started:  # else `start` comes, with the position that it begins at
            self._running.start(decision.from_step, self._avoid)

    def items(self, step: int) -> tuple[DrawnItem, ...]:
        """Metadata, and which results a cache holds: possible for any step at any time, and the same answer each time
        until the step is released."""
        if step not in self._items:
            items = self.dataset.step(step).items
            known = [self._look_up(item) for item in items]
            drawn = [self._facts.drawn(i, k.names, tuple(k.results)) for i, k in zip(items, known, strict=True)]
            self._items[step] = tuple(drawn)
        return self._items[step]

    def batches(self, step: int) -> StepBatches:
        """References to the decoded batches of a step and to its cached results; returns when all are decoded."""
        items = self.dataset.step(step).items
        self.dataset.tell_bad(step, [fault for item in items for fault in self._look_up(item).faults])
        values = self._running.batches(step)  # references, or batches of an engine without Ray
        return StepBatches(
            references=tuple(_reference(value) for value in values),
            position=self.token(step + 1),
            epoch=self.dataset.epoch(step + 1),
            # of several nobody knows: the others open their data at `start`, for which a run would wait
            feeder_bytes=process.own_bytes() if self._config.engine.feeders == 1 else 0,
            cached={
                (module, item.id): results for item in items for module, results in self._look_up(item).results.items()
            },
        )

    def release(self, step: int) -> None:
        """The step is committed: its pixels will not be asked for again."""
        self._items = {held: items for held, items in self._items.items() if held > step}
        self._known = {held: known for held, known in self._known.items() if held > step}
        self._running.release(step)

    def token(self, step: int) -> Position:
        return self.dataset.token(step)

    def ledger(self) -> Mapping[str, object]:
        """Counts of delivered and skipped samples so far."""
        return self._engine.counts() if self._engine is not None else {}

    def _look_up(self, item: DataItem) -> KnownItem:
        """What the cache holds of an item, by the first answer: planner and engine must agree while workers fill it."""
        known = self._known.setdefault(item.step, {})
        if item.id not in known:
            known[item.id] = self._ask_cache(item)
        return known[item.id]

    def _ask_cache(self, item: DataItem) -> KnownItem:
        if self._cache is None:
            return KnownItem(names=CacheNames(), results={})
        names = self._cache.names(item)
        found = self._cache.results(item, names)
        results = {module: put(results) for module, results in found.results.items()}
        return KnownItem(names=names, results=results, faults=found.faults)

    def _needs_pixels(self, item: DataItem) -> bool:
        """Whether a result that is made of the item's pixels has still to be encoded. Asked by the engine, ahead of the
        item's step."""
        results = self._look_up(item).results
        return any(module not in results for module in self._facts.encoders.see_pixels)

    def _forget_from(self, step: int) -> None:
        """Steps from this one on are formed and decoded anew."""
        self._items = {held: items for held, items in self._items.items() if held < step}
        self._known = {held: known for held, known in self._known.items() if held < step}
