"""`heddle data preview`: a contact sheet per bucket of what training would see: its frames, crops and captions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ops.counted import counted

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.settings.config import RunConfig
    from data.dataset.dataset import Dataset
    from data.types import Batch, Bucket, DataItem

CAPTION_WIDTH, MARGIN = 300, 6  # pixels
SHOWN_LETTERS = 4000  # of a caption, which may have a million: more than there is room for
SEARCHED_STEPS = 500


def preview(config: RunConfig, out: Path, samples: int = 8, frames: int = 5) -> list[Path]:
    """Write `out`/<bucket>.png with up to `samples` clips of each bucket, `frames` pictures of each. Returns the files.

    Raises DataError and ValueError as a training run would.
    """
    from app.inputs.batches import with_limits
    from app.inputs.items import open_dataset
    from app.inputs.profiles import profile_of
    from ops.models.folders import resolve

    model, geometry = resolve(config.model)
    profile = profile_of(config, model, geometry)
    config, _ = with_limits(config, model, geometry, profile)
    dataset = open_dataset(config, geometry, profile)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for bucket, items in sorted(_items_by_bucket(dataset, samples).items()):
        rows = [row for item in items for row in _rows(item)][:samples]
        path = out / f"{bucket}.png"
        _sheet(bucket, rows, frames).save(path)
        written.append(path)
        print(f"{path}: {counted(len(rows), 'sample')} of bucket {bucket}")
    return written


def _items_by_bucket(dataset: Dataset, samples: int) -> dict[Bucket, list[DataItem]]:
    """The first items of each bucket in training order, until every bucket has enough or has none in 500 steps."""
    found: dict[Bucket, list[DataItem]] = {}
    wanted = set(dataset.batch_sizes())
    for step in range(SEARCHED_STEPS):
        for item in dataset.step(step).items:
            held = found.setdefault(item.bucket, [])
            if sum(other.batch for other in held) < samples:
                held.append(item)
        if all(sum(item.batch for item in found.get(bucket, [])) >= samples for bucket in wanted):
            break
    return found


def _rows(item: DataItem) -> list[tuple[np.ndarray, str]]:
    """(frames of a clip, text beside them) of an item."""
    from data.decode import decode_job

    batch: Batch = decode_job(item.job)
    reasons = {fault.key: f"{fault.reason}: {fault.detail}" for fault in batch.faults}
    rows = []
    for sample, video, caption, ok in zip(item.samples, batch.video, batch.captions, batch.ok):
        dropped = "(caption dropped)" if sample.caption_drop else caption
        text = f"{sample.key} from frame {sample.start_frame}\n{dropped if ok else 'BAD ' + reasons[sample.key]}"
        rows.append((video, text))
    return rows


def _sheet(bucket: Bucket, rows: list[tuple[np.ndarray, str]], frames: int) -> Image:
    from PIL import Image, ImageDraw

    from app.drawing.text import LINE, font_of, lines_of

    scale = max(1, round(96 / bucket.height))  # tiny training sizes are enlarged
    height, width = bucket.height * scale, bucket.width * scale
    chosen = np.unique(np.linspace(0, bucket.frames - 1, min(frames, bucket.frames)).round().astype(int))
    size = (len(chosen) * (width + MARGIN) + MARGIN + CAPTION_WIDTH, len(rows) * (height + MARGIN) + MARGIN)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for position, (video, text) in enumerate(rows):
        top = MARGIN + position * (height + MARGIN)
        for column, frame in enumerate(chosen):
            picture = Image.fromarray(video[frame]).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(picture, (MARGIN + column * (width + MARGIN), top))
        left = MARGIN + len(chosen) * (width + MARGIN)
        text = text[:SHOWN_LETTERS]
        font = font_of(text)
        for number, line in enumerate(lines_of(text, CAPTION_WIDTH - MARGIN, font)[: height // LINE]):
            draw.text((left, top + number * LINE), line, fill="black", font=font)
    return sheet
