"""Text encoders: T5 and UMT5 from a local folder, or a small random T5 over bytes. Captions in, true lengths out."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.files import check_files, read_json
from ops.models.folders import check_tokenizer, component, tokenizer_of
from ops.models.frozen import Source, frozen, read_whole
from ops.models.place import home_of, on_device, visiting
from ops.models.seeded import drawn_from
from ops.models.text_masks import padding_mask
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from transformers import T5Config, T5EncoderModel, UMT5EncoderModel

# Captions of one batch differ in length by at most this share, which bounds the padding that is computed and dropped.
_MAX_PADDING = 0.25
# Of the random encoder's position biases, in logits: how much heads differ, and what each byte of distance costs.
_BIAS_STD, _BIAS_SLOPE = 3.0, 0.75


class Tokens(Protocol):
    """What a tokenizer of Transformers returns for one text."""

    @property
    def input_ids(self) -> list[int]: ...


class Tokenizer(Protocol):
    """A tokenizer of Transformers, called with one text and its options."""

    def __call__(self, text: str, /, **options: object) -> Tokens: ...


class TextEncoder(Protocol):
    """Frozen encoder of captions."""

    dim: int

    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        """One [L_i, dim] tensor per caption: L_i tokens, cut at max_length; zeros up to `pad_to` where that is set.

        `pictures` are uint8 [H, W, 3], one for each caption, for an encoder that sees them (`TextConfig.sees_picture`),
        and for no other.

        After a caption's tokens stand `TextConfig.tail` rows where a second encoder makes a vector
        (`ops.models.text_pair.split`).
        """
        ...

    def count(self, caption: str) -> int:
        """L_i of one caption, without running the encoder."""
        ...


def clean(caption: str) -> str:
    """What Diffusers' video pipelines do to a prompt before the tokenizer: entities resolved, white space joined."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def prepared(caption: str, config: TextConfig) -> str:
    """A caption as the tokenizer of a T5 alone sees it: as it is, cleaned, or cleaned and in lower case.

    Pipelines that pass no mask clean no prompt, so with `unmasked` only the lower case counts (LattePipeline).
    """
    text = clean(caption) if config.cleaned and not config.unmasked else caption
    return text.lower() if config.cleaned == "lower" else text


class T5Text:
    """A T5 or UMT5 encoder with its tokenizer. Deterministic; a caption's states do not depend on its batch."""

    def __init__(
        self, encoder: torch.nn.Module, tokenizer: Tokenizer, config: TextConfig, device: torch.device | str
    ) -> None:
        self.device = torch.device(device)
        self.place = config.place
        self.encoder = on_device(encoder, home_of(self.place, self.device)).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.max_length, self.pad_to, self.unmasked = config.max_length, config.pad_to, config.unmasked
        self.dim = int(encoder.config.d_model)  # type: ignore[union-attr, arg-type]
        self._dtype = next(self.parameters()).dtype

    def count(self, caption: str) -> int:
        return max(len(self._tokens(caption)), self.pad_to)

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        assert not len(pictures), "this encoder sees captions alone"
        with visiting([self.encoder], self.place, self.device):
            return self._encode(captions)

    def _encode(self, captions: list[str]) -> list[Tensor]:
        tokens = [self._tokens(caption) for caption in captions]
        result: list[Tensor | None] = [None] * len(captions)
        for group in length_groups([self.unmasked or len(ids) for ids in tokens]):
            longest = self.unmasked or max(len(tokens[i]) for i in group)
            if not longest:  # empty captions that are no text
                for i in group:
                    result[i] = torch.zeros(0, self.dim, dtype=self._dtype, device=self.device)
                continue
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : len(tokens[i])] = torch.tensor(tokens[i])
            mask = padding_mask([self.unmasked or len(tokens[i]) for i in group], longest, self._dtype)
            there, *hidden = upload([ids] if mask is None else [ids, mask], self.device)
            states = self.encoder(input_ids=there, attention_mask=hidden[0] if hidden else None).last_hidden_state
            for row, i in enumerate(group):
                # with `unmasked` the encoded rows after a caption are its own, up to `pad_to`
                state = states[row, : max(len(tokens[i]), min(self.pad_to, self.unmasked))]
                missing = max(self.pad_to - len(state), 0)
                result[i] = torch.nn.functional.pad(state, (0, 0, 0, missing)).clone()  # a view would keep the batch
        return [state for state in result if state is not None]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Weights of the encoder."""
        return self.encoder.parameters()

    def _tokens(self, caption: str) -> list[int]:
        text = prepared(caption, self.config)
        if not text and self.config.empty == "none":
            return []
        return self.tokenizer(text, truncation=True, max_length=self.max_length).input_ids


def length_groups(lengths: list[int]) -> Iterator[list[int]]:
    """Indices in batches of similar length, longest first: little padding, and bounded tokens per batch."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    group: list[int] = []
    for i in order:
        longest = lengths[group[0]] if group else 0
        if group and (lengths[i] < (1 - _MAX_PADDING) * longest or (len(group) + 1) * longest > TEXT_BATCH_TOKENS):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def random_t5(config: TextConfig, device: torch.device | str) -> T5Text:
    """A small T5 encoder over bytes with weights drawn from `config.seed`: the same on every worker."""
    from transformers import ByT5Tokenizer, T5EncoderModel  # heavy: seconds to import

    shape = random_shape(config)
    with drawn_from(config.seed):
        encoder = T5EncoderModel(shape)
        look_at_neighbours(encoder)
    return T5Text(encoder, ByT5Tokenizer(), config, device)


