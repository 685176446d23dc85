"""The two encoders of `ops.models.text_pair` as their classes make them: by the config.json of their folders, or small
and random."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from ops.models.base.family import TextRecipe
from ops.models.config import TextConfig
from ops.models.folders import second_text_folder, text_folder
from ops.models.text import random_shape
from ops.models.text_pair import glyph_reader_of, recipe_of
from ops.models.text_picture import random_llava

if TYPE_CHECKING:
    from transformers import CLIPTextConfig, LlamaConfig, PreTrainedConfig, Qwen2_5_VLTextConfig

C = TypeVar("C", bound="PreTrainedConfig")

_BYTES = 384  # vocabulary of the tokenizer over bytes
_EOS = 1  # its end of sequence
_SPREAD = 0.3  # standard deviation of random weights: enough for states to depend on the words before them


def pair_skeleton(config: TextConfig) -> tuple[nn.Module, nn.Module]:
    """Both encoders as their classes make them: what a folder's config.json describe, or the random ones."""
    from transformers import CLIPTextModel, LlamaModel, LlavaModel, Qwen2_5_VLTextModel, T5EncoderModel

    first, other = shapes(config) if config.path else random_shapes(config)
    recipe = recipe_of(config)
    kinds = {"t5": T5EncoderModel, "llama": LlamaModel, "llava": LlavaModel, "qwen2_5_vl_text": Qwen2_5_VLTextModel}
    encoder = kinds[recipe.states](first)
    return cut(encoder, recipe), (T5EncoderModel if recipe.second == "byt5" else CLIPTextModel)(other)


def shapes(config: TextConfig) -> tuple[Any, Any]:  # of classes that their files name
    """(of the states' encoder without the layers that the recipe leaves out, of the second one), by the config.json of
    their folders."""
    from transformers import AutoConfig

    first = AutoConfig.from_pretrained(text_folder(config), local_files_only=True)
    if recipe_of(config).picture is None:
        first = getattr(first, "text_config", first)  # of a model that sees pictures, too, the part that reads text
    if skipped := recipe_of(config).skipped_layers:
        add_layers(first, -skipped)
    clip = AutoConfig.from_pretrained(second_text_folder(config), local_files_only=True)
    return first, getattr(clip, "text_config", clip)  # the whole of a CLIP may lie there


def add_layers(shape: PreTrainedConfig, count: int) -> None:
    """`count` more layers, or fewer, of the model that a config describes."""
    text = getattr(shape, "text_config", shape)
    text.num_hidden_layers += count
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [*kinds, *kinds[-1:] * max(count, 0)][: text.num_hidden_layers]


def cut(model: nn.Module, recipe: TextRecipe) -> nn.Module:
    """The model without its final norm, where the recipe leaves that out."""
    if recipe.states == "t5" or recipe.final_norm:
        return model
    language: Any = getattr(model, "language_model", model)  # its norm is of a class, and becomes another
    language.norm = nn.Identity()  # its states go on as they are
    return model


def random_shapes(config: TextConfig) -> tuple[Any, Any]:  # of the classes that the recipe names
    """As `shapes`, of small encoders over bytes."""
    states = recipe_of(config).states
    if recipe_of(config).second == "byt5":
        return _random_qwen(config), random_shape(
            replace(glyph_reader_of(config), num_heads=math.gcd(config.num_heads, config.glyph_dim))
        )
    clip = _random_clip(config)
    if states == "t5":
        return random_shape(config), clip
    if states == "qwen2_5_vl_text":
        return _random_qwen(config), clip
    llama = _random_llama(config)
    return (llama if states == "llama" else random_llava(llama, config, token=_BYTES)), clip


def _random_clip(config: TextConfig) -> CLIPTextConfig:
    from transformers import CLIPTextConfig

    second_heads = math.gcd(config.num_heads, config.pooled)
    return CLIPTextConfig(
        vocab_size=_BYTES,
        hidden_size=config.pooled,
        intermediate_size=4 * config.pooled,
        num_hidden_layers=config.num_layers,
        num_attention_heads=second_heads,
        max_position_embeddings=recipe_of(config).second_tokens,
        projection_dim=config.pooled,
        initializer_range=_SPREAD,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_EOS,
    )


def _random_llama(config: TextConfig) -> LlamaConfig:
    from transformers import LlamaConfig

    seen = config.picture_tokens if config.sees_picture else 0
    return _random_decoder(LlamaConfig, config, seen, vocab_size=_BYTES + (2 if seen else 0))


def _random_qwen(config: TextConfig) -> Qwen2_5_VLTextConfig:
    from transformers import Qwen2_5_VLTextConfig

    pairs = config.d_model // config.num_heads // 2  # of a head; those of t, h and w, which are equal in a text
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [pairs - 2 * (pairs // 3), *[pairs // 3] * 2]}
    return _random_decoder(Qwen2_5_VLTextConfig, config, vocab_size=_BYTES, rope_parameters=rope)


def _random_decoder(kind: Callable[..., C], config: TextConfig, seen: int = 0, **more: object) -> C:
    """The config of a random model over bytes; `seen` are tokens of a picture."""
    heads = config.num_heads
    if config.d_model % (2 * heads):
        raise ValueError(f"model.text.d_model {config.d_model} is not an even multiple of num_heads {heads}.")
    return kind(
        hidden_size=config.d_model,
        intermediate_size=4 * config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=config.max_length + recipe_of(config).crop + seen,
        initializer_range=_SPREAD,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_EOS,
        **more,
    )
