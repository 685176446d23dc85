"""`heddle prove`: what happens to a run, and what is said of the two. A real one is in tests/blackbox/test_proof.py."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import numpy as np
import pytest
import torch

from actors.config import TrainConfig
from actors.outcome import Exit
from actors.state import checkpoint_files
from actors.state.checkpoint_files import CheckpointError, root_of
from app.proof import command, disturbance
from app.proof.command import prove, settings_of
from app.proof.disturbance import Act, Disturber, acts
from app.proof.verdict import sentences, table, verdict, weights_apart
from app.run.fault import kill_worker, seated
from app.settings.config import RunConfig
from ops.code_path import ROOT
from ops.config import OptimizerConfig, ProdigyConfig
from ops.shards import Distance, ShardState
from ops.typed import ConfigError
from ops.update.muon import orthogonal
from ops.update.optimizer import adamw_
from ops.update.prodigy import ProdigyStep, step_, take_in

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"
FP32, TF32, BF16 = TrainConfig(), TrainConfig(tf32="on"), TrainConfig(autocast="bfloat16")


OPTIMIZER = OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.95))
PRODIGY = replace(OPTIMIZER, kind="prodigy", learning_rate=1.0, prodigy=ProdigyConfig(d0=1e-3))


def with_weights(
    run: Path, values: Sequence[float], cuts: list[int], distances: tuple[Distance, ...] = (), **moments: np.ndarray
) -> Path:
    """The last checkpoint of a run, written in shards that end at `cuts`."""
    folder = checkpoint_files.step_folder(root_of(run), 29)
    checkpoint_files.begin(folder)
    arrays = {"master": np.array(values, np.float32), **moments}
    for name in ("exp_avg", "exp_avg_sq"):
        arrays.setdefault(name, np.ones(len(values), np.float32))
    for lo, hi in zip([0, *cuts[:-1]], cuts, strict=True):
        part = {name: array[lo:hi] for name, array in arrays.items()}
        shard = ShardState(updates=30, lo=lo, hi=hi, total=len(values), arrays=part, distances=distances)
        checkpoint_files.write_shard(folder, shard)
    checkpoint_files.seal(folder, {"step": 29})
    return run


@pytest.fixture
def pair(run_folder: Path) -> Callable[..., tuple[Path, Path]]:
    """Two runs with the same records; `change` takes each line of the disturbed one's metrics, None leaves it out."""

    def make(change: Callable[[dict], dict | None] = lambda line: line) -> tuple[Path, Path]:
        other = run_folder.with_name("disturbed")
        shutil.copytree(run_folder, other)
        lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
        kept = [found for line in lines if (found := change(line)) is not None]
        (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        return with_weights(run_folder, [3.0, 0.0, 4.0], [3]), with_weights(other, [3.0, 0.0, 4.0], [2, 3])

    return make


def scaled(step: int, factor: float) -> Callable[[dict], dict]:
    return lambda line: {**line, "loss": line["loss"] * factor} if line["step"] == step else line


def test_equal_records_and_weights_are_the_same_training(pair) -> None:
    found = verdict(*pair(), FP32)
    assert found.same and found.loss == found.weights == 0
    assert found.disturbed.workers == [3, 2] and found.disturbed.recovered_s == [1.5]
    assert sentences(found)[0].startswith("the same training: largest difference of a loss 0.0e+00")


@pytest.mark.parametrize(
    ("train", "inside", "beyond"), [(FP32, 1 + 5e-6, 1 + 2e-5), (TF32, 1 + 8e-4, 1 + 2e-3), (BF16, 1 + 3e-3, 1 + 5e-3)]
)
def test_losses_may_differ_by_the_rounding_of_their_products(pair, train, inside: float, beyond: float) -> None:
    def relative(factor: float) -> tuple[bool, int]:
        folders = pair(scaled(17, factor))
        found = verdict(*folders, train)
        shutil.rmtree(folders[1])
        shutil.rmtree(root_of(folders[0]))
        return found.same, found.at

    assert relative(inside) == (True, 17)
    assert relative(beyond) == (False, 17)


def test_a_step_that_is_missing_is_another_training_and_is_named(pair) -> None:
    found = verdict(*pair(lambda line: line if line["step"] != 21 else None), FP32)
    assert not found.same
    assert sentences(found)[0].startswith("NOT the same") and sentences(found)[0].endswith("one of them lacks: 21.")


def test_clips_that_one_run_alone_could_decode_are_another_training(pair) -> None:
    found = verdict(*pair(lambda line: {**line, "good_weight": 0.5} if line["step"] == 4 else line), FP32)
    assert not found.same and sentences(found)[0].endswith("Other clips could be decoded.")


def test_a_loss_that_is_not_finite_is_not_the_same(pair) -> None:
    found = verdict(*pair(scaled(9, float("nan"))), FP32)
    assert not found.same and found.at == 9


def test_weights_are_compared_however_their_shards_are_cut(tmp_path: Path) -> None:
    one = with_weights(tmp_path / "one", [3.0, 1.0, 4.0, 0.0], [1, 4])
    other = with_weights(tmp_path / "other", [3.0, 1.0, 4.0, 0.0], [2, 3, 4])
    apart = with_weights(tmp_path / "apart", [3.0, 1.0, 4.0, 0.5], [4])
    for piece in (1, 3, 100):
        found = weights_apart(one, other, OPTIMIZER, 1e-3, piece)
        assert found.relative == found.length == found.along == 0
        assert weights_apart(apart, one, OPTIMIZER, 1e-3, piece).relative == pytest.approx(0.5 / np.sqrt(26))


@dataclass(frozen=True)
class Trained:
    """Weights and moments of a small AdamW training, before and after its last update."""

    before: np.ndarray
    after: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    distances: tuple[Distance, ...] = ()

    def written(self, run: Path, weights: np.ndarray | None = None) -> Path:
        values = self.after if weights is None else weights
        cuts = [len(values) // 3, len(values)]
        return with_weights(run, values, cuts, self.distances, exp_avg=self.exp_avg, exp_avg_sq=self.exp_avg_sq)


def trained_with(rounding: float, seed: int, last: str = "", kind: str = "adamw", steps: int = 30) -> Trained:
    """Gradients of one noisy training, the same for every `seed`, whose rounding alone it draws: each gradient's, by
    the size of all. Of 3 of 1,000 weights the gradient is nothing but rounding, as that of a bias of keys without a
    norm. `last`: what is wrong with the last gradient. Weights of Muon are one matrix."""
    number, shared, own = 48_000, np.random.default_rng(0), np.random.default_rng(seed)
    truth = 0.3 * shared.normal(size=number) * np.exp(shared.normal(size=number))
    none = np.arange(number) % 1000 < 3
    weights = torch.from_numpy(shared.normal(size=number).astype(np.float32) * 0.02)
    first, second, s = (torch.zeros(number) for _ in range(3))
    p0, before = weights.clone(), weights.clone()
    for step in range(steps):
        gradient = truth + shared.normal(size=number)
        if step == steps - 1 and last:
            gradient = {"none": 0.0 * gradient, "other": truth + own.normal(size=number), "twice": 2 * gradient}[last]
        gradient = np.where(none, 0.0, gradient) + rounding * own.normal(size=number)
        before, grad = weights.clone(), torch.from_numpy(gradient.astype(np.float32))
        if kind == "muon":
            first.mul_(0.95).add_(grad)
            weights.sub_(1e-3 * 0.2 * math.sqrt(240) * orthogonal(first.view(200, 240)).flatten())
            continue
        if kind == "prodigy":
            state = {"master": weights, "exp_avg": first, "exp_avg_sq": second}
            distance = Distance(d=1e-3, d_max=1e-3, numerator=0.0)
            take_in(PRODIGY, **state, grad=grad, s=s, p0=p0, distance=distance, rate=1e-3, factor=1.0)
            step_(PRODIGY, ProdigyStep(rate=1e-3, d=1e-3), **state)
            continue
        adamw_(
            OPTIMIZER,
            master=weights,
            grad=grad,
            exp_avg=first,
            exp_avg_sq=second,
            updates=step + 1,
            lr=1e-3,
            factor=1.0,
        )
    distances = (Distance(d=1e-3, d_max=1e-3, numerator=0.0),) if kind == "prodigy" else ()
    return Trained(before.numpy(), weights.numpy(), first.numpy(), second.numpy(), distances)


ROUNDINGS = [
    ("adamw", FP32, 1e-6),
    ("adamw", FP32, 1e-5),
    ("adamw", BF16, 2e-2),
    ("muon", FP32, 1e-6),
    ("prodigy", FP32, 1e-6),
]


WRONG = ["", "skipped", "stale shard", "none", "other", "twice", "torn", "elsewhere"]


@pytest.mark.parametrize(
    ("kind", "train", "rounding", "wrong"),
    [(*ROUNDINGS[0], wrong) for wrong in WRONG]
    + [
        pytest.param(*rounding, wrong, marks=() if wrong in WRONG[:2] else pytest.mark.long)
        for rounding in ROUNDINGS[1:]
        for wrong in WRONG
    ],
)
def test_weights_of_a_wrong_last_update_are_another_training_and_rounding_is_none(
    pair, kind: str, train: TrainConfig, rounding: float, wrong: str
) -> None:
    """No loss has seen it. `torn`: the weights of some other step stand in a fiftieth of them; `elsewhere`: a shard is
    that of its neighbour."""
    calm, disturbed = pair()
    for run in (calm, disturbed):
        shutil.rmtree(root_of(run))
    optimizer = PRODIGY if kind == "prodigy" else replace(OPTIMIZER, kind=kind)
    last = wrong if wrong in ("none", "other", "twice") else ""
    one, other = trained_with(rounding, 1, kind=kind), trained_with(rounding, 2, last, kind)
    weights, number = other.after.copy(), len(other.after)
    if wrong == "skipped":
        weights = other.before
    elif wrong == "stale shard":
        weights[: number // 8] = other.before[: number // 8]
    elif wrong == "torn":
        weights[-number // 50 :] = trained_with(rounding, 2, kind=kind, steps=10).after[-number // 50 :]
    elif wrong == "elsewhere":
        weights[: number // 8] = other.after[number // 8 : number // 4]
    one.written(calm)
    other.written(disturbed, weights)
    found = verdict(calm, disturbed, replace(train, optimizer=optimizer))
    assert found.same == (wrong == ""), (found.length, found.along, found.moments)
    if wrong == "skipped" and kind == "adamw":
        assert found.along == pytest.approx(-1, abs=0.1)
    assert sentences(found)[0].endswith("written after it, is another.") == (wrong != "")


def test_a_run_without_its_last_checkpoint_is_not_proven_and_says_so(
    tmp_path: Path, trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.app.test_proof.with_weights", lambda *given: None)
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False) == Exit.FAILURE
    said = capsys.readouterr().out
    assert "not proven: " in said and "demo-disturbed has no whole checkpoint of its last step" in said


def test_weights_of_two_models_are_refused(tmp_path: Path) -> None:
    one = with_weights(tmp_path / "one", [3.0, 1.0], [2])
    other = with_weights(tmp_path / "other", [3.0, 1.0, 4.0], [3])
    with pytest.raises(CheckpointError, match="have 2 and 3 weights"):
        weights_apart(one, other, OPTIMIZER, 1e-3)


def test_the_table_has_both_runs_in_columns(pair) -> None:
    lines = table(verdict(*pair(), FP32))
    starts = {line.index(word) for line in lines[:2] for word in ("undisturbed", "30") if word in line}
    assert len(starts) == 1 and lines[2].split()[-3:] == ["2", "3,", "2"]


def test_a_worker_dies_and_the_pool_shrinks_to_half_and_grows_again() -> None:
    four = ["w0", "w1", "w2", "w3"]
    assert acts(four, least=1) == [Act(kill="w3", then=4), Act(then=2), Act(then=4)]
    assert acts(four, least=3) == [Act(kill="w3", then=4), Act(then=3), Act(then=4)]
    assert acts(four[:2], least=2) == acts(four[:2], least=5) == [Act(kill="w1", then=2)]
    assert acts(["w4"], least=1) == [Act(kill="w4", then=1)]


def test_a_proof_trains_without_what_depends_on_its_length(tmp_path: Path) -> None:
    given = [f"data.cache.path={tmp_path}", "sample.every=100", "track=[tensorboard]"]
    config = RunConfig.load(DEMO, given)
    short = RunConfig.load(DEMO, [*given, *settings_of(config, 24), "train.steps=24"])
    optimizer = short.train.optimizer
    assert (optimizer.lr_scheduler, optimizer.lr_warmup_steps, optimizer.lr_decay_steps) == ("constant", 12, 0)
    assert (short.data.cache.path, short.sample.every, short.checkpoint.every, list(short.track)) == ("", 0, 0, [])
    assert short.train.optimizer.learning_rate == config.train.optimizer.learning_rate


def test_batches_that_follow_measured_costs_are_held() -> None:
    given = ["data.batch.recalibrate=on", "data.batch.target_s=1"]
    config = RunConfig.load(DEMO, given)
    assert "data.batch.recalibrate=off" in settings_of(config, 24)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="--steps 3: each quarter of them ends with a disturbance; give 4 or more"):
        settings_of(RunConfig.load(DEMO), 3)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> list[tuple[str, int]]:
    """(name, steps) of the runs that were started. Each has the records and weights of `run_folder`."""
    started: list[tuple[str, int]] = []

    def train(path: Path, overrides: list[str], *, overwrite: bool) -> int:
        config = RunConfig.load(path, overrides)
        started.append((config.run.name, config.train.steps))
        shutil.copytree(run_folder, Path(config.run.dir) / config.run.name)
        with_weights(Path(config.run.dir) / config.run.name, [1.0, 2.0], [2])
        return Exit.OK if "calm" in config.run.name else Exit.RESUMABLE

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(Disturber, "__enter__", lambda self: self)
    monkeypatch.setattr(Disturber, "__exit__", lambda self, *exception: setattr(self, "all_done", True))
    return started


def test_the_undisturbed_run_has_as_many_steps_as_the_disturbed_one_took(
    tmp_path: Path, trained, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "proof.json", tmp_path / "proof.html"
    code = prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, out, page, overwrite=False)
    assert code == Exit.OK and trained == [("demo-disturbed", 2400), ("demo-calm", 30)]
    assert "the same training" in capsys.readouterr().out
    assert json.loads(out.read_text())["same"] and "demo-calm" in page.read_text()


def test_the_verdict_is_written_also_where_nobody_reads_what_is_said(
    tmp_path: Path, trained, unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    out, page = tmp_path / "proof.json", tmp_path / "proof.html"
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, out, page, overwrite=False) == Exit.OK
    assert json.loads(out.read_text())["same"] and page.stat().st_size


def test_a_verdict_on_stdout_leaves_what_a_log_has(tmp_path: Path, trained, capfd: pytest.CaptureFixture[str]) -> None:
    """It took the place of all lines of `>> log`."""
    prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, Path("/dev/stdout"), None, overwrite=False)
    said, _, figures = capfd.readouterr().out.partition("{")
    assert "the same training" in said and json.loads("{" + figures)["same"]


def test_what_could_not_be_done_proves_nothing(
    tmp_path: Path, trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(self: Disturber, *exception: object) -> None:
        self.failed = "its workers have not changed in 600 s"

    monkeypatch.setattr(Disturber, "__exit__", leave)
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False) == Exit.FAILURE
    assert [name for name, _ in trained] == ["demo-disturbed"]
    assert capsys.readouterr().out.endswith("not proven: its workers have not changed in 600 s\n")


def test_a_disturbed_run_that_ends_by_itself_proves_nothing(tmp_path: Path, trained, monkeypatch) -> None:
    monkeypatch.setattr(command, "train", lambda *given, **more: Exit.OK)
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False) == Exit.FAILURE
    monkeypatch.setattr(command, "train", lambda *given, **more: Exit.PLAN)
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False) == Exit.PLAN


def test_a_disturbed_run_that_ends_before_all_was_done_proves_nothing(tmp_path: Path, trained, monkeypatch) -> None:
    """It may be resumed, as where no worker comes in the place of the one that was killed."""
    monkeypatch.setattr(Disturber, "__exit__", lambda self, *exception: None)
    assert prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False) == Exit.RESUMABLE
    assert [name for name, _ in trained] == ["demo-disturbed"]


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`main` on a run that does at once what is asked of it, but for being stopped, which raises what is given."""

    def act(stopped: Exception | None = None) -> None:
        def answer(run: Path, asked: str) -> None:
            if asked == "stop" and stopped is not None:
                raise stopped

        asked = SimpleNamespace(
            scale=SimpleNamespace(remote=lambda workers: "scale"), stop=SimpleNamespace(remote=lambda why: "stop")
        )
        (tmp_path / "run_id").write_text("new")
        for name, value in {
            "answer": answer,
            "monitor": lambda run: asked,
            "seated": lambda run: {"w0": None, "w1": None},
            "kill_worker": lambda run, name: None,
            "_generations": lambda run: [],
            "_await_workers": lambda run, number, formed: None,
            "_steps_done": lambda run: 6,
            "_await_all": lambda run, steps: None,
            "_await_steps": lambda run, steps: None,
        }.items():
            monkeypatch.setattr(disturbance, name, value)
        disturbance.main([str(tmp_path), "6", "1", ""])

    return act


def test_a_run_that_cannot_be_stopped_is_not_said_to_be_done_with(acting, capsys: pytest.CaptureFixture[str]) -> None:
    acting()
    assert capsys.readouterr().out.splitlines()[-2:] == ["done: after 6 steps: asked for 2 workers", "all done"]
    with pytest.raises(ConfigError, match="ask again"):
        acting(ConfigError("the monitor has not answered; ask again."))
    assert "all done" not in capsys.readouterr().out


def test_what_acts_on_a_run_ends_with_the_process_that_reads_it(tmp_path: Path) -> None:
    words = ["-m", "app.proof.disturbance", str(tmp_path), "6", "1", ""]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()


def test_nothing_happens_before_all_workers_that_come_at_first_train(run_folder: Path, monkeypatch) -> None:
    steps, looks = [29], []
    with (run_folder / "events.jsonl").open("a") as file:
        formed = {"event": "generation", "time": 1.0, "generation": 9, "workers": ["w0"], "cluster": [1]}
        file.write(json.dumps({**formed, "why": "joined", "from_step": 29, "seconds": 1.0}) + "\n")

    def later(seconds: float) -> None:
        looks.append(steps[0])
        steps[0] += 1

    monkeypatch.setattr(disturbance, "_steps_done", lambda run: steps[0])
    clock = SimpleNamespace(sleep=later, monotonic=lambda: 1000.0 * len(looks))
    monkeypatch.setattr(disturbance, "time", clock)
    disturbance._await_all(run_folder, 6)
    assert steps == [35] and looks == list(range(29, 35))


def test_a_run_that_stands_for_an_hour_is_awaited_no_longer(run_folder: Path, monkeypatch) -> None:
    seconds = [0.0]
    clock = SimpleNamespace(sleep=lambda s: seconds.append(seconds[-1] + 60), monotonic=lambda: seconds[-1])
    monkeypatch.setattr(disturbance, "time", clock)
    with pytest.raises(ConfigError, match="another step was awaited for 3600 s"):
        disturbance._await_steps(run_folder, 31)
    assert 3600 < seconds[-1] < 3700


def test_events_are_read_again_when_there_are_more_of_them(run_folder: Path, monkeypatch) -> None:
    opened: list[Path] = []
    made = disturbance.RunDir.open
    monkeypatch.setattr(disturbance.RunDir, "open", lambda path: opened.append(path) or made(path))
    before = disturbance._generations(run_folder)
    assert disturbance._generations(run_folder) == before and len(opened) == 1
    with (run_folder / "events.jsonl").open("a") as file:
        formed = {"event": "generation", "time": 1.0, "generation": 9, "workers": ["w0"], "cluster": [1]}
        file.write(json.dumps({**formed, "why": "joined", "from_step": 29, "seconds": 1.0}) + "\n")
    assert len(disturbance._generations(run_folder)) == len(before) + 1 and len(opened) == 2


def test_what_holds_the_pipe_of_what_acted_holds_nobody_up(tmp_path: Path, monkeypatch) -> None:
    """As a process of Ray may, that was started by it."""
    words = "import subprocess, sys; print(subprocess.Popen(['sleep', '20']).pid, flush=True); sys.stdin.read()"
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda args, **more: started([sys.executable, "-c", words], stdin=subprocess.PIPE, **more)
    )
    begin = time.monotonic()
    with Disturber(tmp_path, 6, 1, leaves_s=1.0) as acting:
        reader = acting._reader
        time.sleep(1)
    assert time.monotonic() - begin < 12 and reader.is_alive()


def test_folders_in_use_are_refused_before_anything_trains(tmp_path: Path, trained) -> None:
    (tmp_path / "runs" / "demo-calm").mkdir(parents=True)
    (tmp_path / "runs" / "demo-calm" / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="demo-calm already exists"):
        prove(DEMO, [f"run.dir={tmp_path / 'runs'}"], 24, None, None, overwrite=False)
    assert trained == []


def test_workers_of_the_newest_generation_are_seated(run_folder: Path) -> None:
    with (run_folder / "events.jsonl").open("a") as file:
        for number, name in enumerate(("w0", "w1", "w2")):
            ready = {"event": "ready", "time": 1.0, "generation": 0, "worker": name, "node": "n", "pid": 10 + number}
            file.write(json.dumps({**ready, "host": "h"}) + "\n")
    assert {name: found.pid for name, found in seated(run_folder).items()} == {"w0": 10, "w2": 12}
    assert seated(run_folder.parent / "demo")["w2"].host == "h"


def test_a_worker_that_does_not_train_is_not_killed(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.fault.monitor", lambda run: None)
    with pytest.raises(ConfigError, match=r"worker w9 does not train in .*; these do: none yet"):
        kill_worker(run_folder, "w9")
