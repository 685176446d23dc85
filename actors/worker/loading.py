"""How a worker comes to its modules, and to its part of the training state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.config import TrainConfig, WorkersConfig
from actors.messages import FormTask, WorkerSettings
from actors.state.checkpoint_files import load
from actors.worker.executor import Modules
from actors.worker.meeting import fetch
from ops.attention.varlen import check_backend
from ops.comm import CancelToken
from ops.models.base.config import DiTConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.shards import ShardState, cut, shard_bounds
from ops.sync import Sync, initial_shard, trainable

Named = list[tuple[str, Tensor]]


class FirstWeights:
    """What is trained, before the first update and in fp32: where a run begins that has no state."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: Named | None = None  # in fp32, while the DiT computes in another dtype
        self._as_built = True  # the DiT has its first weights

    def keep(self, dit: nn.Module) -> None:
        """The DiT is about to be cast to another dtype; the cast gives it other memory."""
        self._kept = [(name, p.detach()) for name, p in trainable(dit)]

    def trained(self) -> None:
        """The DiT has other weights from now on."""
        self._as_built, self._kept = False, None

    def values(self, dit: nn.Module, config: DiTConfig) -> Named:
        """Names and values of the parameters; built again where the DiT has been trained."""
        if not self._as_built:
            return list(trainable(build_dit(config, self._seed)))
        return self._kept or list(trainable(dit))


def build_modules(settings: WorkerSettings, device: torch.device, first: FirstWeights) -> Modules:
    """Text encoder, VAE and DiT on the device; `first` is given the DiT's weights as they were read.

    Raises ValueError, before weights are read, when the device cannot run the attention that the settings name.
    """
    model, geometry = resolve(settings.model)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.train.parameter_dtype]
    queries = torch.bfloat16 if settings.train.autocast == "bfloat16" else dtype
    check_backend(model.dit.attention, device, queries, model.dit.head_dim)
    dit = build_dit(model.dit, settings.train.seed)
    if dtype != torch.float32:
        first.keep(dit)
    modules = Modules(
        config=model,
        geometry=geometry,
        dit=dit.to(device, dtype),
        vae=build_vae(model.vae, device),
        text=build_text(model.text, device),
    )
    modules.dit.train()
    return modules


def build_sync(dit: nn.Module, train: TrainConfig) -> Sync:
    """The sync engine that the settings name."""
    if train.sync == "deepspeed":
        from ops.deepspeed_sync import DeepSpeedSync

        return DeepSpeedSync(dit, train.optimizer, train.steps)
    from ops.sync import FlatSync

    return FlatSync(dit, train.optimizer, train.steps)


def own_shards(
    task: FormTask, total: int, first: Callable[[], Named], cancel: CancelToken, patience_s: float
) -> list[ShardState]:
    """Parts of the state that cover this worker's range of the flat vector of `total` elements.

    Without an origin it is made of the `first` weights, also when everything was lost: those in a worker may have been
    trained. Raises GroupError after `patience_s`, or when the generation ends.
    """
    origin = task.origin
    lo, hi = shard_bounds(total, task.world)[task.rank]
    if origin is None:
        return [initial_shard(first(), lo, hi)]
    if origin.checkpoint is not None:
        return [cut(load(Path(origin.checkpoint))[1], lo, hi)]
    parts = fetch(list(origin.exports), cancel, patience_s)
    for held in fetch([k.get.remote(origin.step, lo, hi) for k in origin.keepers], cancel, patience_s):
        parts.extend(held)
    return parts


def device_of(workers: WorkersConfig) -> torch.device:
    """`auto` means CUDA where this process sees a GPU."""
    cuda = torch.cuda.is_available() if workers.device == "auto" else workers.device == "cuda"
    return torch.device("cuda", 0) if cuda else torch.device("cpu")
