"""`heddle export`: a checkpoint as a Diffusers pipeline folder, loaded back and compared before success is reported.

    heddle export --checkpoint runs/demo --to out --base Wan2.1-T2V-1.3B-Diffusers

`transformer/` holds the EMA weights, as `heddle sample` shows them, or with `--no-ema` the trained ones; those of a
LoRA run are merged, and its factors lie in `pytorch_lora_weights.safetensors`. The
frozen parts come from `base`, or from the folders that the run itself used, by hard link where the file system allows.
The folder appears under its name only when the comparison has passed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.state.checkpoint_files import load, model_state
from app.export import frozen_parts
from app.export.parity import compare_forward, compare_read_back, compare_weights
from app.inputs.checkpoints import checkpoint_folder, run_config
from app.sampling.model import put_weights
from app.settings.config import RunConfig
from ops.models.base.config import DiTConfig
from ops.models.experts import transformers
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import component, dit_json, resolve
from ops.models.load import build_dit, kept_weights
from ops.models.lora import factor_file, for_comfyui, for_diffusers, lora_scale, merged
from ops.models.weights import write_folder, write_tensors
from ops.typed import ConfigError

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What was written. `notes` are the sentences a user must read: what Diffusers cannot load, and why."""

    folder: Path
    components: dict[str, str]  # folder name -> where it came from
    # of the forward pass from Diffusers', relative to its largest value; None where Diffusers has no class of it
    largest_difference: float | None
    notes: list[str] = field(default_factory=list)


def run(
    checkpoint: Path, to: Path, *, base: Path | None = None, dtype: str = "float32", ema: bool = True
) -> ExportResult:
    """Body of the command: export, compare, print what was done."""
    _quiet()
    exported = export(checkpoint, to, base=base, dtype=dtype, ema=ema)
    for name, origin in exported.components.items():
        print(f"{name:24} {origin}")
    for note in exported.notes:
        print(f"note: {note}")
    largest = exported.largest_difference
    print(
        f"{exported.folder}: read back, weights identical"
        if largest is None
        else f"{exported.folder}: loaded back by Diffusers, weights identical, forward pass equal "
        f"(largest difference {largest:.1e})"
    )
    return exported


def export(
    checkpoint: Path, to: Path, *, base: Path | None = None, dtype: str = "float32", ema: bool = True
) -> ExportResult:
    """Write and verify the folder `to`. Raises ConfigError for wrong requests, CheckpointError when parity fails."""
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(_DTYPES)}.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} exists and is not an empty folder; choose another --to.")
    if base is not None and not (base / "model_index.json").is_file():
        raise ConfigError(
            f"--base {base} is not a Diffusers pipeline, for it has no model_index.json; give the folder of a pipeline."
        )
    folder = checkpoint_folder(checkpoint)
    config = run_config(load(folder)[0], folder)
    work = to.with_name(f".{to.name}.part")
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    try:
        exported = _fill(work, folder, config, base, _DTYPES[dtype], ema)
    except BaseException:
        shutil.rmtree(work)
        raise
    if to.exists():
        to.rmdir()
    work.rename(to)
    return replace(exported, folder=to)


