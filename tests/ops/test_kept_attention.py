"""Gradient checkpointing that keeps what attention gives: the same bits, without the attention of the recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.packed.kept_attention import KEPT, _policy
from ops.packed.packing import Layout, Sequence
from ops.storages import StorageCount
from tests.families.registry import VARIANTS
from tests.ops.test_node_parameters import model, passes
from tests.ops.test_sequence_parallel import HUNYUAN, MIXED, SHORT, WAN, Case

torch.set_num_threads(1)


class CountedAttention(TorchDispatchMode):
    """How often attention is computed, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func).rpartition(".")[0]) in KEPT:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def checkpointed(config: DiTConfig, sequences: Any = MIXED) -> Case:
    return Case(replace(config, gradient_checkpointing=True), sequences, torch.float32)


def test_every_operator_whose_output_is_kept_is_one_of_pytorch() -> None:
    """One that goes by another name is computed again without a word."""
    import torch.nn.attention.varlen  # makes its own known

    for name in KEPT:
        namespace, _, operator = name.partition(".")
        overload = getattr(getattr(torch.ops, namespace), operator).default
        assert _policy(None, overload) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, torch.ops.aten.mm.default) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_attention_is_computed_once_and_gradients_are_the_same_bits(config: DiTConfig) -> None:
    case, runs = checkpointed(config), {}
    for keeps in (False, True):
        case.model.keeps_attention = keeps
        with CountedAttention() as counted:
            _, loss, gradients = case.run(Group.solo())
        runs[keeps] = (counted.calls.total(), loss, gradients)
    plain = replace(config, gradient_checkpointing=False)
    case.model.config = plain
    with CountedAttention() as counted:
        case.run(Group.solo())
    once = counted.calls.total()
    assert once > 0 and runs[True][0] == once
    assert runs[False][0] > once  # a refiner outside of the blocks is computed once in any case
    assert torch.equal(runs[True][1], runs[False][1])
    _equal(runs[True][2], runs[False][2])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_family_has_the_same_bits(name: str) -> None:
    dit, found = model(name), []
    for keeps in (False, True):
        dit.keeps_attention = keeps
        dit.zero_grad(set_to_none=True)
        with CountedAttention() as counted:
            loss = passes(dit, name, autocast=False, scale=0.5)
        gradients = {key: parameter.grad for key, parameter in dit.named_parameters()}
        found.append((counted.calls.total(), loss, gradients))
    (again, loss, wanted), (once, kept_loss, kept) = found
    assert once < again and kept_loss == loss
    _equal(kept, wanted)


@pytest.mark.parametrize("name", ["latte", "stdit3"])
def test_under_autocast_a_block_may_run_for_several_grids(name: str) -> None:
    """Its second run in a forward finds its weights cast, and no run of the backward does."""
    found = []
    for keeps in (False, True):
        dit = VARIANTS[name]
        case = checkpointed(replace(dit, in_channels=2, out_channels=2, text_dim=10))
        case.model.keeps_attention = keeps
        layout = Layout(MIXED, 1, 0)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = case.model(layout.local(case.tokens), case.timesteps, case.text, layout, Group.solo())
        assert torch.is_autocast_cache_enabled()
        velocity.float().square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in case.model.parameters() if p.grad is not None]))
    wanted, kept = found
    assert (kept - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("sequences", [MIXED, SHORT], ids=["mixed", "short"])
@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_ranks_of_a_bag_decide_each_for_itself(config: DiTConfig, sequences: Any, run_ranks: Any) -> None:
    """Exchanges come in the same order on those that keep it and those that do not."""
    case = checkpointed(config, sequences)
    expected = run_ranks(3, case.run)
    keeping = checkpointed(config, sequences)
    keeping.model.keeps_attention = True

    def run(group: Group) -> Any:
        return (keeping if group.rank != 1 else case).run(group)

    for (_, loss, gradients), (_, wanted_loss, wanted) in zip(run_ranks(3, run), expected, strict=True):
        assert torch.equal(loss, wanted_loss)
        _equal(gradients, wanted)


@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_what_is_kept_is_counted(config: DiTConfig) -> None:
    """After the forward it is there for every row of video, and of text where that goes through with the video."""
    deep = replace(config, num_layers=6)
    clips = (Sequence((4, 20, 20), 60),)
    case, held = checkpointed(deep, clips), []
    layout = Layout(clips)
    for keeps in (False, True):
        case.model.keeps_attention = keeps
        with StorageCount() as count:
            out = case.model(layout.local(case.tokens), case.timesteps, case.text, layout, Group.solo())
        held.append(count.live_bytes)
        del out
    row = deep.kept_bytes(element_bytes=4)
    video, text = clips[0].tokens, clips[0].text_tokens
    found = (held[1] - held[0]) / row
    assert 0.99 * video <= found <= 1.01 * (video + text), (found, video, text)


def _equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, gradient in wanted.items():
        assert (gradient is None and found[name] is None) or torch.equal(found[name], gradient), name
