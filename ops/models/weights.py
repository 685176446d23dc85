"""Transformer weights in Diffusers' folder layout: safetensors in one file or in shards with an index, and config.json.
Folders of Transformers, which differ in the files' names, are read and written, too.

    state = read_whole(folder)                    # by name, in the stored dtypes
    fill(module, folder, torch.bfloat16, "cuda")  # a module on the meta device: what it has is checked, then read
    write_folder(folder, state, dit_json(config)) # what Diffusers' from_pretrained reads
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ops.counted import first_of
from ops.models.config import ModelConfig
from ops.models.files import STEM, files_of, index_name, weight_files
from ops.models.float8 import SCALE, in_8_bits, in_float8
from ops.models.folders import component

# Diffusers' own default; files of this size are what its loaders and hubs expect.
SHARD_BYTES = 10 * 1024**3
_PIECE = 1 << 17  # words of 8 bytes that are summed for a digest: one MiB
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _StoredTensor(Protocol):
    """One tensor of a file, not yet read."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _WeightFile(Protocol):
    """An open safetensors file, whose own class is not annotated."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _StoredTensor: ...


def iterate(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights of a folder, one tensor in memory at a time."""
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[_WeightFile]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}. Copy it again.") from error


def describe(folder: Path) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a folder's weights as tensors on the meta device; reads the files' headers only."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                stored = file.get_slice(name)
                dtype = _STORED.get(stored.get_dtype(), torch.int8)  # whatever else it is cannot be trained
                found[name] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    return found


class StoredWeights:
    """The weights of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        for path in weight_files(folder):
            with _opened(path) as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        """A copy on the CPU, in the stored dtype."""
        with _opened(self._files[name]) as file:
            return file.get_tensor(name).clone()


def read_whole(path: Path) -> dict[str, Tensor]:
    """All weights of a file, of shards or of a folder (`files_of`) by name, in their stored dtypes. Raises
    FileNotFoundError, and ValueError for a broken file."""
    found: dict[str, Tensor] = {}
    for file in files_of(path):
        with _opened(file) as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
    return found


def check_state(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raises ValueError, one sentence, for the first kind of difference: missing, unexpected, shape, dtype."""
    missing, unexpected = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    of_config = "Is it the transformer of this config?"
    if missing:
        raise ValueError(f"{where} lacks {first_of(missing, most=3)}, which the model has. {of_config}")
    if unexpected:
        raise ValueError(f"{where} holds {first_of(unexpected, most=3)}, which the model does not have. {of_config}")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{where}: {name} has shape {list(found[name].shape)}, the model's is "
                f"{list(tensor.shape)}. Check the widths in config.json."
            )
        if found[name].dtype not in _FLOATS:
            raise ValueError(
                f"{where}: {name} is {_dtype(found[name])}; weights must be float32, bfloat16 or float16. "
                f"Quantised folders cannot be trained."
            )


def fill(
    module: nn.Module,
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    surplus: Sequence[str] = (),
    part: str = "transformer",
    elsewhere: Collection[str] = (),
    changed: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Give `module`, built on the meta device, the weights of a Diffusers folder. All names and shapes must agree.

    Each tensor goes from its file straight to `dtype` and `device`: the CPU holds one of them at a time, beside what
    stays there. Those that the module has in 8 bits are rounded to them on `device`, from what is stored. LoRA factors
    that the module has and the folder lacks stay as they are. Weights with a name that contains one of `surplus` are
    passed over, and those that are `elsewhere` are left on the meta device. `changed` makes of a name and what is
    stored, on `device`, what is to be rounded.
    """
    folder = component(path, part)
    found = {name: tensor for name, tensor in describe(folder).items() if not any(part in name for part in surplus)}
    stored = {n: t for n, t in module.state_dict().items() if not (is_lora(n) or n.endswith(SCALE))}
    check_state(stored, found, str(folder))
    small, wanted = in_8_bits(module), set(found).difference(elsewhere)
    for file_path in weight_files(folder):
        with _opened(file_path) as file:
            state: dict[str, Tensor] = {}
            for name in (name for name in file.keys() if name in wanted):  # noqa: SIM118  (not a dict)
                tensor, scales = file.get_tensor(name), name.removesuffix(".weight") + SCALE
                if changed is not None:
                    tensor = changed(name, tensor.to(device))  # what it makes is no file's memory
                if name in small:
                    state[name], state[scales] = in_float8(tensor.to(device))
                else:  # a copy also where the dtype is right: a file that is changed later must not change the model
                    state[name] = tensor.to(device, dtype, copy=True)
        module.load_state_dict(state, strict=False, assign=True)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file that others may read as any new one: safetensors itself leaves it the mode of a temporary file."""
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)


