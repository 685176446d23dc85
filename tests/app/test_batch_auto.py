"""`data.batch: auto` becomes numbers once, in a run's config; `heddle profile --write` puts measured ones there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.plan.costs.needs import SOLO, Footprint, NeedLine, Needs
from actors.plan.types import Cluster
from actors.planning.demand import clips_of
from actors.planning.memory import MemoryForecast
from actors.planning.options import flop_profile
from actors.pool.device import WorkersDevice
from app.device.write_limits import edited, flow, write_limits
from app.inputs.account import print_buckets
from app.inputs.batches import batch_limits, is_open, with_limits, with_limits_of
from app.run import launch
from app.settings.config import RunConfig
from app.settings.resume import check_resume
from app.settings.run_folder import prepare_run_dir, save_config
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.folders import resolve
from ops.typed import ConfigError

BASE = """
run: {name: auto}
data:
  sources: [{path: clips.tar}]
  buckets: {table: [1x64x96, 17x64x96, 33x64x96]}
  batch: {text_tokens: 40, max_batch: 7}
"""


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "base.yaml").write_text(BASE)
    (folder / "run.yaml").write_text(f"base: base.yaml\n{text}")
    return RunConfig.load(folder / "run.yaml", overrides)


@pytest.mark.parametrize("text", ["data: {batch: auto}\n", "data: {batch: {auto: true}}\n"])
def test_auto_keeps_what_other_files_say_of_the_batch(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, text).data.batch == BatchConfig(auto=True, text_tokens=40, max_batch=7)
    assert load(tmp_path, "", "data.batch=auto").data.batch.auto


def test_auto_is_resolved_once_and_a_resume_takes_the_numbers_of_the_run(tmp_path: Path) -> None:
    config = load(tmp_path, "data: {batch: auto}\n")
    model, geometry = resolve(config.model)
    found, fit = with_limits(config, model, geometry, flop_profile(model, geometry))
    batch = found.data.batch
    assert fit is not None and batch.compute > 0 and batch.target_s == 0 and batch.max_batch == 7 and not is_open(batch)
    assert with_limits(found, model, geometry, flop_profile(model, geometry, "H100")) == (found, None), "it has them"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(found.to_yaml())
    assert with_limits_of(config, tmp_path / "run") == found, "whatever machine resumes it"
    assert with_limits_of(config, tmp_path / "nowhere") == config


SEGMENTS = "data: {segments: [{until_step: 5}, {until_step: 0, batch: auto}]}\n"


def test_a_segment_may_say_auto_alone_and_a_resume_takes_its_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, SEGMENTS)
    model, geometry = resolve(config.model)
    found, fit = with_limits(config, model, geometry, flop_profile(model, geometry))
    (_, late), batch = found.data.segments, found.data.batch
    assert fit is None and batch == config.data.batch and not batch.auto, "the run itself has numbers of its own"
    assert late.batch is not None and late.batch.compute > 0 and not is_open(late.batch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(found.to_yaml())
    assert with_limits_of(config, tmp_path / "run") == found, "whatever machine resumes it"


PARTS = "data: {{segments: [{}, {{until_step: 0, buckets: {{table: [33x64x96]}}, batch: auto}}]}}\n"
PICTURES = "{until_step: 5, buckets: {table: [1x64x96]}, batch: auto}"
NEW = "{until_step: 3, buckets: {table: [17x64x96]}, batch: auto}"


def test_a_resume_with_one_more_segment_takes_the_numbers_of_each_by_its_buckets(tmp_path: Path) -> None:
    config = load(tmp_path, PARTS.format(PICTURES))
    model, geometry = resolve(config.model)
    profile = flop_profile(model, geometry)
    first, last = with_limits(config, model, geometry, profile)[0].data.segments
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(with_limits(config, model, geometry, profile)[0].to_yaml())
    later = with_limits_of(load(tmp_path, PARTS.format(f"{NEW}, {PICTURES}")), tmp_path / "run")
    new, *known = later.data.segments
    assert [one.batch for one in known] == [first.batch, last.batch]
    assert new.batch is not None and is_open(new.batch), "nothing was found for its buckets"


def test_limits_of_the_run_that_no_segment_has_are_no_reason_to_refuse_a_resume(tmp_path: Path) -> None:
    """An earlier version gave numbers to them, too; and a later segment without limits of its own gets them some."""
    where, auto = f"run.dir={tmp_path}", "data.batch.auto=true"
    fixed = "batch: {memory_tokens: 9000}"
    text = f"data: {{segments: [{{until_step: 5, {fixed}}}, {{until_step: 0, {fixed}}}]}}\n"
    own = load(tmp_path, text, where, auto)
    numbers = ("data.batch.compute=5000.0", "data.batch.exponent=1.3")
    made = prepare_run_dir(load(tmp_path, text, where, auto, *numbers))
    (made / "metrics.jsonl").write_text('{"step": 9}\n')
    resumed = with_limits_of(own, made)
    assert resumed.data.batch.compute == 5000.0 and check_resume(resumed) == []

    save_config(own, made)
    more = load(tmp_path, text.replace(f"0, {fixed}", "0"), where, auto, *numbers)
    assert {change.key for change in check_resume(more)} >= {"data.batch.compute", "data.segments"}


def test_limits_of_the_run_are_for_the_buckets_of_the_segments_that_have_them(tmp_path: Path) -> None:
    """Also where every segment has buckets of its own, and `data.buckets` nothing."""
    segments = "[{until_step: 5, buckets: {table: [1x64x96]}}, {until_step: 0, buckets: {table: [33x64x96]}}]"
    empty = load(tmp_path, f"data: {{batch: auto, buckets: {{table: []}}, segments: {segments}}}\n")
    plain = load(tmp_path, "data: {batch: auto}\n")
    model, geometry = resolve(plain.model)
    profile = flop_profile(model, geometry)
    found, expected = (with_limits(one, model, geometry, profile)[0].data.batch for one in (empty, plain))
    assert found.exponent == pytest.approx(expected.exponent, rel=0.1) and found.compute > 0
    assert clips_of(empty.data, geometry) == [(1, 64, 96), (33, 64, 96)]
    own = load(tmp_path, PARTS.format(PICTURES), "data.batch.auto=true", "data.buckets.table=[]")
    assert list(batch_limits(own)) == ["data.segments[0].batch", "data.segments[1].batch"]
    assert not any(is_open(one) for one in batch_limits(with_limits(own, model, geometry, profile)[0]).values())


@pytest.mark.parametrize(("text", "notes"), [(SEGMENTS, ["data.segments[1].batch"]), ("", []),
                                             ("data: {batch: auto}\n", ["data.batch"])])  # fmt: skip
def test_a_run_finds_the_numbers_of_every_auto_and_says_them(
    text: str, notes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.pool.workers.resources", lambda free: {"CPU": 2.0})
    monkeypatch.setattr("actors.ray_calls.nodes", lambda: [])
    found = launch._with_limits(load(tmp_path, text), WorkersDevice(name="cpu"))
    assert not any(is_open(one) for one in [found.data.batch, *(s.batch for s in found.data.segments if s.batch)])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].strip() for line in said if "auto is" in line] == notes
    assert any("workers.memory_gib says it" in line for line in said) == bool(notes), "memory_tokens stays as set"


def predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of a MiB for every row, beside next to no states."""
    needs = Needs()
    needs.predicted["dit", SOLO] = NeedLine(fixed_gib=0.0, gib_per_unit=1e-3)
    sizes = {"parameters": 10, "trained": 10, "parameter_bytes": 4, "state_bytes": 16}
    made = MemoryForecast(**sizes, deepspeed=False, vae_gib=0.0, text_gib=0.0, image_gib=0.0, needs=needs)  # type: ignore[arg-type]
    monkeypatch.setattr("app.inputs.batches.forecast", lambda *of: made)


