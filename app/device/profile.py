"""`heddle profile`: measures what the cascades of a config cost on this device, and writes a profile for planners.

    heddle profile --config configs/runs/demo.yaml --out profile.json

Every bucket is measured with synthetic pixels, random tokens and the config's own models, at its planned batch size and
at batch 1, on one device (degree 1). Other batch sizes and degrees are predicted by the models fitted to these points.
Uses ops/ only: no Ray, no process group.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.feed.batching import TargetBatch
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import write_profile
from actors.plan.types import Module
from actors.planning.learned import setting_of
from app.device.choice import device_name, memory_gib, pick_device
from app.settings.config import RunConfig, from_here
from data.buckets import BucketTable, planned_batch
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch

WARM_UP = 1  # untimed runs: the first call of a shape pays for allocations and kernel choices


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledShape:
    """One cascade to time."""

    batch: int
    bucket: Bucket
    text_tokens: int


def run_profile(path: Path, overrides: Sequence[str], out: Path, repeats: int = 3, device: str = "auto") -> Profile:
    """Measure, print the table, write `out`. Raises ConfigError for a device that is not there."""
    import torch

    from ops.models.folders import resolve

    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written; give a file in a folder that exists.")
    config = from_here(RunConfig.load(path, overrides))
    model, geometry = resolve(config.model)
    target = pick_device(device)
    torch.set_num_threads(config.workers.torch_threads)
    profile = Profile.from_flops(
        model.dit,
        model.vae,
        model.text,
        geometry,
        model.image,
        gpu_memory_gib=memory_gib(target),
        degrees=config.planner.degrees,
        device=device_name(target),
    )
    shapes = list(shapes_of(config, geometry, profile))
    profile.setting = setting_of(model, profile.device if target.type == "cuda" else "cpu")
    profile.source = f"measured by heddle profile, torch {torch.__version__}, median of {repeats}"
    bench = Bench(config, model, geometry, target)
    print(f"{len(shapes)} shapes on {profile.device}")
    for module in ("text", "vae", "dit"):
        for shape in shapes:
            seconds, peak = bench.measure(module, shape, repeats)
            _record(profile, module, shape, seconds, peak)
            print(
                f"{module:4}  {shape.bucket.frames:4d}f {shape.bucket.height}x{shape.bucket.width}  "
                f"b{shape.batch:<4d} {seconds:9.4f} s" + (f"  {peak:6.2f} GiB" if peak else ""),
                flush=True,
            )
    write_profile(profile, out)
    _print_fits(profile)
    print(f"profile   {out}")
    return profile


def shapes_of(config: RunConfig, geometry: Geometry, profile: Profile) -> Iterator[ProfiledShape]:
    """Every bucket of every segment at batch 1 and at its planned batch size, by this profile where it is timed."""
    timed = TargetBatch(profile=profile, geometry=geometry)
    stages = [(config.data.buckets, config.data.batch)]
    stages += [(s.buckets or config.data.buckets, s.batch or config.data.batch) for s in config.data.segments]
    seen = set()
    for buckets, limits in stages:
        table = BucketTable.build(buckets, geometry)
        for bucket in table.buckets:
            size, _ = planned_batch(table, bucket, limits, geometry, timed)
            for batch in sorted({1, size}):
                shape = ProfiledShape(batch=batch, bucket=bucket, text_tokens=limits.text_tokens)
                if shape not in seen:
                    seen.add(shape)
                    yield shape


def _record(profile: Profile, module: Module, shape: ProfiledShape, seconds: float, peak: float | None) -> None:
    bucket = shape.bucket
    key = (module, shape.batch, bucket.frames, bucket.height, bucket.width, 1)
    profile.measured[key] = seconds
    if peak is not None:
        profile.peak_gib[key] = peak


def _print_fits(profile: Profile) -> None:
    for module in ("text", "vae", "dit"):
        if fit := profile.model_of(module):
            quality = f"R^2 {fit.r2:.3f}, worst residual {100 * fit.worst:.0f}%"
            print(f"{module:4}  missing points: {fit.source}{'' if fit.poor else f', {quality}'}")
    for note in profile.notes:
        print(f"note: {note}")


class Bench:
    """The modules of a config on one device, and a timer around one cascade of each."""

    def __init__(self, config: RunConfig, model: ModelConfig, geometry: Geometry, device: torch.device) -> None:
        import torch

        from ops.attention.varlen import check_backend
        from ops.models.first_frame import FirstFrame
        from ops.models.load import build_dit, build_image, build_text, build_vae

        self.config, self.model, self.geometry, self.device = config, model, geometry, device
        dtype = getattr(torch, config.train.parameter_dtype)
        queries = torch.bfloat16 if config.train.autocast == "bfloat16" else dtype
        check_backend(model.dit.attention, device, queries, model.dit.head_dim)
        self.dit = build_dit(model.dit, config.train.seed).to(device=device, dtype=dtype)
        self.vae = build_vae(model.vae, device)
        self.text = build_text(model.text, device)
        self.image, self.frame = build_image(model.image, device), FirstFrame.of(model)

    def measure(self, module: Module, shape: ProfiledShape, repeats: int) -> tuple[float, float | None]:
        """Median seconds of one cascade, and the peak GiB it needed where the device counts it."""
        import torch

        work = getattr(self, f"_{module}")(shape)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = [self._time(work) for _ in range(WARM_UP + repeats)][WARM_UP:]
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None
        return statistics.median(seconds), peak

    def _time(self, work: Callable[[], object]) -> float:
        import torch

        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _text(self, shape: ProfiledShape) -> Callable[[], object]:
        captions = [self._caption(shape.text_tokens)] * shape.batch
        return lambda: self.text.encode(captions)

    def _caption(self, tokens: int) -> str:
        """A caption of about this many tokens."""
        words = ["moving"]
        while self.text.count(" ".join(words)) < min(tokens, self.model.text.max_length) and len(words) < 4096:
            words.append("shape")
        return " ".join(words)

    def _vae(self, shape: ProfiledShape) -> Callable[[], object]:
        import torch

        bucket = shape.bucket
        size = (shape.batch, bucket.frames, bucket.height, bucket.width, 3)
        video = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

        def work() -> None:
            self.vae.encode(video.to(self.device))
            if self.frame.channels:
                self.vae.encode(self.frame.still(video).to(self.device))
            if self.image is not None:
                self.image.encode(video[:, 0])

        return work

    def _dit(self, shape: ProfiledShape) -> Callable[[], object]:
        """Forward and backward of one packed batch, gradients accumulated as in training."""
        import torch

        from ops.comm import Group
        from ops.conditions import Conditions
        from ops.flow import flow_loss
        from ops.packing import Layout, Sequence

        bucket, patch, group = shape.bucket, self.geometry.patch, Group.solo()
        grid = self.geometry.token_grid(bucket.frames, bucket.height, bucket.width)
        generator = torch.Generator().manual_seed(0)
        sequences = [Sequence(grid, shape.text_tokens, self.frame.image_tokens)] * shape.batch
        layout = Layout(sequences, 1, 0, self.device)
        width = self.vae.channels * patch[0] * patch[1] * patch[2]
        target = torch.randn(layout.local_tokens, width, generator=generator).to(self.device)
        tokens = torch.randn(layout.local_tokens, self.frame.width, generator=generator).to(self.device)
        text = torch.randn(shape.batch * shape.text_tokens, self.text.dim, generator=generator).to(self.device)
        times = torch.full((shape.batch,), 500.0, device=self.device)
        weights = torch.full((shape.batch,), 1.0 / shape.batch, device=self.device)
        dtype = next(self.dit.parameters()).dtype
        image = pooled = None
        if self.image is not None:
            image = torch.randn(shape.batch * self.image.tokens, self.image.dim, generator=generator)
            image = image.to(self.device, dtype)
        if self.model.text.pooled:
            pooled = torch.randn(shape.batch, self.model.text.pooled, generator=generator).to(self.device, dtype)
        told = Conditions(image=image, pooled=pooled)
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.autocast == "bfloat16")

        def work() -> None:
            with cast:
                predicted = self.dit(tokens.to(dtype), times, text.to(dtype), layout, group, told)
            flow_loss(predicted.float(), target, layout, weights).backward()

        return work