def write_folder(
    folder: Path,
    state: Mapping[str, Tensor],
    config: Mapping[str, object],
    shard_bytes: int = SHARD_BYTES,
    stem: str = STEM,
) -> None:
    """Write config.json and the weights as Diffusers' save_pretrained does: one file, or shards and an index. With the
    stem "model" as that of Transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shards = _shards(state, shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / f"{stem}.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / index_name(stem)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_lora(name: str) -> bool:
    """Whether a parameter is a LoRA factor (`...lora_A.weight`, `...lora_B.weight`), or DoRA's magnitudes."""
    return re.search(r"(^|\.)lora_([AB]\.|magnitude_vector)", name) is not None


def _shards(state: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in order, cut where the next one would pass the limit; a larger single tensor has a shard of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    return shards


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def num_weights(folders: Sequence[Path]) -> int:
    """Numbers in the files of these folders, by their headers."""
    return sum(tensor.numel() for folder in folders for tensor in describe(folder).values())


def frozen_digests(
    config: ModelConfig, dit: nn.Module | None, vae: object, text: object, image: object = None
) -> tuple[tuple[str, str], ...]:
    """(setting, digest) of each folder's weights that are not trained. Equal on workers that train the same function.
    None stands for a part that is not there. Parts without a folder are made from the config, by every worker alike.
    """
    of_dit = dit.named_parameters() if dit is not None else ()
    parts: list[tuple[str, str | None, list[tuple[str, Tensor]]]] = [
        ("model.dit.path", config.dit.path, [(n, p) for n, p in of_dit if not p.requires_grad]),
        ("model.vae.path", config.vae.path, _tensors_of(vae)),
        ("model.text.path", config.text.path, _tensors_of(text)),
    ]
    if config.image is not None:
        parts.append(("model.image.path", config.image.path, _tensors_of(image)))
    return tuple((setting, _digest(tensors)) for setting, path, tensors in parts if path and tensors)


def checksums(named: Sequence[tuple[str, Tensor]]) -> tuple[tuple[str, int], ...]:
    """(name, exact sum of the stored bits modulo 2^64) of each tensor, all of one device: equal where the tensors are,
    at the speed of memory."""
    if not named:
        return ()
    sums: list[int] = torch.stack([_piece_sums(tensor).sum() for _, tensor in named]).tolist()
    return tuple(zip((name for name, _ in named), sums, strict=True))


def _tensors_of(encoder: object) -> list[tuple[str, Tensor]]:
    """Parameters of the modules that an encoder holds, and its own tensors (a VAE's means and scales)."""
    found: list[tuple[str, Tensor]] = []
    for name, value in sorted(vars(encoder).items()) if encoder is not None else ():
        if isinstance(value, nn.Module):
            found.extend((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
        elif isinstance(value, Tensor):
            found.append((name, value))
    return found


def _digest(named: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 of names, shapes, dtypes, and exact sums of the bits of every MiB, which are made on the device."""
    digest, sums = hashlib.sha256(), [_piece_sums(tensor) for _, tensor in named]  # on several devices, maybe
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(torch.cat([some.cpu() for some in sums]).numpy().tobytes())
    return digest.hexdigest()


def _piece_sums(tensor: Tensor) -> Tensor:
    """int64 [pieces + 1 + bytes that make no word]: sums modulo 2^64 of the words of each piece, of what is left, and
    the last bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # a part of other memory, which begins between two words
        raw = raw.clone()
    words = raw[: len(raw) // 8 * 8].view(torch.int64)
    pieces = words[: len(words) // _PIECE * _PIECE].view(-1, _PIECE)
    rest = words[pieces.numel() :]
    return torch.cat([pieces.sum(dim=1), rest.sum()[None], raw[8 * len(words) :].to(torch.int64)])
