"""Diffusers folders as far as their JSON files say: where a component lies and what its numbers are. No torch.

A pipeline folder holds `model_index.json` and one folder per component (`transformer/`, `vae/`, `text_encoder/`,
`tokenizer/`, `scheduler/`); a component's own folder may be named as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.family import Json
from ops.models.base.tiling import Tiling
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES, TEXT_RECIPES, VAE_CLASSES, AnyDiT
from ops.models.files import check_files, read_json
from ops.models.other_forms import LiesBelow, OtherForm, check_form, check_path, how_to_get

_TOKENIZER_FILES = ("spiece.model", "vocab.json", "vocab.txt")
_TOKENIZER_JSON = ("tokenizer*.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
# of models that see pictures, too: the part that reads text alone
_TEXT_WITHIN = {"qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}


def component(path: str | Path, *names: str) -> Path:
    """The folder of a component: `path`/name for the first of `names` that exists, else `path` itself.

    Raises FileNotFoundError when neither holds a config.json, and OtherForm for weights in another form.
    """
    root = Path(path).expanduser()
    for folder in [*(root / name for name in names), root]:
        if (folder / "config.json").is_file():
            check_form(folder, names)
            return folder
    check_path(root, names)
    found = f"holds no config.json, neither itself nor in {' or '.join(names)}/" if root.is_dir() else "does not exist"
    raise FileNotFoundError(
        f"{root} {found}. Give a local Diffusers folder; nothing is downloaded. (A dry run needs its config.json files "
        f"alone.)"
    )


def pipeline_of(transformer: Path) -> Path:
    """The folder of the pipeline that a transformer is one of; of weights that lie alone, their own."""
    return transformer.parent if transformer.name in ("transformer", "transformer_2") else transformer


def tokenizer_of(text_encoder: Path, name: str = "tokenizer") -> Path:
    """The tokenizer's folder: beside that of its encoder, or the same."""
    beside = text_encoder.parent / name
    return beside if beside.is_dir() else text_encoder


def check_tokenizer(folder: Path) -> None:
    """Raises FileNotFoundError for a folder without any file of a tokenizer, ValueError for one that is damaged."""
    if not any(folder.glob("tokenizer*")) and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer, and none lies beside it. Download the tokenizers of the pipeline, too."
        )
    _read_tokenizer(folder)


def _read_tokenizer(folder: Path) -> None:
    """Raises ValueError for a JSON file that is cut off; Transformers' error names none."""
    for file in (file for pattern in _TOKENIZER_JSON for file in sorted(folder.glob(pattern))):
        read_json(file)


def text_folder(text: TextConfig) -> Path:
    """The folder of the text encoder of a `path` whose states are the text."""
    assert text.path is not None
    if text.recipe is None or text.recipe.states_parts[0] == "text_encoder":
        return component(text.path, "text_encoder")
    return _part_of_two(text, text.recipe.states_parts[0])


def text_layers(text: TextConfig) -> int:
    """Layers of the encoder whose states are the text; of a T5 its folder says so alone."""
    if text.path is None or (text.recipe is not None and text.recipe.states != "t5"):
        return text.num_layers
    fields = read_json(text_folder(text) / "config.json")
    return int(fields.get("num_layers", 8 if text_type(fields) == "umt5" else 6))  # defaults of Transformers


def second_text_folder(text: TextConfig) -> Path:
    """The folder of the second encoder of a `path`. Raises FileNotFoundError where the pipeline has none."""
    assert text.recipe is not None
    return _part_of_two(text, text.recipe.second_parts[0])


def _part_of_two(text: TextConfig, part: str) -> Path:
    folder = Path(text.path or "").expanduser() / part
    if not (folder / "config.json").is_file():
        check_path(folder.parent, [part])
        raise FileNotFoundError(
            f"{folder}/config.json does not exist; model.text.kind {text.kind} needs both text encoders of the "
            f"pipeline. Download {' and '.join(f'{name}/' for name in _second_folders(text))}, too."
        )
    return folder


