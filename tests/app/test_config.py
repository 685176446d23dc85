"""Settings: shipped files load, mistakes are answered with one sentence that names key, place and remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.inputs.checkpoints import note_most_steps
from app.inputs.synthetic import make_missing
from app.plan.dry_run import dry_run
from app.run.launch import train
from app.run.lock import FolderLock, lock_path
from app.settings.config import RunConfig, check_read, from_here, names
from app.settings.elsewhere import DONE_OTHERWISE, ELSEWHERE, VALUES
from app.settings.notes import notes
from app.settings.run_folder import prepare_run_dir, run_dir, save_config
from app.settings.written_by import header
from data.config import SourceConfig
from ops.config import OptimizerConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json, resolve
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError, parse, plain
from tests.families.kit import small

ROOT = Path(__file__).parent.parent.parent
RUNS = sorted((ROOT / "configs" / "runs").glob("*.yaml"))

MINIMAL = """
run: {name: t}

"""


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    return RunConfig.load(write(folder, MINIMAL + text), overrides)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_loads_and_survives_a_round_trip(path: Path) -> None:
    config = RunConfig.load(path)
    assert RunConfig.from_yaml(config.to_yaml()) == config
    check_read(config)


@pytest.mark.parametrize("path", [path for path in RUNS if "-lora-" in path.stem], ids=lambda path: path.stem)
def test_a_shipped_run_of_factors_keeps_every_checkpoint(path: Path) -> None:
    """The best of them is chosen by its samples when all are made."""
    checkpoint = RunConfig.load(path).checkpoint
    assert checkpoint.keep_last == 0 and checkpoint.every > 0


def test_there_are_shipped_runs() -> None:
    assert "demo" in [path.stem for path in RUNS]


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "configs" / "models").glob("*.yaml")) + sorted((ROOT / "configs" / "data").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_every_shipped_part_loads_as_a_base(path: Path, tmp_path: Path) -> None:
    base = f"base: [{path}]\nrun: {{name: t}}\n"
    RunConfig.load(write(tmp_path, base))


def test_overrides_win_over_the_file_which_wins_over_its_base(tmp_path: Path) -> None:
    write(tmp_path, "train: {steps: 1, seed: 1, optimizer: {weight_decay: 0.5}}", "base.yaml")
    config = load(
        tmp_path, "base: base.yaml\ntrain: {steps: 2, seed: 2}", "train.steps=3", "train.optimizer.ema_decay=0"
    )
    assert (config.train.steps, config.train.seed) == (3, 2)
    assert config.train.optimizer.weight_decay == 0.5
    assert config.train.optimizer.ema_decay == 0.0


TABLE = 'table: ["17x64x96"]'
GENERATED = 'resolutions: [480p], ratios: ["16:9"], frames: [1, 17]'
OPEN_SORA = "open_sora: {256px: {1: [1.0, 45]}}"


@pytest.mark.parametrize(
    ("below", "above", "kept"),
    [
        (GENERATED, TABLE, {"table"}),
        (TABLE, GENERATED, {"resolutions"}),
        (GENERATED, OPEN_SORA, {"open_sora"}),
        (OPEN_SORA, TABLE, {"table"}),
        (GENERATED, "max_ratio_error: 2.0", {"resolutions"}),
        (GENERATED, "table: []", {"resolutions"}),
    ],
)
def test_buckets_of_another_kind_replace_those_of_the_base(
    below: str, above: str, kept: set[str], tmp_path: Path
) -> None:
    """A table over a base with resolutions was answered "gives table and resolutions", and the user gave one."""
    write(tmp_path, f"data: {{buckets: {{{below}, min_area: 0.5}}}}", "base.yaml")
    buckets = load(tmp_path, f"base: base.yaml\ndata: {{buckets: {{{above}}}}}").data.buckets
    assert {name for name in ("table", "resolutions", "open_sora") if getattr(buckets, name)} == kept
    assert buckets.min_area == 0.5, "what holds for every kind stays"
    assert bool(buckets.frames) == ("resolutions" in kept)


def test_ratios_of_a_base_stay_beside_a_table(tmp_path: Path) -> None:
    """They say nothing to it, and a run that was begun when they stayed would be refused on a resume without them."""
    write(tmp_path, 'data: {buckets: {resolutions: [480p], frames: [1], ratios: ["16:9"]}}', "base.yaml")
    buckets = load(tmp_path, "base: base.yaml\ndata: {buckets: {table: [1x32x48]}}").data.buckets
    assert buckets.table and buckets.ratios == ("16:9",)


def test_one_layer_that_gives_two_kinds_of_buckets_is_refused(tmp_path: Path) -> None:
    write(tmp_path, f"data: {{buckets: {{{GENERATED}}}}}", "base.yaml")
    with pytest.raises(ConfigError, match=r"gives table and resolutions; they exclude each other.*run.yaml:6"):
        load(tmp_path, f"base: base.yaml\ndata:\n  buckets: {{{TABLE}, {GENERATED}}}")
    sets = ['data.buckets.table=["17x64x96"]', "data.buckets.resolutions=[480p]", "data.buckets.frames=[1]"]
    with pytest.raises(ConfigError, match="gives table and resolutions"):
        load(tmp_path, "base: base.yaml", *sets)


def test_buckets_of_another_kind_on_the_command_line_replace_those_of_the_files(tmp_path: Path) -> None:
    text = f"data: {{buckets: {{{GENERATED}}}, segments: [{{until_step: 0, buckets: {{{TABLE}}}}}]}}"
    data = load(tmp_path, text, 'data.buckets.table=["17x64x96"]').data
    assert data.buckets.table == ("17x64x96",) and not data.buckets.resolutions and not data.buckets.frames
    segment = "data.segments.0.buckets"
    data = load(tmp_path, text, f"{segment}.frames=[17]", f"{segment}.resolutions=[256px]").data
    (buckets,) = data.tables
    assert buckets.resolutions == ("256px",) and buckets.frames == (17,) and not buckets.table


def test_numbers_written_as_1e_4_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, "train: {optimizer: {learning_rate: 3e-4}}", "train.optimizer.weight_decay=1e-2")
    assert config.train.optimizer.learning_rate == 3e-4
    assert config.train.optimizer.weight_decay == 1e-2


@pytest.mark.parametrize(
    "setting, told",
    [
        ("train.steps=0100", "train.steps is 0100 (--set), which YAML reads as 64; write it without the leading 0"),
        ("train.steps=010", "train.steps is 010 (--set), which YAML reads as 8; write it without the leading 0"),
        ("train.steps=1:30", "train.steps is 1:30 (--set), which YAML reads as 90; write it without the colon"),
        ("train.optimizer.learning_rate=010", "learning_rate is 010 (--set), which YAML reads as 8; write it"),
        ("data.fps=1:30.5", "data.fps is 1:30.5 (--set), which YAML reads as 90.5; write it without the colon"),
        ("data.engine.decode_workers=010", "decode_workers is 010 (--set), which YAML reads as 8; write it without"),
    ],
)
def test_a_number_that_yaml_reads_otherwise_than_people_do_is_refused(tmp_path: Path, setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(tmp_path, "", setting)


def test_other_numbers_are_read_as_yaml_does(tmp_path: Path) -> None:
    settings = ("data.max_wait=0", "train.seed=1_000", "data.fps=010.5", "data.min_coverage=0", "run.name=010")
    config = load(tmp_path, "", *settings)
    assert (config.data.max_wait, config.train.seed, config.data.fps, config.run.name) == (0, 1000, 10.5, "010")


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    config = load(tmp_path, "data: {sources: [{path: a}, {path: b}]}", "data.sources.1.path=c")
    assert [source.path for source in config.data.sources] == ["a", "c"]


def test_digits_of_no_number_are_no_position_and_no_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'\u00b2' is not a position in a list of 1"):
        load(tmp_path, "data: {sources: [{path: a}]}", "data.sources.\u00b2.path=c")
    assert plain(parse('{"\u00b2": [1], "2": [1]}')) == {"\u00b2": [1], 2: [1]}


SOURCE = "data: {sources: [{path: a}]}"


@pytest.mark.parametrize(
    "given",
    ["data.sources.0.path=/clips #2/a.tar", "data.sources.0=path: /clips #2", "run.name=5 #2", "run.name=#2"],
)
def test_what_yaml_would_drop_of_an_override_as_a_comment_is_refused(tmp_path: Path, given: str) -> None:
    name = given.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"'#2.*' is a comment in YAML.*in quotation marks: '{name}=\"\.\.\.\"'"):
        load(tmp_path, SOURCE, given)


def test_a_comment_of_an_override_that_is_no_part_of_a_text_is_one(tmp_path: Path) -> None:
    for given, name in (('run.name="a #b"', "a #b"), ("run.name=a#b", "a#b"), ("run.name='a' # b", "a")):
        assert load(tmp_path, "", given).run.name == name
    assert load(tmp_path, SOURCE, "data.sources=[{path: b}] # or a").data.sources[0].path == "b"
    assert load(tmp_path, "", "train=steps: 7  # a few\nseed: 3").train.steps == 7, "several lines are as of a file"


def test_a_prefix_of_captions_keeps_its_last_space_on_the_command_line(tmp_path: Path) -> None:
    for given in ("sks style, ", ' "sks style, " '):
        config = load(tmp_path, SOURCE, f"data.sources.0.caption_prefix={given}")
        assert config.data.sources[0].caption_prefix == "sks style, "
    assert load(tmp_path, "", "run.name = demo ").run.name == "demo", "other texts are as in a file"


def test_merge_keys_share_settings_and_own_ones_count_more(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "data: {sources: [&first {path: a, caption: json}, &second {path: b, media: media, caption: txt}, "
        "{<<: [*first, *second], path: c}]}",
    )
    read = [(source.path, source.caption, source.media) for source in config.data.sources]
    assert read == [("a", "json", ""), ("b", "txt", "media"), ("c", "json", "media")]


MISTAKES = {
    "train: {<<: 3}": "<< takes a mapping, or a list of them (run.yaml:4)",
    "train: &a {steps: *a}": "holds itself by an alias",
    "train: {stpes: 3}": "unknown key train.stpes (run.yaml:4); did you mean train.steps?",
    "trian: {steps: 3}": "unknown key trian (run.yaml:4); did you mean train?",
    "train: {max_train_steps: 3}": "did you mean train.steps?",
    "train: {lr: 3}": "did you mean train.optimizer.learning_rate?",
    "model: {vae: {path: models/wan}}": "model.vae.path models/wan is not read by kind haar",
    "train: {keep_last: 3}": "did you mean checkpoint.keep_last?",
    "train: {steps: many}": "train.steps is 'many' (run.yaml:4); expected a whole number.",
    "train: {steps: 2.5}": "train.steps is 2.5 (run.yaml:4); expected a whole number.",
    "train: {optimizer: {betas: [0.9]}}": "expected a list of 2: a number, a number.",
    "train: {sync: deepsped}": "expected one of flat, deepspeed; did you mean deepspeed?",
    "train: 3": "train must be a mapping of settings, not 3 (run.yaml:4).",
    "train: {steps: true}": "train.steps is True (run.yaml:4); expected a whole number.",
    "snapshot: {enabled: maybe}": "snapshot.enabled is 'maybe' (run.yaml:4); expected true or false.",
    "model: {text: {cleaned: upper}}": "model.text.cleaned is 'upper' (run.yaml:4); expected true or false or lower.",
    "train: {steps: 3}\ntrain: {seed: 1}": "key 'train' appears twice",
    "train: {steps: 3": "run.yaml:4 is not valid YAML",
    "workers: {min: 3, max: 2}": "workers.min 3 and workers.max 2 must satisfy 1 <= min <= max",
    "data: {sources: [{kind: webdataset}]}": "data.sources.0.path is missing",
    "planner: {degrees: [1, 3], sequence: ulysses}": "planner.degrees has 3, which does not divide the 4",
    "planner: {topology: g3n1, sequence: ulysses}": "planner.topology has 3, which does not divide the 4",
    "planner: {strategy: static, static_degree: 4}\nworkers: {max: 2}": "needs as many workers; workers.max is 2",
    "planner: {topology: g1x2}": "planner.topology 'g1x2': 'g1x2' is not gSIZEnCOUNT",
    "planner: {topology: g1n2+g1n1}": "names size 1 twice. Add the counts up",
    "planner: {misfit: wait, degrees: [4, 2]}\nworkers: {max: 1}": "planner.degrees needs 2 workers, for which",
    "planner: {misfit: wait, strategy: knapsack, topology: g1n2+g2n1}\nworkers: {max: 3}": (
        "planner.topology needs 4 workers, for which planner.misfit wait would wait; workers.max is 3"
    ),
    "train: {steps: 5, optimizer: {lr_warmup_steps: 9}}": "longer than the run of train.steps 5",
    "train: {steps: 9, optimizer: {lr_scheduler: linear, lr_warmup_steps: 5, lr_decay_steps: 5}}": (
        "lr_decay_steps 5 are together longer than the run of train.steps 9"
    ),
    "data: {sources: [{path: a, loss_weight: 0}]}": "loss_weight is 0.0; it must be larger than 0",
    "validation: {sources: [{path: a, loss_weight: 0.5}]}": "held-out losses are means over clips that all count alike",
    "train: {flow: {min_timestep: 900}}\nmodel: {dit: {expert: low}}": (
        "train.flow.min_timestep 900 and max_timestep 1000 leave noise levels, in those of an expert (0 to 0.875)"
    ),
    "train: {flow: {max_timestep: 800}}\nmodel: {dit: {expert: both}}": "is model.dit.expert high or low",
    "train: {flow: {min_timestep: 5}}\nmodel: {dit: {architecture: latte}}": "nothing of train.flow is used",
    "train: {flow: {min_timestep: 999, logit_mean: -9}}": "next to never has. Widen them, or change the shift",
    "train: {optimizer: {lr_decay_steps: 5}}": "lr_scheduler constant does not decay",
    "data: {buckets: {table: [16x64x64]}}": "data.buckets.table 16x64x64: 16 frames",
    "sample: {prompts: [a], frames: 16}": "sample.frames/height/width cannot be generated: 16 frames",
    "sample: {every: 5, prompts: [a]}\ncheckpoint: {every: 2}": "must be a multiple of checkpoint.every 2",
    "sample: {every: 5}": "sample.every is 5 but sample.prompts is empty",
    "model: {vae: {channels: 0}}": "model.vae.channels 0 is outside 1..768",
    "model: {dit: {attention: fast}}": "model.dit.attention is 'fast'",
    "model: {dit: {attention: flash}}\nworkers: {device: cpu}": "attention flash cannot train on workers.device cpu",
    "model: {dit: {attention: flex}}\nworkers: {device: cpu}": "attention flex cannot train on workers.device cpu",
    "model: {dit: {attention: cudnn}}": "train.autocast is none and train.parameter_dtype float32. Set train.autocast",
    "train: {sync: deepspeed, memory: {gradients: node}}": "train.sync deepspeed sums each worker's own gradients",
    "train: {sync: deepspeed, parameter_dtype: bfloat16}": "train.sync deepspeed keeps fp32 parameters",
    "train: {sum_ctas: 3}": "train.sum_ctas is 3; NCCL rounds what is no power of two. Set it to 1, 2, 4",
    "train: {bag_ctas: 12}": "train.bag_ctas is 12; NCCL rounds what is no power of two. Set it to 1, 2, 4",
    "train: {bag_ctas: 128}": "train.bag_ctas is 128; it must be at most 64",
    "train:\n  seed: 1\n  sum_ctas: -1": "train.sum_ctas is -1; it must be at least 0 (run.yaml:6).",
    "train: {sync: deepspeed, sum_ctas: 8}": "which train.sum_ctas (8) does not reach",
    "train: {memory: {gradients: host}}\nworkers: {device: cpu}": "gradients host is host memory beside GPUs",
    "train: {memory: {parameters: node}}": "gradient_checkpointing is false. Set it to true",
    "model: {dit: {compile: maybe}}": "model.dit.compile is 'maybe'",
    "model: {dit: {architecture: latte, compile: on}}": "blocks of architecture latte are not compiled",
    "model: {dit: {compile: on, gradient_checkpointing: true}}\ntrain: {memory: {parameters: node}}": (
        "model.dit.compile compiles blocks with their weights. Set compile to false"
    ),
    "model: {dit: {cuda_graphs: often}}": "model.dit.cuda_graphs is 'often'",
    "model: {dit: {architecture: stdit3, cuda_graphs: on}}": "blocks of architecture stdit3 are not captured",
    "model: {dit: {cuda_graphs: auto, compile: auto}}": "blocks run by graphs or compiled. Leave one of the two out",
    "model: {dit: {cuda_graphs: on, gradient_checkpointing: true}}\ntrain: {memory: {parameters: node}}": (
        "model.dit.cuda_graphs reads them where they lay. Set cuda_graphs to false"
    ),
    "model: {dit: {cuda_graphs: auto, gradient_checkpointing: true}}\ntrain: {memory: {attention: kept}}": (
        "train.memory.attention kept and model.dit.cuda_graphs auto: graphs compute all of a block again"
    ),
    "train: {memory: {parameters: one}}": "expected one of auto, replicated, node",
    "train: {memory: {gradients: all}}": "expected one of auto, own, node, host",
    "base: missing.yaml": "missing.yaml does not exist",
    "base: run.yaml": "lists itself",
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_is_answered_with_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not key=value"):
        load(tmp_path, "", "train.steps")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        RunConfig.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("save_every", "checkpoint.every"),
        ("rank", "model.dit.lora_rank"),
        ("compile", "model.dit.compile"),
        ("network_args", "model.dit.lora_targets"),
        ("dtype", "train.autocast"),
        ("grad_checkpoint", "model.dit.gradient_checkpointing"),
        ("save", "run.dir"),
        ("split", "validation.sources"),
        ("max_pixels", "data.buckets.resolutions"),
        ("xformers", "model.dit.attention"),
        ("task", "model.dit.path"),
    ],
)
def test_names_of_other_trainers_are_not_taken_for_the_word_that_is_spelled_alike(theirs: str, ours: str) -> None:
    """They were answered by sample.every, train, sample, workers, model.dit.attention.dtype, checkpoint, sample,
    planner.split, data.limits.max_pixels, workers and track."""
    with pytest.raises(ConfigError, match=rf"unknown key {theirs} .* did you mean {ours}"):
        RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [f"{theirs}=1"])


@pytest.mark.parametrize("theirs", ["num_epochs", "epochs", "num_train_epochs", "max_train_epochs", "num_repeats"])
def test_epochs_of_other_trainers_are_answered_with_how_they_become_steps(theirs: str) -> None:
    """They were answered by train.steps alone, as if ten epochs were ten steps."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [f"train.{theirs}=10"])
    said = str(caught.value)
    if theirs == "num_repeats":
        assert "data.sources (weight of each" in said and "follows from train.steps" in said
    else:
        assert "train.steps (steps = epochs x samples / samples of a step; heddle train --dry-run says" in said


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("workers.device=gpu", "cuda"),
        ("data.sources.0.kind=wds", "webdataset"),
        ("train.parameter_dtype=fp32", "float32"),
        ("train.memory.state=cpu", "host"),
    ],
)
def test_values_of_other_trainers_are_not_taken_for_the_word_that_is_spelled_alike(override: str, ours: str) -> None:
    """A gpu was answered with cpu, wds with mds, the others with no word."""
    with pytest.raises(ConfigError, match=rf"; did you mean {ours}\?"):
        RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [override])


