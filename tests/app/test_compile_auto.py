"""`model.dit.compile: auto`: measured both ways by `heddle profile`, decided as a run begins, kept by its resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from actors.plan.costs.compiling import LEAST_GAIN, BothWays, CompilingPoint
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from actors.plan.types import Module, PlanError
from actors.planning.learned import setting_of
from app.device.bench import Bench
from app.device.both_ways import measured_both_ways
from app.device.points import PointTimes, ProfiledShape
from app.device.profile import run_profile
from app.inputs.compiling import with_compiling
from app.inputs.profiles import profile_of
from app.plan.dry_run import dry_run
from app.settings.config import RunConfig
from app.settings.resume import check_resume
from app.settings.run_folder import prepare_run_dir
from data.types import Bucket
from ops.models.config import ModelConfig
from ops.models.folders import resolve
from ops.typed import ConfigError

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
TORCH = torch.__version__.partition("+")[0]
AUTO = "model.dit.compile=auto"
TINY = ["data.buckets.table=[1x32x32, 5x32x48]", "data.batch.max_batch=3", "model.dit.num_layers=1", AUTO]
QUICK, SLOW = 1 - 2 * LEAST_GAIN, 1 - LEAST_GAIN / 2  # seconds of compiled blocks, of blocks as written 1


def both(*compiled: float, version: str = TORCH) -> BothWays:
    points = [
        CompilingPoint(batch=1, frames=1 + 4 * n, height=32, width=48, as_written_s=1.0, compiled_s=seconds)
        for n, seconds in enumerate(compiled)
    ]
    return BothWays(torch=version, points=tuple(points))


def profile_file(folder: Path, found: BothWays | None, *overrides: str) -> Path:
    """A profile as `heddle profile` leaves it: by FLOPs in place of measurements, of the way that was faster."""
    config = RunConfig.load(DEMO, [*overrides, f"model.dit.compile={json.dumps(found is not None and found.compiled)}"])
    model, geometry = resolve(config.model)
    profile = profile_of(config, model, geometry)
    profile.measure(("dit", 1, 9, 32, 48, 1), 0.1)
    profile.setting, profile.both_ways = setting_of(model, "cpu", config.train), found
    write_profile(profile, folder / "p.json")
    return folder / "p.json"


def load(folder: Path, *overrides: str) -> RunConfig:
    return RunConfig.load(DEMO, [f"run.dir={folder}", "run.name=one", AUTO, *overrides])


@pytest.mark.parametrize(("found", "taken"), [(both(QUICK, QUICK), True), (both(QUICK, 1.0, SLOW), False)])
def test_all_points_together_decide(found: BothWays, taken: bool, tmp_path: Path) -> None:
    path = profile_file(tmp_path, found)
    assert read_profile(path).both_ways == found
    config, why = with_compiling(load(tmp_path, f"planner.profile={path}"))
    assert config.model.dit.compile is taken
    assert why.startswith(f"model.dit.compile: auto is {str(taken).lower()}: {len(found.points)} cascades took")
    model, geometry = resolve(config.model)
    assert profile_of(config, model, geometry).measured  # of the way that was taken


def test_other_settings_are_left_alone(tmp_path: Path) -> None:
    config = load(tmp_path, "model.dit.compile=true")
    assert with_compiling(config) == (config, "")


REASONS: dict[str, tuple[list[str], BothWays | None, str]] = {
    "no profile": (["planner.profile=null"], both(QUICK), "there is no planner.profile"),
    "nothing measured": ([], None, "does not say how long cascades take both ways"),
    "another torch": ([], both(QUICK, version="1.0"), f"by torch 1.0, and this is torch {TORCH}"),
    "counted operators": (["workers.memory_gib=4"], both(QUICK), "every operator is counted"),
    "fetched weights": (
        ["train.memory.parameters=node", "model.dit.gradient_checkpointing=true"],
        both(QUICK),
        "run as written",
    ),
    "a family that does not compile": (
        ["model.dit.architecture=latte", "train.flow.flow_shift=3.0"],
        both(QUICK),
        "blocks of architecture latte are not compiled",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_blocks_run_as_written_for_a_reason_that_is_said(name: str, tmp_path: Path) -> None:
    overrides, found, said = REASONS[name]
    path = profile_file(tmp_path, found)
    config, why = with_compiling(load(tmp_path, f"planner.profile={path}", *overrides))
    assert config.model.dit.compile is False
    assert why.startswith("model.dit.compile: auto is false: ") and said in why


def test_a_resume_keeps_what_the_run_began_with(tmp_path: Path) -> None:
    """Whatever its profile says by then."""
    path = profile_file(tmp_path, both(QUICK))
    began, _ = with_compiling(load(tmp_path, f"planner.profile={path}"))
    folder = prepare_run_dir(began)
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["dit"]["compile"] is True
    (folder / "metrics.jsonl").write_text('{"step": 9}\n')
    profile_file(tmp_path, both(2.0))
    resumed, why = with_compiling(load(tmp_path, f"planner.profile={path}"), folder)
    assert resumed == began and "auto is true, as the run began" in why
    assert check_resume(resumed, folder) == []
    fresh, _ = with_compiling(load(tmp_path, f"planner.profile={path}"), tmp_path / "none")
    assert fresh.model.dit.compile is False


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = profile_file(tmp_path, both(QUICK), "model.dit.num_layers=3")
    with pytest.raises(ConfigError, match=r"p\.json is of model 'wan 3x128'; this run has 'wan 2x128'"):
        dry_run(DEMO, [f"run.dir={tmp_path}", AUTO, f"planner.profile={path}"])


def test_seconds_of_a_gpu_say_nothing_of_a_cpu(tmp_path: Path) -> None:
    plain = json.loads(profile_file(tmp_path, both(QUICK)).read_text())
    plain["setting"]["device"] = "NVIDIA H100"
    (tmp_path / "p.json").write_text(json.dumps(plain))
    config, why = with_compiling(load(tmp_path, "workers.device=cpu", f"planner.profile={tmp_path / 'p.json'}"))
    assert config.model.dit.compile is False and "is of device NVIDIA H100, and workers compute on cpu" in why


MISTAKES: dict[str, tuple[Callable[[dict[str, list[dict[str, float]]]], object], str]] = {
    "no points": (lambda ways: ways["points"].clear(), "both_ways has no points; leave it out"),
    "no seconds": (lambda ways: ways["points"][0].update(compiled_s=0.0), "compiled_s"),
    "no torch": (lambda ways: ways.pop("torch"), "torch is missing"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_damaged_entry_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    change, said = MISTAKES[name]
    plain = json.loads(profile_file(tmp_path, both(QUICK)).read_text())
    change(plain["both_ways"])
    with pytest.raises(PlanError, match=said):
        read_profile(plain)


class Timed:
    """A bench whose seconds are known; `largest` runs out of memory as written."""

    device = torch.device("cpu")

    def __init__(self, model: ModelConfig, compiled: bool, asked: list[tuple[bool, int]]) -> None:
        self.model, self._compiled, self._asked = model, compiled, asked

    def measure(self, module: Module, shape: ProfiledShape, repeats: int) -> PointTimes:
        assert module == "dit" and repeats == 3
        self._asked.append((self._compiled, shape.batch))
        if shape.batch == 9:
            raise MemoryError
        seconds = shape.batch * (0.5 if self._compiled else 1.0)
        return PointTimes(seconds=(3 * seconds, seconds, 2 * seconds))

    def update(self, repeats: int) -> PointTimes:
        raise NotImplementedError

    def rest(self) -> None:
        self._asked.append((self._compiled, 0))


def shapes_with(*batches: int) -> list[ProfiledShape]:
    return [ProfiledShape(batch=batch, bucket=Bucket(1, 32, 32), text_tokens=4) for batch in batches]


def test_one_model_at_a_time_is_timed_and_its_shortest_runs_count() -> None:
    asked: list[tuple[bool, int]] = []
    model = RunConfig.load(DEMO).model
    found = measured_both_ways(lambda compiled: Timed(model, compiled, asked), shapes_with(1, 9, 2), 1)
    assert asked == [(False, 1), (False, 9), (False, 2), (False, 0), (True, 1), (True, 2), (True, 0)]
    assert found is not None and found.torch == TORCH and found.gain == 0.5
    assert [(one.batch, one.as_written_s, one.compiled_s) for one in found.points] == [(1, 1.0, 0.5), (2, 2.0, 1.0)]
    assert measured_both_ways(lambda compiled: Timed(model, compiled, asked), shapes_with(9), 1) is None


@pytest.mark.parametrize("faster", [True, False])
def test_a_profile_is_measured_the_faster_way_and_continued_by_it(
    faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of the profile are not compiled here: which they would be is what the file says of them."""
    seconds = both(QUICK if faster else 2.0)
    calls: list[Sequence[ProfiledShape]] = []

    def measured(bench_of: object, shapes: Sequence[ProfiledShape], repeats: int) -> BothWays:
        calls.append(shapes)
        return seconds

    monkeypatch.setattr("app.device.both_ways.measured_both_ways", measured)
    monkeypatch.setattr("ops.packed.compiled_blocks.check_compiler", lambda device: None)
    monkeypatch.setattr("app.device.bench.Bench._bare_dit", as_written(Bench._bare_dit))
    monkeypatch.setattr("ops.packed.compiled_blocks._lacking", lambda device: "")
    out = tmp_path / "p.json"
    for _ in range(2):
        run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    told = capsys.readouterr().out
    assert told.count(f"compile   model.dit.compile: auto is {str(faster).lower()}: 1 cascades took") == 2
    assert len(calls) == 1 and [shape.bucket.frames for shape in calls[0]] == [1, 5]
    profile = read_profile(out)
    assert profile.both_ways == seconds and profile.setting is not None
    assert ("compiled" in profile.setting.checkpointing) is faster
    assert profile_json(profile)["both_ways"]


def as_written(made: Callable[[Bench], torch.nn.Module]) -> Callable[[Bench], torch.nn.Module]:
    def bare(self: Bench) -> torch.nn.Module:
        model, self.model = self.model, replace(self.model, dit=replace(self.model.dit, compile=False))
        try:
            return made(self)
        finally:
            self.model = model

    return bare


def test_a_machine_without_a_compiler_profiles_blocks_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "ops.packed.compiled_blocks._lacking", lambda device: "for the CPU this one has no g++ or clang++"
    )
    run_profile(DEMO, TINY, tmp_path / "p.json", repeats=1, device="cpu", degrees=[1])
    assert "auto is false: model.dit.compile makes code on the machine of each worker" in capsys.readouterr().out
    assert read_profile(tmp_path / "p.json").both_ways is None


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(900)
def test_both_ways_are_timed_with_code_of_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    profile = read_profile(out)
    assert profile.both_ways is not None and len(profile.both_ways.points) == 2
    assert all(one.as_written_s < one.compiling_s for one in profile.both_ways.points[:1])
    config, why = with_compiling(load(tmp_path, f"planner.profile={out}", *TINY))
    assert config.model.dit.compile is profile.both_ways.compiled and "2 cascades took" in why
