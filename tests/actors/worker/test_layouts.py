"""What a worker says of a cascade's layout before it is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.plan.types import Item
from actors.worker import executor
from ops.packed.packing import Layout
from tests.actors.exactness import make_hosts, one_worker, run_step, train_config
from tests.families.kit import MODEL

ITEMS = [Item(id=f"s0.{n}", batch=1, frames=5, height=32, width=32, text_tokens=12) for n in range(2)]


@pytest.mark.parametrize("pad_to", [0, MODEL.text.max_length], ids=["true lengths", "padded"])
def test_a_layout_has_what_the_one_before_was_asked_for_and_knows_padded_texts(
    pad_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[frozenset[str], bool, Layout]] = []

    def spy(*args: object, beforehand: frozenset[str], **named: object) -> Layout:
        layout = Layout(*args, beforehand=beforehand, **named)  # type: ignore[arg-type]
        made.append((beforehand, layout.text_recurs, layout))
        return layout

    monkeypatch.setattr(executor, "Layout", spy)
    config = replace(MODEL, text=replace(MODEL.text, pad_to=pad_to))
    run_step(make_hosts(1, torch.float32, train_config(), config=config), ITEMS, one_worker(ITEMS))
    (first, recurs, layout), (second, *_) = made
    assert first == frozenset() and recurs == bool(pad_to)
    assert second == layout.asked >= {"segments", "positions", "video_exchange", "token_counts"}
