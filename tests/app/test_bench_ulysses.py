"""The Ulysses benchmark compares two ways of doing the same thing."""

from __future__ import annotations

import pytest
import torch

from app.bench.ulysses import AttentionLayer, measure
from ops.packed.sequence_parallel import heads_to_rows, rows_to_heads

torch.set_num_threads(1)


def test_both_ways_put_the_same_rows_in_the_same_places() -> None:
    layer = AttentionLayer([5, 1, 9, 4], degree=3, heads=6, head_dim=2, device="cpu")
    by_index = rows_to_heads(layer.own, layer.exchange, layer.group)  # type: ignore[arg-type]
    by_lists = layer.lists_there(torch.stack(layer.own, dim=1))
    for ours, theirs in zip(by_index, by_lists.unbind(1), strict=True):
        assert torch.equal(ours, theirs)
    (back,) = heads_to_rows(layer.whole[:1], layer.exchange, layer.group)  # type: ignore[arg-type]
    assert torch.equal(back, layer.lists_back(layer.whole[0]))


def test_a_small_run_counts_its_chunks() -> None:
    cost = measure(sequences=3, degree=2, heads=2, head_dim=4, repeats=1)
    assert (cost.chunks, cost.degree, cost.sequences) == (6, 2, 3)
    assert min(cost.index_ms, cost.lists_ms, cost.attention_ms, cost.layout_ms, cost.index_host_ms) > 0
    with pytest.raises(ValueError, match="3 heads over degree 2"):
        measure(heads=3, degree=2)
