"""Sequence parallelism over packed sequences: every degree computes what one process computes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ops.chunks import chunk_bounds
from ops.comm.collectives import Group
from ops.flow.train_pass import packed_loss
from ops.models.base.config import DiTConfig
from ops.models.families import FAMILIES
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.lora import add_lora
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.packed.sequence_parallel import heads_to_rows, rows_to_heads, sequence_parallel_attention

torch.set_num_threads(1)
FP64 = {"atol": 1e-10, "rtol": 1e-10}
FP32 = {"atol": 1e-5, "rtol": 1e-5}
HEADS = 12
# mixed shapes and text lengths; a sequence of one token leaves the other ranks of a bag without rows of it
MIXED = (Sequence((3, 4, 5), 7), Sequence((1, 1, 1), 2), Sequence((2, 3, 3), 11), Sequence((1, 1, 2), 1))
SHORT = (Sequence((1, 1, 2), 3),)  # fewer tokens than ranks
WAN = WanConfig(
    num_layers=2, num_heads=HEADS, head_dim=6, ffn_dim=40, freq_dim=16, text_dim=10, in_channels=2, out_channels=2
)
HUNYUAN = HunyuanConfig(
    num_layers=2,
    num_single_layers=1,
    num_refiner_layers=1,
    num_heads=HEADS,
    head_dim=6,
    ffn_dim=40,
    freq_dim=16,
    text_dim=10,
    in_channels=2,
    out_channels=2,
    rope_axes=(2, 2, 2),
    guidance_embeds=True,
)


class Case:
    """Whole sequences and one model; runs as any rank of any degree."""

    def __init__(self, config: DiTConfig, sequences: tuple[Sequence, ...], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.sequences, self.dtype = sequences, dtype
        self.model = FAMILIES[config.architecture].model()(config).to(dtype)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.tokens = [torch.randn(s.tokens, 8, dtype=dtype) for s in sequences]
        self.targets = [torch.randn(s.tokens, 8, dtype=dtype) for s in sequences]
        self.text = torch.randn(sum(s.text_tokens for s in sequences), 10, dtype=dtype)
        self.timesteps = torch.rand(len(sequences), dtype=dtype) * 1000
        self.weights = torch.rand(len(sequences), dtype=dtype)
        self.in_halves: bool | None = None  # how heads are exchanged

    def run(self, group: Group) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(local prediction, local loss, partial gradients)."""
        model = copy.deepcopy(self.model)
        layout = Layout(self.sequences, group.size, group.rank, in_halves=self.in_halves)
        prediction = model(layout.local(self.tokens), self.timesteps, self.text, layout, group)
        loss = packed_loss(prediction, layout.local(self.targets), layout, self.weights)
        loss.backward()
        return prediction.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assemble(parts: list[Tensor], sequences: tuple[Sequence, ...]) -> Tensor:
    """Whole sequences, one after the other, from the rows of every rank."""
    rows = []
    layouts = [Layout(sequences, len(parts), rank) for rank in range(len(parts))]
    split = [
        part.split([layout.chunk(i).stop - layout.chunk(i).start for i in range(len(sequences))])
        for part, layout in zip(parts, layouts)
    ]
    for index in range(len(sequences)):
        rows += [of_rank[index] for of_rank in split]
    return torch.cat(rows)


