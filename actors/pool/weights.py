"""How much a worker reads before it is ready."""

from __future__ import annotations

from pathlib import Path

from ops.models.config import ModelConfig

_SUFFIXES = (".safetensors", ".bin")


def weights_bytes(model: ModelConfig) -> int:
    """Size of the weight files in the model's local folders, each counted once; 0 for models that are built here."""
    image = model.image.path if model.image else None
    folders = {Path(path).expanduser() for path in (model.dit.path, model.vae.path, model.text.path, image) if path}
    files = {file for folder in folders for suffix in _SUFFIXES for file in folder.rglob(f"*{suffix}")}
    return sum(file.stat().st_size for file in files if file.is_file())
