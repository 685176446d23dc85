"""The two encoders of `ops.models.text_pair` with weights: from the folders of a pipeline, or drawn at random and
saved as such folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ops.models.base.family import TextRecipe
from ops.models.config import TextConfig
from ops.models.files import read_json
from ops.models.folders import check_tokenizer, second_text_folder, text_folder, text_parts, tokenizer_of
from ops.models.frozen import Source, read_whole
from ops.models.seeded import drawn_from
from ops.models.text import load_text, look_at_neighbours
from ops.models.text_glyphs import GlyphText
from ops.models.text_pair import PICTURE, PooledText, pooled_text, recipe_of
from ops.models.text_pair_shapes import add_layers, cut, pair_skeleton, random_shapes, shapes
from ops.models.text_picture import eyes_of, random_processor
from ops.models.text_vision import folder_siglip, random_siglip, random_siglip_processor

if TYPE_CHECKING:
    from transformers import ByT5Tokenizer, PreTrainedConfig, PreTrainedTokenizerBase

_PROCESSOR = "Qwen2VLProcessor"  # of a Qwen2.5-VL whose files do not name it
# of the part of Qwen2.5-VL that reads text, where the whole model is in the files
_QWEN_NAMES = {r"^(model\.)?language_model\.(model\.)?": "", r"^model\.(?=layers|norm|embed_tokens)": ""}


def folder_pair(config: TextConfig, device: torch.device | str, shared: bool) -> PooledText | GlyphText:
    """All encoders and their tokenizers from the folders of a pipeline. `shared` as `ops.models.frozen.frozen`.

    The last layers that the recipe leaves out are neither read nor run. Raises ValueError for folders that do not hold
    all of the weights and for a tokenizer with another chat template, FileNotFoundError without a tokenizer.
    """
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    first, second = text_folder(config), second_text_folder(config)
    shape, other_shape = shapes(config)
    recipe = recipe_of(config)
    for folder, part in ((first, recipe.states_parts[1]), (second, recipe.second_parts[1])):
        check_tokenizer(tokenizer_of(folder, part))  # before gigabytes are read
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(first, recipe.states_parts[1]), local_files_only=True)
    _check_chat(tokenizer, recipe, config)
    encoder = load_text(
        Source(
            folder=first,
            read=lambda dtype: _states_encoder(recipe, first, shape, dtype),
            bare=lambda: pair_skeleton(config)[0],
            variant=f"{recipe.states} without {recipe.skipped_layers} layers",
        ),
        config,
        device,
        shared,
    )
    other_class = T5EncoderModel if recipe.second == "byt5" else CLIPTextModel
    other = load_text(
        Source(
            folder=second,
            read=lambda dtype: read_whole(other_class, second, other_shape, dtype),
            bare=lambda: pair_skeleton(config)[1],
        ),
        config,
        device,
        shared,
    )
    eyes = None
    if recipe.picture:
        prepares = text_parts(config)[recipe.picture.processor]
        # the processor that needs Pillow alone: resizing by torchvision gives other pixels
        processor = CLIPImageProcessorPil.from_pretrained(prepares, local_files_only=True)
        eyes = eyes_of(tokenizer, processor, recipe.picture)
    return pooled_text(
        encoder,
        tokenizer,
        other,
        AutoTokenizer.from_pretrained(tokenizer_of(second, recipe.second_parts[1]), local_files_only=True),
        config,
        device,
        eyes,
        folder_siglip(config, device, shared) if recipe.vision else None,
    )


def _states_encoder(recipe: TextRecipe, folder: Path, shape: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The encoder whose states are the text, without what the recipe leaves out of it."""
    from transformers import LlamaModel, LlavaForConditionalGeneration, Qwen2_5_VLTextModel, T5EncoderModel

    # silent about weights of the layers that they lack
    missing = [r"layers\.\d+\.", r"lm_head", r"rotary_emb", r"position_ids", r"visual\."]

    class Shortened(LlamaModel):  # type: ignore[no-untyped-call]  # Transformers' own hook for subclasses
        _keys_to_ignore_on_load_unexpected = missing

    class ShortenedQwen(Qwen2_5_VLTextModel):  # type: ignore[no-untyped-call]
        _keys_to_ignore_on_load_unexpected = missing

    class ShortenedLlava(LlavaForConditionalGeneration):  # type: ignore[no-untyped-call]
        _keys_to_ignore_on_load_unexpected = missing
        _keys_to_ignore_on_load_missing = [r"lm_head"]  # noqa: RUF012  # it is not used

    if recipe.states == "llama":
        return cut(read_whole(Shortened, folder, shape, dtype), recipe)
    if recipe.states == "qwen2_5_vl_text":
        return cut(read_whole(ShortenedQwen, folder, shape, dtype, _QWEN_NAMES), recipe)
    if recipe.states == "llava":
        return cut(read_whole(ShortenedLlava, folder, shape, dtype).model, recipe)  # without its head
    encoder: nn.Module = read_whole(T5EncoderModel, folder, shape, dtype)
    return encoder


def _check_chat(tokenizer: PreTrainedTokenizerBase, recipe: TextRecipe, config: TextConfig) -> None:
    """Raises ValueError for a tokenizer whose chat template makes another prompt than the weights were trained on."""
    if not recipe.system:
        return
    said = [{"role": "system", "content": recipe.system}, {"role": "user", "content": "{}"}]
    if tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False) != recipe.template:
        raise ValueError(
            f"the tokenizer of {config.path} has a chat template that makes another prompt than model.text.kind "
            f"{config.kind} is for. Give the folder of its own pipeline."
        )


