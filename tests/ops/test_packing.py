"""Layouts against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.chunks import chunk_bounds
from ops.packed.packing import Layout, Sequence

torch.set_num_threads(1)
sequences = st.lists(
    st.builds(Sequence, st.tuples(*[st.integers(1, 4)] * 3), st.integers(0, 9)), min_size=1, max_size=6
)


@given(st.integers(0, 50), st.integers(1, 8), st.integers(0, 9))
def test_chunks_are_contiguous_cover_the_sequence_and_differ_by_one(tokens: int, degree: int, turn: int) -> None:
    bounds = [chunk_bounds(tokens, degree, rank, turn) for rank in range(degree)]
    assert [start for start, _ in bounds] + [tokens] == [0] + [stop for _, stop in bounds]
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


def test_many_short_sequences_burden_all_ranks_alike() -> None:
    layouts = [Layout([Sequence((1, 1, 1), 1)] * 8, 4, rank) for rank in range(4)]
    assert [layout.local_tokens for layout in layouts] == [2, 2, 2, 2]


@settings(max_examples=30, deadline=None)
@given(sequences, st.integers(1, 5))
def test_index_tensors_equal_a_loop_over_tokens(sequences: list[Sequence], degree: int) -> None:
    rows = [
        (index, t, h, w)
        for index, s in enumerate(sequences)
        for t in range(s.grid[0])
        for h in range(s.grid[1])
        for w in range(s.grid[2])
    ]
    seen = []
    for rank in range(degree):
        layout = Layout(sequences, degree, rank)
        own = [[row for row in rows if row[0] == index][layout.chunk(index)] for index in range(len(sequences))]
        expected = [row for chunk in own for row in chunk]
        assert layout.local_tokens == len(expected)
        assert layout.seq_index.tolist() == [row[0] for row in expected]
        assert layout.positions.tolist() == [list(row[1:]) for row in expected]
        assert layout.segments.run2mod[layout.segments.run].tolist() == [row[0] for row in expected]
        assert layout.local_lengths.host == tuple(len(chunk) for chunk in own)
        assert layout.local_lengths.offsets.tolist()[-1] == len(expected)
        seen += expected
    assert sorted(seen) == sorted(rows)


@settings(max_examples=30, deadline=None)
@given(sequences, st.integers(1, 5))
def test_exchange_orders_received_rows_sequence_by_sequence(sequences: list[Sequence], degree: int) -> None:
    """What arrives is every rank's rows in rank order; gathered it is each sequence's video, then its text."""
    layouts = [Layout(sequences, degree, rank) for rank in range(degree)]
    starts = [sum(s.text_tokens for s in sequences[:index]) for index in range(len(sequences))]
    received: list[tuple[str, int, int]] = []
    for layout in layouts:
        for index in range(len(sequences)):
            chunk = layout.chunk(index)
            received += [("video", index, row) for row in range(chunk.start, chunk.stop)]
        text = [
            ("text", index, row)
            for index in range(len(sequences))
            for row in range(*chunk_bounds(sequences[index].text_tokens, degree, layout.rank, index))
        ]
        assert layout.text_rows.tolist() == [starts[index] + row for _, index, row in text]
        received += text
    whole = []
    for index, s in enumerate(sequences):
        whole += [("video", index, row) for row in range(s.tokens)] + [
            ("text", index, row) for row in range(s.text_tokens)
        ]
    exchange = layouts[0].joint_exchange
    assert [received[place] for place in exchange.gather.tolist()] == whole
    assert [whole[place] for place in exchange.scatter.tolist()] == received
    assert exchange.rows == tuple(layout.local_tokens + layout.local_text_tokens for layout in layouts)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="outside a bag of degree 2"):
        Layout([Sequence((1, 1, 1), 1)], degree=2, rank=2)
    with pytest.raises(ValueError, match="at least one sequence"):
        Layout([])
    with pytest.raises(ValueError, match="is empty"):
        Layout([Sequence((1, 0, 1), 1)])


def test_rope_tables_are_shared_by_all_layers() -> None:
    layout = Layout([Sequence((2, 3, 4), 1)], 2, 1)
    assert layout.rope((4, 2, 2), 100.0, torch.float32)[0] is layout.rope((4, 2, 2), 100.0, torch.float32)[0]
    assert layout.rope((4, 2, 2), 100.0, torch.float64)[0].shape == (12, 4)


def test_text_mean_of_each_sequence() -> None:
    layout = Layout([Sequence((1, 1, 1), 3), Sequence((1, 1, 1), 0), Sequence((1, 1, 1), 2)])
    text = torch.randn(5, 4)
    expected = torch.stack([text[:3].mean(0), torch.zeros(4), text[3:].mean(0)])
    torch.testing.assert_close(layout.text_mean(torch.float32) @ text, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_clean_frames_have_table_rows_of_their_own_and_no_loss(degree: int) -> None:
    sequences = [Sequence((3, 2, 2), 1, clean_frames=1), Sequence((2, 1, 3), 1), Sequence((2, 2, 1), 1, clean_frames=1)]
    layouts = [Layout(sequences, degree, rank) for rank in range(degree)]
    tables = [layout.segments.run2mod[layout.segments.run.long()].tolist() for layout in layouts]
    noisy = [layout.noisy_rows.tolist() for layout in layouts]
    for index, (sequence, clean) in enumerate(zip(sequences, (4, 0, 2))):
        rows = [t for layout, table in zip(layouts, tables) for t, s in zip(table, layout.seq_index) if s == index]
        assert rows == [3 + index] * clean + [index] * (sequence.tokens - clean)
        kept = [k for layout, keep in zip(layouts, noisy) for k, s in zip(keep, layout.seq_index) if s == index]
        assert kept == [False] * clean + [True] * (sequence.tokens - clean)
    assert layouts[0].token_counts.tolist() == [8, 6, 2]
    times = torch.tensor([5.0, 6.0, 7.0])
    assert layouts[0].times(times).tolist() == [5, 6, 7, 0, 0, 0]
    assert layouts[0].times(times, times / 10).tolist() == pytest.approx([5, 6, 7, 0.5, 0.6, 0.7])


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_every_frame_may_have_a_table_row_of_its_own(degree: int) -> None:
    grids, clean = [(3, 2, 2), (1, 1, 3), (2, 2, 1)], (1, 0, 0)
    sequences = [Sequence(grid, 1, clean_frames=count, frame_times=True) for grid, count in zip(grids, clean)]
    layouts = [Layout(sequences, degree, rank) for rank in range(degree)]
    found: list[list[int]] = [[], [], []]
    for layout in layouts:
        assert layout.num_times == layout.num_tables == layout.segments.num_mods == 6
        assert layout.segments.run2mod[layout.segments.run.long()].tolist() == layout.time_index.tolist()
        for row, sequence in zip(layout.time_index.tolist(), layout.seq_index.tolist()):
            found[sequence].append(row)
    assert found == [[0] * 4 + [1] * 4 + [2] * 4, [3] * 3, [4] * 2 + [5] * 2]
    assert layouts[0].table_sequences.tolist() == [0, 0, 0, 1, 2, 2]
    times = torch.arange(6.0)
    assert layouts[0].times(times) is times
    assert layouts[0].token_counts.tolist() == [8, 3, 4]


def test_the_sequence_of_a_table_row_is_known_without_times_by_frame_too() -> None:
    plain, clean = Sequence((2, 1, 1), 1), Sequence((2, 1, 1), 1, clean_frames=1)
    assert Layout([plain, plain]).table_sequences.tolist() == [0, 1]
    assert Layout([plain, clean]).table_sequences.tolist() == [0, 1, 0, 1]
    assert Layout([plain, clean]).time_index.tolist() == [0, 0, 3, 1]


def test_times_by_frame_are_of_all_sequences_of_a_layout_or_of_none() -> None:
    with pytest.raises(ValueError, match="give them layouts apart"):
        Layout([Sequence((2, 1, 1), 1), Sequence((2, 1, 1), 1, frame_times=True)])


def test_a_clip_of_clean_frames_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="has no frame that is not given"):
        Layout([Sequence((1, 2, 2), 1, clean_frames=1)])
