"""The default sync engine: one flat gradient, one sum over all workers per step, sharded AdamW, parameters gathered.

ZeRO-1 on one flat vector (see ops.shards). Every worker adds the partial gradients of whatever cascades it ran, also
none, into a flat gradient, its own or its node's (ops.update.gradients); there is no averaging over ranks, and numbers
of passes may differ. One step:

    sync.form(groups.world_group(), shards)  # once per generation
    sync.begin_step()
    for cascade in mine: cascade.loss().backward()
        # optional: sync.watch_backward() before the last one, sync.start_sum() after it
    result = sync.finish_step(step, loss=..., weight=..., planned_weight=..., phase=phase, export=True)
    result.export.wait()
    hand_out(result.export)  # by the worker, to its keeper
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.cores import computing_with, host_threads
from ops.counted import counted
from ops.memory.cuda_memory import CudaHostCopy
from ops.packed.uploads import upload, upload_numbers
from ops.shards import Bounds, Distance, ShardState, Slot, cut, padding, shard_bounds, state_names
from ops.update.engine import PhaseListener, StepResult, check_weight
from ops.update.flat_vector import check_alike, part_ranges, slots, trainable
from ops.update.gradients import Gradients
from ops.update.host_sum import HostCopy
from ops.update.muon import MatrixUpdates, add_to_momentum, matrices_of, rates_in
from ops.update.node_sum import fellows_of
from ops.update.optimizer import TrainedRange, gradient_scale, lr_at, lying_in, update_range
from ops.update.own_state import OwnState, ShardBanks
from ops.update.parameters import Parameters
from ops.update.prodigy import TAKEN_IN, ProdigyStep, first_distance, next_distance, take_in, update_rate
from ops.update.shard_export import ShardExport
from ops.update.sync_places import SyncPlaces
from ops.update_room import BUCKET
from ops.waiting import PendingCollective

log = logging.getLogger(__name__)

_USUAL = SyncPlaces()
# Elements of a shard that are updated and sent together. 4 MiB in fp32 stay in cache between AdamW, cast and EMA, and
# the broadcast of one bucket overlaps the update of the next.
_BUCKET_CPU = 1 << 20
_BUCKET_CUDA = BUCKET  # with state in host memory some five of them are pinned: ops.update_room


class FlatSync:
    """Flat ZeRO-1. Parameters become views of one vector; hooks give their gradients to `gradients`.

    Parameters of lower precision, and any that lie elsewhere than their state, have an fp32 master copy of the own
    shard. State in host memory never comes back to the device, only new parameters do: a device holds weights and
    gradient, a snapshot copies nothing from it (ops.update.own_state). Do not move or re-cast the module, nor call
    zero_grad, afterwards.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        *,
        places: SyncPlaces = _USUAL,
        parts: Sequence[str] = ("",),
        host_cores: int | None = None,
        copies: HostCopy | None = None,
        update_elements: int | None = None,
    ) -> None:
        """`places`: where gradients, parameters and state lie; `form` has all workers agree on them.

        `parts`: what parameter names begin with, of parts that lie one after the other. Each is trained as if it were
        alone: by the mean over its own samples, clipped by its own norm, with updates that are counted for it. A step
        without a good sample of it leaves its weights, moments, EMA and count as they are, bit for bit.

        `host_cores`: what GPUs leave to the CPU is computed by a share of these cores of the node (ops.cores). None: of
        half of all, and on workers without a GPU by the threads that PyTorch has. `copies` bring a GPU's gradients to
        state in host memory, and make room there for what goes back (None: as that GPU does it); `update_elements` are
        updated together (None: the usual number)."""
        named = trainable(module)
        check_alike({p.device for _, p in named})
        self.config = config
        self.total_steps = total_steps
        self.layout = slots(named)
        self.total = self.layout[-1].hi
        self.updates = 0  # steps applied so far
        self._parts = part_ranges(self.layout, parts)
        self._part_updates = [0] * len(self._parts)  # steps applied to each part
        self._distances = self._first_distances()
        self.lo = self.hi = 0
        self._parameters = [p for _, p in named]
        self._group = Group.solo()
        first = self._parameters[0]
        self._device = first.device
        self._state_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._state_device = torch.device("cpu") if places.state == "host" else self._device
        between = self._device.type == "cuda" and self._state_device.type == "cpu"
        self._copies = copies or (CudaHostCopy(self._device) if between else None)
        # What stays in a core's cache from one array to the next; a device has none that would matter.
        self._piece = update_elements or (_BUCKET_CPU if self._state_device.type == "cpu" else _BUCKET_CUDA)
        self.state = OwnState(self._state_device, self._state_dtype, state_names(config))
        matrices = matrices_of(module, self.layout) if config.kind == "muon" else []
        self._matrices = MatrixUpdates(matrices, self._state_dtype, self._device) if matrices else None
        self._module, self._named = module, named
        self._host_cores, self._threads = host_cores, 1
        self.places = places
        self.parameters = self._make_parameters()
        self.gradients = self._make_gradients()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._received_hook(index))

    def form(self, group: Group, shards: Sequence[ShardState] | None, banks: ShardBanks | None = None) -> None:
        """Begin a generation: own a range of the flat vector, and make parameters equal on all workers.

        With `shards` (any cut that covers at least the own range; replicas allowed) the state continues from them,
        without them training starts from rank 0's current parameters. Collective; all workers pass shards or none.
        With `banks` of the node's memory the state of the own range, the only shard, is in their current one.
        """
        self.state.form(banks)
        self._group = group
        self._bounds = shard_bounds(self.total, group.size)
        self.lo, self.hi = self._bounds[group.rank]
        if self._device.type == "cuda" or self._host_cores is not None:
            self._threads = host_threads(len(fellows_of(group)), self._host_cores)
        if self._matrices is not None:
            self._matrices.form(group, self._bounds)
        self._agree_on_places(group)
        self.gradients.form(group, self._bounds)
        self.parameters.form(group, self._bounds, current=shards is None)
        if shards is None:
            self._fresh_state()
        else:
            self._import(cut(shards, self.lo, self.hi) if banks is None else shards[0])
            self.parameters.changed(self._bounds)
            self.parameters.gather()
        log.info("generation of %s: range [%d, %d) of %d", counted(group.size, "worker"), self.lo, self.hi, self.total)

    def leave(self) -> None:
        """The generation has ended: write into no memory of other workers any more. Any number of times."""
        self.gradients.leave()
        self.state.leave()

    def begin_step(self) -> None:
        """Begin with a gradient of zero. Any number of backward passes may follow."""
        self.gradients.begin_step()

    def watch_backward(self) -> None:
        """Start buckets of the sum inside the next backward, as they become final."""
        if self.parameter_memory == "replicated":  # a block that runs in slices gives a gradient for each
            self.gradients.watch()

    def start_sum(self) -> None:
        """Start the sum of what has not started yet."""
        self.gradients.start()

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
    ) -> StepResult:
        """Sum, clip, update, gather and, with `export`, `begin_export`. Collective; `phase` is called with "reduce",
        "update", "gather" and "snapshot" as they begin.

        `weight` counts the good samples this worker ran, `bad_weight` those it was given but that did not decode;
        `loss` is its part of the step's loss, both gradient and loss weighted as if all `planned_weight` samples of the
        step were good. `part_weights` are those of the good samples of each part (None: all samples are of every part).
        Raises StepIncomplete on all workers, and changes nothing, when samples are missing anywhere.
        """
        phase("reduce")
        self.gradients.finish()
        self.parameters.settle()
        count = len(self._parts)
        own_weights = [weight] * count if part_weights is None else part_weights
        with computing_with(self._threads):
            own_squares = self._own_squares()
        summed = self._sum_scalars(own_squares, *own_weights, loss, weight, bad_weight)
        squares, weights, (loss, total_weight, bad) = summed[:count], summed[count:-3], summed[-3:]
        check_weight(step, total_weight, bad, planned_weight)
        scale = gradient_scale(squares, weights, planned_weight, self.config.max_grad_norm)
        lr, applied = lr_at(self.config, step, self.total_steps), math.isfinite(scale.norm)
        used = lr * max((one.d for one in self._distances), default=1.0)
        self.state.held_up_s = 0.0
        if applied:
            self.state.open(self._check_commits)
            phase("update")
            with computing_with(self._threads):
                self._update(lr, scale.factors)
            phase("gather")
            self.parameters.gather()
        else:
            self.gradients.drop()
        held_up_s = self.state.held_up_s
        if export:
            phase("snapshot")
        return StepResult(
            grad_norm=scale.norm,
            lr=used,
            applied=applied,
            weight=total_weight,
            bad_weight=bad,
            loss=loss * (planned_weight / total_weight) if total_weight > 0 else math.nan,
            held_up_s=held_up_s,
            export=self.begin_export(step) if export else None,
            d=max((one.d for one in self._distances), default=None),
        )

    def begin_export(self, step: int) -> ShardExport:
        """As `Sync.begin_export`; a copy of what lies on a GPU is made while the next cascades run."""
        return self.state.export(step, self._exported, self._check_commits)

    @property
    def state_on_host(self) -> bool:
        """Master, moments and EMA lie in host memory."""
        return self._state_device.type == "cpu"

    @property
    def state_names(self) -> tuple[str, ...]:
        """As `Sync.state_names`."""
        return self.state.names

    @property
    def gradient_memory(self) -> str:
        """As `Sync.gradient_memory`."""
        return self.places.gradients.removesuffix("_or_host")

    @property
    def parameter_memory(self) -> str:
        """As `Sync.parameter_memory`."""
        return self.places.parameters

    def gradient(self) -> Tensor:
        """What of the flat gradient lies here: before `finish_step` the partial one of this worker, or its node's."""
        return self.gradients.flat

    # Memory -----------------------------------------------------------------------------------------------------

    def _make_gradients(self) -> Gradients:
        return self.places.make_gradients(self._parameters, self.layout, self._state_dtype, self._host_cores)

    def _make_parameters(self) -> Parameters:
        if self.places.parameters == "replicated":
            return ReplicatedParameters(self._parameters, self.layout)
        return self.places.make_node_parameters(self._module, self._named, self.layout, self._given)

    @property
    def _is_master(self) -> bool:
        """The own range of the parameters is the master copy."""
        there = self._device if self.places.parameters == "replicated" else torch.device("cpu")
        same = self._parameters[0].dtype == self._state_dtype and there == self._state_device
        return same and not self.state.in_banks

    def _given(self, index: int, gradient: Tensor) -> None:
        self.gradients.add(index, gradient)

    def _agree_on_places(self, group: Group) -> None:
        """All workers sum and send alike, also those whose device would have room for a gradient or parameters of its
        own."""
        if group.size == 1 or self.places.are_given:
            return
        self.gradients.leave()  # and so have all, once they have exchanged this
        before, self.places = self.places, self.places.agreed(group, self._device)
        if self.places.parameters != before.parameters:
            log.info("parameters: %s, as another worker has no room for %s", self.places.parameters, before.parameters)
            self.parameters = self._make_parameters()
        if self.places.gradients != before.gradients:
            log.info("gradients: %s, as another worker has no room for %s", self.places.gradients, before.gradients)
            self.gradients.release()
            del self.gradients  # before the other ones take memory
            self.gradients = self._make_gradients()

    def _received_hook(self, index: int) -> Callable[[Tensor], None]:
        # A parameter's hooks are no part of what the garbage collector sees: one that held the engine, which holds the
        # parameter, would keep all of the model's memory for good.
        engine = weakref.ref(self)

        def received(parameter: Tensor) -> None:
            if (here := engine()) is not None:
                here.gradients.received(index)

        return received

    def _first_distances(self) -> list[Distance]:
        """What is known of each part before its first update; none but of Prodigy."""
        return [first_distance(self.config) for _ in self._parts] if self.config.kind == "prodigy" else []

    def _fresh_state(self) -> None:
        self.updates = 0
        self._part_updates = [0] * len(self._parts)
        self._distances = self._first_distances()
        own = self.parameters.own
        self.state.begin(own if self._is_master else own.to(self._state_device, self._state_dtype, copy=True))

    def _import(self, shard: ShardState) -> None:
        if shard.total != self.total:
            raise ValueError(
                f"the state has {shard.total} parameters, the model {self.total}; use the run's own model."
            )
        counts = shard.part_updates or (shard.updates,)
        if shard.updates and len(counts) != len(self._parts):
            raise ValueError(
                f"the state counts updates of {len(counts)} parts, the model has {len(self._parts)}; use the run's own "
                f"model."
            )
        self.updates = shard.updates
        self._part_updates = list(counts) if shard.updates else [0] * len(self._parts)
        self._distances = self._first_distances()
        if shard.updates and self._distances:
            assert len(shard.distances) == len(self._parts), "settings keep a state to the optimizer that has made it"
            self._distances = list(shard.distances)
        self.state.take(shard)
        _round_into(self.parameters.own, self.state.arrays["master"])
        if self._is_master:
            self.state.arrays["master"] = self.parameters.own

    def _exported(self, arrays: Mapping[str, Tensor]) -> ShardState:
        """The own range as a shard, with these arrays in host memory."""
        return ShardState(
            updates=self.updates,
            lo=self.lo,
            hi=self.hi,
            total=self.total,
            arrays={name: array.numpy() for name, array in arrays.items()},
            part_updates=tuple(self._part_updates) if len(self._parts) > 1 else (),
            distances=tuple(self._distances) if self.updates else (),
        )

    def _check_commits(self) -> None:
        self._group.check("waiting until the last snapshot is committed")

    # The step ---------------------------------------------------------------------------------------------------

    def _own_squares(self) -> list[Tensor]:
        """The sum of squares of each part's elements in the own range, fp64 on the worker's device."""
        found = []
        for lo, hi in self._parts:
            lo, hi = max(lo, self.lo), min(hi, self.hi)
            if lo >= hi:
                found.append(torch.zeros((), dtype=torch.float64, device=self._device))
                continue
            own = self.gradients.part(lo, hi)
            # One norm per bucket, added in double: a single fp32 sum over 1e9 squares loses digits. A CPU adds squares
            # one after the other: its fp32 norm of 2^20 numbers is 4e-5 too small, of 2^26 0.5 %.
            there = own.device.type == "cpu"
            pieces = own.split(_BUCKET_CPU if there else _BUCKET_CUDA)
            exact = torch.float64 if there else None
            norms = [torch.linalg.vector_norm(piece, dtype=exact).double() for piece in pieces]
            squares = torch.stack(norms).square().sum()
            found.append(squares if own.device == self._device else upload([squares], self._device)[0])
        return found

    def _sum_scalars(self, on_device: Sequence[Tensor], *values: float) -> list[float]:
        """Sums over all workers, read at once: of numbers on the worker's device, fp64, and of these."""
        given = upload_numbers([values], torch.float64, self._device)
        summed = torch.cat([torch.stack(list(on_device)), *given])
        self._group.all_reduce(summed)
        return summed.tolist()

    def _bucket(self) -> int:
        return _BUCKET_CUDA if self._device.type == "cuda" else _BUCKET_CPU

    def _update(self, lr: float, factors: Sequence[float | None]) -> None:
        """New weights bucket by bucket; each may be sent while the next is computed. `factors` of the parts' gradients,
        None for a part that stays as it is."""
        self.updates += 1
        for number, factor in enumerate(factors):
            self._part_updates[number] += factor is not None
        bucket = self._bucket()
        longest = max(hi - lo for lo, hi in self._bounds)
        buckets = [
            [(min(hi, lo + start), min(hi, lo + start + bucket)) for lo, hi in self._bounds]
            for start in range(0, longest, bucket)
        ]
        own = [pieces[self._group.rank] for pieces in buckets]
        bring, steps = self.state.bring, list[ProdigyStep | None]()
        if self._matrices is not None:
            self._turn_into_updates(self._matrices, own, factors)
            bring = self.state.brought
        elif self._distances:
            steps = self._take_in(lr, own, factors)
            bring = self.state.brought
        gradients = repeat(torch.empty(0), len(own)) if steps else self._gradients_of(own)
        for pieces, (lo, hi), gradient in zip(buckets, own, gradients, strict=True):
            trained = self._trained_in(lo, hi, factors, steps)
            fresh = self._fresh(lo, hi)
            for first, last in self._pieces(lo, hi):
                state = bring(slice(first - self.lo, last - self.lo))
                for part in lying_in(trained, first, last):
                    update_range(self.config, lr, part, first, state, gradient[first - lo : last - lo])
                    if fresh is not None:
                        _round_into(part.of(first, fresh[first - lo : last - lo]), part.of(first, state["master"]))
            if fresh is not None:
                self._give(lo, fresh, trained)
            if lo < hi:
                self.gradients.used(lo, hi)
            self.parameters.changed(pieces)
        self.state.close()

    def _turn_into_updates(
        self, matrices: MatrixUpdates, own: Sequence[tuple[int, int]], factors: Sequence[float | None]
    ) -> None:
        """What these ranges of the gradient hold of matrices becomes their updates (ops.update.muon), where it lies.
        All of the state is brought, with the newest momentum of matrices."""
        for (lo, hi), gradient in zip(own, self._gradients_of(own), strict=True):
            trained = [part for part in self._trained_in(lo, hi, factors) if part.rate]
            for first, last in self._pieces(lo, hi):
                momentum = self.state.bring(slice(first - self.lo, last - self.lo))["exp_avg"]
                piece = gradient[first - lo : last - lo]
                for part in lying_in(trained, first, last):
                    add_to_momentum(part.of(first, piece), part.of(first, momentum), part.factor)
            if trained and gradient.data_ptr() != self.gradients.part(lo, hi).data_ptr():
                self.gradients.part(lo, hi).copy_(gradient)
        changed = [ends for ends, factor in zip(self._parts, factors, strict=True) if factor is not None]
        matrices.run(self.gradients.part, changed)

    def _take_in(
        self, lr: float, own: Sequence[tuple[int, int]], factors: Sequence[float | None]
    ) -> list[ProdigyStep | None]:
        """Prodigy's moments and sums take these ranges of the gradient in, and all agree on d: how the weights of each
        part change then. All of the state is brought, with the newest moments. Collective."""
        rates = [
            update_rate(self.config, distance, lr, max(updates, 1))
            for distance, updates in zip(self._distances, self._part_updates, strict=True)
        ]
        sums = torch.zeros(len(factors), 2, dtype=torch.float64, device=self._state_device)
        for (lo, hi), gradient in zip(own, self._gradients_of(own), strict=True):
            for first, last in self._pieces(lo, hi):
                state = self.state.bring(slice(first - self.lo, last - self.lo))
                for number, ((begin, end), factor) in enumerate(zip(self._parts, factors, strict=True)):
                    inside = slice(max(0, begin - first), max(0, min(last, end) - first))
                    if factor is not None and begin < last and first < end:
                        sums[number] += take_in(
                            self.config,
                            grad=gradient[first - lo : last - lo][inside],
                            distance=self._distances[number],
                            rate=rates[number],
                            factor=factor,
                            **{name: state[name][inside] for name in TAKEN_IN},
                        )
        flat = sums.flatten()
        summed = self._sum_scalars([*(flat if flat.device == self._device else upload([flat], self._device)[0])])
        steps: list[ProdigyStep | None] = []
        for number, (factor, rate) in enumerate(zip(factors, rates, strict=True)):
            along, length = summed[2 * number : 2 * number + 2]
            if factor is not None:
                self._distances[number] = next_distance(self.config, self._distances[number], rate, along, length)
            step = ProdigyStep(rate=rate if length > 0 else 0.0, d=self._distances[number].d)
            steps.append(None if factor is None else step)
        return steps

    def _pieces(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """[lo, hi) in pieces that are updated together."""
        for first in range(lo, hi, self._piece):
            yield first, min(hi, first + self._piece)

    def _trained_in(
        self, lo: int, hi: int, factors: Sequence[float | None], steps: Sequence[ProdigyStep | None] = ()
    ) -> list[TrainedRange]:
        """What of [lo, hi) changes; `steps` of the parts with Prodigy."""
        matrices = self._matrices.matrices if self._matrices is not None else ()
        given = zip(self._parts, factors, self._part_updates, steps or [None] * len(factors), strict=True)
        return [
            TrainedRange(lo=begin, hi=end, factor=factor, updates=updates, rate=rate, step=step)
            for (first, last), factor, updates, step in given
            if factor is not None
            for begin, end, rate in rates_in(matrices, max(lo, first), min(hi, last))
        ]

    def _fresh(self, lo: int, hi: int) -> Tensor | None:
        """Where new parameters of [lo, hi) are written, rounded: their own memory or, where they lie on another device
        than their state, memory which that device reads. None where they are the master copy."""
        if self._is_master or lo == hi:
            return None
        target = self.parameters.own[lo - self.lo : hi - self.lo]
        return target if self._copies is None or target.device != self._device else self._copies.room(target)

    def _give(self, lo: int, fresh: Tensor, trained: Sequence[TrainedRange]) -> None:
        """Parameters from element `lo` on get their new values, if these were written elsewhere."""
        target = self.parameters.own[lo - self.lo : lo - self.lo + len(fresh)]
        if fresh.data_ptr() != target.data_ptr():
            for part in trained:
                part.of(lo, target).copy_(part.of(lo, fresh), non_blocking=True)

    def _gradients_of(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The sum of each range, a part of the own one, where its state is; may be overwritten. Where a device has to
        bring it to the host, the next one is on its way while one is used."""
        coming = self._gradient_of(*ranges[0]) if ranges else None
        for following in [*ranges[1:], None]:
            assert coming is not None
            gradient, arrived = coming
            coming = None if following is None else self._gradient_of(*following)
            arrived()
            yield gradient

    def _gradient_of(self, lo: int, hi: int) -> tuple[Tensor, Callable[[], None]]:
        """The sum of [lo, hi) where its state is, and a function that returns when it is there."""
        if lo == hi:
            return torch.empty(0, dtype=self._state_dtype), _at_once
        gradient = self.gradients.part(lo, hi)
        if self._copies is not None and gradient.device == self._device:
            return self._copies.to_host(gradient)
        return gradient.to(self._state_device), _at_once


def _round_into(target: Tensor, values: Tensor) -> None:
    """Writes values in the dtype of `target`, rounded where they lie: half of the bytes cross to another device, and no
    copy of all is made on the way."""
    target.copy_(values if values.device == target.device else values.to(target.dtype))


def _at_once() -> None:
    """What is there already is not waited for."""


class ReplicatedParameters:
    """All of them on the worker's device: parameters are views of one vector, gathered from their owners."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot]) -> None:
        self._parameters, self._layout = parameters, layout
        self._group = Group.solo()
        self._bounds: Bounds = [(0, layout[-1].hi)]
        self._even: Bounds | None = None
        self._pending: list[PendingCollective] = []
        self._allocate()

    @property
    def own(self) -> Tensor:
        """As `Parameters.own`."""
        return self._flat[slice(*self._bounds[self._group.rank])]

    def form(self, group: Group, bounds: Bounds, current: bool) -> None:
        """As `Parameters.form`."""
        if self._group.abandoned and not self._group.on_device:
            # A collective of the dead generation may still be writing into the old memory, which it holds itself. On a
            # GPU its abort has ended all writers, and CUDA graphs read parameters where they are.
            self._pending = []
            if not current:  # the values come with the state
                self._drop()
            self._allocate()
        self._group, self._bounds, self._pending = group, bounds, []
        self._even = group.even_ranges(self._padded, self._layout[-1].hi)
        if current:
            group.broadcast(self._flat, source_rank=0)

    def settle(self) -> None:
        """Nothing: passes wait for their device, and so do collectives."""

    def changed(self, pieces: Bounds) -> None:
        """Send them. NCCL does at the end: it gathers ranges that lie side by side, and a device updates its range in
        less than a tenth of the time that the gather takes."""
        if self._even is None:
            self._pending += self._group.all_gather_ranges_async(self._flat, pieces)

    def gather(self) -> None:
        """As `Parameters.gather`."""
        if self._even is not None:
            self._pending = self._group.all_gather_ranges_async(self._padded, self._even)
        for one in self._pending:
            one.wait()
        self._pending = []

    def _drop(self) -> None:
        """Let the memory go: parameters have no values until the next ones are gathered."""
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._flat = self._padded = torch.empty(0)

    def _allocate(self) -> None:
        # Views start wherever the sizes put them. All large tensors of a DiT have a multiple of 16 elements, so
        # they stay 16-byte aligned, as CUDA kernels like it, without padding that checkpoints would have to know.
        first, total = self._parameters[0], self._layout[-1].hi
        self._padded = torch.zeros(total + padding(total), dtype=first.dtype, device=first.device)
        self._flat = self._padded[:total]
        with torch.no_grad():
            for parameter, slot in zip(self._parameters, self._layout, strict=True):
                view = self._flat[slot.lo : slot.hi].view(slot.shape)
                if parameter.numel() == view.numel():  # else it has been dropped
                    view.copy_(parameter)
                parameter.data = view
