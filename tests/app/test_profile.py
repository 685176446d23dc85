"""The profile command measures every bucket and writes what planners read."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.plan.costs.exchange import exchange_speed
from actors.plan.costs.forms import FORMS, Load
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import Footprint
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.worker.meter import TensorMeter
from app.device.bag import PipedBag, carried_out, degrees_here
from app.device.bench import Bench
from app.device.choice import pick_device
from app.device.measuring import Measuring, ProcessBags, footprint_of, is_known
from app.device.points import LargestBatch, LongestClip, PointTimes, ProfiledShape, ProfilePoint, timed
from app.device.profile import offer_residual, run_profile
from app.device.summary import need_lines
from app.device.wanted import by_information, figures_of, largest_of, longest_of, points_of, shapes_of
from app.inputs.limits import largest_batches, longest_clips
from app.settings.config import RunConfig
from data.types import Bucket
from ops.comm.collectives import Group
from ops.models.folders import resolve
from ops.spatial_temporal.choice import WHOLE
from ops.typed import ConfigError
from tests.actors.plan.test_profile_and_costs import tiled_vae

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"
TINY = ["data.buckets.table=[1x32x32, 5x32x48]", "data.batch.max_batch=3", "model.dit.num_layers=1"]


BAGS = ProcessBags(config=RunConfig.load(DEMO), device="cpu")


def test_every_bucket_is_measured_at_batch_1_and_at_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    profile = read_profile(out)
    expected = {
        (module, batch, frames, 32, width, 1)
        for module in ("text", "vae", "dit")
        for frames, width in ((1, 32), (5, 48))
        for batch in (1, 3)
    }
    assert set(profile.measured) == expected
    assert all(seconds > 0 for seconds in profile.measured.values())
    assert profile.legal_degrees("dit", Samples.of(3, (5, 32, 48), 56)) == (1, 2, 4)
    told = capsys.readouterr().out
    assert "dit      5f 32x48  b3" in told and "gamma of KnapFormer" in told and "R^2" in told
    before = out.read_text()
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    assert profile.update_seconds(1) > 0 and "update  end of a step on 1 worker" in told
    assert "13 are known from" in capsys.readouterr().out and read_profile(out).measured == profile.measured
    with pytest.raises(ConfigError, match="--fresh"):
        run_profile(DEMO, [*TINY, "model.dit.num_heads=2"], out, repeats=1, device="cpu", degrees=[1])
    assert out.read_text() == before


@pytest.mark.long
def test_a_transformer_that_is_told_a_vector_of_the_text_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    settings = ["data.buckets.table=[1x32x32]", "data.batch.max_batch=1"]
    run_profile(DEMO.with_name("flux-tiny.yaml"), settings, out, repeats=1, device="cpu")
    assert read_profile(out).measured["dit", 1, 1, 32, 32, 1] > 0


def test_segments_add_their_own_buckets() -> None:
    segments = "data.segments=[{until_step: 5}, {until_step: 0, buckets: {table: [9x32x32]}}]"
    config = RunConfig.load(DEMO, [*TINY, segments])
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    assert {shape.bucket.frames for shape in shapes_of(config, geometry, profile)} == {1, 5, 9}


def test_attention_that_the_device_lacks_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    wanted = [*TINY, "model.dit.attention=flash", "train.autocast=bfloat16"]
    with pytest.raises(ValueError, match=r"model.dit.attention flash cannot be used here: .* needs a CUDA device"):
        run_profile(DEMO, [*wanted, "workers.device=auto"], tmp_path / "p.json", repeats=1, device="cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="no GPU of this machine can be used"):
        pick_device("cuda")


def point(batch: int, frames: int = 1, degree: int = 1) -> ProfilePoint:
    shape = ProfiledShape(batch=batch, bucket=Bucket(frames, 32, 32), text_tokens=8)
    return ProfilePoint(module="dit", shape=shape, degree=degree)


def test_the_ends_of_every_line_are_measured_first_and_nothing_is_left_out() -> None:
    points = [point(batch, degree=degree) for degree in (1, 2) for batch in range(1, 8)]
    ordered = by_information(points)
    assert sorted(map(id, ordered)) == sorted(map(id, points))
    assert [(one.shape.batch, one.degree) for one in ordered[:6]] == [(1, 1), (1, 2), (7, 1), (7, 2), (4, 1), (4, 2)]


def test_figures_of_a_degree_come_before_the_middle_of_its_lines() -> None:
    figures = figures_of(RunConfig.load(DEMO), (2,))
    assert [(one.kind, one.degree) for one in figures] == [("update", 1), ("update", 2), ("exchange", 2)]
    ordered = by_information([point(batch) for batch in range(1, 5)], figures)
    assert ordered[2:5] == figures and len(ordered) == 7


def test_a_file_without_the_figures_is_continued_by_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(self: Bench, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        asked.append(module)
        return PointTimes(seconds=(0.1 * shape.batch * shape.bucket.frames,))

    def update(self: Bench, repeats: int) -> PointTimes:
        asked.append("update")
        return PointTimes(seconds=(0.25,))

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(Bench, "update", update)
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    old = {key: value for key, value in json.loads(out.read_text()).items() if key not in ("update", "exchanges")}
    out.write_text(json.dumps(old))
    asked.clear()
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    assert asked == ["update"] and read_profile(out).update_seconds(1) == 0.25


@pytest.mark.parametrize("place", ["own", "node"])
def test_a_backward_pass_gives_its_gradients_to_the_place_of_the_run(place: str) -> None:
    import torch

    config = RunConfig.load(DEMO, [*TINY, f"train.memory.gradients={place}"])
    model, geometry = resolve(config.model)
    bench = Bench(config, model, geometry, torch.device("cpu"))
    assert bench.places.gradients == place
    bench.measure("dit", point(1).shape, repeats=1)
    gradients = bench._gradients
    assert gradients is not None and gradients.flat.abs().sum() > 0
    if place == "node":
        assert all(parameter.grad is None for parameter in bench.dit.parameters())
    times = bench.update(repeats=2)
    assert len(times.seconds) == 2 and min(times.seconds) > 0 and bench._gradients is None, "its memory is free by then"


def test_a_member_of_a_bag_gets_from_the_others_what_they_encoded() -> None:
    import torch

    from ops.comm.collectives import Group

    class FirstOfTwo(Group):
        """A bag whose other member is only counted."""

        def all_to_all(self, output: Any, input: Any, output_splits: list[int], input_splits: list[int]) -> None:
            exchanged.append((len(output), len(input)))

        def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
            return [[*numbers], [0, 0, 0, 8, 1, 1]]  # text rows and soundness of what the other one has of its clip

    exchanged: list[tuple[int, int]] = []
    config = RunConfig.load(DEMO, TINY)
    model, geometry = resolve(config.model)
    bench = Bench(config, model, geometry, torch.device("cpu"))
    grid = geometry.token_grid(5, 32, 32)
    rows = grid[0] * grid[1] * grid[2]
    alone = bench._gathering(point(2, 5).shape, grid)
    assert [alone().bytes_received for _ in range(2)] == [0, 0], "all are in place, in every run"
    bench.group = FirstOfTwo(None, (0, 1), 0, 0.0)
    found = bench._gathering(point(2, 5).shape, grid)()
    assert exchanged == [(rows // 2, rows // 2), (8, 8)], "half of a latent and a whole text each way"
    assert found.bytes_received == 4 * (rows // 2 * bench.frame.width + 8 * model.dit.text_dim)


def clip(degree: int, most: int = 512) -> LongestClip:
    return LongestClip(height=32, width=32, text_tokens=8, degree=degree, most_frames=most)


def probed(clip: LongestClip, profile: Profile, longest: int, tmp_path: Path) -> list[int]:
    """The lengths that the search tries where longer clips than `longest` run out of memory."""
    asked: list[int] = []

    def measure(module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        asked.append(shape.bucket.frames)
        if shape.bucket.frames > longest:
            raise MemoryError("full")
        return PointTimes(seconds=(1.0,))

    bench = SimpleNamespace(device=torch_cpu(), measure=measure)
    Measuring(bench, BAGS, profile, tmp_path / "p.json", 1).run([clip], 0.0)  # type: ignore[arg-type]
    return asked


def torch_cpu() -> Any:
    import torch

    return torch.device("cpu")


@pytest.mark.parametrize("longest", [1, 17, 49, 53, 301])
def test_the_longest_clip_is_found_by_halving_and_is_a_limit_of_plans(longest: int, tmp_path: Path) -> None:
    profile = Profile(degrees={"dit": (1,)})
    profile.measure(("dit", 1, 17, 32, 32, 1), 1.0)
    if longest < 17:
        profile.measured.clear()
    asked = probed(clip(1), profile, longest, tmp_path)
    assert len(asked) <= 14 and len(set(asked)) == len(asked), "no length twice"
    assert all(frames % 4 == 1 for frames in asked), "whole tokens of the VAE"
    assert [profile.fits("dit", Samples.of(1, (longest + more, 32, 32)), 1) for more in (0, 4)] == [True, False]
    assert read_profile(tmp_path / "p.json").max_frames == profile.max_frames
    assert is_known(clip(1), profile) and probed(clip(1), profile, longest, tmp_path) == [], (
        "another call has nothing left"
    )
    tokens = profile.tokens(longest, 32, 32)
    assert longest_clips(profile) == [
        f"longest clip of 32x32 that fits: {longest} frames ({tokens:,} tokens; not {longest + 4}) at degree 1"
    ]


def test_a_search_goes_on_where_its_time_was_over_and_ends_where_nothing_fails(tmp_path: Path) -> None:
    profile = Profile(degrees={"dit": (1,)})
    profile.measure(("dit", 1, 17, 32, 32, 1), 1.0)
    first = clip(1).next_point(profile)
    assert first is not None and first.shape.bucket.frames == 33
    profile.measure(first.key, 1.0)
    assert probed(clip(1), profile, 40, tmp_path)[0] == 65, "twice what ran"
    free = Profile(degrees={"dit": (1,)})
    free.measure(("dit", 1, 17, 32, 32, 1), 1.0)
    assert max(probed(clip(1, most=100), free, 1000, tmp_path)) == 97 and not free.max_frames
    assert is_known(clip(1, most=100), free) and longest_clips(free) == []


def test_limits_of_one_degree_leave_the_others_to_be_searched() -> None:
    profile = Profile(degrees={"dit": (1, 2)})
    profile.max_frames = (MaxFrames(module="dit", degree=1, height=32, width=32, batch=1, frames=20),)
    wider = clip(2).next_point(profile)
    assert wider is not None and wider.degree == 2
    assert [one.degree for one in longest_of([point(1, 5).shape, point(3).shape], (2, 4))] == [1, 2, 4]


def batches(degree: int, most: int = 512) -> LargestBatch:
    return LargestBatch(bucket=Bucket(17, 32, 32), text_tokens=8, degree=degree, most=most)


@pytest.mark.parametrize("largest", [1, 7, 40, 300])
def test_the_largest_batch_is_found_by_doubling_and_halving_to_a_twentieth(largest: int, tmp_path: Path) -> None:
    profile, asked = Profile(degrees={"dit": (1,)}), []

    def measure(module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        asked.append(shape.batch)
        if shape.batch > largest:
            raise MemoryError("full")
        return PointTimes(seconds=(1.0,), need_gib=0.1 * shape.batch)

    bench = SimpleNamespace(device=torch_cpu(), measure=measure)
    Measuring(bench, BAGS, profile, tmp_path / "p.json", 1).run([batches(1)], 0.0)  # type: ignore[arg-type]
    found = max(key[1] for key in profile.measured)
    assert found <= largest <= found * 1.05 + 1 and len(asked) == len(set(asked)) <= 16
    assert asked[:3] == [1, 2, 4][: len(asked[:3])], "a sweep over batches on the way"
    told = largest_batches(profile)
    first = min(batch for batch in asked if batch > largest)
    assert told == [f"largest batch of 17f 32x32 that fits: {found} (not {first}) at degree 1"]
    assert is_known(batches(1), profile) and not profile.fits(
        "dit", Samples.of(min(b for b in asked if b > largest), (17, 32, 32)), 1
    )
    longer = LargestBatch(bucket=Bucket(33, 32, 32), text_tokens=8, degree=1, most=512)
    first = longer.next_point(profile)
    assert first is None or first.shape.batch <= largest + 1, "what is larger is not tried again"


def test_a_search_for_the_largest_batch_ends_where_none_fails() -> None:
    profile = Profile(degrees={"dit": (1, 2)})
    asked = []
    while (one := batches(2, most=6).next_point(profile)) is not None:
        asked.append((one.shape.batch, one.degree))
        profile.measure(one.key, 1.0)
    assert asked == [(1, 2), (2, 2), (4, 2), (6, 2)]


def test_every_bucket_is_searched_alone_and_the_longest_in_bags() -> None:
    shapes = [point(batch, frames).shape for frames in (5, 1) for batch in (1, 3)]
    wanted = [(one.bucket.frames, one.degree, one.most) for one in largest_of(shapes, (2, 4))]
    assert wanted == [(1, 1, 48), (5, 1, 48), (5, 2, 96), (5, 4, 192)]


def test_memory_is_counted_where_it_has_a_limit(tmp_path: Path) -> None:
    """That of a CPU's workers is that of their tensors."""
    here = TensorMeter(0.0).room_gib()
    assert here is not None
    limited = [*TINY, "data.buckets.table=[5x32x48]", f"workers.memory_gib={0.013 - here}"]
    out = tmp_path / "p.json"
    profile = run_profile(DEMO, limited, out, repeats=1, device="cpu", degrees=[1])
    found = read_profile(out)
    assert found.needs.measured == profile.needs.measured
    units, gib = max(found.needs.measured["dit", "solo"].items())
    assert units > 50 and 0.001 < gib < 0.013, "beside the modules, and within the limit"
    ran = {key[1] for key in found.measured if key[0] == "dit" and key[2:] == (5, 32, 48, 1)}
    failed = [limit.batch for limit in found.max_frames if limit.forbids(("dit", limit.batch, 5, 32, 48, 1))]
    assert max(ran) >= 2 and min(failed) <= 1.05 * max(ran) + 1, "the largest batch was searched"
    assert found.needs.gib(footprint_of(point_of(min(failed)), found)) > 0.9 * gib, "and lies where the peaks say"


