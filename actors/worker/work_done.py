"""What a worker has run of the steps that are not finished: its cascades, their samples, losses and spans.

On CUDA the host is ahead of its device: losses and spans of a cascade are read when it has ended there, at the latest
at the end of the step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.messages import NOT_FINITE, CascadeTask, FinishTask, Span
from ops.update.engine import StepIncomplete, StepResult

log = logging.getLogger(__name__)

_WEIGHT_ERROR = 1e-9  # what rounding may do to a sum of weights; one sample of a million weighs more


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStep:
    """Result of a step on this worker: the sum over all workers, and what this one did."""

    result: StepResult
    copy_s: float  # for making, or beginning, the copy of the state that was asked for
    spans: tuple[Span, ...]
    bad_samples: tuple[str, ...]
    item_losses: tuple[tuple[str, float, float], ...]  # as in `StepReport`


@dataclass(frozen=True, slots=True)
class _UnreadLosses:
    """Losses of a cascade that may still be computed."""

    task: CascadeTask
    counted: tuple[float, ...]  # weight of each sample that counts here
    values: Tensor  # fp64 [1 + S]: of all, then of each sample


class DeviceFailure(RuntimeError):
    """A device has failed in a cascade whose call had returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A cascade whose call has returned, and which its device may still be running."""

    name: str
    cascade: str
    step: int
    since: float  # unix seconds, when its call began
    predicted_s: float
    has_ended: Callable[[], bool]  # any thread may ask; raises RuntimeError for a failure of the device
    span: Callable[[], Span]  # waits until it has ended


class WorkDone:
    """An executor's account. Early encodes of a step count with the step in which they run. Losses stay on the device
    until they are asked for: reading one makes the host wait for it."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._launched: deque[Launched] = deque()  # whose spans have not been read, in their order
        self._ended_at = 0.0  # unix seconds, of the last one that was read
        self._ran: set[str] = set()  # cascades since the end of the last step
        self._unread: dict[int, list[_UnreadLosses]] = {}  # by step
        self._losses: dict[int, float] = {}  # by step
        self._weights: dict[int, float] = {}
        self._bad_weights: dict[int, float] = {}
        self._expert_weights: dict[int, dict[int, float]] = {}  # of good samples, by step and expert
        self._bad: list[str] = []
        self._item_losses: dict[str, tuple[float, float]] = {}

    def add_cascade(self, one: Launched) -> None:
        """A cascade has been run here. Raises DeviceFailure as `read` does."""
        self._ran.add(one.cascade)
        self._launched.append(one)
        self.read()

    def add_span(self, span: Span) -> None:
        """Something else has ended here."""
        self._spans.append(span)

    def read(self, wait: bool = False) -> None:
        """Take the spans of cascades that have ended; `wait`: of all, when they have. Raises DeviceFailure, which names
        the first that had not ended, when the device has failed."""
        while self._launched:
            one = self._launched[0]
            try:
                if not (wait or one.has_ended()):
                    return
                span = one.span()
            except RuntimeError as error:
                raise DeviceFailure(f"{one.name} failed on the device: {error}") from error
            self._launched.popleft()
            self._spans.append(span)
            self._ended_at = span.end

    @property
    def spans(self) -> list[Span]:
        """What was measured of all that has been run; waits until it has ended."""
        self.read(wait=True)
        return self._spans

    @property
    def under_way(self) -> tuple[Launched, ...]:
        """Cascades that are not known to have ended. Any thread may ask."""
        return tuple(self._launched.copy())

    @property
    def ended_at(self) -> float | None:
        """When the last cascade ended, in unix seconds; None while one goes on. Raises as `read`."""
        self.read()
        return None if self._launched else self._ended_at

    def add_weights(self, step: int, good: float, bad: float) -> None:
        """Shares of the step's samples that were run here, and that did not decode."""
        self._weights[step] = self._weights.get(step, 0.0) + good
        self._bad_weights[step] = self._bad_weights.get(step, 0.0) + bad

    def add_losses(self, task: CascadeTask, ok: Sequence[bool], loss: Tensor, by_sample: Tensor, counts: bool) -> None:
        """This rank's part of the loss of a DiT cascade, and of each of its samples. `counts`: the samples are counted
        here, as they are on one rank of the bag."""
        if counts:
            good, bad = (
                sum(s.weight for s, decoded in zip(task.samples, ok, strict=True) if decoded == wanted)
                for wanted in (True, False)
            )
            self.add_weights(task.step, good, bad)
            for sample, decoded in zip(task.samples, ok, strict=True):
                by_expert = self._expert_weights.setdefault(task.step, {})
                by_expert[sample.expert] = by_expert.get(sample.expert, 0.0) + sample.weight * decoded
            self._bad.extend(s.key for s, decoded in zip(task.samples, ok) if not decoded)
        counted = tuple(s.weight if decoded and counts else 0.0 for s, decoded in zip(task.samples, ok, strict=True))
        values = torch.cat([loss.double().reshape(1), by_sample])
        self._unread.setdefault(task.step, []).append(_UnreadLosses(task, counted, values))

    def _read(self, step: int) -> None:
        """Take all losses of a step from the device at once."""
        unread = self._unread.pop(step, [])
        if not unread:
            return
        numbers = iter(torch.cat([one.values for one in unread]).tolist())
        for one in unread:
            task, value = one.task, next(numbers)
            if not math.isfinite(value):
                keys = ", ".join(s.key for s in task.samples)
                log.warning("step %d: loss of %s is %s; samples %s", step, task.name, value, keys)
                self._bad.extend(f"{NOT_FINITE}{s.key}" for s in task.samples)
            self._losses[step] = self._losses.get(step, 0.0) + value
            for sample, counted in zip(task.samples, one.counted, strict=True):
                before = self._item_losses.get(sample.item, (0.0, 0.0))
                alone = next(numbers) / sample.loss_weight  # as of any source: means of buckets are over several
                self._item_losses[sample.item] = (before[0] + alone, before[1] + counted)

    def check_complete(self, task: FinishTask) -> None:
        """Raise StepIncomplete unless all that the task names has run here. Ray does not run a call whose argument is
        lost, and says so only to a caller that asks for that call's result."""
        if missing := [cascade for cascade in task.cascades if cascade not in self._ran]:
            raise StepIncomplete(f"step {task.step} has not run {', '.join(missing)} here; it is computed again.")
        ran = self._weights.get(task.step, 0.0) + self._bad_weights.get(task.step, 0.0)
        if abs(ran - task.weight) > _WEIGHT_ERROR:
            raise StepIncomplete(
                f"step {task.step} has run samples of weight {ran:g} here, planned were {task.weight:g}; "
                f"it is computed again."
            )

    def loss(self, step: int) -> float:
        """This worker's part of the step's loss so far."""
        self._read(step)
        return self._losses.get(step, 0.0)

    def take_losses(self, step: int) -> tuple[float, float, float]:
        """(loss, good weight, bad weight) of a step here; they are not held any longer."""
        loss = self.loss(step)
        self._losses.pop(step, None)
        return loss, self._weights.pop(step, 0.0), self._bad_weights.pop(step, 0.0)

    def take_expert_weights(self, step: int, experts: int) -> tuple[float, ...] | None:
        """Shares of the step's samples that were run here for each of several experts, and decoded; None of one. They
        are not held any longer."""
        found = self._expert_weights.pop(step, {})
        return tuple(found.get(expert, 0.0) for expert in range(experts)) if experts > 1 else None

    def finished(self, result: StepResult, copy_s: float) -> FinishedStep:
        """The step has ended with this result. What comes now belongs to the next one."""
        done = FinishedStep(
            result=result,
            copy_s=copy_s,
            spans=tuple(self.spans),
            bad_samples=tuple(self._bad),
            item_losses=tuple((item, *values) for item, values in self._item_losses.items()),
        )
        self._spans, self._bad, self._item_losses, self._ran = [], [], {}, set()
        return done
