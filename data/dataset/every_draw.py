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

from data.buckets import ClipShape, first_frames, last_start
from data.dataset.dataset import Dataset
from data.dataset.index import IndexRow
from data.types import Bucket, Clip, DataItem, SampleRef


@dataclass(frozen=True, slots=True)
class ClipCut:
    """A clip in one of the shapes that the run may train it in, from one of the frames at which a draw begins."""

    source: int
    row: int
    bucket: Bucket
    crop: bool
    batch: int  # clips of a full batch of the bucket
    moves: bool  # every draw begins at another frame: what it holds is not known before
    start_frame: int = 0


def every_row(dataset: Dataset) -> Iterator[tuple[IndexRow, list[ClipCut]]]:
    """Each row that some segment draws, in the order of the indexes, with its cuts: for each bucket that takes it one,
    or as many as `data.start_frame` says; what is the same in two segments once."""
    for source, index in enumerate(dataset.indexes):
        shapes = dataset.planner.populations[source].shape
        stages = [stage for stage in dataset.planner.stages if stage.weights[source]]
        batches: dict[int, dict[tuple[Bucket, bool], int]] = {}  # by shape
        for shape in np.unique(shapes[shapes >= 0]).tolist():
            for stage in stages:
                for choice in stage.choices[shape]:
                    batches.setdefault(shape, {}).setdefault((choice.bucket, stage.crop), stage.batch[choice.bucket])
        for row in index.rows(np.flatnonzero(np.isin(shapes, list(batches)))):
            of_row = batches[int(shapes[row.row])].items()
            cuts = [cut for (bucket, crop), batch in of_row for cut in _cuts(dataset, row, bucket, crop, batch)]
            yield row, cuts


def _cuts(dataset: Dataset, row: IndexRow, bucket: Bucket, crop: bool, batch: int) -> Iterator[ClipCut]:
    shape = ClipShape(frames=row.num_frames, height=row.height, width=row.width, fps=0.0 if row.image else row.fps)
    starts = first_frames(last_start(shape, bucket, dataset.config.fps), dataset.config.start_frame)
    moves = dataset.config.start_frame == "random" and len(starts) > 1
    for start in dict.fromkeys(starts[:1] if moves else starts):
        yield ClipCut(row.source, row.row, bucket, crop, batch, moves, start)


def told_clips(dataset: Dataset, row: IndexRow) -> list[Clip]:
    """The row with each caption that a draw may have, and without one where it may have none (`caption_of`)."""
    dropout, count = dataset.config.caption_dropout, len(row.captions)
    told = [row.clip(caption_pick=(number + 0.5) / count) for number in range(count)] if dropout < 1 else []
    return [*told, row.clip(caption_drop=True)] if dropout > 0 or not told else told


def item_of(dataset: Dataset, name: str, cuts: Sequence[ClipCut], rows: Sequence[IndexRow] = ()) -> DataItem:
    """An item of clips in one shape, as a step would have it that begins at these frames of them, without captions.
    `rows`: theirs, where they have been read."""
    bucket, crop = cuts[0].bucket, cuts[0].crop
    assert all((cut.bucket, cut.crop) == (bucket, crop) for cut in cuts), "an item has clips of one shape"
    rows = rows or [dataset.indexes[cut.source].row(cut.row) for cut in cuts]
    clips = tuple(row.clip(cut.start_frame, caption_drop=True) for row, cut in zip(rows, cuts))
    samples = tuple(_sample(row, cut.start_frame) for row, cut in zip(rows, cuts))
    return DataItem(job=dataset.job(name, bucket, clips, crop), samples=samples)


def _sample(row: IndexRow, start_frame: int) -> SampleRef:
    return SampleRef(
        source=row.source,
        epoch=0,
        row=row.row,
        start_frame=start_frame,
        key=row.key,
        caption_chars=0,
        content=row.content,
        caption_drop=True,
    )
