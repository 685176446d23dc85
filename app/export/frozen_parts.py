"""The frozen parts of an exported pipeline: linked from where the run had them, or written where they are ours."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from app.settings.config import RunConfig
from ops.listing import paths_below
from ops.models.base.config import DiTConfig
from ops.models.config import TextConfig
from ops.models.families import FAMILIES, VAE_CLASSES
from ops.models.files import plain_name, read_json, variant_of
from ops.models.folders import class_of, component, text_parts, tokenizer_of, vae_numbers
from ops.models.image import processor_of, random_clip
from ops.models.load import build_text
from ops.models.text_layers import layers_classes, save_random_layers
from ops.models.text_pair import recipe_of
from ops.models.text_pair_load import save_random_pair, text_classes
from ops.typed import ConfigError


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """What lies beside the transformer of an exported pipeline. Filled while the parts are written."""

    index: dict[str, object]  # model_index.json
    origins: dict[str, str] = field(default_factory=dict)  # folder name -> where it came from
    notes: list[str] = field(default_factory=list)  # sentences that a user must read


def collect(work: Path, config: RunConfig, base: Path | None) -> FrozenParts:
    """Fill `work` with everything but the transformer. Raises ConfigError for a `base` that does not fit."""
    if base is not None:
        return _from_base(work, config, base)
    family = FAMILIES[config.model.dit.architecture]
    told = _published_index(config.model.dit)
    index = {name: told[name] for name in family.kept_in_index if name in told}
    index |= family.index(config.train.flow, config.model.text.empty)
    if family.own_code is None:
        index["_class_name"] = family.pipeline_class(config.model.dit)
    parts = FrozenParts(index)
    _vae(work, config, parts)
    _text(work, config, parts)
    _image(work, config, parts)
    if family.own_code is None:
        _scheduler(work, config, parts)
    if family.has_guider:
        _guider(work, config, parts)
    _unused(work, config, parts)
    for name in family.missing_parts:
        parts.index.setdefault(name, [None, None])
    if family.missing_note and config.model.text.kind == "t5":
        parts.notes.append(family.missing_note)
    return parts


def _from_base(work: Path, config: RunConfig, base: Path) -> FrozenParts:
    """All components of a published pipeline except its transformer. It must be the one that was trained with."""
    index = read_json(base / "model_index.json")
    expected = FAMILIES[config.model.dit.architecture].diffusers_class
    found = (index.get("transformer") or [None, None])[1]
    if found != expected:
        raise ConfigError(f"--base {base} has a {found}, the run trained a {expected}; give its own pipeline.")
    _same_latents(config, base)
    parts = FrozenParts(index)
    for entry in sorted(base.iterdir()):
        if entry.name.startswith(("transformer", ".")) or entry.name == "model_index.json":
            continue
        if entry.is_dir():
            parts.origins[entry.name] = f"{link_tree(entry, work / entry.name)} from {entry}"
    return parts


def _same_latents(config: RunConfig, base: Path) -> None:
    fields = read_json(component(base, "vae") / "config.json")
    channels, _ = vae_numbers(fields, str(base))
    if config.model.vae.kind == "haar" or channels != config.model.vae.channels:
        raise ConfigError(
            f"--base {base} has a VAE of {channels} channels, the run trained on latents of "
            f"{config.model.vae.kind} with {config.model.vae.channels}; give the pipeline whose VAE was "
            f"used, or none."
        )


def _vae(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    vae = config.model.vae
    if vae.kind == "diffusers":
        assert vae.path is not None
        folder = component(vae.path, "vae")
        name = class_of(read_json(folder / "config.json"))
        assert name in VAE_CLASSES
        parts.index["vae"] = [None, None] if VAE_CLASSES[name].own else ["diffusers", name]
        parts.origins["vae"] = f"{link_tree(folder, work / 'vae')} from {folder}"
        return
    (work / "vae").mkdir()
    fields = {"_class_name": "HaarVAE", "temporal": vae.temporal, "spatial": vae.spatial, "channels": vae.channels}
    (work / "vae" / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    parts.index["vae"] = [None, None]
    parts.origins["vae"] = "settings of the haar codec"
    if config.model.dit.starts_from_image:
        parts.notes.append(
            "the haar codec is Heddle's own and not loadable by Diffusers, whose pipeline encodes the picture by its "
            "VAE: make clips of this export with `heddle sample --checkpoint`."
        )
        return
    family, without = FAMILIES[config.model.dit.architecture], "vae=None"
    if family.needs_vae:
        without = (
            f"vae={family.vae.name}(latent_channels={vae.channels}, spatial_compression_ratio={vae.spatial}, "
            f"temporal_compression_ratio={vae.temporal}, ...) of any weights"
        )
    parts.notes.append(
        f"the haar codec is Heddle's own and not loadable by Diffusers: load the pipeline with {without}, ask "
        f"for output_type='latent', and decode with ops.models.haar.HaarVAE."
    )


def _text(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    text = config.model.text
    if text.recipe and text.recipe.second == "connectors":
        _text_layers(work, text, parts)
        return
    if text.recipe:
        _text_pair(work, text, parts)
        return
    if not text.path:
        random = build_text(text)
        random.encoder.save_pretrained(work / "text_encoder")  # type: ignore[attr-defined]
        random.tokenizer.save_pretrained(work / "tokenizer")  # type: ignore[attr-defined]
        parts.index["text_encoder"] = ["transformers", "T5EncoderModel"]
        parts.index["tokenizer"] = ["transformers", "ByT5Tokenizer"]
        parts.origins["text_encoder"] = parts.origins["tokenizer"] = f"random byte-level T5 of seed {text.seed}"
        parts.notes.append(
            "the text encoder is the untrained one of the run; Diffusers loads it, but it is of use with this "
            "transformer only."
        )
        return
    folder = component(text.path, "text_encoder")
    classes = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}
    parts.index["text_encoder"] = ["transformers", classes[read_json(folder / "config.json")["model_type"]]]
    parts.origins["text_encoder"] = f"{link_tree(folder, work / 'text_encoder')} from {folder}"
    tokenizer = tokenizer_of(folder)
    settings = tokenizer / "tokenizer_config.json"
    name = read_json(settings).get("tokenizer_class", "T5TokenizerFast") if settings.is_file() else "T5TokenizerFast"
    parts.index["tokenizer"] = ["transformers", name]
    parts.origins["tokenizer"] = f"{link_tree(tokenizer, work / 'tokenizer')} from {tokenizer}"


def _text_pair(work: Path, text: TextConfig, parts: FrozenParts) -> None:
    """The two text encoders of a family and their tokenizers."""
    recipe = recipe_of(text)
    for part, name in text_classes(text).items():
        parts.index[part] = ["transformers", name]
    if text.path:
        for part, folder in text_parts(text).items():
            parts.origins[part] = f"{link_tree(folder, work / part)} from {folder}"
        parts.notes.extend([recipe.note] if recipe.note else [])
        return
    save_random_pair(text, work)
    for part in text_classes(text):
        parts.origins[part] = f"random pair over bytes of seed {text.seed}"
    untrained = "the text encoders are the untrained ones of the run"
    if recipe.system:
        parts.notes.append(
            f"{untrained}; before a call set the pipeline's system_message to {recipe.system!r}, its "
            f"prompt_template_encode_start_idx to {recipe.crop} and its tokenizer_max_length to {text.max_length}."
        )
        return
    if recipe.template_is_set:
        parts.notes.append(
            f"{untrained}; before a call set the pipeline's prompt_template to {recipe.template!r} and its "
            f"prompt_template_encode_start_idx to {recipe.crop}; call it with max_sequence_length={text.max_length}."
        )
        return
    told: dict[str, object] = {"template": recipe.template, "crop_start": recipe.crop}
    if recipe.picture:
        rows = text.picture_tokens  # after one mark
        told |= {"image_emb_start": 1, "image_emb_end": 1 + rows, "image_emb_len": rows}
    template = f"prompt_template={json.dumps(told)} and " if recipe.crop else ""
    parts.notes.append(f"{untrained}; call the pipeline with {template}max_sequence_length={text.max_length}.")


def _text_layers(work: Path, text: TextConfig, parts: FrozenParts) -> None:
    """A decoder, its tokenizer, and what connects the states of its layers with a transformer."""
    names = layers_classes(text)
    parts.index.update(names)
    if text.path:
        for part, folder in text_parts(text).items():
            parts.origins[part] = f"{link_tree(folder, work / part)} from {folder}"
    else:
        save_random_layers(text, work)
        parts.origins.update(dict.fromkeys(names, f"random ones over bytes of seed {text.seed}"))
        parts.notes.append("the text encoder and the connectors are the untrained ones of the run.")
    parts.notes.append(f"call the pipeline with max_sequence_length={text.max_length}.")


def _unused(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    """Components that no run computes with: of the pipeline that was trained from, where it has them."""
    dit = config.model.dit
    folder = component(dit.path, dit.part).parent if dit.path else None
    told = _published_index(dit)
    for name in FAMILIES[dit.architecture].unused_parts:
        if folder and (folder / name).is_dir() and name in told:
            parts.index[name] = told[name]
            parts.origins[name] = f"{link_tree(folder / name, work / name)} from {folder / name}"
        else:
            parts.index[name] = [None, None]


def _published_index(dit: DiTConfig) -> dict[str, object]:
    """The model_index.json of the pipeline that was trained from, where there is one."""
    index = component(dit.path, dit.part).parent / "model_index.json" if dit.path else None
    return read_json(index) if index and index.is_file() else {}


def _image(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    """The image encoder of image-to-video pipelines; some have none."""
    if not config.model.dit.starts_from_image or config.model.text.sees_picture:
        return
    image, names = config.model.image, ("image_encoder", "image_processor")
    if image is None:
        known = inspect.signature(_pipeline(config.model.dit)).parameters
        parts.index.update({name: [None, None] for name in names if name in known})
        return
    parts.index["image_encoder"] = ["transformers", "CLIPVisionModel"]
    parts.index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    if not image.path:
        random = random_clip(image, "cpu")
        random.encoder.save_pretrained(work / names[0])
        random.save_processor(work / names[1])
        parts.origins[names[0]] = parts.origins[names[1]] = f"random CLIP vision tower of seed {image.seed}"
        return
    encoder = component(image.path, "image_encoder")
    for name, folder in zip(names, (encoder, processor_of(encoder)), strict=True):
        parts.origins[name] = f"{link_tree(folder, work / name)} from {folder}"


def _pipeline(dit: DiTConfig) -> type:
    """Diffusers' class of the pipeline."""
    import diffusers

    found: type = getattr(diffusers, FAMILIES[dit.architecture].pipeline_class(dit))
    return found


