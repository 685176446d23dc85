"""Diffusers folders as far as their JSON files say: where a component lies and what its numbers are. No torch.

A pipeline folder holds `model_index.json` and one folder per component (`transformer/`, `vae/`, `text_encoder/`,
`tokenizer/`, `scheduler/`); a component's own folder may be named as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ops.config import DiTConfig, ModelConfig
from ops.geometry import Geometry

TRANSFORMER_CLASSES = {"wan": "WanTransformer3DModel", "hunyuan": "HunyuanVideoTransformer3DModel"}
VAE_CLASSES = ("AutoencoderKLWan", "AutoencoderKLHunyuanVideo", "AutoencoderKLCogVideoX")

# DiTConfig field -> key of the transformer's config.json
_WAN_KEYS = {
    "num_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "text_dim": "text_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "cross_attn_norm": "cross_attn_norm",
    "eps": "eps",
}
_HUNYUAN_KEYS = {
    "num_layers": "num_layers",
    "num_single_layers": "num_single_layers",
    "num_heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "text_dim": "text_embed_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "rope_theta": "rope_theta",
    "num_refiner_layers": "num_refiner_layers",
    "guidance_embeds": "guidance_embeds",
}
# What our blocks compute; a folder that says otherwise would load and then be wrong.
_WAN_FIXED: dict[str, Any] = {
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
_HUNYUAN_FIXED: dict[str, Any] = {"qk_norm": "rms_norm", "image_condition_type": None}


def component(path: str | Path, *names: str) -> Path:
    """The folder of a component: `path`/name for the first of `names` that exists, else `path` itself.

    Raises FileNotFoundError when neither holds a config.json.
    """
    root = Path(path).expanduser()
    for folder in [*(root / name for name in names), root]:
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        f"{root} holds no config.json, neither itself nor in {' or '.join(names)}/. "
        f"Give a local Diffusers folder; nothing is downloaded."
    )


def tokenizer_of(text_encoder: Path) -> Path:
    """The tokenizer's folder: beside that of its encoder, or the same."""
    beside = text_encoder.parent / "tokenizer"
    return beside if beside.is_dir() else text_encoder


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises ValueError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; a JSON object is expected.")
    return value


def dit_config(fields: Mapping[str, Any], base: DiTConfig, where: str) -> DiTConfig:
    """`base` with the numbers of a transformer's config.json. Raises ValueError for a variant we do not compute."""
    name = fields.get("_class_name")
    architectures = {value: key for key, value in TRANSFORMER_CLASSES.items()}
    if name not in architectures:
        raise ValueError(f"{where} is a {name}; known are {' and '.join(architectures)}.")
    architecture = architectures[name]
    keys, fixed = (_WAN_KEYS, _WAN_FIXED) if architecture == "wan" else (_HUNYUAN_KEYS, _HUNYUAN_FIXED)
    for key, value in fixed.items():
        if fields.get(key, value) != value:
            raise ValueError(f"{where} has {key} {fields[key]!r}; only {value!r} is supported (text to video).")
    values: dict[str, Any] = {field: fields[key] for field, key in keys.items() if fields.get(key) is not None}
    values.setdefault("out_channels", values.get("in_channels", base.in_channels))
    if architecture == "wan":
        values["patch"] = tuple(fields.get("patch_size", (1, 2, 2)))
    else:
        spatial = fields.get("patch_size", 2)
        values["patch"] = (fields.get("patch_size_t", 1), spatial, spatial)
        pooled, axes = fields.get("pooled_projection_dim", 768), tuple(fields.get("rope_axes_dim", (16, 56, 56)))
        values["pooled_dim"] = 0 if pooled == values.get("text_dim", base.text_dim) else pooled
        values["rope_axes"] = None if axes == _default_split(values["head_dim"]) else axes
        values["ffn_dim"] = int(fields.get("mlp_ratio", 4.0) * values["num_heads"] * values["head_dim"])
    return replace(base, architecture=architecture, **values)  # type: ignore[arg-type]


def dit_json(config: DiTConfig) -> dict[str, Any]:
    """The config.json of the Diffusers class with the same parameters; `dit_config` reads it back."""
    keys, fixed = (_WAN_KEYS, _WAN_FIXED) if config.architecture == "wan" else (_HUNYUAN_KEYS, _HUNYUAN_FIXED)
    fields = {"_class_name": TRANSFORMER_CLASSES[config.architecture], **fixed}
    fields |= {key: getattr(config, field) for field, key in keys.items()}
    if config.architecture == "wan":
        return fields | {"patch_size": list(config.patch), "rope_max_seq_len": 1024}
    patch_t, patch_h, patch_w = config.patch
    if patch_h != patch_w:
        raise ValueError(f"patch {config.patch}: HunyuanVideo's config knows one spatial patch size. Use equal ones.")
    return fields | {
        "patch_size": patch_h,
        "patch_size_t": patch_t,
        "mlp_ratio": config.ffn_dim / config.dim,
        "pooled_projection_dim": config.pooled_dim or config.text_dim,
        "rope_axes_dim": list(config.rope_split),
    }


