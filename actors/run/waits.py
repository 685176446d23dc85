"""How long workers wait for each other in a step: a limit that follows what the step's plan says. Pure.

A death is noticed by Ray, so these limits are for workers that hang. What a member of a bag does before it comes, other
cascades of the same dispatch, is in the plan; what a process does for the first time may be compiled or tuned first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from actors.config import WorkersConfig
from actors.messages import CascadeShape, StepReport
from actors.plan.types import Cascade
from ops.waiting import Patience


@dataclass(kw_only=True)
class StepWaits:
    """The limits of one run. `measured`: its costs are of this device, by a profile or by steps that have ended; those
    of the FLOP model may be wrong by any factor on a GPU."""

    config: WorkersConfig
    measured: bool = False
    _ran: dict[int, set[CascadeShape]] = field(default_factory=dict, init=False)  # by rank, in this generation
    _end_s: float = field(default=0.0, init=False)  # the gradient sum, update and snapshot of the last step

    def begin(self) -> None:
        """A generation begins: its processes may be new."""
        self._ran = {}

    def of(
        self,
        step: int,
        cascades: Sequence[Cascade],
        shapes: Sequence[tuple[Collection[int], set[CascadeShape]]],
        update_s: float = 0.0,
        aside_s: float | None = 0.0,
    ) -> Patience:
        """The patience for every wait of this dispatch. `shapes` are the (ranks, shapes) of its cascades. `update_s` is
        the planned duration of the step's end, the only estimate until one has been measured. `aside_s` is by how much
        an aside's turn may delay a worker; None: an aside may run for the first time, and be compiled."""
        config = self.config
        planned_s = max((c.end_s for c in cascades), default=0.0) - min((c.start_s for c in cascades), default=0.0)
        wanted = planned_s + max(self._end_s, update_s) + (aside_s or 0.0) if self.measured else 0.0
        least, factor = config.collective_timeout_s, config.patience_factor
        limit_s, why = least, f"workers.collective_timeout_s for step {step}"
        if factor * wanted > least:
            limit_s = factor * wanted
            why = f"workers.patience_factor {factor:g} x {wanted:.1f} s that step {step} should take"
        if self._has_new(shapes) or aside_s is None:
            limit_s += config.first_step_s
            why += f", and workers.first_step_s {config.first_step_s:g} for what may run for the first time"
        return Patience(limit_s=round(limit_s, 3), why=why)

    def finished(self, reports: Sequence[StepReport]) -> None:
        """A step has ended: the end of the next one takes as long, and plans follow what was measured."""
        self.measured = True
        self._end_s = max(
            (sum(s.end - s.start for s in r.spans if s.module == "finish") + r.snapshot_s for r in reports), default=0.0
        )

    def _has_new(self, shapes: Sequence[tuple[Collection[int], set[CascadeShape]]]) -> bool:
        new = False
        for ranks, run in shapes:
            for rank in ranks:
                ran = self._ran.setdefault(rank, set())
                if not run <= ran:
                    new = True
                    ran |= run
        return new