def test_names_of_other_trainers_lead_to_keys_that_exist() -> None:
    known = set(names().known)
    for foreign, ours in ELSEWHERE.items():
        named = ours.partition(" (")[0]
        assert named in known or ours.startswith("the command line option"), f"{foreign} -> {ours}"


PEERS = (
    "global_batch_size",
    "micro_batch_size",
    "fps",
    "tp_size",
    "ring_degree",
    "dp_shard",
    "dp_replicate",
    "lora_dropout",
    "network_dropout",
    "trigger_word",
    "cache_only",
    "cache_text_encoder_outputs",
    "save_precision",
    "use_ema",
    "target_fps",
    "vae_path",
    "text_encoder",
    "max_sequence_length",
    "optimizer_args",
    "wandb_project",
    "wandb_run_name",
    "wandb_entity",
    "min_t",
    "max_t",
    "caption_prefix",
    "default_caption",
    "class_tokens",
    "frame_extraction",
    "video_clip_mode",
    "framewise_flow_shift",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "zero_optimization",
    "offload_optimizer",
    "train_iters",
    "save_interval",
    "clip_grad",
    "bf16",
    "fp16",
    "recompute_granularity",
    "log_interval",
)


@pytest.mark.parametrize("section", ["", "train.", "data."])
def test_names_of_other_trainers_have_an_answer_wherever_they_stand(section: str) -> None:
    for theirs in PEERS:
        if f"{section}{theirs}" in names().known:
            continue
        with pytest.raises(ConfigError, match=rf"unknown key {section}{theirs} ") as caught:
            RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [f"{section}{theirs}=1"])
        answer = ELSEWHERE[theirs] if theirs in ELSEWHERE else DONE_OTHERWISE[theirs]
        assert answer in str(caught.value)


