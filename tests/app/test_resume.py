"""A resume trains on what was trained: other values of these settings are refused by name, the rest is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings.config import RunConfig
from app.settings.resume import KINDS, Change, check_resume, kind_of
from app.settings.run_folder import leaves, prepare_run_dir
from ops.models.folders import dit_json, resolve
from ops.typed import ConfigError, as_plain, dotted_names

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return RunConfig.load(DEMO, [f"run.dir={tmp_path}", "run.name=one", *overrides])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has trained ten steps and written a checkpoint."""
    saved = config(tmp_path)
    return write_trained(prepare_run_dir(saved), saved)


def write_trained(made: Path, saved: RunConfig, step: int = 9) -> Path:
    """A checkpoint of a run that has trained to this step."""
    checkpoint = made / "checkpoints" / f"step-{step}"
    (made / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text('{"files": {}}')
    (checkpoint / "meta.json").write_text(json.dumps({"step": step, "config": saved.to_yaml()}))
    return made


def test_every_setting_is_classified() -> None:
    """A new setting of what is trained must be thought about; one of workers or planner belongs to its section."""
    names = dotted_names(RunConfig)
    every = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    assert len(every) > 100
    for name in every:
        kind_of(name)
    assert not [name for name in KINDS if name not in names], "a name in the table that no setting has"


def test_a_new_setting_of_training_has_to_be_classified() -> None:
    with pytest.raises(KeyError):
        kind_of("train.optimizer.momentum")
    with pytest.raises(KeyError):
        kind_of("data.augment")
    assert kind_of("workers.brand_new") == "schedule"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.dit.num_layers=3", "model.dit.num_layers 2 -> 3"),
        ("model.text.seed=7", "model.text.seed 0 -> 7"),
        ("model.text.max_length=100", "model.text.max_length"),
        ("model.dit.lora_rank=4", "model.dit.lora_rank 0 -> 4"),
        ("model.dit.train_only=[blocks.0]", "model.dit.train_only"),
        ("train.flow.flow_shift=3", "train.flow.flow_shift 5.0 -> 3.0"),
        ("train.loss_weight=token", "train.loss_weight sample -> token"),
        ("train.seed=1", "train.seed 0 -> 1"),
        ("train.optimizer.ema_decay=0", "train.optimizer.ema_decay"),
        ("train.optimizer={kind: prodigy}", "train.optimizer.kind adamw -> prodigy"),
        ("data.items_per_step=2", "data.items_per_step"),
        ("data.caption_dropout=0.5", "data.caption_dropout"),
        ("data.sources.0.caption=json:text", "data.sources.0.caption txt|json:caption -> json:text"),
        ("data.sources.0.caption_prefix=sks", 'data.sources.0.caption_prefix "" -> sks.'),
        ("data.sources.0.default_caption=''", "data.sources"),
        ("data.sources.0.loss_weight=0.5", "data.sources.0.loss_weight 1.0 -> 0.5"),
        ("data.buckets.min_area=0.5", "data.buckets.min_area 0.8 -> 0.5"),
    ],
)
def test_another_training_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, folder: Path, override: str, said: str
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    match = "--resume would train something else than the checkpoint after 10 steps"
    with pytest.raises(ConfigError, match=match) as e:
        check_resume(config(tmp_path, override))
    assert said in str(e.value)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_whose_preset_has_changed_since_is_told_to_resume_by_its_own_settings(
    tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_resume(config(tmp_path, "data.buckets.min_area=0.5"))
    assert f"Restore it, resume by the run's own settings (--config {folder / 'config.yaml'} --resume), or" in str(
        refused.value
    )
    assert check_resume(RunConfig.load(folder / "config.yaml", [])) == []


def test_another_head_size_of_the_same_width_is_refused(tmp_path: Path, folder: Path) -> None:
    """Names and shapes of all parameters are equal, and the function is another."""
    dit = config(tmp_path).model.dit
    heads = [
        f"model.dit.num_heads={dit.num_heads // 2}",
        f"model.dit.head_dim={dit.head_dim * 2}",
        "planner.degrees=[]",
    ]
    with pytest.raises(ConfigError, match=r"num_heads .* -> .*head_dim"):
        check_resume(config(tmp_path, *heads))


def test_schedule_and_pool_may_change_and_are_told(tmp_path: Path, folder: Path) -> None:
    changes = check_resume(
        config(tmp_path, "train.steps=999", "workers.max=9", "sample.seed=5", "train.optimizer.learning_rate=1e-5")
    )
    assert {change.key for change in changes} == {"train.steps", "workers.max", "train.optimizer.learning_rate"}
    assert "train.steps 300 -> 999" in map(str, changes)
    place = f"model.text.place={'host' if config(tmp_path).model.text.place == 'device' else 'device'}"
    assert [change.key for change in check_resume(config(tmp_path, place))] == ["model.text.place"]
    how = check_resume(config(tmp_path, "train.tf32=on", "model.vae.channels_last=on"))
    assert [change.key for change in how] == ["model.vae.channels_last", "train.tf32"]


def test_the_same_settings_are_no_change(tmp_path: Path, folder: Path) -> None:
    assert check_resume(config(tmp_path)) == []


def test_a_source_of_a_run_from_before_a_setting_had_its_default(tmp_path: Path, folder: Path) -> None:
    marker = folder / "checkpoints" / "step-9" / "meta.json"
    meta = json.loads(marker.read_text())
    saved = yaml.safe_load(meta["config"])
    for source in saved["data"]["sources"]:
        del source["caption_prefix"], source["default_caption"], source["loss_weight"]
    marker.write_text(json.dumps({**meta, "config": yaml.safe_dump(saved)}))
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert check_resume(config(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"data\.sources"):
        check_resume(config(tmp_path, "data.sources.0.caption_prefix=sks"))


def test_what_the_checkpoint_was_trained_with_counts_not_an_edited_file(tmp_path: Path, folder: Path) -> None:
    edited = config(tmp_path, "model.text.seed=7")
    (folder / "config.yaml").write_text(edited.to_yaml())
    with pytest.raises(ConfigError, match=r"model.text.seed 0 -> 7"):
        check_resume(edited)


def test_without_a_checkpoint_the_runs_own_file_counts(tmp_path: Path, folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")  # its keepers may live
    with pytest.raises(ConfigError, match=r"something else than .*config.yaml says: model.text.seed"):
        check_resume(config(tmp_path, "model.text.seed=7"))


def test_a_run_that_never_took_a_step_may_become_another(tmp_path: Path, folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text("")
    assert check_resume(config(tmp_path, "model.text.seed=7")) == []


def test_a_damaged_checkpoint_leaves_the_word_to_the_one_before(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder / "checkpoints" / "step-9", folder / "checkpoints" / "step-19")
    (folder / "checkpoints" / "step-19" / "meta.json").write_text("{")
    with pytest.raises(ConfigError, match="the checkpoint after 10 steps"):
        check_resume(config(tmp_path, "model.text.seed=7"))


def test_a_run_of_an_older_version_had_the_defaults_of_settings_it_did_not_know(tmp_path: Path, folder: Path) -> None:
    tree: dict[str, Any] = as_plain(config(tmp_path))
    del tree["train"]["loss_weight"]
    tree["train"]["gone_since"] = 1
    text = yaml.safe_dump(tree)
    (folder / "config.yaml").write_text(text)
    (folder / "checkpoints" / "step-9" / "meta.json").write_text(json.dumps({"step": 9, "config": text}))
    assert check_resume(config(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"train.loss_weight sample -> token"):
        check_resume(config(tmp_path, "train.loss_weight=token"))


def test_moved_data_is_left_to_its_resume_token(tmp_path: Path, folder: Path) -> None:
    source = config(tmp_path).data.sources[0]
    moved = f"data.sources.0.path=/elsewhere{source.path if source.path.startswith('/') else '/' + source.path}"
    assert [change.key for change in check_resume(config(tmp_path, moved))] == ["data.sources"]


@pytest.mark.parametrize(("edit", "refused"), [("", False), ("config.json", True), ("model.safetensors", True)])
def test_weights_may_move_but_not_change(tmp_path: Path, edit: str, refused: bool) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"d_model": 8}')
        (tmp_path / name / "model.safetensors").write_bytes(b"12345678")
    if edit:
        (tmp_path / "new" / edit).write_text('{"d_model": 16}')
    made = prepare_run_dir(config(tmp_path, f"model.text.path={tmp_path}/old"))
    (made / "metrics.jsonl").write_text('{"step": 9}\n')
    now = config(tmp_path, f"model.text.path={tmp_path}/new", "model.text.num_heads=2")  # not read beside a folder
    if refused:
        with pytest.raises(ConfigError, match=r"model.text.path"):
            check_resume(now)
        return
    assert "model.text.path" in {change.key for change in check_resume(now)}
    shutil.rmtree(tmp_path / "old")
    assert "model.text.path" in {change.key for change in check_resume(now)}, "what is gone cannot be compared"


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("model.dit.rope_theta=20000", True),
        ("model.dit.eps=1e-5", False),  # the folder's own counts
        ("model.dit.num_layers=3", False),
        ("model.dit.boundary=0.9", True),  # no model_index.json says it
        ("model.dit.lora_from=/elsewhere/factors.safetensors", False),  # the state has what came of them
        ("model.dit.lora_from=null", False),
        ("model.dit.frozen_dtype=float8", True),
    ],
)
def test_beside_a_folder_what_its_config_does_not_name_is_the_runs(
    tmp_path: Path, override: str, refused: bool
) -> None:
    dit = tmp_path / "dit"
    dit.mkdir()
    (dit / "config.json").write_text(json.dumps(dit_json(resolve(config(tmp_path).model)[0].dit)))
    saved = (f"model.dit.path={dit}", "model.dit.lora_rank=2", "model.dit.lora_from=/here/factors.safetensors")
    write_trained(prepare_run_dir(config(tmp_path, *saved)), config(tmp_path, *saved))
    now = config(tmp_path, *saved, override)
    if refused:
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            check_resume(now)
    else:
        assert override.partition("=")[0] in {change.key for change in check_resume(now)}


def test_factors_are_not_read_into_a_state(tmp_path: Path) -> None:
    made = prepare_run_dir(config(tmp_path, "model.dit.lora_rank=2"))
    (made / "metrics.jsonl").write_text('{"step": 9}\n')
    with pytest.raises(ConfigError, match=r"lora_from null -> /here"):
        check_resume(config(tmp_path, "model.dit.lora_rank=2", "model.dit.lora_from=/here/factors.safetensors"))
    with pytest.raises(ConfigError, match=r"model\.dit\.frozen_dtype same -> float8"):
        check_resume(config(tmp_path, "model.dit.lora_rank=2", "model.dit.frozen_dtype=float8"))


@pytest.mark.parametrize("name", ["latte-tiny", "demo-stdit"])
def test_how_bags_run_spatial_temporal_blocks_may_change(tmp_path: Path, name: str) -> None:
    def loaded(*overrides: str) -> RunConfig:
        return RunConfig.load(DEMO.with_name(f"{name}.yaml"), [f"run.dir={tmp_path}", *overrides])

    (prepare_run_dir(loaded()) / "metrics.jsonl").write_text('{"step": 9}\n')
    sliced = {
        f"model.dit.{part}": "2" for part in ("temporal_slices", "spatial_slices", "temporal_lead", "spatial_lead")
    }
    how = {"model.dit.bag_mode": "ulysses", **sliced}
    assert how.keys() == {
        change.key for change in check_resume(loaded(*(f"{key}={value}" for key, value in how.items())))
    }


def test_the_pipeline_that_an_export_names_may_change_and_the_levels_of_frames_may_not(tmp_path: Path) -> None:
    def loaded(*overrides: str) -> RunConfig:
        return RunConfig.load(DEMO.with_name("skyreels-tiny.yaml"), [f"run.dir={tmp_path}", *overrides])

    (prepare_run_dir(loaded()) / "metrics.jsonl").write_text('{"step": 9}\n')
    changes = check_resume(loaded("model.dit.diffusion_forcing=false", "sample.forcing.base_num_frames=17"))
    assert [change.key for change in changes] == ["model.dit.diffusion_forcing"]
    with pytest.raises(ConfigError, match=r"train\.flow\.frame_levels rising -> independent"):
        check_resume(loaded("train.flow.frame_levels=independent"))


def test_another_dtype_of_the_vae_would_train_something_else_and_another_way_to_compute_would_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    vae = ("model.vae.kind=diffusers", f"model.vae.path={tmp_path}/vae")
    made = prepare_run_dir(config(tmp_path, *vae))
    (made / "metrics.jsonl").write_text('{"step": 9}\n')
    with pytest.raises(ConfigError, match=r"model\.vae\.dtype auto -> bfloat16"):
        check_resume(config(tmp_path, *vae, "model.vae.dtype=bfloat16"))
    changes = check_resume(config(tmp_path, *vae, "model.vae.compile=true", "model.vae.channels=7"))
    assert "model.vae.compile" in {change.key for change in changes}


def test_leaves_end_at_values_that_are_mappings_themselves() -> None:
    tree = {"a": {"b": {"x": 1}, "c": 2}}
    assert dict(leaves(tree, known={"a.b": {}})) == {"a.b": {"x": 1}, "a.c": 2}


def test_a_long_value_is_told_short() -> None:
    assert len(str(Change("data.sources", ["x" * 500], []))) < 120


def test_of_sources_the_settings_that_differ_are_told_and_places_last() -> None:
    old = [{"path": "a"}, {"path": "b", "weight": 2.0}]
    new = [{"path": "c"}, {"path": "d", "weight": 3.0}]
    assert str(Change("data.sources", old, old[:1])) == "data.sources 2 sources -> 1"
    told = str(Change("data.sources", old, new))
    assert told.startswith("data.sources.1.weight 2.0 -> 3.0, data.sources.0.path a -> c, data.sources.1.path b -> d")


NEW_RUN = r"begin another run\.name with --set train\.init_from=.*/one/checkpoints/step-9"
SEGMENT = r"let data\.segments change what comes: an entry with until_step: 10, and one more, \{until_step: 0, "


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.items_per_step=2", rf"{SEGMENT}items_per_step: 2\}}; or {NEW_RUN}\.$"),
        ("data.buckets.min_area=0.5", rf"{SEGMENT}buckets: \{{\.\.\.\}}\}}; or {NEW_RUN}\.$"),
        ("data.batch.memory_tokens=500", rf"{SEGMENT}batch: \{{\.\.\.\}}\}}; or {NEW_RUN}\.$"),
        ("data.sources.0.weight=1", rf"{SEGMENT}weights: \[\.\.\.\]\}}; or {NEW_RUN}\.$"),
        ("data.caption_dropout=0.5", rf"--overwrite\. To go on with what it has learned, {NEW_RUN}\.$"),
        ("train.seed=1", rf"--overwrite\. To go on with what it has learned, {NEW_RUN}\.$"),
        ("model.dit.num_layers=3", r"or --overwrite\.$"),  # another transformer takes over nothing
    ],
)
def test_whoever_is_refused_is_told_how_to_go_on_with_what_the_run_has_learned(
    tmp_path: Path, folder: Path, override: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_resume(config(tmp_path, override))


def test_the_last_segment_of_a_curriculum_is_what_ends(tmp_path: Path) -> None:
    segments = "data.segments=[{until_step: 5, items_per_step: 1}, {until_step: 0}]"
    write_trained(prepare_run_dir(config(tmp_path, segments)), config(tmp_path, segments))
    with pytest.raises(ConfigError, match=r"the last entry with until_step: 10, and one more, .*items_per_step: 2"):
        check_resume(config(tmp_path, segments, "data.items_per_step=2"))


def test_an_entry_of_segments_is_no_other_training(tmp_path: Path, folder: Path) -> None:
    added = "data.segments=[{until_step: 10}, {until_step: 0, items_per_step: 2}]"
    assert [change.key for change in check_resume(config(tmp_path, added))] == ["data.segments"]


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path, folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match=r"another run\.name or --overwrite\.$"):
        check_resume(config(tmp_path, "data.items_per_step=2"))


