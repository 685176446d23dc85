"""The entry point as a person starts it: a job on a cluster, runs that are ended and resumed, and plain mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.plan.types import USABLE
from actors.planning.demand import Demand
from actors.planning.forecasts import forecast
from app.settings.config import RunConfig
from app.validation.checkpoint import validate
from data.tools.synthetic import SynthConfig, synthesize
from ops.models.folders import resolve
from tests.stacks import stacks_below

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
SAME_RUN = 1e-6  # same worker count, other process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    synthesize(made / "data", SynthConfig(clips=40, images=8, shards=2, koala=False))
    synthesize(made / "held-out", SynthConfig(clips=4, images=2, shards=1, seed=1, koala=False))
    (made / "run.yaml").write_text(f"""
run: {{name: one, dir: {made}/runs}}
model:
  dit: {{num_layers: 2, num_heads: 4, head_dim: 16, ffn_dim: 128, freq_dim: 32}}
  vae: {{kind: haar, channels: 24}}
  text: {{max_length: 64, d_model: 32, num_layers: 1, num_heads: 2}}
data:
  sources: [{{path: "{made}/data/shards/{{00000..00001}}.tar"}}]
  buckets: {{table: [1x64x96, 9x64x96, 17x64x96], short_videos: image}}
  batch: {{memory_tokens: 300, text_tokens: 40, max_batch: 3}}
  items_per_step: 4
  engine: {{decode_workers: 1, decode_cpus: 0.2}}
