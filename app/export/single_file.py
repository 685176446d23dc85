"""`heddle convert`: a transformer's weights in the names of their original code, as a Diffusers folder.

    heddle convert wan2.1_t2v_1.3B_bf16.safetensors --config configs/models/wan2.1-1.3b.yaml --to models/wan2.1-1.3b

They come from one file, or from shards: by their folder, their index, or any of them. Names are those that Diffusers'
own converter makes of the file's: of Wan, SkyReels-V2, HunyuanVideo, FLUX.1, LTX-Video, LTX-2 and Mochi. A file that
has the names of Diffusers already keeps them. Sizes come from the config; every weight must fit. Of a file that holds
more than the transformer the rest is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from app.export.parity import compare_files, load_reference
from app.settings.attention_table import with_attention_table
from app.settings.files import read
from ops.models.base.config import DiTConfig
from ops.models.base.family import Family
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.load import dit_skeleton, kept_skeleton
from ops.models.weights import check_state, read_whole, write_folder
from ops.typed import ConfigError, Node, build

_PREFIXES = ("model.diffusion_model.", "model.model.", "diffusion_model.")  # of the transformer in ComfyUI's files


def convert(file: Path, config: Path, to: Path) -> Path:
    """Writes the folder of the transformer below `to` and returns it. `file` is one of the weights, of their shards,
    or the folder or the index of these.

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
    expected = {**dit_skeleton(dit).state_dict(), **kept_skeleton(dit)}
    count = sum(weight.numel() for weight in expected.values())
    print(f"converting {count / 1e6:,.1f} M weights of {file} into {folder}", flush=True)
    stored = read_whole(file)
    if are_diffusers := expected.keys() <= stored.keys():
        state = {name: stored[name] for name in expected}
    else:
        state = by_diffusers_names(stored, family, str(file))
    check_state(expected, state, str(file))
    state = {name: state[name] for name in expected}  # in one order, however many files they come from
    write_folder(folder, state, dit_json(dit))
    compare_files(folder, state)
    load_reference(folder, family.diffusers_class)
    names = ", which has the names of Diffusers already" if are_diffusers else ""
    print(f"{folder}: {len(state)} weights of {file}{names}, loaded back by Diffusers")
    return folder


def by_diffusers_names(stored: Mapping[str, Tensor], family: Family, where: str) -> dict[str, Tensor]:
    """The weights of a transformer under the names of its class in Diffusers, by its converter. Raises ValueError where
    that does not find what it looks for, or is not there."""
    from diffusers.loaders import single_file_utils

    prefix = next((one for one in _PREFIXES if any(name.startswith(one) for name in stored)), "")
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    converter = getattr(single_file_utils, family.converter, None)
    if converter is None:
        raise ValueError(
            f"Diffusers {version('diffusers')} has no {family.converter}, which reads {family.diffusers_class} in the "
            f"names of its original code. Install one that has it: pip install -c constraints.txt diffusers."
        )
    try:
        state = converter(checkpoint=own)
    except (AttributeError, LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{where} is not a {family.diffusers_class} of the published sizes in the names of its original code: "
            f"Diffusers' converter ends with {type(error).__name__}: {error}. Is it the file of this config?"
        ) from error
    read = {name: tensor for name, tensor in state.items() if not any(part in name for part in family.surplus)}
    return {_renamed(name, family.converted): tensor for name, tensor in read.items()}


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    theirs = next((theirs for theirs in beginnings if name.startswith(theirs)), "")
    return beginnings.get(theirs, "") + name.removeprefix(theirs)


def _transformer_of(config: Path) -> DiTConfig:
    node = with_attention_table(read(config))
    section = node.value.get("model") if isinstance(node.value, dict) else None
    if not isinstance(section, Node):
        raise ConfigError(f"{config} has no section model; give the config of a model or of a run.")
    return build(ModelConfig, section, path="model").dit.without_lora()  # whose factors are in no file of weights
