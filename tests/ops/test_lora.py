"""LoRA: starts from the base model, trains its factors alone, merges into plain weights with the same outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import peft
import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import save_file

from app.export.parity import our_velocity, parity_sample, their_velocity
from ops.models.base.config import DiTConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.kandinsky.config import KandinskyConfig
from ops.models.load import build_dit, check_factors, dit_skeleton, first_values, kept_weights
from ops.models.lora import A, B, DoRALinear, LoRALinear, M, factors_for, for_comfyui, for_diffusers, lora_scale, merged
from ops.models.ltx.config import LTXConfig
from ops.models.wan.config import WanConfig
from ops.models.weights import is_lora, write_folder
from tests.app.test_single_file import as_original
from tests.families.kit import their_class
from tests.families.registry import CASES, ONE_EACH, VARIANTS

FP32_ATOL = 1e-5
WAN = WanConfig(
    num_layers=2,
    num_heads=2,
    head_dim=12,
    ffn_dim=40,
    freq_dim=16,
    text_dim=8,
    in_channels=4,
    out_channels=4,
    lora_rank=3,
    lora_alpha=6.0,
)


def with_factors(case: str) -> DiTConfig:
    return replace(VARIANTS[case], lora_rank=2, lora_alpha=3.0)


def forward(module: torch.nn.Module) -> torch.Tensor:
    return our_velocity(module, parity_sample(module.config))


def disturb(module: torch.nn.Module) -> None:
    """As after some training: factors away from their start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("case", ONE_EACH)
def test_starts_from_the_base_model_and_merges_exactly(case: str, dora: bool) -> None:
    config = replace(with_factors(case), lora_dora=dora)
    module = build_dit(config, seed=0)
    plain = build_dit(config.without_lora(), seed=0)
    torch.testing.assert_close(forward(module), forward(plain), atol=FP32_ATOL, rtol=0)
    disturb(module)
    assert (forward(module) - forward(plain)).abs().max() > 1e-3
    plain.load_state_dict(merged(module.state_dict(), lora_scale(config)))
    torch.testing.assert_close(forward(module), forward(plain), atol=FP32_ATOL, rtol=FP32_ATOL)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("family", CASES)
def test_only_the_factors_get_gradients(family: str, dora: bool) -> None:
    case = next(case for case in ONE_EACH if VARIANTS[case].architecture == family)
    module = build_dit(replace(with_factors(case), lora_dora=dora), seed=0)
    disturb(module)
    forward(module).square().sum().backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    factors = {name for name in module.state_dict() if "lora_" in name}
    assert trained == {name for name in factors if not re.search(CASES[family].unread, name)}
    assert all(any(f"{name}.lora_A" in parameter for parameter in trained) for name in CASES[family].lora)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (("to_q", "to_v"), {f"blocks.{i}.attn{k}.to_{x}" for i in (0, 1) for k in (1, 2) for x in "qv"}),
        (("attn1.*",), {f"blocks.{i}.attn1.{x}" for i in (0, 1) for x in ("to_q", "to_k", "to_v", "to_out.0")}),
        (("blocks.1.ffn.*",), {"blocks.1.ffn.net.0.proj", "blocks.1.ffn.net.2"}),
        (("blocks.0.attn2.to_k",), {"blocks.0.attn2.to_k"}),
    ],
)
def test_targets_name_layers_or_their_ends(targets: tuple[str, ...], layers: set[str]) -> None:
    module = dit_skeleton(replace(WAN, lora_targets=targets))
    trained = {name.removesuffix(A) for name, weight in module.named_parameters() if weight.requires_grad and A in name}
    assert trained == layers


@pytest.mark.parametrize("target", ["to_r", "norm_q", "blocks.2.attn1.to_q", "proj_out"])
def test_a_target_that_is_no_projection_is_answered_with_near_ones(target: str) -> None:
    with pytest.raises(
        ValueError, match=r"lora_targets .* names no attention or MLP projection .* near are \S+"
    ) as told:
        dit_skeleton(replace(WAN, lora_targets=("to_q", target)))
    assert repr(target) in str(told.value)


def test_targets_without_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora_targets \['to_q'\] names what gets LoRA factors, and lora_rank is 0"):
        replace(WAN, lora_rank=0, lora_targets=("to_q",))


