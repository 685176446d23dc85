"""What a run has learned of its costs, kept in its folder: saved beside checkpoints, taken up by a resume."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path

from actors.config import TrainConfig
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import LEARNED, read_profile, write_profile
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.types import PlanError
from ops.attention.table import AttentionTable, name_of
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.files import read_json
from ops.models.folders import component
from ops.whole_file import whole_file

log = logging.getLogger(__name__)

_SAID = {
    "backend": "attention backend",
    "checkpointing": "gradient checkpointing",
    "trained": "training of",
    "frozen": "frozen blocks",
    "vae": "VAE",
    "text": "text encoder",
}  # how a setting is called, where that is not its name


def setting_of(model: ModelConfig, device: str, train: TrainConfig | None = None) -> ProfiledSetting:
    """What costs of this resolved model hold for, on workers with this device and trained like this; without `train`
    what it says of precision is not known."""
    dit = model.dit
    name = f"{dit.architecture} {sum(dit.block_counts)}x{dit.dim}"
    if dit.spatial_temporal and dit.deals_heads:
        name += " by Ulysses"
    kind = "cpu" if device in ("", "cpu") else "cuda"
    return ProfiledSetting(
        model=name,
        device=device,
        attention=name_of(dit.attention),
        backend=_backend_of(model, device, train) if train is not None else "",
        precision=_precision_of(train, kind) if train is not None else "",
        checkpointing=("on" if dit.gradient_checkpointing else "off") + _blocks_by(dit, kind),
        trained=_trained(dit),
        frozen=_frozen(dit, train) if train is not None and kind == "cuda" else "",
        vae=_vae_of(model.vae, kind),
        text=_text_of(model.text, kind),
    )


def _precision_of(train: TrainConfig, device: str) -> str:
    said = f"{train.parameter_dtype}, autocast {train.autocast}"
    if device == "cpu" or train.allows_tf32 == (train.products == "bfloat16"):
        return said
    return f"{said}, {'with' if train.allows_tf32 else 'without'} TF32"


def _blocks_by(dit: DiTConfig, device: str) -> str:
    if device == "cuda" and dit.cuda_graphs and dit.compiles:
        return ", CUDA graphs"
    return ", compiled blocks" if dit.compile is True else ""


def _trained(dit: DiTConfig) -> str:
    if dit.lora_rank:
        of = f" of {' '.join(dit.lora_targets)}" if dit.lora_targets else ""
        beside = " beside float8" if dit.frozen_dtype == "float8" else ""
        return f"{'DoRA' if dit.lora_dora else 'LoRA'} factors of rank {dit.lora_rank}{of}{beside}"
    return " ".join(dit.train_only) if dit.train_only else "all weights"


def _frozen(dit: DiTConfig, train: TrainConfig) -> str:
    places = {"node": "in host memory", "replicated": "on the device"}
    return places.get(train.memory.parameters, "") if dit.freezes_blocks else ""


def _backend_of(model: ModelConfig, device: str, train: TrainConfig) -> str:
    """The attention backends that calls of this model end in; "" for GPUs that this process cannot ask."""
    import torch

    from ops.attention.varlen import serving

    setting, kind = model.dit.attention, "cpu" if device in ("", "cpu") else "cuda"
    if setting != "auto" and not isinstance(setting, AttentionTable):
        return setting
    if kind == "cuda" and not torch.cuda.is_available():
        return ""
    dtype = torch.bfloat16 if train.autocast == "bfloat16" else getattr(torch, train.parameter_dtype)
    probe = torch.empty(0, 1, model.dit.head_dim, device=kind, dtype=dtype, requires_grad=True)
    if isinstance(setting, AttentionTable):
        return f"{', '.join(serving(probe, table=setting))} by a table"
    return ", ".join(serving(probe))


def _vae_of(vae: VAEConfig, device: str) -> str:
    if vae.kind == "haar":
        return f"haar {vae.temporal}x{vae.spatial}x{vae.spatial}, {vae.channels} channels"
    assert vae.path is not None
    name = read_json(component(vae.path, "vae") / "config.json").get("_class_name", "unknown")
    (high, wide), (down, across) = vae.tile_sample_min, vae.tile_sample_stride
    tiles = f"tiles of {high}x{wide} every {down}x{across}" if vae.tiling else "no tiles"
    return f"{name} {vae.dtype_on(device)}, {tiles}"


def _text_of(text: TextConfig, device: str) -> str:
    padded = f", padded to {max(text.pad_to, text.unmasked)}" if text.pad_to or text.unmasked else ""
    dtype = text.dtype_on(device)
    return f"{text.kind} {text.num_layers}x{text.d_model} {dtype} on the {text.place}{padded}"


def save_learned(profile: Profile, setting: ProfiledSetting, run_dir: Path) -> None:
    """Write what was learned. A profile that has learned nothing writes nothing."""
    if not (profile.live or profile.spanning or profile.needs.known().kinds):
        return
    profile.setting = setting
    with whole_file(run_dir / LEARNED) as part:
        write_profile(profile, part)


def take_up(profile: Profile, setting: ProfiledSetting, run_dir: Path) -> str:
    """Go on with what an earlier start of this run has learned. Returns why it is refused: measured in another setting,
    or no profile at all; "": it is not, or there is nothing."""
    path = run_dir / LEARNED
    if not path.is_file():
        return ""
    try:
        learned = read_profile(path)
    except PlanError as error:
        return str(error)
    if why := _other_than(learned, setting):
        return f"what earlier starts have learned is {why}"
    profile.take_up(learned)
    return ""


def refuse_other(profile: Profile, setting: ProfiledSetting, path: str) -> None:
    """Raises PlanError where a profile says that it holds for something else. An empty value of `setting` is not
    known, and files that say nothing of it hold for what their user thinks."""
    if why := _other_than(profile, setting):
        raise PlanError(
            f"profile {path} is {why}. Measure it with heddle profile, or leave planner.profile out: then the run "
            f"learns it."
        )


def _other_than(profile: Profile, setting: ProfiledSetting) -> str:
    """In which setting a profile holds where that is not `setting`; "": it may be the same."""
    found = profile.setting
    if found is None:
        return ""
    for name in (f.name for f in fields(ProfiledSetting)):
        have, want = getattr(found, name), getattr(setting, name)
        if name == "attention" and found.backend and setting.backend:
            continue  # how it was named does not matter
        same = _same_device(have, want) if name == "device" else have == want
        if have and want and not same:
            return f"of {_SAID.get(name, name)} {have!r}; this run has {want!r}"
    return ""


def _same_device(one: str, other: str) -> bool:
    """Whether two names may be those of one device, as its driver names it and as Ray does: the latter has one word of
    it, up to its first small letter ("H100", and "G" of a GeForce). "cuda" is a GPU that nobody has named.

    >>> _same_device("NVIDIA H200", "H200"), _same_device("NVIDIA H200", "H20"), _same_device("H20", "cuda")
    (True, False, True)
    """
    if "cuda" in (one, other):
        return "cpu" not in (one, other)
    words, others = (set(re.findall(r"[A-Za-z0-9]+", name)) for name in (one, other))
    return words <= others | set(map(_capitals, others)) or others <= words | set(map(_capitals, words))


def _capitals(word: str) -> str:
    return word[: len(word) - len(word.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))]
