"""`heddle export`: a checkpoint as a Diffusers pipeline folder, loaded back and compared before success is reported.

    heddle export --checkpoint runs/demo --to out --base Wan2.1-T2V-1.3B-Diffusers
    heddle export --checkpoint runs/my-lora --to out --lora-only --dtype bfloat16

`transformer/` holds the EMA weights, as `heddle sample` shows them, or with `--no-ema` the trained ones; those of a
LoRA run are merged, and its factors lie in `pytorch_lora_weights.safetensors`. The frozen parts come from `base`, or
from the folders that the run itself used, by hard link where the file system allows. With `--lora-only` the files of
the factors are all that is written, and no other weights are read. What is written appears under its name only when the
comparison has passed.

A transformer is in memory once, in fp32 at most: each weight is merged and rounded by itself, what was written is
compared with it, and then that is dropped before Diffusers loads its own.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from actors.state.checkpoint_files import load, model_state
from app.export import frozen_parts
from app.export.host_memory import check_memory
from app.export.parity import compare_config, compare_files, compare_forward, load_reference
from app.export.whole_folder import check_free, whole_folder
from app.inputs.checkpoints import checkpoint_folder, run_config
from app.sampling.model import put_weights
from app.settings.config import RunConfig
from ops.heap import give_back
from ops.memory.node_room import node_room
from ops.models.base.config import DiTConfig
from ops.models.experts import parts_of, transformers
from ops.models.families import FAMILIES
from ops.models.files import STEM, read_json
from ops.models.folders import component, dit_json, resolve
from ops.models.load import build_dit, dit_skeleton, kept_weights, num_trained
from ops.models.lora import A, B, M, lora_scale, merged
from ops.models.lora_files import write_factors
from ops.models.weights import check_state, is_lora, write_folder
from ops.typed import ConfigError
from ops.units import MIB

log = logging.getLogger(__name__)

_INDEX = "model_index.json"
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
    checkpoint: Path,
    to: Path,
    *,
    base: Path | None = None,
    dtype: str = "float32",
    ema: bool = True,
    lora_only: bool = False,
) -> ExportResult:
    """Body of the command: export, compare, print what was done."""
    _quiet()
    exported = export(
        checkpoint, to, base=base, dtype=dtype, ema=ema, lora_only=lora_only, tell=partial(print, flush=True)
    )
    for name, origin in exported.components.items():
        print(f"{name:24} {origin}")
    for note in exported.notes:
        print(f"note: {note}")
    largest = exported.largest_difference
    if lora_only:
        print(f"{exported.folder}: {_size(exported.folder)}, read back, factors equal")
    elif largest is None:
        print(f"{exported.folder}: read back, weights identical")
    else:
        print(
            f"{exported.folder}: loaded back by Diffusers, weights identical, forward pass equal "
            f"(largest difference {largest:.1e})"
        )
    return exported


def export(
    checkpoint: Path,
    to: Path,
    *,
    base: Path | None = None,
    dtype: str = "float32",
    ema: bool = True,
    lora_only: bool = False,
    room_bytes: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> ExportResult:
    """Write and verify the folder `to`; `tell` gets a line before the work begins. Raises ConfigError for wrong
    requests and where this host has too little memory (`room_bytes`, by default what it can spare), CheckpointError or
    ValueError when a comparison fails."""
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} is not known; choose one of {', '.join(_DTYPES)}.")
    check_free(to)
    if base is not None and lora_only:
        raise ConfigError(f"--base {base} gives frozen parts, and --lora-only writes none; leave one of the two out.")
    if base is not None and not (base / _INDEX).is_file():
        raise ConfigError(
            f"--base {base} is not a Diffusers pipeline, for it has no model_index.json; give the folder of a pipeline."
        )
    folder = checkpoint_folder(checkpoint)
    config = run_config(load(folder)[0], folder)
    if lora_only and not config.model.dit.lora_rank:
        raise ConfigError(
            f"--lora-only writes the factors of a LoRA run, and {folder} has none (model.dit.lora_rank 0); leave it "
            f"out for the whole model."
        )
    config = replace(config, model=resolve(config.model)[0])
    if not lora_only:
        check_memory(config.model.dit, node_room() if room_bytes is None else room_bytes)
    tell(f"exporting {_in_words(config.model.dit, lora_only)} of {folder} as {dtype}, then comparing")
    with whole_folder(to, last=_INDEX) as work:
        if lora_only:
            exported = _factors_alone(work, folder, config, _DTYPES[dtype], ema)
        else:
            exported = _fill(work, folder, config, base, _DTYPES[dtype], ema)
    return replace(exported, folder=to)


def _in_words(dit: DiTConfig, lora_only: bool) -> str:
    """What is written of a transformer, and how much."""
    if lora_only:
        return f"{num_trained(dit) / 1e6:,.1f} M weights of factors"
    return f"{num_trained(replace(dit.without_lora(), train_only=())) / 1e6:,.1f} M weights"


def _size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.iterdir()) / MIB:,.1f} MiB"


def _quiet() -> None:
    """Keep progress bars for small files and the greeting of DeepSpeed (accelerate imports it) out of our output."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _factors_alone(work: Path, folder: Path, config: RunConfig, dtype: torch.dtype, ema: bool) -> ExportResult:
    """The files of the factors, of each expert its own, out of the checkpoint alone."""
    dit, averaged = config.model.dit, ema and config.train.optimizer.ema_decay > 0
    state = model_state(folder, averaged)
    components: dict[str, str] = {}
    for expert, part in zip(dit.experts, parts_of(dit_skeleton(dit)), strict=True):
        factors = {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}
        components |= write_factors(work, expert, factors, part.removesuffix("."), dtype)
    of_weights = _origin(folder, ema, averaged)
    return ExportResult(
        folder=work,
        components={name: f"{what}, of {of_weights}" for name, what in components.items()},
        largest_difference=None,
    )


