import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from actors.outcome import Exit
from app.bench.peers import contest
from app.bench.peers.contest import CONFIG, PEERS, Peer, PeerFailed, prepare, train
from app.bench.peers.figures import (
    SAME,
    FinishedLine,
    LoopRun,
    PeerFigures,
    agree,
    difference,
    figures_of,
    lines_of_code,
    roles_table,
    table,
)
from app.bench.recipe import Average, MicroBatch, Recipe
from app.bench.tree import Tree, TreeLook, role_of
from app.cli import app
from app.run.signals import unwinds_on_signal
from app.settings.terminal import answer
from data.decode import decode_job
from ops.typed import ConfigError

TINY = """
model:
  dit: {num_layers: 2, num_heads: 4, head_dim: 16, ffn_dim: 64, freq_dim: 32}
  vae: {kind: haar, temporal: 4, spatial: 8, channels: 16}
  text: {max_length: 32, d_model: 32, num_layers: 1, num_heads: 2}
data:
  batch: {memory_tokens: 400, text_tokens: 40, max_batch: 3}
  items_per_step: 4
  engine: {decode_workers: 1, decode_cpus: 0.2}
train: {optimizer: {learning_rate: 1.0e-3, ema_decay: 0.9}}
workers: {device: cpu, cpus_per_worker: 0.5}
checkpoint: {every: 0}
"""
STEPS = 3


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[float]]:
    """Run file, samples of each step, and the losses of a plain loop in one process."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "tiny.yaml").write_text(TINY)
    path, samples = prepare(folder / "mixed", folder / "tiny.yaml", contest.SETS["mixed"], STEPS, 2)
    recipe = Recipe(path)
    optimizer, losses = recipe.optimizer(), []
    for step in recipe.steps(STEPS):
        optimizer.zero_grad()
        losses.append(sum(backward(recipe, micro) for micro in step))
        torch.nn.utils.clip_grad_norm_(recipe.dit.parameters(), recipe.train.optimizer.max_grad_norm)
        optimizer.step()
    return path, samples, losses


def backward(recipe: Recipe, micro: MicroBatch) -> float:
    batch = decode_job(micro.job)
    loss = recipe.loss(recipe.dit, micro, recipe.latents(batch.video), recipe.words(batch.captions))
    loss.backward()
    return loss.item()


def test_a_loop_tells_the_transformer_the_vector_of_two_text_encoders(tmp_path: Path) -> None:
    dit = "{architecture: flux, num_heads: 2, head_dim: 16, ffn_dim: 128}"
    text = "{kind: flux, max_length: 12, d_model: 16, num_layers: 1, num_heads: 2, pooled_dim: 20}"
    (tmp_path / "pair.yaml").write_text(f"run: {{name: pair}}\nmodel: {{dit: {dit}, text: {text}}}\n")
    recipe = Recipe(tmp_path / "pair.yaml")
    words = recipe.words(["a dot", ""])
    assert [len(one) for one in words] == [14, 14]  # two rows after the twelve hold 20 numbers
    latents = torch.randn(2, 48, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    micro = MicroBatch(step=0, job=None, keys=("a", "b"), weight=0.5)  # type: ignore[arg-type]
    told = recipe.loss(recipe.dit, micro, latents, words)
    for one in words:
        one[12:] = 0
    assert abs(float(told - recipe.loss(recipe.dit, micro, latents, words))) > 1e-6


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "ddp + ulysses"])
def test_a_loop_under_torchrun_trains_what_one_process_trains(name: str, prepared, tmp_path: Path) -> None:
    path, samples, losses = prepared
    seen = train(PEERS[name], path, STEPS, 2, tmp_path / "run")
    assert difference([line.loss for line in seen.steps], losses) < SAME
    found = figures_of(seen, samples, warm=1, left=1)
    assert len(set(seen.pids)) == 2
    assert found.cpu_s > 0 and found.memory_mib > 0 and found.samples_per_s > 0 and found.idle < 1


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("name", ["ray + deepspeed", "heddle static"])
def test_a_loop_on_ray_trains_what_one_process_trains(name: str, prepared, tmp_path: Path) -> None:
    path, _, losses = prepared
    seen = train(PEERS[name], path, STEPS, 2, tmp_path / "run")
    assert difference([line.loss for line in seen.steps], losses) < SAME
    assert len(set(seen.pids)) == 2
    last = seen.looks[-1].cpu_s
    assert all(last[pid] > 0 for pid in seen.pids), "the processes that train are not in the tree that is looked at"


BROKEN = [sys.executable, "-c", "print('Traceback\\n  no such device'); raise SystemExit(3)"]


def test_a_loop_that_ends_early_is_told_with_its_last_words(prepared, tmp_path: Path) -> None:
    path, *_ = prepared
    broken = Peer(name="broken", command=lambda *_: BROKEN, file="x")
    with pytest.raises(PeerFailed, match=r"broken ended with exit code 3 after 0 of 3 steps") as raised:
        train(broken, path, STEPS, 2, tmp_path / "run")
    assert raised.value.said == "Traceback\n  no such device"


def test_the_command_ends_with_a_sentence_after_the_log_of_a_peer_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setitem(PEERS, "ddp", Peer(name="ddp", command=lambda *_: BROKEN, file="ddp.py"))
    monkeypatch.setattr(contest, "prepare", lambda own, *_: (own.mkdir(parents=True), [1, 1, 1, 1]))
    with pytest.raises(PeerFailed) as raised:
        contest.run(steps=1, warm=1, rounds=1, only=["ddp"], buckets=["uniform"], config=tmp_path / "tiny.yaml")
    code = answer(raised.value, debug=False)
    log, sentence = capsys.readouterr().err.rstrip("\n").rsplit("\n", 1)
    turn, log = log.split("\n", 1)
    assert turn == "uniform, round 1 of 1: ddp"  # stands before the peer runs
    assert code == Exit.FAILURE and log == "Traceback\n  no such device"  # the log keeps its lines
    assert sentence.startswith("error: ddp ended with exit code 3 after 0 of 4 steps")


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_peer_that_runs_and_leaves_no_folder(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer writes its process id, and its parent's signal follows."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    pid, folders = tmp_path / "pid", tmp_path / "folders"
    folders.mkdir()
    script = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); " + (
        f"os.kill(os.getppid(), {int(number)}); time.sleep(600)"
    )
    monkeypatch.setitem(PEERS, "ddp", Peer(name="ddp", command=lambda *_: [sys.executable, "-c", script]))
    monkeypatch.setattr(contest, "prepare", lambda own, *_: (own.mkdir(parents=True), [1, 1, 1, 1]))
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        contest.run(steps=1, warm=1, rounds=1, only=["ddp"], buckets=["uniform"], config=tmp_path / "tiny.yaml")
    assert ended.value.code == 128 + number and signal.getsignal(number) is before
    assert not list(folders.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.usefixtures("not_under_nohup")
def test_a_signal_while_a_peer_starts_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Starting(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(contest.subprocess, "Popen", Starting)
    sleeps = Peer(name="ddp", command=lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(SystemExit), unwinds_on_signal():
        train(sleeps, tmp_path / "config.yaml", 1, 1, tmp_path / "peer")
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize("option", ["--warm", "--steps", "--rounds", "--workers"])
def test_a_count_of_zero_is_refused_before_anything_runs(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "prepare", lambda *_: pytest.fail("clips were made"))
    result = CliRunner().invoke(app, ["bench", "peers", option, "0"])
    assert result.exit_code == Exit.USAGE and option in result.output


def test_more_workers_than_items_in_a_step_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)  # four items
    with pytest.raises(ConfigError, match=r"5 workers train steps of 4 items.*--workers 4 or fewer"):
        prepare(tmp_path / "set", tmp_path / "tiny.yaml", contest.SETS["uniform"], STEPS, 5)


def test_average_follows_the_weights_as_the_schedule_says(prepared) -> None:
    recipe = Recipe(prepared[0])
    average = Average(recipe)
    before = [p.detach().clone() for p in recipe.dit.parameters()]
    with torch.no_grad():
        for parameter in recipe.dit.parameters():
            parameter.add_(1.0)
    average.update()  # decay of the first update: (1 + 1) / (10 + 1)
    for held, old in zip(average._average, before, strict=True):
        torch.testing.assert_close(held, old + 1.0 - 2 / 11)


def run_of(seconds: list[float], cpu: list[tuple[float, float, float]]) -> LoopRun:
    """A look per second at two processes that train and one that does not."""
    ends = [100.0 + sum(seconds[: n + 1]) for n in range(len(seconds))]
    return LoopRun(
        started=90.0,
        pids=(1, 2),
        steps=tuple(FinishedLine(step=n, time=end, loss=1.0 / (n + 1)) for n, end in enumerate(ends)),
        looks=tuple(
            TreeLook(
                99.0 + n,
                {1: one, 2: two, 3: other},
                100.0 * n,
                {(1, "other"): one, (2, "decode"): two, (3, "gcs"): 0.4 * other, (3, "decode"): 0.6 * other},
            )
            for n, (one, two, other) in enumerate(cpu)
        ),
    )


def test_figures_are_those_of_the_counted_steps() -> None:
    run = run_of([1.0, 2.0, 2.0, 2.0], [(n, 0.5 * n, 0.25 * n) for n in range(12)])
    found = figures_of(run, [3, 4, 6, 5], warm=1, left=1)  # steps 1 and 2, from 101 to 105
    assert found.step_s == 2.0
    assert found.samples_per_s == 10 / 4
    assert found.cpu_s == pytest.approx(2 * 1.75)
    assert found.samples_per_cpu_s == pytest.approx(10 / 7)
    assert found.trained_s == pytest.approx(2 * 1.5)
    assert found.roles_s == pytest.approx({"training": 3.0, "gcs": 0.2, "decode": 0.3})  # by process, then by role
    assert found.idle == pytest.approx(1 - 1.5 / 2)
    assert found.start_s == pytest.approx(101 - 90 - 2)
    assert found.memory_mib == 600.0  # of looks up to the last counted step


def test_no_step_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="2 steps without the first 1 and the last 2"):
        figures_of(run_of([1.0, 1.0], [(0, 0, 0)]), [1, 1], warm=1, left=2)


def figures(cpu: float, losses: tuple[float, ...] = (1.0, 0.5)) -> PeerFigures:
    return PeerFigures(
        start_s=5.0,
        step_s=2.0,
        samples_per_s=8.0,
        cpu_s=cpu,
        samples_per_cpu_s=16 / cpu,
        trained_s=0.5 * cpu,
        roles_s={"training": 0.5 * cpu, "gcs": 0.1, "raylet": 0.001},
        idle=0.1,
        memory_mib=1024.0,
        losses=losses,
    )


def test_ratios_are_taken_within_a_round() -> None:
    rounds = {"ddp": [figures(4.0), figures(8.0), figures(5.0)], "heddle": [figures(5.0), figures(8.0), figures(5.0)]}
    text = table("two workers", rounds, {"ddp": 46, "heddle": None})
    assert "1.000 (0.80, 1.00, 1.00)" in text
    assert "| 46 lines | - |" in text


def test_roles_are_listed_by_what_they_take() -> None:
    rows = roles_table("two", {"ddp": [figures(4.0)], "heddle": [figures(6.0), figures(8.0)]}).splitlines()
    assert rows == [
        "| two, CPU-s / step | ddp | heddle |",
        "|---|---|---|",
        "| training | 2.000 | 3.500 |",
        "| gcs | 0.100 | 0.100 |",
    ]


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=a", "raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=b", "gcs"),
        ("ray-dashboard-NodeHead-0 (python -B)", "dashboard"),
        ("ray::Feeder.batches", "feeder"),
        ("ray::MapBatches(decode_block)", "decode"),
        ("ray::RayTrainWorker", "controller"),
        ("ray::dit 17f 48x32 b4 sp1", "other Ray"),
        ("ray::IDLE", None),
        ("python -m torch.distributed.run --standalone -m app.bench.peers.ddp c.yaml", "driver"),
        ("python -u -m app.bench.peers.ddp c.yaml 3 lines", "decode"),
        ("bash", "other"),
    ],
)
def test_a_process_has_the_role_that_its_command_line_says(line: str, role: str | None) -> None:
    assert role_of(line.split(" ")) == role


def test_what_a_process_computes_goes_to_what_it_does_and_waiting_is_no_role() -> None:
    tree = Tree()
    for seconds, line in (
        (1.0, "ray::IDLE"),
        (3.0, "ray::MapBatches(f)"),
        (3.5, "ray::IDLE"),
        (4.0, "ray::Keeper.put"),
    ):
        tree._grow(7, seconds, [line])
    assert tree._roles_s == {(7, "other Ray"): 1.0, (7, "decode"): 2.5, (7, "keeper"): 0.5}
    assert sum(tree._roles_s.values()) == tree._cpu[7]


def test_other_losses_are_marked() -> None:
    rounds = {"ddp": [figures(4.0)], "off": [figures(4.0, (1.0, 0.50001))], "same": [figures(4.0, (1.0, 0.5000001))]}
    rows = table("", rounds, dict.fromkeys(rounds, 1)).splitlines()
    assert rows[3].endswith("| 2e-05 ! |") and rows[4].endswith("| 2e-07 |")
    assert not agree(rounds)
    assert agree({name: rounds[name] for name in ("ddp", "same")})


def test_the_command_writes_a_page_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_for(peer: Peer, *_: object) -> LoopRun:
        took = 1.0 if peer.strategy else 2.0
        return run_of([took] * 4, [(took * n, took * n, 0.5 * n) for n in range(12)])

    monkeypatch.setattr(contest, "prepare", lambda own, *_: (own, [6, 6, 6, 6]))
    monkeypatch.setattr(contest, "train", run_for)
    outs = [tmp_path / "peers.json", tmp_path / "peers.html"]
    contest.run(steps=1, warm=1, rounds=2, only=["ddp", "heddle cascade"], buckets=["mixed"], out=outs)
    told = json.loads(outs[0].read_text())["figures"]["mixed"]
    assert [run["step_s"] for run in told["heddle cascade"]] == [1.0, 1.0]
    page = outs[1].read_text()
    assert "heddle bench peers --set mixed --steps 1 --warm 1 --rounds 2" in page
    assert "--peer ddp --peer &#x27;heddle cascade&#x27;" in page
    assert ">2.00</text>" in page and ">1.00</text>" in page and "<b>equal</b>" in page
    assert page.count('class="ours"') == 4 and "Mixed buckets" in page and "Uniform" not in page


def test_lines_of_code_are_those_without_words(tmp_path: Path) -> None:
    text = (
        '"""What it\nis."""\n\n# why\nimport os\n\n\ndef f(\n    a,\n):\n    """Says."""\n    return """a\nb"""  # so\n'
    )
    (tmp_path / "a.py").write_text(text)
    assert lines_of_code(tmp_path / "a.py") == 6


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(typer.BadParameter, match="'fsdp' is none of ddp, ray \\+ deepspeed, ddp \\+ ulysses, heddle"):
        contest.run(only=["fsdp"])
    with pytest.raises(typer.BadParameter, match="'big' is none of uniform, mixed"):
        contest.run(buckets=["big"])


def test_the_run_file_of_the_comparison_loads(tmp_path: Path) -> None:
    from app.settings.config import RunConfig

    assert RunConfig.load(CONFIG).data.items_per_step == 4
    assert json.dumps(sorted(contest.SETS)) == '["mixed", "uniform"]'


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("{optimizer: {kind: muon}}", r"AdamW alone\. Set train\.optimizer\.kind to adamw"),
        ("{optimizer: {kind: prodigy, learning_rate: 1.0}}", r"AdamW alone\. Set train\.optimizer\.kind to adamw"),
        ("{loss_weight: token}", r"all samples alike\. Set train\.loss_weight to sample"),
    ],
)
def test_what_peers_do_not_have_is_refused(
    prepared: tuple[Path, list[int], list[float]], train: str, said: str
) -> None:
    other = prepared[0].with_name("other.yaml")
    other.write_text(f"base: {prepared[0].name}\ntrain: {train}\n")
    with pytest.raises(ConfigError, match=said):
        Recipe(other)
