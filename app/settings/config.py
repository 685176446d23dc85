"""The settings of one run: a YAML file, `--set a.b=c` overrides, and the rules between its sections.

    config = RunConfig.load("configs/runs/demo.yaml", ["train.steps=10"])
    folder = prepare_run_dir(config)     # app/settings/run_folder.py: refuses an existing one, writes config.yaml

Each section is declared beside its owner (ops/config.py, ops/models/config.py, data/config.py, actors/config.py); this
room adds those that belong to the program, `run`, `sample` and `validation` (`sections`), and checks what two sections
can break only together (`rules`). Imports neither torch nor Ray.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import yaml

from actors.config import CheckpointConfig, PlannerConfig, SnapshotConfig, TrainConfig, WorkersConfig
from app.settings.attention_table import with_attention_table
from app.settings.elsewhere import DONE_OTHERWISE, ELSEWHERE, VALUES, WORDS
from app.settings.files import changed_at, override, read
from app.settings.prompt_line import with_pictures
from app.settings.prompts import with_prompts_of_file
from app.settings.rules import (
    check_attention,
    check_buckets,
    check_cache,
    check_degrees,
    check_experts,
    check_first,
    check_flow,
    check_frame_rate,
    check_images,
    check_levels,
    check_memory,
    check_more_than_first,
    check_pictures,
    check_places,
    check_prompts,
    check_sample,
    check_schedule,
    check_validation,
)
from app.settings.sections import RunSection, SampleConfig, TrackerName, ValidationConfig
from app.settings.written_by import explained, header
from data.config import BucketsConfig, DataConfig, SourceConfig
from ops.config import USUAL_OF_KIND
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import Names, Node, as_plain, build, dotted_names, node_of, parse

MaybePath = TypeVar("MaybePath", str, str | None)
_KINDS = {"buckets": BucketsConfig.KINDS}  # sections of which a later file may give another kind
_JOINED = frozenset({"caption_prefix"})  # texts that stand before another


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every setting of a run, resolved.

    Made here, read by the controller, the data layer and the commands.
    """

    run: RunSection
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    track: tuple[TrackerName, ...] = ("tensorboard", "ray")  # where curves go besides metrics.jsonl

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read, merge the files under `base:`, apply `key=value` overrides, check. Raises ConfigError."""
        node = with_attention_table(with_prompts_of_file(override(read(path, _KINDS), overrides, _KINDS, _JOINED)))
        with explained(Path(path).read_text(encoding="utf-8")):
            return cls._of(node)

    @classmethod
    def from_yaml(cls, text: str) -> RunConfig:
        """The inverse of `to_yaml`. Raises ConfigError."""
        with explained(text):
            return cls._of(parse(text))

    @classmethod
    def _of(cls, node: Node) -> RunConfig:
        config = build(cls, changed_at(node, ["train", "optimizer"], _with_usual_of_kind), names())
        check(config)
        return config

    def to_yaml(self) -> str:
        """The resolved config; loading it again gives an equal RunConfig."""
        return header() + yaml.safe_dump(as_plain(self), sort_keys=False, allow_unicode=True, width=120)


def _with_usual_of_kind(optimizer: Node) -> Node:
    """With what its `kind` takes by default, for settings that it does not give."""
    if not isinstance(optimizer.value, dict) or "kind" not in optimizer.value:
        return optimizer
    kind = optimizer.value["kind"].value
    usual = USUAL_OF_KIND.get(kind, {}) if isinstance(kind, str) else {}
    return Node({**{name: node_of(value) for name, value in usual.items()}, **optimizer.value}, optimizer.where)


def names() -> Names:
    """Every key of a run config, what other programs call them, and what they have besides."""
    known = dotted_names(RunConfig)
    return Names(known=known, elsewhere=ELSEWHERE, done_otherwise=DONE_OTHERWISE, values=VALUES, words=WORDS)


def check_read(config: RunConfig, begun: int = 0, before: DataConfig | None = None, most: int = 0) -> None:
    """The rules between two sections, with what the folders of the model say of it, and those that hold before a start
    alone. Earlier starts have made `begun` steps, the last one had the data section `before`, and the run has once had
    `most` steps. Raises ConfigError for the first rule that does not hold. A folder that cannot be read is passed over
    here, and refused where it is loaded."""
    from ops.models.folders import resolve

    model, read = config.model, None
    try:
        model, read = resolve(config.model)
    except (OSError, ValueError):
        pass  # what the settings say is checked all the same
    else:
        check(replace(config, model=model), read)
    check_prompts(config.sample, model, config.train.flow, read)
    check_more_than_first(model, config.data, begun, before, most)


def check(config: RunConfig, read: Geometry | None = None) -> None:
    """The rules between two sections, of a model whose folders have been `read` or not. Raises ConfigError for the
    first that does not hold."""
    check_places(config.model, config.train, config.workers, config.planner, config.sample)
    check_frame_rate(config.model, config.data, config.sample)
    check_images(config.model, config.data, config.sample)
    check_degrees(config.model, config.planner, config.workers, read)
    check_schedule(config.train)
    check_first(config.model, config.train)
    check_buckets(config.data, config.model, read)
    check_flow(config.model, config.train.flow, read)
    check_pictures(config.train, config.model, config.data, read)
    check_cache(config.data, config.model, config.sample)
    check_levels(config.model, config.train.flow, read)
    check_sample(config.sample, config.checkpoint, config.model, config.train.flow, read)
    check_validation(config.validation, config.checkpoint, config.data)
    check_attention(config.model, config.train, config.workers)
    check_experts(config.model, config.train)
    check_memory(config.train, config.workers, config.model)


def from_here(config: RunConfig) -> RunConfig:
    """The same config with absolute local paths: processes on other nodes, or of a cluster that was started elsewhere,
    have other working directories and homes."""
    model, data, planner = config.model, config.data, config.planner
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
        data=replace(
            data, sources=_sources_from_here(data.sources), cache=replace(data.cache, path=_absolute(data.cache.path))
        ),
        train=replace(config.train, init_from=_absolute(config.train.init_from)),
        workers=replace(config.workers, cluster=_absolute_file(config.workers.cluster)),
        planner=replace(planner, profile=_absolute(planner.profile)),
        sample=replace(
            config.sample,
            prompts=tuple(with_pictures(prompt, _absolute) for prompt in config.sample.prompts),
            images=tuple(_absolute(image) for image in config.sample.images),
            last_images=tuple(_absolute(image) for image in config.sample.last_images),
        ),
        validation=replace(config.validation, sources=_sources_from_here(config.validation.sources)),
    )


def _sources_from_here(sources: Sequence[SourceConfig]) -> tuple[SourceConfig, ...]:
    return tuple(
        replace(one, path=_absolute(one.path), media=_absolute(one.media), index=_absolute(one.index))
        for one in sources
    )


def _absolute_file(spec: str) -> str:
    """A YAML file's absolute path; other values, such as 2x8, as they are."""
    return os.path.abspath(os.path.expanduser(spec)) if spec.endswith((".yaml", ".yml")) else spec


def _absolute(path: MaybePath) -> MaybePath:
    """Every part of a `::` list made absolute; URIs and empty paths stay as they are."""
    if path is None:
        return path
    return "::".join(
        part if not part or "://" in part else os.path.abspath(os.path.expanduser(part)) for part in path.split("::")
    )
