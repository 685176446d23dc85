"""`train_only`: named weights get the gradients that they have when all are trained, and nothing else gets any."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.export.parity import our_velocity, parity_sample
from ops.models.base.config import DiTConfig
from ops.models.forecast import Precision, dit_need_gib, pass_bytes
from ops.models.load import build_dit, dit_skeleton, first_values, num_trained
from ops.models.wan.config import WanConfig
from ops.models.weights import write_folder
from ops.packed.packing import Sequence
from ops.shards import padding
from tests.families.registry import CASES, ONE_EACH, VARIANTS
from tests.long import in_default_run

WAN = WanConfig(num_layers=4, num_heads=2, head_dim=16, ffn_dim=64, freq_dim=16, text_dim=8)


def gradients(config: DiTConfig) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter; all weights are random, also those that start at zero."""
    module = build_dit(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    our_velocity(module, parity_sample(config)).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    "patterns", [("*.bias",), ("*.to_q", "*.to_query", "*.qkv", "*.norm?"), ("*blocks.0", "proj_out")]
)
@pytest.mark.parametrize("case", in_default_run(ONE_EACH, of=VARIANTS))
def test_gradients_of_trained_weights_are_those_of_a_whole_training(case: str, patterns: tuple[str, ...]) -> None:
    config = VARIANTS[case]
    known = [name for name, _ in dit_skeleton(config).named_parameters()]
    here = tuple(p for p in patterns if any(_names(p, name) for name in known))
    whole, part = gradients(config), gradients(replace(config, train_only=here, gradient_checkpointing=True))
    named = {name for name in known if any(_names(pattern, name) for pattern in here)}
    named -= {name for name in known if re.search(CASES[config.architecture].unread, name)}
    assert {name for name, gradient in part.items() if gradient is not None} == named
    assert 0 < len(named) < len(known)
    for name in named:
        torch.testing.assert_close(part[name], whole[name], atol=0, rtol=1e-6, msg=name)


def _names(pattern: str, name: str) -> bool:
    """As a regular expression, which shares nothing with what is tested."""
    text = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(rf"{text}(\..*)?", name) is not None


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("blocks.*.attn3", r"near are blocks\.\*\.attn[12], blocks\.\*\.attn[12], "),
        ("transformer_blocks.0", r"near are .*blocks"),
        ("blocks.4", r"near are blocks\.\*, "),
    ],
)
def test_a_name_of_no_weight_is_answered_with_near_ones(pattern: str, near: str) -> None:
    with pytest.raises(ValueError, match=near) as caught:
        num_trained(replace(WAN, train_only=("blocks.0", pattern)))
    assert repr(pattern) in str(caught.value) and "\n" not in str(caught.value)


def test_lora_beside_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train_only \['blocks.0'\] and lora_rank 4: .* Leave one of the two out"):
        replace(WAN, train_only=("blocks.0",), lora_rank=4)


def test_a_folder_gives_the_first_values_of_what_is_trained_and_the_rest_as_it_is(tmp_path: Path) -> None:
    state = {name: torch.randn_like(tensor) for name, tensor in build_dit(WAN, 0).state_dict().items()}
    write_folder(tmp_path, state, {"_class_name": "WanTransformer3DModel"})
    config = replace(WAN, path=str(tmp_path), train_only=("blocks.3.ffn",))
    module, first = build_dit(config, 5, torch.bfloat16), first_values(config, 5)
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == name.startswith("blocks.3.ffn")
        assert torch.equal(parameter.detach(), state[name].bfloat16())
        if parameter.requires_grad:
            assert torch.equal(first(name), state[name]), "not rounded"


def test_memory_is_that_of_what_is_trained() -> None:
    clips, precision = [Sequence((3, 4, 6), 5)], Precision(parameters=torch.bfloat16)
    whole = replace(WAN, num_layers=2)
    late, early = (replace(whole, train_only=(f"blocks.{block}",)) for block in (1, 0))
    trained = num_trained(late)
    weights = num_trained(whole)
    assert 0 < trained < weights / 2
    _, held = pass_bytes(late, clips, 1, precision)
    assert held == 2 * (weights - trained) + 6 * (trained + padding(trained))
    needs = [dit_need_gib(config, clips, 1, precision) for config in (late, early, whole)]
    assert needs[0] < needs[1] <= needs[2], "blocks before the first trained one keep nothing for a backward pass"