def _second_folders(text: TextConfig) -> tuple[str, ...]:
    """What a pipeline of two text encoders has beside text_encoder/ and tokenizer/."""
    assert text.recipe is not None
    names = (*text.recipe.states_parts, *text.recipe.second_parts)
    return tuple(name for name in dict.fromkeys(names) if name not in ("text_encoder", "tokenizer"))


def text_parts(text: TextConfig) -> dict[str, Path]:
    """Part of a pipeline -> the folder of it, for every part that the text encoders of a `path` are made from."""
    folder = text_folder(text)
    if text.recipe is None:
        return {"text_encoder": folder, "tokenizer": tokenizer_of(folder)}
    found: dict[str, Path] = {}
    for parts, encoder in ((text.recipe.states_parts, folder), (text.recipe.second_parts, second_text_folder(text))):
        found |= {parts[0]: encoder, parts[1]: tokenizer_of(encoder, parts[1])}
    if vision := text.recipe.vision:
        found[vision.encoder] = vision_folder(text)
    for seen in (text.recipe.picture, text.recipe.vision):
        if seen is None:
            continue
        prepares = folder.parent / seen.processor
        if not (prepares / "preprocessor_config.json").is_file():
            raise FileNotFoundError(
                f"{prepares}/preprocessor_config.json does not exist; model.text.kind {text.kind} shows first frames "
                f"to its encoder. Download {prepares.name}/, too."
            )
        found[seen.processor] = prepares
    return found


def vision_folder(text: TextConfig) -> Path:
    """The folder of the encoder of a `path` that sees first frames alone. Raises FileNotFoundError where the pipeline
    has none."""
    assert text.recipe is not None and text.recipe.vision is not None
    folder = Path(text.path or "").expanduser() / text.recipe.vision.encoder
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}/config.json does not exist; model.text.kind {text.kind} shows first frames to an encoder of "
            f"its own. Download {folder.name}/, too, or set the kind of a pipeline that has none."
        )
    return folder


def encoder_folders(text: TextConfig) -> list[Path]:
    """The folders of all encoders of a `path`."""
    if text.recipe is None:
        return [text_folder(text)]
    seen = [vision_folder(text)] if text.recipe.vision else []
    return [text_folder(text), second_text_folder(text), *seen]


def dit_config(fields: Json, base: DiTConfig, where: str) -> AnyDiT:
    """`base` with the numbers of a transformer's config.json, in the settings of the folder's own family. A key that is
    not there is meant with its class's default.

    Raises ValueError for a class that no family has, for a variant that we do not compute, and for a key that is
    missing and has no default.
    """
    classes = {family.diffusers_class: family for family in FAMILIES.values()}
    name = class_of(fields)
    if name not in classes:
        raise ValueError(f"{where} is a {name}; known are {' and '.join(classes)}.")
    family = classes[name]
    fields = {**family.class_defaults, **fields}
    for key, value in family.fixed_fields.items():
        if fields.get(key, value) != value:
            raise ValueError(f"{where} has {key} {fields[key]!r}; only {value!r} is supported.")
    known = {field.name for field in dataclasses.fields(base)} - {"architecture"}
    values = {f.name: getattr(base, f.name) for f in dataclasses.fields(family.config) if f.name in known}
    values |= {field: fields[key] for field, key in family.key_map.items() if fields.get(key) is not None}
    if missing := [key for field, key in family.key_map.items() if fields.get(key) is None and field != "out_channels"]:
        raise ValueError(f"{where} has no {missing[0]}, and {name} no default of it. Copy its config.json again.")
    if fields.get(family.key_map["out_channels"]) is None:
        values["out_channels"] = values["in_channels"]
    values |= family.read_rest(fields, values)
    return cast(AnyDiT, family.config(**values))


def class_of(fields: Json) -> str | None:
    """The class that a config.json names: Diffusers' way, or that of Transformers for one of neither."""
    found: str | None = fields.get("_class_name") or next(iter(fields.get("architectures") or []), None)
    return found


