"""The weight files of a component's folder, as far as names and headers say. No torch.

Safetensors in one file, or in shards with an index, of Diffusers or of Transformers; in a variant
(`model.fp16.safetensors`) where there is no other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

STEM = "diffusion_pytorch_model"
_STEMS = (STEM, "model")  # of Diffusers and of Transformers
_PICKLES = ("bin", "pt", "pth", "ckpt")
_HEADER_LENGTH = 8  # bytes of a safetensors file that say how long its header is


def read_json(path: Path) -> dict[str, Any]:  # as `Json`
    """One JSON object. Raises ValueError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; a JSON object is expected.")
    return value


def index_name(stem: str, variant: str | None = None) -> str:
    """The file name of the index of a component in shards."""
    return f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component. Raises FileNotFoundError naming the one that is missing, ValueError for
    weights in two variants and for pickled ones."""
    variant = variant_of(folder)
    for index in (folder / index_name(stem, variant) for stem in _STEMS):
        if index.is_file():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            for name in names:
                if not (folder / name).is_file():
                    raise FileNotFoundError(
                        f"{index.name} of {folder} names {name}, which is not there. Copy all shards."
                    )
            return [folder / name for name in names]
    for single in (folder / _single(stem, variant) for stem in _STEMS):
        if single.is_file():
            return [single]
    pickles = sorted(file.name for suffix in _PICKLES for file in folder.glob(f"*.{suffix}"))
    if not pickles:
        raise FileNotFoundError(
            f"{folder} holds no weights: neither {STEM}.safetensors nor {index_name(STEM)}, nor those of model. "
            f"Download them whole."
        )
    raise ValueError(
        f"{folder} holds its weights as {pickles[0]}, a pickle; pickled weights are not read. Load it once with "
        f"its own class in a safe place and save it by save_pretrained(FOLDER, safe_serialization=True), or download "
        f"the safetensors files."
    )


def variant_of(folder: Path) -> str | None:
    """The variant that a component is stored in where it has no plain files: `fp16` of `model.fp16.safetensors`.

    Raises ValueError for several.
    """
    if any((folder / name).is_file() for stem in _STEMS for name in (index_name(stem), _single(stem))):
        return None
    names = "|".join(_STEMS)
    known = re.compile(rf"(?:{names})\.(?:(\w+)\.safetensors|safetensors\.index\.(\w+)\.json)")
    matches = (known.fullmatch(file.name) for file in folder.iterdir()) if folder.is_dir() else ()
    found = sorted({match[1] or match[2] for match in matches if match})
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds its weights as {' and as '.join(found)}, and no plain {STEM}.safetensors. Keep one of "
            f"them."
        )
    return found[0] if found else None


def plain_name(name: str, variant: str | None) -> str:
    """What a file of a component in this variant is called in a folder that has it alone."""
    if variant is None:
        return name
    for stem in _STEMS:
        if name == _single(stem, variant):
            return _single(stem)
        if name == index_name(stem, variant):
            return index_name(stem)
    return name


def check_files(folder: Path) -> None:
    """Raises FileNotFoundError or ValueError, one sentence, unless all weight files of a component are there and whole.

    Reads their headers; a byte that changed within a tensor is not noticed.
    """
    for file in weight_files(folder):
        _check_whole(file)


def _check_whole(file: Path) -> None:
    size, wanted = file.stat().st_size, _HEADER_LENGTH
    with file.open("rb") as opened:
        wanted += int.from_bytes(opened.read(_HEADER_LENGTH), "little")
        if wanted <= size:
            try:
                header = json.loads(opened.read(wanted - _HEADER_LENGTH))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{file} is not a whole safetensors file: its header cannot be read ({type(error).__name__}). "
                    f"Copy it again."
                ) from error
            wanted += max(ends, default=0)
    if size != wanted:
        raise ValueError(
            f"{file} is not a whole safetensors file: it has {size:,} bytes and should have {wanted:,}. Copy it "
            f"again, or wait until it is copied."
        )


def _single(stem: str, variant: str | None = None) -> str:
    return f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"
