"""The engine that a config names."""

from __future__ import annotations

from data.config import DataConfig
from data.dataset.dataset import Dataset
from data.engines.engine import Engine


def make_engine(dataset: Dataset, config: DataConfig | None = None) -> Engine:
    """The engine that data.engine.kind names."""
    if (config or dataset.config).engine.kind == "pool":
        from data.engines.processes import PoolEngine

        return PoolEngine(dataset, config)
    from data.engines.ray_data import RayEngine  # imports ray.data, which takes seconds

    return RayEngine(dataset, config)
