"""Pictures that clips start from, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ops.counted import counted
from ops.typed import ConfigError


def read_pictures(paths: Sequence[str | Path], count: int, height: int, width: int, option: str) -> list[np.ndarray]:
    """`count` pictures uint8 [height, width, 3]: one file for each, or one for all; scaled to cover, then cut.

    Raises ConfigError for a file that is no picture, and for another number of files. `option` names where they were
    given.
    """
    if len(paths) not in (1, count):
        raise ConfigError(
            f"{option}: {counted(len(paths), 'picture')} for {counted(count, 'prompt')}; give one for each, or one for "
            "all."
        )
    found = [_read(Path(path).expanduser(), height, width, option) for path in paths]
    return found * count if len(found) == 1 else found


def _read(path: Path, height: int, width: int, option: str) -> np.ndarray:
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGBA")
    except UnidentifiedImageError:
        raise ConfigError(f"{option} {path} is no picture that Pillow reads; give a PNG, JPEG, WebP or BMP.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(f"{option} {path} cannot be read ({why}); give a whole picture file.") from None
    white = Image.new("RGBA", picture.size, "white")  # as the data layer puts transparent pictures on white
    opaque = Image.alpha_composite(white, picture).convert("RGB")
    return np.array(ImageOps.fit(opaque, (width, height), Image.Resampling.LANCZOS))
