"""The shipped configs of large models fit the GPUs that they name, by what a dry run predicts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actors.plan.costs.needs import BAG, SOLO, NeedLine, Needs, clip_kind
from actors.plan.types import PlanError
from actors.planning.demand import largest_upload
from actors.planning.forecasts import Forecasts
from actors.planning.memory import MemoryForecast
from app.bench.headroom import write_numbers
from app.plan.preview import PlanRequest, run_plan
from app.settings.config import RunConfig
from data.buckets import BucketTable, ClipShape, Refusal
from ops.geometry import Geometry, PixelShape
from ops.upload_room import uploads_gib

CONFIGS = Path(__file__).parents[2] / "configs"
SEVERAL = {"wan2.2-t2v-a14b-both-lora-80gb"}  # GPUs of the size that it names, for both transformers
CASES = {  # every config that names its GPUs, and these as a described cluster; full trainings take eight of 80 GB
    file.stem: "gpu-8x80gb" if full or file.stem in SEVERAL else f"gpu-1x{size}gb"
    for file in sorted((CONFIGS / "runs").glob("*.yaml"))
    for full, size in re.findall(r"-(full)$|-(\d+)gb$", file.stem)
}
# ViT-H/14, by which Wan2.1's pipelines of image to video see pictures
CLIP_H = {
    **{"model_type": "clip_vision_model", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32},
    **{"num_attention_heads": 16, "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "projection_dim": 1024},
}
# Parameters, GiB of a DiT row alone and in a bag, of the text encoder with a call: what the prediction of minutes says.
PREDICTED = {
    "wan2.1-14b-full": (14_288_491_584, 6.33e-4, 6.52e-4, 10.7),
    "hunyuan-13b-full": (12_821_012_544, 4.79e-4, 4.90e-4, 13.5),
}


def known(name: str, clips: Sequence[PixelShape]) -> MemoryForecast:
    """The forecast of a config by these numbers."""
    parameters, alone, in_bag, text = PREDICTED[name]
    needs = Needs()
    for kind, slope in ((SOLO, alone), (BAG, in_bag)):
        needs.predicted["dit", kind] = NeedLine(fixed_gib=0.17, gib_per_unit=slope)
    needs.predicted["text", SOLO] = NeedLine(fixed_gib=text, gib_per_unit=0.0)
    for clip in clips:
        needs.predicted["vae", clip_kind(clip)] = NeedLine(fixed_gib=0.0, gib_per_unit=1.5)
    return MemoryForecast(
        parameters=parameters,
        trained=parameters,
        parameter_bytes=2,
        state_bytes=16,
        vae_gib=0.46,
        host_encoders_gib=text,
        host_uploads_gib=uploads_gib(largest_upload(clips)),
        largest_parameter=5120 * 13824,
        needs=needs,
    )


def plan(folder: Path, name: str, *changes: str, cluster: Path | None = None) -> None:
    """One step of the config's buckets, its encoders by their numbers alone, on its cluster or that of a file."""
    file = CONFIGS / "runs" / f"{name}.yaml"
    parts = ["vae", "text", *(["image"] if RunConfig.load(file).model.image else [])]
    paths = [f"model.{part}.path={folder}" for part in parts]
    model = RunConfig.load(file, [*paths, "model.dit.path=null"]).model
    write_numbers(folder, model.dit)
    if model.image:
        (folder / "image_encoder").mkdir()
        (folder / "image_encoder" / "config.json").write_text(json.dumps(CLIP_H))
    if model.text.vision_dim:
        (folder / "feature_extractor").mkdir()
        (folder / "feature_extractor" / "preprocessor_config.json").write_text("{}")
    elif (
        model.text.sees_picture
    ):  # its Llama is the language model of a LLaVA, whose vision tower is its class's default
        encoder = folder / "text_encoder" / "config.json"
        llava = {"model_type": "llava", "text_config": json.loads(encoder.read_text()), "image_token_index": 128257}
        encoder.write_text(json.dumps(llava))
        (folder / "image_processor").mkdir()
        (folder / "image_processor" / "preprocessor_config.json").write_text("{}")
    run_plan(
        PlanRequest(
            workload=None,
            config=file,
            overrides=[*paths, "model.dit.path=null", "data.items_per_step=2", *changes],
            from_data=False,
            profile=None,
            cluster=str(cluster or CONFIGS / "clusters" / f"{CASES[name]}.yaml"),
            strategies=(),
            budget_s=0.01,
            steps=1,
            seed=0,
        )
    )


def host_gib(shown: str) -> tuple[float, float]:
    """GiB that states take of a node's host memory, with copies for other nodes, and encoders; what is on its way to
    and from GPUs takes half a GiB of each for the update of state in host memory: three buckets of gradient and two of
    parameters."""
    (told,) = re.findall(r"host memory of a node [\d.]+ of 2048 \((.*?)\)", shown)
    of = {name: float(gib) for name, gib in re.findall(r"([a-z ]+) ([\d.]+)(?:, |$)", told)}
    assert of["gradients and updates on their way"] == 8 * (3 * 0.125 + 2 * 0.0625)
    return of["two versions of the optimizer state"] + of.get("copies for other nodes", 0.0), of["encoders"]


def free_gib(shown: str) -> float:
    ((free, room),) = re.findall(r"free (-?[\d.]+) of ([\d.]+) for cascades", shown)
    assert float(free) < float(room)
    return float(free)