def point_of(batch: int) -> ProfilePoint:
    shape = ProfiledShape(batch=batch, bucket=Bucket(5, 32, 48), text_tokens=56)
    return ProfilePoint(module="dit", shape=shape)


def test_a_pipe_gets_one_profile_at_the_end_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One went there after each point: `cat PIPE` left with the first, and the second waited for another reader."""
    os.mkfifo(pipe := tmp_path / "null")
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # a reader that waits for nobody
    for name in ("measure", "update"):
        monkeypatch.setattr(Bench, name, lambda *given: PointTimes(seconds=(0.1,)))
    run_profile(DEMO, [*TINY, "data.buckets.table=[1x32x32]"], pipe, repeats=1, device="cpu", degrees=[1])
    assert len(json.loads(os.read(end, 2**16))["latency"]) == 6 and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]
    os.close(end)


@pytest.mark.parametrize("read", [True, False])
def test_a_pipe_gets_what_was_measured_before_a_signal(
    read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(pipe := tmp_path / "null")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    answers = iter([PointTimes(seconds=(0.1,)), PointTimes(seconds=(0.2,))])
    for name in ("measure", "update"):
        monkeypatch.setattr(Bench, name, lambda *given: next(answers, None) or signal.raise_signal(signal.SIGINT))
    if not read:
        os.close(end)
    with pytest.raises(KeyboardInterrupt):
        run_profile(DEMO, [*TINY, "data.buckets.table=[1x32x32]"], pipe, repeats=1, device="cpu", degrees=[1])
    if read:
        assert len(json.loads(os.read(end, 2**16))["latency"]) == 2
        os.close(end)


def test_how_far_runs_of_a_point_differ_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        return PointTimes(seconds=(1.0, 1.2, 1.1 * shape.batch))

    profile, out = Profile(degrees={"dit": (1,)}), tmp_path / "p.json"
    bench = SimpleNamespace(device=torch_cpu(), measure=measure)
    measuring = Measuring(bench, BAGS, profile, out, 1)  # type: ignore[arg-type]
    measuring.run([point(1), point(2)], 0.0)
    spreads = read_profile(out).spread
    assert spreads["dit", 1, 1, 32, 32, 1] == pytest.approx(0.2 / 1.1, abs=1e-4)
    assert spreads["dit", 2, 1, 32, 32, 1] == pytest.approx(1.0, abs=1e-4) and "spread 100%" in capsys.readouterr().out


def test_a_gpu_is_timed_by_events_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks stand around the work alone, after the barrier; they are read when the device is done."""
    import torch

    told: list[str] = []

    class Events:
        def mark(self) -> str:
            told.append("mark")
            return f"event {told.count('mark')}"

        def seconds(self, first: object, second: object) -> float:
            told.append(f"{first} to {second}")
            return 0.25

    class Pair(Group):
        def barrier(self, device: Any) -> None:
            told.append("barrier")

    monkeypatch.setattr("actors.worker.stopwatch.StreamWatch", lambda device: Events())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("synchronize"))
    took = timed(lambda: told.append("work"), torch.device("cuda"), Pair(None, (0, 1), 0, 0.0))
    assert took == 0.25
    assert told == ["barrier", "synchronize", "mark", "work", "mark", "synchronize", "event 1 to event 2"]