train: {{steps: {STEPS}, optimizer: {{learning_rate: 1.0e-3}}}}
workers: {{min: 2, max: 2, cpus_per_worker: 0.5, device: cpu}}
checkpoint: {{every: 4, keep_last: 2}}
validation: {{sources: [{{path: "{made}/held-out/shards/00000.tar"}}], every: 4, draws: 2}}
""")
    return made


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "app.train", "--config", str(folder / "run.yaml"), *more]


def train(folder: Path, *more: str, address: str = "") -> subprocess.CompletedProcess[str]:
    """Train on a Ray of its own, or on the cluster at this address."""
    environment = {**os.environ, "RAY_ADDRESS": address} if address else dict(os.environ)
    return subprocess.run(
        command(folder, *more), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


def metrics(folder: Path, name: str) -> list[dict]:
    """Metrics of every committed step; all clips here decode, so each step is whole."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["good_weight"] for line in lines] == [1] * len(lines)
    return lines


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The head of a cluster with a job server that runs beside the tests.

    Its folder is its own: of several clusters on a machine, the job server takes for its own the one that a file there
    names, or any one without that file. `ray start` writes it into the cluster's folder, `Cluster` into Ray's usual
    one, where clusters of other test processes do so too, and which nobody has made where Ray has not run yet. Its
    agent's usual port may be theirs as well.
    """
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private.utils import write_ray_address
    from ray.cluster_utils import Cluster

    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie in it: pytest's folders have names too long for them
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "include_dashboard": True,
            "dashboard_port": 0,
            "dashboard_agent_listen_port": 0,
            "temp_dir": folder,
            "object_store_memory": 200 * 2**20,
        },
    )
    write_ray_address(made.gcs_address, folder)
    yield made.head_node
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)  # its processes may still be writing


@pytest.fixture(scope="module")
def whole(folder: Path, cluster: Any) -> list[dict]:
    """Metrics of an undisturbed run, submitted to the cluster as a job."""
    submit = [
        str(Path(sys.executable).parent / "ray"),
        "job",
        "submit",
        "--address",
        f"http://{cluster.webui_url}",
        "--working-dir",
        str(ROOT),
        "--",
        sys.executable,
        *command(folder)[1:],
    ]
    try:
        done = subprocess.run(submit, cwd=ROOT, capture_output=True, text=True, timeout=500)
    except subprocess.TimeoutExpired as late:  # the job itself goes on
        told = bytes(late.stdout or b"").decode(errors="replace")[-3000:]
        pytest.fail(f"the job has not ended:\n{told}\n{tail_of_run(folder / 'runs' / 'one')}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout
    return metrics(folder, "one")


def tail_of_run(run: Path) -> str:
    """How far a run is, and what its processes are in the middle of."""
    files = [run / "metrics.jsonl", run / "events.jsonl"]
    ends = [file.read_text(encoding="utf-8")[-4000:] if file.is_file() else f"no {file}" for file in files]
    return "\n".join([*ends, stacks_below(os.getpid())])


def test_a_submitted_job_leaves_everything_that_is_promised(folder: Path, whole: list[dict]) -> None:
    run = folder / "runs" / "one"
    assert [line["step"] for line in whole] == list(range(STEPS))
    wanted = {
        "step",
        "time",
        "loss",
        "grad_norm",
        "lr",
        "workers",
        "generation",
        "step_s",
        "data_wait_s",
        "idle_ratio",
        "cv_step",
        "cv_compute",
        "wir",
        "tokens_per_s",
        "predicted_s",
        "planning_s",
    }
    assert all(wanted <= set(line) for line in whole)
    for name in ("config.yaml", "events.jsonl", "timeline.jsonl", "outcome.json"):
        assert (run / name).is_file(), name
    kept = {p.name for p in (run / "checkpoints").glob("step-*")}  # on a busy disk one that is due may be left out
    assert len(kept) == 2 and "step-19" in kept
    assert len(list((run / "plans").glob("step-*.json"))) == STEPS
    assert list((run / "events").iterdir())
    spans = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    assert {"text", "vae", "dit", "finish"} == {span["module"] for span in spans}
    assert any(span["name"].startswith("dit 17f 64x96 b") for span in spans)


def test_the_loss_of_held_out_clips_is_that_of_the_command(folder: Path, whole: list[dict]) -> None:
    run = folder / "runs" / "one"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ended = {event["step"]: event for event in events if event["event"] == "held_out"}  # on a busy machine in any order
    last = ended[STEPS - 1]
    found = validate(run / "checkpoints" / f"step-{STEPS - 1}", device="cpu")
    assert last["unread"] == 0 < last["clips"] == found.clips
    assert found.loss == pytest.approx(last["loss"], rel=1e-6) and found.by_bucket.keys() == last["by_bucket"].keys()
    assert not (run / ".held_out").exists()


def test_a_finished_run_leaves_a_profile_that_plans(folder: Path, whole: list[dict]) -> None:
    run = folder / "runs" / "one"
    learned = json.loads((run / "profile.json").read_text())
    assert learned["setting"]["device"] == "cpu" and learned["setting"]["model"].startswith("wan ")
    assert {point["module"] for point in learned["latency"]} == {"text", "vae", "dit"}
    assert all(point["count"] >= 1 and point["seconds"] < 60 for point in learned["latency"])
    plan = [sys.executable, "-m", "app.cli", "plan", "--config", str(run / "config.yaml"), "--profile", str(run)]
    done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "cascade" in done.stdout, done.stdout + done.stderr


def test_rays_timeline_has_a_bar_for_every_cascade(folder: Path, whole: list[dict], cluster: Any) -> None:
    spans = [json.loads(line) for line in (folder / "runs" / "one" / "timeline.jsonl").read_text().splitlines()]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), "timeline", "--address", cluster.address],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    trace = Path(next(word for word in done.stdout.split() + done.stderr.split() if word.startswith("/tmp/")))
    bars = {(e["tid"], e["name"]) for e in json.loads(trace.read_text()) if e.get("cat") == "cascade"}
    trace.unlink()
    assert {span["name"] for span in spans} <= {name for _, name in bars}
    assert len({worker for worker, _ in bars}) == 2


def least_gib(folder: Path, workers: int) -> float:
    """GiB that a worker must have, on `workers` of them."""
    config = RunConfig.load(folder / "run.yaml")
    model, geometry = resolve(config.model)
    degrees = model.dit.degrees(4)
    demand = Demand.of(config.data, model, geometry, config.planner.bag_peers)
    found = forecast(model, geometry, config.train, demand.clips, degrees, cuda=False)
    return (found.states(workers).total + demand.need_gib(found.needs, degrees, workers)) / USABLE


@pytest.mark.long
@pytest.mark.parametrize(
    ("of_two", "fewest", "says"),
    [
        (0.9, 2, "GiB for cascades on 2 workers, which is too little: "),
        (1.01, 1, "workers.min 1 is too few: a clip of some bucket fits a worker of "),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(
    folder: Path, cluster: Any, of_two: float, fewest: int, says: str
) -> None:
    """Two workers need `of_two` of what they have; one alone holds all of the optimizer's state, and more."""
    limit = of_two * least_gib(folder, 2)
    assert limit < least_gib(folder, 1)
    settings = (f"workers.memory_gib={limit}", f"workers.min={fewest}", "run.name=large")
    more = [word for one in settings for word in ("--set", one)]
    done = train(folder, *more, address=cluster.address)
    assert done.returncode == 3, done.stdout + done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "runs" / "large").exists() and "starting at step" not in done.stdout


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """A run that a failed test has left ends with all below it."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()  # what it wrote may have been read, which closes the pipe


def running(folder: Path, name: str, steps: int, *more: str) -> subprocess.Popen[str]:
    """A run that has taken `steps` steps and goes on."""
    process = subprocess.Popen(
        command(folder, "--set", f"run.name={name}", *more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    path = folder / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not path.exists() or len(path.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def assert_resumes_to_the_losses_of(whole: list[dict], folder: Path, name: str) -> None:
    done = train(folder, "--set", f"run.name={name}", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(folder, name)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole], rel=SAME_RUN)


def files(run: Path) -> dict[str, bytes]:
    """What a start writes before it trains; a live run writes the others."""
    return {name: (run / name).read_bytes() for name in ("config.yaml", "run_id")}


def terminated(process: subprocess.Popen[str], run: Path) -> int:
    """The last step of a run that ended by SIGTERM to the whole process group, as supervisors send it: what runs is
    finished, a checkpoint is written although none was due."""
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert "stopping after the running steps" in output and "Traceback" not in output
    reached = int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    assert (run / "checkpoints" / f"step-{reached}" / "COMPLETE").is_file()
    assert not list(run.parent.glob(f".{run.name}.*")), "locks are given back"
    return reached


@pytest.mark.long
def test_beside_a_live_run_nobody_starts_and_terminated_it_writes_a_checkpoint(folder: Path) -> None:
    process = running(folder, "two", 2, "--set", "train.steps=100000")  # it must not end by itself
    run = folder / "runs" / "two"
    before = files(run)
    second = train(folder, "--set", "run.name=two", "--overwrite")
    assert second.returncode == 2, second.stdout + second.stderr
    assert "two is alive (process" in second.stderr and "Traceback" not in second.stderr
    assert files(run) == before and process.poll() is None
    terminated(process, run)


@pytest.mark.long
def test_a_run_that_is_terminated_after_its_last_step_has_finished(folder: Path) -> None:
    process = running(folder, "finished", 2, "--set", "train.steps=2")
    events = folder / "runs" / "finished" / "events.jsonl"
    deadline = time.monotonic() + 100
    while '"finish"' not in events.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "done: 2 steps" in output, output


@pytest.mark.long
def test_a_run_that_was_terminated_goes_on(folder: Path, whole: list[dict]) -> None:
    process = running(folder, "three", 3, "--set", "train.steps=100000")
    second = train(folder, "--set", "run.name=three", "--resume")
    assert second.returncode == 2 and "three is alive (process" in second.stderr, second.stdout + second.stderr
    reached = terminated(process, folder / "runs" / "three")
    done = train(folder, "--set", "run.name=three", "--set", f"train.steps={reached + 4}", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(folder, "three")
    assert [line["step"] for line in lines] == list(range(reached + 4))
    same = min(len(lines), STEPS)
    assert [x["loss"] for x in lines[:same]] == pytest.approx([x["loss"] for x in whole[:same]], rel=SAME_RUN)


def copied(folder: Path, name: str) -> Path:
    """The finished run under another name."""
    shutil.copytree(folder / "runs" / "one", folder / "runs" / name)
    return folder / "runs" / name


@pytest.mark.long
def test_a_run_whose_checkpoints_were_pruned_resumes(folder: Path, whole: list[dict]) -> None:
    """Also beside what Ray Train has written there in earlier versions of this program, and with fewer workers."""
    run = copied(folder, "pruned")
    (run / "checkpoint_manager_snapshot.json").write_text(
        json.dumps(
            {
                "ray_version": "1.0.0",
                "checkpoint_results": [{"checkpoint_dir_name": "checkpoints/step-3", "metrics": {"step": 3}}],
                "latest_checkpoint_result": {"checkpoint_dir_name": "checkpoints/step-3", "metrics": {"step": 3}},
            }
        )
    )
    assert not (run / "checkpoints" / "step-3").exists()
    done = train(
        folder,
        "--set",
        "run.name=pruned",
        "--set",
        f"train.steps={STEPS + 2}",
        "--set",
        "workers.min=1",
        "--set",
        "workers.max=1",
        "--resume",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"starting at step {STEPS}" in done.stdout
    assert f"settings changed since the last start: train.steps {STEPS} -> {STEPS + 2}" in done.stdout
    lines = metrics(folder, "pruned")
    assert [line["step"] for line in lines] == list(range(STEPS + 2))
    assert [line["loss"] for line in lines[:STEPS]] == [line["loss"] for line in whole]


@pytest.mark.long
def test_a_resume_that_is_refused_for_its_data_leaves_the_settings(folder: Path, whole: list[dict]) -> None:
    """The controller finds it, after the driver has accepted another schedule."""
    run = copied(folder, "swapped")
    before = (run / "config.yaml").read_bytes()
    shards = sorted((folder / "data" / "shards").glob("*.tar"))
    kept = shards[0].read_bytes()
    shards[0].write_bytes(shards[1].read_bytes())
    try:
        more = ("--set", f"train.steps={STEPS + 2}")
        done = train(folder, "--set", "run.name=swapped", *more, "--resume")
    finally:
        shards[0].write_bytes(kept)
    assert done.returncode == 4, done.stdout + done.stderr
    assert (run / "config.yaml").read_bytes() == before and "settings changed" not in done.stdout


@pytest.mark.faults
def test_the_end_of_a_terminal_ends_a_run_as_ctrl_c_does(folder: Path) -> None:
    process = running(folder, "hangup", steps=3)
    os.killpg(process.pid, signal.SIGHUP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    reached = metrics(folder, "hangup")[-1]["step"]
    assert (folder / "runs" / "hangup" / "checkpoints" / f"step-{reached}" / "COMPLETE").is_file()


@pytest.mark.faults
def test_a_run_that_is_killed_and_resumed_has_the_losses_of_a_whole_one(folder: Path, whole: list[dict]) -> None:
    process = running(folder, "three", steps=6)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) > 8, "Ray and its workers"
    process.kill()  # the driver alone
    process.communicate()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []
    assert_resumes_to_the_losses_of(whole, folder, "three")


@pytest.mark.faults
def test_a_run_whose_ray_is_killed_ends_and_says_so(folder: Path) -> None:
    process = running(folder, "rayless", 3, "--set", "train.steps=100000")
    for below in psutil.Process(process.pid).children(recursive=True):
        if below.name() in ("raylet", "gcs_server"):
            below.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode not in (0, 2, 75), output


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_ends_with_a_sentence_and_the_run_goes_on_once_there_is_room(folder: Path) -> None:
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(small)], check=True)
    try:
        where = ("--set", f"run.dir={small}", "--set", "train.steps=100000")
        (folder / "runs" / "full").symlink_to(small / "full")
        process = running(folder, "full", 6, *where)
        with suppress(OSError), (small / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 1, output
        assert "No space left on device" in output and "Make room" in output and "Traceback" not in output
        (small / "ballast").unlink()
        found = len(metrics(folder, "full"))
        again = train(
            folder,
            "--set",
            "run.name=full",
            "--set",
            f"run.dir={small}",
            "--set",
            f"train.steps={found + 2}",
            "--resume",
        )
        assert again.returncode == 0, again.stdout + again.stderr
        assert [line["step"] for line in metrics(folder, "full")] == list(range(found + 2))
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


@pytest.mark.long
def test_too_few_workers_end_with_a_sentence_and_the_resumable_code(folder: Path, cluster: Any) -> None:
    done = train(
        folder,
        "--set",
        "run.name=big",
        "--set",
        "workers.device=cuda",
        "--set",
        "workers.wait_s=3",
        "--resume",
        address=cluster.address,
    )
    assert done.returncode == 75, done.stdout + done.stderr
    assert "note: there is no run" in done.stdout and "it starts anew, at step 0" in done.stdout
    assert "waiting up to 3 s" in done.stdout and "workers.min" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_dataset_without_items_is_rejected_before_training(folder: Path, cluster: Any) -> None:
    done = train(
        folder,
        "--set",
        "run.name=empty",
        "--set",
        "data.buckets.table=[129x720x1280]",
        "--set",
        "data.buckets.short_videos=drop",
        address=cluster.address,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "129x720x1280" in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "runs" / "empty").exists(), "the corrected command may be given as it is"


@pytest.mark.long
def test_a_run_takes_its_cluster_file_and_is_refused_that_of_another_cluster(folder: Path) -> None:
    """Bags of both workers, one of which the file calls half as fast, are planned to take twice as long."""
    for name, nodes in (("here", "[2]"), ("elsewhere", "[1, 1]")):
        (folder / f"{name}.yaml").write_text(f"nodes: {nodes}\nspeed: {{1: 0.5}}\n")
    bags = ("planner.strategy=static", "planner.static_degree=2", "train.steps=2")

    def made(name: str, *more: str) -> subprocess.CompletedProcess[str]:
        settings = (f"run.name={name}", *bags, *more)
        return train(folder, *(word for setting in settings for word in ("--set", setting)))

    planned = {}
    for name, more in (("usual", ()), ("described", (f"workers.cluster={folder}/here.yaml",))):
        done = made(name, *more)
        assert done.returncode == 0, done.stderr
        plan = json.loads((folder / "runs" / name / "plans" / "step-0.json").read_text())
        planned[name] = [c["end_s"] - c["start_s"] for c in plan["cascades"] if c["degree"] == 2]
    assert planned["usual"] and planned["described"] == pytest.approx([2 * seconds for seconds in planned["usual"]])
    refused = made("refused", f"workers.cluster={folder}/elsewhere.yaml")
    assert refused.returncode == 2
    assert "workers.cluster describes nodes of 1 and 1 GPUs, and " in refused.stderr
    assert "has 2 workers" in refused.stderr
    assert not (folder / "runs" / "refused" / "metrics.jsonl").exists()
