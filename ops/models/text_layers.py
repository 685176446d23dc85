"""The text of LTX-2: what its connectors make of the states of all layers of a Gemma 3.

L tokens of a caption, E width of the decoder, K states of each token (the embedding and every layer's), R rows of the
result, always `max_length`. A caption's states are normalised layer by layer, projected to one row a token, filled up
with learned registers, and seen by a few blocks of self-attention, the connector of the video; that of the sound is
left out. All of it is frozen, so results are cached and handed over like those of any encoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ops.models.config import TextConfig
from ops.models.files import check_files, read_json, variant_of
from ops.models.folders import check_tokenizer, second_text_folder, text_folder, text_parts, tokenizer_of
from ops.models.frozen import Source, lacks, read_whole
from ops.models.place import home_of, on_device, visiting
from ops.models.seeded import drawn_from
from ops.models.text import Tokenizer, load_text
from ops.models.text_pair import as_seen, recipe_of
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from transformers import Gemma3TextConfig, Gemma3TextModel

_BYTES = 384  # vocabulary of the tokenizer over bytes
_REGISTERS = 128  # at most, of random connectors
_SPREAD = 0.3  # as in ops/models/text_pair_shapes.py
# of the part of Gemma 3 that reads text, where the whole model is in the files
_GEMMA_NAMES = {r"^(model\.)?language_model\.(model\.)?": "", r"^model\.(?=layers|norm|embed_tokens)": ""}


class LayersText:
    """Rows that connectors make of a caption's states. Deterministic; a caption's result does not depend on its
    batch."""

    def __init__(
        self,
        encoder: nn.Module,
        connectors: nn.Module,
        tokenizer: Tokenizer,
        config: TextConfig,
        device: torch.device | str,
    ) -> None:
        """`config` is resolved; the connectors are without that of the sound."""
        self.device = torch.device(device)
        self.place, self.recipe = config.place, recipe_of(config)
        home = home_of(self.place, self.device)
        self.encoder, self.second = (on_device(one, home).eval().requires_grad_(False) for one in (encoder, connectors))
        self.tokenizer, self.dim, self.max_length = tokenizer, config.d_model, config.max_length

    def count(self, caption: str) -> int:
        return self.max_length

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        assert not len(pictures), "this encoder sees captions alone"
        with visiting([self.encoder, self.second], self.place, self.device):
            return [self._rows(self._tokens(caption)) for caption in captions]

    def parameters(self) -> chain[nn.Parameter]:
        """The parameters of the decoder and of the connectors."""
        return chain(self.encoder.parameters(), self.second.parameters())

    def _rows(self, tokens: list[int]) -> Tensor:
        """[R, E] of one caption. One at a time: its K states take as much memory as K captions."""
        from diffusers.pipelines.ltx2.connectors import per_layer_masked_mean_norm

        # Its places are those after padding on the left, as its weights were trained; it never sees that padding.
        places = torch.arange(self.max_length - len(tokens), self.max_length)
        ids, at, length = upload([torch.tensor([tokens]), places[None], torch.tensor([len(tokens)])], self.device)
        # Causal, and within the window of all layers: no mask is needed.
        seen = {"full_attention": None, "sliding_attention": None}
        found = self.encoder(
            input_ids=ids, position_ids=at, attention_mask=seen, use_cache=False, output_hidden_states=True
        )
        states = torch.stack(found.hidden_states, dim=-1)  # [1, L, E, K]
        del found
        connect = cast("LTX2TextConnectors", self.second)
        flat = per_layer_masked_mean_norm(states, length, self.device, padding_side="right")
        rows = pad(connect.text_proj_in(flat), (0, 0, 0, self.max_length - len(tokens)))
        mask = torch.zeros(1, 1, 1, self.max_length, dtype=rows.dtype, device=self.device)
        mask[..., len(tokens) :] = torch.finfo(rows.dtype).min  # rows that registers take
        made: Tensor = connect.video_connector(rows, mask)[0]
        return made[0].clone()

    def _tokens(self, caption: str) -> list[int]:
        seen = as_seen(caption, self.recipe)
        return self.tokenizer(seen, truncation=True, max_length=self.max_length).input_ids


def skeletons(config: TextConfig) -> tuple[nn.Module, nn.Module]:
    """Decoder and connectors as their classes make them: what the config.json of their folders describe, or small and
    random ones."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from transformers import Gemma3TextModel

    if not config.path:
        return Gemma3TextModel(_random_shape(config)), without_sound(LTX2TextConnectors(**_random_connectors(config)))
    connectors = LTX2TextConnectors.from_config(read_json(second_text_folder(config) / "config.json"))
    return Gemma3TextModel(_shape(text_folder(config))), without_sound(connectors)


def without_sound(connectors: nn.Module) -> nn.Module:
    """The connectors without the one of the sound, which makes no row of the video's text."""
    del connectors.audio_connector
    return connectors


