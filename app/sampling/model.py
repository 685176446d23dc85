"""A trained model that makes clips, and the encoders of its prompts: of a checkpoint, of a run, or of a folder."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from actors.config import TrainConfig
from actors.state.checkpoint_files import load, model_state
from actors.worker.loading import Modules
from app.device.choice import pick_device
from app.inputs.checkpoints import checkpoint_folder, run_config
from app.sampling.prompts import EncodedPrompts, encode_prompts
from app.sampling.published import is_pipeline, published_run, published_scheduler
from app.settings.config import RunConfig
from ops.attention.sdpa import leave_out_cudnn
from ops.attention.varlen import check_backend
from ops.flow.sampling import LowNoiseExpert
from ops.flow.schedulers import Scheduler
from ops.geometry import Geometry
from ops.models.added_lora import LoraFile
from ops.models.base.config import DiTConfig
from ops.models.base.vae import VAE
from ops.models.config import ModelConfig
from ops.models.experts import transformers
from ops.models.folders import resolve
from ops.models.load import build_dit, build_image, build_text, build_vae, dit_skeleton, read_added
from ops.models.weights import check_state
from ops.typed import ConfigError

_MOST_OF_FREE = 0.7  # what weights take of a device's free memory at most; the rest is for clips


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What makes clips of encoded prompts, on one device, and the run it comes from. With `low`, `dit` is for high
    noise."""

    dit: nn.Module
    low: LowNoiseExpert | None
    vae: VAE
    geometry: Geometry
    config: RunConfig
    step: int
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """A checkpoint or folder that clips are to be made of: its settings are read, its weights once they are asked for.

    Large encoders and transformers need not fit into a device's memory together:

    saved = saved_model(Path("runs/demo"))
    told = saved.encode(prompts, negative="", first=())       # the encoders come and go
    model = saved.load()
    """

    trained: Path | None  # a checkpoint; None: the folders of `config` hold all weights
    other: Path | None  # a checkpoint of the other expert
    ema: bool
    config: RunConfig  # its model resolved
    geometry: Geometry
    step: int
    device: str  # "auto", "cpu" or "cuda": of the process that loads
    scheduler: Scheduler | None = None  # of a published pipeline, where its clips are made by that one's steps
    loras: tuple[LoraFile, ...] = ()  # are added to the weights of folders

    def at_rate(self, fps: float) -> SavedModel:
        """The same with this frame rate (1/s) for a transformer that takes one."""
        model = self.config.model
        return replace(self, config=replace(self.config, model=replace(model, dit=model.dit.at_rate(fps))))

    def encode(self, prompts: Sequence[str], negative: str, first: Sequence[np.ndarray] = ()) -> EncodedPrompts:
        """The prompts as encoded, by encoders of which nothing is left on the device afterwards."""
        return self.encode_each([(prompts, negative, first)])[0]

    def encode_each(self, groups: Sequence[tuple[Sequence[str], str, Sequence[np.ndarray]]]) -> list[EncodedPrompts]:
        """The same of several groups of (prompts, negative prompt, pictures), by encoders that are loaded once."""
        model, target = self.config.model, self._target()
        text = build_text(model.text, target)
        image = build_image(model.image, target) if any(len(first) for _, _, first in groups) else None
        told = [
            encode_prompts(text, image if len(first) else None, model, prompts, negative, first)
            for prompts, negative, first in groups
        ]
        del text, image
        release_memory(target)
        return told

    def load(self) -> Model:
        """The transformer and the VAE, frozen; the transformer straight in the precision that it multiplies in."""
        target = self._target()
        config = replace(self.config, model=_for_device(self.config, target))
        trained = config.model.dit
        dtype = weights_dtype(config.train, target)
        other = _other_expert(trained, self.other, self.ema, dtype, target, self.loras)
        high, low = by_noise(trained, self.transformer(config, target), other)
        for module in (high, *([low.dit] if low else [])):
            module.eval().requires_grad_(False)
        return Model(
            dit=high,
            low=low,
            vae=build_vae(config.model.vae, target),
            geometry=self.geometry,
            config=config,
            step=self.step,
            device=target,
        )

    def transformer(self, config: RunConfig, device: torch.device) -> nn.Module:
        """The trained transformer, or both where two experts were trained, by the settings `config` for this device."""
        trained, trains = config.model.dit, self.trained is not None
        trained = replace(trained, lora_from=None) if trains else trained
        dtype = weights_dtype(config.train, device)
        dit = _sampled_dit(trained, config.train.seed, dtype, device, trains, self.loras)
        if self.trained is not None:
            put_weights(dit, model_state(self.trained, self.ema), str(self.trained))
        return dit

    def modules(self) -> Modules:
        """All that a worker of the run hosts, with this transformer, frozen."""
        target = self._target()
        config = replace(self.config, model=_for_device(self.config, target))
        model = config.model
        return Modules(
            config=model,
            geometry=self.geometry,
            dit=self.transformer(config, target).eval().requires_grad_(False),
            vae=build_vae(model.vae, target),
            text=build_text(model.text, target),
            image=build_image(model.image, target),
        )

    def _target(self) -> torch.device:
        """Where this process computes, with the attention of the run's workers from now on."""
        leave_out_cudnn()
        return pick_device(self.device)


