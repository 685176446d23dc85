"""One training step on its way through the rooms of `actors/`: its items, its plan, its calls, its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.messages import MemoryExceeded, PublishedResult, Snapshot, StepReport, StepSample, WorkerHandle
from actors.plan.types import Cascade, Item, Module, StepPlan
from actors.refs import Ref
from ops.geometry import Geometry
from ops.spatial_temporal.choice import SliceRates
from ops.waiting import Patience


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAssignment:
    """What the controller executes for one step: its plan, and its cascades in order, early encodes included."""

    step: StepPlan
    cascades: tuple[Cascade, ...]
    planning_s: float  # with the question on its way to the planner and back left out
    adapted: tuple[str, ...] = ()  # settings that these workers cannot follow, and what was used instead
    rates: SliceRates | None = None  # by which bags of spatial-temporal layers choose their slices


Position = Mapping[str, object]  # of the data: JSON of a few kB (`data.Dataset.token`)
CacheKeys = tuple[tuple[str, ...], tuple[str, ...]]  # of an item's samples: latents, text embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepItems:
    """The items of a step: for the planner, and the random-draw key of each of their samples."""

    step: int
    items: tuple[Item, ...]
    keys: tuple[tuple[str, ...], ...]  # per item, per sample
    cache_keys: Mapping[str, CacheKeys] = field(default_factory=dict)
    """Item id -> names of its samples' latents and text embeddings in the cache; empty without a cache."""
    cached: Mapping[tuple[str, str], Ref[list[PublishedResult]]] = field(default_factory=dict)
    """(module, item id) -> reference to what a worker would have published, for modules named in `items`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatches:
    """The decoded batches of a step, and where the data stands after it: with the counts of the ledger, so that who
    commits the step holds all that the next feeder needs."""

    references: tuple[Ref[object], ...]  # in item order
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """Every sample of a step, by item."""

    step: int
    samples: Mapping[str, tuple[StepSample, ...]]
    buckets: Mapping[str, tuple[int, int, int]]

    def cached(self, item: str, latent_keys: Sequence[str], text_keys: Sequence[str]) -> StepSamples:
        """The same with the names of an item's encode results in the cache."""
        named = tuple(
            replace(s, latent_key=latent, text_key=text)
            for s, latent, text in zip(self.samples[item], latent_keys, text_keys, strict=True)
        )
        return replace(self, samples={**self.samples, item: named})

    def routed(self, experts: Mapping[str, int]) -> StepSamples:
        """The same with the expert of each item's samples."""
        samples = {item: tuple(replace(s, expert=experts[item]) for s in found) for item, found in self.samples.items()}
        return replace(self, samples=samples)

    @staticmethod
    def of(
        step: int,
        items: Iterable[tuple[str, tuple[int, int, int], Sequence[str]]],
        geometry: Geometry,
        loss_weight: str,
    ) -> StepSamples:
        """`items`: (id, (frames, height, width), keys of its samples). Weights of a step's samples add up to one."""
        listed = list(items)
        share = {item: geometry.tokens(*bucket) if loss_weight == "token" else 1 for item, bucket, _ in listed}
        total = sum(share[item] * len(keys) for item, _, keys in listed)
        return StepSamples(
            step=step,
            buckets={item: bucket for item, bucket, _ in listed},
            samples={
                item: tuple(
                    StepSample(
                        step=step,
                        item=item,
                        index=i,
                        key=key,
                        grid=geometry.token_grid(*bucket),
                        weight=share[item] / total,
                    )
                    for i, key in enumerate(keys)
                )
                for item, bucket, keys in listed
            },
        )


class DataLost(RuntimeError):
    """The feeder died or froze: its pixels are gone with it, running steps cannot be repeated without a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """A step's items, their samples, and references to their decoded batches."""

    items: StepItems
    samples: StepSamples
    batches: dict[str, Ref[object]]  # by item id
    cached: dict[tuple[str, str], Ref[list[PublishedResult]]]  # by module and item id: results that need no encoding


class GenerationLost(RuntimeError):
    """The generation cannot go on. `dead` workers are gone, `failed` ones said why they could not do their part.

    `pixels_lost`: batches are gone with the process or node that held them and must be decoded again. `exceeded`:
    cascades that ran out of memory, each once.
    """

    def __init__(
        self,
        dead: Sequence[str],
        failed: dict[str, str],
        pixels_lost: bool = False,
        exceeded: Sequence[MemoryExceeded] = (),
    ) -> None:
        self.dead, self.failed, self.pixels_lost = tuple(dead), failed, pixels_lost
        self.exceeded = tuple(dict.fromkeys(exceeded))
        super().__init__("; ".join([f"{name} died" for name in dead] + [f"{n}: {why}" for n, why in failed.items()]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker's place in a generation: its rank is its index in the world."""

    name: str
    node: str
    handle: WorkerHandle
    publishes_later: bool = False
    room_gib: float | None = None  # memory that a cascade may take there when the state is in place; None: no limit


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedCall:
    """A call on its way. `reads_data`: its arguments come from the feeder, as pixels or as results it had cached."""

    worker: str
    name: str
    module: Module
    reference: Ref[object]
    reads_data: bool


@dataclass(kw_only=True, slots=True)
class RunningStep:
    """A dispatched step."""

    step: int
    generation: int
    assignment: StepAssignment
    data: StepData
    finishes: list[Ref[tuple[StepReport, Snapshot | None]]]  # by rank
    results: dict[str, Ref[list[PublishedResult]]]  # by cascade id: what it has published
    calls: list[SubmittedCall]  # until the step has ended: a call that could not be run says so only here
    dispatched_at: float
    dispatch_s: float
    num_calls: int
    planning_s: float
    patience: Patience  # of the waits inside it
    speed: tuple[float, ...] = ()  # of the workers, by rank, that its plan counted on; (): all 1
    open_peers: tuple[int, ...] = ()  # of the bags of each worker that are connected when it ends; (): none
    answers: dict[Ref[tuple[StepReport, Snapshot | None]], tuple[StepReport, Snapshot | None]] = field(
        default_factory=dict
    )  # of the finishes that have ended well: each is asked for once
    ended_well: set[Ref[object]] = field(default_factory=set)  # DiT calls of which no failure has to be expected


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedStep:
    """A step that all workers have finished."""

    running: RunningStep
    reports: tuple[StepReport, ...]
    snapshots: tuple[Snapshot, ...]
    collected_at: float