def test_the_limit_of_memory_is_that_of_the_gpus_that_are_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preview of a cluster has the batches that a run there has, wherever the preview is made."""
    predict(monkeypatch)
    config = load(tmp_path, "data: {batch: auto}\nworkers: {min: 1, max: 1, device: cuda}\n")
    model, geometry = resolve(config.model)
    rows = []
    for memory_gib in (8.0, 16.0):
        cluster = Cluster(nodes=(1,), memory_gib=memory_gib)
        found, _ = with_limits(config, model, geometry, flop_profile(model, geometry, "H100"), cluster)
        rows.append(found.data.batch.memory_tokens)
    assert 4000 < rows[0] < 8000 < rows[1] < 16000


def test_measured_peaks_say_how_many_tokens_a_batch_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of a GPU found 2 MiB a row where the forecast expects 1: half as many fit."""
    predict(monkeypatch)
    config = load(tmp_path, "data: {batch: auto}\nworkers: {min: 1, max: 1, device: cuda}\n")
    model, geometry = resolve(config.model)
    rows = []
    for peaks in ({}, {500.0: 1.0, 5000.0: 10.0}):
        profile = flop_profile(model, geometry, "H100")
        for units, gib in peaks.items():
            profile.observe_need(Footprint(module="dit", kind=SOLO, units=units), gib)
        found, _ = with_limits(config, model, geometry, profile, Cluster(nodes=(1,), memory_gib=24.0))
        rows.append(found.data.batch.memory_tokens)
    assert rows[0] > 10_000 and rows[1] == pytest.approx(rows[0] / 2, abs=1)


