"""Pictures that clips start from, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from data.media import PILLOW_ERRORS, open_picture
from data.pictures import as_shown
from ops.counted import counted
from ops.typed import ConfigError

Wanted = tuple[str | Path, str]
"""A file, and where it was given."""


def for_each(paths: Sequence[str | Path], own: Sequence[str | None], option: str) -> list[Wanted | None]:
    """The file for each prompt: its own one, else that of `paths`, which are one for each or one for all, or none.
    Raises ConfigError for another number of them. `option` names where they were given."""
    if len(paths) not in (0, 1, len(own)):
        raise ConfigError(
            f"{option}: {counted(len(paths), 'picture')} for {counted(len(own), 'prompt')}; give one for each, or one "
            "for all."
        )
    given: list[Wanted | None] = [(path, option) for path in paths]
    common = (given or [None]) * (len(own) if len(given) < 2 else 1)
    return [
        (path, f"prompt {number + 1}") if path else other
        for number, (path, other) in enumerate(zip(own, common, strict=True))
    ]


def read_picture(path: str | Path, option: str, height: int, width: int) -> np.ndarray:
    """The picture uint8 [height, width, 3], scaled to cover, then cut. Raises ConfigError for a file that is none."""
    return _read(Path(path).expanduser(), height, width, option)


def _read(path: Path, height: int, width: int, option: str) -> np.ndarray:
    try:
        with path.open("rb") as file, open_picture(file) as opened:
            picture = as_shown(
                ImageOps.exif_transpose(opened),
                lambda upright: ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS),
            )
    except UnidentifiedImageError:
        raise ConfigError(f"{option} {path} is no picture that Pillow reads; give a PNG, JPEG, WebP or BMP.") from None
    except (*PILLOW_ERRORS, Image.DecompressionBombError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(f"{option} {path} cannot be read ({why}); give a whole picture file.") from None
    return np.array(picture)