def dit_json(config: DiTConfig) -> dict[str, object]:
    """The config.json of the published class with the same parameters; `dit_config` reads it back."""
    family = FAMILIES[config.architecture]
    name = family.diffusers_class
    fields: dict[str, object] = {"architectures": [name]} if family.own_code else {"_class_name": name}
    fields |= family.fixed_fields
    fields |= {key: getattr(config, field) for field, key in family.key_map.items()}
    return fields | family.write_rest(config)


def vae_numbers(fields: Json, where: str) -> tuple[int, tuple[int, int, int]]:
    """(latent channels, strides over time, height, width) of a VAE's config.json."""
    name = class_of(fields)
    if name not in VAE_CLASSES:
        raise ValueError(f"{where} is a {name}; known video autoencoders are {', '.join(VAE_CLASSES)}.")
    return VAE_CLASSES[name].numbers(fields)


def tiling_of(vae: VAEConfig) -> Tiling:
    """How this autoencoder cuts clips; of one in a folder by its config.json."""
    if vae.kind == "haar":
        return Tiling()
    assert vae.path is not None
    return tiling_by(read_json(component(vae.path, "vae") / "config.json"), vae)


def tiling_by(fields: Json, vae: VAEConfig) -> Tiling:
    """The same by the fields of its config.json. With a patch (Wan 2.2) Diffusers counts tiles in patched pixels."""
    kind = VAE_CLASSES[class_of(fields) or ""]
    chunk, segments = kind.chunk(fields), kind.segments or (0, 0)
    if chunk:
        return Tiling(frames=chunk, frame_stride=chunk, shared=0)
    over_time = Tiling(frames=segments[0], frame_stride=segments[1])
    if not vae.tiling:
        return over_time
    (height, width), (down, across) = vae.tile_sample_min, vae.tile_sample_stride
    return replace(
        over_time,
        height=height,
        width=width,
        height_stride=down,
        width_stride=across,
        scale=fields.get("patch_size") or 1 if kind.cuts_patches else 1,
    )


def needs_by_area(vae: VAEConfig) -> bool:
    """Whether what an autoencoder needs of memory for a clip grows with its area: not where the clip is cut or taken as
    pictures, nor with a mask of the square of it."""
    if vae.tiling:
        return False
    if vae.path is None:
        return True
    name = class_of(read_json(component(vae.path, "vae") / "config.json"))
    return name not in VAE_CLASSES or not (VAE_CLASSES[name].of_pictures or VAE_CLASSES[name].masks_clip)


def decodes_in_time(vae: VAEConfig) -> bool:
    """Whether the decoder of an autoencoder gets a time, and its latents noise."""
    if vae.path is None:
        return False
    fields = read_json(component(vae.path, "vae") / "config.json")
    name = class_of(fields)
    return name in VAE_CLASSES and VAE_CLASSES[name].decodes_in_time(fields)


def resolve(model: ModelConfig) -> tuple[ModelConfig, Geometry]:
    """Concrete numbers of a model: what its folders say, and what follows from one module for the next.

    Without dit.path the transformer's latent channels and text width are those of the VAE and the text encoder; with it
    they must agree, or ValueError says which two folders do not fit. Raises FileNotFoundError for one that is missing.
    """
    with _named_on_the_hub(model):
        return _resolve(model)


def resolved(model: ModelConfig) -> ModelConfig | None:
    """The model of `resolve`; None where a folder cannot be read, which a start refuses with the reason."""
    try:
        return resolve(model)[0]
    except (OSError, ValueError):
        return None


@contextmanager
def _named_on_the_hub(model: ModelConfig) -> Iterator[None]:
    """Errors of files that are missing, or in another form, say how to get them, where the model says from where."""
    try:
        yield
    except LiesBelow:
        raise
    except (FileNotFoundError, OtherForm) as error:
        paths = [model.dit.path, model.vae.path, model.text.path, model.image.path if model.image else None]
        given = [path for path in paths if path]
        if not (model.hub and given):
            raise
        kind = OtherForm if isinstance(error, OtherForm) else FileNotFoundError
        raise kind(f"{error} To get it: {how_to_get(model.hub, given)}") from error


