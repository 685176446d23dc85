"""`fuse` on small random transformers of each known family: same outputs, same gradients, same names."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ops.diffusers_swap.fuse import fuse, unfuse

FP32_ERROR = 2e-5  # relative L2, a few blocks deep


def wan(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": torch.randn(batch, 4, 3, 8, 8),
        "timestep": torch.arange(1, batch + 1) * 100.0,
        "encoder_hidden_states": torch.randn(batch, 7, 16),
    }


def wan_per_token(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = wan(batch)
    return model, inputs | {"timestep": torch.rand(batch, 3 * 4 * 4) * 1000}


def flux(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=False,
    )
    return model, {
        "hidden_states": torch.randn(batch, 16, 4),
        "encoder_hidden_states": torch.randn(batch, 6, 32),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.rand(batch),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }


def hunyuan(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    mask = torch.ones(batch, 5, dtype=torch.bool)
    mask[-1, 4] = False
    return model, {
        "hidden_states": torch.randn(batch, 4, 2, 8, 8),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_projections": torch.randn(batch, 8),
        "encoder_attention_mask": mask,
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=6,
    )
    return model, {
        "hidden_states": torch.randn(batch, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
        "timestep": torch.arange(1, batch + 1) * 100,
    }


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(**inputs, return_dict=False)[0]
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-8))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("build", [wan, wan_per_token, flux, hunyuan, cogvideox])
def test_fused_transformer_computes_the_same(build, batch: int) -> None:
    torch.manual_seed(0)
    model, inputs = build(batch)
    for parameter in model.parameters():  # Diffusers starts some at exactly 0 or 1, which would hide a missing term
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    fused = copy.deepcopy(model)
    swapped = fuse(fused)
    expected, expected_gradients = gradients(model, inputs)
    actual, actual_gradients = gradients(fused, inputs)
    assert error(actual, expected) <= FP32_ERROR
    assert actual_gradients.keys() == expected_gradients.keys()
    largest = max(g.norm() for g in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (actual_gradients[name] - gradient).norm() <= FP32_ERROR * (gradient.norm() + 1e-3 * largest), name
    assert sum(swapped.values()) >= 5


def called_ops(model: nn.Module, inputs: dict[str, Tensor]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(**inputs)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("build", [wan, flux, hunyuan])
def test_every_norm_gate_and_rope_runs_fused(build) -> None:
    model, inputs = build(2)
    fuse(model)
    ops = called_ops(model, inputs)
    assert {
        "heddle::ln_modulate",
        "heddle::gate_residual_ln_modulate",
        "heddle::gate_residual",
        "heddle::qk_norm_rope",
    } <= ops
    assert not {"aten::layer_norm", "aten::rms_norm"} & ops


def test_names_and_checks_survive_and_a_second_call_changes_nothing() -> None:
    model, _ = wan(1)
    keys, kind = list(model.state_dict()), type(model.blocks[0])
    assert fuse(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model.blocks[0], kind) and type(model.blocks[0]).__name__ == kind.__name__
    assert not fuse(model)


def kinds(model: nn.Module) -> list[type]:
    return [type(part) for part in (*model.modules(), *model.attn_processors.values())]


@pytest.mark.parametrize("build", [wan, flux, hunyuan, cogvideox])
def test_unfuse_gives_every_part_its_class_back(build) -> None:
    model, _ = build(1)
    before = kinds(model)
    swapped = fuse(model)
    assert kinds(model) != before
    assert unfuse(model) == swapped and kinds(model) == before
    assert not unfuse(model)


def sampled(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    with torch.inference_mode():
        model(**inputs)


def without_values(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(**{name: mode.from_tensor(value) for name, value in inputs.items()})


def exported(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    torch.export.export(model, (), inputs | {"return_dict": False}, strict=False)


@pytest.mark.parametrize("before", [sampled, without_values, exported])
def test_a_fused_transformer_trains_after(before: Callable[[nn.Module, dict[str, Tensor]], None]) -> None:
    batch = 3 + [sampled, without_values, exported].index(before)  # sizes that no test has used
    model, inputs = wan(batch)
    fuse(model)
    before(model, inputs)
    _, grads = gradients(model, inputs)
    assert len(grads) == len(list(model.parameters()))


def test_fused_blocks_compile_whole() -> None:
    torch._dynamo.reset()
    model, inputs = wan(2)
    fuse(model)
    expected = model(**inputs).sample
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert error(model(**inputs).sample, expected) <= FP32_ERROR


@pytest.mark.parametrize("first", ["fuse", "adapter"])
def test_lora_and_folders_are_those_of_the_original(first: str) -> None:
    original, inputs = wan(2)
    original.requires_grad_(False)
    fused, lora = copy.deepcopy(original), LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    steps: list[Callable[[], object]] = [lambda: fuse(fused), lambda: fused.add_adapter(lora)]
    for step in steps if first == "fuse" else reversed(steps):
        step()
    original.add_adapter(lora)
    original.load_state_dict(fused.state_dict())
    (expected, expected_gradients), (actual, actual_gradients) = (gradients(m, inputs) for m in (original, fused))
    assert error(actual, expected) <= FP32_ERROR and len(actual_gradients) == len(expected_gradients) == 16
    for name, gradient in expected_gradients.items():
        assert error(actual_gradients[name], gradient) <= FP32_ERROR, name
    with tempfile.TemporaryDirectory() as folder:
        fused.save_lora_adapter(folder)
        assert [path.suffix for path in Path(folder).iterdir()] == [".safetensors"]


def test_a_folder_of_a_fused_transformer_is_one_of_diffusers(tmp_path: Path) -> None:
    model, inputs = wan(2)
    fuse(model)
    model.save_pretrained(tmp_path)
    assert error(WanTransformer3DModel.from_pretrained(tmp_path)(**inputs).sample, model(**inputs).sample) <= FP32_ERROR


def test_sharded_blocks_are_refused_and_fused_ones_are_sharded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, inputs = wan(2)
        sharded = copy.deepcopy(model)
        fully_shard(sharded.blocks[-1], mesh=mesh)
        with pytest.raises(
            ValueError, match=r"FSDPWanTransformerBlock is sharded already, .* class of its own; fuse before"
        ):
            fuse(sharded)
        assert not unfuse(sharded), "those before it are not swapped either"
        expected = model(**inputs).sample
        fuse(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        assert error(model(**inputs).sample, expected) <= FP32_ERROR
    finally:
        dist.destroy_process_group()


def test_a_model_without_known_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to swap in a Linear"):
        fuse(nn.Linear(2, 2))