def test_what_a_run_began_with_is_not_read_into_its_state(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.init_from null -> /elsewhere"):
        check_resume(config(tmp_path, "train.init_from=/elsewhere"))
    shutil.rmtree(folder)
    given = "train.init_from=/elsewhere/checkpoints/step-3"
    write_trained(prepare_run_dir(config(tmp_path, given)), config(tmp_path, given))
    assert [change.key for change in check_resume(config(tmp_path, "train.init_from=null"))] == ["train.init_from"]
    assert check_resume(config(tmp_path, given, "train.init_moments=false")) == []


def test_without_a_checkpoint_a_run_begins_again_with_what_it_began_with(tmp_path: Path, folder: Path) -> None:
    """Its first steps were trained from there, and a resume would silently train from other weights."""
    shutil.rmtree(folder)
    given, other = "train.init_from=/elsewhere/checkpoints/step-3", "train.init_from=/elsewhere/checkpoints/step-4"
    shutil.rmtree(write_trained(prepare_run_dir(config(tmp_path, given)), config(tmp_path, given)) / "checkpoints")
    assert check_resume(config(tmp_path, given)) == []
    for changed, told in (
        (
            (),
            r"config\.yaml says: train\.init_from \S*step-3 -> null\. Restore it, .*The run has no checkpoint",
        ),
        ((other,), r"train\.init_from \S*step-3 -> \S*step-4\. Restore it, .* begin with other weights"),
        ((given, "train.init_moments=false"), r"train\.init_moments true -> false\. Restore it"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_resume(config(tmp_path, *changed))


def test_without_a_checkpoint_factors_are_read_again_and_must_be_the_same(tmp_path: Path) -> None:
    factors = ("model.dit.lora_rank=2", "model.dit.lora_from=/here/factors.safetensors")
    saved = config(tmp_path, *factors)
    shutil.rmtree(write_trained(prepare_run_dir(saved), saved) / "checkpoints")
    with pytest.raises(ConfigError, match=r"model\.dit\.lora_from /here/factors\.safetensors -> null\. Restore it"):
        check_resume(config(tmp_path, factors[0]))
    with pytest.raises(ConfigError, match=r"lora_from /here/factors\.safetensors -> /there/factors\.safetensors\."):
        check_resume(config(tmp_path, factors[0], "model.dit.lora_from=/there/factors.safetensors"))


def test_a_run_that_goes_back_is_compared_with_the_checkpoint_that_it_goes_back_to(
    tmp_path: Path, folder: Path
) -> None:
    later = config(tmp_path, "data.items_per_step=2")
    write_trained(folder, later, 19)
    assert "data.items_per_step" in {change.key for change in check_resume(later)}  # than in config.yaml
    with pytest.raises(ConfigError, match=r"the checkpoint after 10 steps: data\.items_per_step 3 -> 2"):
        check_resume(later, checkpoint=folder / "checkpoints" / "step-9")