def _resolve(model: ModelConfig) -> tuple[ModelConfig, Geometry]:
    text = _resolve_text(model.text) if model.text.path else model.text
    vae = model.vae
    if vae.kind == "diffusers":
        assert vae.path is not None
        folder = component(vae.path, "vae")
        fields = read_json(folder / "config.json")
        channels, stride = vae_numbers(fields, str(folder))
        chunk = VAE_CLASSES[class_of(fields) or ""].chunk(fields)
        vae = replace(vae, channels=channels, temporal=stride[0], spatial=stride[1])
    else:
        stride, chunk = (vae.temporal, vae.spatial, vae.spatial), 0
    image = _resolve_image(model.image) if model.image else None
    dit = _resolve_dit(model.dit, vae.channels, stride, text.d_model, image.d_model if image else 0)
    if dit.image_rows and dit.image_rows != (made := 2 * image.tokens if image else 0):
        raise ValueError(
            f"model.dit.pos_embed_seq_len is {dit.image_rows}, and model.image makes {made} rows of a clip's first and "
            f"last frame. Set it to {made}, or use the image encoder of the same pipeline."
        )
    _check_parts(dit, vae, text)
    text = _with_picture(dit, text)
    dit = _with_vision(_with_glyphs(_with_pooled(dit, text), text), text)
    geometry = Geometry(vae_stride=stride, patch=dit.patch, chunk=chunk)
    return replace(model, dit=dit, vae=vae, text=text, image=image), geometry


def _check_parts(dit: AnyDiT, vae: VAEConfig, text: TextConfig) -> None:
    """Raises ValueError for an autoencoder or a text encoder that the weights in `dit.path` were not trained with.

    Numbers do not tell them apart: the latents of four families have 16 channels, and T5-XXL, UMT5-XXL and Llama are
    equally wide. What lies in the transformer's own pipeline is right, whatever it is: exports hold what was trained
    with.
    """
    if not dit.path:
        return
    own, family = component(dit.path, dit.part), FAMILIES[dit.architecture]
    if vae.path and not _in_pipeline_of(own, dit.part, folder := component(vae.path, "vae"), "vae"):
        name, wanted = class_of(read_json(folder / "config.json")), [one.name for one in (family.vae, *family.own_vaes)]
        if name not in wanted:
            raise ValueError(
                f"{folder} is a {name}, and the weights of {own} were trained on latents of {' or '.join(wanted)}. Set "
                f"model.vae.path to the VAE of the same pipeline."
            )
    if text.path and not _in_pipeline_of(own, dit.part, folder := text_folder(text), folder.name):
        if family.texts and text.kind not in family.texts:
            raise ValueError(
                f"model.text.kind is {text.kind}, and the weights of {own} were trained on the text of two encoders. "
                f"Set it to {' or '.join(family.texts)}, and model.text.path to the same pipeline."
            )
        kind, types = text_type(read_json(folder / "config.json")), family.text_types
        if kind not in types:
            raise ValueError(
                f"{folder} is a {kind} encoder, and the weights of {own} were trained on text of a {types[0]} one. Set "
                f"model.text.path to the text encoder of the same pipeline."
            )


def _in_pipeline_of(transformer: Path, part: str, folder: Path, name: str) -> bool:
    """Whether a folder is the part `name` of the pipeline whose part `part` is the transformer."""
    return (transformer.name, folder.name) == (part, name) and transformer.parent.resolve() == folder.parent.resolve()


def text_type(fields: Json) -> str:
    """What reads text in the model of a config.json, as Transformers names its type."""
    kind = str(fields.get("model_type"))
    return _TEXT_WITHIN.get(kind, kind)


