"""Two text encoders of one caption: a Llama, Qwen, LLaVA or T5 whose states are the text, and CLIP, whose vector goes
with them, or a ByT5 and maybe a SigLIP (`ops.models.text_glyphs`).

E text width, V width of the vector, L text rows. Both travel in one matrix [L + tail, E], `TextConfig.tail` rows of it
for the vector, so they are cached and handed over like any other text; `split` takes them apart before a transformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ops.models.base.family import TextRecipe
from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.files import check_files, read_json, variant_of
from ops.models.folders import (
    check_tokenizer,
    second_text_folder,
    text_folder,
    text_parts,
    tokenizer_of,
)
from ops.models.frozen import Source
from ops.models.place import home_of, on_device, visiting
from ops.models.text import T5Text, Tokenizer, clean, length_groups, load_text, look_at_neighbours, random_shape
from ops.models.text_glyphs import GlyphText
from ops.models.text_picture import Eyes, LlavaText, eyes_of, random_llava, random_processor
from ops.models.text_vision import SiglipRows, folder_siglip, random_siglip, random_siglip_processor
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from transformers import (
        ByT5Tokenizer,
        CLIPTextConfig,
        LlamaConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Qwen2_5_VLTextConfig,
    )

T = TypeVar("T", bound="PreTrainedModel")
C = TypeVar("C", bound="PreTrainedConfig")

PICTURE = "<image>"  # the token of a picture in a random LLaVA's prompt
_BYTES = 384  # vocabulary of the tokenizer over bytes
_EOS = 1  # its end of sequence
_PROCESSOR = "Qwen2VLProcessor"  # of a Qwen2.5-VL whose files do not name it
# of the part of Qwen2.5-VL that reads text, where the whole model is in the files
_QWEN_NAMES = {r"^(model\.)?language_model\.(model\.)?": "", r"^model\.(?=layers|norm|embed_tokens)": ""}
_SPREAD = 0.3  # standard deviation of random weights: enough for states to depend on the words before them


def split(results: Sequence[Tensor], config: TextConfig) -> tuple[list[Tensor], Tensor | None]:
    """Results [L_i + tail, E] of S captions -> their texts [L_i, E], and [S, V] or None without a second encoder.

    Of a resolved config.
    """
    if not config.tail:
        return list(results), None
    vectors = [rows[-config.tail :].reshape(-1)[: config.pooled] for rows in results]
    return [rows[: -config.tail] for rows in results], torch.stack(vectors)


class LlamaText:
    """States of captions in a prompt by a Llama, or by another model whose rows see no later ones, as HunyuanVideo's
    pipelines take them.

    Deterministic; a caption's states do not depend on its batch.

    Raises ValueError when the tokenizer makes less of the template than is dropped of it.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: Tokenizer,
        recipe: TextRecipe,
        config: TextConfig,
        device: torch.device | str,
    ) -> None:
        """`encoder` is without the layers and the norm that the recipe leaves out; `config` is resolved."""
        self.device = torch.device(device)
        self.place = config.place
        self.encoder = on_device(encoder, home_of(self.place, self.device)).eval().requires_grad_(False)
        self.tokenizer, self.recipe = tokenizer, recipe
        self.dim, self.max_length = config.d_model, config.max_length
        found = len(self._tokens(""))
        if found <= recipe.crop:
            raise ValueError(
                f"the tokenizer of {config.path} makes {found} tokens of the prompt of kind {config.kind} without a "
                f"caption, of which {recipe.crop} are dropped. Give the folder of its own pipeline."
            )

    def count(self, caption: str) -> int:
        return len(self._tokens(caption)) - self.recipe.crop

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        assert not len(pictures), "this encoder sees captions alone"
        with visiting([self.encoder], self.place, self.device):
            return self._encode(captions)

    def _encode(self, captions: list[str]) -> list[Tensor]:
        tokens = [self._tokens(caption) for caption in captions]
        result: list[Tensor | None] = [None] * len(captions)
        for group in length_groups([len(ids) for ids in tokens]):
            ids = torch.zeros(len(group), max(len(tokens[i]) for i in group), dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : len(tokens[i])] = torch.tensor(tokens[i])
            # Causal and padded at the end: no row sees padding, so no mask is needed.
            (there,) = upload([ids], self.device)
            states = self.encoder(input_ids=there, use_cache=False).last_hidden_state
            for row, i in enumerate(group):
                result[i] = states[row, self.recipe.crop : len(tokens[i])].clone()  # a view would keep the batch
        return [rows for rows in result if rows is not None]

    def _tokens(self, caption: str) -> list[int]:
        return self.tokenizer(
            self.recipe.prompt(as_seen(caption, self.recipe)),
            truncation=True,
            max_length=self.max_length + self.recipe.crop,
            add_special_tokens=not self.recipe.system,  # a chat template has its own
        ).input_ids


