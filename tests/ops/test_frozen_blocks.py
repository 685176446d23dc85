"""Frozen weights of blocks in host memory: the same training, bit for bit, and two blocks of them on a device."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from actors.config import TrainConfig, TrainMemoryConfig
from actors.plan.places import Places
from actors.planning.forecasts import sizes_of
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.memory.node_weights import NodeWeights
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.config import ModelConfig
from ops.models.experts import transformers
from ops.models.float8 import SCALE, in_8_bits
from ops.models.folders import dit_json
from ops.models.frozen_blocks import FrozenBlocks, bytes_of_blocks, frozen_in_blocks
from ops.models.load import build_dit
from ops.models.wan.config import WanConfig
from ops.models.weights import is_lora, write_folder
from ops.storages import storage_bytes
from ops.units import GIB
from ops.update.flat_vector import trainable
from ops.update.parameter_places import BlockBuffers
from ops.update.sync import FlatSync
from tests.families.registry import ONE_EACH, VARIANTS
from tests.long import in_default_run
from tests.ops.block_copies import LateCopies
from tests.ops.exported import own_shard
from tests.ops.test_lora import WAN, disturb
from tests.ops.test_node_parameters import assert_equal, passes

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1.0, ema_decay=0.9)
Placed = Callable[[nn.Module], None]


def tuned(case: str, **changes: object) -> DiTConfig:
    config = replace(VARIANTS[case], num_layers=3, gradient_checkpointing=True, lora_rank=2, lora_alpha=3.0)
    return replace(config, **changes)  # type: ignore[arg-type]


def fetched(module: nn.Module) -> BlockBuffers:
    """As a GPU has it: what is frozen in blocks comes through two buffers."""
    buffers = BlockBuffers(LateCopies())
    FrozenBlocks(transformers(module), buffers, torch.empty(1))
    return buffers


def trained(
    config: DiTConfig,
    *,
    on_host: bool,
    buffers: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> dict[str, Tensor]:
    """Losses, gradients, trained weights and their state of one worker after two steps of two passes."""
    dit = build_dit(config, 0, dtype, blocks_on_host=on_host).train()
    disturb(dit)
    if buffers:
        fetched(dit)
    case = next(name for name, one in VARIANTS.items() if one.architecture == config.architecture)
    sync = FlatSync(dit, OPTIMIZER, 2)
    sync.form(Group.solo(), None)
    before = {name: p.detach().clone() for name, p in dit.named_parameters() if not p.requires_grad}
    found: dict[str, Tensor] = {}
    for step in range(2):
        sync.begin_step()
        found[f"losses {step}"] = torch.tensor([passes(dit, case, autocast, scale) for scale in (1.0, 0.5)])  # type: ignore[arg-type]
        found[f"gradient {step}"] = sync.gradient().clone()
        assert sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None).applied
    for name, p in dit.named_parameters():
        assert p.requires_grad or torch.equal(p.view(torch.uint8), before[name].view(torch.uint8)), name
    found |= {name: p.detach().clone() for name, p in trainable(dit)}
    return found | {f"state {name}": torch.from_numpy(array) for name, array in own_shard(sync).arrays.items()}


@pytest.mark.parametrize("case", in_default_run(["wan", "hunyuan15", "stdit3"], of=ONE_EACH))
def test_every_family_trains_bit_for_bit_as_with_weights_of_its_own(case: str) -> None:
    config = VARIANTS[case]
    config = tuned(next(name for name, one in VARIANTS.items() if one.architecture == config.architecture))
    assert_equal(trained(config, on_host=True, buffers=True), trained(config, on_host=False))


@pytest.mark.parametrize(
    ("changes", "dtype", "autocast"),
    [
        ({"frozen_dtype": "float8"}, torch.float32, False),
        ({"frozen_dtype": "float8"}, torch.bfloat16, False),
        ({"lora_dora": True}, torch.float32, False),
        ({"lora_dora": True, "frozen_dtype": "float8"}, torch.float32, True),
        ({"lora_targets": ("to_q",)}, torch.float32, True),
        ({"lora_rank": 0, "lora_alpha": 0.0, "train_only": ("blocks.*.attn1",)}, torch.bfloat16, False),
    ],
    ids=["float8", "float8 in bf16", "DoRA", "DoRA, float8, autocast", "some, autocast", "attention alone in bf16"],
)
def test_so_it_is_with_every_kind_of_frozen_weight(
    changes: dict[str, object], dtype: torch.dtype, autocast: bool
) -> None:
    config = tuned("wan", **changes)
    expected = trained(config, on_host=False, dtype=dtype, autocast=autocast)
    for buffers in (False, True):
        assert_equal(trained(config, on_host=True, buffers=buffers, dtype=dtype, autocast=autocast), expected)


def test_both_experts_have_two_buffers_together() -> None:
    config = replace(tuned("wan"), expert="both")
    assert isinstance(config, WanConfig)
    module = build_dit(config, 0, blocks_on_host=True)
    buffers = fetched(module)
    assert len(buffers.buffers) == 2 and {name[:4] for name in frozen_in_blocks(module)} == {"high", "low."}
    for one, plain in zip(transformers(module), transformers(build_dit(config, 0)), strict=True):
        assert isinstance(one, PackedTransformer)
        assert isinstance(plain, PackedTransformer)
        assert passes(one, "wan", False, 1.0) == passes(plain, "wan", False, 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain = build_dit(WAN.without_lora(), 3)
    write_folder(tmp_path / "transformer", plain.state_dict(), dit_json(WAN.without_lora()))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen_dtype", ["same", "float8"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_weights_of_a_folder_are_those_that_are_read_elsewhere(
    folder: Path, dtype: torch.dtype, frozen_dtype: str, dora: bool
) -> None:
    config = replace(WAN, path=str(folder), frozen_dtype=frozen_dtype, lora_dora=dora)  # type: ignore[arg-type]
    found, expected = build_dit(config, 0, dtype, blocks_on_host=True), build_dit(config, 0, dtype)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad, name
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    assert not any(p.is_meta for p in found.parameters())


SECOND = """
import sys, torch
from dataclasses import replace
from ops.memory.node_weights import NodeWeights
from ops.models.load import build_dit
from tests.ops.test_lora import WAN
of = NodeWeights.of
def told(*given):
    held = of(*given)
    print("read" if held.read_here else "mapped")
    return held