def _resolve_text(text: TextConfig) -> TextConfig:
    folder, recipe = text_folder(text), text.recipe
    fields = read_json(folder / "config.json")
    kind = text_type(fields)
    if recipe is None:
        if "d_model" not in fields:
            others = [name for name, other in TEXT_RECIPES.items() if kind in other.first_encoders]
            hint = f"; set model.text.kind {others[0]} for a pipeline with two text encoders" if others else ""
            raise ValueError(f"{folder} is a {kind} encoder; T5 and UMT5 encoders are supported{hint}.")
        return replace(text, d_model=fields["d_model"])
    if kind != recipe.states:
        raise ValueError(
            f"{folder} is a {kind} encoder; model.text.kind {text.kind} needs the {recipe.states} of its own pipeline."
        )
    second = second_text_folder(text)
    clip = read_json(second / "config.json")
    if recipe.second == "connectors":
        return _resolve_connectors(text, fields, clip, str(second))
    wanted, called = ("t5", "a ByT5") if recipe.glyph_rows else ("clip", "CLIP's")
    if not str(clip.get("model_type")).startswith(wanted):
        found = clip.get("model_type")
        raise ValueError(f"{second} is a {found} encoder; model.text.kind {text.kind} needs {called} there.")
    width = clip.get("d_model", 512) if recipe.glyph_rows else clip.get("text_config", clip).get("hidden_size", 512)
    text = _resolve_vision(replace(text, pooled_dim=width)) if recipe.vision else replace(text, pooled_dim=width)
    if recipe.states == "t5":
        return replace(text, d_model=fields["d_model"])
    if recipe.picture:
        text_parts(text)  # raises for a missing one
        text, fields = _resolve_picture(text, fields, str(folder)), fields.get("text_config", {})
    if fields.get("model_type") in _TEXT_WITHIN:
        fields = fields.get("text_config", fields)  # older files have its numbers among the others
    most = fields.get("max_position_embeddings", 2048)
    if text.encoded_tokens > most:
        raise ValueError(
            f"model.text.max_length {text.max_length} and the {text.encoded_tokens - text.max_length} tokens before it "
            f"are more than the {most} that {folder} takes. Make it shorter."
        )
    return replace(  # numbers that are Llama's defaults may not stand in a LLaVA's config.json
        text,
        d_model=fields.get("hidden_size", 4096),
        num_layers=fields.get("num_hidden_layers", 32) - recipe.skipped_layers,
        num_heads=fields.get("num_attention_heads", 32),
    )


def _resolve_connectors(text: TextConfig, fields: Json, connectors: Json, where: str) -> TextConfig:
    """The text config with the numbers of a decoder, and the width of what connectors make of its layers. Raises
    ValueError for connectors of another decoder, and for rows that they cannot fill."""
    fields = fields.get("text_config", fields)
    layers, width = fields.get("num_hidden_layers", 26), fields.get("hidden_size", 2304)  # defaults of Transformers
    found = connectors.get("caption_channels", 3840), connectors.get("text_proj_in_factor", 49)
    if connectors.get("_class_name") != "LTX2TextConnectors" or found != (width, layers + 1):
        raise ValueError(
            f"{where} is a {connectors.get('_class_name')} for {found[1]} states of width {found[0]}, and "
            f"text_encoder/ has {layers + 1} of width {width}. Give the folder of one pipeline."
        )
    if connectors.get("per_modality_projections"):
        raise ValueError(f"{where} has per_modality_projections, as LTX-2.3; that of LTX-2 is computed.")
    registers, window = connectors.get("video_connector_num_learnable_registers", 128), fields.get("sliding_window")
    if not registers or text.max_length % registers:
        raise ValueError(
            f"model.text.max_length {text.max_length} is not a multiple of the {registers} registers of {where}, which "
            f"stand after a caption. Its weights were trained with 1024."
        )
    if window and text.max_length > window:
        raise ValueError(
            f"model.text.max_length {text.max_length} is more than the {window} tokens that layers of text_encoder/ "
            f"see. Make it shorter."
        )
    return replace(text, d_model=width, num_layers=layers, num_heads=fields.get("num_attention_heads", 8))