def folder_layers(config: TextConfig, device: torch.device | str, shared: bool) -> LayersText:
    """Decoder and connectors from the folders of a pipeline. `shared` as `ops.models.frozen.frozen`.

    Raises ValueError for folders that do not hold all of the weights, FileNotFoundError without a tokenizer.
    """
    from transformers import AutoTokenizer

    first, second = text_folder(config), second_text_folder(config)
    tokens = tokenizer_of(first)
    check_tokenizer(tokens)  # before gigabytes are read
    tokenizer = AutoTokenizer.from_pretrained(tokens, local_files_only=True)
    encoder = Source(folder=first, read=lambda dtype: _decoder(first, dtype), bare=lambda: skeletons(config)[0])
    connectors = Source(
        folder=second,
        read=lambda dtype: _connectors(second, dtype),
        bare=lambda: skeletons(config)[1],
        variant="without that of the sound",
    )
    first_part, second_part = (load_text(source, config, device, shared) for source in (encoder, connectors))
    return LayersText(first_part, second_part, tokenizer, config, device)


def random_layers(config: TextConfig, device: torch.device | str) -> LayersText:
    """A small decoder and connectors over bytes, with weights drawn from `config.seed`: the same on every worker."""
    from transformers import ByT5Tokenizer

    encoder, connectors = _random(config)
    return LayersText(encoder, without_sound(connectors), ByT5Tokenizer(), config, device)


def save_random_layers(config: TextConfig, folder: Path) -> None:
    """The modules of `random_layers` and their tokenizer as folders of a pipeline, with the connector of the sound."""
    from transformers import ByT5Tokenizer

    encoder, connectors = _random(config)
    encoder.save_pretrained(folder / "text_encoder")
    connectors.save_pretrained(folder / "connectors")
    ByT5Tokenizer(model_max_length=config.max_length).save_pretrained(folder / "tokenizer")


def layers_classes(config: TextConfig) -> dict[str, list[str]]:
    """Part of a pipeline -> library and class, for a `path` of this kind or the random ones."""
    encoder, tokenizer = "Gemma3TextModel", "ByT5Tokenizer"
    if config.path:
        folders = text_parts(config)
        if read_json(folders["text_encoder"] / "config.json").get("model_type") == "gemma3":
            encoder = "Gemma3ForConditionalGeneration"
        settings = folders["tokenizer"] / "tokenizer_config.json"
        told = read_json(settings) if settings.is_file() else {}
        tokenizer = told.get("tokenizer_class", "GemmaTokenizerFast")
    return {
        "text_encoder": ["transformers", encoder],
        "tokenizer": ["transformers", tokenizer],
        "connectors": ["ltx2", "LTX2TextConnectors"],
    }


def _random(config: TextConfig) -> tuple[Gemma3TextModel, LTX2TextConnectors]:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from transformers import Gemma3TextModel

    with drawn_from(config.seed):
        return Gemma3TextModel(_random_shape(config)), LTX2TextConnectors(**_random_connectors(config))


def _decoder(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import Gemma3TextModel

    class Reader(Gemma3TextModel):  # type: ignore[no-untyped-call]  # Transformers' own hook for subclasses
        # silent about the parts that see pictures, and predict tokens
        _keys_to_ignore_on_load_unexpected = [r"vision_tower", r"multi_modal_projector", r"lm_head"]  # noqa: RUF012

    return read_whole(Reader, folder, _shape(folder), dtype, _GEMMA_NAMES)


def _connectors(folder: Path, dtype: torch.dtype) -> nn.Module:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    check_files(folder)
    found, report = LTX2TextConnectors.from_pretrained(
        folder,
        torch_dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        variant=variant_of(folder),
        output_loading_info=True,
    )
    if missing := sorted(report["missing_keys"]):
        raise lacks(folder, missing)
    return without_sound(found)


def _shape(folder: Path) -> Gemma3TextConfig:
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    shape: Gemma3TextConfig = getattr(found, "text_config", found)
    return shape


def _random_shape(config: TextConfig) -> Gemma3TextConfig:
    from transformers import Gemma3TextConfig

    heads = config.num_heads
    if config.d_model % (2 * heads):
        raise ValueError(f"model.text.d_model {config.d_model} is not an even multiple of num_heads {heads}.")
    return Gemma3TextConfig(
        vocab_size=_BYTES,
        hidden_size=config.d_model,
        intermediate_size=4 * config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=config.d_model // heads,
        query_pre_attn_scalar=config.d_model // heads,
        max_position_embeddings=config.max_length,
        sliding_window=config.max_length,
        initializer_range=_SPREAD,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def _random_connectors(config: TextConfig) -> dict[str, object]:
    heads, registers = config.num_heads, math.gcd(config.max_length, _REGISTERS)
    fields: dict[str, object] = {
        "caption_channels": config.d_model,
        "text_proj_in_factor": config.num_layers + 1,
        "rope_type": "split",
    }
    for part in ("video", "audio"):
        fields |= {
            f"{part}_connector_num_attention_heads": heads,
            f"{part}_connector_attention_head_dim": config.d_model // heads,
            f"{part}_connector_num_layers": 1,
            f"{part}_connector_num_learnable_registers": registers,
        }
    return fields