def text_classes(config: TextConfig) -> dict[str, str]:
    """Part of a pipeline -> class in Transformers, for a `path` of this kind or the random pair."""
    recipe = recipe_of(config)
    encoder, tokenizer = {
        "llama": ("LlamaModel", "LlamaTokenizerFast"),
        "llava": ("LlavaForConditionalGeneration", "LlamaTokenizerFast"),
        "t5": ("T5EncoderModel", "T5TokenizerFast"),
        "qwen2_5_vl_text": ("Qwen2_5_VLTextModel", "Qwen2Tokenizer"),
    }[recipe.states]
    second = {"clip": ("CLIPTextModel", "CLIPTokenizer"), "byt5": ("T5EncoderModel", "ByT5Tokenizer")}[recipe.second]
    names = dict(zip((*recipe.states_parts, *recipe.second_parts), (encoder, tokenizer, *second)))
    if recipe.picture:
        names[recipe.picture.processor] = "CLIPImageProcessor"
    if recipe.vision:
        names |= {recipe.vision.encoder: "SiglipVisionModel", recipe.vision.processor: "SiglipImageProcessor"}
    tokenizers = (recipe.states_parts[1], recipe.second_parts[1])
    if not config.path:
        return names | dict.fromkeys(tokenizers, "ByT5Tokenizer")
    folders = text_parts(config)
    for part in tokenizers:
        settings = folders[part] / "tokenizer_config.json"
        told = read_json(settings) if settings.is_file() else {}
        # where what prepares pictures lies there, too, its pipeline calls both as one
        whole = (folders[part] / "preprocessor_config.json").is_file()
        names[part] = told.get("processor_class" if whole else "tokenizer_class", _PROCESSOR if whole else names[part])
    if read_json(folders[recipe.states_parts[0]] / "config.json").get("model_type") == "qwen2_5_vl":
        names[recipe.states_parts[0]] = "Qwen2_5_VLForConditionalGeneration"
    return names


def random_pair(config: TextConfig, device: torch.device | str) -> PooledText | GlyphText:
    """Small encoders over bytes with weights drawn from `config.seed`: the same on every worker."""
    from transformers import ByT5Tokenizer, T5EncoderModel

    with drawn_from(config.seed):
        encoder, second = pair_skeleton(config)
        for one in (encoder, second):
            if isinstance(one, T5EncoderModel):
                look_at_neighbours(one)
    second_tokens = ByT5Tokenizer(model_max_length=recipe_of(config).second_tokens)
    tokens, picture = byte_tokenizer(config), recipe_of(config).picture
    eyes = eyes_of(tokens, random_processor(config), picture) if picture else None
    frames = random_siglip(config, device) if recipe_of(config).vision else None
    return pooled_text(encoder, tokens, second, second_tokens, config, device, eyes, frames)


def save_random_pair(config: TextConfig, folder: Path) -> None:
    """All random encoders and their tokenizers as folders of a pipeline, with what prepares pictures.

    A pipeline that leaves out the last layers of the states' encoder is given as many more, of which nothing is used.
    """
    from transformers import LlamaModel, LlavaForConditionalGeneration, Qwen2_5_VLTextModel

    pair, recipe = random_pair(config, "cpu"), recipe_of(config)
    encoder: Any = pair.encoder  # Any, here and below: of Transformers, whose methods torch's Module does not have
    if recipe.states != "t5":
        shape, _ = random_shapes(config)
        assert config.recipe is not None
        add_layers(shape, config.recipe.skipped_layers)
        kinds = {"llama": LlamaModel, "llava": LlavaForConditionalGeneration, "qwen2_5_vl_text": Qwen2_5_VLTextModel}
        with torch.random.fork_rng(devices=[]):
            whole: Any = kinds[recipe.states](shape)  # Any: as `encoder`
        getattr(whole, "model", whole).load_state_dict(encoder.state_dict(), strict=False)
        encoder = whole
    if recipe.picture:
        random_processor(config).save_pretrained(folder / recipe.picture.processor)
    if recipe.vision:
        random_siglip(config, "cpu").encoder.save_pretrained(folder / recipe.vision.encoder)
        random_siglip_processor(config).save_pretrained(folder / recipe.vision.processor)
    second: Any = pair.second  # as `encoder`
    tokenizers: list[Any] = [pair.tokenizer, pair.second_tokenizer]  # of Transformers: `Tokenizer` saves nothing
    for (part, tokens), model, tokenizer in zip(
        (recipe.states_parts, recipe.second_parts), (encoder, second), tokenizers
    ):
        model.save_pretrained(folder / part)
        tokenizer.save_pretrained(folder / tokens)


def byte_tokenizer(config: TextConfig) -> ByT5Tokenizer:
    """The tokenizer of a random encoder: bytes, and one token each for a picture and for the mark where it sees
    pictures. Its chat template, where the prompt is of one, joins what is said."""
    from transformers import ByT5Tokenizer

    tokens = ByT5Tokenizer()
    if recipe_of(config).system:
        tokens.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    if picture := recipe_of(config).picture:
        tokens.add_tokens([PICTURE, picture.mark], special_tokens=True)
    return tokens