def _resolve_picture(text: TextConfig, fields: Json, where: str) -> TextConfig:
    """The text config with the rows that a LLaVA's vision tower makes of a picture. Raises ValueError for a kind that
    is not computed."""
    vision, layer = fields.get("vision_config", {}), fields.get("vision_feature_layer", -2)
    kind = vision.get("model_type", "clip_vision_model")
    select = fields.get("vision_feature_select_strategy", "default")
    if kind != "clip_vision_model" or select != "default" or not isinstance(layer, int):
        raise ValueError(
            f"{where} sees pictures by a {kind}, layer {layer}, {select}; CLIP's vision tower with one layer and "
            f"without its class token is supported."
        )
    return replace(text, picture_tokens=(vision.get("image_size", 336) // vision.get("patch_size", 14)) ** 2)


def _resolve_vision(text: TextConfig) -> TextConfig:
    """The text config with the rows that a SigLIP makes of a picture, and their width."""
    folder = vision_folder(text)
    text_parts(text)  # raises for a missing one
    fields = read_json(folder / "config.json")
    kind = str(fields.get("model_type"))
    if not kind.startswith("siglip_vision"):
        raise ValueError(
            f"{folder} is a {kind} encoder; model.text.kind {text.kind} needs a SigLIP's vision tower there."
        )
    side = fields.get("image_size", 224) // fields.get("patch_size", 16)
    return replace(text, picture_tokens=side**2, picture_dim=fields.get("hidden_size", 768))


def _with_pooled(dit: AnyDiT, text: TextConfig) -> AnyDiT:
    if not text.pooled:
        return dit
    if not dit.path:
        return dit.with_pooled(text.pooled)
    if dit.with_pooled(text.pooled) != dit:
        raise ValueError(
            f"{dit.path} expects pooled text of width {dit.pooled_width}, model.text makes {text.pooled}. "
            f"Use both text encoders of the same pipeline."
        )
    return dit


def _with_glyphs(dit: AnyDiT, text: TextConfig) -> AnyDiT:
    if not text.glyph_dim:
        return dit
    return _as_read(
        dit, dit.with_glyphs(text.glyph_dim), f"states of glyphs of another width than the {text.glyph_dim}"
    )


def _with_vision(dit: AnyDiT, text: TextConfig) -> AnyDiT:
    if not text.vision_dim:
        return dit
    rows = f"rows of the first frame of another width than the {text.vision_dim}"
    return _as_read(dit, dit.with_vision(text.vision_dim), rows)


def _as_read(dit: AnyDiT, fitted: AnyDiT, expected: str) -> AnyDiT:
    """The settings that fit the encoders. Raises ValueError where a folder's weights are others."""
    if dit.path and fitted != dit:
        raise ValueError(
            f"{dit.path} expects {expected} that model.text makes. Use the text encoders of the same pipeline."
        )
    return fitted


def _with_picture(dit: AnyDiT, text: TextConfig) -> TextConfig:
    """The text config with as many rows of the first frame as the transformer was trained on. Raises ValueError where
    only one of them knows of it."""
    if text.sees_picture and not dit.picture_every:
        raise ValueError(
            f"model.text.kind {text.kind} shows the first frame of a clip to its encoder, and {_named(dit)} takes none "
            f"by its text. Use the text encoders of its own pipeline."
        )
    if dit.picture_every and not text.sees_picture:
        kinds = [name for name, recipe in FAMILIES[dit.architecture].texts.items() if recipe.sees_picture]
        raise ValueError(
            f"{_named(dit)} starts from the first frame of a clip and sees it in the text, too, which model.text.kind "
            f"{text.kind} does not show. Set model.text.kind to {' or '.join(kinds)}."
        )
    return replace(text, picture_every=dit.picture_every)


def _named(dit: AnyDiT) -> str:
    of = f"of {component(dit.path, dit.part)}" if dit.path else f"of architecture {dit.architecture}"
    return f"the transformer {of}"


def _resolve_image(image: ImageConfig) -> ImageConfig:
    if not image.path:
        return image
    folder = component(image.path, "image_encoder")
    fields = read_json(folder / "config.json")
    if not str(fields.get("model_type")).startswith("clip"):
        raise ValueError(f"{folder} is a {fields.get('model_type')} encoder; CLIP's vision towers are supported.")
    fields = fields.get("vision_config", fields)
    return replace(
        image,
        size=fields.get("image_size", 224),
        patch=fields.get("patch_size", 32),
        d_model=fields.get("hidden_size", 768),
        num_layers=fields.get("num_hidden_layers", 12),
        num_heads=fields.get("num_attention_heads", 12),
    )


def _resolve_dit(dit: AnyDiT, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> AnyDiT:
    if not dit.path:
        return dit.fitted(channels, stride, text_dim, image_dim)
    folder = component(dit.path, dit.part)
    index = pipeline_of(folder) / "model_index.json"
    named = read_json(index) if index.is_file() else {}
    _check_experts(dit, folder, named)
    dit = dit.of_pipeline(named)
    told = dit
    dit = dit_config(read_json(folder / "config.json"), dit, str(folder))
    for expert in dit.experts[1:]:
        other = component(dit.path or "", expert.part)
        if dit_config(read_json(other / "config.json"), told, str(other)) != dit:
            raise ValueError(f"{other} has other numbers than {folder}. Two experts are trained together if alike.")
    if dit.image_width and not image_dim:
        raise ValueError(
            f"{folder} listens to image embeddings of width {dit.image_width}, and there is no model.image to "
            f"make them. Set model.image.path to the folder of the same pipeline."
        )
    wanted = dit.fitted(channels, stride, text_dim, image_dim)
    if (dit.in_channels, dit.out_channels) != (wanted.in_channels, channels):
        raise ValueError(
            f"{folder} takes {dit.in_channels} and gives {dit.out_channels} latent channels, model.vae "
            f"makes {channels}. Use the VAE of the same pipeline."
        )
    if dit.image_width != image_dim:
        raise ValueError(
            f"{folder} expects image embeddings of width {dit.image_width}, model.image makes {image_dim}. "
            f"Use the image encoder of the same pipeline, or none if it has none."
        )
    if dit.text_dim != text_dim:
        raise ValueError(
            f"{folder} expects text embeddings of width {dit.text_dim}, model.text makes {text_dim}. "
            f"Use the text encoder of the same pipeline."
        )
    return wanted


def _check_experts(dit: AnyDiT, folder: Path, index: Json) -> None:
    """Raises ValueError for one of two transformers that is not the one of the settings. That there are two is said by
    the pipeline's `index` where the other was not downloaded."""
    pipeline = pipeline_of(folder)
    two = (pipeline / "transformer_2").is_dir() or index.get("boundary_ratio") is not None
    if two and not dit.two_experts:
        raise ValueError(
            f"{pipeline} is of two transformers, for high and for low noise. Set model.dit.expert to high, low or both."
        )
    if len(dit.experts) > 1 and not (Path(dit.path or "").expanduser() / "transformer_2").is_dir():
        raise ValueError(
            f"{dit.path} has no transformer_2/, and model.dit.expert is both. Give the folder of the whole pipeline, "
            f"or train the one it holds."
        )
    if two and folder != pipeline / dit.part:
        raise ValueError(
            f"{folder} is the transformer for the other noise levels than those of model.dit.expert {dit.expert_name}, "
            f"which are those of {dit.part}/. Set model.dit.path to {pipeline}."
        )


def check_weights(model: ModelConfig) -> None:
    """Raises FileNotFoundError or ValueError, one sentence, unless the weights of every folder that a resolved model
    names are there and whole, as far as headers say, and JSON files of tokenizers."""
    with _named_on_the_hub(model):
        for folder in dict.fromkeys(_part_folders(model)):
            check_files(folder)
        for part, folder in text_parts(model.text).items() if model.text.path else ():
            if part.startswith("tokenizer"):
                _read_tokenizer(folder)


def _part_folders(model: ModelConfig) -> list[Path]:
    """The folders of all modules of a resolved model that have one."""
    folders = [component(model.dit.path, one.part) for one in model.dit.experts] if model.dit.path else []
    folders += [component(model.vae.path, "vae")] if model.vae.path else []
    if model.text.path:
        folders += encoder_folders(model.text)
    folders += [component(model.image.path, "image_encoder")] if model.image and model.image.path else []
    return folders
