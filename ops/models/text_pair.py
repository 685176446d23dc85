"""Two text encoders of one caption: a Llama whose states are the text, and CLIP, whose pooled vector goes with them.

E text width, V width of the vector, L text rows. Both travel in one matrix [L + tail, E], `TextConfig.tail` rows of it
for the vector, so they are cached and handed over like any other text; `split` takes them apart before a transformer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ops.models.base.family import TextRecipe
from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.families import FAMILIES
from ops.models.folders import check_safetensors, read_json, second_text_folder, text_folder, tokenizer_of
from ops.models.place import home_of, on_device, visiting
from ops.models.text import Tokenizer, length_groups, text_dtype

if TYPE_CHECKING:
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

_BYTES = 384  # vocabulary of the tokenizer over bytes
_EOS = 1  # its end of sequence
_PIPELINE_SKIPS = 2  # last layers of a Llama that HunyuanVideoPipeline leaves out
_SPREAD = 0.3  # standard deviation of random weights: enough for states to depend on the words before them


def split(results: Sequence[Tensor], config: TextConfig) -> tuple[list[Tensor], Tensor | None]:
    """Results [L_i + tail, E] of S captions -> their texts [L_i, E], and [S, V] or None without a second encoder.

    Of a resolved config.
    """
    if not config.tail:
        return list(results), None
    vectors = [rows[-config.tail :].reshape(-1)[: config.pooled] for rows in results]
    return [rows[: -config.tail] for rows in results], torch.stack(vectors)


class LlamaClipText:
    """HunyuanVideo's text as its pipeline encodes it. Deterministic; a caption's result does not depend on its batch.

    Raises ValueError when the tokenizer makes less of the template than is dropped of it.
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: Tokenizer,
        second: nn.Module,
        second_tokenizer: Tokenizer,
        recipe: TextRecipe,
        config: TextConfig,
        device: torch.device | str,
    ) -> None:
        """`encoder` is without its last layers and its final norm; `config` is resolved."""
        self.device = torch.device(device)
        self.place = config.place
        home = home_of(self.place, self.device)
        self.encoder = on_device(encoder, home).eval().requires_grad_(False)
        self.second = on_device(second, home).eval().requires_grad_(False)
        self.tokenizer, self.second_tokenizer, self.recipe = tokenizer, second_tokenizer, recipe
        self.dim, self.pooled, self.tail = config.d_model, config.pooled, config.tail
        self.max_length = config.max_length
        found = len(self._tokens(""))
        if found <= recipe.crop:
            raise ValueError(
                f"the tokenizer of {config.path} makes {found} tokens of HunyuanVideo's prompt without a caption, of "
                f"which {recipe.crop} are dropped. Give the folder of HunyuanVideo."
            )

    def count(self, caption: str) -> int:
        return len(self._tokens(caption)) - self.recipe.crop

    @torch.no_grad()
    def encode(self, captions: list[str]) -> list[Tensor]:
        with visiting([self.encoder, self.second], self.place, self.device):
            return self._encode(captions)

    def _encode(self, captions: list[str]) -> list[Tensor]:
        tokens, vectors = [self._tokens(caption) for caption in captions], self._vectors(captions)
        result: list[Tensor | None] = [None] * len(captions)
        for group in length_groups([len(ids) for ids in tokens]):
            ids = torch.zeros(len(group), max(len(tokens[i]) for i in group), dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, : len(tokens[i])] = torch.tensor(tokens[i])
            # Causal and padded behind: no row sees padding, so no mask is needed.
            states = self.encoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
            for row, i in enumerate(group):
                kept = states[row, self.recipe.crop : len(tokens[i])]
                rows = kept.new_zeros(len(kept) + self.tail, self.dim)
                rows[: len(kept)] = kept
                rows[len(kept) :].view(-1)[: self.pooled] = vectors[i].to(rows)
                result[i] = rows
        return [rows for rows in result if rows is not None]

    def _vectors(self, captions: list[str]) -> list[Tensor]:
        length = self.recipe.pooled_tokens
        ids = [
            self.second_tokenizer(caption, padding="max_length", truncation=True, max_length=length).input_ids
            for caption in captions
        ]
        found: list[Tensor] = []
        at_once = max(TEXT_BATCH_TOKENS // length, 1)
        for start in range(0, len(ids), at_once):
            batch = torch.tensor(ids[start : start + at_once]).to(self.device)
            found += list(self.second(batch).pooler_output)
        return found

    def _tokens(self, caption: str) -> list[int]:
        prompt = self.recipe.template.format(caption)
        return self.tokenizer(prompt, truncation=True, max_length=self.max_length + self.recipe.crop).input_ids

    def parameters(self) -> chain[nn.Parameter]:
        """Of both encoders."""
        return chain(self.encoder.parameters(), self.second.parameters())


def recipe_of(config: TextConfig) -> TextRecipe:
    """What `config` does to captions. The random pair reads a short prompt: a byte is a token to it."""
    if config.path:
        recipe = FAMILIES[config.kind].text
        assert recipe is not None
        return recipe
    before = "A video: "
    return TextRecipe(template=before + "{}", crop=len(before), skipped_layers=0, pooled_tokens=77)


def random_pair(config: TextConfig, device: torch.device | str) -> LlamaClipText:
    """A small Llama and CLIP over bytes with weights drawn from `config.seed`: the same on every worker."""
    from transformers import ByT5Tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        encoder, second = pair_skeleton(config)
    return LlamaClipText(encoder, ByT5Tokenizer(), second, ByT5Tokenizer(), recipe_of(config), config, device)


def save_random_pair(config: TextConfig, folder: Path) -> None:
    """Both random encoders and their tokenizers as folders of a pipeline, by which `folder`'s Llama loads elsewhere.

    HunyuanVideoPipeline takes the states before the last two layers: two more, of which nothing is used, are added.
    """
    from transformers import LlamaModel

    pair = random_pair(config, "cpu")
    shape, _ = _random_shapes(config)
    shape.num_hidden_layers += _PIPELINE_SKIPS
    with torch.random.fork_rng(devices=[]):
        whole = LlamaModel(shape)
    whole.load_state_dict(pair.encoder.state_dict(), strict=False)
    whole.save_pretrained(folder / "text_encoder")
    pair.second.save_pretrained(folder / "text_encoder_2")  # type: ignore[operator]  # a model of Transformers
    for name in ("tokenizer", "tokenizer_2"):
        pair.tokenizer.save_pretrained(folder / name)  # type: ignore[attr-defined]  # every one of Transformers has it


def pair_skeleton(config: TextConfig) -> tuple[nn.Module, nn.Module]:
    """Both encoders as their classes make them: what a folder's config.json describe, or the random ones."""
    from transformers import CLIPTextModel, LlamaModel

    if config.path:
        llama, clip = _shapes(config)
    else:
        llama, clip = _random_shapes(config)
    return _without_norm(LlamaModel(llama)), CLIPTextModel(clip)


def _random_shapes(config: TextConfig) -> tuple[LlamaConfig, CLIPTextConfig]:
    from transformers import CLIPTextConfig, LlamaConfig

    heads, recipe = config.num_heads, recipe_of(config)
    if config.d_model % (2 * heads):
        raise ValueError(f"model.text.d_model {config.d_model} is not an even multiple of num_heads {heads}.")
    second_heads = math.gcd(heads, config.pooled)
    llama = LlamaConfig(
        vocab_size=_BYTES,
        hidden_size=config.d_model,
        intermediate_size=4 * config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=config.max_length + recipe.crop,
        initializer_range=_SPREAD,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_EOS,
    )
    clip = CLIPTextConfig(
        vocab_size=_BYTES,
        hidden_size=config.pooled,
        intermediate_size=4 * config.pooled,
        num_hidden_layers=config.num_layers,
        num_attention_heads=second_heads,
        max_position_embeddings=recipe.pooled_tokens,
        projection_dim=config.pooled,
        initializer_range=_SPREAD,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=_EOS,
    )
    return llama, clip


def _shapes(config: TextConfig) -> tuple[Any, Any]:
    """(of Llama without the layers that the recipe leaves out, of CLIP), by the config.json of their folders."""
    from transformers import AutoConfig

    assert config.path is not None
    first, second = text_folder(config), second_text_folder(config.path)
    llama = AutoConfig.from_pretrained(first, local_files_only=True)
    llama.num_hidden_layers -= recipe_of(config).skipped_layers
    clip = AutoConfig.from_pretrained(second, local_files_only=True)
    return llama, getattr(clip, "text_config", clip)


def _without_norm(llama: LlamaModel) -> LlamaModel:
    llama.norm = nn.Identity()  # type: ignore[assignment]  # its states go on as they are
    return llama


def folder_pair(config: TextConfig, device: torch.device | str) -> LlamaClipText:
    """text_encoder/, tokenizer/, text_encoder_2/ and tokenizer_2/ of a pipeline.

    The language model's last layers, which the recipe leaves out, are neither read nor run. Raises ValueError for
    folders that do not hold all of the weights.
    """
    from transformers import AutoTokenizer, CLIPTextModel, LlamaModel

    class Shortened(LlamaModel):  # type: ignore[no-untyped-call]  # Transformers' own hook for subclasses
        """Llama that is silent about weights of the layers that it lacks."""

        _keys_to_ignore_on_load_unexpected = [r"layers\.\d+\.", r"lm_head", r"rotary_emb"]  # noqa: RUF012

    assert config.path is not None
    first, second = text_folder(config), second_text_folder(config.path)
    llama_shape, clip_shape = _shapes(config)
    dtype = getattr(torch, text_dtype(config, device))
    llama = _loaded(Shortened, first, llama_shape, dtype)
    clip: CLIPTextModel = _loaded(CLIPTextModel, second, clip_shape, dtype)
    return LlamaClipText(
        _without_norm(llama),
        AutoTokenizer.from_pretrained(tokenizer_of(first), local_files_only=True),
        clip,
        AutoTokenizer.from_pretrained(tokenizer_of(second, "tokenizer_2"), local_files_only=True),
        recipe_of(config),
        config,
        device,
    )


def _loaded(kind: type[Any], folder: Path, shape: object, dtype: torch.dtype) -> Any:
    check_safetensors(folder)
    model, report = kind.from_pretrained(
        folder, config=shape, local_files_only=True, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder} lacks {len(missing)} of its weights, the first {missing[0]}. Download it whole.")
    return model


def text_classes(config: TextConfig) -> dict[str, str]:
    """Folder of a pipeline -> class in Transformers, for a `path` of this kind or the random pair."""
    names = {"text_encoder": "LlamaModel", "text_encoder_2": "CLIPTextModel"}
    if not config.path:
        return names | {"tokenizer": "ByT5Tokenizer", "tokenizer_2": "ByT5Tokenizer"}
    folders = {
        "tokenizer": (tokenizer_of(text_folder(config)), "LlamaTokenizerFast"),
        "tokenizer_2": (tokenizer_of(second_text_folder(config.path), "tokenizer_2"), "CLIPTokenizer"),
    }
    for part, (folder, usual) in folders.items():
        settings = folder / "tokenizer_config.json"
        names[part] = read_json(settings).get("tokenizer_class", usual) if settings.is_file() else usual
    return names
