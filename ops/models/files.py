"""The weight files of a component's folder, as far as names and headers say. No torch.

Safetensors in one file, or in shards with an index, of Diffusers or of Transformers; in a variant
(`model.fp16.safetensors`) where there is no other.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

STEM = "diffusion_pytorch_model"
_STEMS = (STEM, "model")  # of Diffusers and of Transformers
_PICKLES = ("bin", "pt", "pth", "ckpt")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<rest>(\.\w+)?\.safetensors)")
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
            return _shards_of(index)
    for single in (folder / _single(stem, variant) for stem in _STEMS):
        if single.is_file():
            return [single]
    pickles = sorted(file.name for suffix in _PICKLES for file in folder.glob(f"*.{suffix}"))
    if not pickles:
        raise FileNotFoundError(
            f"{folder} holds no weights: neither {STEM}.safetensors nor {index_name(STEM)}, nor those of model. "
            f"Download them whole."
        )
    raise _is_pickled(folder / pickles[0])


def files_of(path: Path) -> list[Path]:
    """The safetensors files of the weights that a path names: one file, one of several shards, their index, or the
    folder of a component. Raises FileNotFoundError naming what is missing, ValueError for pickled weights."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. Give a .safetensors file; of shards one of them, their index or their folder."
        )
    if path.is_dir():
        return weight_files(path)
    if path.suffix.lstrip(".") in _PICKLES:
        raise _is_pickled(path)
    if path.suffix == ".json":
        return _shards_of(path)
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    for index in sorted(path.parent.glob("*.safetensors.index*.json")):
        with suppress(ValueError):  # one that cannot be read: shards say how many they are, too
            if path.name in _weight_map(index).values():
                return _shards_of(index)
    count = int(shard["count"])
    names = [f"{shard['stem']}-{number:05d}-of-{count:05d}{shard['rest']}" for number in range(1, count + 1)]
    return _all_there(path, names)


def _shards_of(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    if not names:
        raise ValueError(
            f"{index} names no shards in a weight_map. Give the index of safetensors shards, or a shard; "
            f"if it is one, copy it again."
        )
    return _all_there(index, names)


def _all_there(by: Path, names: list[str]) -> list[Path]:
    """The shards beside the file that says their names, or in whose name they are counted."""
    for name in names:
        if not (by.parent / name).is_file():
            raise FileNotFoundError(f"{by.name} of {by.parent} names {name}, which is not there. Copy all shards.")
    return [by.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    """Name of a weight -> its shard; empty for a file that is no index."""
    found = read_json(index).get("weight_map")
    return {weight: name for weight, name in found.items() if isinstance(name, str)} if isinstance(found, dict) else {}


def _is_pickled(file: Path) -> ValueError:
    return ValueError(
        f"{file.parent} holds its weights as {file.name}, a pickle; pickled weights are not read. Load it once with "
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
