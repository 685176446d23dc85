"""What a worker needs of a sync engine, and what a step of one has done. Engines: `ops.update.sync`, the default, and
`ops.update.deepspeed_sync`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ops.comm.collectives import Group
from ops.shards import ShardState, Slot
from ops.update.own_state import ShardBanks
from ops.update.shard_export import ShardExport

PhaseListener = Callable[[str], None]
_WEIGHT_ERROR = 1e-9  # what rounding may do to a sum of weights; one sample of a million weighs more


class StepIncomplete(RuntimeError):
    """Samples of the step have not been run: applying it would be another training. Nothing has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did, equal on all workers but for `export` and `held_up_s`. `grad_norm` is the global norm before
    clipping. Of Prodigy `lr` is what its update used, d included, and `d` that after it; of two parts the larger."""

    grad_norm: float
    lr: float
    applied: bool  # False: a non-finite norm or no good sample at all; parameters and state are as before
    weight: float  # good samples of the step, over all workers
    bad_weight: float  # its bad samples; with `weight` this is the planned weight
    loss: float  # over all workers, per planned weight
    export: ShardExport | None = None  # this worker's state after the step, where it was asked for
    held_up_s: float = 0.0  # of the update, waits and copies, as others count on the state before it
    d: float | None = None  # of Prodigy alone


class Sync(Protocol):
    """A sync engine."""

    @property
    def layout(self) -> tuple[Slot, ...]: ...
    @property
    def state_on_host(self) -> bool:
        """Optimizer state lies in host memory."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """Arrays of the optimizer state."""
        ...

    @property
    def gradient_memory(self) -> str:
        """Where gradients lie or, before a generation, would: "own", "node" or "host"."""
        ...

    @property
    def parameter_memory(self) -> str:
        """Where parameters lie or, before a generation, would: "replicated" or "node"."""
        ...

    def form(self, group: Group, shards: Sequence[ShardState] | None, banks: ShardBanks | None = None) -> None: ...
    def leave(self) -> None:
        """The generation has ended; another one may follow."""
        ...

    def begin_step(self) -> None: ...
    def watch_backward(self) -> None:
        """The next backward is the last of this worker in the step: parts of the sum may start inside it."""
        ...

    def start_sum(self) -> None:
        """This worker adds no more gradient in this step, and joins no bag before its end: its sum may start."""
        ...

    def finish_step(
        self,
        step: int,
        loss: float,
        weight: float,
        planned_weight: float,
        phase: PhaseListener,
        bad_weight: float = 0.0,
        part_weights: Sequence[float] | None = None,
        export: bool = False,
    ) -> StepResult: ...
    def begin_export(self, step: int) -> ShardExport:
        """The state after `step`, which others count on from now on: in the node's memory where `form` was given banks,
        else a copy. It may still be made while the next step's cascades run."""
        ...


def check_weight(step: int, weight: float, bad_weight: float, planned_weight: float) -> None:
    """Raise StepIncomplete unless good and bad samples of all workers are the whole step."""
    if abs(weight + bad_weight - planned_weight) > _WEIGHT_ERROR * planned_weight:
        raise StepIncomplete(
            f"step {step}: the workers ran good samples of weight {weight:g} and bad ones of {bad_weight:g}, planned "
            f"were {planned_weight:g}. The step is not applied; it is computed again."
        )
