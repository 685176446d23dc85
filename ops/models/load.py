"""From settings to modules: the transformer, the autoencoder and the text encoder that a worker hosts.

Importing this file costs nothing; torch, Diffusers and Transformers are imported by the functions that need them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ops.models.base.config import DiTConfig
from ops.models.base.flops import TrainedPart
from ops.models.config import ImageConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.seeded import drawn_from

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ops.models.added_lora import AddedLora, LoraFile
    from ops.models.base.vae import VAE
    from ops.models.image import ImageEncoder
    from ops.models.text import TextEncoder, Tokenizer


def build_dit(
    config: DiTConfig,
    seed: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    blocks_on_host: bool = False,
    trains: bool = True,
    loras: Sequence[LoraFile] = (),
) -> nn.Module:
    """The transformer: random from `seed`, or with the weights of `config.path`. By default in fp32 on the CPU.

    Random weights are drawn in fp32 on the CPU. Those of a folder are read straight into `dtype` on `device`, so that
    loading needs no more memory than the result and no initial values are drawn to be thrown away. What `frozen_dtype`
    names is in 8 bits whatever `dtype` is.

    With a `lora_rank` only the low-rank factors and DoRA's magnitudes are trainable (`requires_grad`), with
    `train_only` what it names. Of a config of two experts it is a pair of them (`ops.models.experts`). Then, with
    `blocks_on_host`, the frozen weights of its blocks lie once in host memory of the node (`ops.models.frozen_blocks`).
    Unless it `trains` all weights are frozen. To those of a folder the files of `loras` are added before they are
    rounded to `dtype`.

    Raises ValueError when the folder's weights do not fit the config (missing, unexpected, wrong shape or dtype), for a
    name in `train_only` that no weight has, and as `AddedLora.read`.
    """
    import torch

    from ops.models.experts import parts_of, transformers
    from ops.models.frozen_blocks import fetch_from_host, frozen_in_blocks, put_on_host
    from ops.models.lora import first_factors
    from ops.models.weights import fill

    dtype, device = dtype or torch.float32, torch.device(device)
    module = first_factors(dit_skeleton(config), seed) if config.path else _random_dit(config, seed)
    if not trains:
        module.requires_grad_(False)
    added = read_added(config, loras)
    if config.path:
        hosted = frozen_in_blocks(module) if blocks_on_host else []
        passed_over = FAMILIES[config.architecture].passed_over
        for one, expert, name, lora in zip(config.experts, transformers(module), parts_of(module), added, strict=True):
            elsewhere = {weight.removeprefix(name) for weight in hosted if weight.startswith(name)}
            fill(expert, config.path, dtype, device, passed_over, one.part, elsewhere, lora.over if loras else None)
    held = put_on_host(module, config, seed, dtype, device, added) if blocks_on_host else None
    _begin_with_files(module, config, dtype)
    return module.to(device, dtype) if held is None else fetch_from_host(module, held, dtype, device)


def read_added(config: DiTConfig, loras: Sequence[LoraFile]) -> list[AddedLora]:
    """What files add to the weights of each transformer of a resolved config; reads no other weights. Raises as
    `AddedLora.read`."""
    from ops.models.added_lora import NOTHING_ADDED, AddedLora
    from ops.models.experts import transformers

    if not loras:
        return [NOTHING_ADDED for _ in config.experts]
    modules = transformers(dit_skeleton(config))
    return [
        AddedLora.read(loras, one, dict(module.named_parameters()))
        for one, module in zip(config.experts, modules, strict=True)
    ]


def first_values(config: DiTConfig, seed: int, dtype: torch.dtype | None = None) -> Callable[[str], Tensor]:
    """Values of the trainable parameters before any update, by name: on the CPU, not rounded to a lower precision.

    Those of a folder are read when they are asked for, one at a time. `dtype`: that of the module, by default fp32;
    DoRA's magnitudes are lengths of rows that are rounded to it.
    """
    import torch

    from ops.models.lora import DoRALinear, M, first_factors

    dtype = dtype or torch.float32
    stored = _stored_weights(config.path, config.experts) if config.path else None
    if stored and not config.lora_rank:
        return stored
    module = first_factors(dit_skeleton(config), seed) if stored else _random_dit(config, seed)
    _begin_with_files(module, config, dtype)

    def value(name: str) -> Tensor:
        found = module.get_parameter(name)
        if not found.is_meta or stored is None:
            return found
        layer = name.removesuffix(M)  # whose magnitudes no file gives
        part = module.get_submodule(layer)
        assert isinstance(part, DoRALinear)
        return part.row_lengths(*part.held(stored(f"{layer}.weight"), dtype))

    return value


def _stored_weights(path: str, experts: Sequence[DiTConfig]) -> Callable[[str], Tensor]:
    """The weights of a folder by our names, each read when it is asked for."""
    from ops.models.experts import EXPERTS
    from ops.models.folders import component
    from ops.models.weights import StoredWeights

    stored = [StoredWeights(component(path, one.part)) for one in experts]
    if len(stored) == 1:
        return stored[0].__getitem__
    by_name = dict(zip(EXPERTS, stored, strict=True))

    def read(name: str) -> Tensor:
        expert, _, inside = name.partition(".")
        return by_name[expert][inside]

    return read


def kept_weights(config: DiTConfig) -> dict[str, Tensor]:
    """The weights that the files of a transformer hold beside those that are computed with (`Family.kept`): of
    `config.path`, as stored, else zeros, with which Diffusers' class computes what ours does. Raises as `check_kept`.
    """
    import torch

    from ops.models.folders import component
    from ops.models.weights import StoredWeights

    expected = kept_skeleton(config)
    if not config.path or not expected:
        return {name: torch.zeros(weight.shape) for name, weight in expected.items()}
    check_kept(config)
    stored = StoredWeights(component(config.path, config.part))
    return {name: stored[name] for name in expected}


def check_kept(config: DiTConfig) -> None:
    """Raises ValueError, one sentence, unless the folder of a resolved config holds all that an export keeps of it, and
    nothing that it would leave out. Reads headers alone."""
    from ops.models.folders import component
    from ops.models.weights import check_state, describe

    kept = FAMILIES[config.architecture].kept
    if not config.path or not kept:
        return
    folder = component(config.path, config.part)
    found = {name: weight for name, weight in describe(folder).items() if any(part in name for part in kept)}
    check_state(kept_skeleton(config), found, str(folder))


def kept_skeleton(config: DiTConfig) -> dict[str, Tensor]:
    """The weights of `kept_weights` on the meta device: names and shapes, by Diffusers' class."""
    import diffusers
    import torch

    from ops.models.folders import dit_json

    family = FAMILIES[config.architecture]
    if not family.kept:
        return {}
    described = {key: value for key, value in dit_json(config).items() if not key.startswith("_")}
    with torch.device("meta"):
        whole: nn.Module = getattr(diffusers, family.diffusers_class)(**described)
    return {name: weight for name, weight in whole.state_dict().items() if any(part in name for part in family.kept)}


