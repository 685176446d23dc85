"""Part (h) of `heddle bench runtime`: nodes take as much memory as is asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.bench.host_memory import TOLERANCE, measure
from app.bench.lab import Lab


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_the_memory_that_nodes_take_is_what_is_asked_of_them(tmp_path: Path) -> None:
    with Lab(tmp_path) as lab:
        found = measure(lab)
    assert [one.nodes for one in found] == [(2,), (1, 1)]
    assert [one.ratio for one in found] == pytest.approx([1.0, 1.0], abs=TOLERANCE), found
