"""Settings of the modules that a worker hosts; those of a transformer stand with its family.

Imports neither torch nor Ray, so configs load in milliseconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ops.geometry import Geometry
from ops.models.base.family import Cleaning, EmptyText, TextRecipe
from ops.models.base.tiles import Tiles
from ops.models.families import TEXT_RECIPES, AnyDiT, TextKind
from ops.models.wan.config import WanConfig
from ops.ranges import SEED, between, check_numbers

Dtype = Literal["float32", "bfloat16", "float16"]
VAEDtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEConfig:
    """The frozen video autoencoder: `haar` needs no weights, `diffusers` loads a local folder."""

    kind: Literal["haar", "diffusers"] = "haar"  # haar: fixed wavelets, for trials without weights
    path: str | None = None  # a Diffusers folder (the pipeline's, or its vae/)
    temporal: int = 4  # haar only: stride over time
    spatial: int = 8  # haar only: stride over height and width
    channels: int = 48  # haar only: strongest channels kept, at most 3 * temporal * spatial^2
    tile_sample_min: tuple[int, int] = (256, 256)  # height and width of a tile; larger clips are cut
    tile_sample_stride: tuple[int, int] = (192, 192)  # pixels from one tile to the next; less than a tile, they overlap
    tiling: bool = False  # encode and decode in tiles, which take less memory and which workers share
    # What it computes in; latents always come in fp32. auto: bfloat16 on a GPU, float32 on a CPU. In 16 bits latents
    # are those of float32 but for rounding (docs/results.md says by how much), in half the memory.
    dtype: VAEDtype = "auto"
    # Whether activations have their channels last, as tensor cores take them. auto: on a GPU in 16 bits.
    channels_last: Literal["auto", "on", "off"] = "auto"
    # torch.compile of the encoder: minutes for the first clip of the first shapes, and fewer passes over memory.
    compile: bool = False

    def __post_init__(self) -> None:
        check_numbers(
            "model.vae",
            self,
            temporal=between(1, 64),
            spatial=between(1, 64),
            tile_sample_min=between(1, 1 << 16),
            tile_sample_stride=between(1, 1 << 16),
        )
        if self.kind == "diffusers" and not self.path:
            raise ValueError(
                "model.vae.kind diffusers needs model.vae.path: a local Diffusers folder. Or use kind: haar."
            )
        if self.kind == "haar" and self.path:
            raise ValueError(
                f"model.vae.path {self.path} is not read by kind haar, which has no weights. Set model.vae.kind to "
                f"diffusers, or leave the path out."
            )
        if self.kind == "haar" and (self.dtype not in ("auto", "float32") or self.compile):
            raise ValueError(
                f"model.vae.dtype {self.dtype}, compile {self.compile}: the haar codec is one matrix product in "
                f"float32. Leave both out."
            )
        if self.kind == "haar" and not 1 <= self.channels <= 3 * self.temporal * self.spatial**2:
            raise ValueError(
                f"model.vae.channels {self.channels} is outside 1..{3 * self.temporal * self.spatial**2} "
                f"(3 * temporal * spatial^2)."
            )

    @property
    def tiles(self) -> Tiles | None:
        """How clips are cut over height and width; None: they are not."""
        return Tiles(least=self.tile_sample_min, step=self.tile_sample_stride) if self.tiling else None

    def dtype_on(self, device: str) -> Dtype:
        """What it computes in on a kind of device (cpu or cuda)."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device == "cuda" and self.kind == "diffusers" else "float32"


