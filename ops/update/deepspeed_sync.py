"""The second sync engine (`train.sync: deepspeed`): DeepSpeed's ZeRO-1 behind the interface of FlatSync.

DeepSpeed expects one backward of its engine per worker and micro-step; cascades run any number. So its forward and
gradient hooks are taken off after `initialize`, gradients pile up in `.grad` as in plain PyTorch, parameters that no
cascade touched get zeros (without that the reduction pairs different parameters, silently), and `engine.step()` is the
only collective of a step: sum, norm, clip, sharded AdamW, all-gather.

Its partition of the flat vector is padded to a multiple of 2 x workers, ours is not; state crosses between them in
`form` and `begin_export`, so snapshots and checkpoints are those of FlatSync. It uses attributes that DeepSpeed does
not promise, hence the pin deepspeed >=0.19.8,<0.20. It keeps fp32 parameters (use bf16 autocast); its waits see no
cancel, so a worker stuck in one is replaced instead of recovered.
"""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.shards import ARRAYS, ShardState, cut, padding, shard_bounds, state_names
from ops.update.engine import PhaseListener, StepResult, check_weight
from ops.update.flat_vector import slots, trainable
from ops.update.optimizer import ema_decay_at, lr_at
from ops.update.own_state import ShardBanks, copied
from ops.update.shard_export import CopyAtOnce, ShardExport

log = logging.getLogger(__name__)


class _Hook(Protocol):
    def remove(self) -> None: ...


class _ZeroOptimizer(Protocol):
    """The attributes of DeepSpeed's ZeRO optimizer that are used here; DeepSpeed does not document them."""

    optimizer: torch.optim.Optimizer
    single_partition_of_fp32_groups: list[Tensor]
    overflow: bool
    _grad_acc_hooks: list[_Hook]

    def setup_buckets(self) -> None: ...

    def update_lp_params(self) -> None: ...


class _Engine(Protocol):
    """What is used of DeepSpeed's engine."""

    optimizer: _ZeroOptimizer

    def step(self) -> None: ...

    def destroy(self) -> None: ...

    def get_global_grad_norm(self) -> float: ...


# A module, and its forward and forward-pre hooks by their numbers.
_Hooks = tuple[nn.Module, Mapping[int, object], Mapping[int, object]]