@pytest.mark.parametrize("name", PREDICTED)
def test_a_whole_model_fits_eight_gpus_by_what_was_predicted_of_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecasts, "of", lambda self, *changed: known(name, self._clips))
    plan(tmp_path, name)
    shown = capsys.readouterr().out
    assert free_gib(shown) > 0
    assert "one gradient per node in its GPUs' memory, optimizer state in host memory" in shown
    plan(tmp_path, name, "workers.memory_gib=58")  # 20 GiB and more of each GPU stay free, at 720p too
    limited = capsys.readouterr().out
    assert free_gib(limited) > 0 and "GiB of a GPU of 58 on 8 workers" in limited
    with pytest.raises(PlanError, match=r"GiB are states .* It fits with .*train\.memory\.gradients: auto"):
        plan(tmp_path, name, "train.memory.gradients=own")
    with pytest.raises(PlanError, match=r"workers.min 1 is too few.*Set workers.min to [2-8]\."):
        plan(tmp_path, name, "workers.min=1")
    assert re.search(
        r"host memory of a node [\d.]+ of 2048 \(two versions of the optimizer state .*, encoders [\d.]+", shown
    )
    assert re.search(r"host memory from a cache that `heddle data cache` has filled: at most [\d.]+", shown)
    states, encoders = host_gib(shown)
    eight = tmp_path / "eight.yaml"
    eight.write_text("nodes: 8\ngpus: 8\nmemory_gib: 79.2\nhost_gib: 2048\n")
    plan(tmp_path, name, cluster=eight)
    of_eight, _ = host_gib(capsys.readouterr().out)
    said = " ".join((CONFIGS / "runs" / f"{name}.yaml").read_text().replace("\n# ", " ").split())
    assert f"{states:.0f} GiB of it on one node or on two and {of_eight:.0f} on each of eight" in said
    assert re.search(rf"the node's one [a-z ]+ \({encoders:.0f} GiB\)", said)
    small = tmp_path / "cluster.yaml"
    small.write_text("nodes: 1\ngpus: 8\nmemory_gib: 79.2\nhost_gib: 128\n")  # less than the optimizer's state
    with pytest.raises(PlanError, match=r"a node has 128\.0 GiB of host memory .* takes [\d.]+ GiB of it"):
        plan(tmp_path, name, cluster=small)
    small.write_text("nodes: 1\ngpus: 8\nmemory_gib: 79.2\n")
    plan(tmp_path, name, cluster=small)
    assert "which was not checked: host_gib in the cluster file says" in capsys.readouterr().out


def test_weights_leave_the_gpus_where_nothing_else_helps_and_a_plan_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """30.5 thousand million weights in 60 blocks on 8 x 80 GB."""
    name = "wan2.1-14b-full"

    def thirty(self: Forecasts, *changed: object) -> MemoryForecast:
        weights, block = 30_500_000_000, 500_000_000
        large = replace(known(name, self._clips), parameters=weights, trained=weights)
        return replace(large, in_blocks=2 * 60 * block, largest_block=2 * block)

    monkeypatch.setattr(Forecasts, "of", thirty)
    roomy = tmp_path / "cluster.yaml"
    roomy.write_text("nodes: 1\ngpus: 8\nmemory_gib: 79.2\nhost_gib: 8192\n")
    plan(tmp_path, name, cluster=roomy)
    shown = capsys.readouterr().out
    assert free_gib(shown) > 0
    assert "optimizer state in host memory, weights of blocks once per node in host memory" in shown
    assert re.search(r"two versions of the optimizer state [\d.]+, weights 56\.81", shown)
    assert "a pass copies 55.88 of it to each GPU, for its forward and for its backward: 4.80 s at least" in shown
    (states,) = re.findall(r"states ([\d.]+) \(weights 2.79, gradient 14.3", shown)
    assert float(states) == pytest.approx(17.8, abs=0.5)
    with pytest.raises(PlanError, match=r"It fits with .*train\.memory\.parameters: node"):
        plan(tmp_path, name, "train.memory.parameters=replicated", cluster=roomy)


USUAL = ((1280, 720), (720, 1280), (1024, 1024), (1440, 1080), (640, 480), (832, 480), (480, 832), (640, 640))


@pytest.mark.parametrize("name", [name for name in CASES if "-lora-" in name])
def test_a_shipped_lora_takes_clips_of_the_usual_shapes(name: str) -> None:
    """Two ratios, 16:9 and 9:16, dropped what is square; and 640x480 is below 0.8 of the pixels of 480p."""
    data = RunConfig.load(CONFIGS / "runs" / f"{name}.yaml").data
    if data.buckets.table:  # of models that were trained in one shape
        text = (CONFIGS / "runs" / f"{name}.yaml").read_text()
        assert re.search(r"# clips of another shape are dropped\b.*\n  buckets: \{table", text), text
        return
    table = BucketTable.build(data.buckets, Geometry())
    smallest = min(entry.area for entry in table.entries)
    frames = max(entry.frames for entry in table.entries)
    for width, height in USUAL:
        if "480p" not in data.buckets.resolutions and width * height < smallest:
            continue  # of 540p, or for pictures of 1024px
        clip = ClipShape(frames=frames, height=height, width=width, fps=0.0 if frames == 1 else 24.0)
        found = table.choices(clip, data.fps)
        assert not isinstance(found, Refusal), f"{width}x{height}: {found}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_a_shipped_config_fits_the_gpus_that_it_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the prediction made anew."""
    plan(tmp_path, name)
    assert free_gib(capsys.readouterr().out) > 0