def random_shape(config: TextConfig) -> T5Config:
    """What the random T5 is made of."""
    from transformers import T5Config

    if config.d_model % config.num_heads:
        raise ValueError(f"model.text.d_model {config.d_model} is not a multiple of num_heads {config.num_heads}.")
    return T5Config(
        vocab_size=384,
        d_model=config.d_model,
        d_kv=config.d_model // config.num_heads,
        d_ff=4 * config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        dropout_rate=0.0,
    )


def t5_skeleton(config: TextConfig) -> torch.nn.Module:
    """The encoder of a config as its class makes it: what a folder's config.json describes, or the random one."""
    from transformers import AutoConfig, T5EncoderModel, UMT5EncoderModel

    if not config.path:
        return T5EncoderModel(random_shape(config))
    shape = AutoConfig.from_pretrained(component(config.path, "text_encoder"), local_files_only=True)
    return UMT5EncoderModel(shape) if shape.model_type == "umt5" else T5EncoderModel(shape)


def look_at_neighbours(encoder: torch.nn.Module) -> None:
    """Redraw the relative position biases so that each head prefers a few bytes near its own.

    As Transformers initialises them they are too small to matter, so an untrained encoder sees a bag of bytes, in which
    "red" and "green" hardly differ. With these it gives each byte a feature of the word around it.
    """
    place_of_bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = encoder.get_parameter(place_of_bias)  # [buckets, heads]
    half = len(bias) // 2  # buckets of one direction: the first half of them single distances, then wider ones
    place = torch.arange(len(bias)) % half
    with torch.no_grad():
        bias.normal_(std=_BIAS_STD).sub_(_BIAS_SLOPE * place[:, None])


def load_text(source: Source, config: TextConfig, device: torch.device | str, shared: bool) -> torch.nn.Module:
    """A text encoder of a folder, in the place and the dtype that the settings give it on this device. `shared` as
    `ops.models.frozen.frozen`."""
    target = torch.device(device)
    home, dtype = home_of(config.place, target), getattr(torch, config.dtype_on(target.type))
    return frozen(source, dtype, home, shared, reader=target)


def folder_t5(config: TextConfig, device: torch.device | str, shared: bool) -> T5Text:
    """T5 or UMT5 from `config.path`: text_encoder/ and tokenizer/ of a pipeline, or one folder with both. `shared` as
    `ops.models.frozen.frozen`."""
    from transformers import AutoTokenizer, T5EncoderModel, UMT5EncoderModel

    assert config.path is not None
    folder = component(config.path, "text_encoder")
    kind = read_json(folder / "config.json").get("model_type")
    classes: dict[str, type[T5EncoderModel | UMT5EncoderModel]] = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"{folder} is a {kind!r} encoder; supported are {' and '.join(classes)}.")
    check_files(folder)
    check_tokenizer(tokenizer_of(folder))  # before gigabytes are read
    encoder = load_text(
        Source(
            folder=folder,
            read=lambda dtype: read_whole(classes[kind], folder, None, dtype),
            bare=lambda: t5_skeleton(config),
        ),
        config,
        device,
        shared,
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(folder), local_files_only=True)
    return T5Text(encoder, tokenizer, config, device)
