"""Rows of a text that a SigLIP makes of the first frame of a clip, as HunyuanVideo-1.5's image-to-video pipeline takes
them: the vision tower's last states, after its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.files import check_files
from ops.models.folders import text_parts
from ops.models.frozen import Source, read_whole
from ops.models.image import Preprocessor
from ops.models.place import home_of, on_device, visiting
from ops.models.seeded import drawn_from
from ops.models.text import load_text
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from transformers import SiglipVisionConfig, SiglipVisionModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

_PATCH = 8  # pixels, of the random SigLIP


class SiglipRows:
    """A SigLIP and what prepares pictures for it. Deterministic; a picture's rows do not depend on its batch."""

    def __init__(
        self, encoder: SiglipVisionModel, processor: Preprocessor, config: TextConfig, device: torch.device | str
    ) -> None:
        """`config` is resolved."""
        self.device, self.place = torch.device(device), config.place
        on_device(encoder, home_of(self.place, self.device)).eval().requires_grad_(False)
        self.encoder = encoder
        self.processor, self.tokens, self.dim = processor, config.picture_tokens, config.picture_dim

    @torch.no_grad()
    def encode(self, pictures: Sequence[np.ndarray]) -> list[Tensor]:
        """uint8 [H, W, 3] of any sizes -> [tokens, dim] each."""
        found: list[Tensor] = []
        at_once = max(TEXT_BATCH_TOKENS // self.tokens, 1)
        with visiting([self.encoder], self.place, self.device):
            for start in range(0, len(pictures), at_once):
                some = list(pictures[start : start + at_once])
                (pixels,) = upload([self.processor(images=some, return_tensors="pt")["pixel_values"]], self.device)
                dtype = next(self.encoder.parameters()).dtype
                found += self.encoder(pixel_values=pixels.to(dtype)).last_hidden_state
        return found


def random_siglip(config: TextConfig, device: torch.device | str) -> SiglipRows:
    """A small SigLIP with weights drawn from `config.seed`: the same on every worker."""
    from transformers import SiglipVisionModel

    with drawn_from(config.seed):
        encoder = SiglipVisionModel(_random_shape(config))
    return SiglipRows(encoder, random_siglip_processor(config), config, device)


def folder_siglip(config: TextConfig, device: torch.device | str, shared: bool) -> SiglipRows:
    """The SigLIP of the pipeline in `config.path`. `shared` as `ops.models.frozen.frozen`."""
    from transformers import SiglipVisionModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    assert config.recipe is not None and config.recipe.vision is not None
    parts = text_parts(config)
    folder = parts[config.recipe.vision.encoder]
    check_files(folder)

    def read(dtype: torch.dtype) -> SiglipVisionModel:
        return read_whole(SiglipVisionModel, folder, None, dtype)

    encoder = load_text(Source(folder=folder, read=read, bare=lambda: siglip_skeleton(config)), config, device, shared)
    # the processor that needs Pillow alone: resizing by torchvision gives other pixels
    processor = SiglipImageProcessorPil.from_pretrained(parts[config.recipe.vision.processor], local_files_only=True)
    assert isinstance(encoder, SiglipVisionModel)
    return SiglipRows(encoder, processor, config, device)


def siglip_skeleton(config: TextConfig) -> SiglipVisionModel:
    """The vision tower that a folder's config.json describes, or a small one; its weights are not set."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    from transformers.initialization import no_init_weights

    shape = _random_shape(config)
    if config.path:
        assert config.recipe is not None and config.recipe.vision is not None
        folder = text_parts(config)[config.recipe.vision.encoder]
        shape = SiglipVisionConfig.from_pretrained(folder, local_files_only=True)
    with no_init_weights():  # its own way to draw them reads what it has drawn
        return SiglipVisionModel(shape)


def siglip_size(encoder: SiglipVisionModel) -> int:
    """Height and width in pixels of what the vision tower sees."""
    size: int = encoder.config.image_size  # type: ignore[assignment]  # Transformers allows other forms, SigLIP has none
    return size


def random_siglip_processor(config: TextConfig) -> SiglipImageProcessorPil:
    """What prepares pictures for the random SigLIP."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    side = math.isqrt(config.picture_tokens) * _PATCH
    return SiglipImageProcessorPil(size={"height": side, "width": side})


def _random_shape(config: TextConfig) -> SiglipVisionConfig:
    from transformers import SiglipVisionConfig

    return SiglipVisionConfig(
        hidden_size=config.picture_dim,
        intermediate_size=4 * config.picture_dim,
        num_hidden_layers=2,
        num_attention_heads=math.gcd(config.num_heads, config.picture_dim),
        image_size=math.isqrt(config.picture_tokens) * _PATCH,
        patch_size=_PATCH,
    )