def _origin(folder: Path, ema: bool, averaged: bool) -> str:
    which = "EMA" if averaged else "trained"
    return f"{which} weights of {folder.name}" + ("" if averaged == ema else ", which keeps no EMA")


def _fill(
    work: Path, folder: Path, config: RunConfig, base: Path | None, dtype: torch.dtype, ema: bool
) -> ExportResult:
    """Write and compare a whole pipeline in `work`; the model of `config` is resolved."""
    dit = config.model.dit
    parts = frozen_parts.collect(work, config, base)
    averaged = ema and config.train.optimizer.ema_decay > 0
    family = FAMILIES[dit.architecture]
    differences = []
    for expert, state in zip(dit.experts, _trained(dit, config.train.seed, folder, averaged), strict=True):
        if expert.lora_rank:
            name = expert.expert_name if len(dit.experts) > 1 else ""
            factors = {key: tensor for key, tensor in state.items() if is_lora(key)}
            parts.origins.update(write_factors(work, expert, factors, name, dtype))
        plain = replace(expert.without_lora(), path=None)
        weights = _plain_weights(state, expert, dtype)
        weights |= {key: tensor.to(dtype) for key, tensor in kept_weights(expert).items()}
        differences.append(_write_transformer(work / plain.part, plain, weights, _transformer_json(expert, base)))
        parts.origins[plain.part] = _origin(folder, ema, averaged)
        parts.index[plain.part] = ["diffusers", family.diffusers_class]
    known = [difference for difference in differences if difference is not None]
    largest = max(known, default=None)
    parts.notes.extend(family.export_notes(dit, config.model.text.pad_to))
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
    frozen_parts.say_boundary(dit, parts)
    if dit.lacks_expert:
        source = Path(dit.path or base or "").expanduser() / dit.other_expert().part
        frozen_parts.other_expert(work, dit, source if source.is_dir() else None, parts)
    if family.own_code is None:
        index = json.dumps(parts.index, indent=2, sort_keys=True)
        (work / _INDEX).write_text(index + "\n", encoding="utf-8")
    (work / "heddle.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return ExportResult(folder=work, components=parts.origins, largest_difference=largest, notes=parts.notes)


def _write_transformer(
    target: Path, dit: DiTConfig, weights: dict[str, Tensor], fields: Mapping[str, object]
) -> float | None:
    """The folder of a transformer, read back: the largest difference from Diffusers' forward pass, None where Diffusers
    has no class of it and what was read is compared alone. Empties `weights` as soon as they are on disk."""
    family = FAMILIES[dit.architecture]
    if (own := family.own_code) is not None:
        weights |= own.constants(dit)  # as they are: angles grow with frames
    write_folder(target, weights, fields, stem=own.stem if own else STEM)
    compare_files(target, weights)
    weights.clear()
    if own is not None:
        compare_config(target, dit)
        return None
    return compare_forward(load_reference(target, family.diffusers_class), dit, target.name)


def _trained(dit: DiTConfig, seed: int, folder: Path, ema: bool) -> Iterator[dict[str, Tensor]]:
    """The weights of the checkpoint's transformer, factors among them; of both experts, one after the other. What was
    trained beside weights in 8 bits is beside those that they were made of.

    Nothing else holds them: what is taken out of the dict is out of memory.
    """
    dit = replace(dit, lora_from=None, frozen_dtype="same")
    skeleton, trained = dit_skeleton(dit), model_state(folder, ema)
    check_state({name: p for name, p in skeleton.named_parameters() if p.requires_grad}, trained, str(folder))
    parts = parts_of(skeleton)
    if trained.keys() == skeleton.state_dict().keys():  # nothing is frozen
        yield from (_below(trained, part) for part in parts)
        return
    if not dit.path:  # one generator draws the weights of both
        module = build_dit(dit, seed)
        put_weights(module, trained, str(folder))
        yield from (dict(one.state_dict()) for one in transformers(module))
        return
    for expert, part in zip(dit.experts, parts, strict=True):
        module = build_dit(expert, seed)
        put_weights(module, _below(trained, part), str(folder))
        state = dict(module.state_dict())
        del module
        yield state


def _below(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """Take the weights whose names begin with `part` out of `state`, by their names without it."""
    return {name.removeprefix(part): state.pop(name) for name in list(state) if name.startswith(part)}


def _plain_weights(state: dict[str, Tensor], dit: DiTConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the plain transformer in `dtype`, with factors merged. Empties `state` meanwhile: a weight and
    what is made of it are in memory together for one layer at a time."""
    factors = {name: state.pop(name) for name in list(state) if is_lora(name)}
    plain = {}
    for name in list(state):
        layer = name.removesuffix(".weight")
        here = {name: state.pop(name).detach()}
        if layer + A in factors:
            here |= {layer + ending: factors[layer + ending] for ending in (A, B, M) if layer + ending in factors}
            here = merged(here, lora_scale(dit))
        plain[name] = here[name].to(dtype)
        del here
        give_back()
    return plain


def _transformer_json(dit: DiTConfig, base: Path | None) -> dict[str, object]:
    """Our numbers over the keys of the folder that was trained from, so that nothing a pipeline reads is lost."""
    import diffusers

    source = dit.path or base
    kept = read_json(component(source, dit.part) / "config.json") if source else {}
    own = FAMILIES[dit.architecture].own_code
    return kept | dit_json(dit) | ({} if own else {"_diffusers_version": diffusers.__version__})