def summed(name: str, parts: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> Tensor:
    """A rank without rows may leave a gradient None."""
    return sum(part[2][name] for part in parts if part[2][name] is not None)


@pytest.mark.parametrize("degree", [2, 4, 5])  # 5 ranks share heads
@pytest.mark.parametrize("sequences", [MIXED, SHORT], ids=["mixed", "short"])
@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_outputs_and_summed_gradients_equal_one_process(config, sequences, degree, run_ranks) -> None:
    case = Case(config, sequences, torch.float64)
    prediction, loss, gradients = case.run(Group.solo())
    parts = run_ranks(degree, case.run)
    torch.testing.assert_close(assemble([part[0] for part in parts], sequences), prediction, **FP64)
    torch.testing.assert_close(sum(part[1] for part in parts), loss, **FP64)
    for name, expected in gradients.items():
        assert expected.abs().max() > 0, f"{name} has no gradient, so this test would not see it counted twice"
        torch.testing.assert_close(summed(name, parts), expected, **FP64, msg=name)


def test_fp32_equals_one_process(run_ranks) -> None:
    case = Case(WAN, MIXED, torch.float32)
    _, _, gradients = case.run(Group.solo())
    parts = run_ranks(3, case.run)
    for name, expected in gradients.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(summed(name, parts) / scale, expected / scale, **FP32, msg=name)


@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_activation_checkpointing_changes_nothing(config, run_ranks) -> None:
    case = Case(config, MIXED, torch.float64)
    plain = run_ranks(3, case.run)
    case.model.config = replace(config, gradient_checkpointing=True)
    for (_, loss, gradients), (_, expected_loss, expected) in zip(run_ranks(3, case.run), plain):
        assert torch.equal(loss, expected_loss)
        for name in expected:
            assert torch.equal(gradients[name], expected[name]), name


def test_checkpointing_repeats_the_collectives_of_the_forward(run_ranks) -> None:
    """Two all-to-alls per layer forward, two backward, and with checkpointing two more in the recompute."""
    case = Case(WAN, MIXED, torch.float64)

    def count(group: Group) -> int:
        case.run(group)
        return group.progress.sequence

    assert run_ranks(2, count) == [8, 8]
    case.model.config = replace(WAN, gradient_checkpointing=True)
    assert run_ranks(2, count) == [12, 12]


def test_bf16_autocast_stays_near_fp32(run_ranks) -> None:
    case = Case(WAN, MIXED, torch.float32)
    for parameter in case.model.parameters():
        nn.init.normal_(parameter, std=0.1)
    _, expected, exact = case.run(Group.solo())

    def run(group: Group) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            return case.run(group)

    parts = run_ranks(2, run)
    torch.testing.assert_close(sum(part[1] for part in parts), expected, atol=0.02, rtol=0.02)
    for name, reference in exact.items():
        gradient = summed(name, parts)
        assert gradient.dtype == torch.float32
        assert (gradient - reference).norm() <= 0.1 * reference.norm() + 1e-4, name


@pytest.mark.parametrize("changes", [{}, {"lora_dora": True}, {"frozen_dtype": "float8"}], ids=str)
@pytest.mark.parametrize("config", [WAN, HUNYUAN], ids=["wan", "hunyuan"])
def test_gradients_of_lora_factors_add_up_and_the_base_has_none(config, changes, run_ranks) -> None:
    case = Case(config, MIXED, torch.float64)
    add_lora(case.model, replace(config, lora_rank=2, **changes))
    case.model.double()
    for parameter in case.model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    _, _, gradients = case.run(Group.solo())
    parts = run_ranks(3, case.run)
    for name, expected in gradients.items():
        assert (expected is None) == ("lora_" not in name), name
        if expected is not None:
            assert expected.abs().max() > 0, name
            torch.testing.assert_close(summed(name, parts), expected, **FP64, msg=name)


@pytest.mark.parametrize("joint", [False, True])
def test_exchange_there_and_back_is_the_identity(joint: bool, run_ranks) -> None:
    def work(group: Group) -> None:
        layout = Layout(MIXED, group.size, group.rank)
        exchange = layout.joint_exchange if joint else layout.video_exchange
        rows = layout.local_tokens + (layout.local_text_tokens if joint else 0)
        tensors = tuple(torch.randn(rows, HEADS, 5) for _ in range(3))
        back = heads_to_rows(rows_to_heads(tensors, exchange, group), exchange, group)
        assert all(torch.equal(after, before) for after, before in zip(back, tensors, strict=True))

    run_ranks(3, work)


def test_rows_arrive_in_sequence_order_with_their_heads(run_ranks) -> None:
    whole = [torch.randn(s.tokens, HEADS, 2) for s in MIXED]

    def work(group: Group) -> None:
        layout = Layout(MIXED, group.size, group.rank)
        (heads,) = rows_to_heads([layout.local(whole)], layout.video_exchange, group)
        share = HEADS // group.size
        assert torch.equal(heads, torch.cat(whole)[:, group.rank * share : (group.rank + 1) * share])

    run_ranks(4, work)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from([1, 3, 12]),
    st.booleans(),
)
def test_attention_of_any_lengths_and_heads_equals_one_process(run_ranks, lengths, degree, heads, joint) -> None:
    sequences = [Sequence((1, 1, length), text) for length, text in lengths]
    seed = torch.Generator().manual_seed(0)

    def rows(counts: list[int]) -> list[Tensor]:
        return [torch.randn(count, 3, heads, 2, dtype=torch.float64, generator=seed) for count in counts]

    video, text = rows([s.tokens for s in sequences]), rows([s.text_tokens for s in sequences])

    def run(group: Group) -> list[Tensor]:
        layout = Layout(sequences, group.size, group.rank)
        own = layout.local(video)
        if joint:
            own = torch.cat([own, torch.cat(text)[layout.text_rows]])
        own.requires_grad_()
        exchange = layout.joint_exchange if joint else layout.video_exchange
        out = sequence_parallel_attention(*own.unbind(1), exchange, group)
        out.pow(3).sum().backward()
        both = torch.cat([out[:, None], own.grad], dim=1).detach()  # [n, 4, H, d]
        chunks = both[: layout.local_tokens].split(list(layout.local_lengths.host))
        bounds = [chunk_bounds(s.text_tokens, group.size, group.rank, i) for i, s in enumerate(sequences)]
        text_lengths = [stop - start for start, stop in bounds]
        return list(chunks) + (list(both[layout.local_tokens :].split(text_lengths)) if joint else [])

    expected, parts = run(Group.solo()), run_ranks(degree, run)
    for whole, chunks in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(chunks), whole, **FP64)


def test_a_layout_of_another_bag_is_refused() -> None:
    layout = Layout(MIXED, degree=2, rank=1)
    q = torch.zeros(layout.local_tokens, HEADS, 2)
    with pytest.raises(ValueError, match=r"rank 1 of degree 2.*rank 0 of 1"):
        sequence_parallel_attention(q, q, q, layout.video_exchange, Group.solo())
