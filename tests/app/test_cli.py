"""The command line: fast help, one sentence per mistake, the documented exit codes, no traceback."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.outcome import Outcome
from app.cli import main
from app.inputs import shared_cores
from app.run.lock import FolderHeld, FolderLock
from app.settings.config import RunConfig
from app.settings.errors import exit_code, is_ours, one_line
from app.settings.run_folder import prepare_run_dir
from data.errors import DataError
from ops.models.folders import dit_json
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "configs" / "runs" / "demo.yaml"


def heddle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["heddle", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def in_a_fresh_process(option: str) -> tuple[str, int, str]:
    """What an option prints, the number of modules that it imports, and the heavy ones of them."""
    code = (
        f"import sys; sys.argv = ['heddle', '{option}']\n"
        "from app.cli import main\n"
        "try: main()\n"
        "except SystemExit:\n"
        "    print(len(sys.modules))\n"
        "    print([m for m in ('torch', 'ray', 'diffusers', 'numpy', 'av') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    *printed, imported, heavy = result.stdout.splitlines()
    return "\n".join(printed), int(imported), heavy


def test_versions_are_told_without_importing_torch_or_ray() -> None:
    printed, _, heavy = in_a_fresh_process("--version")
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert printed == f"heddle {ours}, torch {version('torch')}, ray {version('ray')}"
    assert heavy == "[]"


def test_help_lists_the_commands_without_importing_torch_or_ray() -> None:
    printed, imported, heavy = in_a_fresh_process("--help")
    for command in ("train", "plan", "profile", "data", "sample", "export", "bench", "report", "workers", "families"):
        assert f" {command} " in printed
    assert heavy == "[]"
    assert imported < 600  # it is imports that the answer takes: 432 are 0.4 s on a machine that is free


def test_a_help_breaks_its_lines_where_the_terminal_does_and_not_where_the_source_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later paragraphs, and a first one in the list of commands, were broken at both."""
    monkeypatch.setenv("COLUMNS", "300")  # of which 120 are taken
    _, printed, _ = heddle(monkeypatch, capsys, "data", "lint", "--help")
    assert "what they refuse is not decoded, and dropped.jsonl beside the\n" in printed
    _, printed, _ = heddle(monkeypatch, capsys, "workers", "--help")
    assert "until the run has ended, also when it starts anew; SIGTERM,\n" in printed


