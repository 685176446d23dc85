"""The clips that `heddle bench data` loads: textured H.264 of the bit rate of real footage, a few many times over.

Encoding is slow, so a few clips are encoded and repeated under new keys; every loader sees the same bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import av
import numpy as np

DISTINCT = 12
FPS = 24
GRAIN = 6  # of 256; gives residuals, and so the bit rate, like those of a camera


def make_set(folder: Path, clips: int, height: int, width: int, frames: int, shards: int = 2, mib: int = 0) -> Path:
    """Write folder/shards/*.tar (mp4, txt, json) unless they are there: `clips`, or as many as make `mib`. Returns the
    folder of the shards."""
    target = folder / "shards"
    if target.exists():
        return target
    target.mkdir(parents=True)
    media = [encode(height, width, frames, seed) for seed in range(min(DISTINCT, clips or DISTINCT))]
    clips = clips or (mib << 20) * len(media) // sum(map(len, media))
    for shard in range(shards):
        with tarfile.open(target / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard, clips, shards):
                about = {"width": width, "height": height, "fps": FPS, "num_frames": frames}
                for suffix, content in (
                    ("mp4", media[number % len(media)]),
                    ("txt", f"texture {number}".encode()),
                    ("json", json.dumps(about).encode()),
                ):
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return target


def encode(height: int, width: int, frames: int, seed: int) -> bytes:
    """A texture that drifts under film grain, two seconds between keyframes."""
    random = np.random.default_rng(seed)
    texture = _texture(height + 64, width + 64, random)
    drift = random.integers(-2, 3, 2)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        options = {"preset": "veryfast", "crf": "23", "g": str(2 * FPS)}
        stream = out.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for number in range(frames):
            top, left = (int(32 + 30 * np.sin(number * step / 30)) for step in drift)
            luma = texture[top : top + height, left : left + width].astype(np.int16)
            luma += random.integers(-GRAIN, GRAIN + 1, luma.shape, dtype=np.int16)
            chroma = texture[top : top + height : 2, left : left + width : 2] // 4 + 96
            planes = np.concatenate([luma.clip(16, 235).astype(np.uint8).ravel(), chroma.ravel(), 255 - chroma.ravel()])
            frame = av.VideoFrame.from_ndarray(planes.reshape(height * 3 // 2, width), format="yuv420p")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def _texture(height: int, width: int, random: np.random.Generator) -> np.ndarray:
    """uint8 [height, width]: noise of several scales, the coarse ones strongest, as in photographs."""
    total = np.zeros((height, width))
    for scale in (64, 32, 16, 8, 4):
        coarse = random.standard_normal((height // scale + 2, width // scale + 2))
        total += scale * coarse.repeat(scale, 0).repeat(scale, 1)[:height, :width]
    low, high = np.quantile(total, (0.01, 0.99))
    texture: np.ndarray = ((total - low) / (high - low) * 219 + 16).clip(16, 235).astype(np.uint8)
    return texture
