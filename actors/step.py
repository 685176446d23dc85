"""One training step on its way through the rooms of `actors/`: its items, its plan, its calls, its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.held_state import Snapshot
from actors.letters import Failures, NodeAnswer
from actors.messages import NodesApart, PublishedResult, StepReport, StepSample, WorkerHandle
from actors.plan.types import UNKNOWN_PLACE, Cascade, GpuPlace, Item, Module, StepPlan
from actors.refs import Ref
from ops.comm.reach import DoorAddress
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnItem:
    """An item as it was drawn: as the planner sees it, and the names of its samples."""

    plan: Item
    keys: tuple[str, ...]  # of random numbers
    latent_keys: tuple[str, ...] = ()  # in the cache; (): there is none
    text_keys: tuple[str, ...] = ()
    frame_rates: tuple[float, ...] = ()  # of its clips (1/s), where the transformer takes that of each
    loss_weights: tuple[float, ...] = ()  # of its clips' sources; (): all 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepItem:
    """An item of a step, as the planner sees it and as workers see its samples."""

    plan: Item
    samples: tuple[StepSample, ...]

    @property
    def bucket(self) -> tuple[int, int, int]:
        """(frames, height, width)."""
        return self.plan.frames, self.plan.height, self.plan.width


@dataclass(frozen=True, kw_only=True, slots=True)
class StepItems:
    """The items of a step by their ids, in order."""

    step: int
    items: Mapping[str, StepItem]

    @property
    def planned(self) -> tuple[Item, ...]:
        """As the planner sees them."""
        return tuple(item.plan for item in self.items.values())

    @staticmethod
    def of(step: int, drawn: Sequence[DrawnItem], geometry: Geometry, loss_weight: str) -> StepItems:
        """Weights of a step's samples add up to one, in equal parts or by their tokens (`train.loss_weight`)."""
        sizes = {one.plan.id: (one.plan.frames, one.plan.height, one.plan.width) for one in drawn}
        share = {item: geometry.tokens(*size) if loss_weight == "token" else 1 for item, size in sizes.items()}
        total = sum(share[one.plan.id] * len(one.keys) for one in drawn)
        items = {}
        for one in drawn:
            plan, unnamed = one.plan, ("",) * len(one.keys)
            grid, weight = geometry.token_grid(*sizes[plan.id]), share[plan.id] / total
            rates = one.frame_rates or (0.0,) * len(one.keys)
            factors = one.loss_weights or (1.0,) * len(one.keys)
            names = zip(one.keys, rates, factors, one.latent_keys or unnamed, one.text_keys or unnamed, strict=True)
            samples = tuple(
                StepSample(
                    step=step,
                    item=plan.id,
                    index=i,
                    key=key,
                    grid=grid,
                    weight=weight,
                    loss_weight=factor,
                    expert=plan.expert,
                    frame_rate=rate,
                    latent_key=latent_key,
                    text_key=text_key,
                )
                for i, (key, rate, factor, latent_key, text_key) in enumerate(names)
            )
            items[plan.id] = StepItem(plan=plan, samples=samples)
        return StepItems(step=step, items=items)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatches:
    """The decoded batches of a step, its cached results, and where the data stands after it: with the counts of the
    ledger, so that whatever commits the step holds all that the next feeder needs."""

    references: tuple[Ref[object], ...]  # in item order
    position: Position
    cached: Mapping[tuple[Module, str], Ref[list[PublishedResult]]] = field(default_factory=dict)
    """(module, item id) -> what a worker would have published, for the modules that items name as cached."""
    epoch: float | None = None  # how often a sample has been drawn on average when the step ends
    feeder_bytes: int = 0  # of memory that the feeder has for itself; 0: not known


class DataLost(RuntimeError):
    """The feeder died or froze: its pixels are gone with it, running steps cannot be repeated without a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """A step's items, and references to their decoded batches."""

    items: StepItems
    batches: Mapping[str, Ref[object]]  # by item id
    # By module and item id: results that need no encoding.
    cached: Mapping[tuple[Module, str], Ref[list[PublishedResult]]] = field(default_factory=dict)
    epoch: float | None = None  # how often a sample has been drawn on average when the step ends


class GenerationLost(RuntimeError):
    """The generation cannot go on. `apart`: nodes that do not reach each other."""

    def __init__(self, failures: Failures, apart: Sequence[NodesApart] = ()) -> None:
        self.failures, self.apart = failures, tuple(apart)
        whys = [f"{worker} died" for worker in failures.dead]
        super().__init__("; ".join(whys + [f"{name}: {why}" for name, why in failures.failed.items()]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker's place in a generation: its rank is its index in the world."""

    name: str
    node: str
    handle: WorkerHandle
    publishes_later: bool = False
    room_gib: float | None = None  # memory that a cascade may take there when the state is in place; None: no limit
    host: str = ""  # name of the node
    place: GpuPlace = UNKNOWN_PLACE  # of its GPU
    door: DoorAddress | None = None  # where others find out whether they reach its node


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
    finishes: dict[Ref[tuple[StepReport, Snapshot | None]], int]  # the ends of its workers -> rank
    calls: list[SubmittedCall]  # until the step has ended: a call that could not be run says so only here
    dispatch_s: float
    num_calls: int
    planning_s: float
    patience: Patience  # of the waits inside it
    speed: tuple[float, ...] = ()  # of the workers, by rank, that its plan counted on; (): all 1
    open_peers: tuple[int, ...] = ()  # of the bags of each worker that are connected when it ends; (): none
    letters: dict[Ref[NodeAnswer], tuple[str, ...]] = field(default_factory=dict)  # nodes of a group; calls are there
    heard: set[Ref[NodeAnswer]] = field(default_factory=set)  # of `letters`: those that have come
    answers: dict[int, tuple[StepReport, Snapshot | None]] = field(default_factory=dict)  # by rank; each asked for once
    open_dits: dict[Ref[object], SubmittedCall] = field(default_factory=dict)  # of `calls`; not those that ended well


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedStep:
    """A step that all workers have finished."""

    running: RunningStep
    reports: tuple[StepReport, ...]
    snapshots: tuple[Snapshot, ...]
    collected_at: float  # monotonic seconds of the controller's process, as every time that is taken from another one
    finished_at: float  # unix seconds, for people: somebody may set the clock