def check_factors(config: DiTConfig) -> None:
    """Raises FileNotFoundError or ValueError, one sentence, unless the factors of `lora_from` are those of a resolved
    config: their names, shapes and rank, and not in its weights already. Reads their file, which is small, and no
    weights."""
    from ops.models.experts import transformers
    from ops.models.lora import read_factors

    if not config.lora_from:
        return
    _check_files_of_experts(config)
    for one, expert in zip(config.experts, transformers(dit_skeleton(config)), strict=True):
        read_factors(expert, one)
        _check_not_merged(one)


def _check_not_merged(config: DiTConfig) -> None:
    """Raises ValueError for factors out of the very export whose weights are trained: they would count twice."""
    from ops.models.folders import component
    from ops.models.lora import file_of_factors
    from ops.models.recipe import EXPORTED

    file = file_of_factors(config)
    if config.path and (file.parent / EXPORTED).is_file():
        folder = component(config.path, config.part)
        if file.parent.resolve() in (folder.resolve(), folder.resolve().parent):
            raise ValueError(
                f"model.dit.lora_from {file} holds factors that the weights of model.dit.path {config.path} have in "
                f"them, as heddle export merges them: they would count twice. Set model.dit.path to the weights that "
                f"they were trained on, or leave lora_from out."
            )