@pytest.mark.parametrize("word", ["on", "off", "suggest", "'on'"])
def test_words_that_yaml_takes_for_truth_values_are_words(word: str, tmp_path: Path) -> None:
    wanted = word.strip("'")
    assert load(tmp_path, f"data: {{batch: {{auto: true, recalibrate: {word}}}}}\n").data.batch.recalibrate == wanted
    found = load(tmp_path, "", "data.batch.auto=true", f"data.batch.recalibrate={word}")
    assert found.data.batch.recalibrate == wanted and RunConfig.from_yaml(found.to_yaml()) == found


def test_limits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing says how long a batch should take"):
        load(tmp_path, "data: {batch: {recalibrate: on}}\n".replace("on}", "'on'}"))
    with pytest.raises(ConfigError, match="Keep one"):
        load(tmp_path, "data: {batch: {auto: true, from_table: true}}\n")
    config = load(tmp_path, "data: {batch: {auto: true, target_s: 1.0e-9}}\n")
    model, geometry = resolve(config.model)
    with pytest.raises(ConfigError, match="any cascade takes"):
        with_limits(config, model, geometry, flop_profile(model, geometry))


FOUND = BatchConfig(memory_tokens=12345.0, compute=1.5e20, exponent=1.85, auto=True, target_s=3.0, text_tokens=40)


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: a}  # mine\n",
        "run: {name: a}\ndata: {items_per_step: 3}  # mine\n",
        "run: {name: a}\ndata: {batch: {compute: 3}, items_per_step: 3}  # mine\n",
        "run: {name: a}\ndata:\n  # mine\n  items_per_step: 3\n",
        "run: {name: a}\ndata:\n  batch:\n    compute: 3\n    text_tokens: 9\n  # mine\n  items_per_step: 3\n",
        "run: {name: a}\ndata:\n  batch: auto  # mine\n  items_per_step: 3\n",
    ],
)
def test_limits_are_written_into_a_file_as_it_stands(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    write_limits(path, FOUND)
    config = RunConfig.load(path)
    assert config.data.batch == replace(FOUND, auto=False, target_s=0.0)
    assert config.data.items_per_step == (3 if "items_per_step" in text else 4)
    assert "# mine" in path.read_text()


def test_every_row_of_a_large_limit_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a}\n")
    write_limits(path, replace(FOUND, memory_tokens=12345678.0))
    assert RunConfig.load(path).data.batch.memory_tokens == 12345678.0


def test_sizes_that_follow_the_run_still_do_with_written_limits(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a}\ndata: {batch: {auto: true, recalibrate: 'on', recalibrate_steps: 50}}\n")
    following = replace(FOUND, recalibrate="on", recalibrate_steps=50)
    write_limits(path, following)
    batch = RunConfig.load(path).data.batch
    assert batch == following and not is_open(batch)


def test_a_file_that_cannot_be_edited_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a}\ndata: &here {batch: &b {compute: 3}}\nplanner: *b\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"Put this into it: data: \{batch: \{memory_tokens"):
        write_limits(path, FOUND)
    assert path.read_text() == before


def test_numbers_are_written_as_yaml_reads_them() -> None:
    assert flow(FOUND) == "{memory_tokens: 12345, compute: 1.5e+20, exponent: 1.85, text_tokens: 40}"
    assert flow(replace(FOUND, compute=2e20)).count("2.0e+20") == 1
    assert edited("", "{}") == "\n\ndata:\n  batch: {}\n"


@pytest.mark.parametrize(("limits", "shown"), [("compute: 5000.0", True), ("compute: 5000.0, target_s: 1.0", False)])
def test_a_limit_by_compute_is_shown_where_it_holds(
    limits: str, shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where a target has taken its place."""
    config = load(tmp_path, f"data: {{batch: {{{limits}}}}}\n")
    print_buckets({Bucket(17, 64, 96): (2, "target_s")}, config, Geometry())
    assert ("M_comp" in capsys.readouterr().out) == shown
