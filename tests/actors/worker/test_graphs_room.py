"""Which workers have CUDA graphs: those whose device has room for them beside what training needs."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.config import WorkersConfig
from actors.messages import WorkerSettings
from actors.worker.loading import fit_graphs
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import transformers
from ops.models.load import build_dit
from ops.packed.graphed_blocks import GraphedBlocks
from tests.actors.exactness import MODEL, train_config

SETTINGS = WorkerSettings(model=MODEL, train=train_config(), workers=WorkersConfig(), least_gib=(60.0, 30.0))


@pytest.mark.parametrize(
    ("device_gib", "graphs_least_gib", "why"),
    [
        (65.0, (64.0, 34.0), ""),
        (63.0, (64.0, 34.0), "takes a GPU of 64.0 GiB, this one has 63.0"),  # the other place would leave more
        (40.0, (64.0, 34.0), ""),  # where a run is that does not fit the first place
        (33.0, (64.0, 34.0), "takes a GPU of 34.0 GiB, this one has 33.0"),
        (40.0, (64.0, math.inf), "weights are fetched"),
        (0.0, (64.0, 34.0), ""),  # no limit is known
        (40.0, (), ""),
    ],
)
def test_a_worker_has_graphs_where_they_have_room(
    device_gib: float, graphs_least_gib: tuple[float, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    dit = build_dit(MODEL.dit, 0)
    for one in transformers(dit):
        cast(PackedTransformer, one).graphed = GraphedBlocks(lambda layout: 1.0, cast(Any, None))
    with caplog.at_level(logging.WARNING):
        fit_graphs(dit, replace(SETTINGS, graphs_least_gib=graphs_least_gib), device_gib)
    assert all((cast(PackedTransformer, one).graphed is None) == bool(why) for one in transformers(dit))
    assert why in caplog.text and ("blocks run as written" in caplog.text) == bool(why)
