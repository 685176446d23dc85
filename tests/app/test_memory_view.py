"""The memory of a GPU before one is touched: shown where it fits, refused with a remedy where it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.plan.types import Item, Module, PlanError
from app.plan.dry_run import dry_run
from app.plan.memory import pixel_line
from app.plan.preview import PlanRequest, run_plan
from app.settings.config import RunConfig
from data.errors import DataError
from tests.ops.test_vae import every

# One wide layer on single GPUs: of every degree and layer the prediction runs a pass, which takes seconds.
WIDE = ["model.dit.ffn_dim=1000000", "data.buckets.table=[1x32x48]", "data.batch.max_batch=1"]
WIDE += ["model.dit.num_layers=1", "planner.degrees=[1]"]
DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"


def cluster(folder: Path, gib: float, gpus: int = 2) -> str:
    path = folder / "cluster.yaml"
    path.write_text(f"nodes: 1\ngpus: {gpus}\nmemory_gib: {gib}\n")
    return str(path)


def plan(folder: Path, gib: float, *settings: str) -> None:
    run_plan(
        PlanRequest(
            workload=None,
            config=DEMO,
            overrides=["planner.degrees=[1,2]", *settings],
            from_data=False,
            profile=None,
            cluster=cluster(folder, gib),
            strategies=(),
            budget_s=0.01,
            steps=1,
            seed=0,
        )
    )


def test_the_table_adds_up_to_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(tmp_path, 8.0)
    shown = capsys.readouterr().out
    (states,) = re.findall(r"states ([\d.]+) \(weights", shown)
    ((free, room),) = re.findall(r"free ([\d.]+) of ([\d.]+) for cascades", shown)
    assert float(room) == pytest.approx(0.96 * (8.0 - 2.0 - 0.44) - float(states), abs=0.02)
    worst = [float(need) for need in re.findall(r"worst \w+ cascade ([\d.]+) \(", shown)]
    assert len(worst) == 3 and float(free) == pytest.approx(float(room) - max(worst), abs=0.02)
    assert "communicators of bags at most 0.44" in shown
    assert re.search(r"\npixels +[\d.]+ MiB of decoded clips in memory of all nodes, 3 steps of ", shown)


def test_a_node_with_too_little_memory_of_its_own_is_refused_and_one_with_enough_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cluster(tmp_path, 8.0)
    Path(path).write_text(Path(path).read_text() + "host_gib: 0.001\n")
    monkeypatch.setattr("tests.app.test_memory_view.cluster", lambda folder, gib: path)
    short = r"a node has 0\.0 GiB of host memory for training, .*two versions.*set sample\.every and valida"
    with pytest.raises(PlanError, match=short):
        plan(tmp_path, 8.0, "sample.every=100", "checkpoint.every=100", 'sample.prompts=["a dot"]')
    Path(path).write_text(Path(path).read_text().replace("0.001", "64"))
    plan(tmp_path, 8.0)
    assert re.search(r"host memory of a node [\d.]+ of 64 \(two versions of the optimizer", capsys.readouterr().out)


@pytest.mark.long
def test_uploads_to_the_gpus_are_counted_by_the_largest_clip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pinned blocks for two uploads of it, on both GPUs of the node; four blocks at least."""
    for table, gib in (("[1x32x48]", 2 * 4 * 32 / 1024), ("[41x1024x1024]", 2 * 2 * 4 * 32 / 1024)):
        plan(tmp_path, 64.0, *WIDE, "model.dit.ffn_dim=64", f"data.buckets.table={table}")
        assert f", uploads {gib:.2f})" in capsys.readouterr().out


def test_decoded_clips_are_counted_by_the_largest_step_but_for_those_whose_latents_are_cached() -> None:
    def clips(batch: int, *cached: Module) -> Item:
        name = f"{batch} {cached}"
        return Item(id=name, batch=batch, frames=16, height=512, width=1024, text_tokens=8, cached=cached)

    def line(*settings: str) -> str:
        steps = [[clips(1)], [clips(2), clips(3, "text"), clips(99, "text", "vae")]]
        return pixel_line(steps, RunConfig.load(DEMO, settings))

    sizes = "pixels    0.35 GiB of decoded clips in memory of all nodes, 3 steps of 0.12 GiB;\n          "
    sizes += "decoded ahead of them: "
    assert pytest.approx(0.117, abs=1e-3) == 5 * 16 * 512 * 1024 * 3 / 2**30
    assert line() == sizes + "at most a quarter of the smallest object store (data.engine.object_store_mb)"
    assert line("data.engine.object_store_mb=64") == sizes + "at most 64.0 MiB (data.engine.object_store_mb)"
    assert line("data.engine.kind=pool") == sizes + "2 steps (data.engine.lookahead)"
    assert "0.47 GiB of decoded clips in memory of all nodes, 4 steps of" in line("planner.lookahead=2")
    assert pixel_line([[clips(4, "vae")]], RunConfig.load(DEMO)) == ""


