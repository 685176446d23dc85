"""How a worker comes to its modules, its sync engine and the weights that training begins with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from actors.config import TrainConfig, WorkersConfig
from actors.messages import HostGpu, WorkerSettings
from actors.plan.devices import device_speed
from actors.plan.places import Places, chosen, number_of_chosen
from actors.plan.types import ENCODED, MODULES, Module
from actors.state.checkpoint_files import CheckpointError, FirstStateLost, load
from ops.attention.varlen import check_backend
from ops.geometry import Geometry
from ops.gpu_check import why_unusable
from ops.matmul import matmul_tflops
from ops.models.base.config import DiTConfig
from ops.models.config import DTYPE_BYTES, ModelConfig
from ops.models.experts import compile_blocks, graph_blocks, parts_of, run_as_written, transformers
from ops.models.first_frame import FirstFrame
from ops.models.folders import component, encoder_folders, resolve
from ops.models.load import build_dit, build_image, build_text, build_vae, first_values, num_trained
from ops.models.weights import frozen_digests, num_weights
from ops.packed.compiled_blocks import check_compiler
from ops.shards import ShardState, cut, state_names
from ops.units import GIB
from ops.update.engine import Sync
from ops.update.flat_vector import initial_shard, trainable
from ops.update.sync_places import SyncPlaces

if TYPE_CHECKING:
    from ops.models.base.vae import VAE
    from ops.models.image import ImageEncoder
    from ops.models.text import TextEncoder

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LateEncoder(Generic[T]):
    """An encoder that is made when it is first asked for."""

    make: Callable[[], T]


class EncoderSet:
    """A model's frozen encoders. One may be made when something has to be encoded."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        geometry: Geometry,
        vae: VAE | LateEncoder[VAE],
        text: TextEncoder | LateEncoder[TextEncoder],
        image: ImageEncoder | LateEncoder[ImageEncoder | None] | None = None,
    ) -> None:
        """`config` is resolved."""
        self.config, self.geometry = config, geometry
        self._vae, self._text, self._image = vae, text, image

    @classmethod
    def late(cls, model: ModelConfig, geometry: Geometry, device: torch.device) -> EncoderSet:
        """The encoders of a resolved model on a device, none of them made yet."""
        return cls(config=model, geometry=geometry, **_late(model, device))

    @property
    def vae(self) -> VAE:
        """Encodes clips."""
        if isinstance(self._vae, LateEncoder):
            self._vae = self._vae.make()
        return self._vae

    @vae.setter
    def vae(self, vae: VAE) -> None:
        self._vae = vae

    @property
    def text(self) -> TextEncoder:
        """Encodes captions."""
        if isinstance(self._text, LateEncoder):
            self._text = self._text.make()
        return self._text

    @text.setter
    def text(self, text: TextEncoder) -> None:
        self._text = text

    @property
    def image(self) -> ImageEncoder | None:
        """Encodes first frames, where the transformer listens to them."""
        if isinstance(self._image, LateEncoder):
            self._image = self._image.make()
        return self._image

    def lacks(self, module: Module) -> bool:
        """Whether a cascade of this module would have to wait for an encoder."""
        parts: dict[Module, tuple[object, ...]] = {"text": (self._text,), "vae": (self._vae, self._image)}
        return any(isinstance(part, LateEncoder) for part in parts.get(module, ()))

    def ready(self, module: Module) -> None:
        """Make what cascades of this module need."""
        if module == "text":
            _ = self.text
        elif module == "vae":
            _ = self.vae, self.image


class _LateEncoders(TypedDict):
    vae: LateEncoder[VAE]
    text: LateEncoder[TextEncoder]
    image: LateEncoder[ImageEncoder | None] | None


def _late(model: ModelConfig, device: torch.device) -> _LateEncoders:
    return {
        "vae": LateEncoder(lambda: build_vae(model.vae, device, shared=True)),
        "text": LateEncoder(lambda: build_text(model.text, device, shared=True)),
        "image": LateEncoder(lambda: build_image(model.image, device, shared=True)) if model.image else None,
    }


