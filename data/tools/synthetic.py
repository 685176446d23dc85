"""A small real dataset from nothing: coloured shapes that move in stated directions, with matching captions.

    synthesize(Path("demo"), SynthConfig())
    demo/shards/00000.tar ..     WebDataset shards: 000000000.mp4 .txt .json (stills: .jpg)
    demo/koala/Koala_36M_1.csv   the same videos as Koala-36M rows (its exact columns)
    demo/koala/videos/<videoID>.mp4

The videos are real H.264. The same config gives the same bytes: x264 runs without SIMD (asm=0), as its assembly makes
files that differ from run to run, and colours are written straight into YUV planes.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "purple": (150, 60, 200),
    "orange": (245, 140, 30),
    "white": (240, 240, 240),
    "cyan": (60, 210, 220),
}
BACKGROUNDS = {"black": (12, 12, 12), "gray": (110, 110, 110), "brown": (90, 60, 35), "navy": (20, 25, 80)}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"to the right": (0, 1), "to the left": (0, -1), "up": (-1, 0), "down": (1, 0)}  # (dy, dx)
KOALA_COLUMNS = (
    "videoID",
    "url",
    "timestamp",
    "caption",
    "clarity_score",
    "aesthetic_score",
    "motion_score",
    "video_training_suitability_score",
)
KOALA_TABLE = "Koala_36M_1.csv"
CLIPS_OF_A_VIDEO = 4
_PART = ".synthetic-part-"  # begins the name of the folder in which a process makes a set
_ABANDONED_S = 86400.0  # without a change to what is in it


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthConfig:
    """How much is made. The defaults are the demo set."""

    clips: int = 240
    images: int = 40
    shards: int = 4
    seed: int = 0
    sizes: tuple[tuple[int, int], ...] = ((64, 96), (96, 64), (80, 80), (96, 144), (144, 96))  # (height, width)
    frames: tuple[int, ...] = (9, 17, 21, 33)
    fps: tuple[int, ...] = (8, 12, 16)
    koala: bool = True
    stable: bool = True  # the same bytes on every run, at a third of the encoder's speed

    def __post_init__(self) -> None:
        if min(self.clips, self.images) < 0:
            raise ValueError(
                f"synth: {self.clips} clips and {self.images} images; neither may be negative. Use 0 for none."
            )
        if self.clips + self.images < 1 or self.shards < 1:
            raise ValueError(
                f"synth: {self.clips} clips and {self.images} images in {self.shards} shards: nothing to "
                f"make. Ask for at least one clip and one shard."
            )
        if any(side % 2 for size in self.sizes for side in size):
            raise ValueError(f"synth: sizes {self.sizes} hold an odd number; H.264 4:2:0 takes even sides.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What one clip shows. `frames` 1 and `fps` 0 is a still image."""

    number: int
    color: str
    shape: str
    direction: str
    background: str
    height: int
    width: int
    frames: int
    fps: int
    radius: float = 0.2  # of the shorter side
    offset: float = 0.0  # across the direction of motion, in shares of the side
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        article = "an" if self.color[0] in "aeiou" else "a"
        motion = f" moving {self.direction}" if self.fps else ""
        return f"{article} {self.color} {self.shape}{motion} on a {self.background} background"

    @property
    def short_caption(self) -> str:
        return f"{self.color} {self.shape}" if self.fps == 0 else f"{self.color} {self.shape}, {self.direction}"


def synthesize(folder: Path, config: SynthConfig) -> dict[str, object]:
    """Write the dataset into `folder`. Returns a summary: paths, counts and bytes. Raises ValueError if it has one.

    It is built in a hidden folder of its own and renamed, shards/ last: where that is, the whole set is. Another
    process may make the same set at the same time; of what both have made the first stays.
    """
    import webdataset  # the writer users' own tools have; it imports torch, so not at module load

    shards, table = folder / "shards", folder / "koala"
    scenes = list(make_scenes(config))
    videos = [scene for scene in scenes if scene.fps] if config.koala else []
    if _holds_something(shards):
        raise _not_empty(shards)
    if config.koala and _holds_something(table) and not _is_of(table, videos, config.seed):
        raise _not_empty(table)
    folder.mkdir(parents=True, exist_ok=True)
    _clear_up(folder)
    part = folder / f"{_PART}{uuid.uuid4().hex[:12]}"
    try:
        (part / shards.name).mkdir(parents=True)
        koala: dict[int, bytes] = {}
        for shard in range(config.shards):
            file = str(part / shards.name / f"{shard:05d}.tar")
            with webdataset.TarWriter(file, user="heddle", group="heddle", mtime=0) as writer:
                for position, scene in enumerate(scenes[shard :: config.shards]):
                    media = encode(scene, config.stable)
                    writer.write(_members(f"{shard:05d}{position:04d}", scene, media))
                    if scene.fps and config.koala:
                        koala[scene.number] = media
        if config.koala:
            _write_koala(part / table.name, [(scene, koala[scene.number]) for scene in videos], config.seed)
            _rename(part / table.name, table)
        _rename(part / shards.name, shards)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(path.stat().st_size for path in shards.iterdir())
    return {
        "shards": str(shards / f"{{00000..{config.shards - 1:05d}}}.tar"),
        "clips": config.clips,
        "images": config.images,
        "bytes": size,
        "koala": str(table / KOALA_TABLE) if config.koala else "",
    }