def test_bags_run_the_largest_batch_of_every_bucket() -> None:
    shapes = [point(batch, frames).shape for frames in (1, 5) for batch in (1, 3)]
    bags: dict[str, list] = {"text": [], "vae": [], "dit": []}
    for one in points_of(shapes, (2, 4)):
        if one.degree > 1:
            bags[one.module].append((one.shape.bucket.frames, one.shape.batch, one.degree))
    assert bags["dit"] == bags["vae"] == [(1, 3, 2), (5, 3, 2), (1, 3, 4), (5, 3, 4)]
    assert bags["text"] == [(1, 3, 2), (5, 3, 2)], "three captions keep no bag of four busy"


def test_encoders_run_at_the_degrees_at_which_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two:
        """A bag in which everything takes 0.6 of the seconds."""

        degree = 2

        def __init__(self, *settings: object) -> None: ...

        def measure(self, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
            return PointTimes(seconds=(0.06 * shape.batch * shape.bucket.frames,))

        def exchange(self, num_bytes: int) -> float:
            return 0.001 + num_bytes / 2 / 1e9  # half of it goes to the other one

        def update(self, repeats: int) -> PointTimes:
            return PointTimes(seconds=(0.3,))

        def close(self) -> None: ...

    def measure(self: Bench, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        return PointTimes(seconds=(0.1 * shape.batch * shape.bucket.frames,))

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr("app.device.measuring.Bag", Two)
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1, 2])
    profile = read_profile(out)
    assert {key[0] for key in profile.measured if key[5] == 2} == {"text", "vae", "dit"}
    assert profile.update_seconds(2) == 0.3 and profile.update_seconds(1) > 0
    assert [(one.workers, one.sent) for one in profile.exchanges] == [
        (2, 2**19),
        (2, 2**24),
    ]
    assert exchange_speed(profile.exchanges) == pytest.approx((0.001, 1e9))
    batch = Samples.of(3, (5, 32, 48), 56)
    assert profile.legal_degrees("vae", batch) == profile.legal_degrees("text", batch) == (1, 2)
    assert dict(profile.modes("vae", batch))[2] == pytest.approx(0.6 * dict(profile.modes("vae", batch))[1])