class Modules(EncoderSet):
    """What a worker hosts: its transformer, which is there, and encoders."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        geometry: Geometry,
        dit: nn.Module,
        vae: VAE | LateEncoder[VAE],
        text: TextEncoder | LateEncoder[TextEncoder],
        image: ImageEncoder | LateEncoder[ImageEncoder | None] | None = None,
        blocks_on_host: bool = False,
    ) -> None:
        """`config` is resolved. `blocks_on_host`: frozen weights of the transformer's blocks lie in host memory of the
        node."""
        super().__init__(config=config, geometry=geometry, vae=vae, text=text, image=image)
        self.dit, self.blocks_on_host = dit, blocks_on_host

    def digests(self, of: Collection[Module] = MODULES) -> tuple[tuple[str, str], ...]:
        """Digests of the frozen weights of these modules that are here by now (`frozen_digests`)."""
        encoders: tuple[tuple[Module, object], ...] = (
            ("vae", self._vae),
            ("text", self._text),
            ("vae", self._image),
        )
        parts = [None if isinstance(part, LateEncoder) or module not in of else part for module, part in encoders]
        return frozen_digests(self.config, self.dit if "dit" in of else None, *parts)


class FirstWeights:
    """What is trained, before the first update and not rounded: where a run begins that has no state. It is that of
    `train.init_from`, a checkpoint, where there is one."""

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._in_module = True

    def trained(self) -> None:
        """The DiT has other weights from now on, or none between two generations."""
        self._in_module = False

    def source(self, dit: nn.Module, config: DiTConfig) -> Callable[[int, int], ShardState]:
        """Gives the state of any range of the flat vector. Values that the DiT has rounded, or trained since, are read
        or drawn again, once. A checkpoint is opened when the first range is asked for; that raises FirstStateLost
        where it is not whole, or not this user's to read."""
        if self._train.init_from:
            return self._learned(Path(self._train.init_from))
        named = trainable(dit)
        values: list[Callable[[str], Tensor]] = []

        def shard(lo: int, hi: int) -> ShardState:
            if self._in_module and named[0][1].dtype in (torch.float32, torch.float64):
                return initial_shard(named, lo, hi)
            if not values:
                values.append(first_values(config, self._train.seed, named[0][1].dtype))
            return initial_shard(named, lo, hi, values[0])

        return shard

    def _learned(self, checkpoint: Path) -> Callable[[int, int], ShardState]:
        wanted = state_names(self._train.optimizer)
        whole: list[ShardState] = []

        def shard(lo: int, hi: int) -> ShardState:
            if not whole:  # a run that has a state asks for none, and the checkpoint may be gone by then
                try:
                    whole.extend(load(checkpoint)[1])
                except (CheckpointError, PermissionError) as error:
                    raise FirstStateLost(
                        f"train.init_from: {str(error).removesuffix('.')}. The run has no state of its own to go on "
                        f"from, neither a checkpoint nor a whole snapshot, so the steps that it has taken are lost. "
                        f"Put that checkpoint back, so that it can be read, and --resume, or begin anew with another "
                        f"one (--overwrite)."
                    ) from None
            found = cut(whole, lo, hi)
            if self._train.init_moments:
                return replace(found, arrays={name: found.arrays[name] for name in wanted if name in found.arrays})
            master = found.arrays["master"]
            moments = {name: np.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            return replace(found, updates=0, part_updates=(), distances=(), arrays={"master": master, **moments})

        return shard


def peak_tflops(device: torch.device, train: TrainConfig) -> float:
    """The peak of a worker's device in the precision in which the DiT multiplies: from the table of devices, else
    measured."""
    precision = train.products
    if device.type == "cuda" and (known := device_speed(torch.cuda.get_device_name(device))) is not None:
        return known.peak_tflops(precision)
    return matmul_tflops(device, torch.bfloat16 if precision == "bfloat16" else torch.float32)


def build_modules(settings: WorkerSettings, device: torch.device, device_gib: float = 0.0) -> Modules:
    """Text encoder, VAE and DiT on the device; of encoders whose results are in a cache what it takes to make them.
    Frozen weights of blocks lie in host memory of the node where the settings say so or, on a device of `device_gib`
    (0: no limit), training has no room else.

    Raises ValueError, before weights are read, when the device cannot run the attention that the settings name, this
    machine cannot compile what they compile, or the transformer does not take what training would give it.
    """
    model, geometry = resolve(settings.model)
    dtype = check_device_runs(model.dit, settings.train, device)
    _check_takes(model, settings.train)
    on_host = hosts_blocks(model.dit, settings, device, device_gib)
    modules = Modules(
        config=model,
        geometry=geometry,
        dit=build_dit(model.dit, settings.train.seed, dtype, device, on_host),
        blocks_on_host=on_host,
        **_late(model, device),
    )
    modules.dit.train()
    if model.dit.compile is True:
        compile_blocks(modules.dit)
    graph_blocks(modules.dit, model.dit.cuda_graphs, device)
    for module in ENCODED:
        if module not in settings.cached:
            modules.ready(module)
    return modules


def check_device_runs(dit: DiTConfig, train: TrainConfig, device: torch.device) -> torch.dtype:
    """The dtype of a transformer's weights in training. Raises ValueError where the device cannot run the attention
    that the settings name, or this machine cannot compile what they compile."""
    dtype: torch.dtype = getattr(torch, train.parameter_dtype)
    queries = torch.bfloat16 if train.autocast == "bfloat16" else dtype
    check_backend(dit.attention, device, queries, dit.head_dim)
    if dit.compile is True:
        check_compiler(device)
    return dtype


def _check_takes(model: ModelConfig, train: TrainConfig) -> None:
    """Raises ValueError where the transformer does not take what the training would give it."""
    if train.flow.first_frame and not model.dit.frame_times:
        raise ValueError(
            f"train.flow.first_frame {train.flow.first_frame:g} gives first frames clean, and the transformer "
            f"of model.dit takes one time for all of a clip. Set it to 0."
        )
    if train.flow.first_frame and model.dit.gives_first_frame:
        raise ValueError(
            f"train.flow.first_frame {train.flow.first_frame:g} gives some first frames, and the transformer "
            f"of model.dit is given that of every clip. Set it to 0."
        )
    if train.flow.by_frame and not model.dit.levels_by_frame:
        raise ValueError(
            f"train.flow.frame_levels {train.flow.frame_levels} gives each latent frame a noise level of its "
            f"own, and the transformer of model.dit takes one for all of a clip. Set it to one."
        )
    if train.picture_noise and not FirstFrame.of(model).is_told:
        raise ValueError(
            "train.picture_noise is set, and the transformer of model.dit is not given pictures that the VAE encodes "
            "apart. Leave it out."
        )


def hosts_blocks(dit: DiTConfig, settings: WorkerSettings, device: torch.device, device_gib: float) -> bool:
    """Whether the frozen weights of blocks of a resolved transformer lie in host memory of the node."""
    if not dit.freezes_blocks or settings.train.memory.parameters == "replicated":
        return False
    possible = settings.train.places(num_trained(dit), device.type, dit.fetchable)
    return chosen(possible, settings.least_gib, device_gib).parameters == "node"


class LateSizes(NamedTuple):
    """GiB of encoders that are not made yet. Of a CPU worker they are in both: its device is its node."""

    device: float  # of a worker's device
    host: float  # of its node's memory, for all workers there


def late_sizes(modules: EncoderSet, device: torch.device, never: Collection[Module] = ()) -> LateSizes:
    """Sizes of the encoders that are not made yet, by the headers of their files; those of `never` are never made."""
    model, cuda = modules.config, device.type == "cuda"
    vae = text = 0
    if modules.lacks("vae") and "vae" not in never:
        if model.vae.path:
            vae += num_weights([component(model.vae.path, "vae")]) * DTYPE_BYTES[model.vae.dtype_on(device.type)]
        if model.image and model.image.path:
            vae += num_weights([component(model.image.path, "image_encoder")]) * DTYPE_BYTES["float32"]
    if modules.lacks("text") and "text" not in never and model.text.path:
        text = num_weights(encoder_folders(model.text)) * DTYPE_BYTES[model.text.dtype_on(device.type)]
    if not cuda:
        return LateSizes(device=(vae + text) / GIB, host=(vae + text) / GIB)
    at_home = model.text.place == "device"
    return LateSizes(device=(vae + text * at_home) / GIB, host=text * (not at_home) / GIB)


def build_sync(
    dit: nn.Module,
    train: TrainConfig,
    device_gib: float = 0.0,
    least_gib: Sequence[float] = (),
    host_cores: int | None = None,
) -> Sync:
    """The sync engine that the settings name, for a device of `device_gib` (0: no limit), of which training needs
    `least_gib` with each of `TrainConfig.places`. `host_cores`: as `FlatSync`."""
    if train.sync == "deepspeed":
        if len(parts_of(dit)) > 1:
            raise ValueError("train.sync deepspeed updates all weights together; with model.dit.expert both use flat.")
        from ops.update.deepspeed_sync import DeepSpeedSync

        return DeepSpeedSync(dit, train.optimizer, train.steps)
    from ops.update.sync import FlatSync

    weights = [parameter for _, parameter in trainable(dit)]
    first, *second = transformers(dit)
    assert isinstance(first.config, DiTConfig)
    fetchable, frozen = first.config.fetchable, first.config.freezes_blocks
    possible = train.places(
        sum(one.numel() for one in weights), weights[0].device.type, fetchable and (frozen or not second)
    )
    places = chosen(possible, least_gib, device_gib)
    return FlatSync(
        dit,
        train.optimizer,
        train.steps,
        places=sync_places(train, places, frozen),
        parts=parts_of(dit),
        host_cores=host_cores,
    )


def fit_graphs(dit: nn.Module, settings: WorkerSettings, device_gib: float) -> None:
    """Blocks run as written where a device of `device_gib` (0: no limit) has no room for their CUDA graphs beside what
    training needs."""
    if device_gib <= 0 or not settings.graphs_least_gib:
        return
    least = settings.graphs_least_gib[number_of_chosen(settings.least_gib, device_gib)]
    if least > device_gib:
        why = f"With graphs it takes a GPU of {least:.1f} GiB, this one has {device_gib:.1f}."
        if math.isinf(least):
            why = "Their weights are fetched from host memory (train.memory.parameters)."
        log.warning("model.dit.cuda_graphs: blocks run as written. %s", why)
        run_as_written(dit)


def sync_places(train: TrainConfig, places: Places, frozen_blocks: bool) -> SyncPlaces:
    """These places as the engine takes them. Gradients by `auto` go to host memory where GPUs cannot reach each other;
    of a model whose blocks are frozen, what is trained is small and on every worker."""
    automatic = places.gradients == "node" and train.memory.gradients == "auto"
    return SyncPlaces(
        gradients="node_or_host" if automatic else places.gradients,
        parameters="replicated" if frozen_blocks else places.parameters,
        state=places.state,
    )


class GpuUnusable(RuntimeError):
    """PyTorch cannot use the GPU that a worker was given."""


def device_of(workers: WorkersConfig, given: HostGpu) -> torch.device:
    """`auto` means CUDA where this process was given a GPU, or sees one. Raises GpuUnusable: beside GPUs a worker on a
    CPU could not even meet the others."""
    if workers.device == "cpu" or (workers.device == "auto" and not given.gpu and not torch.cuda.is_available()):
        return torch.device("cpu")
    if why := why_unusable():
        raise GpuUnusable(f"{given}: {why}")
    return torch.device("cuda", 0)
