"""LoRA: low-rank factors beside frozen projections (Hu et al. 2021), W x + (alpha / rank) B A x; and DoRA, which also
trains the length of every row of that sum (Liu et al. 2024).

Parameter names are peft's without its prefix (`blocks.0.attn1.to_q.lora_A.weight`), so files need no renaming.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from ops.models.base.config import DiTConfig
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.float8 import FrozenDtype, FrozenLinear, wide_weight
from ops.models.seeded import drawn_from
from ops.models.train_only import nearest
from ops.precision import precise_product

_PART_ELEMENTS = 1 << 24  # of a weight in 8 bits that are widened at a time: 64 MiB in fp32
A, B, M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


class LoRALinear(FrozenLinear):
    """A frozen projection with trainable factors. B starts at zero, so training starts from the base model."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: FrozenDtype = "same") -> None:
        super().__init__(base, dtype)
        self.scale = scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.reset_factors()

    def reset_factors(self) -> None:
        """B A = 0, with A drawn from torch's generator."""
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.product(x, self.bias) + self.scale * self.lora_B(self.lora_A(x))


class DoRALinear(LoRALinear):
    """m / |W + s B A| (W + s B A) x with a trained m per row (Liu et al. 2024, eq. 5), which starts as those lengths.

    In the backward the lengths that are divided by are constants (section 4.3 there), as in PEFT.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float, dtype: FrozenDtype = "same") -> None:
        super().__init__(base, rank, scale, dtype)
        self.lora_magnitude_vector = nn.Parameter(self.row_lengths().to(self.lora_A.weight.dtype))

    @torch.no_grad()
    def row_lengths(
        self, weight: Tensor | None = None, weight_scale: Tensor | None = None, *, part_elements: int = _PART_ELEMENTS
    ) -> Tensor:
        """|W + s B A| of every row in at least fp32: [out]. Of the layer's own W, or of what is `held` of a given one.

        From |W|^2 + 2 s (W A') B + s^2 |B A|^2, so that neither the sum nor W is copied in fp32; W in 8 bits is widened
        some rows at a time, of `part_elements`.
        """
        if weight is None:
            weight, weight_scale = self.weight, self.weight_scale
        wide = self.lora_A.weight.dtype if weight_scale is not None else weight.dtype
        dtype = torch.promote_types(wide, torch.float32)
        if weight.is_meta:
            return weight.new_empty(len(weight), dtype=dtype)
        b = self.lora_B.weight
        if weight_scale is None:
            return self._lengths(weight, b, dtype)
        rows = max(1, part_elements // weight.shape[1])
        parts = zip(weight.split(rows), weight_scale.split(rows), b.split(rows), strict=True)
        return torch.cat([self._lengths(wide_weight(part, scale, dtype), of_b, dtype) for part, scale, of_b in parts])

    def _lengths(self, weight: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """The lengths of these rows of W + s B A, with the rows `b` of B."""
        a, b = (factor.to(weight.device, dtype) for factor in (self.lora_A.weight, b))
        own = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        crossed = (precise_product(a, weight).T * b).sum(1)
        added = (precise_product(b, precise_product(a, a)) * b).sum(1)
        return (own + 2 * self.scale * crossed + self.scale**2 * added).clamp(min=0).sqrt()

    def begin_with_lengths(self, dtype: torch.dtype) -> None:
        """m as |W + s B A| of weights that are rounded to `dtype`: the layer is then what LoRA's is."""
        weight = self.weight if self.weight_scale is not None else self.weight.to(dtype)
        self.lora_magnitude_vector = nn.Parameter(self.row_lengths(weight, self.weight_scale))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        y = self.product(x, None) + self.scale * self.lora_B(self.lora_A(x))
        m = self.lora_magnitude_vector
        lengths = self.row_lengths().to(m.dtype)  # rounded as m is: in bf16, too, training starts from the base model
        dtype = torch.promote_types(m.dtype, torch.float32)
        ratio = m.to(dtype) / lengths.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        y = torch.addcmul(y, y, (ratio - 1).to(y.dtype))  # of few bits, a small number keeps more than one near 1
        return y if self.bias is None else y + self.bias.to(y.dtype)


def lora_scale(config: DiTConfig) -> float:
    """alpha / rank; an alpha of 0 means equal to the rank."""
    return (config.lora_alpha or config.lora_rank) / config.lora_rank


def add_lora(module: nn.Module, config: DiTConfig) -> None:
    """Freeze `module` and give the attention and MLP projections of its blocks trainable factors, or those of them that
    `lora_targets` names; all of them are held in `frozen_dtype`. Raises ValueError for a pattern that names none, with
    the nearest that exist."""
    module.requires_grad_(False)
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    known = _projections(layers, config)
    for pattern in config.lora_targets:
        if not any(_is_target(name, pattern) for name in known):
            ends = [_any_end(name) for name in known]
            raise ValueError(
                f"model.dit.lora_targets {pattern!r} names no attention or MLP projection of this transformer; near "
                f"are {', '.join(nearest(pattern, ends))}."
            )
    for name in known:
        if not config.lora_targets or any(_is_target(name, pattern) for pattern in config.lora_targets):
            kind = DoRALinear if config.lora_dora else LoRALinear
            scale = lora_scale(config)
            module.set_submodule(name, kind(layers[name], config.lora_rank, scale, config.frozen_dtype))
        elif config.frozen_dtype != "same":
            module.set_submodule(name, FrozenLinear(layers[name], config.frozen_dtype))


def _projections(layers: Iterable[str], config: DiTConfig) -> list[str]:
    """Those of the layers that factors are made for in this family."""
    names = FAMILIES[config.architecture].lora_names
    return [name for name in layers if name.startswith(names.blocks) and name.endswith(names.projections)]


def projections(module: nn.Module, config: DiTConfig) -> list[Tensor]:
    """The weights, without factors, of the attention and MLP projections of a transformer's blocks."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return [layers[name].weight for name in _projections(layers, config)]


def _is_target(layer: str, pattern: str) -> bool:
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"*.{pattern}")


def _any_end(layer: str) -> str:
    """What follows the number of its block."""
    return layer.split(f".{_block(layer)}.", 1)[1]


def first_factors(module: nn.Module, seed: int) -> nn.Module:
    """Give the factors of a module on the meta device values, in fp32 on the CPU, drawn from `seed`. Magnitudes stay
    there: they follow from weights."""
    with drawn_from(seed):
        for layer in (part for part in module.modules() if isinstance(part, LoRALinear)):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_factors()
    return module


def merged(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The state dict of the plain model with the same outputs: W + scale B A, with DoRA its rows as long as m says; and
    no factors."""
    result = {name: tensor for name, tensor in state.items() if not name.endswith((A, B, M))}
    for name in state:
        if name.endswith(A):
            layer = name.removesuffix(A)
            weight = layer + ".weight"
            whole = state[weight].double() + scale * (state[layer + B].double() @ state[name].double())
            if layer + M in state:
                lengths = whole.norm(dim=1).clamp(min=torch.finfo(whole.dtype).tiny)
                whole = (state[layer + M].double() / lengths)[:, None] * whole
            result[weight] = whole.to(state[weight].dtype)
    return result


def for_diffusers(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The factors, and DoRA's magnitudes, as `pytorch_lora_weights.safetensors` holds them. The scale goes into B:
    readers of files without an alpha take it as equal to the rank."""
    return {
        f"transformer.{name}": (scale * tensor if name.endswith(B) else tensor).to(torch.float32).contiguous()
        for name, tensor in state.items()
        if name.endswith((A, B, M))
    }


def for_comfyui(state: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """The factors by the names of the original code, as ComfyUI reads them; scaled as in `for_diffusers`. Of layers
    that are one there, A's stand below each other and B's in the blocks of a diagonal, which has zeros for those of
    them without factors. Empty for a family whose original names are not known, and for DoRA: ComfyUI divides by |W|
    where PEFT divides by |W + s B A|, so no file of factors means the same in both."""
    if config.lora_dora:
        return {}
    factors = {name.removeprefix("transformer."): t for name, t in for_diffusers(state, lora_scale(config)).items()}
    written = {}
    for original, layers in _originals(_known_layers(state, config), config).items():
        trained = [layer for layer in layers if layer + A in factors]
        if not trained:
            continue
        empty = {layer: factors[trained[0] + B].new_zeros(_rows(state, layer), 0) for layer in layers}
        b = torch.block_diag(*(factors.pop(layer + B, empty[layer]) for layer in layers))
        written[f"diffusion_model.{original}{A}"] = torch.cat([factors.pop(layer + A) for layer in trained])
        written[f"diffusion_model.{original}{B}"] = _other_halves(b) if _is_swapped(original, config) else b
    return written


def _known_layers(state: Mapping[str, Tensor], config: DiTConfig) -> list[str]:
    """The layers of a state that have factors or could have some."""
    plain = _projections([name.removesuffix(".weight") for name in state if name.endswith(".weight")], config)
    return list(dict.fromkeys([*plain, *(name.removesuffix(A) for name in state if name.endswith(A))]))


def _rows(state: Mapping[str, Tensor], layer: str) -> int:
    name = layer + ".weight" if layer + ".weight" in state else layer + B
    return len(state[name])


def _originals(layers: Sequence[str], config: DiTConfig) -> dict[str, list[str]]:
    """Name of a layer in the original code -> our layers that are it, in the order of its rows."""
    table = FAMILIES[config.architecture].lora_names.original
    if table is None:
        return {}
    order = {ours: place for place, ours in enumerate(table)}
    found: dict[str, list[str]] = {}
    for layer in sorted(layers, key=lambda layer: order.get(_of_any_block(layer), 0)):
        ours = _of_any_block(layer)
        found.setdefault(table.get(ours, ours).replace("*", _block(layer)), []).append(layer)
    return found


def _read_too(parameters: Iterable[str], config: DiTConfig) -> list[tuple[str, list[str]]]:
    """(further name of a layer, that layer of ours alone)"""
    names = FAMILIES[config.architecture].lora_names
    layers = [name.removesuffix(".weight") for name in parameters if name.startswith(names.blocks)]
    return [
        (name.replace("*", _block(layer)), [layer])
        for layer in layers
        for name in names.read_too.get(_of_any_block(layer), ())
    ]


def _of_any_block(layer: str) -> str:
    return layer.replace(f".{_block(layer)}.", ".*.", 1)


def _block(layer: str) -> str:
    """The number of its block."""
    return next(part for part in layer.split(".") if part.isdigit())


def _is_swapped(original: str, config: DiTConfig) -> bool:
    return _of_any_block(original) in FAMILIES[config.architecture].lora_names.swapped


def _other_halves(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2)
    return torch.cat([second, first])


def begin_with_file(module: nn.Module, config: DiTConfig, dtype: torch.dtype) -> None:
    """Give factors the values of `config.lora_from`; those that the file lacks stay as they are. Magnitudes that it
    lacks become the lengths of the rows as they are then, with weights in `dtype`; of weights on the meta device, they
    stay there."""
    given = read_factors(module, config)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in given.items():
            if name.endswith(M):
                layer = module.get_submodule(name.removesuffix(M))
                layer.lora_magnitude_vector = nn.Parameter(tensor.to(torch.float32))
            else:
                parameters[name].copy_(tensor)
    for name, part in module.named_modules():
        if isinstance(part, DoRALinear) and name + M not in given:
            part.begin_with_lengths(dtype)


def read_factors(module: nn.Module, config: DiTConfig) -> dict[str, Tensor]:
    """The factors in `config.lora_from` by the names of `module`, which may be on the meta device, scaled so that
    W + (alpha / rank) B A is what the file means; none without a file. Raises ValueError for a file of another model,
    rank or naming.

    Names may begin with `transformer.` (Diffusers) or `base_model.model.` (PEFT), or be those of the original code,
    alone or with `diffusion_model.` (ComfyUI), `lora_unet_` (kohya) or `pipe.dit.` (DiffSynth-Studio). The scale is
    that of `.alpha`, or what Diffusers wrote into the file's header or PEFT into the `adapter_config.json` beside it;
    else B holds it (`for_diffusers`).
    """
    if not config.lora_from:
        return {}
    file = file_of_factors(config)
    parameters = dict(module.named_parameters())
    factors = _factors_in(file, f"model.dit.lora_from {file}", parameters, config)
    if not config.lora_dora and (magnitude := next((name for name in factors if name.endswith(M)), None)):
        raise ValueError(
            f"model.dit.lora_from {file} holds {magnitude}: it is DoRA, and model.dit.lora_dora is false. Set it to "
            f"true."
        )
    for name, tensor in list(factors.items()):
        layer = name.removesuffix(A).removesuffix(B).removesuffix(M)
        if name not in parameters and layer in _projections([layer], config) and layer + ".weight" in parameters:
            if name.endswith(M) or factors.get(layer + B, tensor).any():
                raise ValueError(
                    f"model.dit.lora_from {file} has factors of {layer}, which model.dit.lora_targets "
                    f"{list(config.lora_targets)} leaves out; without them it is another model. Name that layer, too."
                )
            del factors[name]  # what a layer that is fused in the original code holds for its parts without factors
        elif name not in parameters and _MODULATION.search(layer):
            raise ValueError(
                f"model.dit.lora_from {file} has factors of {layer}, a modulation, which gets none here; without them "
                f"it is another model. Train it without these (musubi-tuner: --network_args "
                f"\"exclude_patterns=[r'.*_mod.*']\"), or merge the file into the weights of model.dit.path, and leave "
                f"lora_from out."
            )
        elif name not in parameters and any(part in layer for part in FAMILIES[config.architecture].kept):
            raise ValueError(
                f"model.dit.lora_from {file} has factors of {layer}, which is not computed here; without them it is "
                f"another model. Give a file without such layers, or merge this one into the weights of "
                f"model.dit.path, and leave lora_from out."
            )
        elif name not in parameters or parameters[name].shape != tensor.shape:
            wanted = f"{list(parameters[name].shape)} here" if name in parameters else "not in this model"
            raise ValueError(
                f"model.dit.lora_from {file}: {name} is {list(tensor.shape)} and {wanted}, with model.dit.lora_rank "
                f"{config.lora_rank}. Give factors of the same model, and their rank."
            )
    for name in factors:  # in place: they may take gigabytes
        if name.endswith(B):
            factors[name] = factors[name] / lora_scale(config)
    return factors


def _factors_in(file: Path, said: str, weights: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """What a file holds by the names of a module with these `weights`; every B is scaled so that W + B A is meant.
    Messages name the file as it was `said`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored, declared = load_file(file), _declared_scale(file, said)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}. Copy it again.") from error
    found = _by_our_names(stored, weights, config, declared)
    factors = {name: tensor for name, tensor in found.items() if name.endswith((A, B, M))}
    if not factors:
        raise ValueError(
            f"{said} holds no factors named ...{A}, as PEFT and Diffusers write them (first name: "
            f"{min(found, default='none')}). Convert it to Diffusers' names."
        )
    if others := sorted(name for name in found if name not in factors):
        raise ValueError(
            f"{said} holds {others[0]} beside factors: it is not LoRA alone, and would mean another model without it. "
            f"Give factors alone; of DoRA in Diffusers' or PEFT's names."
        )
    return factors


def factors_for(file: Path, weights: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """The factors in a file, of any ranks, for layers of the plain transformer of `config` with these `weights` (name
    to tensor, maybe on the meta device), scaled so that W + B A is what the file means. Those of layers that are not
    computed here (`Family.kept`) are left out. Raises ValueError for a file of another model or naming."""
    kept = FAMILIES[config.architecture].kept
    found = _factors_in(file, str(file), weights, replace(config.without_lora(), lora_from=None))
    factors = {name: tensor for name, tensor in found.items() if not any(part in name for part in kept)}
    for layer in dict.fromkeys(name.removesuffix(A).removesuffix(B).removesuffix(M) for name in factors):
        weight, a, b = weights.get(layer + ".weight"), factors.get(layer + A), factors.get(layer + B)
        if weight is None:
            raise ValueError(
                f"{file} has factors of {layer}, and this transformer ({config.architecture}, "
                f"{config.num_layers} layers) has no such layer. Give a file of the same model."
            )
        if a is None or b is None:
            raise ValueError(f"{file} has one of the two factors of {layer} alone. Give a whole file.")
        given = (len(b), a.shape[-1]) if a.dim() == b.dim() == 2 and len(a) == b.shape[1] else None
        if given != tuple(weight.shape):
            raise ValueError(
                f"{file} has factors {list(b.shape)} and {list(a.shape)} of {layer}, whose weight is "
                f"{list(weight.shape)} here. Give a file of the same model and size."
            )
    return factors


def factor_file(expert: str) -> str:
    """The name that Diffusers gives to a file of factors; of one of two experts ("high" or "low") with its name."""
    return f"pytorch_lora_weights{'_' if expert else ''}{expert}.safetensors"


def file_of_factors(config: DiTConfig) -> Path:
    """`config.lora_from` itself, or in a folder that of the expert, or of a run of that expert alone. Raises
    FileNotFoundError."""
    path, expert = Path(config.lora_from or "").expanduser(), config.expert_name
    names = dict.fromkeys([factor_file(expert), factor_file("")])
    found = [path / name for name in names if (path / name).is_file()] or [path / factor_file(expert)]
    file = found[0] if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"model.dit.lora_from {file} does not exist. Give the file of the factors, or its folder; or null for a "
            f"--resume, whose checkpoint has what came of them."
        )
    return file


def _declared_scale(file: Path, said: str) -> Callable[[int], float]:
    """Rank of a layer -> what is said of its scale beside the factors, as PEFT's LoraConfig, whose rank_pattern gives
    layers ranks of their own; 1 without a word. Raises ValueError for layers of their own alpha."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        header = (opened.metadata() or {}).get("lora_adapter_metadata", "{}")
    beside = file.with_name("adapter_config.json")
    declared = {name.removeprefix("transformer."): value for name, value in json.loads(header).items()}
    if not declared and file.name == "adapter_model.safetensors" and beside.is_file():
        declared = read_json(beside)
    if declared.get("alpha_pattern"):
        raise ValueError(f"{said} has layers of their own alpha (alpha_pattern). Save it with one alpha for all.")
    if not declared.get("lora_alpha") or not declared.get("r"):
        return lambda rank: 1.0
    alpha, by_root = float(declared["lora_alpha"]), declared.get("use_rslora")
    return lambda rank: alpha / (math.sqrt(rank) if by_root else rank)


# in the code of HunyuanVideo, 1.5 and FLUX.1, in ComfyUI's and in Diffusers'
_MODULATION = re.compile(r"(img|txt)_mod[._]lin|modulation[._]lin|\bnorm1?(_context)?\.linear\b")
_ENDINGS = {
    A: A,
    B: B,
    M: M,
    ".lora_down.weight": A,
    ".lora_up.weight": B,
    ".lora_A.default.weight": A,  # PEFT's own name of its one adapter, which DiffSynth-Studio keeps
    ".lora_B.default.weight": B,
    ".alpha": ".alpha",
}
_BEGINNINGS = ("transformer.", "base_model.model.", "pipe.dit.")  # of Diffusers, PEFT and DiffSynth-Studio


def _by_our_names(
    stored: Mapping[str, Tensor], parameters: Mapping[str, Tensor], config: DiTConfig, declared: Callable[[int], float]
) -> dict[str, Tensor]:
    """What a file holds, under our names; layers that this model does not have keep theirs. Every B is scaled so that
    W + B A is meant: by the `.alpha` of its layer, or as `declared` by its rank."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
        layer = name.removesuffix(ending)
        for beginning in _BEGINNINGS:
            layer = layer.removeprefix(beginning)
        files.setdefault(layer, {})[_ENDINGS.get(ending, "")] = tensor
    ours: dict[str, tuple[str, list[str]]] = {}
    known = _known_layers(parameters, config)
    for original, layers in (*_originals(known, config).items(), *_read_too(parameters, config)):
        names = (original, f"diffusion_model.{original}", f"lora_unet_{original.replace('.', '_')}")
        ours |= dict.fromkeys(names, (original, layers))
    found: dict[str, Tensor] = {}
    for layer, parts in files.items():
        alpha = parts.pop(".alpha", None)
        if B in parts:
            rank = parts[B].shape[-1]
            parts[B] = parts[B].float() * (declared(rank) if alpha is None else float(alpha) / rank)
        if layer in ours and {A, B} <= parts.keys():
            original, layers = ours[layer]
            if _is_swapped(original, config):
                parts[B] = _other_halves(parts[B])
            found |= _split(parts.pop(A), parts.pop(B), [(name, _rows(parameters, name)) for name in layers], config)
        found |= {layer + ending: tensor for ending, tensor in parts.items()}
    return found


def _split(a: Tensor, b: Tensor, layers: Sequence[tuple[str, int]], config: DiTConfig) -> dict[str, Tensor]:
    """Factors of a layer as those of ours that it is made of, each (name, rows): with ranks of their own where B is a
    diagonal of blocks, some of which may be left out, and else with the same A."""
    rows, rank = [size for _, size in layers], config.lora_rank
    if len(b) != sum(rows):  # of another model: refused by its shapes
        return {layers[0][0] + A: a, layers[0][0] + B: b}
    own = b.split(rows)
    for some in (range(len(own)), [i for i, part in enumerate(own) if part.any()]):
        if len(own) == 1 or len(a) != len(some) * rank:
            continue
        blocks = [part.new_zeros(len(part), 0) for part in own]
        for n, i in enumerate(some):
            blocks[i] = own[i][:, n * rank : (n + 1) * rank]
        if torch.equal(torch.block_diag(*blocks), b):
            pieces = zip(some, a.split(rank), strict=True)
            return {layers[i][0] + ending: t for i, of_a in pieces for ending, t in ((A, of_a), (B, blocks[i]))}
    return {
        layer + ending: t for (layer, _), part in zip(layers, own, strict=True) for ending, t in ((A, a), (B, part))
    }