def _quiet() -> None:
    """Keep progress bars for small files and the greeting of DeepSpeed (accelerate imports it) out of our output."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _fill(
    work: Path, folder: Path, config: RunConfig, base: Path | None, dtype: torch.dtype, ema: bool
) -> ExportResult:
    resolved, _ = resolve(config.model)
    parts = frozen_parts.collect(work, replace(config, model=resolved), base)
    averaged = ema and config.train.optimizer.ema_decay > 0
    family = FAMILIES[resolved.dit.architecture]
    differences = []
    for expert, module in zip(resolved.dit.experts, _trained(resolved.dit, config.train.seed, folder, averaged)):
        name = expert.expert_name if len(resolved.dit.experts) > 1 else ""
        state = {key: tensor.to(dtype) for key, tensor in _plain_state(work, expert, module, name, parts).items()}
        kept = {key: tensor.to(dtype) for key, tensor in kept_weights(expert).items()}
        plain = replace(expert.without_lora(), path=None)
        differences.append(_write_transformer(work / plain.part, plain, state, kept, _transformer_json(expert, base)))
        parts.origins[plain.part] = f"{'EMA' if averaged else 'trained'} weights of {folder.name}" + (
            "" if averaged == ema else ", which keeps no EMA"
        )
        parts.index[plain.part] = ["diffusers", family.diffusers_class]
    known = [difference for difference in differences if difference is not None]
    largest = max(known, default=None)
    parts.notes.extend(family.export_notes(resolved.dit, config.model.text.pad_to))
    sampled = config.sample.flow_of(config.train.flow)
    growing = sampled.token_shift
    said = family.own_code is not None or (family.shifts_by_tokens and growing is not None and growing.law == "line")
    if growing is not None and base is None and not said:
        parts.notes.append(
            f"this run shifted noise by train.flow.token_shift, and scheduler/ holds one shift, "
            f"{sampled.flow_shift:g}; set that of your clips: {growing.at(1024):.3g} at 1,024 tokens, "
            f"{growing.at(32768):.3g} at 32,768."
        )
    if base is not None:
        parts.notes.append(
            f"scheduler/ is that of {base}; `heddle sample` uses even Euler steps with flow shift "
            f"{sampled.flow_shift:g}."
        )
    if any(origin.startswith("hard-linked") for origin in parts.origins.values()):
        parts.notes.append(
            "hard-linked files are the same files as their originals: replace one, do not edit it in place."
        )
    frozen_parts.say_boundary(resolved.dit, parts)
    if resolved.dit.lacks_expert:
        source = Path(resolved.dit.path or base or "").expanduser() / resolved.dit.other_expert().part
        frozen_parts.other_expert(work, resolved.dit, source if source.is_dir() else None, parts)
    if family.own_code is None:
        index = json.dumps(parts.index, indent=2, sort_keys=True)
        (work / "model_index.json").write_text(index + "\n", encoding="utf-8")
    (work / "heddle.yaml").write_text(replace(config, model=resolved).to_yaml(), encoding="utf-8")
    return ExportResult(folder=work, components=parts.origins, largest_difference=largest, notes=parts.notes)


def _write_transformer(
    target: Path,
    dit: DiTConfig,
    state: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    fields: Mapping[str, object],
) -> float | None:
    """The folder of a transformer, read back: the largest difference from Diffusers' forward pass, None where Diffusers
    has no class of it and what was read is compared alone. It holds the weights that are `kept`, too."""
    family = FAMILIES[dit.architecture]
    if (own := family.own_code) is None:
        write_folder(target, {**state, **kept}, fields)
        compare_weights(target, family.diffusers_class, {**state, **kept})
        return compare_forward(target, dit, state)
    write_folder(target, {**state, **own.constants(dit)}, fields, stem=own.stem)  # as they are: angles grow with frames
    compare_read_back(target, dit, state)
    return None


def _trained(dit: DiTConfig, seed: int, folder: Path, ema: bool) -> tuple[nn.Module, ...]:
    """The transformers of the checkpoint: one, or both experts. What was trained beside weights in 8 bits is beside
    those that they were made of."""
    module = build_dit(replace(dit, lora_from=None, frozen_dtype="same"), seed)
    put_weights(module, model_state(folder, ema), str(folder))
    return transformers(module)


def _plain_state(
    work: Path, dit: DiTConfig, module: nn.Module, expert: str, parts: frozen_parts.FrozenParts
) -> dict[str, Tensor]:
    """The weights of the plain model, with LoRA factors merged in; the factors are also written to a file of their own,
    with the expert's name if both were trained."""
    state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
    if not dit.lora_rank:
        return state
    file = factor_file(expert)
    write_tensors(work / file, for_diffusers(state, lora_scale(dit)))
    parts.origins[file] = f"LoRA factors of {dit.part}/"
    if original := for_comfyui(state, dit):
        file = file.replace("pytorch", "comfyui")
        write_tensors(work / file, original)
        parts.origins[file] = "the same by their original names, as ComfyUI reads them"
    return merged(state, lora_scale(dit))


def _transformer_json(dit: DiTConfig, base: Path | None) -> dict[str, object]:
    """Our numbers over the keys of the folder that was trained from, so that nothing a pipeline reads is lost."""
    import diffusers

    source = dit.path or base
    kept = read_json(component(source, dit.part) / "config.json") if source else {}
    own = FAMILIES[dit.architecture].own_code
    return kept | dit_json(dit) | ({} if own else {"_diffusers_version": diffusers.__version__})
