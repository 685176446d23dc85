"""Text of a caption and a picture: a LLaVA's states of both, as HunyuanVideo's image-to-video pipeline takes them.

P rows of a picture (its patches), E text width. The prompt has one token for the picture, in whose place P rows of the
vision tower stand; causal states after them know the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ops.models.base.family import PictureRecipe, TextRecipe
from ops.models.config import TextConfig
from ops.models.image import Preprocessor
from ops.models.place import home_of, on_device, visiting
from ops.models.text import Tokenizer, length_groups
from ops.models.text_masks import causal_mask
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlavaConfig, PreTrainedTokenizerBase
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

_VISION_PATCH = 8  # pixels, of the random vision tower
_VISION_WIDTH = 16


class Eyes(NamedTuple):
    """What a LLaVA needs beside its weights and its tokenizer."""

    processor: Preprocessor
    mark: int  # the token of `PictureRecipe.mark`


def eyes_of(tokenizer: PreTrainedTokenizerBase, processor: Preprocessor, picture: PictureRecipe) -> Eyes:
    """The eyes for a tokenizer of Transformers that knows the mark."""
    mark = tokenizer.convert_tokens_to_ids(picture.mark)
    assert isinstance(mark, int), "one token has one number"
    return Eyes(processor, mark)


class LlavaText:
    """A LLaVA's states of captions and pictures: of each result first the thinned rows of the picture, then the text.

    Deterministic; a caption's states do not depend on its batch.

    Raises ValueError when the tokenizer makes less of the template than is dropped of it, or no token of the picture.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: Tokenizer,
        eyes: Eyes,
        recipe: TextRecipe,
        config: TextConfig,
        device: torch.device | str,
    ) -> None:
        """`encoder` is a LlavaModel without its last layers and their norm; `config` is resolved."""
        assert recipe.picture is not None
        self.device = torch.device(device)
        self.place = config.place
        # Any: a LlavaModel, whose parts Transformers does not annotate
        model: Any = on_device(encoder, home_of(self.place, self.device))
        self.encoder = model.eval().requires_grad_(False)
        self.tokenizer, self.eyes, self.recipe, self.picture = tokenizer, eyes, recipe, recipe.picture
        self.dim, self.max_length = config.d_model, config.max_length
        self.picture_tokens, self.every = config.picture_tokens, config.picture_every
        self.picture_rows = config.picture_rows
        prompt, token = self._tokens(""), int(self.encoder.config.image_token_index)
        if len(prompt) <= recipe.crop or token not in prompt[: recipe.crop]:
            raise ValueError(
                f"the tokenizer of {config.path} makes {len(prompt)} tokens of the prompt of kind {config.kind} "
                f"without a caption, of which {recipe.crop} are dropped, and token {token} of the picture has to be "
                f"among these. Give the folder of its own pipeline."
            )
        self._at, self._token = prompt.index(token), token
        self._marks = prompt.count(eyes.mark)

    def count(self, caption: str) -> int:
        return self.picture_rows + len(self._rows_of(self._tokens(caption)))

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        """As `TextEncoder`; `pictures` are uint8 [H, W, 3], one for each caption."""
        if len(pictures) != len(captions):
            raise ValueError(
                f"{len(captions)} captions and {len(pictures)} pictures: this text encoder sees the first frame of "
                f"each clip. Give one for each caption."
            )
        with visiting([self.encoder], self.place, self.device):
            return self._encode(captions, pictures)

    def _encode(self, captions: list[str], pictures: Sequence[np.ndarray]) -> list[Tensor]:
        tokens = [self._tokens(caption) for caption in captions]
        more, at = self.picture_tokens - 1, self._at
        result: list[Tensor | None] = [None] * len(captions)
        for group in length_groups([len(ids) + more for ids in tokens]):
            ids = torch.zeros(len(group), max(len(tokens[i]) for i in group) + more, dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, :at] = torch.tensor(tokens[i][:at])
                ids[row, at + 1 + more : len(tokens[i]) + more] = torch.tensor(tokens[i][at + 1 :])
            seen = self.eyes.processor(images=[pictures[i] for i in group], return_tensors="pt")["pixel_values"]
            rows = [torch.tensor(self._rows_of(tokens[i])) + more for i in group]
            ids, seen, *rows = upload([ids, seen, *rows], self.device)
            states = self._states(ids, seen)
            for row, (i, own) in enumerate(zip(group, rows, strict=True)):
                kept = states[row, at : at + self.picture_tokens : self.every]
                result[i] = torch.cat([kept, states[row].index_select(0, own)])
        return [rows for rows in result if rows is not None]

    def _states(self, ids: Tensor, seen: Tensor) -> Tensor:
        """[B, L, E] of tokens [B, L] and prepared pictures [B, 3, size, size]."""
        model, config = self.encoder, self.encoder.config
        embeds = model.language_model.get_input_embeddings()(ids)
        tower = model.vision_tower(pixel_values=seen.to(embeds.dtype), output_hidden_states=True)
        patches = tower.hidden_states[config.vision_feature_layer][:, 1:]  # without CLIP's class token
        rows = model.multi_modal_projector(patches)
        embeds = torch.cat([embeds[:, : self._at], rows, embeds[:, self._at + self.picture_tokens :]], dim=1)
        # Causal and padded at the end: no row sees padding.
        mask = causal_mask(embeds.shape[1], embeds.dtype, self.device)
        found = model.language_model(inputs_embeds=embeds, attention_mask=mask, use_cache=False)
        states: Tensor = found.last_hidden_state
        return states

    def _rows_of(self, ids: list[int]) -> list[int]:
        """Places of the prompt's tokens that are text: after what is dropped, without the answer's beginning. Of a
        prompt that was cut before its last mark the last ones are left out instead, as the pipeline does."""
        marks = [place for place, token in enumerate(ids) if token == self.eyes.mark]
        end = marks[-1] + 1 if len(marks) >= self._marks else len(ids)
        return [*range(self.recipe.crop, end - self.picture.dropped), *range(end, len(ids))]

    def _tokens(self, caption: str) -> list[int]:
        prompt = self.recipe.prompt(caption)
        return self.tokenizer(prompt, truncation=True, max_length=self.max_length + self.recipe.crop).input_ids


def random_llava(text: LlamaConfig, config: TextConfig, token: int) -> LlavaConfig:
    """The shape of a small random LLaVA around a language model; `token` stands for the picture."""
    from transformers import CLIPVisionConfig, LlavaConfig

    side = math.isqrt(config.picture_tokens)
    vision = CLIPVisionConfig(
        hidden_size=_VISION_WIDTH,
        intermediate_size=4 * _VISION_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=side * _VISION_PATCH,
        patch_size=_VISION_PATCH,
        initializer_range=text.initializer_range,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=token,
        image_seq_length=config.picture_tokens,
        pad_token_id=text.pad_token_id,  # type: ignore[call-arg]  # known to all configs
    )


def random_processor(config: TextConfig) -> CLIPImageProcessorPil:
    """What prepares pictures for the random vision tower."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = math.isqrt(config.picture_tokens) * _VISION_PATCH
    return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