class PooledText:
    """The text of one encoder, and after its rows the vector that CLIP makes of the caption.

    Deterministic; a caption's result does not depend on its batch.
    """

    def __init__(
        self,
        states: LlamaText | LlavaText | T5Text,
        second: nn.Module,
        second_tokenizer: Tokenizer,
        recipe: TextRecipe,
        config: TextConfig,
    ) -> None:
        """`config` is resolved; CLIP goes to the device of the other one."""
        self.states, self.encoder, self.device = states, states.encoder, states.device
        self.place = config.place
        self.second = on_device(second, home_of(self.place, self.device)).eval().requires_grad_(False)
        self.tokenizer, self.second_tokenizer = states.tokenizer, second_tokenizer
        self.dim, self.pooled, self.tail = config.d_model, config.pooled, config.tail
        self.recipe, self.second_tokens = recipe, recipe.second_tokens

    def count(self, caption: str) -> int:
        return self.states.count(caption)

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        result, texts = [], self.states.encode(captions, pictures)
        with visiting([self.second], self.place, self.device):
            vectors = self._vectors(captions)
        for kept, vector in zip(texts, vectors, strict=True):
            rows = kept.new_zeros(len(kept) + self.tail, self.dim)
            rows[: len(kept)] = kept
            rows[len(kept) :].view(-1)[: self.pooled] = vector.to(rows)
            result.append(rows)
        return result

    def _vectors(self, captions: list[str]) -> list[Tensor]:
        length = self.second_tokens
        seen = [as_seen(caption, self.recipe) for caption in captions]
        ids = [
            self.second_tokenizer(caption, padding="max_length", truncation=True, max_length=length).input_ids
            for caption in seen
        ]
        found: list[Tensor] = []
        at_once = max(TEXT_BATCH_TOKENS // length, 1)
        for start in range(0, len(ids), at_once):
            (batch,) = upload([torch.tensor(ids[start : start + at_once])], self.device)
            found += list(self.second(batch).pooler_output)
        return found

    def parameters(self) -> chain[nn.Parameter]:
        """The parameters of both encoders."""
        return chain(self.encoder.parameters(), self.second.parameters())


def as_seen(caption: str, recipe: TextRecipe) -> str:
    """A caption as both encoders see it."""
    return clean(caption) if recipe.cleaned else caption


def pooled_text(
    encoder: nn.Module,
    tokenizer: Tokenizer,
    second: nn.Module,
    second_tokenizer: Tokenizer,
    config: TextConfig,
    device: torch.device | str,
    eyes: Eyes | None = None,
    frames: SiglipRows | None = None,
) -> PooledText | GlyphText:
    """The encoders of a resolved config as one; `eyes` are for one that sees pictures, `frames` is one of its own for
    them."""
    recipe = recipe_of(config)
    if recipe.second == "byt5":
        glyphs = T5Text(second, second_tokenizer, glyph_reader_of(config), device)
        return GlyphText(LlamaText(encoder, tokenizer, recipe, config, device), glyphs, frames)
    if eyes is not None:
        states: LlamaText | LlavaText | T5Text = LlavaText(encoder, tokenizer, eyes, recipe, config, device)
    elif recipe.states != "t5":
        states = LlamaText(encoder, tokenizer, recipe, config, device)
    else:
        states = T5Text(encoder, tokenizer, t5_of(config), device)
    return PooledText(states, second, second_tokenizer, recipe, config)


def t5_of(config: TextConfig) -> TextConfig:
    """The settings of the T5 of two encoders, alone: what it was trained to see stands in `unmasked` and `pad_to`."""
    rows = config.max_length if recipe_of(config).keeps_padding else 0
    return replace(config, kind="t5", unmasked=rows, pad_to=rows)


def glyph_reader_of(config: TextConfig) -> TextConfig:
    """The settings of the ByT5 of two encoders, alone."""
    recipe = recipe_of(config)
    return replace(config, kind="t5", max_length=recipe.second_tokens, cleaned=False, d_model=config.glyph_dim)


def recipe_of(config: TextConfig) -> TextRecipe:
    """What `config` does to captions. A random model but T5 reads a short prompt: a byte is a token to it."""
    recipe = config.recipe
    assert recipe is not None
    if config.path or not recipe.crop:
        return recipe
    before, dot = "A video: ", "."
    if recipe.picture is None:
        system = before if recipe.system else ""
        return replace(recipe, template=before + "{}", system=system, crop=len(before), skipped_layers=0)
    # as many marks as the pipeline looks for, and as many tokens between the caption and the answer as it drops
    mark = recipe.picture.mark
    answer = dot * (recipe.picture.dropped - 1) + mark
    return replace(
        recipe,
        template=f"{mark}{PICTURE}{before}{mark}{{}}{answer}{dot}",
        crop=len(before) + 3,
        skipped_layers=0,
    )


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


def random_pair(config: TextConfig, device: torch.device | str) -> PooledText | GlyphText:
    """Small encoders over bytes with weights drawn from `config.seed`: the same on every worker."""
    from transformers import ByT5Tokenizer, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
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
        shape, _ = _random_shapes(config)
        assert config.recipe is not None
        _add_layers(shape, config.recipe.skipped_layers)
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


def pair_skeleton(config: TextConfig) -> tuple[nn.Module, nn.Module]:
    """Both encoders as their classes make them: what a folder's config.json describe, or the random ones."""
    from transformers import CLIPTextModel, LlamaModel, LlavaModel, Qwen2_5_VLTextModel, T5EncoderModel

    first, other = _shapes(config) if config.path else _random_shapes(config)
    recipe = recipe_of(config)
    kinds = {"t5": T5EncoderModel, "llama": LlamaModel, "llava": LlavaModel, "qwen2_5_vl_text": Qwen2_5_VLTextModel}
    encoder = kinds[recipe.states](first)
    return _cut(encoder, recipe), (T5EncoderModel if recipe.second == "byt5" else CLIPTextModel)(other)


def _random_shapes(config: TextConfig) -> tuple[Any, Any]:  # of the classes that the recipe names
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


def _add_layers(shape: PreTrainedConfig, count: int) -> None:
    """`count` more layers, or fewer, of the model that a config describes."""
    text = getattr(shape, "text_config", shape)
    text.num_hidden_layers += count
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [*kinds, *kinds[-1:] * max(count, 0)][: text.num_hidden_layers]


def _shapes(config: TextConfig) -> tuple[Any, Any]:  # of classes that their files name
    """(of the states' encoder without the layers that the recipe leaves out, of the second one), by the config.json of
    their folders."""
    from transformers import AutoConfig

    first = AutoConfig.from_pretrained(text_folder(config), local_files_only=True)
    if recipe_of(config).picture is None:
        first = getattr(first, "text_config", first)  # of a model that sees pictures, too, the part that reads text
    if skipped := recipe_of(config).skipped_layers:
        _add_layers(first, -skipped)
    clip = AutoConfig.from_pretrained(second_text_folder(config), local_files_only=True)
    return first, getattr(clip, "text_config", clip)  # the whole of a CLIP may lie there


def _cut(model: nn.Module, recipe: TextRecipe) -> nn.Module:
    """Without its final norm, where the recipe leaves that out."""
    if recipe.states == "t5" or recipe.final_norm:
        return model
    language: Any = getattr(model, "language_model", model)  # its norm is of a class, and becomes another
    language.norm = nn.Identity()  # its states go on as they are
    return model


def folder_pair(config: TextConfig, device: torch.device | str, shared: bool = False) -> PooledText | GlyphText:
    """All encoders and their tokenizers from the folders of a pipeline. `shared` as `ops.models.frozen.frozen`.

    The last layers that the recipe leaves out are neither read nor run. Raises ValueError for folders that do not hold
    all of the weights and for a tokenizer with another chat template, FileNotFoundError without a tokenizer.
    """
    from transformers import (
        AutoTokenizer,
        CLIPTextModel,
        LlamaModel,
        LlavaForConditionalGeneration,
        Qwen2_5_VLTextModel,
        T5EncoderModel,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    # silent about weights of the layers that they lack
    missing = [r"layers\.\d+\.", r"lm_head", r"rotary_emb", r"position_ids", r"visual\."]

    class Shortened(LlamaModel):  # type: ignore[no-untyped-call]  # Transformers' own hook for subclasses
        _keys_to_ignore_on_load_unexpected = missing

    class ShortenedQwen(Qwen2_5_VLTextModel):  # type: ignore[no-untyped-call]
        _keys_to_ignore_on_load_unexpected = missing

    class ShortenedLlava(LlavaForConditionalGeneration):  # type: ignore[no-untyped-call]
        _keys_to_ignore_on_load_unexpected = missing
        _keys_to_ignore_on_load_missing = [r"lm_head"]  # noqa: RUF012  # it is not used

    first, second = text_folder(config), second_text_folder(config)
    shape, other_shape = _shapes(config)
    recipe = recipe_of(config)
    for folder, part in ((first, recipe.states_parts[1]), (second, recipe.second_parts[1])):
        check_tokenizer(tokenizer_of(folder, part))  # before gigabytes are read
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(first, recipe.states_parts[1]), local_files_only=True)
    _check_chat(tokenizer, recipe, config)

    def read(dtype: torch.dtype) -> nn.Module:
        if recipe.states == "llama":
            return _cut(_loaded(Shortened, first, shape, dtype), recipe)
        if recipe.states == "qwen2_5_vl_text":
            return _cut(_loaded(ShortenedQwen, first, shape, dtype, _QWEN_NAMES), recipe)
        if recipe.states == "llava":
            return _cut(_loaded(ShortenedLlava, first, shape, dtype).model, recipe)  # without its head
        encoder: nn.Module = _loaded(T5EncoderModel, first, shape, dtype)
        return encoder

    encoder = load_text(
        Source(
            folder=first,
            read=read,
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
            read=lambda dtype: _loaded(other_class, second, other_shape, dtype),
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


def _loaded(
    kind: type[T], folder: Path, shape: PreTrainedConfig, dtype: torch.dtype, names: dict[str, str] | None = None
) -> T:
    """`names`: what names of weights in the files match -> what stands there in those of the class."""
    check_files(folder)
    loaded: Any = kind.from_pretrained(  # with its report, which the annotation leaves out
        folder,
        config=shape,
        local_files_only=True,
        dtype=dtype,
        use_safetensors=True,
        variant=variant_of(folder),
        output_loading_info=True,
        key_mapping=names,
    )
    model: T
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks {len(missing)} of its weights, the first {missing[0]}. Download it whole.")
    return model


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