def test_what_is_said_of_names_and_values_without_a_setting_names_settings_that_exist() -> None:
    known = set(names().known)
    assert not ELSEWHERE.keys() & DONE_OTHERWISE.keys() and VALUES.keys() <= known
    for theirs, sentence in {**DONE_OTHERWISE, **VALUES}.items():
        named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", sentence)
        assert named and set(named) <= known, f"{theirs}: {sentence}"
        assert sentence.endswith(".")


@pytest.mark.parametrize("kind", ["dadaptation", "AdamW8bit", "lion", "Adafactor", "came", "schedule_free"])
def test_an_optimizer_that_is_not_there_is_answered_with_what_is_in_its_place(kind: str) -> None:
    known = r"expected one of adamw, muon, prodigy[.;]"
    rule = rf"{known}.* in host memory where a GPU has no room for it \(train\.memory\.state\)"
    with pytest.raises(ConfigError, match=rule):
        RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [f"train.optimizer.kind={kind}"])


def test_defaults_of_the_optimizer_depend_on_its_kind_and_give_way_to_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("run: {name: a}\ndata: {sources: [{path: clips}]}\ntrain: {optimizer: {kind: prodigy}}\n")
    found = RunConfig.load(path)
    assert (found.train.optimizer.learning_rate, found.train.optimizer.betas) == (1.0, (0.9, 0.999))
    assert RunConfig.from_yaml(found.to_yaml()) == found, "a run keeps them"
    given = RunConfig.load(path, ["train.optimizer.learning_rate=0.5", "train.optimizer.betas=[0.8, 0.9]"])
    assert (given.train.optimizer.learning_rate, given.train.optimizer.betas) == (0.5, (0.8, 0.9))
    usual = RunConfig.load(path, ["train.optimizer.kind=muon"]).train.optimizer
    assert (usual.learning_rate, usual.betas) == (OptimizerConfig().learning_rate, OptimizerConfig().betas)