EncoderPlace = Literal["device", "host"]
TEXT_BATCH_TOKENS = 8192  # a text encoder takes at most this number of tokens at a time, padding included


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """The frozen text encoders: `t5` is T5 or UMT5; else those of the family of that name, which are two: the states of
    one (HunyuanVideo: Llama, FLUX.1: T5) and the pooled vector of CLIP; or (HunyuanVideo-1.5) the states of Qwen2.5-VL
    and those of a ByT5 that reads what a caption has in quotation marks, for image to video with those that a SigLIP
    makes of the first frame; or (LTX-2) what connectors make of the states of all layers of a Gemma 3.

    Without a path: small random ones over bytes, from `seed`.
    """

    kind: TextKind = "t5"  # t5: T5 or UMT5; else the encoders of that family
    # folder that holds text_encoder/ and tokenizer/, and for kinds of two encoders text_encoder_2/ and tokenizer_2/, of
    # LTX-2 connectors/;
    # for t5 also one folder with both encoder and tokenizer. null: small random encoders over bytes, for trials
    path: str | None = None
    max_length: int = 226  # longer captions are cut here
    # 0: true lengths, no padding. Published Wan weights were trained on embeddings followed by zeros up to 512, and
    # behave as published only with pad_to: 512 (WanPipeline's max_sequence_length).
    pad_to: int = 0
    # 0: the encoder sees a caption alone. Weights of LTX-Video and CogVideoX were trained on encodings of captions
    # padded to 128 and 226 rows without a mask. The caption's own are kept (LTX-Video), or with an equal pad_to all
    unmasked: int = 0
    # true: entities of HTML resolved, white space joined; weights of Mochi were trained without it (false). lower: and
    # in lower case, as weights of Latte and Open-Sora were trained. With unmasked: lower alone counts, for the case
    cleaned: Cleaning = True
    # encoded: an empty caption is what the encoder makes of it. none: it is no text at all; so Mochi's weights were
    # trained, as its model_index.json says
    empty: EmptyText = "encoded"
    # device: beside the transformer. host: in host memory, once for all workers of a node, and on the device only while
    # it encodes, which copies 11 GB (UMT5-XXL in bfloat16) for every text cascade and leaves a GPU that much more for
    # clips. Where data.cache has texts already, an encoder is loaded when one is missing, and no sooner.
    place: EncoderPlace = "device"
    d_model: int = 64  # the random encoder only, like the two below
    num_layers: int = 2
    num_heads: int = 4
    pooled_dim: int = 32  # the random CLIP or ByT5 only
    picture_tokens: int = 16  # the random LLaVA or SigLIP only: patches of a picture, a square number
    picture_dim: int = 32  # the random SigLIP only
    picture_every: int = 0  # n: every n-th of their rows is text; set from model.dit.first_frame
    seed: int = 0  # of the random encoder

    def __post_init__(self) -> None:
        check_numbers(
            "model.text",
            self,
            max_length=between(1, 1 << 20),
            pad_to=between(0, 1 << 20),
            unmasked=between(0, 1 << 20),
            d_model=between(1, 1 << 16),
            num_layers=between(1, 1000),
            num_heads=between(1, 1024),
            pooled_dim=between(1, 1 << 16),
            picture_tokens=between(1, 1 << 16),
            picture_dim=between(1, 1 << 16),
            picture_every=between(0, 1 << 16),
            seed=between(0, SEED),
        )
        if math.isqrt(self.picture_tokens) ** 2 != self.picture_tokens:
            raise ValueError(f"model.text.picture_tokens {self.picture_tokens} is no square, as 4x4 patches are 16.")
        if self.empty == "none" and (self.recipe or self.pad_to or self.unmasked):
            raise ValueError(
                "model.text.empty none: an empty caption can be no text where kind is t5 and captions have their true "
                "length. Leave it out, or pad_to, unmasked and kind."
            )
        if self.recipe and (self.pad_to or self.unmasked):
            length = (
                f"always has max_length {self.max_length} rows" if self.recipe.keeps_padding else "has its true length"
            )
            raise ValueError(
                f"model.text.pad_to {self.pad_to}, unmasked {self.unmasked}: text of kind {self.kind} {length}. "
                f"Leave both out."
            )
        if self.unmasked and self.unmasked < self.max_length:
            raise ValueError(
                f"model.text.unmasked {self.unmasked} rows cannot hold max_length {self.max_length}. Make them equal."
            )

    def dtype_on(self, device: str) -> Dtype:
        """What the encoders compute in on a kind of device (cpu or cuda). float16 overflows in T5's feed-forward;
        bfloat16 is what the published pipelines use on GPUs."""
        return "bfloat16" if self.path and device == "cuda" else "float32"

    @property
    def recipe(self) -> TextRecipe | None:
        """How the family of this kind makes text of captions; None for T5 alone."""
        return None if self.kind == "t5" else TEXT_RECIPES[self.kind]

    @property
    def sees_picture(self) -> bool:
        """Whether a text is made of a caption and the first frame of its clip."""
        return self.recipe is not None and self.recipe.sees_picture

    @property
    def picture_rows(self) -> int:
        """Rows of a text that are of the first frame."""
        return -(-self.picture_tokens // self.picture_every) if self.sees_picture and self.picture_every else 0

    @property
    def pooled(self) -> int:
        """Numbers of the vector that the second encoder makes of a whole caption; 0 without one."""
        return self.pooled_dim if self.recipe and self.recipe.second == "clip" else 0

    @property
    def glyph_dim(self) -> int:
        """Numbers of a row of what a caption quotes; 0: there are no such rows."""
        return self.pooled_dim if self.recipe and self.recipe.glyph_rows else 0

    @property
    def vision_dim(self) -> int:
        """Numbers of a row of the first frame that an encoder of its own makes; 0: there are no such rows."""
        return self.picture_dim if self.recipe and self.recipe.vision else 0

    @property
    def width(self) -> int:
        """Numbers of a row of a caption's result. Where there are rows of glyphs or of first frames, the last column
        says which a row is (`ops.models.text_glyphs`)."""
        return self.d_model + (self.glyph_dim > 0)

    @property
    def tail(self) -> int:
        """Rows of a caption's result after those that the transformer sees: they hold the pooled vector."""
        return -(-self.pooled // self.width)

    @property
    def least_tokens(self) -> int:
        """Rows of the shortest caption that the transformer sees, those of the first frame among them."""
        return self.max_length if self.recipe and self.recipe.keeps_padding else self.pad_to + self.picture_rows

    @property
    def is_padded(self) -> bool:
        """All captions have as many rows."""
        return self.least_tokens == self.most_tokens

    @property
    def most_tokens(self) -> int:
        """Rows of the longest caption that the transformer sees, those of the first frame and of glyphs among them."""
        glyphs = self.recipe.glyph_rows if self.recipe else 0
        return max(self.max_length, self.pad_to) + self.picture_rows + glyphs

    @property
    def encoded_tokens(self) -> int:
        """Rows that the encoder of the states computes for the longest caption: those of its prompt, and of the whole
        first frame where it sees that, too."""
        prompt = self.recipe.crop if self.recipe and self.path else 0
        seen = self.picture_tokens if self.recipe and self.recipe.picture else 0
        return max(self.max_length, self.pad_to) + prompt + seen


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConfig:
    """The frozen image encoder (CLIP's vision tower). Without a path: a small random one, from `seed`."""

    path: str | None = None  # folder that holds image_encoder/ and image_processor/, or both in one
    size: int = 32  # the random encoder only, like the five below: height and width it sees, in pixels
    patch: int = 16
    d_model: int = 32
    num_layers: int = 2
    num_heads: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(
            "model.image",
            self,
            size=between(1, 1 << 14),
            patch=between(1, 1 << 14),
            d_model=between(1, 1 << 16),
            num_layers=between(1, 1000),
            num_heads=between(1, 1024),
            seed=between(0, SEED),
        )
        if self.size % self.patch or self.d_model % self.num_heads:
            raise ValueError(
                f"model.image.size {self.size} must be a multiple of patch {self.patch}, and d_model {self.d_model} "
                f"one of num_heads {self.num_heads}."
            )

    @property
    def tokens(self) -> int:
        """Rows of one picture: its patches and CLIP's class token."""
        return (self.size // self.patch) ** 2 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The modules a worker hosts. `image` is for image-to-video weights that listen to one."""

    dit: AnyDiT = field(default_factory=WanConfig)
    vae: VAEConfig = field(default_factory=VAEConfig)
    text: TextConfig = field(default_factory=TextConfig)
    image: ImageConfig | None = None
    # the repository of the Hub (owner/name) that is the Diffusers folder of these modules. Nothing is downloaded: where
    # a folder is missing, the error says how to get it
    hub: str | None = None

    def __post_init__(self) -> None:
        if self.hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.hub):
            raise ValueError(
                f"model.hub {self.hub} is no name of a repository, as owner/name. It is what errors name; a folder is "
                f"given as path of model.dit, vae, text and image."
            )


def geometry(model: ModelConfig) -> Geometry:
    """Pixel to token geometry of a model built from its config alone (a `path` is resolved by ops.models.folders)."""
    if model.vae.kind == "haar":
        return Geometry(vae_stride=(model.vae.temporal, model.vae.spatial, model.vae.spatial), patch=model.dit.patch)
    return Geometry(patch=model.dit.patch)