def _scheduler(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    """That of `heddle sample`: Euler with its shift and sigmas, or DDIM for a transformer trained by diffusion."""
    import diffusers

    flow = config.sample.flow_of(config.train.flow)
    chosen = FAMILIES[config.model.dit.architecture].scheduler(config.model.dit, flow)
    scheduler = getattr(diffusers, chosen.name)(num_train_timesteps=flow.num_train_timesteps, **chosen.settings)
    scheduler.save_pretrained(work / "scheduler")
    parts.index["scheduler"] = ["diffusers", chosen.name]
    diffusion = config.model.dit.diffusion
    how = f"Euler, flow shift {flow.flow_shift:g}" if diffusion is None else f"DDIM, {diffusion}"
    parts.origins["scheduler"] = how


def _guider(work: Path, config: RunConfig, parts: FrozenParts) -> None:
    """Classifier-free guidance with the scale of the run's samples."""
    import diffusers

    scale, name = config.sample.guidance_scale, "ClassifierFreeGuidance"
    getattr(diffusers, name)(guidance_scale=scale).save_pretrained(work / "guider")
    parts.index["guider"] = ["diffusers", name]
    parts.origins["guider"] = f"classifier-free guidance, scale {scale:g}"


def say_boundary(dit: DiTConfig, parts: FrozenParts) -> None:
    """Tell the pipeline of two experts where the one for low noise takes over."""
    if not dit.two_experts:
        return
    low, high = dit.experts[0].sigmas
    parts.index["boundary_ratio"] = low if high == 1.0 else high
    if dit.lora_rank and any(expert.part == "transformer_2" for expert in dit.experts):
        parts.notes.append(
            "LoRA factors of the expert for low noise load by load_lora_weights(..., load_into_transformer_2=True)."
        )


def other_expert(work: Path, trained: DiTConfig, source: Path | None, parts: FrozenParts) -> None:
    """Add the transformer for the other noise levels, from `source` where there is one."""
    part = trained.other_expert().part
    if source is None:
        parts.index[part] = [None, None]
        parts.notes.append(
            f"this run trained {trained.part}/ of two experts; {part}/ is missing, copy it from its export."
        )
        return
    parts.index[part] = ["diffusers", FAMILIES[trained.architecture].diffusers_class]
    parts.origins[part] = f"{link_tree(source, work / part)} from {source}"


def link_tree(source: Path, target: Path) -> str:
    """The files of `source` under `target`: hard links, or copies on another file system. Says which. Weights that are
    there in a variant alone get plain names, by which pipelines look for them.

    Links of a download cache are followed first: a hard link to a symbolic link would dangle when the cache moves.
    """
    how = "hard-linked"
    for path in sorted(paths_below(source)):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            continue
        place = place.with_name(plain_name(path.name, variant_of(path.parent)))
        place.parent.mkdir(parents=True, exist_ok=True)
        real = path.resolve(strict=True)
        try:
            os.link(real, place)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(real, place)
            how = "copied"
    return how