def test_a_run_directory_is_made_once(tmp_path: Path) -> None:
    config = load(tmp_path, "", f"run.dir={tmp_path / 'runs'}")
    folder = prepare_run_dir(config)
    assert folder == run_dir(config)
    assert RunConfig.load(folder / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"already exists; continue it with --resume"):
        prepare_run_dir(config)


@pytest.mark.parametrize(
    "flags, why", [(os.ST_RDONLY, "is read-only"), (0, f"may not be written by user {os.geteuid()}")]
)
def test_a_run_below_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, why: str
) -> None:
    """A claim of a cluster that belongs to another user was called read-only."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(ConfigError, match=rf"cannot be made: {tmp_path} {why}; choose another run.dir"):
        prepare_run_dir(load(tmp_path, "", f"run.dir={tmp_path / 'runs' / 'mine'}"))


def test_the_config_of_a_run_says_which_numbers_its_folders_decide(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "transformer"
    folder.mkdir(parents=True)
    true = WanConfig(num_layers=3, in_channels=24, out_channels=24, text_dim=48)
    (folder / "config.json").write_text(json.dumps(dit_json(true)))
    model = [f"model.dit.path={folder.parent}", "model.vae.channels=24", "model.text.d_model=48"]
    config = load(tmp_path, "", f"run.dir={tmp_path / 'runs'}", *model)
    made = prepare_run_dir(config)
    text = (made / "config.yaml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments[0].endswith("what is written for these below is not used.")
    assert "#   model.dit.num_layers: 3" in comments and f"num_layers: {config.model.dit.num_layers}" in text
    assert RunConfig.load(made / "config.yaml") == config, "a resumed run is compared by what was set"
    (folder / "config.json").unlink()
    said = (prepare_run_dir(config, overwrite=True) / "config.yaml").read_text()
    assert [line for line in said.splitlines() if line.startswith("#")] == [header().strip()]


def test_a_name_is_as_long_as_the_files_named_after_it_may_be(tmp_path: Path) -> None:
    longest = "ü" * 115
    config = load(tmp_path, "", f"run.name={longest}", f"run.dir={tmp_path}")
    with FolderLock(lock_path(run_dir(config), "controller")) as lock:
        lock.take(wait_s=0.0, tell=print)
    with pytest.raises(ConfigError, match="is 231 bytes long; files are named after it, so it takes at most 230"):
        load(tmp_path, "", f"run.name={longest}n")


@pytest.mark.parametrize("name", ["010", "1.10", "1e3", "12:30:45", "1_000", "2025-11-29", "2025-11-31", "007"])
def test_a_name_that_looks_like_a_number_or_a_date_keeps_its_spelling(tmp_path: Path, name: str) -> None:
    given = load(tmp_path, "", f"run.name={name}")
    assert given.run.name == RunConfig.load(write(tmp_path, f"run: {{name: {name}}}\n"), ()).run.name == name
    assert RunConfig.from_yaml(given.to_yaml()).run.name == name


@pytest.mark.parametrize("value", ["0x_", "!!int x", "!!bool maybe", "1" * 5000])
def test_a_value_that_yaml_itself_cannot_read_is_a_sentence(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"^the value: '.* is no (int|bool) of YAML; put a text in quotation marks"):
        load(tmp_path, "", f"run.name={value}")


def test_overwriting_a_linked_folder_empties_the_one_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "demo").symlink_to(tmp_path / "elsewhere")
    config = load(tmp_path, "", "run.name=demo", f"run.dir={tmp_path}")
    folder = prepare_run_dir(config)
    (folder / "checkpoints" / "step-9").mkdir(parents=True)
    prepare_run_dir(config, overwrite=True)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["config.yaml"]


def test_a_folder_whose_emptying_was_interrupted_may_be_emptied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, "", f"run.dir={tmp_path}")
    folder = prepare_run_dir(config)
    (folder / "checkpoints" / "step-9").mkdir(parents=True)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("app.settings.run_folder.shutil.rmtree", interrupted)
        prepare_run_dir(config, overwrite=True)
    assert [path.name for path in prepare_run_dir(config, overwrite=True).iterdir()] == ["config.yaml"]


def test_a_run_is_not_written_to_a_uri(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir 's3://b/runs' is a URI; a run folder is a local or shared one"):
        load(tmp_path, "", "run.dir=s3://b/runs")


PLACES = {  # settings of `from_here` that data are not read by
    "model.dit.path": ["model.dit.path=PLACE"],
    "model.dit.lora_from": ["model.dit.lora_rank=4", "model.dit.lora_from=PLACE"],
    "model.vae.path": ["model.vae.kind=diffusers", "model.vae.path=PLACE"],
    "model.text.path": ["model.text.path=PLACE"],
    "model.image.path": ["model.image.path=PLACE"],
    "train.init_from": ["train.init_from=PLACE"],
    "planner.profile": ["planner.profile=PLACE"],
    "workers.cluster": ["workers.cluster=PLACE.yaml"],
    "sample.images.0": ["sample.images=[PLACE]"],
    "sample.last_images.0": ["sample.last_images=[PLACE]"],
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_not_data_is_not_read_from_a_uri(name: str, tmp_path: Path) -> None:
    """`s3://b/wan` was made the local path s3:/b/wan, which was to be downloaded to a folder s3:."""
    overrides = [override.replace("PLACE", "s3://b/wan") for override in PLACES[name]]
    with pytest.raises(
        ConfigError, match=rf"{re.escape(name)} 's3://b/wan\S*' is a URI; .* a local or shared f\w+\. Give"
    ):
        load(tmp_path, "", *overrides)


def test_the_picture_of_a_prompt_is_not_read_from_a_uri() -> None:
    config = RunConfig.load(ROOT / "configs" / "runs" / "learn-i2v.yaml", ["sample.prompts=['a cat --i s3://b/a.png']"])
    with pytest.raises(ConfigError, match=r"'s3://b/a\.png' is a URI; it is read as a local or shared file\. Give its"):
        check_read(config)


def test_resume_keeps_and_overwrite_empties_the_run_directory(tmp_path: Path) -> None:
    config = load(tmp_path, "", f"run.dir={tmp_path / 'runs'}")
    kept = prepare_run_dir(config) / "metrics.jsonl"
    kept.write_text("{}\n")
    prepare_run_dir(config, resume=True)
    assert kept.exists()
    prepare_run_dir(config, overwrite=True)
    assert not kept.exists()


def test_overwrite_refuses_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    config = load(tmp_path, "", f"run.dir={tmp_path / 'runs'}")
    run_dir(config).mkdir(parents=True)
    precious = run_dir(config) / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="is not a run"):
        prepare_run_dir(config, overwrite=True)
    assert precious.exists()


def test_local_paths_are_made_absolute_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/weaver")
    overrides = [
        "data.sources.0.path=a/shards/{00000..00003}.tar",
        "data.sources.0.media=~/videos",
        "data.cache.path=cache",
        "planner.profile=/profiles/h100.json",
        "run.dir=../runs",
    ]
    config = from_here(RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", overrides))
    source = config.data.sources[0]
    assert source.path == f"{tmp_path}/a/shards/{{00000..00003}}.tar" and source.media == "/home/weaver/videos"
    assert config.data.cache.path == f"{tmp_path}/cache" and config.run.dir == f"{tmp_path.parent}/runs"
    assert config.planner.profile == "/profiles/h100.json" and config.model.dit.path is None
    bucket = RunConfig.load(
        ROOT / "configs" / "runs" / "demo.yaml", ["data.sources.0.path=s3://bucket/shards/{0..9}.tar::x.tar"]
    )
    assert from_here(bucket).data.sources[0].path == f"s3://bucket/shards/{{0..9}}.tar::{tmp_path}/x.tar"


def test_batches_for_less_text_than_every_caption_has_are_noted() -> None:
    plain = RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml")
    padded = replace(plain, model=replace(plain.model, text=replace(plain.model.text, pad_to=512)))
    assert notes(plain) == []
    (note,) = notes(padded)
    assert "data.batch.text_tokens 56 sizes batches for less text" in note


@pytest.mark.parametrize(
    "said, settings",
    [(1, []), (0, ["data.cache.latents=false"]), (0, ["data.start_frame=fixed"]), (0, ["data.start_frame=4"])],
)
def test_a_cache_of_latents_beside_random_parts_is_noted(said: int, settings: list[str]) -> None:
    """Every draw of a longer clip was encoded and kept anew, where docs/first-lora.md says each is encoded once."""
    demo = ROOT / "configs" / "runs" / "demo.yaml"
    found = notes(RunConfig.load(demo, ["data.cache.path=c", *settings]))
    assert len(found) == said and all("start_frame: fixed encodes each clip once" in note for note in found)
    pictures = RunConfig.load(demo.with_name("flux-tiny.yaml"), ["data.cache.path=c", *settings])
    assert not any("start_frame" in note for note in notes(pictures)), "a picture has no parts"


def test_a_decoder_is_named_as_a_function_of_a_module_and_noted_where_that_is_missing() -> None:
    path = ROOT / "configs" / "runs" / "demo.yaml"
    for wrong in ("x", "json:", ":loads", "my decoder:decode", "1:decode", "a..b:c"):
        with pytest.raises(ConfigError, match=r"data\.engine\.decoder .* is not module:function, such as data\.decode"):
            RunConfig.load(path, [f"data.engine.decoder={wrong!r}"])
    assert notes(RunConfig.load(path, ["data.engine.decoder=json.decoder:JSONDecoder"])) == []
    for module in ("nobody_has", "nobody_has.decoders", "json.nothing"):
        (note,) = notes(RunConfig.load(path, [f"data.engine.decoder={module}:decode"]))
        assert f"of the module {module}, which this machine does not have" in note


def test_processes_of_one_machine_have_one_feeder() -> None:
    path = ROOT / "configs" / "runs" / "demo.yaml"
    with pytest.raises(ConfigError, match=r"data\.engine\.feeders is 4, and data\.engine\.kind pool has one"):
        RunConfig.load(path, ["data.engine.kind=pool", "data.engine.feeders=4"])
    assert RunConfig.load(path, ["data.engine.kind=pool"]).data.engine.feeders == 1


def test_a_transformer_of_pictures_is_given_pictures() -> None:
    path = ROOT / "configs" / "runs" / "flux-tiny.yaml"
    with pytest.raises(ConfigError, match=r"data.buckets has clips of 9 frames, .* is for pictures"):
        RunConfig.load(path, ["data.buckets.table=[1x32x48, 9x32x48]"])
    with pytest.raises(ConfigError, match=r"sample.frames is 5, .* makes pictures. Set it to 1"):
        RunConfig.load(path, ["sample.frames=5"])


PICTURE_AND_CLIP = ("data.buckets.resolutions=[480p]", "data.buckets.frames=[1, 17]")
FROM_FIRST_FRAMES = "wan2.1-i2v-14b-480p wan2.1-flf2v-14b-720p wan2.2-i2v-a14b hunyuan-i2v-13b hunyuan-i2v-33ch-13b"
FROM_FIRST_FRAMES += " hunyuan1.5-i2v-8b cogvideox-5b-i2v cogvideox1.5-5b-i2v"


@pytest.mark.parametrize("preset", FROM_FIRST_FRAMES.split())
def test_a_picture_is_no_clip_of_a_transformer_that_starts_from_the_first_frame(preset: str) -> None:
    """Its condition is the whole answer."""
    path, named = ROOT / "configs" / "models" / f"{preset}.yaml", "run.name=x"
    with pytest.raises(ConfigError, match=r"data\.buckets has buckets of one frame, .* Leave buckets of more frames"):
        check_read(RunConfig.load(path, [named, *PICTURE_AND_CLIP]))
    check_read(RunConfig.load(path, [named, *PICTURE_AND_CLIP, "data.buckets.frames=[5, 17]"]))
    kept = RunConfig.load(path, [named, *PICTURE_AND_CLIP])
    assert RunConfig.from_yaml(kept.to_yaml()) == kept, "an earlier run can be sampled and exported"


def test_pictures_are_trained_where_a_first_frame_is_not_all_that_a_clip_is_made_from() -> None:
    runs = ROOT / "configs" / "runs"
    pictures = ["data.buckets.frames=[1, 17]"]
    check_read(RunConfig.load(runs / "wan2.1-i2v-14b-lora-80gb.yaml", [*pictures, "model.dit.first_frame=none"]))
    check_read(RunConfig.load(runs / "wan2.2-ti2v-5b-full.yaml", pictures))


OF_PICTURES = {
    "data.segments=[{until_step: 9, buckets: {table: [1x32x48, 9x32x48]}}, {until_step: 0}]": "data.segments.0.buckets",
    "data.segments=[{until_step: 9}, {until_step: 0, buckets: {open_sora: {256px: {1: [0.5, 8]}}}}]": (
        "data.segments.1.buckets"
    ),
    "data.buckets={open_sora: {256px: {1: [[1.0, 0.5], 8], 17: [1.0, 8]}}}": "data.buckets",
    "data.buckets={resolutions: [256px], frames: [17, 1]}": "data.buckets",
}
OF_NONE = (
    "data.segments=[{until_step: 0, buckets: {table: [9x32x48]}}]",
    "data.buckets={open_sora: {256px: {1: [0.0, null], 17: [1.0, 8]}}}",
    "data.buckets={table: [17x32x48]}",
)


def test_buckets_of_pictures_are_found_in_every_kind_of_table() -> None:
    path, first = ROOT / "configs" / "runs" / "demo.yaml", "model.dit.first_frame=channels"
    given = ["sample.prompts=[]", first, "data.buckets.table=[9x32x48]"]
    for setting, place in OF_PICTURES.items():
        with pytest.raises(ConfigError, match=rf"^{re.escape(place)} has buckets of one frame"):
            check_read(RunConfig.load(path, [*given, setting]))
    for setting in OF_NONE:
        check_read(RunConfig.load(path, [*given, setting]))


def of_segments(*ends_and_shapes: tuple[int, str]) -> list[str]:
    entries = ", ".join(f"{{until_step: {end}, buckets: {{table: [{shape}]}}}}" for end, shape in ends_and_shapes)
    first = ["model.dit.first_frame=channels", "sample.prompts=[]", "data.buckets.table=[1x32x48]"]
    return [*first, f"data.segments=[{entries}]"]


def test_of_a_resume_the_pictures_that_are_still_to_come_are_refused() -> None:
    path = ROOT / "configs" / "runs" / "demo.yaml"
    over = RunConfig.load(path, of_segments((10, "1x32x48"), (0, "9x32x48")))
    check_read(over, begun=10)
    with pytest.raises(ConfigError, match=r"^data\.segments\.0\.buckets .* with until_step: 9, .*until_step: 10, buck"):
        check_read(over, begun=9)
    later = RunConfig.load(path, of_segments((10, "9x32x48"), (20, "1x32x48"), (0, "9x32x48")))
    with pytest.raises(ConfigError, match=r"^data\.segments\.1\.buckets .* Leave buckets of more frames\.$"):
        check_read(later, begun=10)
    with pytest.raises(ConfigError, match=r"^data\.segments\.1\.buckets .* after 11 steps, .*until_step: 11, "):
        check_read(later, begun=11)
    check_read(later, begun=20)


def test_pictures_that_a_start_has_ended_come_again_after_a_crash() -> None:
    """A run was given until_step: 950 by its metrics and killed. The checkpoint was of 900 steps, and whatever it had
    made since was too few."""
    path = ROOT / "configs" / "runs" / "demo.yaml"
    given = RunConfig.load(path, of_segments((950, "1x32x48"), (0, "9x32x48")))
    for begun in (0, 901, 949, 950):
        check_read(given, begun=begun, before=given.data, most=950)
    with pytest.raises(ConfigError, match=r"after 901 steps, by an entry with until_step: 901, "):
        check_read(given, begun=901, before=given.data, most=949)  # as by a version that began with pictures
    endless = RunConfig.load(path, of_segments((0, "1x32x48")))
    for before in (endless.data, RunConfig.load(path, of_segments((940, "1x32x48"), (0, "9x32x48"))).data):
        with pytest.raises(ConfigError, match=r"after 901 steps, by an entry with until_step: 901, "):
            check_read(given, begun=901, before=before, most=950)
    with pytest.raises(ConfigError, match=r"with until_step: 960, and .*\{until_step: 0, "):
        check_read(endless, begun=960, before=given.data, most=960)


def test_pictures_of_all_segments_are_taken_out_of_those_that_are_still_to_come() -> None:
    """`data.buckets` stay what a run has trained on."""
    path, first = ROOT / "configs" / "runs" / "demo.yaml", of_segments((0, "1x32x48"))[:-1]
    plain = RunConfig.load(path, first)
    with pytest.raises(ConfigError, match=r"buckets of more frames\.$"):
        check_read(plain)
    with pytest.raises(ConfigError, match=r"^data\.buckets .* until_step: 7, and .* \{until_step: 0, buckets"):
        check_read(plain, begun=7)
    check_read(RunConfig.load(path, [*first, f"data.segments=[{{until_step: 7}}, {CLIPS}]"]), begun=7)
    two = RunConfig.load(path, [*first, "data.segments=[{until_step: 7}, {until_step: 0, items_per_step: 1}]"])
    with pytest.raises(
        ConfigError, match=r"^data\.buckets .* Give data\.segments\.1 buckets of its own, of more frames"
    ):
        check_read(two, begun=7)


CLIPS = "{until_step: 0, buckets: {table: [9x32x48]}}"


@pytest.mark.parametrize("begin", [train, dry_run], ids=["train", "dry-run"])
def test_a_resume_after_its_pictures_is_not_refused_for_them(
    begin: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By checkpoints and by metrics: keepers may hold more than the newest checkpoint."""
    path = ROOT / "configs" / "runs" / "demo.yaml"
    given = [f"run.dir={tmp_path}", "run.name=x", *of_segments((10, "1x32x48"), (0, "9x32x48"))]
    folder = prepare_run_dir(RunConfig.load(path, [*given[:-1], "data.segments=[]"]))  # of pictures without end
    for module in ("app.run.launch", "app.plan.dry_run"):
        monkeypatch.setattr(f"{module}.check_installed", passed)
    refused = r"^data\.segments\.0\.buckets has buckets of one frame"
    for steps, why in ((0, refused), (9, r"after 9 steps, by an entry"), (10, r"^passed$")):
        if steps:
            (folder / "metrics.jsonl").write_text(f'{{"step": {steps - 1}}}\n')
        with pytest.raises(ConfigError, match=why):
            begin(path, given, resume=True)
    with pytest.raises(ConfigError, match=r"after 4 steps, by an entry"):
        begin(path, given, resume=True, back_to=4)
    with pytest.raises(ConfigError, match=refused):
        begin(path, given, overwrite=True)
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints" / "step-9").mkdir(parents=True)
    (folder / "checkpoints" / "step-9" / "COMPLETE").write_text('{"files": {}}')
    with pytest.raises(ConfigError, match=r"^passed$"):
        begin(path, given, resume=True)
    (folder / "checkpoints" / "step-9").rename(folder / "checkpoints" / "step-7")
    with pytest.raises(ConfigError, match=r"after 8 steps, by an entry"):
        begin(path, given, resume=True)
    save_config(config := RunConfig.load(path, given), folder)
    with pytest.raises(ConfigError, match=r"after 8 steps, by an entry"):
        begin(path, given, resume=True)
    (folder / "checkpoints" / "step-7").rename(folder / "checkpoints" / "step-9")
    note_most_steps(config)  # as a resume does
    (folder / "checkpoints" / "step-9").rename(folder / "checkpoints" / "step-7")
    note_most_steps(config)
    for back_to in (None, 4):
        with pytest.raises(ConfigError, match=r"^passed$"):
            begin(path, given, resume=True, back_to=back_to)