def _default_split(head_dim: int) -> tuple[int, int, int]:
    return DiTConfig(architecture="hunyuan", head_dim=head_dim).rope_split


def vae_numbers(fields: Mapping[str, Any], where: str) -> tuple[int, tuple[int, int, int]]:
    """(latent channels, strides over time, height, width) of a VAE's config.json."""
    name = fields.get("_class_name")
    if name == "AutoencoderKLWan":
        # Folders of before Diffusers 0.34 carry no scale factors; the layer counts say the same.
        down = fields.get("temperal_downsample", [False, True, True])
        stride_t = fields.get("scale_factor_temporal") or 2 ** sum(map(bool, down))
        stride_s = fields.get("scale_factor_spatial") or 2 ** len(down) * (fields.get("patch_size") or 1)
        return fields.get("z_dim", 16), (stride_t, stride_s, stride_s)
    if name == "AutoencoderKLHunyuanVideo":
        stride_s = fields.get("spatial_compression_ratio", 8)
        return fields.get("latent_channels", 16), (fields.get("temporal_compression_ratio", 4), stride_s, stride_s)
    if name == "AutoencoderKLCogVideoX":
        stride_s = 2 ** (len(fields.get("block_out_channels", (128, 256, 256, 512))) - 1)
        stride_t = int(fields.get("temporal_compression_ratio", 4))
        return fields.get("latent_channels", 16), (stride_t, stride_s, stride_s)
    raise ValueError(f"{where} is a {name}; known video autoencoders are {', '.join(VAE_CLASSES)}.")


def resolve(model: ModelConfig) -> tuple[ModelConfig, Geometry]:
    """Concrete numbers of a model: what its folders say, and what follows from one module for the next.

    Without dit.path the transformer's latent channels and text width are those of the VAE and the text encoder; with it
    they must agree, or ValueError says which two folders do not fit.
    """
    text = model.text
    if text.path:
        folder = component(text.path, "text_encoder")
        fields = read_json(folder / "config.json")
        if "d_model" not in fields:
            raise ValueError(f"{folder} is a {fields.get('model_type')} encoder; T5 and UMT5 encoders are supported.")
        text = replace(text, d_model=fields["d_model"])
    vae = model.vae
    if vae.kind == "diffusers":
        assert vae.path is not None
        folder = component(vae.path, "vae")
        channels, stride = vae_numbers(read_json(folder / "config.json"), str(folder))
        vae = replace(vae, channels=channels, temporal=stride[0], spatial=stride[1])
    else:
        stride = (vae.temporal, vae.spatial, vae.spatial)
    dit = _resolve_dit(model.dit, vae.channels, text.d_model)
    return replace(model, dit=dit, vae=vae, text=text), Geometry(vae_stride=stride, patch=dit.patch)


def _resolve_dit(dit: DiTConfig, channels: int, text_dim: int) -> DiTConfig:
    if not dit.path:
        return replace(dit, in_channels=channels, out_channels=channels, text_dim=text_dim)
    folder = component(dit.path, "transformer")
    dit = dit_config(read_json(folder / "config.json"), dit, str(folder))
    if (dit.in_channels, dit.out_channels) != (channels, channels):
        raise ValueError(
            f"{folder} takes {dit.in_channels} and gives {dit.out_channels} latent channels, model.vae "
            f"makes {channels}. Use the VAE of the same pipeline."
        )
    if dit.text_dim != text_dim:
        raise ValueError(
            f"{folder} expects text embeddings of width {dit.text_dim}, model.text makes {text_dim}. "
            f"Use the text encoder of the same pipeline."
        )
    return dit


def check_safetensors(folder: Path) -> None:
    """Raises ValueError for a component without safetensors weights: those of a pickle (`.bin`) are never read."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{suffix}"))
    if not pickles:
        raise ValueError(f"{folder} holds no weights (*.safetensors). Download them whole.")
    raise ValueError(
        f"{folder} holds its weights as {pickles[0]}, a pickle, which Heddle does not open. Load it once "
        f"with its own class in a safe place and save it by "
        f"save_pretrained(FOLDER, safe_serialization=True), or download the safetensors files."
    )
