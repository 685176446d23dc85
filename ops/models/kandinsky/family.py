"""Kandinsky 5.0, text to video: Diffusers' names and numbers, and how they differ from other families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ops.flow.schedulers import Scheduler
from ops.models.base.encoders import CLIP_L, QWEN2_5_VL_7B
from ops.models.base.family import (
    HUNYUAN_VAE,
    Family,
    Json,
    LoraNames,
    ParitySample,
    PipelineFiles,
    PublishedParts,
    PublishedUse,
    TextRecipe,
    TrainingRecipe,
    shift_of,
)
from ops.models.kandinsky.config import KandinskyConfig, default_axes

if TYPE_CHECKING:
    from torch import nn

    from ops.config import FlowConfig

# As its authors wrote it, "promt" and "scren" with it: 129 tokens stand before the caption. Kandinsky5T2VPipeline of
# Diffusers 0.42 says "prompt", of one token less, which the weights have not seen.
_TEXT = TextRecipe(
    states="qwen2_5_vl_text",
    template="\n".join(
        [
            "<|im_start|>system\nYou are a promt engineer. Describe the video in detail.",
            "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the "
            "objects.",
            "Describe the location of the video, main characters or objects and their action.",
            "Describe the dynamism of the video and presented actions.",
            "Name the visual style of the video: whether it is a professional footage, user generated content, some "
            "kind of animation, video game or scren content.",
            "Describe the visual effects, postprocessing and transitions if they are presented in the video.",
            "Pay attention to the order of key actions shown in the scene.<|im_end|>",
            "<|im_start|>user\n{}<|im_end|>",
        ]
    ),
    crop=129,
    final_norm=True,
    cleaned=True,
    template_is_set=True,
    note=(
        "the prompt is as the authors of Kandinsky 5.0 wrote it; before a call of Kandinsky5T2VPipeline set its "
        "prompt_template to prompt_template.replace('a prompt engineer', 'a promt engineer'), and its "
        "prompt_template_encode_start_idx to 129; call it with max_sequence_length=model.text.max_length, 256 as its "
        "authors have it."
    ),
)
_NEGATIVE = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, deformed, "
    "walking backwards"
)


def _model() -> type[nn.Module]:
    from ops.models.kandinsky.model import KandinskyDiT

    return KandinskyDiT


def _read_rest(fields: Json, known: Json) -> dict[str, object]:
    """Raises ValueError for weights that attend sparsely, and for heads that do not fill the width."""
    if fields["attention_type"] == "nabla":
        raise ValueError(
            "attention_type is nabla: sparse attention by a map of blocks (models of 10 s, and HD) is not computed. "
            "Take a folder for clips of 5 s whose transformer/config.json says regular."
        )
    axes, width = tuple(fields["axes_dims"]), fields["model_dim"]
    head_dim = sum(axes)
    if width % head_dim:
        raise ValueError(f"model_dim {width} is no multiple of a head's {head_dim}, the sum of axes_dims {list(axes)}.")
    pooled = fields["in_text_dim2"]
    return {
        "num_heads": width // head_dim,
        "head_dim": head_dim,
        "patch": tuple(fields["patch_size"]),
        "pooled_dim": 0 if pooled == known["text_dim"] else pooled,
        "rope_axes": None if axes == default_axes(head_dim) else axes,
    }


def _write_rest(config: KandinskyConfig) -> dict[str, object]:
    return {
        "model_dim": config.dim,
        "axes_dims": list(config.rope_split),
        "patch_size": list(config.patch),
        "in_text_dim2": config.pooled_width,
        "attention_type": "regular",
    }


def _scheduler(config: KandinskyConfig, flow: FlowConfig) -> Scheduler:
    """Kandinsky5T2VPipeline passes no sigmas; samples are spaced as FlowMatchEuler spaces them (`config.spacing`)."""
    del config
    return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings={"shift": flow.flow_shift})


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    """Text of both encoders, in true length, up to 256 rows, as its authors' configs have it (Kandinsky5T2VPipeline
    takes up to 512). Raises ValueError for pipelines of other uses."""
    KandinskyConfig().of_pipeline(files.index)
    return TrainingRecipe(text={"kind": "kandinsky", "max_length": 256}, flow=shift_of(files.scheduler))


def _published(index: Json, fields: Json) -> PublishedUse:
    """As Kandinsky5T2VPipeline is called by default; 24 frames per second are those of its example."""
    del index, fields
    return PublishedUse(
        clips={
            "frames": 121,
            "height": 512,
            "width": 768,
            "fps": 24.0,
            "steps": 50,
            "guidance_scale": 5.0,
            "negative_prompt": _NEGATIVE,
        },
    )


def _parity_inputs(config: KandinskyConfig, sample: ParitySample) -> dict[str, object]:
    import torch

    channels, *size = sample.latent.shape
    text, pooled = sample.text, sample.conditions.pooled
    if pooled is None:
        same = config.pooled_width == config.text_dim
        pooled = text.mean(0)[None] if same else torch.zeros(1, config.pooled_width)
    given = torch.zeros(channels + 1, *size) if config.visual_cond else sample.latent[:0]
    grid = [length // patch for length, patch in zip(size, config.patch, strict=True)]
    scale = config.rope_scale(*grid[1:])
    return {
        "hidden_states": torch.cat([sample.latent, given]).movedim(0, -1)[None],
        "encoder_hidden_states": text[None],
        "timestep": sample.timestep,
        "pooled_projections": pooled,
        "visual_rope_pos": [torch.arange(length) for length in grid],
        "text_rope_pos": torch.arange(len(text)),
        "scale_factor": (1.0, scale, scale),
    }


def _unrounded() -> AbstractContextManager[object]:
    """Kandinsky5AttnProcessor rounds queries and keys to bfloat16, whatever it computes in."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Unrounded(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: Sequence[type],
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            if func is torch.Tensor.to and torch.bfloat16 in args[1:]:
                return args[0]
            return func(*args, **(kwargs or {}))

    return Unrounded()


