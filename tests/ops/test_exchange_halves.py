"""Heads that are exchanged in two halves: the same bits, with one half under way while the other is attended."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ops.comm.collectives import Group
from ops.halving import halves_of
from ops.models.base.config import DiTConfig
from ops.packed.exchange_halves import attention_in_halves, worth_halving
from ops.packed.packing import Layout, Sequence
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.waiting import PendingCollective
from tests.ops.test_sequence_parallel import HUNYUAN, MIXED, SHORT, WAN, Case

torch.set_num_threads(1)
RunRanks = Any  # tests.ops.conftest


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([2, 3, 5]),
    st.booleans(),
)
def test_outputs_and_gradients_have_the_bits_of_whole_exchanges(run_ranks, lengths, degree, heads, joint) -> None:
    sequences = [Sequence((1, 1, length), text) for length, text in lengths]
    seed = torch.Generator().manual_seed(0)
    video, text = (
        [torch.randn(count, 3, degree * heads, 2, generator=seed) for count in counts]
        for counts in ([s.tokens for s in sequences], [s.text_tokens for s in sequences])
    )

    def run(group: Group) -> list[tuple[Tensor, Tensor]]:
        found, sent = [], []
        for halves in (False, True):
            layout = Layout(sequences, group.size, group.rank, in_halves=halves)
            own = layout.local(video)
            if joint:
                own = torch.cat([own, torch.cat(text)[layout.text_rows]])
            own.requires_grad_()
            exchange = layout.joint_exchange if joint else layout.video_exchange
            out = sequence_parallel_attention(*own.unbind(1), exchange, group)
            out.pow(3).sum().backward()
            found.append((out.detach(), own.grad))
            sent.append(group.progress.sequence)
        assert sent == [4, 4 + 8], "two exchanges there and back, then four"
        return found

    for whole, halved in run_ranks(degree, run):
        assert torch.equal(whole[0], halved[0]) and torch.equal(whole[1], halved[1])


@pytest.mark.parametrize("memory", ["all", "checkpointed", "attention kept"])
@pytest.mark.parametrize(
    ("config", "sequences"),
    [
        pytest.param(WAN, MIXED, id="wan, mixed"),
        pytest.param(HUNYUAN, SHORT, id="hunyuan, short"),
        pytest.param(WAN, SHORT, id="wan, short", marks=pytest.mark.long),
        pytest.param(HUNYUAN, MIXED, id="hunyuan, mixed", marks=pytest.mark.long),
    ],
)
def test_a_model_trains_with_the_same_bits(
    config: DiTConfig, sequences: tuple[Sequence, ...], memory: str, run_ranks: RunRanks
) -> None:
    case = Case(replace(config, gradient_checkpointing=memory != "all"), sequences, torch.float32)
    case.model.keeps_attention = memory == "attention kept"
    found, sent = {}, {}
    for case.in_halves in (False, True):
        told: list[int] = []

        def run(group: Group, told: list[int] = told) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            ran = case.run(group)
            told.append(group.progress.sequence)
            return ran

        found[case.in_halves], sent[case.in_halves] = run_ranks(3, run), told
    assert sent[True] == [2 * count for count in sent[False]]
    for (_, loss, gradients), (_, expected_loss, expected) in zip(found[True], found[False], strict=True):
        assert torch.equal(loss, expected_loss)
        for name, gradient in expected.items():
            assert gradients[name] is gradient is None or torch.equal(gradients[name], gradient), name


def test_recomputation_leaves_nothing_under_way(run_ranks: RunRanks) -> None:
    """It ends with the last tensor that backward needs, which without more would be the second half's attention."""

    def run(group: Group) -> tuple[int, int]:
        layout = Layout(MIXED, group.size, group.rank, in_halves=True)
        own = torch.randn(3, layout.local_tokens, 6, 2, requires_grad=True)

        def block(own: Tensor) -> Tensor:
            return sequence_parallel_attention(*own.unbind(0), layout.video_exchange, group)

        out = checkpoint(block, own, use_reentrant=False)
        out.sum().backward()
        return group.progress.sequence, len(group._outstanding)

    assert run_ranks(3, run) == [(12, 0)] * 3  # four there and back, again, and four of gradients


def test_the_half_that_waits_is_hidden_behind_the_other_one() -> None:
    """What is started, waited for and computed, in the order in which a device gets it; the backward is its mirror."""
    told: list[str] = []
    layout = Layout([Sequence((1, 1, 8), 0)], degree=2, rank=0)
    own = torch.randn(3, layout.local_tokens, 10, 2, requires_grad=True)
    out = attention_in_halves(*own.unbind(0), layout.video_exchange, _TellingGroup(told), _Attends(told))
    assert told == [
        "> q2 1",
        "> q3 2",
        "< q2 1",
        "attend 2",
        "> o2 3",
        "< q3 2",
        "attend 3",
        "> o3 4",
        "< o2 3",
        "< o3 4",
    ]
    told.clear()
    out.sum().backward()
    assert told == [
        *["> o3 1", "> o2 2", "< o3 1", "attend back 3", "> q3 3"],
        *["< o2 2", "attend back 2", "> q2 4", "< q3 3", "< q2 4"],
    ]


class _TellingGroup(Group):
    """A rank whose peer sends what it is sent. Names exchanges by kind, heads of a half, and their number."""

    def __init__(self, told: list[str]) -> None:
        super().__init__(None, (0, 1), 0, 1.0)
        self._told = told

    def all_to_all_async(self, output: Tensor, input: Tensor, into: Seq[int], out_of: Seq[int]) -> PendingCollective:
        name = f"{'q' if input.shape[1] == 3 else 'o'}{input.shape[2]} {sum(t[0] == '>' for t in self._told) + 1}"
        self._told.append(f"> {name}")
        output.copy_(input)
        return PendingCollective(None, None, name, finish=lambda: self._told.append(f"< {name}"))


class _Attends:
    """Attention that says when it is computed and when its gradient is."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._told.append(f"attend {q.shape[1]}")
        out = q * k + v
        out.register_hook(lambda _: self._told.append(f"attend back {q.shape[1]}"))
        return out


@pytest.mark.parametrize(("heads", "sizes"), [(2, (1, 1)), (3, (1, 2)), (8, (4, 4))])
def test_the_smaller_half_goes_first(heads: int, sizes: tuple[int, int]) -> None:
    assert tuple(len(range(heads)[half]) for half in halves_of(heads)) == sizes


class _OnDevice(_TellingGroup):
    on_device = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("rows", "heads", "halves", "group", "expected"),
    [
        (32_000, 3, None, _OnDevice, True),
        (31_999, 3, None, _OnDevice, False),  # one head of it alone would not fill a GPU
        (32_768, 1, None, _OnDevice, False),
        (4_096, 16, None, _OnDevice, True),
        (4_095, 16, None, _OnDevice, False),  # its attention hides too little
        (32_768, 16, None, _TellingGroup, False),  # Gloo
        (16, 2, True, _TellingGroup, True),
        (16, 1, True, _TellingGroup, False),
        (32_768, 16, False, _OnDevice, False),
    ],
)
def test_what_is_worth_two_halves(rows: int, heads: int, halves: bool | None, group: Any, expected: bool) -> None:
    layout = Layout([Sequence((1, 1, rows), 0)], degree=2, rank=0, in_halves=halves)
    assert worth_halving(layout.video_exchange, heads, group([])) == expected
    alone = Layout([Sequence((1, 1, rows), 0)], in_halves=True)
    assert not worth_halving(alone.video_exchange, heads, Group.solo())
