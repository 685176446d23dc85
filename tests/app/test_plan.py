"""`heddle plan`: the table, the JSON other programs read, the pictures, and a sentence for every bad input."""

from __future__ import annotations

import errno
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.config import TrainConfig
from actors.plan.devices import device_speed
from actors.plan.types import Cascade, Cluster, Item, Part, Plan, PlanError, StepPlan
from app.cli import main
from app.inputs.cluster import cluster_of, given_cluster, read_cluster
from app.inputs.items import bucket_shares
from app.inputs.workload import read_workload
from app.plan.pictures import write_gantt
from app.settings.config import RunConfig
from ops.typed import ConfigError
from tests.app.pages import assert_every_picture_has_a_name

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"


def point(module: str, frames: int, degree: int, seconds: float) -> dict[str, Any]:
    return {
        "module": module,
        "batch": 1,
        "frames": frames,
        "height": 64,
        "width": 64,
        "degree": degree,
        "seconds": seconds,
    }


def item(name: str, frames: int) -> dict[str, Any]:
    return {"id": name, "batch": 1, "frames": frames, "height": 64, "width": 64, "text_tokens": 8}


ROOT = Path(__file__).parent.parent.parent
PROFILE = {
    "model": "toy",
    "device": "toy",
    "degrees": {"vae": [1], "dit": [1, 2]},
    "extrapolate": False,
    "latency": [
        point("vae", 5, 1, 0.5),
        point("vae", 17, 1, 1.0),
        point("dit", 5, 1, 2.0),
        point("dit", 5, 2, 1.2),
        point("dit", 17, 1, 6.0),
        point("dit", 17, 2, 3.4),
    ],
}
WORKLOAD = {"steps": [[item("a", 17), item("b", 5), item("c", 5)], [item("a", 5), item("b", 17)]]}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    profile, workload = tmp_path / "p.json", tmp_path / "w.json"
    profile.write_text(json.dumps(PROFILE))
    workload.write_text(json.dumps(WORKLOAD))
    return workload, profile


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["heddle", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_degrees_are_counted_and_shared_heads_are_told(
    tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {**PROFILE, "num_heads": 3, "degrees": {"vae": [1], "dit": [2]}}
    files[1].write_text(json.dumps(wide))
    code, printed, _ = plan(monkeypatch, capsys, "--workload", files[0], "--profile", files[1], "--cluster", "1x2")
    assert code == 0 and "degrees   cascade: 5 at 2" in printed
    assert "2 does not divide 3 heads: ranks share some, and send 1.17 times what Ulysses would" in printed


def test_what_is_to_be_said_of_the_fits_is_said_once(
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = [point("vae", 5, 1, 0.5), point("vae", 17, 1, 1.0), point("dit", 5, 1, 2.0)]
    files[1].write_text(json.dumps({**PROFILE, "extrapolate": True, "latency": few}))
    logging.getLogger("actors.plan.costs.known").setLevel(logging.NOTSET)  # whatever another test has left
    command = ("--workload", files[0], "--profile", files[1], "--cluster", "1x2")
    code, printed, err = plan(monkeypatch, capsys, *command)
    assert code == 0 and printed.count("note: dit: 1 measured point fit no model") == 1
    assert "fit no model" not in err + caplog.text


def test_a_topology_that_does_not_fit_is_changed_as_in_a_run_or_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = ROOT / "configs" / "runs" / "demo.yaml"
    wide = ["--config", demo, "--cluster", "1x1", "--steps", 1, "--set", "planner.topology=g8n1"]
    code, printed, _ = plan(monkeypatch, capsys, *wide, "--strategy", "knapsack")
    assert code == 0 and "note: planner.topology g8n1 does not fit 1 worker: one that the planner" in printed
    assert "items in 1 step on 1 worker (" in printed
    code, _, told = plan(monkeypatch, capsys, *wide, "--strategy", "knapsack", "--set", "planner.misfit=wait")
    assert code == 3 and "is of 8 workers or a multiple of them, and the cluster has 1. Give bags that" in told


def test_a_full_disk_leaves_the_earlier_json(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *given: object, **named: object) -> None:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (out := tmp_path / "out.json").write_text("earlier")
    monkeypatch.setattr(Path, "write_text", full)
    cluster = ("--profile", files[1], "--cluster", "1x2")
    code, _, err = plan(monkeypatch, capsys, "--workload", files[0], *cluster, "--json", out)
    assert code == 1 and "No space left" in err and out.read_text() == "earlier"


def test_the_json_holds_every_item_and_module_and_adds_up(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    code, printed, _ = plan(
        monkeypatch,
        capsys,
        "--workload",
        files[0],
        "--profile",
        files[1],
        "--cluster",
        "1x2",
        "--strategy",
        "cascade",
        "--budget",
        "0.05",
        "--json",
        out,
    )
    assert code == 0 and "cascade" in printed
    found = json.loads(out.read_text())
    assert found["strategy"] == "cascade"
    for step, items in zip(found["steps"], WORKLOAD["steps"], strict=True):
        for module in ("vae", "dit"):
            samples = sorted(c["item"] for c in step["cascades"] if c["module"] == module for _ in range(c["batch"]))
            assert samples == sorted(i["id"] for i in items)
        for cascade in step["cascades"]:
            assert len(cascade["workers"]) == cascade["degree"] and set(cascade["workers"]) <= {0, 1}
        assert 0 < step["lower_bound_s"] <= step["makespan_s"] + 1e-9
    ends = [max(c["end_s"] for c in step["cascades"] if c["module"] == "dit") for step in found["steps"]]
    assert found["steps"][0]["makespan_s"] == pytest.approx(ends[0])
    assert found["steps"][1]["makespan_s"] == pytest.approx(ends[1] - ends[0])


def test_the_end_of_a_step_and_limits_are_said_beside_the_table_and_written(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, profile = files
    arguments = ("--workload", workload, "--profile", profile, "--cluster", "1x2", "--json", tmp_path / "o.json")
    code, before, _ = plan(monkeypatch, capsys, *arguments, "--strategy", "longest_first")
    assert code == 0 and "update " not in before
    makespans = [step["makespan_s"] for step in json.loads((tmp_path / "o.json").read_text())["steps"]]
    points = [{"workers": 1, "seconds": 0.9}, {"workers": 2, "seconds": 0.75}]
    most = {"module": "dit", "degree": 1, "height": 64, "width": 64, "batch": 1, "frames": 20}
    told = {"update": {"kind": "flat", "weights": 10, "points": points}, "limits": {"max_frames": [most]}}
    profile.write_text(json.dumps({**PROFILE, **told}))
    code, printed, _ = plan(monkeypatch, capsys, *arguments, "--strategy", "longest_first")
    found = json.loads((tmp_path / "o.json").read_text())["steps"]
    assert [step["update_s"] for step in found] == [0.75, 0.75]
    assert [step["makespan_s"] for step in found] == makespans
    assert "limit     longest clip of 64x64 that fits: 17 frames (80 tokens; not 21) at degree 1" in printed
    assert "update    0.750 s more" in printed and "measured)" in printed
    assert f"longest_first {sum(makespans) / 2 + 0.75:.3f} s per step in all" in printed


def test_a_worker_without_work_has_no_balance_to_tell(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(json.dumps({"steps": [[item("a", 5)]]}))
    arguments = ("--workload", files[0], "--profile", files[1], "--cluster", "1x4", "--strategy", "longest_first")
    code, printed, _ = plan(monkeypatch, capsys, *arguments)
    head, row = printed.splitlines()[1:3]
    assert code == 0 and row[: head.index("WIR") + len("WIR")].split()[-1] == "-" and "inf" not in printed


def test_compare_prints_a_line_per_strategy_and_the_pictures_are_made(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = plan(
        monkeypatch,
        capsys,
        "--workload",
        files[0],
        "--profile",
        files[1],
        "--cluster",
        "1x2",
        "--compare",
        "static,longest_first",
        "--budget",
        "0.05",
        "--gantt",
        tmp_path / "g.png",
        "--html",
        tmp_path / "g.html",
    )
    assert code == 0
    assert [line.split()[0] for line in printed.splitlines()[1:4]] == ["strategy", "static", "longest_first"]
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "g.html").read_text()
    assert page.count('class="lanes"') == 2 and "GPU 1" in page
    assert_every_picture_has_a_name(page)
    for css, name in {"text": "text encode", "vae": "VAE encode", "dit": "DiT"}.items():
        assert page.count(f"<i style='background:var(--{css})'></i>{name}</span>") == 2


def test_the_buckets_of_a_run_are_planned_without_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = plan(monkeypatch, capsys, "--config", DEMO, "--cluster", "1x2", "--steps", 2, "--budget", "0.02")
    assert code == 0
    assert "17x32x48" in printed and "memory" in printed
    assert "6 items in 2 steps on 2 workers" in printed


def test_shares_say_how_often_buckets_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    code, _, _ = plan(
        monkeypatch,
        capsys,
        "--config",
        DEMO,
        "--cluster",
        "1x2",
        "--steps",
        2,
        "--budget",
        "0",
        "--share",
        "33x32x48=1",
        "--json",
        out,
    )
    assert code == 0
    sizes: dict[str, int] = {}
    for cascade in (c for step in json.loads(out.read_text())["steps"] for c in step["cascades"]):
        if cascade["module"] == "dit":
            sizes[cascade["item"]] = sizes.get(cascade["item"], 0) + cascade["batch"]
    assert set(sizes.values()) == {2}  # the batch of that bucket, cut or not
    assert bucket_shares(["a", "b", "c"], ["a=0.5"]) == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (["a"], "is not BUCKET=SHARE"),
        (["x=1"], "no bucket 'x'"),
        (["a=2"], "between 0 and 1"),
        (["a=0.7", "b=0.7"], "sum to 1.4"),
    ],
)
def test_bad_shares_are_named(shares: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bucket_shares(["a", "b"], shares)


def test_an_item_that_no_degree_can_hold_ends_with_code_3(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "big.json"
    workload.write_text(json.dumps({"steps": [[item("huge", 129)]]}))
    code, _, err = plan(monkeypatch, capsys, "--workload", workload, "--profile", files[1], "--cluster", "1x2")
    assert code == 3
    assert "huge" in err and "Traceback" not in err


BAD_WORKLOADS = {
    "{": "is not valid JSON",
    "[]": 'must be an object with a list "steps"',
    '{"steps": []}': 'must be an object with a list "steps"',
    '{"steps": [[]]}': "step 0 is empty",
    '{"steps": [[{"id": "a"}]]}': "steps.0.0.batch is missing",
    '{"steps": [[{"id": "a", "batch": 0, "frames": 1, "height": 8, "width": 8}]]}': "batch is 0",
    '{"steps": [[{"id": "a", "batch": 1, "frames": 1, "height": 8, "width": 8, "fps": 3}]]}': "steps.0.0.fps",
    '{"steps": [[{"id": "a", "batch": 1, "frames": NaN, "height": 8, "width": 8}]]}': "frames is nan",
}


@pytest.mark.parametrize(("text", "sentence"), BAD_WORKLOADS.items())
def test_a_bad_workload_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_workload(path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_an_id_may_come_again_in_another_step_but_not_in_the_same(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(WORKLOAD))
    assert [len(step) for step in read_workload(path).steps] == [3, 2]
    path.write_text(json.dumps({"steps": [[item("a", 5), item("a", 5)]]}))
    with pytest.raises(ConfigError, match="has the id 'a' twice"):
        read_workload(path)


def test_a_cluster_file_gives_nodes_rails_and_speeds(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: [4, 2]\nnics: AABB\nspeed: {5: 0.5}\n")
    found = read_cluster(str(path))
    assert (found.nodes, found.speed) == ((4, 2), (1.0, 1.0, 1.0, 1.0, 1.0, 0.5))
    assert [place.rail for place in found.places] == list("AABBAA")
    assert [place.index for place in found.places] == [0, 1, 2, 3, 0, 1]
    path.write_text("nodes: 2\ngpus: 3\n")
    assert read_cluster(str(path)) == read_cluster("2x3")


def test_a_cluster_file_gives_islands_and_memory_nodes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: 2\ngpus: 4\nhosts: [gpu-a, gpu-b]\nislands: AABB\nnuma: [0, 0, 1, 1]\nisland_gbps: 25\n")
    found = read_cluster(str(path))
    assert (found.hosts, found.island_gbps) == (("gpu-a", "gpu-b"), 25.0)
    assert [(place.island, place.numa, place.rail) for place in found.places] == [
        ("A", 0, ""),
        ("A", 0, ""),
        ("B", 1, ""),
        ("B", 1, ""),
    ] * 2


def test_a_cluster_file_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cluster file .*c\.yaml is not UTF-8 text\."):
        read_cluster(str(path))


def test_a_cluster_file_names_its_devices_and_a_number_of_its_own_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: 2\ngpus: 2\ndevice: NVIDIA H100 80GB HBM3\n")
    found = read_cluster(str(path))
    assert (found.device, found.memory_gib, found.speed) == ("NVIDIA H100 80GB HBM3", 79.1, ())
    path.write_text("nodes: 1\ngpus: 2\ndevice: NVIDIA H100 80GB HBM3\nmemory_gib: 40\nspeed: [1, 0.5]\n")
    found = read_cluster(str(path))
    assert (found.memory_gib, found.speed) == (40.0, (1.0, 0.5))
    path.write_text("nodes: [1, 2]\ndevice: [NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-40GB]\n")
    found = read_cluster(str(path))
    assert (found.device, found.memory_gib) == ("NVIDIA A100-SXM4-40GB+NVIDIA H100 80GB HBM3", 39.3)
    assert found.speed == (pytest.approx(989.4 / 312), 1.0, 1.0)


@pytest.mark.parametrize(
    ("train", "peaks"),
    [
        (TrainConfig(autocast="bfloat16"), (312.0, 121.0, 65.0)),
        (TrainConfig(tf32="on"), (156.0, 60.5, 8.1)),
        (TrainConfig(tf32="off"), (19.5, 30.3, 8.1)),
    ],
    ids=lambda one: one.products if isinstance(one, TrainConfig) else "",
)
def test_devices_that_differ_are_planned_each_at_its_own_peak(
    tmp_path: Path, train: TrainConfig, peaks: tuple[float, ...]
) -> None:
    """In fp32 an L4 was planned at the A100's 19.5 TFLOP/s, and the A100 at 50.3: its speed was that of bf16."""
    path = tmp_path / "c.yaml"
    path.write_text("nodes: [1, 1, 1]\ndevice: [NVIDIA A100-SXM4-40GB, NVIDIA L4, Tesla T4]\n")
    config = replace(RunConfig.load(DEMO, [f"workers.cluster={path}", "workers.max=3"]), train=train)
    for cluster in (cluster_of(config), given_cluster(config)):
        assert cluster is not None
        slowest = device_speed(cluster.device, precision=train.products)
        assert slowest is not None
        planned = [speed * slowest.peak_tflops(train.products) for speed in cluster.speed]
        assert planned == pytest.approx(peaks)


def test_a_plan_counts_on_the_devices_of_its_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without them: their FLOPs and memory, and no word of an H100. A run on CPUs has none of them."""
    path = tmp_path / "c.yaml"

    def printed(cluster: str, device: str) -> str:
        path.write_text(f"nodes: 1\ngpus: 2\n{cluster}")
        options = ["--set", f"workers.device={device}", "--cluster", path, "--steps", 1]
        code, text, err = plan(monkeypatch, capsys, "--config", DEMO, *options)
        assert code == 0, err
        return text

    for device in ("auto", "cuda"):
        text = printed("device: Tesla T4\n", device)
        assert "(wan on Tesla T4)" in text and "GPU of 14.5 on 2 workers" in text and "assumed" not in text
    assert "an H100's FLOPs are assumed" in printed("memory_gib: 14.5\n", "cuda")
    assert "T4" not in printed("device: Tesla T4\n", "cpu")


@pytest.mark.parametrize("path", sorted((DEMO.parent.parent / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_cluster_loads(path: Path) -> None:
    assert read_cluster(str(path)).num_workers >= 1


BAD_CLUSTERS = {
    "nodes: 2\n": "is not a number of GPUs",
    "gpus: 8\n": "must hold nodes",
    "nodes: [8, 0]\n": "is not a number of GPUs",
    "nodes: 1\ngpus: 4\nnics: AB\n": "names 2 GPUs",
    "nodes: 1\ngpus: 2\nspeed: {7: 0.5}\n": "speed of GPU 7",
    "nodes: 1\ngpus: 2\nspeed: [1, -1]\n": "speed of GPU 1 is -1",
    "nodes: 1\ngpus: 4\nislands: AABBC\n": "islands 'AABBC' names 5 GPUs; the largest node has 4",
    "nodes: 1\ngpus: 4\nnuma: [0, 1]\n": "numa [0, 1] names 2 GPUs",
    "nodes: 2\ngpus: 4\nhosts: [a]\n": "hosts ['a'] must be 2 different names",
    "nodes: 2\ngpus: 4\nhosts: [a, a]\n": "must be 2 different names",
    "nodes: 1\ngpus: 4\nisland_gbps: -1\n": "cluster.island_gbps is -1.0; it must be at least 0",
    "nodes: 1\ngpus: 4\nmemory_gib: -1\n": "cluster.memory_gib is -1.0; it must be at least 0",
    "nodes: 1\ngpus: 2\ndevice: NVIDIA GeForce RTX 4070\n": "'NVIDIA GeForce RTX 4070' is in no table of devices; the "
    "nearest is RTX 4090. Give the name that nvidia-smi -L shows, or leave device out",
    "nodes: 2\ngpus: 2\ndevice: [A100]\n": "device ['A100'] names the GPUs of 1 nodes, and there are 2",
    "nodes: 2\ngpus: 2\ndevice: [A100, '']\n": "device '' is in no table of devices",
    "nodes: 1\ngpus: 2\ncolor: 3\n": "unknown key color (c.yaml:3)",
}


@pytest.mark.parametrize(("text", "sentence"), BAD_CLUSTERS.items())
def test_a_bad_cluster_file_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster(str(path))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("spec", ["2by8", "0x4", "x", "2x"])
def test_a_bad_cluster_spec_is_a_usage_error(spec: str) -> None:
    with pytest.raises(ConfigError, match="is not NODESxGPUS"):
        read_cluster(spec)


@pytest.mark.parametrize("text", ["nodes: 1\ngpus: 99999999", "nodes: 99999999\ngpus: 1", "nodes: [65536, 1]"])
def test_a_cluster_of_too_many_gpus_is_a_slip(text: str, tmp_path: Path) -> None:
    """It would be planned for hours, in all of the machine's memory."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"describes [\d,]+ GPUs; plans are for 65,536 at most"):
        read_cluster(str(tmp_path / "c.yaml"))
    with pytest.raises(ConfigError, match="has 99,999,999 GPUs; plans are for 65,536 at most"):
        read_cluster("1x99999999")
    assert read_cluster("8192x8").num_workers == 65_536


def test_a_bad_profile_is_one_sentence(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(PROFILE | {"latency": [point("dit", 5, 1, -1.0)]}))
    code, _, err = plan(monkeypatch, capsys, "--workload", files[0], "--profile", bad, "--cluster", "1x2")
    assert code == 2 and err.count("\n") == 1 and "seconds is -1.0" in err


def test_plan_errors_are_not_usage_errors() -> None:
    from app.settings.errors import exit_code

    assert exit_code(PlanError("x")) == 3


def test_a_bar_has_a_label_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of narrow bars lay over their neighbours'."""
    from matplotlib.figure import Figure

    def cascade(name: str, start_s: float, end_s: float) -> Cascade:
        return Cascade(
            id=name, module="dit", step=0, parts=(Part(item=name, first=0, count=1),), degree=8,
            workers=tuple(range(8)), start_s=start_s, end_s=end_s,
        )  # fmt: skip

    cuts = {"121": (0, 90), "105": (90, 93), "77": (93, 95.5), "93": (95.5, 98.8), "33": (98.8, 100)}
    items = {(0, name): Item(id=name, batch=1, frames=int(name), height=64, width=64, text_tokens=8) for name in cuts}
    step = StepPlan(
        step=0, cascades=tuple(cascade(name, *ends) for name, ends in cuts.items()), makespan_s=100.0,
        lower_bound_s=100.0, planning_s=0.0, idle_ratio=0.0,
    )  # fmt: skip
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: drawn.append(self))
    write_gantt(tmp_path / "a.png", [Plan(strategy="static", steps=(step,))], Cluster(nodes=(8,)), items)
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["121f b1 sp8", "105f\nb1\nsp8", "77f\nb1\nsp8", "93f\nb1\nsp8"]
    for text, bar in zip(axes.texts, axes.patches, strict=False):
        inside, room = text.get_window_extent(), bar.get_window_extent()
        assert room.x0 <= inside.x0 and inside.x1 <= room.x1 and room.height >= inside.height