NodeWeights.of = told
module = build_dit(replace(WAN, path=sys.argv[1]), 0, torch.bfloat16, blocks_on_host=True)
print(float(sum(p.float().abs().sum() for p in module.parameters() if not p.requires_grad)))
"""


@pytest.mark.long
def test_another_process_of_the_node_maps_what_the_first_has_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NodeWeights] = []
    of = NodeWeights.of
    monkeypatch.setattr(NodeWeights, "of", lambda *given: made.append(of(*given)) or made[-1])
    module = build_dit(replace(WAN, path=str(folder)), 0, torch.bfloat16, blocks_on_host=True)
    total = float(sum(p.float().abs().sum() for p in module.parameters() if not p.requires_grad))
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(folder)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert made[0].read_here and done.stdout.split() == ["mapped", str(total)], done.stderr


def test_a_module_that_is_dropped_lets_go_of_the_memory_of_the_node() -> None:
    module = build_dit(tuned("wan"), 0, blocks_on_host=True)
    copies = LateCopies()
    buffers = BlockBuffers(copies)
    FrozenBlocks([module], buffers, torch.empty(1))
    assert len(copies.pinned) == 1 and buffers.buffers
    del module
    gc.collect()
    assert not copies.pinned and not buffers.buffers


def test_factors_and_what_is_outside_of_blocks_lie_where_they_did() -> None:
    module = build_dit(WAN, 0, blocks_on_host=True)
    names = frozen_in_blocks(module)
    assert names and not [name for name in names if is_lora(name) or not name.startswith("blocks.")]
    outside = [name for name, p in module.named_parameters() if name not in names]
    assert any(is_lora(name) for name in outside) and "patch_embedding.weight" in outside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen_dtype", ["same", "float8"])
def test_a_device_holds_as_much_as_is_forecast(dtype: torch.dtype, frozen_dtype: str) -> None:
    config = tuned("wan", frozen_dtype=frozen_dtype)
    module = build_dit(config, 0, dtype, blocks_on_host=True)
    buffers, hosted = fetched(module), set(frozen_in_blocks(module))
    sync = FlatSync(module, OPTIMIZER, 1)
    sync.form(Group.solo(), None)
    parts = dict(module.named_parameters())
    on_device = [p for name, p in parts.items() if name not in hosted]
    train = TrainConfig(parameter_dtype=str(dtype).removeprefix("torch."), optimizer=OPTIMIZER)  # type: ignore[arg-type]
    sizes = replace(sizes_of(ModelConfig(dit=config), train, True), places=Places("own", "device", "node"))
    assert sizes.states(1).weights * GIB == storage_bytes([*on_device, *buffers.buffers])
    on_host = sum(parts[name].nbytes for name in hosted)
    assert on_host <= sizes.host_weights_gib * GIB < 1.01 * on_host + 16 * len(hosted)
    assert sizes.loaded_gib < sizes_of(ModelConfig(dit=config), train, True).loaded_gib
    assert buffers.buffers[0].numel() == max(bytes_of_blocks(module, dtype.itemsize, frozen=True))
    assert not in_8_bits(module) or any(name.endswith(SCALE) for name in hosted)


def test_auto_takes_them_where_nothing_else_fits_and_replicated_never() -> None:
    auto, never = (TrainConfig(memory=TrainMemoryConfig(parameters=way)) for way in ("auto", "replicated"))  # type: ignore[arg-type]
    config = tuned("wan")
    assert config.fetchable and replace(config, expert="both").fetchable  # type: ignore[arg-type]
    assert [one.parameters for one in auto.places(100, "cuda", config.fetchable)][-1] == "node"
    assert {one.parameters for one in never.places(100, "cuda", config.fetchable)} == {"replicated"}
    assert not replace(config, gradient_checkpointing=False).fetchable


def test_a_model_that_freezes_nothing_in_blocks_is_refused_by_a_sentence() -> None:
    config = replace(VARIANTS["wan"], train_only=("blocks",))
    with pytest.raises(ValueError, match=r"all of those are trained, or there are no blocks\. Set parameters to auto"):
        build_dit(config, 0, blocks_on_host=True)
