"""A preset says which repository of the Hub its folder is: in its first lines, in docs/models.md, and in the error of a
folder that is missing, or of weights in another form."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from actors.outcome import Exit
from app.bench.headroom import write_numbers
from app.settings.config import RunConfig
from app.settings.errors import exit_code
from app.settings.resume import kind_of
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import check_weights, component, dit_json, resolve, vae_numbers
from ops.models.other_forms import OtherForm
from ops.models.wan.config import WanConfig
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


def moved_to(model: ModelConfig, setting: str, path: Path) -> ModelConfig:
    if setting == "dit":
        return replace(model, dit=replace(model.dit, path=str(path)))
    if setting == "vae":
        return replace(model, vae=replace(model.vae, path=str(path)))
    return replace(model, text=replace(model.text, path=str(path)))


def downloaded(folder: Path) -> Path:
    """The JSON files of a small pipeline in Diffusers' form."""
    dit = WanConfig(num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, text_dim=32, in_channels=4, out_channels=4)
    text = {"model_type": "umt5", "d_model": 32}
    parts = {"transformer": dit_json(dit), "vae": {"_class_name": "AutoencoderKLWan", "z_dim": 4}, "text_encoder": text}
    for name, fields in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
    return folder


def on_folder(folder: Path) -> ModelConfig:
    model = moved_to(model_of("wan2.1-1.3b"), "dit", folder)
    return moved_to(moved_to(model, "vae", folder), "text", folder)


@pytest.mark.parametrize("setting", ["dit", "vae", "text"])
def test_a_single_file_is_told_as_one_and_not_downloaded_into(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "wan2.1_t2v_1.3B_bf16.safetensors"
    file.write_bytes(b"x")
    model = on_folder(downloaded(tmp_path / "models"))
    with pytest.raises(ConfigError) as told:
        resolve(moved_to(model, setting, file))
    said = str(told.value)
    assert said.startswith(f"{file} is one file, and a Diffusers folder is needed")
    assert said.endswith(f"--local-dir {tmp_path / 'models'}`.") and exit_code(told.value) == Exit.USAGE
    assert (f"`heddle convert {file} --config MODEL.yaml --to DIR`" in said) == (setting == "dit"), (
        "a transformer alone"
    )
    with pytest.raises(ConfigError, match=r"--local-dir FOLDER`, to a FOLDER that all nodes see\.$"):
        resolve(on_folder(file))
    with pytest.raises(ConfigError, match=r"such as the repository that model\.hub of a preset names\.$"):
        resolve(replace(on_folder(file), hub=None))


def test_files_are_converted_where_their_family_has_a_converter(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"in Diffusers' form\.$") as told:
        component(file, "transformer_2")
    (listed,) = re.findall(r"transformer's weights of (.*) \(model\.dit\.architecture\)", str(told.value))
    assert set(re.split(r", | or ", listed)) == {name for name, family in FAMILIES.items() if family.converter}


@pytest.mark.parametrize("name", ["a.pth", "mp_rank_00_model_states.pt", "a-Q8_0.gguf"])
def test_a_pickle_is_not_told_to_be_converted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"is one file, .* such as the repository that model\.hub of a preset names\.$"
    ):
        component(tmp_path / name, "transformer")


@pytest.mark.parametrize("setting", ["dit", "vae", "text"])
def test_a_folder_of_the_authors_own_code_is_told_as_one(setting: str, tmp_path: Path) -> None:
    model, theirs = on_folder(downloaded(tmp_path / "models")), tmp_path / "Wan2.1-T2V-1.3B"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"_class_name": "WanModel", "model_type": "t2v"}')
    (theirs / "diffusion_pytorch_model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError) as told:
        resolve(moved_to(model, setting, theirs))
    said = str(told.value)
    assert said.startswith(f"{theirs} is a WanModel, in the form of its authors' own code") and "model.hub" in said
    assert (f"`heddle convert {theirs} --config MODEL.yaml --to DIR`" in said) == (setting == "dit")
    assert said.endswith(f"--local-dir {tmp_path / 'models'}`."), "and not into what is there"


@pytest.mark.parametrize("name", ["WanModel", "HYVideoDiffusionTransformer", "HunyuanVideo_1_5_DiffusionTransformer"])
def test_pickles_of_the_authors_and_weights_without_a_converter_are_not_told_to_be_converted(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    (tmp_path / ("a.safetensors" if "_1_5_" in name else "mp_rank_00_model_states.pt")).write_bytes(b"x")
    with pytest.raises(OtherForm, match=r"that model\.hub of a preset names\.$"):
        component(tmp_path, "transformer")


def test_a_folder_that_names_no_class_is_told_as_the_authors_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"Name": ["HunyuanVideo"]}')  # beside its folders of pickles
    with pytest.raises(
        ConfigError, match=r"names no class, as that of its authors' own code; .*-dir models/hunyuan-video`"
    ):
        resolve(moved_to(model_of("hunyuan-13b"), "text", tmp_path))


def test_the_cache_of_the_hub_is_answered_with_the_folder_in_it(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers"
    newer, main = downloaded(cache / "snapshots" / "a1"), downloaded(cache / "snapshots" / "b2")
    os.utime(newer, (2e9, 2e9))
    model = on_folder(cache)
    with pytest.raises(ConfigError, match=rf"the Hub's cache .* whose files lie below it\. Give {newer}\.$"):
        resolve(model)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("b2\n")
    with pytest.raises(ConfigError, match=rf"Give {main}\.$"):
        resolve(model)
    resolve(on_folder(main))
    shutil.rmtree(cache / "snapshots")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json.*--local-dir FOLDER`, to a FOLDER that all"):
        resolve(model)


def test_nothing_is_to_be_downloaded_into_the_upload_of_a_job() -> None:
    upload = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/models/wan")
    with pytest.raises(FileNotFoundError, match=r"does not exist.*--local-dir FOLDER`, to a FOLDER that all nodes see"):
        resolve(on_folder(upload))


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