def passed(track: object) -> None:
    """In the place of what comes after the rules."""
    raise ConfigError("passed")


def test_noise_on_pictures_is_refused_without_pictures_and_with_cached_latents(tmp_path: Path) -> None:
    noise = "train: {picture_noise: {}}\n"
    with pytest.raises(
        ConfigError, match=r"train\.picture_noise is set, and the transformer of model\.dit makes clips from"
    ):
        load(tmp_path, noise)
    told = noise + "model: {dit: {first_frame: channels}}\n"
    assert load(tmp_path, told).train.picture_noise is not None
    with pytest.raises(ConfigError, match=r"data\.cache\.path .*cache would keep .* Set data\.cache\.latents: false"):
        load(tmp_path, told + "data: {cache: {path: cache}}\n")
    load(tmp_path, told + "data: {cache: {path: cache, latents: false}}\n")


def test_settings_of_a_flow_are_refused_where_diffusion_is_trained() -> None:
    path = ROOT / "configs" / "runs" / "cogvideox-tiny.yaml"
    with pytest.raises(ConfigError, match=r"train\.flow\.flow_shift is 5\.0, .* by diffusion, .* Leave it out"):
        RunConfig.load(path, ["train.flow.flow_shift=5.0"])
    with pytest.raises(ConfigError, match=r"train\.flow\.weighting_scheme is uniform, .* Leave it out"):
        RunConfig.load(path, ["train.flow.weighting_scheme=uniform"])
    with pytest.raises(
        ConfigError, match=r"sample\.flow_shift is 5, .* sampled by DDIM, which has none\. Leave it out"
    ):
        RunConfig.load(path, ["sample.flow_shift=5.0"])
    with pytest.raises(ConfigError, match=r"sample\.steps is 1001, .* DDIM, which has 1000 times\. Set it to 1000 or"):
        RunConfig.load(path, ["sample.steps=1001"])
    assert RunConfig.load(path, ["sample.steps=1000"]).sample.steps == 1000
    flow = ROOT / "configs" / "runs" / "flux-tiny.yaml"
    assert RunConfig.load(flow, ["sample.steps=1001"]).sample.steps == 1001


