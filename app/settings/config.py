"""The settings of one run: a YAML file, `--set a.b=c` overrides, and the rules between its sections.

    config = RunConfig.load("configs/runs/demo.yaml", ["train.steps=10"])
    folder = prepare_run_dir(config)               # refuses an existing directory, writes config.yaml

Each section is declared beside its owner (ops/config.py, ops/models/config.py, data/config.py, actors/config.py); this
file adds the two that belong to the program, `run` and `sample`, and checks what only both sides together can break.
Imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from actors.config import CheckpointConfig, PlannerConfig, SnapshotConfig, TrainConfig, WorkersConfig
from app.settings.files import override, read
from app.settings.prompts import with_prompts_of_file
from data.config import DataConfig
from ops.attention.names import CUDA_ONLY, FORWARD_ONLY_ON_CPU
from ops.models.config import ModelConfig, geometry
from ops.models.families import FAMILIES
from ops.models.folders import resolve
from ops.ranges import SEED, above, between, check_numbers
from ops.typed import ConfigError, Names, Node, as_plain, build, dotted_names, parse

MaybePath = TypeVar("MaybePath", str, str | None)

# Names that users bring from other trainers, and ours.
ELSEWHERE = {
    "pretrained_model_name_or_path": "model.dit.path",
    "model_path": "model.dit.path",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "resume_from_checkpoint": "the command line option --resume",
    "resume": "the command line option --resume",
    "checkpointing_steps": "checkpoint.every",
    "training_state_checkpointing_steps": "checkpoint.every",
    "ckpt_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "checkpoints_total_limit": "checkpoint.keep_last",
    "keep_n_latest": "checkpoint.keep_last",
    "max_train_steps": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "lr": "train.optimizer.learning_rate",
    "learning_rate": "train.optimizer.learning_rate",
    "lr_scheduler": "train.optimizer.lr_scheduler",
    "lr_warmup_steps": "train.optimizer.lr_warmup_steps",
    "warmup_steps": "train.optimizer.lr_warmup_steps",
    "max_grad_norm": "train.optimizer.max_grad_norm",
    "grad_clip": "train.optimizer.max_grad_norm",
    "weight_decay": "train.optimizer.weight_decay",
    "adam_eps": "train.optimizer.adam_eps",
    "ema_decay": "train.optimizer.ema_decay",
    "mixed_precision": "train.autocast",
    "seed": "train.seed",
    "gradient_checkpointing": "model.dit.gradient_checkpointing",
    "lora_rank": "model.dit.lora_rank",
    "lora_alpha": "model.dit.lora_alpha",
    "bucket_config": "data.buckets",
    "flow_shift": "train.flow.flow_shift",
    "weighting_scheme": "train.flow.weighting_scheme",
    "training_cfg_rate": "data.caption_dropout",
    "validation_prompts": "sample.prompts",
    "validation_steps": "sample.every",
    "num_inference_steps": "sample.steps",
    "guidance_scale": "sample.guidance_scale",
    "num_frames": "sample.frames",
    "sp_size": "planner.degrees",
    "ulysses_size": "planner.degrees",
    "ulysses_degree": "planner.degrees",
    "num_workers": "workers.max",
    "world_size": "workers.max",
    "report_to": "track",
    "log_with": "track",
}


TrackerName = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """Where a run writes: everything of it lies under `dir`/`name`."""

    name: str
    dir: str = "runs"

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or set("/\\") & set(self.name):
            raise ValueError(f"run.name {self.name!r} must be one plain folder name.")
        if "://" in self.dir:
            raise ValueError(f"run.dir {self.dir!r} is a URI; a run folder is a local or shared one. Give its path.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Pictures made during and after training, with the EMA weights where there are any."""

    prompts: tuple[str, ...] = ()  # or a text file with one on each line
    images: tuple[str, ...] = ()  # image to video: the first frame for each prompt, or one for all
    every: int = 0  # steps between samples during training, a multiple of checkpoint.every; 0: only when asked
    steps: int = 20  # Euler steps of the sampler
    guidance_scale: float = 3.0  # 1 switches classifier-free guidance off
    frames: int = 17
    height: int = 64
    width: int = 64
    fps: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"sample.steps {self.steps} must be at least 1.")
        if min(self.frames, self.height, self.width) < 1 or self.fps <= 0:
            raise ValueError(
                f"sample.frames {self.frames}, height {self.height}, width {self.width}, fps {self.fps} "
                f"must be positive."
            )
        if len(self.images) not in (0, 1, len(self.prompts)):
            raise ValueError(
                f"sample.images names {len(self.images)} pictures for {len(self.prompts)} prompts; give one for each, "
                f"or one for all."
            )
        check_numbers(
            "sample",
            self,
            every=between(0),
            steps=between(1, 100_000),
            guidance_scale=between(0, 1e6),
            frames=between(1, 100_000),
            height=between(1, 1 << 16),
            width=between(1, 1 << 16),
            fps=above(0, 1000),
            seed=between(0, SEED),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every setting of a run, resolved. Made here, read by the controller, the data layer and the commands."""

    run: RunSection
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    track: tuple[TrackerName, ...] = ("tensorboard",)  # where curves go besides metrics.jsonl

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read, merge the files under `base:`, apply `key=value` overrides, check. Raises ConfigError."""
        return cls._of(with_prompts_of_file(override(read(path), overrides)))

    @classmethod
    def from_yaml(cls, text: str) -> RunConfig:
        """The inverse of `to_yaml`. Raises ConfigError."""
        return cls._of(parse(text))

    @classmethod
    def _of(cls, node: Node) -> RunConfig:
        config = build(cls, node, names())
        check(config)
        return config

    def to_yaml(self) -> str:
        """The resolved config; loading it again gives an equal RunConfig."""
        return yaml.safe_dump(as_plain(self), sort_keys=False, allow_unicode=True, width=120)


def from_here(config: RunConfig) -> RunConfig:
    """The same with local paths made absolute: processes of other nodes, and of a cluster that was started elsewhere,
    have other working directories and homes."""
    model, data, planner = config.model, config.data, config.planner
    sources = tuple(
        replace(s, path=_absolute(s.path), media=_absolute(s.media), index=_absolute(s.index)) for s in data.sources
    )
    return replace(
        config,
        run=replace(config.run, dir=_absolute(config.run.dir)),
        model=replace(
            model,
            dit=replace(model.dit, path=_absolute(model.dit.path), lora_from=_absolute(model.dit.lora_from)),
            vae=replace(model.vae, path=_absolute(model.vae.path)),
            text=replace(model.text, path=_absolute(model.text.path)),
            image=replace(model.image, path=_absolute(model.image.path)) if model.image else None,
        ),
        data=replace(data, sources=sources, cache=replace(data.cache, path=_absolute(data.cache.path))),
        planner=replace(planner, profile=_absolute(planner.profile)),
        sample=replace(config.sample, images=tuple(_absolute(image) for image in config.sample.images)),
    )


def _absolute(path: MaybePath) -> MaybePath:
    """Every part of a `::` list; URIs and nothing at all stay what they are."""
    if path is None:
        return path
    return "::".join(
        part if not part or "://" in part else os.path.abspath(os.path.expanduser(part)) for part in path.split("::")
    )


def names() -> Names:
    """Every key of a run config, and what other programs call them."""
    return Names(known=tuple(dotted_names(RunConfig)), elsewhere=ELSEWHERE)


def check(config: RunConfig) -> None:
    """The rules between two sections. Raises ConfigError for the first that does not hold."""
    _check_frame_rate(config)
    _check_degrees(config)
    _check_schedule(config)
    _check_buckets(config)
    _check_sample(config)
    _check_attention(config)
    _check_memory(config)


def notes(config: RunConfig) -> list[str]:
    """What is legal but rarely meant, a sentence each; shown before a run and by its dry run."""
    model = config.model
    found = _unused_numbers(config)
    if config.data.batch.target_s and not config.planner.profile:
        found.append(
            "data.batch.target_s sizes batches by times from FLOPs alone: without planner.profile no device "
            "was measured; `heddle profile` does it."
        )
    return found + FAMILIES[model.dit.architecture].notes(model.dit.path, model.text.pad_to)


def _unused_numbers(config: RunConfig) -> list[str]:
    """Settings of the transformer that its folder overrules."""
    dit = config.model.dit
    if not dit.path:
        return []
    try:
        true = resolve(config.model)[0].dit
    except (OSError, ValueError):  # the start refuses such a folder with the reason
        return []
    usual, own = ModelConfig().dit, FAMILIES[dit.architecture].settings()
    unused = []
    for name in (setting.name for setting in fields(dit) if setting.name != "path"):
        value = getattr(dit, name)
        if value not in (getattr(usual, name, getattr(own, name)), getattr(true, name, value)):
            unused.append(name)
    return [
        f"model.dit.{name} {getattr(dit, name)} is not used: {dit.path} has {getattr(true, name)}." for name in unused
    ]


def _check_frame_rate(config: RunConfig) -> None:
    rate, fps = config.model.dit.clip_rate, config.data.fps
    if rate is not None and fps != rate:
        raise ConfigError(
            f"data.fps is {fps:g}, and the transformer of model.dit counts its positions in seconds, at {rate:g} "
            f"frames per second. Set data.fps and model.dit.frame_rate to the same rate."
        )


def _check_degrees(config: RunConfig) -> None:
    dit, planner = config.model.dit, config.planner
    legal = [degree for degree in range(1, dit.num_heads + 1) if dit.num_heads % degree == 0]
    wanted = {"planner.static_degree": (planner.static_degree,), "planner.degrees": planner.degrees}
    for key, degrees in wanted.items():
        for degree in degrees:
            if degree < 1 or (dit.path is None and degree not in legal):
                raise ConfigError(
                    f"{key} has {degree}, which does not divide the {dit.num_heads} attention heads of "
                    f"model.dit; legal degrees are {', '.join(map(str, legal))}."
                )
    if planner.strategy == "static" and planner.static_degree > config.workers.max:
        raise ConfigError(
            f"planner.static_degree {planner.static_degree} needs as many workers; workers.max is "
            f"{config.workers.max}. Raise workers.max or lower the degree."
        )


def _check_schedule(config: RunConfig) -> None:
    train = config.train
    if train.optimizer.lr_warmup_steps > train.steps:
        raise ConfigError(
            f"train.optimizer.lr_warmup_steps {train.optimizer.lr_warmup_steps} is longer than the run "
            f"of train.steps {train.steps}; shorten the warm-up."
        )


def _check_sample(config: RunConfig) -> None:
    sample, dit = config.sample, config.model.dit
    if dit.path is None and sample.prompts and dit.starts_from_image and not sample.images:
        raise ConfigError(
            "sample.images is empty, and the transformer of model.dit starts from a picture; give one for each of "
            "sample.prompts, or one for all."
        )
    flow = config.train.flow
    if dit.path is None and flow.first_frame and not dit.frame_times:
        raise ConfigError(
            f"train.flow.first_frame is {flow.first_frame:g}, and the transformer of model.dit takes one time for all "
            f"of a clip; set it to 0."
        )
    if dit.path is None and sample.images and not (dit.starts_from_image or flow.first_frame):
        raise ConfigError("sample.images is given, but model.dit makes video from text alone; leave it out.")
    if not sample.prompts:
        if sample.every:
            raise ConfigError(
                f"sample.every is {sample.every} but sample.prompts is empty; give at least one prompt "
                f"or set sample.every: 0."
            )
        return
    if sample.every and config.checkpoint.every == 0:
        raise ConfigError(
            f"checkpoint.every is 0, so checkpoints are made at the end only, but sample.every "
            f"{sample.every} makes samples from checkpoints. Set checkpoint.every to a divisor of "
            f"{sample.every}, or sample.every: 0."
        )
    if sample.every and sample.every % config.checkpoint.every:
        raise ConfigError(
            f"sample.every {sample.every} must be a multiple of checkpoint.every "
            f"{config.checkpoint.every}: samples are made from checkpoints."
        )
    if config.model.vae.kind != "haar" or config.model.dit.path is not None:
        return  # the strides are known once the folders are read
    try:
        geometry(config.model).token_grid(sample.frames, sample.height, sample.width)
    except ValueError as error:
        raise ConfigError(f"sample.frames/height/width cannot be generated: {error}") from None


def _check_attention(config: RunConfig) -> None:
    """What is wrong on every machine; what this worker's device lacks, the worker says when it starts."""
    name, train = config.model.dit.attention, config.train
    if config.workers.device == "cpu" and name in CUDA_ONLY + FORWARD_ONLY_ON_CPU:
        raise ConfigError(
            f"model.dit.attention {name} cannot train on workers.device cpu. Use auto or sdpa, or workers on cuda."
        )
    if name in CUDA_ONLY and train.autocast == "none" and train.parameter_dtype == "float32":
        raise ConfigError(
            f"model.dit.attention {name} takes bfloat16 and float16; train.autocast is none and train.parameter_dtype "
            f"float32. Set train.autocast: bfloat16, or attention: auto."
        )


def _check_memory(config: RunConfig) -> None:
    if config.workers.device == "cuda" and config.train.memory.gradients == "node":
        raise ConfigError(
            "train.memory.gradients node is memory that CPU workers share; workers.device is cuda. Set gradients to "
            "auto or own."
        )


def _check_buckets(config: RunConfig) -> None:
    if config.model.vae.kind != "haar" or config.model.dit.path is not None:
        return  # the strides are known once the folders are read
    tables = [config.data.buckets, *(segment.buckets for segment in config.data.segments if segment.buckets)]
    for shape in (shape for buckets in tables for shape in buckets.table):
        frames, height, width = map(int, shape.split("x"))
        try:
            geometry(config.model).token_grid(frames, height, width)
        except ValueError as error:
            raise ConfigError(f"data.buckets.table {shape}: {error}") from None


def run_dir(config: RunConfig) -> Path:
    """The folder of this run."""
    return Path(config.run.dir) / config.run.name


def check_run_dir(config: RunConfig, resume: bool = False, overwrite: bool = False) -> Path:
    """The run's folder. An existing one needs `resume` or `overwrite`, else ConfigError.

    Only a folder that looks like a run (it has a config.yaml) or is empty is ever overwritten.
    """
    folder = run_dir(config)
    check_place(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run directory {folder} is a file; choose another run.name.")
    occupied = folder.is_dir() and any(folder.iterdir())
    if occupied and resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one.")
    if occupied and not (resume or overwrite):
        raise ConfigError(
            f"run directory {folder} already exists; continue it with --resume, start again with "
            f"--overwrite, or choose another run.name."
        )
    if occupied and not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"run directory {folder} holds files but no config.yaml, so it is not a run; choose another run.name."
        )
    return folder


def check_place(folder: Path) -> None:
    """Raises ConfigError when a file stands where a folder above the run's is needed."""
    for parent in folder.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"run directory {folder} cannot be made: {parent} is a file; choose another run.dir.")


def prepare_run_dir(config: RunConfig, resume: bool = False, overwrite: bool = False) -> Path:
    """Make the run's folder, empty with `overwrite`, and save the resolved config in it. Raises as check_run_dir."""
    folder = check_run_dir(config, resume, overwrite)
    if overwrite and folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(_true_numbers(config) + config.to_yaml(), encoding="utf-8")
    return folder


def _true_numbers(config: RunConfig) -> str:
    """Comment lines for config.yaml: numbers of the model that its folders or its other parts decide, where the setting
    says another one. The settings stay as they are, since a resumed run is compared by them."""
    model = config.model
    try:
        resolved = resolve(model)[0]
    except (OSError, ValueError):  # the start refuses such a folder with the reason
        return ""
    said, true = (dict(_leaves(as_plain(m), "model")) for m in (model, resolved))
    found = [f"#   {name}: {value}" for name, value in true.items() if said.get(name) != value]
    if not found:
        return ""
    head = "# What the folders and other parts of the model decide; what is written for these below is not used."
    return "\n".join([head, *found, ""])


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every setting below a node of plain values, with its dotted name."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, f"{path}.{key}")
    else:
        yield path, node
