"""Heads that ranks share: dealt evenly, sent once to each rank that needs them, summed in one order."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.attention.names import AttentionName
from ops.comm.collectives import Group
from ops.degrees import default_degrees, exchanged, head_copies
from ops.packed.context_parallel import shared_heads_attention
from ops.packed.head_shares import deal
from ops.packed.packing import Layout, Sequence
from ops.packed.sequence_parallel import sequence_parallel_attention

torch.set_num_threads(1)
SEQUENCES = (Sequence((3, 4, 5), 7), Sequence((1, 1, 1), 2), Sequence((2, 3, 3), 11))
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))  # heads, degree


@given(SIZES)
def test_every_rank_gets_the_same_part_of_the_heads_in_their_order(sizes) -> None:
    heads, degree = sizes
    dealt = deal(heads, degree)
    assert all(sum(share.heads * (share.high - share.low) for share in own) == heads for own in dealt)
    line = [(share, head) for own in dealt for share in own for head in range(share.first, share.last)]
    ends = [head * degree + share.high for share, head in line]
    assert ends[-1] == heads * degree
    assert [head * degree + share.low for share, head in line] == [0, *ends[:-1]]
    assert max(map(len, dealt)) <= 3


@given(SIZES)
def test_copies_of_heads_are_counted_as_they_are_dealt(sizes) -> None:
    heads, degree = sizes
    assert head_copies(heads, degree) == sum(own[-1].last - own[0].first for own in deal(heads, degree))
    assert exchanged(heads, degree) == 1 or heads % degree


def test_queries_of_a_shared_head_are_cut_in_every_sequence() -> None:
    """3 heads on 2 ranks: rank 1 has the second half of head 1, and all of head 2."""
    pieces = Layout([Sequence((1, 1, 6), 0), Sequence((1, 1, 9), 0)], 2, 1).video_exchange.shared(3).pieces
    assert [(piece.heads, piece.lengths.host) for piece in pieces] == [(1, (3, 4)), (1, (6, 9))]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3), min_size=40, max_size=40), st.sampled_from([(3, 2), (1, 5)]))
def test_many_short_sequences_do_not_all_burden_one_rank(lengths, sizes) -> None:
    heads, degree = sizes
    sequences = [Sequence((1, 1, length), 0) for length in lengths]
    exchanges = [Layout(sequences, degree, rank).video_exchange for rank in range(degree)]
    units = [sum(piece.heads * piece.lengths.total for piece in one.shared(heads).pieces) for one in exchanges]
    assert sum(units) == heads * sum(lengths)
    assert max(units) - min(units) <= 0.2 * max(units) + 2 * max(lengths)


@pytest.mark.parametrize(("heads", "degree"), [(3, 2), (12, 8), (2, 5), (12, 4)])
def test_what_is_sent_is_what_is_priced(heads: int, degree: int) -> None:
    """Units that leave their rank before and after attention, beside those of Ulysses. Less where a rank's queries of a
    shared head happen to be its own rows, as in the first case."""
    sequences, sent = [Sequence((1, degree, 30), 0)], 0
    for rank in range(degree):
        layout = Layout(sequences, degree, rank)
        shares = layout.video_exchange.shared(heads)
        assert sum(shares.alone.sent) == layout.local_tokens * heads
        sent += sum(sum(splits.sent) - splits.sent[rank] for splits in (shares.together, shares.alone))
    ulysses = 4 * degree * layout.local_tokens * heads * (degree - 1) / degree
    assert 0.84 * exchanged(heads, degree) < sent / ulysses < 1.02 * exchanged(heads, degree)


def test_usual_degrees_are_divisors_and_powers_of_two() -> None:
    assert default_degrees(12) == (1, 2, 3, 4, 6, 8, 12)
    assert default_degrees(12, "ulysses") == (1, 2, 3, 4, 6, 12)
    assert default_degrees(40, most=16) == (1, 2, 4, 5, 8, 10, 16)
    assert default_degrees(4) == default_degrees(4, "ulysses") == (1, 2, 4)


@pytest.mark.parametrize(("heads", "degree"), [(3, 2), (1, 4)])
def test_fp32_equals_one_process_and_itself(heads: int, degree: int, run_ranks) -> None:
    """More than one rank adds to the gradients of keys and values, always in the same order."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s.tokens, 3, heads, 8, generator=generator) for s in SEQUENCES]

    def run(group: Group) -> tuple[Tensor, Tensor]:
        layout = Layout(SEQUENCES, group.size, group.rank)
        own = layout.local(whole).requires_grad_()
        out = sequence_parallel_attention(*own.unbind(1), layout.video_exchange, group)
        out.square().sum().backward()
        return torch.cat([out[:, None], own.grad], dim=1).detach().split(layout.local_lengths.host)

    expected, parts, again = run(Group.solo()), run_ranks(degree, run), run_ranks(degree, run)
    for index, one in enumerate(expected):
        found = torch.cat([part[index] for part in parts])
        torch.testing.assert_close(found, one, atol=1e-5, rtol=1e-5)
        assert torch.equal(found, torch.cat([part[index] for part in again]))


def test_half_precision_adds_copies_in_fp32(run_ranks) -> None:
    """One head, many ranks: each gradient of a value is a sum of eight parts, rounded once."""
    rows, degree = 64, 8
    sequences = [Sequence((1, 1, rows), 0)]
    generator = torch.Generator().manual_seed(1)
    grads = torch.rand(rows, 1, 8, generator=generator).bfloat16()

    def run(group: Group) -> tuple[Tensor, ...]:
        layout = Layout(sequences, degree, group.rank)
        rows_of_rank = layout.chunk(0)
        q = torch.zeros(layout.local_tokens, 1, 8, dtype=torch.bfloat16)  # every key counts alike
        v = torch.zeros_like(q).requires_grad_()
        out = shared_heads_attention(q, q, v, layout.video_exchange, group, "sdpa")
        out.backward(grads[rows_of_rank])
        return v.grad, grads[rows_of_rank].float().sum(dim=0) / rows

    parts = run_ranks(degree, run)
    exact = sum(part[1].bfloat16().float() for part in parts).bfloat16()
    for gradient, _ in parts:
        torch.testing.assert_close(gradient, exact.expand_as(gradient), rtol=2**-8, atol=0)


@pytest.mark.parametrize(("lengths", "degree"), [((5, 5), 2), ((2,), 4), ((64, 64, 64), 2), ((7, 3, 1), 2)])
def test_cudnn_computes_shared_heads(
    lengths: tuple[int, ...], degree: int, run_ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a sequence may be a row longer in one than in another, or none. What it asks for is a GPU's."""
    monkeypatch.setattr("ops.attention.cudnn.why_not_half_on_cuda", lambda name, q, most: None)
    monkeypatch.setattr("ops.attention.cudnn.sdpa_kernel", lambda backend: nullcontext())
    sequences, heads = [Sequence((1, 1, length), 0) for length in lengths], 3
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(length, 3, heads, 8, generator=generator) for length in lengths]

    def run(group: Group, backend: AttentionName = "cudnn") -> Tensor:
        layout = Layout(sequences, group.size, group.rank)
        own = layout.local(whole).requires_grad_()
        out = sequence_parallel_attention(*own.unbind(1), layout.video_exchange, group, backend)
        out.square().sum().backward()
        return torch.cat([out[:, None], own.grad], dim=1).detach().split(layout.local_lengths.host)

    expected, parts = run(Group.solo(), "sdpa"), run_ranks(degree, run)
    for index, one in enumerate(expected):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), one, atol=1e-5, rtol=1e-5)
