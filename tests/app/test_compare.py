import html
import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from actors.outcome import Exit
from actors.records.events import EnvironmentSeen, HeldOutMeasured
from app.cli import app
from app.records.rundir import RunDir
from app.report.compare import LossDifference, flops_by_step, labels, loss_difference, page, read_run, write_comparison
from app.settings.config import RunConfig
from app.settings.run_folder import run_dir
from ops.typed import ConfigError
from tests.app.pages import assert_every_picture_has_a_name


def copy_of(run: Path, name: str, change=lambda line: line) -> Path:
    """A run whose metrics lines are changed, or left out where `change` gives None."""
    other = shutil.copytree(run, run.parent / name)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [changed for line in lines if (changed := change(line)) is not None]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return other


def difference_of(one: Path, other: Path) -> LossDifference:
    return loss_difference(*(read_run(RunDir.open(folder), folder.name) for folder in (one, other)))


def test_losses_are_compared_where_both_runs_have_the_step(run_folder: Path) -> None:
    def later_and_off_once(line):
        if line["step"] < 10:
            return None
        return {**line, "loss": line["loss"] * (1.001 if line["step"] == 17 else 1 + 1e-7)}

    other = copy_of(run_folder, "other", later_and_off_once)
    found = difference_of(run_folder, other)
    assert (found.common, found.at) == (20, 17)
    assert found.largest == pytest.approx(1e-3)
    assert min(found.curve.ys) == pytest.approx(-7, abs=1e-3)


@pytest.mark.parametrize(("lone", "first"), [((17, 18, 20), 17), ((0,), 0)])
def test_a_loss_that_is_a_number_in_one_run_alone_is_no_small_difference(
    run_folder: Path, lone: tuple[int, ...], first: int
) -> None:
    """Beside one that is a number, NaN is neither less nor more than any difference."""

    def broken(line):
        loss = line["loss"] * (1.001 if line["step"] == 10 else 1.0)
        return {**line, "loss": math.nan if line["step"] in lone else loss}

    other = copy_of(run_folder, "other", broken)
    found = difference_of(run_folder, other)
    assert (found.largest, found.at, found.lone) == (math.inf, first, len(lone))
    _, said = write_comparison([run_folder, other], run_folder / "page.html")
    sentence = f"one run alone has a loss that is a number at {len(lone)} of 30 steps, the first is step {first}"
    assert sentence in said and sentence.capitalize() in (run_folder / "page.html").read_text()


def test_a_loss_that_is_no_number_in_both_runs_is_the_same(run_folder: Path) -> None:
    """Both left that step out."""
    one, other = (
        copy_of(run_folder, name, lambda line: {**line, "loss": math.nan if line["step"] == 3 else line["loss"]})
        for name in ("one", "other")
    )
    assert (found := difference_of(one, other)).largest == 0.0 and found.lone == 0


def test_equal_runs_have_the_same_losses(run_folder: Path) -> None:
    """The terminal named a largest difference of 0.0e+00 at step 0."""
    other = copy_of(run_folder, "other")
    _, said = write_comparison([run_folder, other], run_folder / "page.html")
    assert said.endswith("; the same losses on 30 common steps")
    text = (run_folder / "page.html").read_text()
    assert "the same losses on 30 common steps." in text and "<td>nothing</td>" in text and "(step 0)" not in text


def test_runs_without_a_common_step_are_refused_by_name(run_folder: Path) -> None:
    other = copy_of(run_folder, "other", lambda line: {**line, "step": line["step"] + 1000})
    with pytest.raises(ConfigError, match="demo and other have no step in common"):
        write_comparison([run_folder, other], run_folder / "page.html")


