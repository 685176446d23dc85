"""A trained model with its encoders and codec: of a checkpoint, of a run, or of an exported folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.state.checkpoint_files import CheckpointError, is_complete, latest, load, model_state
from app.device.choice import pick_device
from app.sampling.published import is_pipeline, published_run
from app.settings.config import RunConfig, names
from ops.attention.varlen import check_backend
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.experts import transformers
from ops.models.folders import resolve
from ops.models.image import ImageEncoder
from ops.models.load import build_dit, build_image, build_text, build_vae
from ops.models.text import TextEncoder
from ops.models.vae import VAE
from ops.models.weights import check_state
from ops.precision import allow_tf32
from ops.sampling import LowNoiseExpert
from ops.typed import ConfigError, build, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint's modules, on one device, and the run they come from. With `low`, `dit` is for high noise."""

    dit: nn.Module
    low: LowNoiseExpert | None
    vae: VAE
    text: TextEncoder
    image: ImageEncoder | None
    geometry: Geometry
    config: RunConfig
    step: int
    device: torch.device


def load_model(path: Path, *, ema: bool = True, device: str = "auto", other: Path | None = None) -> Model:
    """The modules of a checkpoint (or of the latest one of a run), with its EMA weights where it has them.

    `other` is a checkpoint of the other expert; without one it comes from the folder that the run began with.
    """
    if is_folder(path):
        return _load_folder(path, device)
    folder = checkpoint_folder(path)
    meta, _ = load(folder)
    config = run_config(meta, folder)
    target = pick_device(device)
    resolved, geometry = _for_device(config, config.model, target)
    dit = build_dit(replace(resolved.dit, lora_from=None), config.train.seed)
    put_weights(dit, model_state(folder, ema), str(folder))
    high, low = _experts(resolved.dit, dit.eval().to(target), _other_expert(resolved.dit, other, ema), target)
    return Model(
        dit=high,
        low=low,
        vae=build_vae(resolved.vae, target),
        text=build_text(resolved.text, target),
        image=build_image(resolved.image, target),
        geometry=geometry,
        config=replace(config, model=resolved),
        step=int(meta["step"]),
        device=target,
    )


def checkpoint_folder(path: Path) -> Path:
    """The checkpoint that `path` means: itself, the latest below it, or the latest of a run directory."""
    if not path.exists():
        raise ConfigError(f"checkpoint {path} does not exist.")
    if is_complete(path):
        return path
    found = latest(path) or latest(path / "checkpoints")
    if found is None:
        raise ConfigError(
            f"{path} is no complete checkpoint and holds none; give runs/NAME or "
            f"runs/NAME/checkpoints/step-N with a COMPLETE file."
        )
    return found


def one_checkpoint(path: Path) -> Path:
    """The one checkpoint that is meant, absolute, however many a live run writes meanwhile: for processes elsewhere."""
    return (path if is_folder(path) else checkpoint_folder(path)).resolve()


def config_of(path: Path, device: str = "auto") -> tuple[RunConfig, Geometry]:
    """The run of a checkpoint, an exported folder or a published pipeline, its model resolved, without its weights."""
    if is_folder(path):
        config = _folder_run(path, device)
    else:
        folder = checkpoint_folder(path)
        config = run_config(load(folder)[0], folder)
    resolved, geometry = resolve(config.model)
    return replace(config, model=resolved), geometry


def _other_expert(trained: DiTConfig, other: Path | None, ema: bool) -> nn.Module | None:
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
        return build_dit(replace(wanted, lora_rank=0, lora_from=None), 0)
    folder = checkpoint_folder(other)
    config = run_config(load(folder)[0], folder)
    dit = resolve(config.model)[0].dit
    if len(dit.experts) > 1 or dit.sigmas != trained.other_expert().sigmas:
        raise ConfigError(
            f"--other {other} trained noise levels {dit.sigmas[0]:g} to {dit.sigmas[1]:g}, and this run "
            f"{trained.sigmas[0]:g} to {trained.sigmas[1]:g}; give a run of the other expert."
        )
    module = build_dit(replace(dit, lora_from=None), config.train.seed)
    put_weights(module, model_state(folder, ema), str(folder))
    return module


def _experts(
    trained: DiTConfig, dit: nn.Module, other: nn.Module | None, device: torch.device
) -> tuple[nn.Module, LowNoiseExpert | None]:
    """(for high noise, for low), or the one transformer and nothing."""
    if len(trained.experts) > 1:
        first, second = transformers(dit)
        return first, LowNoiseExpert(second, trained.experts[0].sigmas[0])
    if other is None:
        return dit, None
    other = other.eval().to(device)
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
    return replace(config, model=_export_model(config, folder))


def _load_folder(folder: Path, device: str) -> Model:
    """The modules of such a folder. What an exported one does not hold (the haar codec, a random encoder) is built from
    its config."""
    config, target = _folder_run(folder, device), pick_device(device)
    resolved, geometry = _for_device(config, config.model, target)
    dit = build_dit(resolved.dit, config.train.seed).eval().to(target)
    high, low = _experts(resolved.dit, dit, _other_expert(resolved.dit, None, True), target)
    return Model(
        dit=high,
        low=low,
        vae=build_vae(resolved.vae, target),
        text=build_text(resolved.text, target),
        image=build_image(resolved.image, target),
        geometry=geometry,
        config=replace(config, model=resolved),
        step=0,
        device=target,
    )


def _export_model(config: RunConfig, folder: Path) -> ModelConfig:
    """The modules of the config, from the folder where it holds them."""
    model, here = config.model, str(folder.resolve())
    return replace(
        model,
        dit=replace(model.dit, path=here, lora_rank=0, lora_from=None),
        vae=replace(model.vae, path=here) if model.vae.path else model.vae,
        text=replace(model.text, path=here) if model.text.path else model.text,
        image=replace(model.image, path=here) if model.image and model.image.path else model.image,
    )


def _for_device(config: RunConfig, model: ModelConfig, device: torch.device) -> tuple[ModelConfig, Geometry]:
    """The resolved model. An attention backend that this device lacks becomes `auto`, and a note says so."""
    resolved, geometry = resolve(model)
    allow_tf32(config.train.allows_tf32)
    dtype = torch.bfloat16 if config.train.autocast == "bfloat16" else torch.float32
    try:
        check_backend(resolved.dit.attention, device, dtype, resolved.dit.head_dim, training=False)
    except ValueError as error:
        print(f"note: {error} Sampling uses auto.")
        resolved = replace(resolved, dit=replace(resolved.dit, attention="auto"))
    return resolved, geometry


def run_config(meta: dict[str, object], folder: Path) -> RunConfig:
    """The run's config that a checkpoint carries."""
    text = meta.get("config")
    if not isinstance(text, str):
        raise CheckpointError(f"{folder}: meta.json holds no config; it was not written by a training run.")
    return build(RunConfig, parse(text, "meta.json"), names())


def put_weights(module: nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Copy trained weights into the module. Parameters that were frozen in training keep what `build_dit` gave them."""
    expected = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    check_state(expected, state, where)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(state[name])