def saved_model(
    path: Path,
    *,
    ema: bool = True,
    device: str = "auto",
    other: Path | None = None,
    loras: Sequence[LoraFile] = (),
) -> SavedModel:
    """A checkpoint, the latest one of a run, an exported folder or a published pipeline. With `ema` a checkpoint's
    averaged weights, where it has them.

    `other` is a checkpoint of the other expert; without one it comes from the folder that the run began with. `loras`
    are added to the weights of a folder, and read here once, so that a file of another model is refused before any work
    (ValueError, FileNotFoundError).
    """
    if loras and not is_folder(path):
        raise ConfigError(
            f"--lora {loras[0].path} is added to the weights of a folder, and {path} is a run. Give --from, the folder "
            f"of a pipeline, or what heddle export has made of the run."
        )
    scheduler = None
    if is_folder(path):
        trained, step, config = None, 0, _folder_run(path, device)
        scheduler = published_scheduler(path, config) if is_pipeline(path) else None
    else:
        trained = checkpoint_folder(path)
        meta, _ = load(trained)
        step, config = int(meta["step"]), run_config(meta, trained)
    resolved, geometry = resolve(config.model)
    read_added(resolved.dit, loras)
    return SavedModel(
        trained=trained,
        other=other,
        ema=ema,
        config=replace(config, model=resolved),
        geometry=geometry,
        step=step,
        device=device,
        scheduler=scheduler,
        loras=tuple(loras),
    )


def published_model(folder: Path, config: RunConfig, *, device: str = "auto") -> SavedModel:
    """A published pipeline by the settings of a run that began with it, or with one like it. Raises ConfigError where
    the run's is another model."""
    parts = {
        "model.dit": config.model.dit.path,
        "model.vae": config.model.vae.path,
        "model.text": config.model.text.path,
    }
    if own := [name for name, path in parts.items() if not path]:
        raise ConfigError(
            f"{folder} is a published pipeline, and {' and '.join(own)} of the run's config names no folder: the two "
            f"have nothing in common. Give the config of a run that trains this pipeline."
        )
    model, geometry = resolve(of_folder(config, folder))
    if model.dit.architecture != config.model.dit.architecture:
        raise ConfigError(
            f"{folder} is {model.dit.architecture}, and model.dit.architecture of the run's config is "
            f"{config.model.dit.architecture}. Give the config of a run that trains this pipeline."
        )
    return SavedModel(
        trained=None,
        other=None,
        ema=False,
        config=replace(config, model=model),
        geometry=geometry,
        step=0,
        device=device,
    )


def weights_dtype(train: TrainConfig, device: torch.device) -> torch.dtype:
    """What a transformer's weights are read in to sample. Where all their products are in bfloat16 on a GPU, copies of
    them in fp32 would be read for nothing, and those of large models fit no GPU."""
    half = "bfloat16" in (train.autocast, train.parameter_dtype) and device.type == "cuda"
    return torch.bfloat16 if half else torch.float32