def test_a_shift_of_samples_is_refused_where_they_are_not_shifted() -> None:
    with pytest.raises(
        ConfigError, match=r"sample\.flow_shift is 5, .* without one, as its pipeline does\. Leave it out"
    ):
        RunConfig.load(ROOT / "configs" / "runs" / "ltx-13b-lora-80gb.yaml", ["sample.flow_shift=5.0"])
    with pytest.raises(ConfigError, match=r"sample\.flow_shift is 5, and sample\.timesteps are not shifted"):
        RunConfig.load(
            ROOT / "configs" / "runs" / "demo.yaml", ["sample.flow_shift=5.0", "sample.timesteps=[900, 500]"]
        )


def test_times_of_a_transformer_that_is_told_the_signal_are_those_of_its_weights() -> None:
    path = ROOT / "configs" / "runs" / "mochi-tiny.yaml"
    with pytest.raises(ConfigError, match=r"train\.flow\.num_train_timesteps is 500, .* signal of 1000\. Leave it out"):
        RunConfig.load(path, ["train.flow.num_train_timesteps=500"])
    assert RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", ["train.flow.num_train_timesteps=500"])


def test_a_folder_of_another_family_than_the_settings_name_is_noted(tmp_path: Path) -> None:
    plain = RunConfig.load(ROOT / "configs" / "runs" / "flux-tiny.yaml")
    folder = tmp_path / "transformer"
    folder.mkdir()
    fields = dit_json(resolve(plain.model)[0].dit)
    (folder / "config.json").write_text(json.dumps(fields))
    wan = replace(plain, model=replace(plain.model, dit=replace(ModelConfig().dit, path=str(tmp_path))))
    (said,) = [note for note in notes(wan) if "architecture" in note]
    assert "model.dit.architecture is wan" in said and said.endswith("Set model.dit.architecture: flux.")
    flux = replace(plain, model=replace(plain.model, dit=replace(plain.model.dit, path=str(tmp_path))))
    assert not any("architecture" in note for note in notes(flux))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_runs_count_the_padding_that_their_weights_need(path: Path) -> None:
    config = RunConfig.load(path)
    assert notes(config) == []
    assert config.data.batch.text_tokens >= config.model.text.pad_to


