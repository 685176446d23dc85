"""`heddle convert`: a transformer's weights from one file in the names of their original code, as a Diffusers folder.

    heddle convert wan2.1_t2v_1.3B_bf16.safetensors --config configs/models/wan2.1-1.3b.yaml --to models/wan2.1-1.3b

Names are those that Diffusers' own converter makes of the file's. Sizes come from the config; every weight must fit.
"""

from __future__ import annotations

from pathlib import Path

from app.export.parity import compare_weights
from app.settings.files import read
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.load import dit_skeleton
from ops.models.weights import check_state, read_file, write_folder
from ops.typed import ConfigError, Node, build


def convert(file: Path, config: Path, to: Path) -> Path:
    """Writes the folder of the transformer below `to` and returns it.

    Raises ConfigError for a family without such files and for a folder that is there, ValueError for a file that does
    not hold the transformer of the config.
    """
    dit = _transformer_of(config)
    family, folder = FAMILIES[dit.architecture], to / dit.part
    if not family.converter:
        known = [name for name, one in FAMILIES.items() if one.converter]
        raise ConfigError(
            f"{config} is of family {dit.architecture}; single files of {', '.join(known)} are converted."
        )
    if len(dit.experts) > 1:
        raise ConfigError(
            f"model.dit.expert of {config} is both, and a file holds one transformer; set it to high or low."
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another --to.")
    from diffusers.loaders import single_file_utils

    state = getattr(single_file_utils, family.converter)(checkpoint=read_file(file))
    state = {name: tensor for name, tensor in state.items() if not any(part in name for part in family.surplus)}
    check_state(dit_skeleton(dit).state_dict(), state, str(file))
    write_folder(folder, state, dit_json(dit))
    compare_weights(folder, family.diffusers_class, state)
    print(f"{folder}: {len(state)} weights of {file}, loaded back by Diffusers")
    return folder


def _transformer_of(config: Path) -> DiTConfig:
    node = read(config)
    section = node.value.get("model") if isinstance(node.value, dict) else None
    if not isinstance(section, Node):
        raise ConfigError(f"{config} has no section model; give the config of a model or of a run.")
    return build(ModelConfig, section, path="model").dit