@pytest.mark.parametrize("case", ONE_EACH)
def test_every_second_layer_alone_is_read_back_by_its_original_name(case: str, tmp_path: Path) -> None:
    """Some layers with factors are one with layers without in the original code."""
    whole = with_factors(case)
    layers = [name.removesuffix(A) for name in dit_skeleton(whole).state_dict() if name.endswith(A)]
    config = replace(whole, lora_targets=tuple(layers[::2]))
    source = moved(config, 1).state_dict()
    wanted = merged(source, lora_scale(config))
    for write in (for_diffusers(source, lora_scale(config)), for_comfyui(source, config)):
        if not write:
            continue  # original names are not known
        save_file({name: tensor.contiguous() for name, tensor in write.items()}, tmp_path / "some.safetensors")
        again = replace(config, lora_from=str(tmp_path / "some.safetensors"))
        state = build_dit(again, seed=0).state_dict()
        assert state.keys() == source.keys()
        found = merged(state, lora_scale(again))
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
        with pytest.raises(ValueError, match=r"has factors of \S+, which model\.dit\.lora_targets"):
            build_dit(replace(again, lora_targets=(layers[0],)), seed=0)


def test_file_for_diffusers_folds_the_scale_into_b() -> None:
    config = WAN
    module = build_dit(config, seed=0)
    disturb(module)
    state, file = module.state_dict(), for_diffusers(module.state_dict(), lora_scale(config))
    name = "blocks.1.attn1.to_v"
    assert torch.equal(file[f"transformer.{name}.lora_A.weight"], state[f"{name}.lora_A.weight"])
    assert torch.equal(file[f"transformer.{name}.lora_B.weight"], 2.0 * state[f"{name}.lora_B.weight"])
    assert len(file) == 2 * 2 * 10  # A and B of ten projections in each of two blocks


def moved(config: DiTConfig, seed: int) -> torch.nn.Module:
    """A module whose factors have been trained."""
    module = build_dit(config, seed=0)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_lora(name):
                parameter.copy_(torch.randn(parameter.shape, generator=numbers))
    return module


@pytest.mark.parametrize("case", ONE_EACH)
def test_factors_that_were_written_are_read_back(case: str, tmp_path: Path) -> None:
    config = with_factors(case)
    source = moved(config, 1).state_dict()
    save_file(for_diffusers(source, lora_scale(config)), tmp_path / "pytorch_lora_weights.safetensors")
    again = replace(config, lora_alpha=4.0, lora_from=str(tmp_path))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 6.0])
@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", ""])
def test_factors_of_a_file_mean_the_same_model_whatever_the_scale(tmp_path: Path, alpha: float, prefix: str) -> None:
    config = replace(WAN, lora_rank=3, lora_alpha=1.5)
    source = moved(config, 1).state_dict()
    file = {name.replace("transformer.", prefix): t for name, t in for_diffusers(source, lora_scale(config)).items()}
    if alpha:  # as files with an alpha mean it: B is not scaled
        scale = alpha / config.lora_rank
        file = {name: tensor / scale if name.endswith(B) else tensor for name, tensor in file.items()}
        file |= {name.removesuffix(B) + ".alpha": torch.tensor(alpha) for name in list(file) if name.endswith(B)}
    save_file(file, tmp_path / "pytorch_lora_weights.safetensors")
    again = replace(config, lora_alpha=4.0, lora_from=str(tmp_path))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
    first = first_values(again, 0)
    for name, parameter in build_dit(again, seed=0).named_parameters():
        if is_lora(name):
            assert torch.equal(first(name), parameter), "a worker that begins anew begins with them, too"