def _holds_something(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _not_empty(folder: Path) -> ValueError:
    return ValueError(f"{folder} is not empty. Choose another folder or remove it.")


def _is_of(table: Path, scenes: Sequence[Scene], seed: int) -> bool:
    """Whether a koala/ is that of these scenes, of a process that ended before it renamed shards/."""
    file = table / KOALA_TABLE
    return file.is_file() and file.read_bytes() == _koala_table(scenes, seed)


def _rename(made: Path, place: Path) -> None:
    """What is there already stays where it is the same. Raises ValueError where it is not."""
    try:
        made.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _sizes(made) != _sizes(place):
            raise _not_empty(place) from error


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _clear_up(folder: Path) -> None:
    """Remove what processes that were killed have left: one that lives has written something since."""
    for part in folder.glob(f"{_PART}*"):
        with suppress(OSError):  # its process removes it at this moment
            if time.time() - max(path.stat().st_mtime for path in (part, *part.rglob("*"))) > _ABANDONED_S:
                shutil.rmtree(part, ignore_errors=True)


def make_scenes(config: SynthConfig) -> Iterator[Scene]:
    """Every combination of colour, shape and direction comes up before one is repeated; the rest is random."""
    rng = np.random.default_rng([config.seed, 0x5C3E])
    combinations = [(color, shape, direction) for color in COLORS for shape in SHAPES for direction in DIRECTIONS]
    order: list[int] = []
    stills = set(rng.permutation(config.clips + config.images)[: config.images].tolist())
    for number in range(config.clips + config.images):
        if not order:
            order = rng.permutation(len(combinations)).tolist()
        color, shape, direction = combinations[order.pop()]
        height, width = config.sizes[int(rng.integers(len(config.sizes)))]
        still = number in stills
        frames = 1 if still else config.frames[int(rng.integers(len(config.frames)))]
        fps = 0 if still else config.fps[int(rng.integers(len(config.fps)))]
        yield Scene(
            number=number,
            color=color,
            shape=shape,
            direction=direction,
            background=list(BACKGROUNDS)[int(rng.integers(len(BACKGROUNDS)))],
            height=height,
            width=width,
            frames=frames,
            fps=fps,
            radius=float(rng.uniform(0.18, 0.28)),
            offset=float(rng.uniform(-0.2, 0.2)),
            scores={
                "clarity_score": round(float(rng.uniform(0.6, 1.0)), 4),
                "aesthetic_score": round(float(rng.uniform(3.5, 6.0)), 4),
                "motion_score": 0.0 if still else round(float(rng.uniform(2.0, 40.0)), 4),
                "video_training_suitability_score": round(float(rng.uniform(2.5, 4.9)), 4),
            },
        )


def encode(scene: Scene, stable: bool = True) -> bytes:
    """MP4 (H.264) of a moving scene, JPEG of a still one. When stable, the same bytes on every call."""
    return _encode_image(scene) if scene.fps == 0 else _encode_video(scene, stable)


def mask(scene: Scene, frame: int) -> np.ndarray:
    """Where the shape is in one frame, bool [H, W]. It crosses 60 % of the picture during the clip."""
    progress = 0.5 if scene.frames == 1 else frame / (scene.frames - 1)
    dy, dx = DIRECTIONS[scene.direction]
    travel = 0.6 * (progress - 0.5)
    center_y = scene.height * (0.5 + (travel * dy if dy else scene.offset))
    center_x = scene.width * (0.5 + (travel * dx if dx else scene.offset))
    radius = scene.radius * min(scene.height, scene.width)
    y, x = np.ogrid[: scene.height, : scene.width]
    y, x = y + 0.5 - center_y, x + 0.5 - center_x
    if scene.shape == "circle":
        return x * x + y * y <= radius * radius
    if scene.shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85 * radius
    return (y <= 0.6 * radius) & (abs(x) <= (y + radius) * math.sqrt(1 / 3) * 1.15)


def _yuv(rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    """BT.601 limited range, what decoders assume of untagged small video."""
    r, g, b = rgb
    return (
        16 + round(0.257 * r + 0.504 * g + 0.098 * b),
        128 + round(-0.148 * r - 0.291 * g + 0.439 * b),
        128 + round(0.439 * r - 0.368 * g - 0.071 * b),
    )


def _planes(scene: Scene, frame: int) -> np.ndarray:
    """One frame as yuv420p planes, uint8 [H * 3 / 2, W]."""
    inside = mask(scene, frame)
    front, back = _yuv(COLORS[scene.color]), _yuv(BACKGROUNDS[scene.background])
    half = inside[::2, ::2]
    planes = [np.where(inside, front[0], back[0]), np.where(half, front[1], back[1]), np.where(half, front[2], back[2])]
    flat = np.concatenate([plane.astype(np.uint8).ravel() for plane in planes])
    return flat.reshape(scene.height * 3 // 2, scene.width)


def _encode_video(scene: Scene, stable: bool) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        tuning = "threads=1:log-level=none" + (":asm=0" if stable else "")
        stream = container.add_stream(
            "libx264", rate=scene.fps, options={"preset": "veryfast", "crf": "20", "g": "8", "x264-params": tuning}
        )
        stream.width, stream.height, stream.pix_fmt = scene.width, scene.height, "yuv420p"
        stream.thread_count = 1
        for index in range(scene.frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_planes(scene, index), format="yuv420p")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _encode_image(scene: Scene) -> bytes:
    from PIL import Image

    inside = mask(scene, 0)[:, :, None]
    pixels = np.where(inside, np.array(COLORS[scene.color]), np.array(BACKGROUNDS[scene.background])).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=92)
    return buffer.getvalue()


def _members(key: str, scene: Scene, media: bytes) -> dict[str, object]:
    about: dict[str, object] = {
        "key": key,
        "status": "success",
        "caption": scene.caption,
        "captions": [scene.caption, scene.short_caption],
        "width": scene.width,
        "height": scene.height,
        "num_frames": scene.frames,
        "fps": scene.fps,
        "duration": scene.frames / scene.fps if scene.fps else 0.0,
        "color": scene.color,
        "shape": scene.shape,
        "direction": scene.direction if scene.fps else "",
        **scene.scores,
    }
    return {
        "__key__": key,
        "mp4" if scene.fps else "jpg": media,
        "txt": scene.caption,
        "json": json.dumps(about, sort_keys=True).encode(),
    }


def _write_koala(folder: Path, clips: Sequence[tuple[Scene, bytes]], seed: int) -> None:
    """The table, and one file per clip."""
    (folder / "videos").mkdir(parents=True)
    (folder / KOALA_TABLE).write_bytes(_koala_table([scene for scene, _ in clips], seed))
    for position, (_, media) in enumerate(clips):
        (folder / "videos" / f"{_video_id(seed, position)}.mp4").write_bytes(media)


def _koala_table(scenes: Sequence[Scene], seed: int) -> bytes:
    """Rows as Koala-36M publishes them, several clips of each pretended source video."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(KOALA_COLUMNS)
    for position, scene in enumerate(scenes):
        source, clip = divmod(position, CLIPS_OF_A_VIDEO)
        start = 5.3 * clip
        end = start + scene.frames / scene.fps
        table.writerow(
            [
                _video_id(seed, position),
                f"https://www.youtube.com/watch?v={_youtube_id(seed, source)}",
                f"['{_clock(start)}', '{_clock(end)}']",
                _long_caption(scene),
                *(scene.scores[column] for column in KOALA_COLUMNS[4:]),
            ]
        )
    return text.getvalue().encode()


def _video_id(seed: int, position: int) -> str:
    source, clip = divmod(position, CLIPS_OF_A_VIDEO)
    return f"{_youtube_id(seed, source)}_{clip}"


def _youtube_id(seed: int, number: int) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    digits = np.random.default_rng([seed, 0x1D, number]).integers(64, size=11)
    return "".join(alphabet[digit] for digit in digits)


def _clock(seconds: float) -> str:
    """H:MM:SS.mmm; whole seconds come without a fraction, as in the published files."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    text = f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{text}.{milliseconds:03d}" if milliseconds else text


def _long_caption(scene: Scene) -> str:
    return (
        f'{scene.caption}, filmed by a still camera; the {scene.shape} is "{scene.color}", '
        f"the background is {scene.background}."
    )
