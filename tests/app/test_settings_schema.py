"""configs/heddle.schema.json: what editors know of run files, which is what runs take."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from app.settings.config import RunConfig
from app.settings.schema import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for part in ("runs", "models", "data") for path in (CONFIGS / part).glob("*.yaml"))
SCHEMA = json_schema(RunConfig)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def mistakes(text: str) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(yaml.safe_load(text))]


def test_the_file_is_what_the_settings_say() -> None:
    assert json.loads((CONFIGS / "heddle.schema.json").read_text(encoding="utf-8")) == SCHEMA, (
        "write it anew: heddle settings --schema > configs/heddle.schema.json"
    )
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_have_no_mistakes(path: Path) -> None:
    assert mistakes(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {stpes: 3}", "$.train: Additional properties are not allowed ('stpes' was unexpected)"),
        ("train: {steps: many}", "$.train.steps: 'many' is not of type 'integer'"),
        ("train: {optimizer: {betas: [0.9]}}", "$.train.optimizer.betas: [0.9] is too short"),
        ("data: {buckets: {undersize: x}}", "$.data.buckets.undersize: 'x' is not one of ['drop', 'upscale']"),
        ("data: {sources: [{kind: webdatset}]}", "$.data.sources[0].kind: 'webdatset' is not one of ['auto', 'koala'"),
        ("model: {dit: {architecture: wann}}", "$.model.dit.architecture: 'wann' is not one of ['wan', 'cogvideox'"),
        ("data: {batch: {memory: 3}}", "$.data.batch: Additional properties are not allowed ('memory' was unexpected)"),
        ("data: {batch: often}", "$.data.batch: 'often' does not match '^auto$'"),
        (
            "data: {segments: [{batch: {exponent: p}}]}",
            "$.data.segments[0].batch.exponent: 'p' is not of type 'number'",
        ),
        ("sample: {forcing: {ar_stp: 5}}", "$.sample.forcing: Additional properties are not allowed ('ar_stp' was"),
        ("model: {dit: {attention: fast}}", "$.model.dit.attention: 'fast' is not valid under any"),
    ],
)
def test_mistakes_are_found(text: str, said: str) -> None:
    (found,) = mistakes(text)
    assert found.startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        "base: [a.yaml, b.yaml]",
        "base: a.yaml",
        "run: {name: 2024}",
        "data: {batch: auto}",
        "sample: {prompts: prompts.txt}",
        "model: {dit: {attention: attention.json}}",
        "model: {dit: {sample_size: 64}}",  # of Latte a number, of CogVideoX two
        "model: {dit: {sample_size: [60, 90]}}",
        "train: {tf32: on}",
        "train: {tf32: 'on'}",
        "snapshot: {every: 3}",
        "snapshot: {every: auto}",
        "planner: {profile: null}",
        "sample: {forcing: {ar_step: 5}}",
        "sample: {forcing: null}",
        "data: {segments: [{until_step: 0, batch: auto}]}",
        "data: {segments: [{until_step: 0, batch: null}]}",
    ],
)
def test_what_a_run_file_may_say_is_none(text: str) -> None:
    assert mistakes(text) == []


def test_settings_are_explained_where_they_are_written() -> None:
    steps = SCHEMA["properties"]["train"]["properties"]["steps"]  # type: ignore[index]
    assert steps == {"description": "Of the whole run, also after a resume.", "type": "integer", "default": 1000}