def release_memory(device: torch.device) -> None:
    """Give back what dropped modules held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def one_checkpoint(path: Path) -> Path:
    """The one checkpoint that is meant, however many a live run writes meanwhile. A run's is looked for: all of it is
    read for damage."""
    return path if is_folder(path) else checkpoint_folder(path)


def chosen_checkpoint(path: Path, after: int | None) -> Path:
    """`path`, or of a run the checkpoint after as many steps. Raises ConfigError where it has none."""
    if after is None:
        return path
    if is_folder(path):
        raise ConfigError(f"{path} holds the weights of one checkpoint: give its run, or leave --after {after} out.")
    return checkpoint_folder(path, after)


def _other_expert(
    trained: DiTConfig,
    other: Path | None,
    ema: bool,
    dtype: torch.dtype,
    device: torch.device,
    loras: Sequence[LoraFile],
) -> nn.Module | None:
    """The transformer for the noise levels that the trained one is not for. Raises ConfigError where it is nowhere."""
    if not trained.lacks_expert:
        if other is not None:
            what = "both experts" if trained.two_experts else "one transformer for all noise levels"
            raise ConfigError(f"--other {other} is given, but this run trained {what}.")
        return None
    if other is None:
        wanted = trained.other_expert()
        if not trained.path or not (Path(trained.path).expanduser() / wanted.part).is_dir():
            raise ConfigError(
                f"this run trained the expert for noise levels {trained.sigmas[0]:g} to {trained.sigmas[1]:g}; give "
                f"--other, a run of the other one."
            )
        return _sampled_dit(wanted.without_lora(), 0, dtype, device, False, loras)
    folder = checkpoint_folder(other)
    config = run_config(load(folder)[0], folder)
    dit = resolve(config.model)[0].dit
    if len(dit.experts) > 1 or dit.sigmas != trained.other_expert().sigmas:
        raise ConfigError(
            f"--other {other} trained noise levels {dit.sigmas[0]:g} to {dit.sigmas[1]:g}, and this run "
            f"{trained.sigmas[0]:g} to {trained.sigmas[1]:g}; give a run of the other expert."
        )
    module = _sampled_dit(replace(dit, lora_from=None), config.train.seed, dtype, device)
    put_weights(module, model_state(folder, ema), str(folder))
    return module


def _sampled_dit(
    config: DiTConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    trains: bool = True,
    loras: Sequence[LoraFile] = (),
) -> nn.Module:
    """A transformer that makes clips, whose frozen blocks are fetched from host memory where the device is too small.
    Unless a checkpoint has what it `trains` all of it is frozen. `loras` are added to the weights of its folder."""
    on_host = (config.freezes_blocks or not trains) and fills_device(config, dtype, device)
    if on_host:
        print(f"note: {device} has too little free memory for the transformer: its blocks are fetched from the host's.")
    return build_dit(config, seed, dtype, device, on_host, trains, loras)


def fills_device(config: DiTConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights leave too little of what a GPU has free for clips."""
    if device.type != "cuda":
        return False
    weights = dit_skeleton(config).parameters()
    small = torch.float8_e4m3fn
    needed = sum(p.numel() * (small if p.dtype == small else dtype).itemsize for p in weights)
    return needed > _MOST_OF_FREE * torch.cuda.mem_get_info(device)[0]


def by_noise(
    trained: DiTConfig, dit: nn.Module, other: nn.Module | None = None
) -> tuple[nn.Module, LowNoiseExpert | None]:
    """(for high noise, for low), or the one transformer and nothing: of a pair that was trained, or of one and the
    `other`."""
    if len(trained.experts) > 1:
        first, second = transformers(dit)
        return first, LowNoiseExpert(second, trained.experts[0].sigmas[0])
    if other is None:
        return dit, None
    low, high = trained.sigmas
    return (dit, LowNoiseExpert(other, low)) if high == 1.0 else (other, LowNoiseExpert(dit, high))


def is_folder(path: Path) -> bool:
    """Whether `path` holds modules in Diffusers' form: a folder of `heddle export`, or a published pipeline."""
    return is_pipeline(path) or ((path / "heddle.yaml").is_file() and (path / "transformer" / "config.json").is_file())


def _folder_run(folder: Path, device: str) -> RunConfig:
    """The run that was exported, or one for a published pipeline: on a GPU in bfloat16."""
    if is_pipeline(folder):
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return published_run(folder, autocast=on_gpu)
    config = RunConfig.load(folder / "heddle.yaml")
    return replace(config, model=of_folder(config, folder))


def of_folder(config: RunConfig, folder: Path) -> ModelConfig:
    """The modules of the config, from the folder where it holds them. Weights are those of the folder alone."""
    model, here = config.model, str(folder.resolve())
    return replace(
        model,
        dit=replace(model.dit.without_lora(), path=here),
        vae=replace(model.vae, path=here) if model.vae.path else model.vae,
        text=replace(model.text, path=here) if model.text.path else model.text,
        image=replace(model.image, path=here) if model.image and model.image.path else model.image,
    )


def _for_device(config: RunConfig, device: torch.device) -> ModelConfig:
    """The run's model, not compiled. An attention backend that this device lacks becomes `auto`; a note says so."""
    model = replace(config.model, dit=replace(config.model.dit, compile=False))  # clips are few
    dtype = torch.bfloat16 if config.train.autocast == "bfloat16" else torch.float32
    try:
        check_backend(model.dit.attention, device, dtype, model.dit.head_dim, training=False)
    except ValueError as error:
        print(f"note: {error} Sampling uses auto.")
        return replace(model, dit=replace(model.dit, attention="auto"))
    return model


def put_weights(module: nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Copy trained weights into the module. Parameters that were frozen in training keep what `build_dit` gave them."""
    expected = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    check_state(expected, state, where)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])
