"""Every number of a run's config, set to what nobody means: accepted and usable, or refused in one sentence."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

from actors.outcome import Exit
from app.settings.config import RunConfig
from app.settings.errors import exit_code, is_ours
from app.settings.files import override
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError, build, parse

BAD = ("-1", "-2.5", "0", ".nan", ".inf", "-.inf", "1" + 30 * "0", "1e300", "many", "[1, x]", "true", "null")
SIGNED = {"train.flow.logit_mean", "train.flow.mode_scale", "train.flow.token_shift.base", "train.flow.token_shift.max"}
OPTIONAL = {
    *("model.dit.rope_axes", "sample.guidance_scale_2", "sample.flow_shift", "sample.decode_noise_scale"),
    "train.flow.max_timestep",
}
OF_HUNYUAN = {f"model.dit.{f.name}" for f in dataclasses.fields(HunyuanConfig)} - {
    f"model.dit.{f.name}" for f in dataclasses.fields(WanConfig)
}


def numeric(kind: Any, path: str) -> Iterator[tuple[str, int]]:
    """(path, length of the list: 0 for a plain number, -1 for any length) of each number below a type."""
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    if typing.get_origin(kind) in (typing.Union, UnionType) and len(args) == 1:
        yield from numeric(args[0], path)
    elif kind in (int, float):
        yield path, 0
    elif typing.get_origin(kind) in (typing.Union, UnionType):  # one of several, told apart by a tag
        yield from dict(found for arg in args for found in numeric(arg, path)).items()
    elif dataclasses.is_dataclass(kind):
        for name, inner in typing.get_type_hints(kind).items():
            yield from numeric(inner, f"{path}.{name}" if path else name)
    elif typing.get_origin(kind) is tuple and args[0] in (int, float):
        yield path, -1 if args[-1] is Ellipsis else len(args)
    elif typing.get_origin(kind) is tuple and dataclasses.is_dataclass(args[0]):
        yield from numeric(args[0], f"{path}.0")


FIELDS = list(numeric(RunConfig, ""))


BASE = parse(
    "run: {name: t}\ndata: {sources: [{path: a.tar}], segments: [{until_step: 0, batch: {}, "
    "buckets: {table: [1x64x96]}}], buckets: {table: [1x64x96, 17x64x96]}}\nsample: {prompts: [a]}"
)


def config_with(path: str, value: str) -> RunConfig:
    assignments = [f"{path}={value}"]
    if path in OF_HUNYUAN:
        assignments.append("model.dit.architecture=hunyuan")
    return build(RunConfig, override(BASE, assignments))


def use(config: RunConfig, builds: bool) -> None:
    """What comes before any worker: shapes, weights, batches. Raises what the commands would show."""
    from app.inputs.items import batches_of, items_from_buckets
    from app.inputs.profiles import profile_of
    from app.plan.preview import preview_options
    from app.settings.config import check
    from app.settings.notes import notes
    from ops.models.folders import resolve
    from ops.models.load import num_trained

    check(config)
    notes(config)
    model, geometry = resolve(config.model)
    if builds and model.dit.num_layers <= 8:
        num_trained(model.dit)
    profile = profile_of(config, model, geometry)
    items_from_buckets(config, model, batches_of(config, geometry, profile), 1, 0)
    preview_options(config, 0.0)


def test_the_walk_sees_every_section() -> None:
    found = dict(FIELDS)
    assert len(found) > 90
    assert found["model.dit.lora_rank"] == 0 and found["train.optimizer.betas"] == 2
    assert "data.segments.0.batch.exponent" in found and "data.sources.0.weight" in found


@pytest.mark.parametrize(("path", "length"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_number_that_nobody_means_is_refused_or_usable(path: str, length: int) -> None:
    for value in BAD:
        text = value if length == 0 else f"[{', '.join([value] * max(length, 1))}]"
        try:
            use(config_with(path, text), path.startswith("model."))
        except Exception as error:
            assert is_ours(error) and exit_code(error) in (Exit.USAGE, Exit.PLAN), f"{path}={text}: {error!r}"
            assert "\n" not in str(error) and len(str(error)) < 400, f"{path}={text}: {error}"
        else:
            assert value == "0" or (value[0] == "-" and path in SIGNED) or (value == "null" and path in OPTIONAL), (
                f"{path}={text} was accepted"
            )


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    {
        "model.dit.lora_rank=-2": "model.dit.lora_rank is -2; it must be at least 0",
        "model.dit.lora_rank=.nan": "model.dit.lora_rank is nan (--set); expected a whole number.",
        "train.optimizer.betas=[0.9, 1.0]": "train.optimizer.betas [0.9, 1.0] must lie in [0, 1)",
        "workers.suspect_s=.inf": "workers.suspect_s is inf (--set); expected a finite number.",
        "train.seed=-1": "train.seed is -1; it must be at least 0",
        "data.limits.retries=-1": "data.limits.retries is -1; it must be at least 0",
    }.items(),
)
def test_the_sentence_gives_key_value_and_rule(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(*assignment.split("=", 1))
    assert sentence in str(caught.value)


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert config_with("train.steps", "1e6").train.steps == 1_000_000


@pytest.mark.parametrize(
    ("text", "sentence"),
    {
        "train: {optimizer: {name: adam}}": "train.optimizer has adam_eps",
        "checkpoint: {every: 0}\nsample: {prompts: [a], every: 5}": (
            "checkpoint.every is 0, so checkpoints are made at the end only"
        ),
    }.items(),
)
def test_advice_is_about_the_key_that_was_written(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: t}}\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(file)
    assert sentence in str(caught.value)