class DeepSpeedSync:
    """ZeRO-1 by DeepSpeed: the contract of FlatSync. An engine lives for one generation."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        named = trainable(module)
        if named[0][1].dtype != torch.float32:
            raise ValueError(
                f"train.sync deepspeed keeps fp32 parameters and the model has {named[0][1].dtype}; "
                "set train.parameter_dtype float32 (with train.autocast bfloat16), or train.sync flat."
            )
        self.config = config
        self.total_steps = total_steps
        self.layout = slots(named)
        self.state_on_host = False
        self.total = self.layout[-1].hi
        self.updates = 0
        self.lo = self.hi = 0
        self._module = module
        self._parameters = [p for _, p in named]
        self._group = Group.solo()
        self._banks: ShardBanks | None = None
        self._engine: _Engine | None = None
        self._ema: Tensor | None = None
        _prepare_environment(self._parameters[0].device)

    def form(self, group: Group, shards: Sequence[ShardState] | None, banks: ShardBanks | None = None) -> None:
        """Build an engine over `group` and give it the state of `shards`, or rank 0's parameters when there are none.

        As in FlatSync, `shards` need to cover only this rank's part of `shard_bounds`; `banks` get copies. Collective.
        """
        group.install_default()  # first: also taking an old engine apart asks for a rank
        self._drop_engine()
        _forget_groups()
        self._group, self._banks = group, banks
        if shards is None:
            for parameter in self._parameters:
                group.broadcast(parameter.data, source_rank=0)
        self._engine = self._build_engine()
        partition_size = self._master().numel()
        self.lo = min(self.total, group.rank * partition_size)
        self.hi = min(self.total, self.lo + partition_size)
        if shards is None:
            self.updates = 0
            own = self._master()[: self.hi - self.lo]
            self._set_state({"exp_avg": torch.zeros_like(own), "exp_avg_sq": torch.zeros_like(own)})
        else:
            self._import(shards)

    @property
    def state_names(self) -> tuple[str, ...]:
        """As `Sync.state_names`."""
        return state_names(self.config)

    @property
    def gradient_memory(self) -> str:
        """Each worker's own."""
        return "own"

    @property
    def parameter_memory(self) -> str:
        """Each worker has all of them."""
        return "replicated"

    def leave(self) -> None:
        """Write into no bank any more. The engine goes when the next generation forms."""
        self._banks = None

    def begin_step(self) -> None:
        """Zero the gradients, also those that no cascade will touch."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def watch_backward(self) -> None:
        """Nothing: DeepSpeed sums everything in one call at the end of the step."""

    def start_sum(self) -> None:
        """Nothing, see `watch_backward`."""

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
        """See FlatSync.finish_step. DeepSpeed does sum, update and gather in one call, of one part alone."""
        assert part_weights is None, "build_sync refuses models of several parts"
        phase("reduce")
        sums = torch.tensor([loss, weight, bad_weight], dtype=torch.float64, device=self._parameters[0].device)
        self._group.all_reduce(sums)
        loss, total_weight, bad = sums.tolist()
        check_weight(step, total_weight, bad, planned_weight)
        lr, norm, applied, share = lr_at(self.config, step, self.total_steps), math.nan, False, math.nan
        if total_weight > 0:
            share = planned_weight / total_weight
            norm, applied = self._updated(lr, share, phase)
        if export:
            phase("snapshot")
        return StepResult(
            grad_norm=norm,
            lr=lr,
            applied=applied,
            weight=total_weight,
            bad_weight=bad,
            loss=loss * share,
            export=self.begin_export(step) if export else None,
        )

    def _updated(self, lr: float, share: float, phase: PhaseListener) -> tuple[float, bool]:
        """(norm of the gradient times `share`, whether it was applied)."""
        for parameter in self._parameters:
            assert parameter.grad is not None, "begin_step was not called"
            if share != 1.0:
                parameter.grad.mul_(share)
        norm, applied = self._step(lr)
        if applied:
            phase("update")
            self.updates += 1
            if self._ema is not None:
                own = self._master()[: self.hi - self.lo]
                self._ema.lerp_(own, 1.0 - ema_decay_at(self.config, self.updates))
        phase("gather")
        return norm, applied

    def begin_export(self, step: int) -> ShardExport:
        """As `Sync.begin_export`; DeepSpeed's state is copied at once."""
        return copied(self._banks, step, self._arrays(), self._exported, CopyAtOnce(), self._check_commits)

    def _arrays(self) -> dict[str, Tensor]:
        state = self._optimizer().state[self._master()]
        arrays = {"master": self._master(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        if self._ema is not None:
            arrays["ema"] = self._ema
        return {name: array[: self.hi - self.lo].detach() for name, array in arrays.items()}

    def _exported(self, arrays: Mapping[str, Tensor]) -> ShardState:
        """The own range as a shard, with these arrays in host memory."""
        numpy = {name: array.numpy() for name, array in arrays.items()}
        return ShardState(updates=self.updates, lo=self.lo, hi=self.hi, total=self.total, arrays=numpy)

    def _check_commits(self) -> None:
        self._group.check("waiting until the last snapshot is committed")

    # Engine -----------------------------------------------------------------------------------------------------

    def _build_engine(self) -> _Engine:
        import deepspeed

        hooks = _forward_hooks(self._module)
        # lr 0: the real one is set before every step, and nothing DeepSpeed does by itself may move a weight.
        optimizer = torch.optim.AdamW(
            self._parameters,
            lr=0.0,
            betas=self.config.betas,
            eps=self.config.adam_eps,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        built = deepspeed.initialize(model=self._module, optimizer=optimizer, config=_settings(self.config, self.total))
        engine: _Engine = built[0]
        _restore_hooks(self._module, hooks)
        for hook in engine.optimizer._grad_acc_hooks:
            hook.remove()
        return engine

    def _drop_engine(self) -> None:
        """Take the old engine apart. Without clearing its references each generation would leak 18 descriptors."""
        if self._engine is None:
            return
        self._engine.destroy()
        for parameter in self._parameters:  # off the engine's flat buffer
            parameter.data = parameter.data.clone()
            parameter.grad = None
        self._engine = None
        gc.collect()

    def _step(self, lr: float) -> tuple[float, bool]:
        engine = self._formed()
        for options in self._optimizer().param_groups:
            options["lr"] = lr
        engine.optimizer.setup_buckets()  # usually made by a gradient hook; ours are off
        engine.step()
        if engine.optimizer.overflow:
            return math.inf, False
        return float(engine.get_global_grad_norm()), True

    def _formed(self) -> _Engine:
        assert self._engine is not None, "form was not called"
        return self._engine

    def _optimizer(self) -> torch.optim.Optimizer:
        return self._formed().optimizer.optimizer

    def _master(self) -> Tensor:
        """This rank's padded partition of the fp32 weights."""
        return self._formed().optimizer.single_partition_of_fp32_groups[0]

    # State ------------------------------------------------------------------------------------------------------

    def _import(self, shards: Sequence[ShardState]) -> None:
        bounds = shard_bounds(self.total, self._group.size)
        mine = cut(shards, *bounds[self._group.rank])
        if mine.total != self.total:
            raise ValueError(f"the state has {mine.total} parameters, the model {self.total}; use the run's own model.")
        self.updates = mine.updates
        # From our ranges to DeepSpeed's: one full vector at a time.
        state = {name: self._regather(mine.arrays[name], bounds) for name in ARRAYS if name in mine.arrays}
        self._set_state(state)
        self._formed().optimizer.update_lp_params()

    def _regather(self, own: np.ndarray, bounds: list[tuple[int, int]]) -> Tensor:
        flat = torch.empty(self.total + padding(self.total), device=self._parameters[0].device)
        lo, hi = bounds[self._group.rank]
        flat[lo:hi].copy_(torch.from_numpy(own))
        self._group.all_gather_ranges(flat, self._group.even_ranges(flat, self.total) or bounds)
        return flat[self.lo : self.hi].clone()

    def _set_state(self, state: dict[str, Tensor]) -> None:
        master, size = self._master(), self.hi - self.lo
        if "master" in state:
            master.data.zero_()
            master.data[:size].copy_(state["master"])
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        for name, moment in moments.items():
            moment[:size].copy_(state[name])
        step = torch.tensor(float(self.updates), device=master.device)
        self._optimizer().state[master] = {"step": step, **moments}
        if self.config.ema_decay > 0:
            self._ema = state.get("ema", master.detach()[:size].clone())


def _settings(config: OptimizerConfig, total: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": config.max_grad_norm,  # DeepSpeed's own default is 1.0
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "reduce_bucket_size": total + 1,  # the default of 5e8 elements allocates 2 GB per step
            "allgather_bucket_size": 2 * total + 2,
        },
    }


def _prepare_environment(device: torch.device) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")  # otherwise it looks for MPI
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    # A C++ extension that only inference uses: a minute of compiling, and 66 MB of /dev/shm per rank left behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_groups() -> None:
    """DeepSpeed keeps process groups in module globals; those of an ended generation must not be used again."""
    import deepspeed.comm.comm as deepspeed_comm
    from deepspeed.utils import groups

    groups._release_process_group_references(group=None)
    deepspeed_comm.cdb = None


def _forward_hooks(module: nn.Module) -> list[_Hooks]:
    return [(m, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in module.modules()]


def _restore_hooks(module: nn.Module, before: list[_Hooks]) -> None:
    """Take off what DeepSpeed put on: its hooks drive a backward of its own, and keep a dropped engine alive."""
    for one, forward, forward_pre in before:
        for hooks, kept in ((one._forward_hooks, forward), (one._forward_pre_hooks, forward_pre)):
            for key in [key for key in hooks if key not in kept]:
                del hooks[key]
