"""Everything that the steps of a run may draw, whatever its seed and length: each clip in each of its shapes, each of
its captions. Made of the same rows and rules as the steps themselves (`Dataset`), so that names in a cache agree.

    for row, cuts in every_row(dataset):
        item = item_of(dataset, "cache", cuts[:1])                     # as a step has it, its caption left out
        texts = [caption_of(clip, item.job) for clip in told_clips(dataset, row)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.buckets import ClipShape, last_start
from data.dataset.dataset import Dataset
from data.dataset.index import IndexRow
from data.types import Bucket, Clip, DataItem, SampleRef


@dataclass(frozen=True, slots=True)
class ClipCut:
    """A clip in one of the shapes that the run may train it in."""

    source: int
    row: int
    bucket: Bucket
    crop: bool
    batch: int  # clips of a full batch of the bucket
    moves: bool  # every draw begins at another frame: what it holds is not known before


def every_row(dataset: Dataset) -> Iterator[tuple[IndexRow, list[ClipCut]]]:
    """Each row that some segment draws, in the order of the indexes, with its cuts: one for each bucket that takes it;
    what is the same in two segments once."""
    for source, index in enumerate(dataset.indexes):
        shapes = dataset.planner.populations[source].shape
        stages = [stage for stage in dataset.planner.stages if stage.weights[source]]
        for number in np.flatnonzero(shapes >= 0).tolist():
            batches: dict[tuple[Bucket, bool], int] = {}
            for stage in stages:
                for choice in stage.choices[int(shapes[number])]:
                    batches.setdefault((choice.bucket, stage.crop), stage.batch[choice.bucket])
            if batches:
                row = index.row(number)
                yield row, [_cut(dataset, row, bucket, crop, batch) for (bucket, crop), batch in batches.items()]


def _cut(dataset: Dataset, row: IndexRow, bucket: Bucket, crop: bool, batch: int) -> ClipCut:
    random = dataset.config.start_frame == "random"
    shape = ClipShape(frames=row.num_frames, height=row.height, width=row.width, fps=0.0 if row.image else row.fps)
    moves = random and last_start(shape, bucket, dataset.config.fps) > 0
    return ClipCut(row.source, row.row, bucket, crop, batch, moves)


def told_clips(dataset: Dataset, row: IndexRow) -> list[Clip]:
    """The row with each caption that a draw may have, and without one where it may have none (`caption_of`)."""
    dropout, count = dataset.config.caption_dropout, len(row.captions)
    told = [row.clip(caption_pick=(number + 0.5) / count) for number in range(count)] if dropout < 1 else []
    return [*told, row.clip(caption_drop=True)] if dropout > 0 or not told else told


def item_of(dataset: Dataset, name: str, cuts: Sequence[ClipCut]) -> DataItem:
    """An item of clips in one shape, as a step would have it that begins at their first frames, without captions."""
    bucket, crop = cuts[0].bucket, cuts[0].crop
    assert all((cut.bucket, cut.crop) == (bucket, crop) for cut in cuts), "an item has clips of one shape"
    rows = [dataset.indexes[cut.source].row(cut.row) for cut in cuts]
    job = dataset.job(name, bucket, tuple(row.clip(caption_drop=True) for row in rows), crop)
    return DataItem(job=job, samples=tuple(_sample(row) for row in rows))


def _sample(row: IndexRow) -> SampleRef:
    return SampleRef(
        source=row.source,
        epoch=0,
        row=row.row,
        start_frame=0,
        key=row.key,
        caption_chars=0,
        content=row.content,
        caption_drop=True,
    )