def test_bags_are_measured_by_the_slices_that_plans_bring_them(tmp_path: Path) -> None:
    """Without rates blocks are sliced by the paper's numbers, and the run's bags by what is cheapest."""
    seen: list[tuple[int, object]] = []

    def alone(module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        seen.append((1, rates))
        return PointTimes(seconds=(1.0 * shape.batch,))

    def in_bag(module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        seen.append((2, rates))
        return PointTimes(seconds=(0.6 * shape.batch,))

    config = RunConfig.load(DEMO.with_name("demo-stdit.yaml"))
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    assumed = profile.slice_rates()
    bench = SimpleNamespace(device=torch_cpu(), measure=alone)
    measuring = Measuring(bench, BAGS, profile, tmp_path / "p.json", 1)  # type: ignore[arg-type]
    measuring._bags[2, 1] = SimpleNamespace(measure=in_bag, close=lambda: None)  # type: ignore[assignment]
    measuring.run([point(1), point(1, degree=2)], 0.0)
    known = profile.slice_rates()
    assert seen == [(1, None), (2, known)] and known != assumed


def test_a_bag_slices_by_the_rates_that_it_is_measured_with() -> None:
    import torch

    config = RunConfig.load(DEMO.with_name("demo-stdit.yaml"))
    model, geometry = resolve(config.model)
    bench = Bench(config, model, geometry, torch.device("cpu"))
    carried_out(
        ("measure", "dit", ProfiledShape(batch=1, bucket=Bucket(1, 32, 32), text_tokens=8), WHOLE, 1),
        bench,
        Group.solo(),
    )
    assert bench.dit.rates == WHOLE


def test_a_member_without_a_caption_makes_no_text_encode_quicker() -> None:
    one, two, third = (
        FORMS["captions"].features(
            Load(batch=batch, frames=1, height=8, width=8, text_tokens=20, tokens=1, degree=k), 1.0
        )
        for batch, k in ((1, 1), (1, 2), (3, 2))
    )
    assert one == two == (1.0, 20.0) and third == (1.0, 40.0)


def test_long_samples_are_swept_over_batches() -> None:
    wanted = ["data.buckets.table=[1x32x32, 17x480x832]", "data.batch.compute=0", "data.batch.memory_tokens=1e6"]
    config = RunConfig.load(DEMO, wanted)
    model, geometry = resolve(config.model)
    profile = Profile.from_flops(model.dit, model.vae, model.text, geometry)
    found = [shape.batch for shape in shapes_of(config, geometry, profile) if shape.bucket.frames == 17]
    assert geometry.tokens(17, 480, 832) > 20_000 and found[:5] == [1, 2, 4, 8, 16] and found[-1] > 16


def test_what_runs_out_of_memory_is_a_limit_and_larger_points_are_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(self: Bench, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        asked.append((module, shape.bucket.frames, shape.batch))
        if module == "dit" and shape.bucket.frames * shape.batch >= 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 3 GiB")
        return PointTimes(seconds=(0.1 * shape.batch * shape.bucket.frames,))

    monkeypatch.setattr(Bench, "measure", measure)
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    profile = read_profile(out)
    assert not profile.fits("dit", Samples.of(3, (5, 32, 48)), 1) and profile.fits("dit", Samples.of(1, (1, 32, 32)), 1)
    assert ("vae", 3, 5, 32, 48, 1) in profile.measured and ("dit", 3, 5, 32, 48, 1) not in profile.measured


@pytest.mark.parametrize(("frames", "batches"), [(1, [1]), (5, [1, 3])])
def test_a_limit_holds_for_pictures_too_and_is_not_tried_again(
    frames: int, batches: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(self: Bench, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        asked.append((module, shape.bucket.frames, shape.batch))
        if module == "dit" and shape.bucket.frames == frames and shape.batch >= max(batches):
            raise MemoryError("not enough")
        return PointTimes(seconds=(0.1 * shape.batch * shape.bucket.frames,))

    monkeypatch.setattr(Bench, "measure", measure)
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    profile = read_profile(out)
    assert len(profile.max_frames) == 1
    assert not profile.fits("dit", Samples.of(max(batches), (frames, 32, 32 + 16 * (frames > 1))), 1)
    asked.clear()
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1])
    assert asked == [] and read_profile(out).max_frames == profile.max_frames


def test_a_bag_that_does_not_even_come_up_for_want_of_memory_is_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom:
        def __init__(self, config: object, degree: int, device: str) -> None:
            raise MemoryError("the weights")

    one = PointTimes(seconds=(0.1,))
    monkeypatch.setattr(Bench, "measure", lambda *of: one)
    monkeypatch.setattr("app.device.measuring.Bag", NoRoom)
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1, 2])
    assert not all(read_profile(out).fits("dit", Samples.of(batch, (1, 32, 32)), 2) for batch in (1, 3))


class SharedGpu:
    """The first GPU of a machine, of 80 GiB: modules of 16 GiB of this process and of member 0 of every open bag lie
    on it, and a cascade takes a GiB for each frame of a member."""

    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self.there: set[int] = set()  # degrees whose modules do

    def measure(self, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        return self.measured(1, shape)

    def measured(self, degree: int, shape: ProfiledShape) -> PointTimes:
        self.there.add(degree)
        need_gib = shape.batch * shape.bucket.frames / degree
        if 16 * len(self.there) + need_gib > 80:
            raise RuntimeError("CUDA out of memory. Tried to allocate 3 GiB")
        return PointTimes(seconds=(need_gib,), need_gib=need_gib)

    def rest(self) -> None:
        self.there.discard(1)

    def bag(self, degree: int, nodes: int) -> Any:
        return SimpleNamespace(
            measure=lambda module, shape, repeats, rates: self.measured(degree, shape),
            close=lambda: self.there.discard(degree),
        )


@pytest.mark.parametrize("bags", [(), (2,), (2, 4, 8)])
def test_limits_of_a_degree_are_those_of_its_workers_alone(bags: tuple[int, ...], tmp_path: Path) -> None:
    """Also where bags of other degrees have been measured on the same GPUs, and are open."""
    shapes = [ProfiledShape(batch=1, bucket=Bucket(frames, 32, 32), text_tokens=8) for frames in (1, 33, 61)]
    points = by_information([one for one in points_of(shapes, bags) if one.module == "dit"])
    profile, gpu = Profile(degrees={"dit": (1, *bags)}), SharedGpu()
    measuring = Measuring(gpu, gpu, profile, tmp_path / "p.json", 1)  # type: ignore[arg-type]
    measuring.run(points, 0.0)
    assert not profile.max_frames, "all of the plan fits a worker"
    measuring.run(longest_of(shapes, bags), 0.0)
    longest = {degree: max(key[2] for key in profile.measured if key[-1] == degree) for degree in (1, *bags)}
    assert longest == {degree: {1: 61, 2: 125, 4: 253, 8: 509}[degree] for degree in (1, *bags)}


class Pipes(PipedBag):
    """Members of a bag that say what they are given, after these seconds; None: nothing."""

    def __init__(self, *answers: tuple[float, object] | None) -> None:
        self._ends = [multiprocessing.Pipe() for _ in answers]
        super().__init__([mine for mine, _ in self._ends])
        for (_, theirs), answer in zip(self._ends, answers, strict=True):
            threading.Thread(target=self._say, args=(theirs, answer), daemon=True).start()

    @staticmethod
    def _say(pipe: Any, answer: tuple[float, object] | None) -> None:
        if answer is not None:
            time.sleep(answer[0])
            if answer[1] is EOFError:
                pipe.close()
            else:
                pipe.send(answer[1])


ONE = PointTimes(seconds=(1.0,))


def test_who_ran_out_of_memory_is_heard_while_others_of_the_bag_wait_or_fail() -> None:
    for first in (None, (0.0, RuntimeError("peer closed")), (0.0, EOFError), (0.0, ONE)):
        with pytest.raises(MemoryError, match="full"):
            Pipes(first, (0.3, MemoryError("full")))._answers(120.0, cause_s=100.0)
    with pytest.raises(ConfigError, match="member 1 of a bag of 2 failed: its process has ended"):
        Pipes((0.0, ONE), (0.0, EOFError))._answers(120.0)
    with pytest.raises(ConfigError, match="member 0 of a bag of 2 has not answered in 0 s"):
        Pipes(None, (0.0, ONE))._answers(0.2)
    assert Pipes((0.2, ONE), (0.0, "ready"))._answers(120.0) == [ONE, "ready"], "by rank"


def test_a_member_that_has_ended_before_an_order_is_named() -> None:
    """Typer takes EPIPE for a standard output that nobody reads, and exits without a word."""
    bag = Pipes(None, (0.0, ONE))
    bag._ends[0][1].close()
    with pytest.raises(ConfigError, match="member 0 of a bag of 2 failed: its process has ended"):
        bag.measure("dit", ProfiledShape(batch=1, bucket=Bucket(5, 32, 48), text_tokens=56), repeats=1)


def test_a_need_of_nothing_has_no_sign() -> None:
    profile = Profile()
    for units, gib in ((1.0, 0.9999e-3), (2.0, 2.0e-3)):
        profile.observe_need(Footprint(module="vae", kind="9f 32x48", units=units), gib)
    (line,) = need_lines(profile)
    assert line.startswith("needs vae 9f 32x48: 0.000 GiB and 1.024 MiB a clip, by 2 peaks")


def test_short_runs_that_vary_do_not_blame_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(middle: float) -> str:
        times = PointTimes(seconds=(0.5 * middle, middle, 2.0 * middle))
        monkeypatch.setattr(Bench, "measure", lambda *of: times)
        run_profile(DEMO, TINY, tmp_path / "p.json", repeats=3, device="cpu", degrees=[1], fresh=True)
        return capsys.readouterr().out

    short, busy = told(0.3e-3), told(0.3)
    assert "was the machine busy" not in short and "waits for its launches" in short
    assert "was the machine busy" in busy and "waits for its launches" not in busy


def test_measurements_that_limit_no_batch_are_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(config: RunConfig, *of: object) -> tuple[RunConfig, None]:
        if config.data.batch.auto:
            raise ConfigError("they do not grow")
        return config, None

    monkeypatch.setattr("app.device.profile.with_limits", none)
    monkeypatch.setattr(Bench, "measure", lambda *of: ONE)
    config = tmp_path / "run.yaml"
    config.write_text(f"base: {DEMO}\n")
    run_profile(config, TINY, tmp_path / "p.json", repeats=1, device="cpu", degrees=[1])
    assert "batches   they do not grow" in capsys.readouterr().out
    assert read_profile(tmp_path / "p.json").measured
    with pytest.raises(ConfigError, match="do not grow"):
        run_profile(config, TINY, tmp_path / "p.json", repeats=1, device="cpu", degrees=[1], write=True)
    assert config.read_text() == f"base: {DEMO}\n"


def test_a_config_with_the_batches_of_a_table_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "measure", lambda self, module, shape, repeats: PointTimes(seconds=(0.1 * shape.batch,)))
    table = ["data.buckets={open_sora: {256px: {1: [1.0, 2], 5: [1.0, 1]}}}", "data.batch.from_table=true"]
    run_profile(DEMO, table, tmp_path / "p.json", repeats=1, device="cpu", degrees=[1])
    assert read_profile(tmp_path / "p.json").measured


def test_degrees_that_cannot_be_measured_are_refused() -> None:
    config = RunConfig.load(DEMO)
    with pytest.raises(ConfigError, match=r"--degrees 3 is not legal for this model; use some of \[1, 2, 4\]"):
        degrees_here(config, (1, 2, 4), [1, 3], "cpu")
    assert degrees_here(config, (1, 2, 4), [1, 4], "cpu") == (4,)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_bag_is_measured_with_its_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    run_profile(DEMO, TINY, out, repeats=1, device="cpu", degrees=[1, 2])
    profile = read_profile(out)
    assert all({key[5] for key in profile.measured if key[0] == module} == {1, 2} for module in ("text", "vae", "dit"))
    assert profile.measured["dit", 3, 5, 32, 48, 2] > 0
    told = capsys.readouterr().out
    assert "all-to-all of 2:" in told and "update  end of a step on 2 workers" in told
    assert profile.update_seconds(2) > 0 and len(profile.exchanges) == 2
    assert " MiB from the others" in told, "a bag's cascade begins with the handoff of its inputs"


def test_trees_are_offered_where_points_are_enough_and_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_profile(tiled_vae(36))
    offer_residual(found)
    model = found.model_of("vae")
    assert found.residual == "xgboost" and model is not None and model.residual is not None
    few, straight = read_profile(tiled_vae(12)), read_profile(tiled_vae(36))
    for key in straight.measured:
        straight.measure(key, 0.05 + 1e-7 * straight.load(key, 0).dealt.pixels)  # type: ignore[union-attr]
    offer_residual(few)
    offer_residual(straight)
    assert few.residual == straight.residual == "none"
    monkeypatch.setattr("app.device.profile.importlib.util.find_spec", lambda name: None)
    lacking = read_profile(tiled_vae(36))
    offer_residual(lacking)
    assert lacking.residual == "none" and "install the extra [xgboost]" in capsys.readouterr().out
