"""What a source holds, from its index: counts, shapes, lengths, scores. JSON only."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

import numpy as np

from data.dataset.index import Index

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MOST_SHAPES = 12  # listed


class ShapeCount(TypedDict):
    """How many usable samples have this width and height."""

    width: int
    height: int
    count: int


class SourceStatistics(TypedDict):
    """Figures of a source as JSON. Distributions are quantiles (QUANTILES), empty where nothing is known."""

    name: str
    kind: str
    hash: str
    shards: int
    indexed: int
    usable: int
    videos: int
    images: int
    repeated: int  # usable, with the clip of an earlier sample of these sources
    by_default: int  # usable, without a text: they have the default_caption
    file_missing: int
    coverage: float
    rejected: dict[str, int]
    bytes: int
    hours: float
    shapes: list[ShapeCount]
    other_shapes: int
    other_samples: int
    aspect: list[float]
    fps: list[float]
    frames: list[float]
    seconds: list[float]
    caption_chars: list[float]
    scores: dict[str, list[float]]
    infinite: dict[str, int]  # by score: values that are none of its quantiles, such as the PSNR of a still clip


def statistics(index: Index, repeated: int) -> SourceStatistics:
    """Figures of the usable rows, of which `repeated` have the clip of another, and how many are not usable and why."""
    columns = index.columns("ok", "image", "width", "height", "fps", "num_frames", "duration", "caption_chars", "size")
    ok = columns.pop("ok").astype(bool)
    kept = {name: values[ok] for name, values in columns.items()}
    video = ~kept["image"].astype(bool)
    scores = {name: index.columns(name)[name][ok] for name in index.scores}
    shapes = Counter(zip(kept["width"].tolist(), kept["height"].tolist()))
    return {
        "name": index.name,
        "kind": index.config.kind,
        "hash": index.hash,
        "shards": index.num_shards,
        "indexed": len(index) + index.missing,
        "usable": int(ok.sum()),
        "videos": int(video.sum()),
        "images": int((~video).sum()),
        "repeated": repeated,
        "by_default": index.num_by_default,
        "file_missing": index.missing,
        "coverage": index.coverage,
        "rejected": {str(reason): count for reason, count in index.rejects.most_common()},
        "bytes": int(kept["size"].sum()),
        "hours": float(kept["duration"].sum() / 3600),
        "shapes": [
            {"width": width, "height": height, "count": count}
            for (width, height), count in shapes.most_common(_MOST_SHAPES)
        ],
        "other_shapes": max(len(shapes) - _MOST_SHAPES, 0),
        "other_samples": int(ok.sum()) - sum(count for _, count in shapes.most_common(_MOST_SHAPES)),
        "aspect": quantiles(kept["width"] / np.maximum(kept["height"], 1)),
        "fps": quantiles(kept["fps"][video]),
        "frames": quantiles(kept["num_frames"][video]),
        "seconds": quantiles(kept["duration"][video]),
        "caption_chars": quantiles(index.trained_chars(kept["caption_chars"])),
        "scores": {name: quantiles(values) for name, values in scores.items()},
        "infinite": {name: count for name, values in scores.items() if (count := int(np.isinf(values).sum()))},
    }


def quantiles(values: np.ndarray) -> list[float]:
    """Minimum, 5, 25, 50, 75, 95 % and maximum of the values that are finite; empty if there are none. NaN stands for
    one that is not known, and between infinities there is no quantile."""
    values = values.astype(np.float64)
    values = values[np.isfinite(values)]
    return [float(value) for value in np.quantile(values, QUANTILES)] if len(values) else []
