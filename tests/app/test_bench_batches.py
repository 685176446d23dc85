"""Sizes that follow measured costs are worth what a true profile would have been."""

from __future__ import annotations

import pytest

from app.bench.batches import simulate


@pytest.mark.long
def test_re_sizing_makes_up_for_a_wrong_profile() -> None:
    equal, wrong, resized, true = (
        simulate(mode, 8, 60, 10, 0) for mode in ("equal tokens", "dual constraint", "with re-sizing", "true costs")
    )
    assert wrong.tokens_per_s < equal.tokens_per_s < resized.tokens_per_s
    assert resized.tokens_per_s > 0.95 * true.tokens_per_s
    assert resized.idle < equal.idle < wrong.idle
    assert resized.resized >= 1 and wrong.resized == 0