FAMILY = Family(
    config=KandinskyConfig,
    model=_model,
    diffusers_class="Kandinsky5Transformer3DModel",
    pipeline_class=lambda config: "Kandinsky5T2VPipeline",
    needs_vae=True,
    vae=HUNYUAN_VAE,
    texts={"kandinsky": _TEXT},
    missing_parts=("text_encoder_2", "tokenizer_2"),
    missing_note=(
        "Kandinsky5T2VPipeline wants two text encoders; this run trained with one. The transformer, vae and scheduler "
        "load by their own classes; train with model.text.kind kandinsky for a complete pipeline, or give --base."
    ),
    parts=PublishedParts(text={"text_encoder": QWEN2_5_VL_7B, "text_encoder_2": CLIP_L}),
    published=_published,
    recipe=_recipe,
    key_map={
        "num_layers": "num_visual_blocks",
        "num_text_layers": "num_text_blocks",
        "ffn_dim": "ff_dim",
        "time_dim": "time_dim",
        "text_dim": "in_text_dim",
        "in_channels": "in_visual_dim",
        "out_channels": "out_visual_dim",
        "visual_cond": "visual_cond",
    },
    class_defaults={
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 3584,
        "in_text_dim2": 768,
        "time_dim": 512,
        "patch_size": (1, 2, 2),
        "model_dim": 2048,
        "ff_dim": 5120,
        "num_text_blocks": 2,
        "num_visual_blocks": 32,
        "axes_dims": (16, 24, 24),
        "visual_cond": False,
        "attention_type": "regular",
    },
    fixed_fields={},
    read_rest=_read_rest,
    write_rest=_write_rest,
    lora_names=LoraNames(
        blocks=("text_transformer_blocks.", "visual_transformer_blocks."),
        projections=(
            "to_query",
            "to_key",
            "to_value",
            "attention.out_layer",
            "feed_forward.in_layer",
            "feed_forward.out_layer",
        ),
        original={},
    ),
    scheduler=_scheduler,
    passes_sigmas=False,
    parity_inputs=_parity_inputs,
    parity_output=lambda output, sample: output.movedim(-1, 0),
    parity_mode=_unrounded,
)