def _begin_with_files(module: nn.Module, config: DiTConfig, dtype: torch.dtype) -> None:
    """Factors of `config.lora_from`, and magnitudes of weights in `dtype`."""
    from ops.models.experts import transformers
    from ops.models.lora import begin_with_file

    _check_files_of_experts(config)
    for one, expert in zip(config.experts, transformers(module), strict=True):
        begin_with_file(expert, one, dtype)


def _check_files_of_experts(config: DiTConfig) -> None:
    """Raises FileNotFoundError where two experts have not a file of factors each."""
    from ops.models.lora import factor_file

    if config.lora_from and len(config.experts) > 1:
        names = [factor_file(one.expert_name) for one in config.experts]
        if not all((Path(config.lora_from).expanduser() / name).is_file() for name in names):
            raise FileNotFoundError(
                f"model.dit.lora_from {config.lora_from} must be a folder that holds {' and '.join(names)}, as "
                f"model.dit.expert is both. Name your files so."
            )


def dit_skeleton(config: DiTConfig) -> nn.Module:
    """The module of `build_dit` on the meta device: names, shapes and what is trainable, without memory or weights."""
    import torch

    from ops.models.undrawn import Undrawn

    with torch.device("meta"), Undrawn():
        return bare_dit(config)


def _random_dit(config: DiTConfig, seed: int) -> nn.Module:
    with drawn_from(seed):
        return bare_dit(config)


def num_trained(config: DiTConfig) -> int:
    """Trainable weights of the transformer; counted without memory."""
    return sum(weight.numel() for weight in dit_skeleton(config).parameters() if weight.requires_grad)


def check_trained(config: DiTConfig, optimizer: str) -> None:
    """Raises ValueError, one sentence, for settings of a resolved config that name nothing in its transformer, or that
    leave this kind of optimizer nothing to train. Counted without memory."""
    from ops.update.flat_vector import slots, trainable
    from ops.update.muon import matrices_of

    skeleton = dit_skeleton(config)
    if optimizer == "muon":
        matrices_of(skeleton, slots(trainable(skeleton)))


def trained_part(config: DiTConfig) -> TrainedPart:
    """What of the transformer's blocks is trained; of patterns by the names of its weights. Weights in front of the
    blocks have gradients through all of them. Raises ValueError for a pattern that names nothing."""
    if not (config.train_only or config.lora_targets):
        return config.usual_part
    from ops.models.experts import transformers

    parts = [_part_of(one) for one in transformers(dit_skeleton(config))]
    return TrainedPart(
        weights=statistics.fmean(part.weights for part in parts), blocks=statistics.fmean(part.blocks for part in parts)
    )