def test_medians_and_last_losses_are_those_of_the_run(run_folder: Path) -> None:
    run = read_run(RunDir.open(run_folder), "demo")
    lines = [json.loads(text) for text in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert run.steps == 30
    assert run.seconds == pytest.approx(sum(line["step_s"] for line in lines))
    assert run.last_loss == pytest.approx(lines[28]["loss"])  # the median of the last three
    assert run.medians["step_s"] == pytest.approx(1.1)
    assert run.medians["idle_ratio"] == pytest.approx(0.05)
    assert run.by_time.xs[-1] == pytest.approx(run.seconds)


def test_flops_of_a_step_are_those_of_its_clips_once(run_folder: Path) -> None:
    """Each layer has 8 S d^2 and 4 S d^2 for what attends to the clip and to the text, 4 S d f for its MLP and 4 S^2 d,
    in three passes; bags tell a cascade once per worker."""
    config = yaml.safe_load((run_folder / "config.yaml").read_text())["model"]["dit"]
    d, ffn, layers = config["num_heads"] * config["head_dim"], config["ffn_dim"], config["num_layers"]

    def tflop(tokens: int) -> float:
        return 3 * layers * tokens * (12 * d * d + 4 * d * ffn + 4 * tokens * d) / 1e12

    model = yaml.safe_load((run_folder / "config.yaml").read_text())["model"]["vae"]
    rows, columns = 64 // model["spatial"] // 2, 96 // model["spatial"] // 2
    video, image = ((16 // model["temporal"]) + 1) * rows * columns, rows * columns
    found = flops_by_step(RunDir.open(run_folder))
    assert found[0] == pytest.approx(2 * 4 * tflop(video) + 16 * tflop(image))
    spans = (run_folder / "timeline.jsonl").read_text()
    (run_folder / "timeline.jsonl").write_text(spans + spans.splitlines()[2] + "\n")  # another worker of the same bag
    assert flops_by_step(RunDir.open(run_folder)) == found


def test_a_run_whose_timeline_is_gone_has_no_flops(run_folder: Path) -> None:
    (run_folder / "timeline.jsonl").unlink()
    run = read_run(RunDir.open(run_folder), "demo")
    assert math.isnan(run.medians["tflops"]) and run.steps == 30


def test_runs_of_different_environments_are_told_apart(run_folder: Path) -> None:
    seen = EnvironmentSeen(from_step=0, software={"commit": "ab" * 20, "torch": "2.12"}, gpus={"A100": 8})
    other = copy_of(run_folder, "other", lambda line: line)
    bare = copy_of(run_folder, "bare", lambda line: line)  # of a version that does not say
    newer = replace(seen, software={"commit": "ab" * 20, "torch": "2.13"})
    for folder, events in ((run_folder, [seen]), (other, [seen, newer])):
        with (folder / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(event.line()) + "\n" for event in events)
    lines = write_comparison([run_folder, other, bare], run_folder / "page.html")
    sentence = "other: another environment than demo: torch 2.12 -> 2.13."
    assert lines[3:] == [sentence]
    assert html.escape(sentence) in (run_folder / "page.html").read_text()


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "demo", tmp_path / "b" / "demo", tmp_path / "c"]
    for folder in folders:
        folder.mkdir(parents=True)
    assert labels(folders[1:]) == ["demo", "c"]
    assert labels(folders[:2]) == ["a/demo", "b/demo"]
    with pytest.raises(ConfigError, match="is given twice"):
        labels([folders[0], tmp_path / "b" / ".." / "a" / "demo"])


def test_one_run_is_refused_and_a_folder_that_is_none(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="heddle compare takes 2 to 4 run folders, not 1"):
        write_comparison([run_folder], tmp_path / "page.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a run directory"):
        write_comparison([run_folder, tmp_path / "empty"], tmp_path / "page.html")
    bare = copy_of(run_folder, "bare", lambda line: None)
    with pytest.raises(ConfigError, match="has no finished step yet"):
        write_comparison([run_folder, bare], tmp_path / "page.html")


def test_a_page_never_replaces_a_file_that_is_none(run_folder: Path, tmp_path: Path) -> None:
    records = run_folder / "metrics.jsonl"
    before = records.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is there and no page; give a file that ends in \.html"):
        write_comparison([run_folder, copy_of(run_folder, "other", lambda line: line)], records)
    assert records.read_bytes() == before


def test_the_page_draws_every_run_in_its_colour(run_folder: Path) -> None:
    other = copy_of(run_folder, "b<b>", lambda line: {**line, "step_s": 2 * line["step_s"]})
    runs = [read_run(RunDir.open(folder), folder.name) for folder in (run_folder, other)]
    found = difference_of(run_folder, other)
    text = page(runs, {"b<b>": found}, peak_tflops=1e-3)
    assert "<b>" not in text and "b&lt;b&gt;" in text
    for title in ("Loss", "Loss over seconds", "Seconds per step", "Idle share", "MFU"):
        assert f"<h2>{title}</h2>" in text
    for css, curves in (("c1 broad", 5), ("c2 dashed", 6)):
        assert len(re.findall(rf'class="line {css}" d="[^"]*"><title>', text)) == curves
    assert text.count('<svg class="key"') == 5 * 2 + 1  # of the difference from the first, the second alone
    assert_every_picture_has_a_name(text)
    assert "; b&lt;b&gt; from " in text
    assert "MFU" not in page(runs, {"b<b>": found}, peak_tflops=0.0)


def test_the_command_writes_a_page_and_says_a_line_for_each_run(run_folder: Path) -> None:
    other = copy_of(run_folder, "other", lambda line: {**line, "loss": line["loss"] * 1.5})
    (other / "report.html").write_text("a report")
    result = CliRunner().invoke(app, ["compare", str(run_folder), str(other), "--out", str(run_folder / "c.html")])
    assert result.exit_code == 0, result.output
    assert "other: 30 steps" in result.output and "largest difference of a loss 5.0e-01 at step" in result.output
    assert (other / "report.html").resolve().as_uri() in (run_folder / "c.html").read_text()


# runs that are made first


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> list[tuple[list[str], bool, bool]]:
    """What each training was asked for; it leaves the finished run where the config says, the first losses of which are
    those of the others."""
    asked = []

    def train(config: Path, overrides: list[str], *, resume: bool, overwrite: bool) -> int:
        asked.append((overrides, resume, overwrite))
        folder = run_dir(RunConfig.load(config, overrides))
        shutil.copytree(run_folder, folder, dirs_exist_ok=overwrite)
        return Exit.INTERRUPTED if "train.seed=13" in overrides else Exit.OK

    monkeypatch.setattr("app.run.strategies.train", train)
    return asked


def made(tmp_path: Path, *options: str) -> Result:
    config = tmp_path / "run.yaml"
    config.write_text(f"run: {{name: demo, dir: {tmp_path / 'made'}}}\ndata: {{sources: [{{path: nowhere}}]}}\n")
    out = ["--out", str(tmp_path / "c.html")]
    return CliRunner().invoke(app, ["compare", "--config", str(config), *options, *out])


BOTH = ("--strategy", "static", "--strategy", "cascade")


def test_a_run_of_any_name_is_trained_by_strategies(tmp_path: Path, trained) -> None:
    result = made(tmp_path, *BOTH, "--set", 'run.name="[lora] cats: ü"')
    assert result.exit_code == 0, result.output
    assert {run_dir(RunConfig.load(tmp_path / "run.yaml", overrides)).name for overrides, *_ in trained} == {
        "[lora] cats: ü-static",
        "[lora] cats: ü-cascade",
    }


def test_each_strategy_trains_a_run_of_its_own_and_the_page_shows_them(tmp_path: Path, trained) -> None:
    result = made(tmp_path, *BOTH, "--steps", "30", "--set", "train.seed=3")
    assert result.exit_code == 0, result.output
    assert [overrides for overrides, *_ in trained] == [
        ["train.seed=3", "train.steps=30", f"planner.strategy={name}", f'run.name="demo-{name}"']
        for name in ("static", "cascade")
    ]
    page = (tmp_path / "c.html").read_text()
    assert "<h1>demo-static / demo-cascade</h1>" in page
    assert "run.yaml --strategy static --strategy cascade --steps 30 --set train.seed=3</code>" in page
    assert "demo-cascade: 1.00 times as many steps per second as demo-static, the same losses on 30 common" in page
    assert page.index("<h2>Median step</h2>") < page.index("<h2>Loss</h2>") < page.index("<h2>Numbers</h2>")


def test_the_command_of_the_page_is_whole_and_a_shell_takes_it_as_it_stands(tmp_path: Path, trained) -> None:
    result = made(tmp_path, *BOTH, "--set", "track=[ray, tensorboard]", "--peak-tflops", "2")
    assert result.exit_code == 0, result.output
    shown = html.unescape((tmp_path / "c.html").read_text().split("<code class=command>")[1].split("</code>")[0])
    assert shlex.split(shown)[4:] == [*BOTH, "--set", "track=[ray, tensorboard]", "--peak-tflops", "2"]


def test_nothing_is_trained_when_one_of_the_runs_could_not_be(tmp_path: Path, trained) -> None:
    (tmp_path / "made" / "demo-cascade").mkdir(parents=True)
    (tmp_path / "made" / "demo-cascade" / "config.yaml").write_text("x")
    refused = {
        (*BOTH,): "demo-cascade already exists; continue it with --resume",
        BOTH[:2]: "takes --strategy 2 to 4 times; it is given 1.",
        (): "takes --strategy 2 to 4 times; it is given 0.",
        BOTH[:2] * 2: "--strategy static is given twice",
        ("--strategy", "static", "--strategy", "cascad"): "cascade",
        (*BOTH, "--set", "data.cache.path=c"): "the first run would encode for the others",
        (*BOTH, "--set", "data.batch={recalibrate: on, target_s: 1}"): "would train on other batches",
    }
    for options, said in refused.items():
        result = made(tmp_path, *options)
        assert isinstance(result.exception, ConfigError) and said in str(result.exception), options
    assert not trained


def test_a_run_that_ends_early_ends_the_command_with_its_code(tmp_path: Path, trained) -> None:
    result = made(tmp_path, *BOTH, "--set", "train.seed=13")
    assert result.exit_code == Exit.INTERRUPTED and "The same command with --resume goes on" in result.output
    assert len(trained) == 1 and not (tmp_path / "c.html").exists()
    made(tmp_path, *BOTH, "--overwrite")
    assert [(resume, overwrite) for _, resume, overwrite in trained[1:]] == [(False, True)] * 2


def test_runs_are_given_or_made_but_not_both(run_folder: Path, tmp_path: Path, trained) -> None:
    for arguments, said in (
        ([str(run_folder), "--config", "x.yaml", *BOTH], "give either run directories"),
        ([str(run_folder), str(run_folder), "--steps", "3"], "give --config as well"),
        ([], "heddle compare takes 2 to 4 run folders, not 0"),
    ):
        result = CliRunner().invoke(app, ["compare", *arguments, "--out", str(tmp_path / "c.html")])
        assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert not trained


def test_a_run_that_has_diverged_is_compared_in_words(run_folder: Path) -> None:
    other = copy_of(run_folder, "other", lambda line: {**line, "loss": math.nan if line["step"] > 9 else line["loss"]})
    with (other / "events.jsonl").open("a") as file:
        told = HeldOutMeasured(step=19, loss=math.nan, clips=1, unread=0, by_bucket={}, by_noise={}, seconds=1.0)
        file.write(json.dumps(told.line()) + "\n")
    out = run_folder.parent / "c.html"
    lines = write_comparison([run_folder, other], out)
    assert ", loss not finite; one run alone has a loss that is a number at 20 of 30 steps" in lines[1]
    text = out.read_text()
    assert "<td>not finite</td><td>not finite (after 20 steps)</td>" in text
    assert not re.search(r"\b(nan|inf)\b", text.split("</style>")[1])


def test_a_run_without_step_times_has_no_bar(run_folder: Path) -> None:
    other = copy_of(run_folder, "other", lambda line: {**line, "step_s": math.nan, "idle_ratio": 0.25})
    runs = [read_run(RunDir.open(folder), folder.name) for folder in (run_folder, other)]
    found = {"other": difference_of(run_folder, other)}
    text = page(runs, found, peak_tflops=0.0)
    assert len(re.findall(r'rect class="f1"', text)) == 2 and len(re.findall(r'rect class="f2"', text)) == 1
    assert ">25.0%<" in text and "other: no step times beside demo" in text


def test_equal_losses_are_drawn_as_close_and_time_in_a_unit_that_fits(run_folder: Path) -> None:
    other = copy_of(run_folder, "other", lambda line: {**line, "step_s": 300.0})
    found = difference_of(run_folder, other)
    assert found.largest == 0.0 and set(found.curve.ys) == {-9.0}
    runs = [read_run(RunDir.open(folder), folder.name) for folder in (run_folder, other)]
    text = page(runs, {"other": found}, peak_tflops=0.0)
    assert "<h2>Loss over hours</h2>" in text and "the same losses on 30 common steps" in text
    assert "hours 2.5: other" in text  # the end of 30 steps of 300 s


def test_steps_of_other_clips_are_counted(run_folder: Path) -> None:
    def more_tokens_early(line):
        return {**line, "tokens": 101 if line["step"] < 4 else 100}

    one = copy_of(run_folder, "one", lambda line: {**line, "tokens": 100})
    other = copy_of(run_folder, "other", more_tokens_early)
    found = difference_of(one, other)
    assert (found.common, found.other_clips) == (30, 4)
    assert difference_of(one, one).other_clips == 0
    lines = write_comparison([one, other], run_folder / "page.html")
    assert lines[1].endswith("on 30 common steps, 4 of them of other clips")
    assert "<p>4 of them were trained on other clips" in (run_folder / "page.html").read_text()


def test_the_newest_held_out_loss_of_each_run_stands_in_the_table(run_folder: Path) -> None:
    def event(step: int, loss: float) -> HeldOutMeasured:
        return HeldOutMeasured(step=step, loss=loss, clips=3, unread=0, by_bucket={}, by_noise={}, seconds=1.0)

    other = copy_of(run_folder, "other")
    with (other / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(one.line()) + "\n" for one in (event(9, 0.5), event(19, 0.25)))
    out = run_folder / "page.html"
    write_comparison([run_folder, other], out)
    text = out.read_text()
    assert "<th>held-out loss</th>" in text and "<td>0.2500 (after 20 steps)</td>" in text and "0.5000" not in text
    with (other / "events.jsonl").open("a") as file:
        file.write(json.dumps(replace(event(29, 0.125), no_room={"81x720x1280": 2}).line()) + "\n")
    write_comparison([run_folder, other], out)
    assert "<td>0.1250 (after 30 steps, without 81x720x1280)</td>" in out.read_text()
    write_comparison([run_folder, copy_of(run_folder, "third")], out)
    assert "held-out loss" not in out.read_text()
