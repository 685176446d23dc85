"""Two text encoders of one caption: a Llama, Qwen, LLaVA or T5 whose states are the text, and CLIP, whose vector goes
with them, or a ByT5 and maybe a SigLIP (`ops.models.text_glyphs`).

E text width, V width of the vector, L text rows. Both travel in one matrix [L + tail, E], `TextConfig.tail` rows of it
for the vector, so they are cached and handed over like any other text; `split` takes them apart before a transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from ops.models.base.family import TextRecipe
from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.place import home_of, on_device, visiting
from ops.models.text import T5Text, Tokenizer, clean, length_groups
from ops.models.text_glyphs import GlyphText
from ops.models.text_masks import causal_mask
from ops.models.text_picture import Eyes, LlavaText
from ops.models.text_vision import SiglipRows
from ops.packed.uploads import upload

PICTURE = "<image>"  # the token of a picture in a random LLaVA's prompt


def split(results: Sequence[Tensor], config: TextConfig) -> tuple[list[Tensor], Tensor | None]:
    """Results [L_i + tail, E] of S captions -> their texts [L_i, E], and their vectors [S, V], or None without a second
    encoder in the resolved config."""
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
        self._dtype = next(encoder.parameters()).dtype
        self._needs_mask = recipe.states == "llama"  # without one it reads its positions back, which a Qwen does not
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
            # Causal and padded at the end: no row sees padding.
            (there,) = upload([ids], self.device)
            mask = causal_mask(ids.shape[1], self._dtype, self.device) if self._needs_mask else None
            states = self.encoder(input_ids=there, attention_mask=mask, use_cache=False).last_hidden_state
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
    if recipe.stripped:
        return caption.strip()
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
    """The encoders of a resolved config as one; `eyes` are for a LLaVA, `frames` is the SigLIP beside a ByT5."""
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