def _part_of(transformer: nn.Module) -> TrainedPart:
    from ops.models.base.transformer import PackedTransformer
    from ops.models.lora import projections

    assert isinstance(transformer, PackedTransformer)
    config, blocks = transformer.config, transformer.all_blocks()
    count = sum(config.block_counts)
    blocks = blocks[len(blocks) - count :]  # those of the text come before them
    if config.spatial_temporal:  # these take turns
        blocks = [block for pair in zip(blocks[: count // 2], blocks[count // 2 :], strict=True) for block in pair]
    inside = {weight for block in blocks for weight in block.parameters()}
    # of all families the root's own table, which comes first of its parameters, is of the output
    named = (weight for name, weight in transformer.named_parameters() if name != "scale_shift_table")
    before = takewhile(lambda weight: weight not in inside, named)
    trained = [number for number, block in enumerate(blocks) if any(one.requires_grad for one in block.parameters())]
    first = 0 if any(weight.requires_grad for weight in before) else min(trained, default=count)
    products = [weight for weight in projections(transformer, config) if weight in inside]  # as `ForwardFlops` counts
    own = sum(weight.numel() for weight in products if weight.requires_grad)
    return TrainedPart(weights=own / sum(weight.numel() for weight in products), blocks=1 - first / count)


def bare_dit(config: DiTConfig) -> nn.Module:
    """The module of a config as its class makes it, in the default dtype, with LoRA's factors if it asks for them, and
    with what it does not train frozen."""
    if len(config.experts) > 1:
        from ops.models.experts import ExpertPair

        return ExpertPair(*(bare_dit(one) for one in config.experts))
    module = FAMILIES[config.architecture].model()(config)
    if config.lora_rank:
        from ops.models.lora import add_lora

        add_lora(module, config)
    if config.train_only:
        from ops.models.train_only import freeze_others

        freeze_others(module, config.train_only)
    return module


def build_vae(config: VAEConfig, device: torch.device | str = "cpu", shared: bool = False) -> VAE:
    """The frozen autoencoder of `config` on `device`. `shared`: weights of a folder that lie in host memory are there
    once for all processes of the node that ask for it; so for the other encoders."""
    if config.kind == "haar":
        from ops.models.haar import HaarVAE

        return HaarVAE(config, device)
    from ops.models.chunked import chunked_vae, is_chunked
    from ops.models.vae import diffusers_vae

    return chunked_vae(config, device, shared) if is_chunked(config) else diffusers_vae(config, device, shared)


def bare_vae(config: VAEConfig, device: str = "cpu") -> VAE:
    """The autoencoder of `build_vae` on the CPU, in dtype and layout as on that kind of device. Of a folder only
    config.json is read, no weights."""
    if config.kind == "haar":
        return build_vae(config, "cpu")
    from ops.models.chunked import bare_chunked, is_chunked
    from ops.models.vae import vae_without_weights

    return bare_chunked(config, device) if is_chunked(config) else vae_without_weights(config, device)


def build_text(config: TextConfig, device: torch.device | str = "cpu", shared: bool = False) -> TextEncoder:
    """The frozen text encoders of a resolved `config` on `device`."""
    if config.recipe and config.recipe.second == "connectors":
        from ops.models.text_layers import folder_layers, random_layers

        return folder_layers(config, device, shared) if config.path else random_layers(config, device)
    if config.recipe:
        from ops.models.text_pair_load import folder_pair, random_pair

        return folder_pair(config, device, shared) if config.path else random_pair(config, device)
    from ops.models.text import folder_t5, random_t5

    return folder_t5(config, device, shared) if config.path else random_t5(config, device)


def token_counter(config: TextConfig) -> Callable[[str], int]:
    """Counts the tokens of a caption before it is cut at `max_length`, with the tokenizer alone. The end mark counts;
    the copy of quoted text that a second encoder reads does not."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    from ops.models.folders import text_parts
    from ops.models.text import prepared
    from ops.models.text_pair import as_seen, recipe_of
    from ops.models.text_pair_load import byte_tokenizer

    recipe = recipe_of(config) if config.recipe else None
    tokenizer: Tokenizer = byte_tokenizer(config) if recipe else ByT5Tokenizer()
    if config.path:
        folder = text_parts(config)[recipe.states_parts[1] if recipe else "tokenizer"]
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if recipe:
        marks = not recipe.system  # a chat template has its own

        def count(caption: str) -> int:
            prompt = recipe.prompt(as_seen(caption, recipe))
            return len(tokenizer(prompt, add_special_tokens=marks, verbose=False).input_ids) - recipe.crop

        return count
    return lambda caption: len(tokenizer(prepared(caption, config), verbose=False).input_ids)


def build_image(
    config: ImageConfig | None, device: torch.device | str = "cpu", shared: bool = False
) -> ImageEncoder | None:
    """The frozen image encoder of `config` on `device`, where there is one."""
    if config is None:
        return None
    from ops.models.image import folder_clip, random_clip

    return folder_clip(config, device, shared) if config.path else random_clip(config, device)