def test_a_help_in_a_narrow_terminal_or_a_pipe_has_whole_words_and_no_box(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boxes showed the same cut name for two options that begin alike."""
    from typer.main import get_command

    from app.cli import app
    from app.commands.bench import BENCHMARKS

    def lines_of(command: Any, words: list[str]) -> list[list[str]]:
        children = getattr(command, "commands", {}).items()
        return [words, *(line for name, child in children for line in lines_of(child, [*words, name]))]

    monkeypatch.setenv("COLUMNS", "60")
    shown = {}
    for words in lines_of(get_command(app), []):
        code, told, _ = heddle(monkeypatch, capsys, *words, "--help")
        assert code == 0 and told.startswith("Usage: ") and told.isascii(), words
        assert "...\n" not in told.partition("\n\n")[2], words  # a summary cut at a number of letters
        assert not re.search(r"^  -.* <list\[", told, re.MULTILINE), words  # the name of a type, not of what is given
        shown[" ".join(words)] = told
    assert len(shown) > 16 + len(BENCHMARKS)
    assert "--guidance-scale <float>" in shown["sample"] and "--guidance-scale-2 <float>" in shown["sample"]
    assert "--lora PATH" in shown["sample"] and "[PATH]...\n" in shown["data lint"]
    assert "  check     Look at every node and GPU of a cluster before\n            a run: software," in shown[""]


def test_a_mistaken_option_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, _, told = heddle(monkeypatch, capsys, "plan", "--budget", "a quarter of a second")
    assert code == 2 and told.splitlines()[-1].startswith("error: Invalid value for '--budget': ")
    code, _, told = heddle(monkeypatch, capsys, "bench", "ops", "--no-such-option-of-a-benchmark")
    assert code == 2 and told.splitlines()[-1].startswith("error: No such option: --no-such-option-of-a-benchmark")


MISTAKES = [
    (
        ("train", "--config", "nowhere.yaml"),
        2,
        "error: config nowhere.yaml does not exist; the shipped ones are under configs/runs/.",
    ),
    (
        ("plan", "--config", "/dev/null"),
        2,
        "error: config /dev/null is no file; give one of YAML: it is read more than once, as no pipe can be.",
    ),
    (
        ("train", "--config", str(DEMO), "--set", "train.max_train_steps=3"),
        2,
        "error: unknown key train.max_train_steps (--set); did you mean train.steps?",
    ),
    (
        ("train", "--config", str(DEMO), "--set", "train.steps=many"),
        2,
        "error: train.steps is 'many' (--set); expected a whole number.",
    ),
    (
        ("report", "runs/nowhere"),
        2,
        "error: run directory runs/nowhere does not exist; give that of a run, such as runs/demo.",
    ),
    (
        ("sample", "--checkpoint", "runs/nowhere"),
        2,
        "error: checkpoint runs/nowhere does not exist. Give the folder of a run, such as runs/demo, or a checkpoint "
        "in it.",
    ),
    (
        ("workers", "list", "runs/nowhere"),
        2,
        "error: runs/nowhere is not the folder of a run that was started; give that of a run, such as runs/demo.",
    ),
    (("profile", "--config", str(DEMO), "--device", "tpu"), 2, "error: --device 'tpu' is not one of auto, cpu, cuda."),
]


@pytest.mark.parametrize(("arguments", "code", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_ends_with_one_sentence_and_its_code(
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert heddle(monkeypatch, capsys, *arguments) == (code, "", sentence + "\n")


def test_usage_errors_have_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert heddle(monkeypatch, capsys, "trian")[0] == 2
    assert heddle(monkeypatch, capsys, "train")[0] == 2


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = heddle(monkeypatch, capsys, "train", "--config", "nowhere.yaml", "--debug")
    assert code == 2
    assert "Traceback" in err and "ConfigError" in err


def test_an_existing_run_directory_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: demo}\n")
    code, _, err = heddle(monkeypatch, capsys, "train", "--config", str(DEMO), "--set", f"run.dir={tmp_path / 'runs'}")
    assert code == 2
    assert "already exists; continue it with --resume" in err


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data.tools.synthetic import SynthConfig, synthesize

    folder = tmp_path_factory.mktemp("data")
    synthesize(folder, SynthConfig(clips=24, images=6, shards=1, koala=False))
    return folder


Dry = Callable[..., tuple[int, str, str]]
QUICK, SEARCHED = "planner.strategy=static", "planner.strategy=cascade"


@pytest.fixture
def dry_run(small_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dry:
    """`heddle train --dry-run` on the small data, with overrides. Unless they say so, it searches for no plan, which
    takes most of its time."""

    def run(*overrides: str, start: Sequence[str] = ()) -> tuple[int, str, str]:
        sets = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={small_data}/runs", QUICK, *overrides]
        options = [part for assignment in sets for part in ("--set", assignment)]
        return heddle(monkeypatch, capsys, "train", "--config", str(DEMO), "--dry-run", *start, *options)

    return run


def test_a_dry_run_accounts_for_every_sample_and_shows_the_plan(dry_run: Dry, small_data: Path) -> None:
    code, printed, err = dry_run(SEARCHED)
    assert code == 0, err
    left, right = re.search(r"data +(\d+) indexed = (.*)", printed).groups()  # type: ignore[union-attr]
    assert int(left) == 30 == sum(int(number) for number in re.findall(r"\d+", right))
    assert "17x32x48" in printed
    assert "plan      cascade on 3 workers" in printed
    gradient = re.search(r"gradients ([\d.]+) MiB on each worker \(train.memory.gradients: auto\)", printed)
    storage = re.search(r"storage +([\d.]+) MiB per checkpoint", printed)
    assert gradient and storage and 0 < float(gradient[1]) < float(storage[1]), "they were 0.00 GiB and 0.01 GiB"
    assert "encoders  haar codec, text encoder in float32" in printed
    assert re.search(r"pixels +[\d.]+ MiB of decoded clips in memory of all nodes", printed)
    assert "short: items that were trained before they were full (data.max_wait)" in printed
    assert max(map(len, re.search(r"^pixels.*\n.*", printed, re.M)[0].splitlines())) < 120  # type: ignore[index]
    assert not (small_data / "runs").exists()


def test_a_dry_run_says_how_much_faster_the_workers_are_than_one_of_them(
    dry_run: Dry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 8)
    _, printed, _ = dry_run(SEARCHED)
    assert "share the" not in printed
    line = next(text for text in printed.splitlines() if "one worker alone" in text)
    found = re.search(r"alone: ([\d.]+) s per step; 3 are ([\d.]+) times as fast, (\d+)% of 3 times", line)
    assert found, line
    alone, rate, share = map(float, found.groups())
    assert alone > 0 and 1 < rate <= 3 and share == pytest.approx(100 * rate / 3, abs=1)
    _, printed, _ = dry_run(SEARCHED, "workers.max=1")
    assert "plan      cascade on 1 worker" in printed and "one worker alone" not in printed


def test_workers_that_share_a_core_are_no_faster_together(dry_run: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    """It promised a third of the time of one."""
    monkeypatch.setattr(shared_cores, "usable_cores", lambda: 1)
    _, printed, _ = dry_run(SEARCHED)
    found = re.search(r"alone: [\d.]+ s per step; 3 are ([\d.]+) times as fast, (\d+)% of 3 times", printed)
    assert found and 0.5 < float(found[1]) <= 1.0 and int(found[2]) <= 34
    assert "3 workers share the 1 core of this machine: each counts 0.33 of one that has its own" in printed
    _, printed, _ = dry_run("workers.cluster=1x3")
    assert "seconds are those of CPU workers with 1 core each (workers.torch_threads)" in printed


def test_a_dry_run_says_how_often_the_run_draws_its_samples(dry_run: Dry) -> None:
    """2,000 steps of 30 clips are hundreds of epochs, and nobody said so."""
    _, printed, _ = dry_run("train.steps=40", "data.buckets.table=[17x32x48]", "data.buckets.max_ratio_error=1.7")
    draws, samples, times = re.search(  # type: ignore[union-attr]
        r"40 steps draw (\d+) samples, each of the (\d+) about (\S+) times", printed
    ).groups()
    assert float(times) == pytest.approx(int(draws) / int(samples), rel=0.1) and int(samples) < 30
    left = 30 - int(samples)
    assert f"{left} of 30 samples are dropped: " in printed and "too short (data.buckets.frames" in printed
    assert f"and {left - 12} more; heddle data lint --config RUN.yaml --headers-only lists all" in printed
    code, printed, err = dry_run("train.steps=1", "train.optimizer.lr_warmup_steps=0")
    assert code == 0 and " + 0 not reached" not in printed and "within 1 step," in printed, err


def test_a_plan_writes_the_account_of_the_data_as_json_and_as_a_page(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"data.sources.0.path={small_data}/shards/00000.tar", "data.buckets.table=[17x32x48]"]
    options = [part for assignment in sets for part in ("--set", assignment)]
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    command = ("plan", "--config", str(DEMO), "--from-data", "--cluster", "1x1", "--steps", "2", "--budget", "0.01")
    code, printed, err = heddle(monkeypatch, capsys, *command, "--json", str(out), "--html", str(page), *options)
    assert code == 0, err
    found = json.loads(out.read_text())
    assert len(found["steps"]) == 2
    data = found["data"]
    assert data["indexed"] == 30 == data["planned"] + data["num_dropped"] and data["num_dropped"] > 12
    assert (
        sum(data["rejected"].values()) == sum(data["reasons"].values()) == len(data["dropped"]) == data["num_dropped"]
    )
    assert {"source", "shard", "key", "reason", "detail"} <= data["dropped"][0].keys()
    assert [row["bucket"] for row in data["buckets"]] == ["17x32x48"]
    assert data["forecast"]["steps"] == RunConfig.load(DEMO).train.steps and data["forecast"]["draws"] > 0
    last = data["dropped"][-1]["key"]
    assert f" {last}: " in page.read_text() and f" {last}: " not in printed, "a terminal gets the first twelve"
    assert "samples are dropped: " in page.read_text()


def test_a_dry_run_gives_the_length_of_a_run_in_the_unit_that_fits(dry_run: Dry) -> None:
    """A day of training was 1443.2 minutes, and ten steps were 0.0."""
    for steps, unit in ((40, "seconds"), (10_000, "minutes"), (1_000_000_000, "hours")):
        _, printed, _ = dry_run(f"train.steps={steps}")
        assert f" {unit}\n" in printed.partition(" in at least ")[2], "of a CPU, by FLOPs alone"
    gpu = dry_run("train.steps=40", start=["--cluster", str(DEMO.parents[1] / "clusters" / "gpu-1x24gb.yaml")])
    assert " in about " in gpu[1] and "at least" not in gpu[1]


def test_a_dry_run_makes_the_missing_synthetic_set_as_its_run_would(
    dry_run: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, err = dry_run("data.sources.0.path=made/shards/{00000..00003}.tar", "run.dir=runs")
    assert code == 0, err
    assert len(list((tmp_path / "made" / "shards").glob("*.tar"))) == 4
    assert f"run       {tmp_path}/runs/demo\n" in printed


def test_a_run_and_its_dry_run_say_that_wan_weights_lack_their_padding(
    dry_run: Dry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.run import launch

    (tmp_path / "config.json").write_text(json.dumps(dit_json(WanConfig())))
    said = (
        f"note: the weights of {tmp_path} were trained with model.text.max_length 512 (here 96), model.text.pad_to 512"
    )
    code, printed, err = dry_run(f"model.dit.path={tmp_path}")
    assert code == 0 and said in printed, err
    code, printed, err = dry_run(f"model.dit.path={tmp_path}", "model.text.pad_to=512", "model.text.max_length=512")
    assert code == 0 and "pad_to" not in printed, err
    foreign = tmp_path / "of-another-rank.safetensors"
    save_file({"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.zeros(3, 128)}, foreign)
    code, printed, err = dry_run("model.dit.lora_rank=2", f"model.dit.lora_from={foreign}")
    assert code == 0 and "warning: model.dit.lora_from" in printed and "This can be planned, not trained." in printed
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    overrides = [f"model.dit.path={tmp_path}", f"run.dir={tmp_path}", "data.sources.0.synthetic=false"]
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        launch.train(DEMO, overrides)
    assert said in capsys.readouterr().out


def test_a_dry_run_ends_with_the_code_of_its_run(dry_run: Dry) -> None:
    code, _, err = dry_run("data.buckets.table=[17x640x640]")
    assert code == 4 and "Nearest bucket" in err and "640px: 17x640x640" in err
    code, _, err = dry_run("data.buckets.table=[17x64x96]", "data.min_coverage=0.9")
    assert code == 4 and "data.min_coverage asks for 90%" in err and " samples are dropped: " in err
    code, _, err = dry_run("data.sources.0.path=/nowhere/{00000..00003}.tar")
    assert code in (2, 4)
    assert err.startswith("error: ") and err.count("\n") == 1
    code, printed, err = dry_run("workers.max=1", "planner.degrees=[2]")
    assert code == 0 and "planner.degrees [2] do not fit 1 worker: [1, 2] are used" in printed, err


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("model.dit.lora_rank=2", "model.dit.lora_targets=[nowhere]"), "'nowhere' names no attention or MLP"),
        (("model.dit.train_only=[nowhere]",), "'nowhere' names no weight"),
        (
            ("model.dit.train_only=['blocks.*.norm2']", "train.optimizer.kind=muon"),
            "train.optimizer.kind muon trains linear layers of a transformer's blocks, and none is trained here.",
        ),
        (
            ("data.sources.0.path=/nowhere/{0..9}.tar", "data.sources.0.synthetic=false"),
            "there is no /nowhere/0.tar on",
        ),
    ],
)
def test_a_start_that_is_refused_leaves_the_earlier_run(
    settings: Sequence[str], sentence: str, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --overwrite its files go when what is to be trained is known to be there, and Ray starts then."""
    from app.run import launch

    monkeypatch.setattr(launch, "connect", lambda *_: pytest.fail("Ray has started"))
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    here = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={tmp_path}", "workers.device=cpu"]
    kept = prepare_run_dir(RunConfig.load(DEMO, here)) / "metrics.jsonl"
    kept.write_text('{"step": 9}\n')
    with pytest.raises((ValueError, DataError), match=sentence):
        launch.train(DEMO, [*here, *settings], overwrite=True)
    assert kept.is_file()


@pytest.mark.parametrize("resume", [True, False])
def test_a_start_that_fails_before_its_controller_is_told_in_the_events_of_the_run_that_it_resumes(
    resume: bool, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.run import launch

    def no_ray(config: RunConfig) -> None:
        raise DataError("the cluster does not answer")

    monkeypatch.setattr(launch, "connect", no_ray)
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    here = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={tmp_path}", "workers.device=cpu"]
    folder = prepare_run_dir(RunConfig.load(DEMO, here))
    with pytest.raises(DataError):
        launch.train(DEMO, here, resume=resume, overwrite=not resume)
    found = [json.loads(text) for path in folder.glob("events.jsonl") for text in path.read_text().splitlines()]
    assert [(line["event"], line["code"], line["why"]) for line in found] == [
        ("fail", 4, "the cluster does not answer")
    ] * resume
    with pytest.raises(DataError):
        launch.train(DEMO, [*here, "run.name=other"], resume=True)
    assert not (tmp_path / "other").exists(), "a start that came to nothing leaves no folder"


def test_a_start_that_came_to_nothing_leaves_the_folder_to_another_that_has_it_by_now(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.run import launch

    class Lost(FolderLock):
        def take(self, wait_s: float, tell: Callable[[str], None]) -> None:
            super().take(wait_s, tell)
            self.lost = True

    def no_ray(config: RunConfig) -> None:
        prepare_run_dir(config)  # by the other one
        raise DataError("the cluster does not answer")

    monkeypatch.setattr(launch, "FolderLock", Lost)
    monkeypatch.setattr(launch, "connect", no_ray)
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    here = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={tmp_path}", "workers.device=cpu"]
    with pytest.raises(DataError):
        launch.train(DEMO, [*here, "run.name=other"])
    assert (tmp_path / "other" / "config.yaml").exists()


def test_a_start_that_is_refused_as_its_run_is_alive_writes_nothing_into_the_events_of_that(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.run import launch

    def alive(config: RunConfig) -> None:
        raise FolderHeld("the run is alive on this cluster")

    monkeypatch.setattr(launch, "connect", alive)
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    here = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={tmp_path}", "workers.device=cpu"]
    folder = prepare_run_dir(RunConfig.load(DEMO, here))
    with pytest.raises(FolderHeld):
        launch.train(DEMO, here, resume=True)
    assert not (folder / "events.jsonl").exists()


@pytest.mark.parametrize(("code", "told"), [(1, ["Ray Train gave the run up"]), (75, []), (0, [])])
def test_a_run_that_had_no_controller_is_told_in_its_events(
    code: int, told: list[str], small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.run import launch

    for name in ("connect", "check_device", "check_nodes", "check_memory", "end_leftovers", "check_capacity"):
        monkeypatch.setattr(launch, name, lambda *given, **named: None)
    for name in ("on_usable", "_with_limits"):
        monkeypatch.setattr(launch, name, lambda config, device: config)
    nothing = SimpleNamespace(keep=lambda folder: None, write=lambda folder: None)
    monkeypatch.setattr(launch, "_device", lambda config, folder: nothing)
    monkeypatch.setattr(launch, "joined", lambda: nothing)
    ended = Outcome(code=code, reason="Ray Train gave the run up", last_step=-1)
    monkeypatch.setattr(launch, "follow_run", lambda *given: ended)
    monkeypatch.setattr(launch, "is_inner", lambda: True)  # the run itself, not the process that starts it
    here = [f"data.sources.0.path={small_data}/shards/00000.tar", f"run.dir={tmp_path}", "workers.device=cpu"]
    folder = prepare_run_dir(RunConfig.load(DEMO, here))
    for steps, most in ((950, "950\n"), (920, "950\n")):  # those that a crash has cost
        (folder / "metrics.jsonl").write_text(f'{{"step": {steps - 1}}}\n')
        assert launch.train(DEMO, here, resume=True) == code
        assert (folder / "most_steps").read_text() == most
        (folder / "events.jsonl").unlink(missing_ok=True)
    assert launch.train(DEMO, here, resume=True) == code
    found = [json.loads(text) for path in folder.glob("events.jsonl") for text in path.read_text().splitlines()]
    assert [line["why"] for line in found if line["event"] == "fail"] == told
    assert launch.train(DEMO, [*here, "run.name=other"]) == code
    assert not (tmp_path / "other").exists()


def test_a_dry_run_of_a_resume_is_refused_where_the_resume_is(dry_run: Dry, small_data: Path, tmp_path: Path) -> None:
    here = f"run.dir={tmp_path}"
    code, printed, err = dry_run(here, start=["--resume"])
    assert code == 0 and "there is none to resume: starts at step 0" in printed, err
    saved = RunConfig.load(DEMO, [f"data.sources.0.path={small_data}/shards/00000.tar", here, QUICK])
    folder = prepare_run_dir(saved)
    (folder / "metrics.jsonl").write_text('{"step": 9}\n')
    code, printed, err = dry_run(here)
    assert code == 0 and "give --resume or --overwrite" in printed, err
    code, printed, err = dry_run(here, "workers.max=2", start=["--resume"])
    assert code == 0 and "(exists: continued)" in printed, err
    assert "changed since its last start: workers.max 3 -> 2\n" in printed and "later-than" not in printed
    for steps, mib in ((500, 3), (40, 1)):
        (aside := folder / f"later-than-{steps}-steps" / "checkpoints" / "step-9").mkdir(parents=True)
        (aside / "shard").write_bytes(bytes(mib * 2**20))
    (other := tmp_path / "disk" / "step-9").mkdir(parents=True)
    (other / "shard").write_bytes(bytes(2 * 2**20))
    (folder / "later-than-500-steps" / "samples").symlink_to(other.parent)
    (folder / "later-than-500-steps" / "lora").symlink_to(tmp_path / "gone")
    _, printed, _ = dry_run(here, start=["--resume"])
    assert re.findall(r"([\d.]+) MiB in (later-than-\d+-steps/.*), from", printed) == [
        ("1.0", "later-than-40-steps/"),
        ("5.0", "later-than-500-steps/ (2.0 MiB of it elsewhere, by links)"),
    ]
    code, _, err = dry_run(here, "model.dit.num_layers=9", start=["--resume"])
    assert code == 2 and "would train something else" in err and "num_layers 2 -> 9" in err
    code, printed, err = dry_run(here, "model.dit.num_layers=9", start=["--overwrite"])
    assert code == 0 and "(exists: emptied first)" in printed and (folder / "metrics.jsonl").exists(), err
    code, _, err = dry_run(here, start=["--resume", "--overwrite"])
    assert code == 2 and "exclude each other" in err


def test_report_writes_page_and_timeline(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heddle", "report", str(run_folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert (run_folder / "report.html").stat().st_size > 10_000
    assert (run_folder / "timeline.json").exists()
    assert "report.html" in capsys.readouterr().out


def test_every_benchmark_of_the_command_line_exists() -> None:
    import ast

    from app.commands.bench import BENCHMARKS

    for name, (module, _) in BENCHMARKS.items():
        path = (ROOT / Path(*module.split("."))).with_suffix(".py")
        functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert "run" in functions, f"heddle bench {name}: {path.relative_to(ROOT)} has no run()"


def test_a_benchmark_that_cannot_write_its_figures_says_so_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import importlib
    import inspect

    from app.commands.bench import BENCHMARKS

    taking = [
        name
        for name, (module, _) in BENCHMARKS.items()
        if "out" in inspect.signature(importlib.import_module(module).run).parameters
    ]
    assert {"data", "elastic", "headroom", "soak", "ulysses"} <= set(taking)
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "figures.json"
    for name in taking:
        code, _, err = heddle(monkeypatch, capsys, "bench", name, "--out", str(out))
        assert code == 2, name
        assert f"--out {out}" in err and "cannot be written" in err, name


def test_a_profile_says_what_is_to_say_of_its_fits_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = logging.getLogger("actors.plan.costs.known")
    level = fits.level
    monkeypatch.setattr("app.device.profile.run_profile", lambda *given, **named: fits.info("text: 1 measured point"))
    try:
        code, out, err = heddle(monkeypatch, capsys, "profile", "--config", str(DEMO))
    finally:
        fits.setLevel(level)
    assert code == 0 and "1 measured point" not in out + err


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_exit_codes_follow_the_table() -> None:
    from actors.plan.types import PlanError
    from data.errors import DataError, DataIOError

    codes = {
        ConfigError("x"): 2,
        PlanError("x"): 3,
        DataError("x"): 4,
        DataIOError("x"): 1,
        KeyError("x"): 1,
        RuntimeError("x"): 1,
    }
    for error, code in codes.items():
        assert exit_code(raised(error)) == code, type(error)


def test_a_defect_keeps_its_traceback_and_our_errors_do_not() -> None:
    from data.errors import DataError

    assert is_ours(raised(DataError("x")))
    assert not is_ours(raised(KeyError("x")))
    assert not is_ours(raised(ValueError("from a library")))  # this frame is a test, not one of our packages


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.EROFS, 2, "Choose another path."),
        (errno.EEXIST, 2, "Choose another path."),  # a folder that is a file; it ended in a traceback
        (errno.ENOSPC, 1, "Free space, or choose another path."),
        (errno.ESTALE, 1, "Its storage does not answer; try again when it does."),
    ],
)
def test_a_place_that_cannot_be_written_or_reached_is_one_sentence(number: int, code: int, remedy: str) -> None:
    error = raised(OSError(number, os.strerror(number), "ro/clips"))
    assert is_ours(error) and exit_code(error) == code
    assert one_line(error) == f"ro/clips: {os.strerror(number)}. {remedy}"
    assert not is_ours(raised(OSError(number, os.strerror(number)))), "of no file"


def test_the_cause_of_a_failed_ray_task_decides() -> None:
    from data.errors import DataError

    class TaskError(RuntimeError):
        def __init__(self, cause: Exception) -> None:
            super().__init__("a long remote traceback")
            self.cause = cause

    wrapped = raised(TaskError(DataError("shard 3 is cut")))
    assert is_ours(wrapped)
    assert exit_code(wrapped) == 4


def test_every_option_of_every_command_and_benchmark_has_a_help_text() -> None:
    import importlib

    import typer
    from typer.main import get_command

    from app.cli import app
    from app.commands.bench import BENCHMARKS

    def bare(command: Any, name: str) -> list[str]:
        inner = [
            one for part, child in getattr(command, "commands", {}).items() for one in bare(child, f"{name} {part}")
        ]
        own = [p for p in command.params if p.param_type_name == "option" and not p.help]
        return [f"{name} {p.opts[-1]}" for p in own] + inner

    found = bare(get_command(app), "heddle")
    for name, (module, summary) in BENCHMARKS.items():
        alone = typer.Typer()
        alone.command(help=summary)(importlib.import_module(module).run)
        found += bare(get_command(alone), f"heddle bench {name}")
    assert found == []
