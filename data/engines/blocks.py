"""A batch as an Arrow table, the form in which it travels through Ray's object store. Pixels are never copied here.

One row per clip; the pixels of all clips lie in one buffer, so a reader gets a single [B, T, H, W, 3] view of shared
memory (read-only).
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from data.ledger import Fault, FaultRecord, Reason
from data.types import Batch


def as_batch(value: object) -> Batch:
    """A Batch from what any engine hands out: itself, or a block."""
    if isinstance(value, Batch):
        return value
    assert isinstance(value, pa.Table), f"a {type(value).__name__} is neither a batch nor a block"
    return from_block(value)


def to_block(batch: Batch) -> pa.Table:
    """The table of a batch."""
    count, *shape = batch.video.shape
    pixels = np.ascontiguousarray(batch.video)
    offsets = np.arange(count + 1, dtype=np.int64) * (pixels.nbytes // count)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(pixels)]
    video = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
    faults = iter(batch.faults)
    return pa.table(
        {
            "item": pa.array([batch.item] * count),
            "video": video,
            "shape": pa.array([shape] * count),
            "caption": pa.array(batch.captions, pa.string()),
            "ok": pa.array(batch.ok),
            "key": pa.array(batch.keys),
            "fault": pa.array(["" if ok else fault_to_json(next(faults)) for ok in batch.ok]),
        }
    )


def from_block(table: pa.Table) -> Batch:
    """The batch of a table made by to_block."""
    columns = {name: table.column(name).to_pylist() for name in ("item", "shape", "caption", "ok", "key", "fault")}
    (chunk,) = table.column("video").chunks
    _, offsets, values = chunk.buffers()
    (first,) = np.frombuffer(offsets, np.int64, count=1, offset=8 * chunk.offset)
    shape = (len(chunk), *columns["shape"][0])
    pixels = np.frombuffer(values, np.uint8) if values else np.zeros(0, np.uint8)  # no buffer: a video without frames
    video = pixels[first : first + int(np.prod(shape))].reshape(shape)
    return Batch(
        item=columns["item"][0],
        video=video,
        captions=columns["caption"],
        ok=columns["ok"],
        keys=columns["key"],
        faults=tuple(fault_from_json(text) for text in columns["fault"] if text),
    )


def fault_to_json(fault: Fault) -> str:
    return json.dumps({**fault.to_json(), "source": fault.source})


def fault_from_json(text: str) -> Fault:
    plain: FaultRecord = json.loads(text)
    return Fault(
        reason=Reason(plain["reason"]),
        shard=plain["shard"],
        key=plain["key"],
        offset=plain["offset"],
        detail=plain["detail"],
        source=plain["source"],
    )
