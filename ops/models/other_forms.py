"""What is given in place of a Diffusers folder, and how to get one. No torch.

Weights are published in more forms than one: a single file, the authors' own repository, and the Hub's cache of one in
Diffusers' form, whose files lie below it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ops.code_path import UPLOADED
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.typed import ConfigError

_CACHED = "models--"  # how folders of the Hub's cache begin, before the owner and the name of a repository

_READ_BY_CONVERT = (".safetensors", ".safetensors.index.json")  # a pickle is none
_REPOSITORY = "the repository that model.hub of a preset names"
_REST = "VAE and text encoder come from the repository in Diffusers' form."

_NAMES = {"_class_name", "architectures", "model_type"}  # one of which Diffusers and Transformers always write


class OtherForm(ConfigError):
    """Weights are there, but not as a Diffusers folder, which has to be got elsewhere."""


class LiesBelow(OtherForm):
    """The Diffusers folder is there, below the path: nothing has to be got."""


def check_form(folder: Path, names: Sequence[str]) -> None:
    """Raises OtherForm for a folder whose config.json is of the authors' own code, where one of the components is
    looked for. A file that is no JSON is left to the loader, which says so."""
    try:
        fields = read_json(folder / "config.json")
    except ValueError:
        return
    name = fields.get("_class_name")
    families = [family for family in FAMILIES.values() if name and name == family.authors_class]
    nameless = bool(fields) and not fields.keys() & _NAMES
    if families or nameless:
        found = "has a config.json that names no class, as that of" if nameless else f"is a {name}, in the form of"
        made = ""
        if any(family.converter for family in families) and _are_converted(names) and any(folder.glob("*.safetensors")):
            made = f" {_made_by_convert(folder)}; {_REST}"
        raise OtherForm(
            f"{folder} {found} its authors' own code; a Diffusers folder is needed, such as {_REPOSITORY}.{made}"
        )


def check_path(root: Path, names: Sequence[str]) -> None:
    """Raises OtherForm for a path that is a file, and LiesBelow for the Hub's cache of a repository that has one of the
    components; a folder that merely lacks them is left to the caller."""
    if root.is_file():
        is_one = f"{root} is one file, and a Diffusers folder is needed"
        if _are_converted(names) and root.name.endswith(_READ_BY_CONVERT):
            known = [name for name, family in FAMILIES.items() if family.converter]
            of = f"of {', '.join(known[:-1])} or {known[-1]} (model.dit.architecture)"
            raise OtherForm(f"{is_one}. {_made_by_convert(root)} {of}; {_REST}")
        raise OtherForm(f"{is_one}, such as {_REPOSITORY}.")
    found = [
        snapshot
        for snapshot in root.glob("snapshots/*")
        if any((folder / "config.json").is_file() for folder in (*(snapshot / name for name in names), snapshot))
    ]
    if found:
        main = root / "refs" / "main"
        current = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
        folder = max(found, key=lambda snapshot: (snapshot.name == current, snapshot.stat().st_mtime))
        raise LiesBelow(f"{root} is the Hub's cache of a repository, whose files lie below it. Give {folder}.")


def how_to_get(hub: str, paths: Sequence[str]) -> str:
    """The command that downloads the Diffusers folder of a repository to where it is looked for: the first of `paths`
    that is not there, else the first that can be such a folder.

    Repositories may hold the same weights again as single files beside the folders, hence `--include`.
    """
    places = [path for path in paths if _takes_download(path)]
    missing = [path for path in places if not Path(path).expanduser().is_dir()]
    place = next(iter([*missing, *places]), None)
    command = f'`hf download {hub} --include "*/*" --include model_index.json --local-dir '
    return f"{command}{shlex.quote(place)}`." if place else f"{command}FOLDER`, to a FOLDER that all nodes see."


def _takes_download(path: str) -> bool:
    """Whether a path may become the folder of a pipeline: not where it is a file or a folder of something else, nor
    where what is written is deleted by others."""
    root = Path(path).expanduser()
    is_other = root.is_file() or ((root / "config.json").is_file() and not (root / "model_index.json").is_file())
    return not is_other and UPLOADED not in path and not any(part.startswith(_CACHED) for part in root.parts)


def _are_converted(names: Sequence[str]) -> bool:
    """Whether `heddle convert` makes the folder of these components: it does of a transformer's alone."""
    return any(name.startswith("transformer") for name in names)


def _made_by_convert(path: Path) -> str:
    return (
        f"`heddle convert {shlex.quote(str(path))} --config MODEL.yaml --to DIR` makes one of a transformer's weights"
    )
