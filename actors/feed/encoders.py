"""Facts about the frozen encoders that the data layer must know."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.plan.types import Module
from data.types import DataItem
from ops.listing import paths_below
from ops.models.config import ModelConfig
from ops.models.first_frame import FirstFrame
from ops.models.folders import component, text_parts

_READ_BELOW_BYTES = 32 << 20  # configs and tokenizers; a file of weights is larger, and too long to read at each start


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """What the data layer must know of the frozen encoders: their names in the cache, and how text becomes tokens."""

    vae: str
    text: str
    max_length: int  # tokens
    chars_per_token: float
    latent_width: int = 0  # numbers per row of a result
    latent_tail: int = 0  # rows after those of the tokens
    text_width: int = 0
    most_text: int = 0  # token rows of a text result
    least_text: int = 0  # rows of the shortest caption: what it is padded to, or those of the first frame
    picture_rows: int = 0  # of a text that are of the first frame: that text is made of pixels, too

    @staticmethod
    def of(model: ModelConfig, device: str = "cpu", named: bool = True) -> Encoders:
        """The encoders of a resolved model on a kind of device. Names hold every setting of an encoder, what it
        computes in, and each of its files.

        Without names no file is read; only a cache needs names.
        """
        vae_folders = [component(model.vae.path, "vae")] if named and model.vae.path else []
        text_folders = list(text_parts(model.text).values()) if named and model.text.path else []
        vae = {**asdict(model.vae), "patch": model.dit.patch, "files": _stamp(vae_folders)}
        vae["dtype"] = model.vae.dtype_on(device)
        for how in ("channels_last", "compile"):  # the same latents but for rounding that no dtype promises
            del vae[how]
        frame = FirstFrame.of(model)
        if frame.is_told:  # the result holds the condition of the first frame, too
            image_path = model.image.path if model.image else None
            image_folders = [component(image_path, "image_encoder")] if named and image_path else []
            vae["first_frame"] = {
                "channels": frame.channels,
                "image": asdict(model.image) if model.image else None,
                "files": _stamp([*image_folders, *(folder.parent / "image_processor" for folder in image_folders)]),
            }
            if frame.alone:  # named before there was a choice
                vae["first_frame"] |= {"alone": True, "given": frame.given}
            if frame.last:
                vae["first_frame"]["last"] = True
            if frame.scale != 1.0:
                vae["first_frame"]["scale"] = frame.scale
        settings = asdict(model.text)
        del settings["place"]  # where weights lie changes no embedding
        if model.text.kind == "t5":  # named before there was another kind
            del settings["kind"], settings["pooled_dim"]
        if not model.text.sees_picture:
            del settings["picture_tokens"], settings["picture_every"]
        if not model.text.vision_dim:
            del settings["picture_dim"]
        for name, usual in (("cleaned", True), ("empty", "encoded")):  # named before there was a choice
            if settings[name] == usual:
                del settings[name]
        if (recipe := model.text.recipe) and recipe.crop:
            settings["prompt"] = [recipe.template, recipe.crop]
        text = {**settings, "dtype": model.text.dtype_on(device), "files": _stamp(text_folders)}
        return Encoders(
            vae=json.dumps(vae, sort_keys=True) if named else "",
            text=json.dumps(text, sort_keys=True) if named else "",
            max_length=model.text.max_length,
            chars_per_token=1.0 if model.text.path is None else 4.0,
            latent_width=frame.width,
            latent_tail=frame.tail,
            text_width=model.text.width,
            most_text=model.text.most_tokens + model.text.tail,
            least_text=model.text.least_tokens,
            picture_rows=model.text.picture_rows,
        )

    @property
    def see_pixels(self) -> tuple[Module, ...]:
        """Modules whose results are made of pixels."""
        return ("text", "vae") if self.picture_rows else ("vae",)

    def text_tokens(self, item: DataItem) -> int:
        """Rows of the text of an item's samples in the mean, from the captions' lengths in the index; rows that they
        are padded with and those of first frames count."""
        lengths = [min(self.max_length, int(s.caption_chars / self.chars_per_token) + 1) for s in item.samples]
        lengths = [max(length + self.picture_rows, self.least_text) for length in lengths]
        return sum(lengths) // max(len(lengths), 1)


def _stamp(folders: Sequence[Path]) -> list[tuple[str, int, str]]:
    """Every file of these folders: small ones by content, weights by size and time."""
    found = []
    for folder in dict.fromkeys(folders):
        for file in sorted(f for f in paths_below(folder) if f.is_file()):
            stat = file.stat()
            small = stat.st_size <= _READ_BELOW_BYTES
            mark = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if small else str(stat.st_mtime_ns)
            found.append((f"{folder.name}/{file.relative_to(folder)}", stat.st_size, mark))
    return found