@pytest.mark.parametrize("by", ["Diffusers", "PEFT"])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_alpha_that_other_programs_write_beside_factors_is_their_scale(
    tmp_path: Path, by: str, rslora: bool
) -> None:
    """Diffusers since 0.34 in the header of the file, PEFT in adapter_config.json."""
    config = replace(WAN, lora_rank=4, lora_alpha=6.0)
    source = moved(config, 1).state_dict()
    alpha = 3.0 if rslora else 6.0  # 6 / 4 = 3 / sqrt(4)
    said = {"r": 4, "lora_alpha": alpha, "use_rslora": rslora, "alpha_pattern": {}}
    factors = {f"transformer.{name}": tensor for name, tensor in source.items() if is_lora(name)}
    file = tmp_path / ("pytorch_lora_weights.safetensors" if by == "Diffusers" else "adapter_model.safetensors")
    if by == "Diffusers":
        text = json.dumps({f"transformer.{name}": value for name, value in said.items()})
        save_file(factors, file, metadata={LORA_ADAPTER_METADATA_KEY: text, "format": "pt"})
    else:
        save_file(factors, file)
        (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    again = replace(config, lora_alpha=1.0, lora_from=str(file))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_of_their_own_scale_layers_as_in_peft(tmp_path: Path, rslora: bool) -> None:
    said = {"r": 8, "lora_alpha": 16, "use_rslora": rslora, "rank_pattern": {"to_k": 4}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    file, weights = tmp_path / "adapter_model.safetensors", dict(dit_skeleton(WAN.without_lora()).named_parameters())
    ranks = {"blocks.0.attn1.to_q": 8, "blocks.0.attn1.to_k": 4}
    size = weights["blocks.0.attn1.to_q.weight"].shape[0]
    stored = {f"{name}{A}": torch.ones(rank, size) for name, rank in ranks.items()}
    save_file(stored | {f"{name}{B}": torch.ones(size, rank) for name, rank in ranks.items()}, file)
    found = factors_for(file, weights, WAN)
    for name, rank in ranks.items():
        assert torch.equal(found[name + B], torch.full((size, rank), 16 / (rank**0.5 if rslora else rank)))


I2V = replace(WAN, in_channels=12, first_frame="channels", image_dim=20, lora_alpha=1.5)


def test_original_names_are_those_that_diffusers_knows() -> None:
    """Its readers of other programs' files make the names of its own from them, each layer's to the right place."""
    state = moved(I2V, 1).state_dict()
    native, ours = for_comfyui(state, I2V), for_diffusers(state, lora_scale(I2V))
    assert len(native) == len(ours) == 2 * 2 * 12
    read = lora_conversion_utils._convert_non_diffusers_wan_lora_to_diffusers(dict(native))
    assert read.keys() == ours.keys() and all(torch.equal(read[name], tensor) for name, tensor in ours.items())
    read = lora_conversion_utils._convert_musubi_wan_lora_to_diffusers(as_kohya(native))
    assert read.keys() == ours.keys()
    for name, tensor in ours.items():
        partner = name.replace("lora_A", "lora_B") if name.endswith(A) else name.replace("lora_B", "lora_A")
        product, wanted = (
            pair[0] @ pair[1] if name.endswith(B) else pair[1] @ pair[0]
            for pair in ((read[name], read[partner]), (tensor, ours[partner]))
        )
        torch.testing.assert_close(product, wanted, atol=1e-5, rtol=1e-5)


def as_kohya(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With an alpha of twice the rank, so B is half."""
    file = {}
    for name, tensor in native.items():
        layer = "lora_unet_" + name.removeprefix("diffusion_model.").removesuffix(A).removesuffix(B).replace(".", "_")
        if name.endswith(A):
            file[f"{layer}.lora_down.weight"] = tensor
        else:
            file[f"{layer}.lora_up.weight"], file[f"{layer}.alpha"] = tensor / 2, torch.tensor(2.0 * tensor.shape[1])
    return file


def as_diffsynth(native: dict[str, torch.Tensor], beginning: str) -> dict[str, torch.Tensor]:
    """As DiffSynth-Studio stores what PEFT names in a model of the original code."""
    return {
        beginning + re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix("diffusion_model.")): tensor
        for name, tensor in native.items()
    }


@pytest.mark.parametrize("kind", ["comfyui", "kohya", "DiffSynth", "DiffSynth whole"])
def test_factors_by_original_names_mean_the_same_model(kind: str, tmp_path: Path) -> None:
    source = moved(I2V, 1).state_dict()
    native = for_comfyui(source, I2V)
    if kind.startswith("DiffSynth"):
        native = as_diffsynth(native, "pipe.dit." if kind.endswith("whole") else "")
        assert "blocks.1.self_attn.q.lora_A.default.weight" in {name.removeprefix("pipe.dit.") for name in native}
    save_file(as_kohya(native) if kind == "kohya" else native, tmp_path / "other.safetensors")
    again = replace(I2V, lora_alpha=4.0, lora_from=str(tmp_path / "other.safetensors"))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(I2V)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"k_img.lora_[AB].weight is .* and not in this model"):
        build_dit(replace(WAN, lora_rank=3, lora_from=again.lora_from), 0)


WITH_ADAPTERS = [  # whose class in Diffusers takes factors
    case
    for case in ONE_EACH
    if hasattr(getattr(diffusers, FAMILIES[VARIANTS[case].architecture].diffusers_class, None), "add_adapter")
]
ORIGINALS = {name: cases.original for name, cases in CASES.items() if cases.original}


def by_original_names(family: str) -> DiTConfig:
    case = next(case for case in ONE_EACH if VARIANTS[case].architecture == family)
    return with_factors(case)


def in_original(family: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return as_original(state, ORIGINALS[family].renames, ORIGINALS[family].halves)


@pytest.mark.parametrize("family", ORIGINALS)
def test_factors_by_original_names_change_the_original_weights_as_ours_change_ours(family: str) -> None:
    config = by_original_names(family)
    state = moved(config, 1).state_dict()
    base = {name: tensor for name, tensor in state.items() if not is_lora(name)}
    before = in_original(family, base)
    after = in_original(family, merged(state, lora_scale(config)))
    native = {name.removeprefix("diffusion_model."): tensor for name, tensor in for_comfyui(state, config).items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name.removesuffix(A) + ".weight" for name in native if name.endswith(A)}
    for name in changed:
        layer = name.removesuffix(".weight")
        added = native[layer + B] @ native[layer + A]
        torch.testing.assert_close(before[name] + added, after[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", ORIGINALS)
@pytest.mark.parametrize("kind", ["comfyui", "kohya", "DiffSynth", "transformer.", "bare"])
def test_factors_of_fused_layers_come_back(family: str, kind: str, tmp_path: Path) -> None:
    config = by_original_names(family)
    source = moved(config, 1).state_dict()
    native = for_comfyui(source, config)
    bare = {"transformer.": "transformer.", "bare": ""}
    if kind == "kohya":
        native = as_kohya(native)
    elif kind == "DiffSynth":
        native = as_diffsynth(native, "pipe.dit.")
    elif kind != "comfyui":
        native = {bare[kind] + name.removeprefix("diffusion_model."): tensor for name, tensor in native.items()}
    save_file({name: tensor.contiguous() for name, tensor in native.items()}, tmp_path / "other.safetensors")
    again = replace(config, lora_alpha=3.0, lora_from=str(tmp_path / "other.safetensors"))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ORIGINALS)
def test_factors_that_were_trained_on_a_fused_layer_are_read(family: str, tmp_path: Path) -> None:
    """One A for queries, keys, values and the MLP, as kohya's trainers make it."""
    config = by_original_names(family)
    numbers = torch.Generator().manual_seed(2)
    shapes = for_comfyui(moved(config, 1).state_dict(), config)
    rank = config.lora_rank
    native = {
        name: torch.randn((rank, t.shape[1]) if name.endswith(A) else (len(t), rank), generator=numbers)
        for name, t in shapes.items()
    }
    save_file(as_kohya(native), tmp_path / "kohya.safetensors")
    again = replace(config, lora_alpha=3.0, lora_from=str(tmp_path / "kohya.safetensors"))
    state = build_dit(again, seed=0).state_dict()
    base = {name: tensor for name, tensor in state.items() if not is_lora(name)}
    before = in_original(family, base)
    after = in_original(family, merged(state, lora_scale(again)))
    for name in (name for name in native if name.endswith(A)):
        layer = name.removeprefix("diffusion_model.").removesuffix(A)
        wanted = before[layer + ".weight"] + native[name.removesuffix(A) + B] @ native[name]
        torch.testing.assert_close(after[layer + ".weight"], wanted, atol=1e-5, rtol=1e-5, msg=layer)


@pytest.mark.parametrize("family", ["flux", "hunyuan"])
def test_original_names_of_fused_layers_are_those_that_diffusers_knows(family: str) -> None:
    """Its readers split at the published width of 3,072: factors of all rows, over two inputs of each layer."""
    config = replace(by_original_names(family), num_heads=24, head_dim=128, ffn_dim=12288)
    numbers = torch.Generator().manual_seed(3)
    state = {
        name: torch.randn((len(t), 2) if name.endswith(A) else t.shape, generator=numbers)
        for name, t in dit_skeleton(config).state_dict().items()
        if is_lora(name)
    }
    native, ours = for_comfyui(state, config), for_diffusers(state, lora_scale(config))
    if family == "flux":
        read = lora_conversion_utils._convert_kohya_flux_lora_to_diffusers(as_kohya(native))
    else:
        read = lora_conversion_utils._convert_hunyuan_video_lora_to_diffusers(dict(native))
    assert read.keys() == ours.keys()
    for name in (name for name in ours if name.endswith(A)):
        b = name.removesuffix(A) + B
        torch.testing.assert_close(read[b] @ read[name], ours[b] @ ours[name], atol=1e-4, rtol=1e-5, msg=name)


def test_names_of_ltx_are_those_that_diffusers_knows() -> None:
    config = LTXConfig(num_layers=1, num_heads=2, head_dim=8, ffn_dim=64, text_dim=8, lora_rank=2)
    state = moved(config, 1).state_dict()
    read = lora_conversion_utils._convert_non_diffusers_ltxv_lora_to_diffusers(dict(for_comfyui(state, config)))
    ours = for_diffusers(state, lora_scale(config))
    assert read.keys() == ours.keys() and all(torch.equal(read[name], tensor) for name, tensor in ours.items())


KANDINSKY = {  # the layers that musubi-tuner trains, of a block of its text and of its clip, as ComfyUI names them
    "text_transformer_blocks": ("self_attention", "feed_forward"),
    "visual_transformer_blocks": ("self_attention", "cross_attention", "feed_forward"),
}


@pytest.mark.parametrize("kind", ["comfyui", "kohya"])
def test_names_of_kandinsky_are_those_of_its_own_code(kind: str, tmp_path: Path) -> None:
    config = KandinskyConfig(
        num_layers=1, num_text_layers=1, num_heads=2, head_dim=8, ffn_dim=64, time_dim=8, text_dim=8, lora_rank=2
    )
    source = moved(config, 1).state_dict()
    native = for_comfyui(source, config)
    layers = {
        f"diffusion_model.{blocks}.0.{part}.{layer}"
        for blocks, parts in KANDINSKY.items()
        for part in parts
        for layer in (
            ("in_layer", "out_layer") if part == "feed_forward" else ("to_query", "to_key", "to_value", "out_layer")
        )
    }
    assert native.keys() == {layer + factor for layer in layers for factor in (A, B)}
    save_file(native if kind == "comfyui" else as_kohya(native), tmp_path / "other.safetensors")
    again = replace(config, lora_alpha=6.0, lora_from=str(tmp_path / "other.safetensors"))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


HUNYUAN15 = {  # ComfyUI's layers of a double block, by the rows that ours have in them
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp.fc1": ("ff.net.0.proj",),
    "img_mlp.fc2": ("ff.net.2",),
    "txt_mlp.fc1": ("ff_context.net.0.proj",),
    "txt_mlp.fc2": ("ff_context.net.2",),
}


def test_queries_keys_and_values_of_hunyuan_1_5_are_one_layer_in_comfyui(tmp_path: Path) -> None:
    config = by_original_names("hunyuan15")
    source = moved(config, 1).state_dict()
    native, ours = for_comfyui(source, config), for_diffusers(source, lora_scale(config))
    assert len(native) == 2 * len(HUNYUAN15) * config.num_layers
    for block in range(config.num_layers):
        for theirs, parts in HUNYUAN15.items():
            layer = f"diffusion_model.double_blocks.{block}.{theirs}"
            own = [f"transformer.transformer_blocks.{block}.{part}" for part in parts]
            wanted = torch.cat([ours[name + B] @ ours[name + A] for name in own])
            torch.testing.assert_close(native[layer + B] @ native[layer + A], wanted, atol=1e-5, rtol=1e-5)
    save_file(native, tmp_path / "comfyui.safetensors")
    again = replace(config, lora_alpha=4.0, lora_from=str(tmp_path / "comfyui.safetensors"))
    found = merged(build_dit(again, seed=0).state_dict(), lora_scale(again))
    for name, tensor in merged(source, lora_scale(config)).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def of_musubi(config: DiTConfig, merged_for_comfyui: bool) -> dict[str, torch.Tensor]:
    """Factors of every layer of the blocks as musubi-tuner trains them for HunyuanVideo-1.5, or as its converter for
    ComfyUI writes these: A's of fused layers below each other, B's on a diagonal, three times the alpha."""
    numbers, found = torch.Generator().manual_seed(3), {}
    rank, alpha = config.lora_rank, torch.tensor(1.0)
    state = build_dit(replace(config, lora_rank=0), seed=0).state_dict()
    for block in range(config.num_layers):
        for theirs, parts in HUNYUAN15.items():
            shapes = [state[f"transformer_blocks.{block}.{part}.weight"].shape for part in parts]
            a = [torch.randn(rank, columns, generator=numbers) for _, columns in shapes]
            b = [torch.randn(rows, rank, generator=numbers) for rows, _ in shapes]
            names = [theirs.replace("qkv", x) for x in "qkv"] if len(parts) == 3 else [theirs]
            if merged_for_comfyui:
                names = [theirs.replace("fc1", "0").replace("fc2", "2")]
                a, b = [torch.cat(a)], [torch.block_diag(*b)]
            for name, of_a, of_b in zip(names, a, b, strict=True):
                layer = f"lora_unet_double_blocks_{block}_{name.replace('.', '_')}"
                found |= {f"{layer}.lora_down.weight": of_a, f"{layer}.lora_up.weight": of_b}
                found[f"{layer}.alpha"] = alpha * len(of_a) / rank
    return found


@pytest.mark.parametrize("merged_for_comfyui", [False, True])
def test_factors_of_musubi_tuner_for_hunyuan_1_5_are_read(merged_for_comfyui: bool, tmp_path: Path) -> None:
    config = replace(by_original_names("hunyuan15"), lora_alpha=0.0)
    given = of_musubi(config, merged_for_comfyui=False)
    save_file(of_musubi(config, merged_for_comfyui), tmp_path / "musubi.safetensors")
    state = build_dit(replace(config, lora_from=str(tmp_path / "musubi.safetensors")), seed=0).state_dict()
    for block in range(config.num_layers):
        for theirs, parts in HUNYUAN15.items():
            names = [theirs.replace("qkv", x) for x in "qkv"] if len(parts) == 3 else [theirs]
            for name, part in zip(names, parts, strict=True):
                layer, own = (
                    f"lora_unet_double_blocks_{block}_{name.replace('.', '_')}",
                    f"transformer_blocks.{block}.{part}",
                )
                wanted = given[f"{layer}.lora_up.weight"] @ given[f"{layer}.lora_down.weight"] / config.lora_rank
                torch.testing.assert_close(state[own + B] @ state[own + A], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        "lora_unet_double_blocks_0_img_mod_linear",  # musubi-tuner
        "lora_unet_double_blocks_0_txt_mod_lin",  # its converter
        "diffusion_model.double_blocks.0.img_mod.linear",
        "transformer.transformer_blocks.0.norm1_context.linear",
    ],
)
def test_factors_of_modulations_are_refused_with_what_to_do(layer: str, tmp_path: Path) -> None:
    config = by_original_names("hunyuan15")
    more = {f"{layer}{A}": torch.ones(config.lora_rank, 4), f"{layer}{B}": torch.ones(4, config.lora_rank)}
    save_file(of_musubi(config, merged_for_comfyui=False) | more, tmp_path / "musubi.safetensors")
    with pytest.raises(ValueError, match=r'which gets none here; .* "exclude_patterns=\[r\'\.\*_mod\.\*\'\]"'):
        check_factors(replace(config, lora_from=str(tmp_path / "musubi.safetensors")))


@pytest.mark.parametrize("family", ["flux", "hunyuan", "hunyuan15"])
@pytest.mark.parametrize("kind", ["comfyui", "kohya"])
@pytest.mark.parametrize("end", ["lin", "linear"])
def test_factors_of_modulations_are_read_for_clips(family: str, kind: str, end: str, tmp_path: Path) -> None:
    config = by_original_names(family).without_lora()
    weights = dict(dit_skeleton(config).named_parameters())
    theirs = {
        f"double_blocks.0.img_mod.{end}": "transformer_blocks.0.norm1.linear",
        f"double_blocks.0.txt_mod.{end}": "transformer_blocks.0.norm1_context.linear",
        f"single_blocks.0.modulation.{end}": "single_transformer_blocks.0.norm.linear",
    }
    wanted = {}
    for ours in (name for name in theirs.values() if name + ".weight" in weights):  # 1.5 has no single blocks
        rows, columns = weights[ours + ".weight"].shape
        wanted |= {ours + A: torch.randn(2, columns), ours + B: torch.randn(rows, 2)}
    stored = {
        f"diffusion_model.{name}{ending}": wanted[ours + ending]
        for name, ours in theirs.items()
        for ending in (A, B)
        if ours + ending in wanted
    }
    save_file(stored if kind == "comfyui" else as_kohya(stored), tmp_path / "factors.safetensors")
    found = factors_for(tmp_path / "factors.safetensors", weights, config)
    assert found.keys() == wanted.keys()
    for layer in (name.removesuffix(A) for name in wanted if name.endswith(A)):
        torch.testing.assert_close(found[layer + B] @ found[layer + A], wanted[layer + B] @ wanted[layer + A])


def with_dora_of_peft(case: str, folder: Path) -> tuple[torch.nn.Module, DiTConfig]:
    """Diffusers' transformer with PEFT's DoRA of random values; its plain weights are in `folder`."""
    config = VARIANTS[case]
    reference = their_class(config)
    write_folder(folder / "transformer", reference.state_dict(), dit_json(config))
    ours = replace(config, path=str(folder), lora_rank=3, lora_dora=True)
    layers = [name for name, part in dit_skeleton(ours).named_modules() if isinstance(part, DoRALinear)]
    reference.add_adapter(peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=layers, use_dora=True))
    torch.manual_seed(1)
    for name, parameter in reference.named_parameters():
        if "lora_magnitude" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return reference, ours


@pytest.mark.parametrize("case", WITH_ADAPTERS)
def test_dora_that_peft_made_is_the_same_transformer_here_and_trains_the_same(case: str, tmp_path: Path) -> None:
    reference, config = with_dora_of_peft(case, tmp_path)
    reference.save_lora_adapter(tmp_path / "factors")
    ours = build_dit(replace(config, lora_alpha=6.0, lora_from=str(tmp_path / "factors")), 0)
    sample = parity_sample(VARIANTS[case])
    found, expected = our_velocity(ours, sample), their_velocity(reference, VARIANTS[case], sample)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    numbers = torch.Generator().manual_seed(2)
    weights = torch.randn(expected.shape, generator=numbers)
    for velocity in (found, expected):
        (velocity * weights).sum().backward()
    theirs = {name.replace(".default", "").removesuffix(".weight"): p.grad for name, p in reference.named_parameters()}
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = theirs[name.removesuffix(".weight")]
        if re.search(CASES[config.architecture].unread, name):
            assert grad is None and parameter.grad is None
            continue
        torch.testing.assert_close(parameter.grad, grad, atol=1e-5 * float(grad.abs().max()), rtol=0, msg=name)


@pytest.mark.parametrize("case", WITH_ADAPTERS)
def test_dora_that_was_trained_here_is_loaded_by_diffusers(case: str, tmp_path: Path) -> None:
    config = replace(with_factors(case), lora_dora=True)
    ours = build_dit(config, seed=0)
    disturb(ours)
    plain = {name: tensor for name, tensor in ours.state_dict().items() if not is_lora(name)}
    reference = their_class(config.without_lora())
    reference.load_state_dict({**plain, **kept_weights(config)})
    factors = for_diffusers(ours.state_dict(), lora_scale(config))
    assert sum(name.endswith(M) for name in factors) == sum(name.endswith(A) for name in factors) > 0
    reference.load_lora_adapter(factors, prefix="transformer")
    sample = parity_sample(config)
    with torch.no_grad():
        found, expected = our_velocity(ours, sample), their_velocity(reference, config, sample)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    save_file(factors, tmp_path / "pytorch_lora_weights.safetensors")
    write_folder(tmp_path / "transformer", plain, dit_json(config.without_lora()))
    again = replace(config, path=str(tmp_path), lora_alpha=1.0, lora_from=str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(our_velocity(build_dit(again, 5), sample), found, atol=FP32_ATOL, rtol=1e-4)
    assert for_comfyui(ours.state_dict(), config) == {}, "ComfyUI divides by other lengths"


@pytest.mark.parametrize("file_of", ["nothing", "LoRA"])
def test_magnitudes_begin_as_the_lengths_of_the_folders_rows(file_of: str, tmp_path: Path) -> None:
    """A worker that begins anew reads them one at a time. With factors of LoRA the model is that of LoRA."""
    config = replace(WAN, lora_dora=True)
    write_folder(tmp_path / "transformer", build_dit(WAN.without_lora(), 3).state_dict(), dit_json(WAN.without_lora()))
    config = replace(config, path=str(tmp_path))
    if file_of == "LoRA":
        save_file(for_diffusers(moved(WAN, 1).state_dict(), lora_scale(WAN)), tmp_path / "factors.safetensors")
        config = replace(config, lora_from=str(tmp_path / "factors.safetensors"))
    module, first = build_dit(config, seed=0), first_values(config, 0)
    rounded, first_rounded = build_dit(config, 0, torch.bfloat16), first_values(config, 0, torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        if name.endswith(M):
            assert torch.equal(first_rounded(name).bfloat16(), parameter)
    for name, parameter in module.named_parameters():
        if is_lora(name):
            assert torch.equal(first(name), parameter)
    plain = build_dit(replace(config, lora_dora=False), seed=0)
    torch.testing.assert_close(forward(module), forward(plain), atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_dora_in_bf16_starts_from_the_base_model(autocast: bool) -> None:
    config = replace(WAN, lora_dora=True)
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        module, plain = (build_dit(one, 0, dtype) for one in (config, config.without_lora()))
        layer, base = (one.get_submodule("blocks.0.attn1.to_q") for one in (module, plain))
        x = torch.randn(7, config.dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        bias = base.bias.to(torch.bfloat16)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, base.weight) + bias)
        first = first_values(config, 0, dtype)
        for name, parameter in module.named_parameters():
            if is_lora(name):
                assert torch.equal(first(name).to(dtype), parameter)


@pytest.mark.parametrize("case", WITH_ADAPTERS)
def test_factors_that_peft_made_are_the_same_transformer_here(case: str, tmp_path: Path) -> None:
    config = VARIANTS[case]
    reference = their_class(config)
    write_folder(tmp_path / "transformer", reference.state_dict(), dit_json(config))
    known = dit_skeleton(replace(config, lora_rank=3)).named_modules()
    layers = [name for name, module in known if isinstance(module, LoRALinear)]
    reference.add_adapter(peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=layers))
    torch.manual_seed(1)
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    reference.save_lora_adapter(tmp_path / "factors")
    ours = build_dit(
        replace(config, path=str(tmp_path), lora_rank=3, lora_alpha=1.5, lora_from=str(tmp_path / "factors")), 0
    )
    sample = parity_sample(config)
    with torch.no_grad():
        found, expected = our_velocity(ours, sample), their_velocity(reference, config, sample)
        reference.disable_adapters()
        before = their_velocity(reference, config, sample)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    assert (before - expected).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize("met", [check_factors, lambda config: build_dit(config, 0)], ids=["before a run", "built"])
def test_factors_of_another_model_rank_or_naming_are_refused(
    met: Callable[[DiTConfig], object], tmp_path: Path
) -> None:
    config = replace(WAN, lora_rank=3)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    here = {"lora_from": str(file)}
    save_file(for_diffusers(moved(replace(config, lora_rank=2), 1).state_dict(), 1.0), file)
    with pytest.raises(ValueError, match=r"is \[2, .*\] and \[3, .*\] here, with model\.dit\.lora_rank 3"):
        met(replace(config, **here))
    save_file({"transformer.blocks.9.attn1.to_q.lora_A.weight": torch.zeros(3, 4)}, file)
    with pytest.raises(ValueError, match="not in this model"):
        met(replace(config, **here))
    save_file({"lora_te_layers_0.lora_down.weight": torch.zeros(3, 4)}, file)
    with pytest.raises(ValueError, match=r"lora_te_layers_0.lora_A.weight is \[3, 4\] and not in this model"):
        met(replace(config, **here))
    save_file({"blocks.0.hada_w1": torch.zeros(3, 4)}, file)
    with pytest.raises(ValueError, match=r"holds no factors named .*first name: blocks.0.hada_w1"):
        met(replace(config, **here))
    bias = {"transformer.blocks.0.attn1.to_q.bias": torch.ones(4)}
    save_file(for_diffusers(moved(config, 1).state_dict(), 1.0) | bias, file)
    with pytest.raises(ValueError, match=r"holds blocks.0.attn1.to_q.bias beside factors: it is not LoRA alone"):
        met(replace(config, **here))
    dora = replace(config, lora_dora=True)
    save_file(for_diffusers(moved(dora, 1).state_dict(), 1.0), file)
    with pytest.raises(ValueError, match=r"lora_magnitude_vector: it is DoRA, and model\.dit\.lora_dora is false"):
        met(replace(config, **here))
    met(replace(dora, **here))
    whole = {name: 0 * tensor if name.endswith(B) else tensor for name, tensor in moved(dora, 1).state_dict().items()}
    save_file(for_diffusers(whole, 1.0), file)  # B is zero, and magnitudes change the layers that are left out
    with pytest.raises(ValueError, match=r"has factors of \S+, which model\.dit\.lora_targets"):
        met(replace(dora, lora_targets=("to_q",), **here))
    pattern = json.dumps({"transformer.r": 3, "transformer.lora_alpha": 3, "transformer.alpha_pattern": {"to_q": 9}})
    save_file(for_diffusers(moved(config, 1).state_dict(), 1.0), file, metadata={LORA_ADAPTER_METADATA_KEY: pattern})
    with pytest.raises(ValueError, match=r"layers of their own alpha \(alpha_pattern\)"):
        met(replace(config, **here))
    file.write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        met(replace(config, **here))
    with pytest.raises(FileNotFoundError, match=r"model\.dit\.lora_from .* does not exist.* or null for a --resume"):
        met(replace(config, lora_from=str(tmp_path / "none.safetensors")))
    met(config)
    save_file(for_diffusers(moved(config, 1).state_dict(), 1.0), file)
    met(replace(config, **here))
    with pytest.raises(ValueError, match="names factors, and lora_rank is 0"):
        replace(config, lora_rank=0, lora_from="a")
    with pytest.raises(ValueError, match="lora_dora is true, and lora_rank is 0"):
        replace(config, lora_rank=0, lora_dora=True)