def test_a_missing_synthetic_set_is_made_where_its_shards_are_sought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SourceConfig(path=f"{tmp_path}/set/shards/{{00000..00003}}.tar", synthetic=True)
    make_missing([replace(source, synthetic=False)])
    assert not (tmp_path / "set").exists()
    make_missing([source])
    made = sorted(path.name for path in (tmp_path / "set" / "shards").glob("*.tar"))
    assert made == ["00000.tar", "00001.tar", "00002.tar", "00003.tar"]
    make_missing([source])
    assert capsys.readouterr().out.count("still images") == 1
    with pytest.raises(ValueError, match="synthetic"):
        SourceConfig(path="elsewhere", synthetic=True)


def test_a_synthetic_set_that_another_start_has_made_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        if folder.name == "set":
            (folder / "shards").mkdir(parents=True)
        raise ValueError(f"{folder} is not empty")

    monkeypatch.setattr("app.inputs.synthetic.synth", refused)
    make_missing([SourceConfig(path=f"{tmp_path}/set/shards/{{00000..00003}}.tar", synthetic=True)])
    with pytest.raises(ValueError, match="not empty"):
        make_missing([SourceConfig(path=f"{tmp_path}/other/shards/{{00000..00003}}.tar", synthetic=True)])


def test_an_interrupted_synthetic_set_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.tools import synthetic

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    config = synthetic.SynthConfig(clips=2, images=1, shards=1, frames=(5,))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(synthetic, "_write_koala", interrupted)
        synthetic.synthesize(tmp_path, config)
    assert not (tmp_path / "shards").exists() and not (tmp_path / "koala").exists()
    synthetic.synthesize(tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["koala", "shards"]
    assert len(list((tmp_path / "koala" / "videos").iterdir())) == 2


@pytest.mark.parametrize(
    ("segment", "named"),
    [
        ("batch: {exponent: 9}", "data.segments.0.batch.exponent 9.0 is outside 1..3"),
        ("batch: {recalibrate: on}", "Set data.segments.0.batch.target_s to its seconds"),
        ("buckets: {table: [2x3]}", "data.segments.0.buckets.table '2x3' is not"),
    ],
)
def test_a_rule_that_a_segment_breaks_names_the_segment(segment: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        RunConfig.load(
            ROOT / "configs/runs/demo.yaml", [f"data.segments=[{{until_step: 10, {segment}}}, {{until_step: 0}}]"]
        )
    assert "data.batch" not in str(caught.value)


def test_a_setting_of_another_model_family_is_refused_by_its_name() -> None:
    plain = ROOT / "configs" / "runs" / "demo.yaml"
    with pytest.raises(ConfigError, match=r"num_single_layers is a setting of architecture .*flux.*hunyuan.*is wan"):
        RunConfig.load(plain, ["model.dit.num_single_layers=2"])
    with pytest.raises(ConfigError, match=r"cross_attn_norm is a setting of architecture .*wan.*is hunyuan"):
        RunConfig.load(plain, ["model.dit.architecture=hunyuan", "model.dit.cross_attn_norm=false"])
    with pytest.raises(
        ConfigError,
        match=rf"is 'wam'.*expected one of {', '.join(FAMILIES)}; did you mean wan",
    ):
        RunConfig.load(plain, ["model.dit.architecture=wam"])


def test_a_config_of_version_0_1_lists_the_defaults_of_all_families() -> None:
    plain = ROOT / "configs" / "runs" / "demo.yaml"
    others = ["num_single_layers=0", "num_refiner_layers=2", "pooled_dim=0", "guidance_embeds=false", "rope_axes=null"]
    assert RunConfig.load(plain, [f"model.dit.{other}" for other in others]) == RunConfig.load(plain)
    hunyuan = RunConfig.load(plain, ["model.dit.architecture=hunyuan", "model.dit.num_single_layers=2"])
    assert isinstance(hunyuan.model.dit, HunyuanConfig)
    old = hunyuan.to_yaml().replace(
        "    architecture: hunyuan\n", "    architecture: hunyuan\n    cross_attn_norm: true\n"
    )
    assert RunConfig.from_yaml(old) == RunConfig.from_yaml(hunyuan.to_yaml()) == hunyuan


def test_prompts_of_a_run_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n\n  a blue square \n")
    config = load(tmp_path, f"sample: {{prompts: {tmp_path}/prompts.txt}}")
    assert config.sample.prompts == ("a red circle", "a blue square")
    assert RunConfig.from_yaml(config.to_yaml()) == config  # the run keeps them, whatever becomes of the file
    assert load(tmp_path, "", f"sample.prompts={tmp_path}/prompts.txt").sample == config.sample


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "No such file"), (b"\n \n", "has no prompt"), (b"\xff\xfe", "not UTF-8")]
)
def test_a_file_of_prompts_that_is_none_is_one_sentence(content: bytes | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(tmp_path, f"sample: {{prompts: {tmp_path}/prompts.txt}}")
    assert "sample.prompts" in str(caught.value) and "\n" not in str(caught.value)


def test_a_transformer_that_counts_in_seconds_asks_for_its_frame_rate_or_those_of_clips() -> None:
    counting = {name: rate for name, family in FAMILIES.items() if (rate := family.settings().clip_rate)}
    assert counting["ltx"] == 25 and counting["stdit3"] == 24
    for architecture, rate in counting.items():
        dit = f"{{architecture: {architecture}}}"
        text = f"run: {{name: t}}\nmodel: {{dit: {dit}}}\n"
        with pytest.raises(ConfigError, match=rf"data\.fps is 7, and the transformer .* at {rate:g} frames per second"):
            RunConfig.from_yaml(f"{text}data: {{fps: 7}}\n")
        assert RunConfig.from_yaml(text).data.fps == 0
        assert RunConfig.from_yaml(f"{text}data: {{fps: {rate:g}}}\n").model.dit.clip_rate == rate


OF_FOLDERS = {
    "train.flow.first_frame=0.5": "takes one time for all of a clip",
    "train.picture_noise={}": "makes clips from text alone",
    "sample.prompts=[a]": "sample.images is empty",
    "sample.images=[a.png]": "makes video from text alone",
    "data.buckets.table=[16x64x64]": "data.buckets.table 16x64x64: 16 frames",
    "data.buckets.table=[1x64x64, 17x64x64]": "data.buckets has buckets of one frame",
    "planner={sequence: ulysses, degrees: [3]}": "planner.degrees has 3, which does not divide the 2",
}


@pytest.mark.parametrize("begin", [train, dry_run], ids=["train", "dry-run"])
@pytest.mark.parametrize("setting", OF_FOLDERS)
def test_what_a_folder_says_is_refused_before_a_start(
    setting: str, begin: Callable[[Path, list[str]], object], tmp_path: Path
) -> None:
    """Rules about what the settings of a model from a folder leave to its config.json."""
    from_image = any(word in setting for word in ("prompts", "flow", "[1x"))
    image = {"first_frame": "channels", "in_channels": 12} if from_image else {}
    described = dit_json(small(WanConfig, **image))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(described))
    (tmp_path / "run.yaml").write_text(f"""
run: {{name: x, dir: {tmp_path}/runs}}
model:
  dit: {{path: {tmp_path}, first_frame: {"channels" if image else "none"}}}
  vae: {{kind: haar, channels: 4}}
  text: {{d_model: 24}}
data: {{sources: [{{path: "{tmp_path}/0.tar"}}], buckets: {{table: [17x64x64]}}}}
workers: {{device: cpu}}
""")
    more = ["sample.prompts=[a]"] if "images" in setting else []
    with pytest.raises(ConfigError, match=re.escape(OF_FOLDERS[setting])):
        begin(tmp_path / "run.yaml", [*more, setting])
    assert not (tmp_path / "runs").exists()


def test_runs_for_gpus_leave_decoding_to_the_machine() -> None:
    """A number that suits a cluster is too many processes, and more pixels than memory, on a desktop with one GPU."""
    for path in [one for one in RUNS if one.stem.endswith("gb")]:
        engine = RunConfig.load(path).data.engine
        assert (engine.decode_workers, engine.object_store_mb) == ("auto", "auto"), path.name
