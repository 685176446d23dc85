"""`heddle check`: what is wrong with a cluster, by made-up facts and on real Ray nodes of this machine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.bench.lab import patiently
from app.check.command import marked, run_check, sentences, table
from app.check.facts import GpuFacts, NodeFacts, RunPaths, Talk, digest_of, gpu_facts, hidden, own_cache
from app.check.findings import ClusterFacts, Reach, findings
from app.check.looks import judged
from app.settings.config import RunConfig, from_here
from ops.environment import software
from ops.typed import ConfigError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "runs" / "demo.yaml"
SOFTWARE = {"python": "3.11.7", "heddle": "aa", "torch": "2.13.0", "ray": "2.60.0", "driver": "580.1"}
NODE = NodeFacts(
    node="n",
    host="a",
    software=SOFTWARE,
    cores=64,
    room_gib=900.0,
    shared_gib=450.0,
    store_gib=200.0,
    open_files=65536,
    disk_gib=80.0,
)
GPU = GpuFacts(host="a", index="0", name="H100", total_gib=79.2, free_gib=78.6, tflops=650.0)


def nodes(**changes: object) -> tuple[NodeFacts, ...]:
    """Two that are alike but for these."""
    return NODE, replace(NODE, host="b", **changes)  # type: ignore[arg-type]


def gpus(*changed: GpuFacts) -> tuple[GpuFacts, ...]:
    return (GPU, replace(GPU, index="1"), replace(GPU, index="2", tflops=640.0), *changed)


WRONG: dict[str, tuple[ClusterFacts, str]] = {
    "a mute node": (ClusterFacts(nodes=(NODE,), mute={"c": "no answer within 90 s"}), "c does not answer: no answer"),
    "another torch": (
        ClusterFacts(nodes=nodes(software=SOFTWARE | {"torch": "2.12.0"})),
        "torch differs: 2.13.0 on a, 2.12.0 on b. Install the same everywhere",
    ),
    "other files of the program": (
        ClusterFacts(nodes=nodes(software=SOFTWARE | {"heddle": "bb"})),
        "heddle differs: aa on a, bb on b. Give all nodes the same files",
    ),
    "another Python": (
        ClusterFacts(nodes=nodes(software=SOFTWARE | {"python": "3.12.1"})),
        "python differs: 3.11 on a, 3.12 on b",
    ),
    "a folder of its own": (
        ClusterFacts(nodes=nodes(hidden={"/runs": "it is not the folder that the others see"})),
        "/runs on b: it is not the folder that the others see. All nodes must see the same files there",
    ),
    "half a model": (
        ClusterFacts(
            nodes=(
                replace(NODE, folders={"/m": "1"}),
                *nodes(folders={"/m": "1"})[1:],
                *(replace(NODE, host="c", folders={"/m": "2"}),),
            )
        ),
        "/m holds other files on some nodes than on others: a, b; c. Copy it anew",
    ),
    "an unusable GPU": (
        ClusterFacts(nodes=(NODE,), gpus=gpus(GpuFacts(host="a", index="3", unusable="CUDA error"))),
        "GPU 3 of a: CUDA error",
    ),
    "a slow GPU": (
        ClusterFacts(nodes=(NODE,), gpus=gpus(replace(GPU, index="3", tflops=500.0))),
        "GPU 3 of a gives 500 TFLOP/s, others of its kind 645: heat, a power limit",
    ),
    "a GPU of somebody else": (
        ClusterFacts(nodes=(NODE,), gpus=gpus(replace(GPU, index="3", free_gib=40.0))),
        "GPU 3 of a: 39.2 of its 79.2 GiB are taken by processes that Ray does not know",
    ),
    "a firewall": (
        ClusterFacts(nodes=nodes(), reach=(Reach(host="a", silent=("b",)), Reach(host="b"))),
        "a does not reach b: a firewall, a route",
    ),
    "a bad cable": (
        ClusterFacts(nodes=nodes(), reach=(Reach(host="a", losing={"b": "7 of 20 connections"}),)),
        "from a to b packets are lost (7 of 20 connections): a cable",
    ),
    "a sum that failed": (
        ClusterFacts(nodes=nodes(), talk_failed={"a": "TimeoutError: late", "b": "TimeoutError: late"}),
        "a sum over all failed on a, b: TimeoutError: late",
    ),
    "a wrong sum": (
        ClusterFacts(nodes=nodes(), talk=Talk(members=16, right=False, gb_per_s=90.0)),
        "a sum over 16 members is wrong",
    ),
    "Docker's shared memory": (
        ClusterFacts(nodes=nodes(shared_gib=0.0625)),
        "b: /dev/shm has 0.06 GiB, less than Ray's object store of 200.00 GiB, which therefore lies on disk",
    ),
}
NOTES: dict[str, tuple[ClusterFacts, str]] = {
    "another driver": (
        ClusterFacts(nodes=nodes(software=SOFTWARE | {"driver": "570.1"})),
        "driver differs: 580.1 on a, 570.1 on b",
    ),
    "GPUs in use": (
        ClusterFacts(nodes=(NODE,), gpus=gpus(), gpus_there={"a": 8}),
        "5 GPUs of a could not be looked at: Ray has given them to others",
    ),
    "a cache of its own": (
        ClusterFacts(nodes=nodes(own_cache="/cache")),
        "/cache on b is not the folder that the others see. A run trains by a whole copy",
    ),
    "few open files": (ClusterFacts(nodes=nodes(open_files=1024)), "b: a process may have 1024 files open"),
    "clocks": (
        ClusterFacts(nodes=nodes(), clocks={"a": 0.01, "b": -7.5}),
        "the clock of a is 7.5 s ahead of that of b",
    ),
}


@pytest.mark.parametrize("seen, text", WRONG.values(), ids=WRONG)
def test_what_would_end_a_run_is_wrong(seen: ClusterFacts, text: str) -> None:
    (found,) = findings(seen)
    assert found.fatal and found.text.startswith(text)


@pytest.mark.parametrize("seen, text", NOTES.values(), ids=NOTES)
def test_what_a_run_lives_with_is_a_note(seen: ClusterFacts, text: str) -> None:
    (found,) = findings(seen)
    assert not found.fatal and found.text.startswith(text)
    assert sentences([found], None)[-1].startswith("nothing is wrong")


def test_nothing_is_said_of_a_cluster_that_is_right() -> None:
    head = replace(NODE, host="head", software={name: one for name, one in SOFTWARE.items() if name != "driver"})
    patched = replace(NODE, host="b", software=SOFTWARE | {"python": "3.11.9", "torch": "2.13.0+cpu"})
    seen = ClusterFacts(
        nodes=(NODE, head, patched),
        gpus=gpus(replace(GPU, host="b", name="A100", tflops=280.0)),  # another kind is not slow
        gpus_there={"a": 3, "b": 1},
        clocks={"a": 0.2, "b": -0.3},
        reach=(Reach(host="a"), Reach(host="b")),
        talk=Talk(members=4, right=True, gb_per_s=90.0),
    )
    assert findings(seen) == []
    assert table(seen) == [
        "a                    3 x H100 of 640 to 650 TFLOP/s, 64 cores, memory 900 GiB, /dev/shm 450 GiB, disk 80 GiB "
        "free, torch 2.13.0, ray 2.60.0",
        "head                 64 cores, memory 900 GiB, /dev/shm 450 GiB, disk 80 GiB free, torch 2.13.0, ray 2.60.0",
        "b                    1 x A100 of 280 to 280 TFLOP/s, 64 cores, memory 900 GiB, /dev/shm 450 GiB, disk 80 GiB "
        "free, torch 2.13.0+cpu, ray 2.60.0",
        "a sum                over 4 GPUs: 90.00 GB/s from each",
    ]


@pytest.mark.parametrize(
    ("shared_gib", "store_gib", "slow"),
    [(3.8, 1.9, False), (0.5, 0.4, False), (100.0, 200.0, True), (0.0625, None, False), (None, 1.9, False)],
)
def test_the_shared_memory_of_a_node_is_too_small_where_ray_leaves_it(
    shared_gib: float | None, store_gib: float | None, slow: bool
) -> None:
    """The training state is in memory without a name, which /dev/shm does not limit."""
    found = findings(ClusterFacts(nodes=(replace(NODE, shared_gib=shared_gib, store_gib=store_gib),)))
    assert [one.fatal for one in found] == [True] * slow


def test_what_is_wrong_comes_before_notes() -> None:
    seen = ClusterFacts(nodes=nodes(open_files=1024), reach=(Reach(host="a", silent=("b",)),))
    assert [one.fatal for one in findings(seen)] == [True, False]


def test_a_node_says_what_it_does_not_see_of_a_run(tmp_path: Path) -> None:
    model, there = tmp_path / "model", tmp_path / "there.tar"
    model.mkdir()
    there.write_bytes(b"")
    paths = RunPaths(
        marker=str(tmp_path / "none"),
        run_dir=str(tmp_path),
        sources=(str(there), str(tmp_path / "gone" / "{0..3}.tar"), "s3://bucket/{0..3}.tar"),
        folders=(str(model), str(tmp_path / "other")),
    )
    found = hidden(paths)
    assert list(found) == [str(tmp_path), str(tmp_path / "gone" / "{0..3}.tar"), str(tmp_path / "other")]
    assert hidden(RunPaths(marker=str(there), run_dir=str(tmp_path), folders=(str(model),))) == {}


def test_a_gpu_that_others_have_filled_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    monkeypatch.setattr("ops.gpu_check.why_unusable", lambda: "")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 28, 80 << 30))
    monkeypatch.setattr("ops.matmul.matmul_tflops", full)
    found = gpu_facts("3")
    assert (found.index, found.name) == ("3", "")
    assert found.unusable.startswith("it multiplies no matrices (0.2 of its 80.0 GiB were free): CUDA out of memory")


def test_a_gpu_whose_process_ends_or_hangs_is_wrong_and_one_in_use_is_not() -> None:
    given = GpuFacts(host="a", index="1")
    found = judged(
        {
            0: GPU,
            1: "no answer within 180 s",
            2: "ActorDiedError: killed by a signal",
            3: "no answer within 180 s",
        },
        {0: replace(given, index="0"), 1: given, 2: "ActorDiedError: killed by a signal", 3: "no answer within 1 s"},
    )
    assert found[0] == GPU and list(found) == [0, 1, 2]
    gpus_of_a = tuple(replace(one, host="a") for one in found.values())
    *wrong, note = findings(ClusterFacts(nodes=(NODE,), gpus=gpus_of_a, gpus_there={"a": 4}))
    assert [one.text.partition(". ")[0] for one in wrong if one.fatal] == [
        "GPU 1 of a: no answer within 180 s",
        "GPU ? of a: ActorDiedError: killed by a signal",
    ]
    assert not note.fatal and note.text.startswith("1 GPU of a could not be looked at")


def test_folders_and_programs_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    file = tmp_path / "ops" / "one.py"
    file.write_text("a = 1\n")
    folder, program = digest_of(str(tmp_path)), software(tmp_path)["heddle"]
    file.write_text("a = 2\n")
    assert digest_of(str(tmp_path)) == folder, "by names and sizes: weights are large"
    assert software(tmp_path)["heddle"] != program
    file.write_text("a = 10\n")
    assert digest_of(str(tmp_path)) != folder


def test_the_marker_of_a_run_is_gone_afterwards(tmp_path: Path) -> None:
    config = from_here(RunConfig.load(DEMO, [f"run.dir={tmp_path}/runs/deep"]))
    with marked(config) as paths:
        assert Path(paths.marker).is_file() and Path(paths.marker).parent == tmp_path
        assert hidden(paths) == {} and paths.sources == (), "the demo's data is made where it is missing"
    assert list(tmp_path.iterdir()) == []
    closed = from_here(RunConfig.load(DEMO, ["run.dir=/proc/runs"]))
    with pytest.raises(ConfigError, match=r"run\.dir /proc/runs cannot be written"), marked(closed):
        pass


@pytest.mark.parametrize("lacks", ["the folder", "its mount"])
def test_a_node_without_the_clips_of_a_table_is_told(tmp_path: Path, lacks: str) -> None:
    """A node had the table, and not the folder of the clips that it names: nothing was wrong."""
    clips, table = tmp_path / "clips", tmp_path / "table.csv"
    table.touch()
    clips.mkdir()
    (clips / "a.mp4").touch()
    sources = [f"{{path: {table}, kind: manifest, media: {clips}}}", f"{{path: {table}, media: s3://bucket/clips}}"]
    config = from_here(RunConfig.load(DEMO, [f"run.dir={tmp_path}/runs", f"data.sources=[{', '.join(sources)}]"]))
    with marked(config) as paths:
        assert hidden(paths) == {}
        (clips / "a.mp4").unlink()
        if lacks == "the folder":
            clips.rmdir()
        assert hidden(paths) == {str(clips): "it is not there" if lacks == "the folder" else "it is empty there"}


def test_a_node_with_another_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "vae").mkdir()
    config = from_here(RunConfig.load(DEMO, [f"run.dir={tmp_path}/runs", f"data.cache.path={cache}"]))
    with marked(config) as paths:
        assert not paths.cache and not paths.cache_marker, "each node may have its own, and encodes what it lacks"
    config = replace(config, data=replace(config.data, cache=replace(config.data.cache, only=True)))
    with marked(config) as paths:
        assert hidden(paths) == {} and Path(paths.cache_marker).parent == cache
        assert not own_cache(paths)
        Path(paths.cache_marker).unlink()  # as a node sees it that has a folder of its own there
        assert hidden(paths) == {} and own_cache(paths) == str(cache), "it may be a whole copy, by which a run trains"
    assert [*cache.iterdir()] == [cache / "vae"] and [*tmp_path.iterdir()] == [cache]

    written = Path.write_text

    def refused(path: Path, *given: str, **named: str) -> int:
        if path.parent == cache:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return written(path, *given, **named)

    monkeypatch.setattr(Path, "write_text", refused)
    with marked(config) as paths:
        assert hidden(paths) == {} and not paths.cache_marker, "a cache may be read alone"
        (cache / "vae").rmdir()
        assert hidden(paths) == {str(cache): "it is empty there"}


@pytest.mark.parametrize("why", ["it is not there", "it is empty there"])
def test_a_cache_that_no_node_has_is_told(tmp_path: Path, why: str) -> None:
    """The marker lay above it or was all that it held, and every node saw that."""
    cache = tmp_path / "cache"
    if why == "it is empty there":
        cache.mkdir()
    settings = [f"run.dir={tmp_path}/runs", f"data.cache.path={cache}", "data.cache.only=true"]
    with marked(from_here(RunConfig.load(DEMO, settings))) as paths:
        assert hidden(paths) == {str(cache): why} and not own_cache(paths)
        if paths.cache_marker:
            Path(paths.cache_marker).unlink()
            assert hidden(paths) == {str(cache): why} and not own_cache(paths), "a mount point of another node"


def test_a_run_with_a_state_is_checked_without_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    gone = f"train.init_from={tmp_path}/gone"
    config = from_here(RunConfig.load(DEMO, [f"run.dir={tmp_path}/runs", "run.name=one", gone]))
    with pytest.raises(ConfigError, match="gone does not exist"), marked(config):
        pass
    state = tmp_path / "runs" / "one" / "checkpoints" / "step-3"
    state.mkdir(parents=True)
    (state / "COMPLETE").write_text('{"files": {}}')
    with marked(config) as paths:
        assert not any("gone" in folder for folder in paths.folders)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[object]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}}
    patiently(lambda: ray.init(address=cluster.address, namespace="heddle", runtime_env=environment))
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.long
def test_two_nodes_reach_each_other_sum_and_a_gpu_without_cuda_is_found(
    two_nodes: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = from_here(
        RunConfig.load(DEMO, [f"run.dir={tmp_path}/runs", f"data.sources=[{{path: {tmp_path}/no.tar}}]"])
    )
    assert run_check(config, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    seen = told["seen"]
    assert len(seen["nodes"]) == 2 and len({node["host"] for node in seen["nodes"]}) == 2
    assert seen["talk"]["members"] == 2 and seen["talk"]["right"] and seen["talk"]["gb_per_s"] > 0
    assert [one["silent"] for one in seen["reach"]] == [[], []] and seen["mute"] == {} == seen["talk_failed"]
    assert all(abs(ahead) < 60 for ahead in seen["clocks"].values())
    assert [f"{tmp_path}/no.tar" in one["text"] for one in told["findings"] if one["fatal"]] == [True]

    two_nodes.add_node(num_cpus=1, num_gpus=1)  # type: ignore[attr-defined]
    assert run_check(None) == 1
    said = capsys.readouterr().out
    assert "looking at 3 nodes" in said and "looking at 1 GPU" in said and "wrong: GPU 0 of " in said
    assert "PyTorch" in said.partition("wrong: ")[2]
