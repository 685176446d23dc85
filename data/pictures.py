"""The colours of a still picture: those that a viewer shows, whatever its mode, its bits and its profile."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms, features
from PIL.ImageCms import ImageCmsTransform

SAME_COLOUR = 2  # levels; profiles of sRGB differ in how they write its curve


def as_shown(image: Image.Image, scaled: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """8-bit RGB of a picture as a viewer shows it, scaled by `scaled`: its colours as its profile says, 16-bit greys
    scaled, transparent pictures on white. Pillow alone takes all colours for sRGB, cuts off every grey above 255, and
    shows the colours that hide under transparent pixels.

    Colours are converted once scaled: of all 12 megapixels of a photo it takes twice as long as decoding them.
    """
    mode = "L" if image.mode in ("L", "LA", "La") or image.mode.startswith("I") else image.mode
    mode = mode if mode in ("L", "CMYK") else "RGB"
    profile = image.info.get("icc_profile")
    to_srgb = _to_srgb(profile, mode) if isinstance(profile, bytes) and profile else None
    if to_srgb is None:
        return scaled(_flat(image, "RGB"))
    return to_srgb.apply(scaled(_flat(image, mode)))


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """All of its 8-bit colours, as the file has them."""
    if image.mode.startswith("I"):  # I;16 and its byte orders; I where a file has 16 bits and Pillow 32
        grey = np.asarray(image).astype(np.int64)
        return Image.fromarray((grey.clip(0, 65535) >> 8).astype(np.uint8)).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert(mode)
    return image.convert(mode)


@lru_cache(maxsize=16)  # making one takes 10 ms
def _to_srgb(profile: bytes, mode: str) -> ImageCmsTransform | None:
    """What makes sRGB of the colours of a profile. None of sRGB by any name, and where the profile is broken or for
    other colours than these: viewers ignore it, too."""
    if not features.check("littlecms2"):  # all of Pillow's own wheels have it
        return None
    some = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 64, 3), dtype=np.uint8)).convert(mode)
    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        found = ImageCms.buildTransform(own, ImageCms.createProfile("sRGB"), mode, "RGB")
        changed = np.abs(np.asarray(found.apply(some), np.int16) - np.asarray(some.convert("RGB"), np.int16)).max()
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    return found if changed > SAME_COLOUR else None