@pytest.mark.long
def test_graphs_of_small_passes_are_counted_by_what_fits_such_a_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing where not one clip fits such a pass, and nothing without graphs. It is no room for cascades."""
    model = ["model.dit.num_layers=2", "model.dit.num_heads=12", "model.dit.head_dim=128", "model.dit.ffn_dim=8960"]
    model += ["planner.degrees=[1]", "data.batch.max_batch=1"]
    states, graphs = [], []
    for table, setting in (("[1x32x48]", "auto"), ("[1x32x48]", "false"), ("[1x1024x1024]", "auto")):
        plan(tmp_path, 64.0, *model, f"data.buckets.table={table}", f"model.dit.cuda_graphs={setting}")
        shown = capsys.readouterr().out
        states += [float(gib) for gib in re.findall(r"states ([\d.]+) \(weights", shown)]
        graphs.append([float(gib) for gib in re.findall(r", CUDA graphs ([\d.]+)\)", shown)])
    ((counted,), without, too_large) = graphs
    assert 0.5 < counted < 16 and not without and not too_large
    assert states[0] - states[1] == pytest.approx(counted, abs=0.02)


def test_a_device_too_small_for_the_states_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError,
        match=r"a GPU of 2 GiB lacks [\d.]+ GiB on 2 workers .* are states \(weights .*makes it fit",
    ):
        plan(tmp_path, 2.0)


def test_a_tiny_size_is_answered_with_what_lacks_of_it_and_no_minus(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        plan(tmp_path, 64.0, "workers.device=cpu", "workers.memory_gib=0.001")
    assert not re.search(r" -?0\.0 GiB", str(refused.value)), refused.value


def test_a_dry_run_shows_memory_before_it_looks_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"data.sources=[{{path: {tmp_path}/none.tar}}]"
    with pytest.raises(DataError, match="does not exist"):
        dry_run(DEMO, [f"run.dir={tmp_path}", "workers.memory_gib=1", missing])
    assert re.search(r"states [\d.]+ .*\n +room 0\.\d+ for cascades", capsys.readouterr().out)


def test_a_dry_run_tells_all_weights_from_those_that_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It called the factors of LoRA on Wan2.1-1.3B the model: 21.9 M weights."""
    missing = f"data.sources=[{{path: {tmp_path}/none.tar}}]"
    for settings in ([], ["model.dit.lora_rank=2"]):
        with pytest.raises(DataError, match="does not exist"):
            dry_run(DEMO, [f"run.dir={tmp_path}", missing, *settings])
    full, lora = re.findall(r"^model .*: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(r"[\d.]+ M weights", full)
    assert re.fullmatch(re.escape(full) + r", [\d.]+ M trained", lora)


@pytest.mark.parametrize(("device", "dtype", "memory"), [("cpu", "float32", False), ("auto", "bfloat16", True)])
def test_a_dry_run_with_the_file_of_a_gpu_cluster_says_throughout_what_its_workers_compute_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, dtype: str, memory: bool
) -> None:
    every("wan").model.save_pretrained(tmp_path / "vae")
    vae = f"model.vae={{kind: diffusers, path: {tmp_path}}}"
    missing = f"data.sources=[{{path: {tmp_path}/none.tar}}]"
    settings = [
        vae,
        "data.buckets.table=[1x32x48]",
        missing,
        f"workers.device={device}",
        f"workers.cluster={cluster(tmp_path, 8.0)}",
        "workers.max=2",
    ]
    with pytest.raises(DataError, match="does not exist"):
        dry_run(DEMO, [f"run.dir={tmp_path}", *settings])
    shown = capsys.readouterr().out
    assert set(re.findall(r"VAE in (\w+)", shown)) == {dtype}, shown
    assert ("of a GPU of 8" in shown) == memory
    assert ("memory    unknown: workers.device is cpu" in shown) != memory


def test_fewer_workers_than_the_state_needs_are_refused_before_a_run_shrinks_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer's state is shared by all workers: one of them alone cannot hold it."""
    wide = [*WIDE, "train.memory.state=device"]
    plan(tmp_path, 64.0, *wide, "workers.min=2")
    shown = capsys.readouterr().out
    ((free,), (optimizer,)) = re.findall(r"free ([\d.]+) of", shown), re.findall(r"optimizer ([\d.]+)", shown)
    short = 64.0 - (float(free) - 0.3 * float(optimizer)) / 0.96
    with pytest.raises(PlanError, match=r"workers.min 1 is too few.* Set workers.min to 2"):
        plan(tmp_path, short, *wide, "workers.min=1")
    plan(tmp_path, short, *wide, "workers.min=2")


@pytest.mark.long
def test_a_device_without_room_for_the_state_has_it_in_host_memory_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = [*WIDE, "workers.min=2"]
    plan(tmp_path, 64.0, *wide)
    shown = capsys.readouterr().out
    (optimizer,) = re.findall(r"optimizer ([\d.]+)", shown)
    assert float(optimizer) > 1.0 and "optimizer state in host memory" not in shown
    ((free,),) = (re.findall(r"free ([\d.]+) of", shown),)
    short = 64.0 - (float(free) + 0.5 * float(optimizer)) / 0.96
    plan(tmp_path, short, *wide)
    shown = capsys.readouterr().out
    assert "optimizer 0.00" in shown and "optimizer state in host memory" in shown
    ((host,),) = (re.findall(r"two versions of the optimizer state ([\d.]+)", shown),)
    assert float(host) == pytest.approx(2 * 2 * float(optimizer) * 4 / 3, rel=0.01), (
        "both workers' parts, master included, twice"
    )
    with pytest.raises(PlanError, match=r"fits with .*train\.memory\.state: host"):
        plan(tmp_path, short, *wide, "train.memory.state=device")
