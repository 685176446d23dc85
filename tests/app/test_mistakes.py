"""What a stranger types wrong: one sentence with value and remedy, the documented exit code, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app import cli

ROOT = Path(__file__).parent.parent.parent
DEMO = str(ROOT / "configs/runs/demo.yaml")
WORKLOAD = str(ROOT / "configs/bench/A-16gpu.json")
H100 = str(ROOT / "configs/profiles/hunyuan-13b-720p-h100.json")
WITH = ["plan", "--cluster", "2x8", "--workload", WORKLOAD, "--profile"]
PLAN = ["plan", "--workload", WORKLOAD, "--profile", H100]

# name -> content; made in the folder where the command runs
FILES = {
    "empty.json": "",
    "list.json": "[]",
    "torn.json": '{"steps": [',
    "text.txt": "hello",
    "nosteps.json": '{"steps": []}',
    "empty-step.json": '{"steps": [[]]}',
    "noid.json": '{"steps": [[{"batch": 1}]]}',
    "negative.json": '{"steps": [[{"id": "a", "batch": -1, "frames": 1, "height": 64, "width": 64}]]}',
    "nodegree.json": json.dumps({"model": "m", "degrees": {"dit": []}, "latency": []}),
    "badseconds.json": json.dumps(
        {
            "model": "m",
            "degrees": {"dit": [1]},
            "latency": [
                {"module": "dit", "batch": 1, "frames": 1, "height": 64, "width": 64, "degree": 1, "seconds": -1}
            ],
        }
    ),
    "geometry.json": json.dumps({"model": "m", "degrees": {"dit": [1]}, "latency": [], "geometry": 3}),
    "limits.json": json.dumps({"model": "m", "degrees": {"dit": [1]}, "latency": [], "limits": []}),
    "empty.yaml": "",
    "list.yaml": "- 1\n",
    "torn.yaml": "run: {name: [",
    "binary.yaml": "\x00\x01",
    "nodes.yaml": "nodes: 0\ngpus: 2\n",
    "speed.yaml": "nodes: [2]\nspeed: {9: 1.0}\n",
}

MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "plan-nothing": (["plan"], 2, "give either --workload FILE or --config"),
    "plan-both": ([*PLAN, "--config", DEMO], 2, "give either --workload FILE or --config"),
    "plan-no-profile": (["plan", "--workload", WORKLOAD], 2, "--workload needs --profile"),
    "plan-set-of-a-workload": ([*PLAN, "--cluster", "2x8", "--set", "planner.budget_s=3"], 2, "--set is for --config"),
    "plan-steps-of-a-workload": ([*PLAN, "--cluster", "2x8", "--steps", "3"], 2, "--steps is for --config"),
    "plan-gantt-text": ([*PLAN, "--cluster", "2x8", "--gantt", "a.txt"], 2, "give a file that ends in .png"),
    "lint-caption-of-a-config": (["data", "lint", "--config", DEMO, "--caption", "txt"], 2, "--caption is for PATH"),
    "plan-seed-of-a-workload": ([*PLAN, "--cluster", "2x8", "--seed", "0"], 2, "--seed is for --config"),
    "plan-seed-of-data": (
        ["plan", "--config", DEMO, "--from-data", "--seed", "1"],
        2,
        "--seed is for buckets drawn from --config; real data is drawn by train.seed of the run.",
    ),
    "plan-strategy-beside-compare": (
        [*PLAN, "--cluster", "2x8", "--strategy", "static", "--compare", "flexsp,cascade"],
        2,
        "name static in --compare and leave --strategy out",
    ),
    "check-set-without-a-run": (["check", "--set", "run.dir=elsewhere"], 2, "--set is for --config"),
    "index-set-of-a-path": (["data", "index", ".", "--set", "data.fps=16"], 2, "--set is for --config"),
    "plan-missing-workload": (["plan", "--workload", "no.json", "--profile", H100], 2, "no.json does not exist"),
    "plan-workload-folder": (["plan", "--workload", ".", "--profile", H100], 2, "workload . "),
    "plan-empty-workload": (["plan", "--workload", "empty.json", "--profile", H100], 2, "is not valid JSON"),
    "plan-list-workload": (["plan", "--workload", "list.json", "--profile", H100], 2, "must be an object"),
    "plan-torn-workload": (["plan", "--workload", "torn.json", "--profile", H100], 2, "is not valid JSON"),
    "plan-no-steps": (["plan", "--workload", "nosteps.json", "--profile", H100], 2, "at least one step"),
    "plan-empty-step": (["plan", "--workload", "empty-step.json", "--profile", H100], 2, "give it at least one item"),
    "plan-no-id": (["plan", "--workload", "noid.json", "--profile", H100], 2, "id is missing"),
    "plan-negative": (
        ["plan", "--workload", "negative.json", "--profile", H100],
        2,
        "must be at least 1",
    ),
    "plan-binary-workload": (["plan", "--workload", "raw.bin", "--profile", H100], 2, "is not UTF-8 text"),
    "plan-missing-profile": ([*WITH, "no.json"], 2, "no.json"),
    "plan-folder-profile": ([*WITH, "."], 2, "profile . is a folder without a run; give the file that"),
    "plan-other-profile": (
        ["plan", "--config", DEMO, "--profile", H100],
        3,
        "of hunyuan-video-13b on NVIDIA H100 80GB, lists no",
    ),
    "plan-text-profile": ([*WITH, "text.txt"], 2, "JSON"),
    "plan-list-profile": ([*WITH, "list.json"], 2, "object"),
    "plan-binary-profile": ([*WITH, "raw.bin"], 2, "profile"),
    "plan-no-degrees": ([*WITH, "nodegree.json"], 2, "latency"),
    "plan-bad-seconds": ([*WITH, "badseconds.json"], 2, "positive number"),
    "plan-geometry": ([*WITH, "geometry.json"], 2, "geometry"),
    "plan-limits": ([*WITH, "limits.json"], 2, "limits"),
    "plan-config-profile": (["plan", "--config", DEMO, "--set", "planner.profile=text.txt"], 2, "JSON"),
    "train-cluster-file": (["train", "--config", DEMO, "--cluster", "no.yaml"], 2, "no.yaml does not exist"),
    "train-cluster-small": (
        ["train", "--config", DEMO, "--cluster", "1x2"],
        2,
        "workers.max is 3, and workers.cluster",
    ),
    "plan-cluster-word": ([*PLAN, "--cluster", "many"], 2, "is not NODESxGPUS"),
    "plan-cluster-zero": ([*PLAN, "--cluster", "0x8"], 2, "is not NODESxGPUS"),
    "plan-cluster-file": ([*PLAN, "--cluster", "no.yaml"], 2, "no.yaml does not exist"),
    "plan-cluster-empty": ([*PLAN, "--cluster", "empty.yaml"], 2, "must hold nodes"),
    "plan-cluster-nodes": ([*PLAN, "--cluster", "nodes.yaml"], 2, "nodes: [8, 8]"),
    "plan-cluster-speed": ([*PLAN, "--cluster", "speed.yaml"], 2, "positive number"),
    "plan-strategy": ([*PLAN, "--cluster", "2x8", "--strategy", "magic"], 2, "is not one of"),
    "plan-compare": ([*PLAN, "--cluster", "2x8", "--compare", "static,magic"], 2, "is not one of"),
    "plan-budget": ([*PLAN, "--cluster", "2x8", "--budget", "-1"], 2, "budget"),
    "plan-budget-nan": ([*PLAN, "--cluster", "2x8", "--budget", "nan"], 2, "budget"),
    "plan-too-small": ([*PLAN, "--cluster", "1x1"], 3, "1 worker: the smallest is 2. Add 1 worker."),
    "plan-json-nowhere": ([*PLAN, "--cluster", "2x8", "--json", "text.txt/p.json"], 2, "--json text.txt/p.json"),
    "plan-json-folder": ([*PLAN, "--cluster", "2x8", "--json", "."], 2, "--json . "),
    "plan-share": (["plan", "--config", DEMO, "--share", "9x9x9=1"], 2, "has no bucket"),
    "plan-share-word": (["plan", "--config", DEMO, "--share", "lots"], 2, "is not BUCKET=SHARE"),
    "plan-share-nan": (["plan", "--config", DEMO, "--share", "1x64x96=nan"], 2, "--share"),
    "plan-seed": (["plan", "--config", DEMO, "--seed", "-1"], 2, "seed"),
    "config-missing": (["plan", "--config", "no.yaml"], 2, "no.yaml does not exist"),
    "config-folder": (["plan", "--config", "."], 2, "is no file"),
    "config-empty": (["plan", "--config", "empty.yaml"], 2, "run is missing"),
    "config-list": (["plan", "--config", "list.yaml"], 2, "must hold a mapping"),
    "config-torn": (["plan", "--config", "torn.yaml"], 2, "is not valid YAML"),
    "config-binary": (["plan", "--config", "binary.yaml"], 2, "binary.yaml"),
    "config-latin": (["plan", "--config", "raw.bin"], 2, "raw.bin"),
    "set-nothing": (["plan", "--config", DEMO, "--set", "train.steps"], 2, "is not key=value"),
    "set-unknown": (["plan", "--config", DEMO, "--set", "train.stpes=3"], 2, "did you mean train.steps?"),
    "dry-lora": (["train", "--config", DEMO, "--dry-run", "--set", "model.dit.lora_rank=-2"], 2, "at least 0"),
    "dry-model": (["train", "--config", DEMO, "--dry-run", "--set", "model.dit.path=nowhere"], 2, "config.json"),
    "dry-run-dir": (["train", "--config", DEMO, "--dry-run", "--set", "run.dir=text.txt/x"], 2, "text.txt"),
    "profile-device": (["profile", "--config", DEMO, "--device", "tpu"], 2, "is not one of auto, cpu, cuda"),
    "profile-repeats": (["profile", "--config", DEMO, "--repeats", "0"], 2, "repeats"),
    "profile-out": (["profile", "--config", DEMO, "--out", "text.txt/p.json"], 2, "--out text.txt/p.json"),
    "sample-missing": (["sample", "--checkpoint", "nowhere"], 2, "nowhere does not exist"),
    "sample-file": (["sample", "--checkpoint", "text.txt"], 2, "text.txt"),
    "sample-from": (["sample", "--from", "."], 2, "--from . has no model_index.json"),
    "sample-neither": (["sample", "--prompt", "a dot"], 2, "give --checkpoint RUN or --from FOLDER"),
    "sample-empty": (["sample", "--checkpoint", "."], 2, "is no complete checkpoint"),
    "sample-suffix": (["sample", "--checkpoint", ".", "--out", "x.gif"], 2, "must end in .mp4"),
    "sample-prompts": (["sample", "--checkpoint", ".", "--prompts", "no.txt"], 2, "no.txt cannot be read"),
    "sample-guidance": (["sample", "--checkpoint", ".", "--guidance-scale", "nan", "--out", "x.mp4"], 2, "guidance"),
    "sample-shift": (["sample", "--checkpoint", ".", "--flow-shift", "0", "--out", "x.mp4"], 2, "flow-shift"),
    "sample-fps": (["sample", "--checkpoint", ".", "--fps", "0", "--out", "x.mp4"], 2, "fps"),
    "export-missing": (["export", "--checkpoint", "nowhere", "--to", "out"], 2, "nowhere does not exist"),
    "export-dtype": (["export", "--checkpoint", ".", "--to", "out", "--dtype", "int3"], 2, "int3 is not known"),
    "export-occupied": (["export", "--checkpoint", ".", "--to", "."], 2, "is not an empty folder"),
    "report-missing": (["report", "nowhere"], 2, "nowhere"),
    "report-empty": (["report", "."], 2, "config.yaml"),
    "report-file": (["report", "text.txt"], 2, "text.txt"),
    "compare-out": (
        ["compare", "--config", DEMO, "--strategy", "static", "--strategy", "cascade", "--out", "text.txt/x.html"],
        2,
        "--out text.txt/x.html cannot be written (text.txt is a file)",
    ),
    "bench-unknown": (["bench", "magic"], 2, "magic"),
    "bench-paper": (["bench", "papers", "--paper", "x"], 2, "'x' is none of adaptiveload, arachne"),
    "bench-papers-out": (["bench", "papers", "--out", "text.txt"], 2, "--out text.txt/papers.html cannot be written"),
    "bench-peers-out": (["bench", "peers", "--out", "."], 2, "--out . cannot be written (Is a directory)"),
    "bench-peers-config": (["bench", "peers", "--config", "no.yaml"], 2, "--config no.yaml is no file"),
    "bench-cluster-out": (["bench", "cluster", "--out", "text.txt/x.html"], 2, "--out text.txt/x.html cannot be"),
    "bench-cluster-both": (["bench", "cluster", "--set", "A-16gpu", "--gpus", "4"], 2, "leave out --gpus"),
    "workers-missing": (["workers", "list", "nowhere"], 2, "nowhere"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_its_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, content in FILES.items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    (tmp_path / "raw.bin").write_bytes(b"\xff\xfe\x00\x80")
    monkeypatch.chdir(tmp_path)
    arguments, code, sentence = MISTAKES[name]
    monkeypatch.setattr(sys, "argv", ["heddle", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err, shown.err
    assert ended.value.code == code, shown.err
    assert sentence in " ".join(shown.err.split()), shown.err
    if shown.err.startswith("error: "):
        assert shown.err.count("\n") == 1
