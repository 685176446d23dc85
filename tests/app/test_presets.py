"""A preset says which repository of the Hub its folder is: in its first lines, in docs/models.md, and in the error of a
folder that is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.bench.headroom import write_numbers
from app.settings.config import RunConfig
from app.settings.resume import kind_of
from ops.models.config import ModelConfig
from ops.models.files import read_json
from ops.models.folders import check_weights, resolve, vae_numbers
from ops.typed import ConfigError

ROOT = Path(__file__).parents[2]
PRESETS = {
    path.stem: path
    for path in sorted((ROOT / "configs" / "models").glob("*.yaml"))
    if not path.stem.endswith("tiny")  # no model that was published
}
IN_PARTS = {"stdit-xl2", "stdit-3b2"}  # made of several repositories, none of which is a Diffusers folder


def model_of(name: str) -> ModelConfig:
    return RunConfig.load(PRESETS[name], ["run.name=loom"]).model


def paths_of(model: ModelConfig) -> set[str | None]:
    return {model.vae.path, model.text.path, *([model.image.path] if model.image else [])}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_how_to_get_its_folder(name: str) -> None:
    model, lines = model_of(name), PRESETS[name].read_text(encoding="utf-8").splitlines()
    first = " ".join(line.removeprefix("#").strip(" \\") for line in lines if line.startswith("#"))
    (folder,) = paths_of(model)
    commands = re.findall(r"hf download (\S+)(?: --include \S+)* --local-dir (\S+)", first)
    if name in IN_PARTS:
        assert model.hub is None and len(commands) >= 2
        assert {place.split("/vae")[0].split("/transformer")[0] for _, place in commands} == {folder}
        return
    assert commands == [(model.hub, folder)]


def test_no_two_presets_have_the_folder_or_the_repository_of_each_other() -> None:
    """As one that takes over another's settings and forgets this one would."""
    whole = [model_of(name) for name in PRESETS if name not in IN_PARTS]
    assert len({model.hub for model in whole}) == len({model.vae.path for model in whole}) == len(whole)


def test_the_table_of_the_document_is_what_presets_say() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| `([\w.-]+/[\w.-]+)` \| `(models/[\w.-]+)` \|$", text, re.MULTILINE)
    said = {name: (hub, folder) for name, hub, folder in rows}
    models = {name: model_of(name) for name in PRESETS if name not in IN_PARTS}
    assert said == {name: (model.hub, model.vae.path) for name, model in models.items()}


def test_the_error_of_a_missing_folder_says_how_to_get_it(tmp_path: Path) -> None:
    command = r"To get it: `hf download {} --include \"\*/\*\" --include model_index\.json --local-dir {}`\.$"
    model = model_of("wan2.2-ti2v-5b")
    with pytest.raises(FileNotFoundError, match=command.format(model.hub, "models/wan2.2-ti2v-5b")):
        resolve(model)
    spaced = tmp_path / "my models" / "wan"
    moved = replace(model, vae=replace(model.vae, path=str(spaced)), text=replace(model.text, path=str(spaced)))
    with pytest.raises(FileNotFoundError, match=command.format(model.hub, f"'{spaced}'")):
        resolve(moved)
    (spaced / "vae").mkdir(parents=True)
    (spaced / "vae" / "config.json").write_text("{}")  # as after a download of JSON files alone
    vae = replace(ModelConfig(), vae=moved.vae, hub=model.hub)
    with pytest.raises(FileNotFoundError, match="holds no weights.*" + command.format(model.hub, f"'{spaced}'")):
        check_weights(vae)
    with pytest.raises(FileNotFoundError, match=r"Download them whole\.$"):
        check_weights(replace(vae, hub=None))


def test_a_name_that_is_no_repository_is_refused() -> None:
    for wrong in ("wan", "https://huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers", "a/b c"):
        with pytest.raises(ConfigError, match="is no name of a repository, as owner/name"):
            RunConfig.from_yaml(f"run: {{name: t}}\nmodel: {{hub: '{wrong}'}}")


def test_a_resume_takes_a_preset_that_names_its_repository_since() -> None:
    assert kind_of("model.hub") == "free"


@pytest.mark.parametrize("name", PRESETS)
def test_memory_is_predicted_with_the_autoencoder_of_the_preset(name: str, tmp_path: Path) -> None:
    """By the numbers that predictions without a folder take, latents have the channels of its transformer."""
    dit = model_of(name).dit
    write_numbers(tmp_path, dit)
    channels, stride = vae_numbers(read_json(tmp_path / "vae" / "config.json"), str(tmp_path))
    assert channels == dit.out_channels
    if name == "wan2.2-ti2v-5b":
        assert stride == (4, 16, 16)
