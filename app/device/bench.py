"""The modules of a config on one device, or as a member of a bag, and a timer around one cascade of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from actors.plan.types import Module
from app.device.points import PointTimes, ProfiledShape, timed
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.spatial_temporal.choice import SliceRates

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from actors.plan.places import Places
    from actors.worker.handoff import Inputs
    from actors.worker.meter import Meter
    from ops.comm.collectives import Group
    from ops.models.base.vae import VAE
    from ops.models.image import ImageEncoder
    from ops.models.text import TextEncoder
    from ops.update.gradients import Gradients

_GRADIENT_SHARE = 0.25  # of a GPU's memory that a part of a node's gradient may take while cascades are measured
_PICTURE = (480, 832)  # height and width of what a text encoder sees, which it scales to its own
WARM_UP = 1  # untimed runs: the first call of a shape pays for allocations and kernel choices


class Bench:
    """The modules of a config on one device, and a timer around one cascade of each."""

    def __init__(
        self,
        config: RunConfig,
        model: ModelConfig,
        geometry: Geometry,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        """`group`: the bag of which this process is a member."""
        from actors.worker.attention_room import AttentionRoom
        from actors.worker.loading import check_device_runs
        from ops.attention.sdpa import leave_out_cudnn
        from ops.comm.collectives import Group
        from ops.models.first_frame import FirstFrame
        from ops.precision import allow_tf32

        allow_tf32(config.train.allows_tf32)
        leave_out_cudnn()
        self.config, self.model, self.geometry, self.device = config, model, geometry, device
        self.group = group or Group.solo()
        self._gradients: Gradients | None = None
        # bytes of the runs that are being measured, and their seconds, which may be asked when a run has ended
        self._gathered: list[tuple[int, Callable[[], float]]] = []
        self._settled = False  # its modules are loaded, and what they take is counted
        self._dtype = check_device_runs(model.dit, config.train, device)
        self.frame = FirstFrame.of(model)
        self.attention = AttentionRoom.of(
            model.dit, config.train.memory.attention, config.train.element_bytes, device.type == "cuda"
        )
        self._room_gib: float | None = None  # of the run that is being measured

    @cached_property
    def meter(self) -> Meter:
        """What counts the memory of cascades, as on a worker of the run."""
        from actors.worker.meter import meter_of

        return meter_of(self.device, self.config.workers.memory_gib)

    @cached_property
    def dit(self) -> nn.Module:
        """Its backward gives gradients to where the run has them, if there is room for that."""
        module = self._bare_dit()
        self._hook_gradients(module)
        return module

    def _bare_dit(self) -> nn.Module:
        from ops.models.experts import compile_blocks, graph_blocks
        from ops.models.load import build_dit

        # trained weights are measured where there is room for all of them
        on_host = self.places.parameters == "node" and self.model.dit.freezes_blocks
        dit = build_dit(self.model.dit, self.config.train.seed, self._dtype, self.device, on_host)
        if self.model.dit.compile is True:
            compile_blocks(dit)
        graph_blocks(dit, self.model.dit.cuda_graphs, self.device)
        return dit

    @cached_property
    def places(self) -> Places:
        """Where a run of this config has gradients and optimizer state."""
        from app.inputs.batches import places_of

        found = places_of(self.config, self.model, self.geometry, self.device.type)
        if self.device.type == "cpu" and found.gradients == "host":  # a GPU's setting, measured on a CPU
            return replace(found, gradients="node")
        return found

    def _hook_gradients(self, module: nn.Module) -> None:
        """What a run adds to every backward pass. Without optimizer state: a run of more workers has less of it."""
        import torch

        from actors.worker.loading import sync_places
        from ops.shards import shard_bounds
        from ops.update.flat_vector import slots, trainable

        train, named = self.config.train, trainable(module)
        layout = slots(named)
        parameters = [parameter for _, parameter in named]
        if train.sync != "flat":  # DeepSpeed's are there before the first pass
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            return
        if not self._holds_gradient(layout[-1].hi):  # it goes to GPUs that are not here
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(_let_fall)
            return
        dtype = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        places = sync_places(train, self.places, self.model.dit.freezes_blocks)
        made = places.make_gradients(parameters, layout, dtype)
        made.form(self.group, shard_bounds(layout[-1].hi, self.group.size))
        made.begin_step()

        def hook(index: int) -> Callable[[Tensor], None]:
            return lambda parameter: made.received(index)

        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(hook(index))
        self._gradients = made

    def _holds_gradient(self, weights: int) -> bool:
        """A node's gradient lies on the GPUs of this bag, which may be fewer than a run has: they have to have room
        for clips beside it. Every member finds the same."""
        import torch

        if self.device.type != "cuda" or self.places.gradients != "node":
            return True
        total = torch.cuda.get_device_properties(self.device).total_memory
        return 4 * weights / self.group.size <= _GRADIENT_SHARE * total

    @cached_property
    def vae(self) -> VAE:
        from ops.models.load import build_vae

        return build_vae(self.model.vae, self.device)

    @cached_property
    def text(self) -> TextEncoder:
        from ops.models.load import build_text

        return build_text(self.model.text, self.device)

    @cached_property
    def image(self) -> ImageEncoder | None:
        from ops.models.load import build_image

        return build_image(self.model.image, self.device)

    def rest(self) -> None:
        """Take nothing of the device until the next measurement, which loads anew."""
        from actors.worker.meter import collect

        self._drop("dit", "vae", "text", "image")
        collect()

    def _drop(self, *modules: str) -> None:
        self._settled = False
        for module in modules:
            self.__dict__.pop(module, None)
        if "dit" in modules and self._gradients is not None:
            self._let_go(self._gradients)
            self._gradients = None

    def _let_go(self, gradients: Gradients) -> None:
        """Release the memory of gradients, when no member of the bag writes into it any more. Collective."""
        from ops.update.node_sum import meet

        gradients.leave()
        meet(self.group, self.device)
        gradients.release()

    def update(self, repeats: int) -> PointTimes:
        """Seconds of the end of a step, several times after a warm-up: gradient sum, optimizer and new parameters, by
        the engine of the run and with the members of this bag as all of its workers."""
        from actors.worker.loading import sync_places
        from actors.worker.meter import collect
        from ops.update.sync import FlatSync

        self._drop("dit")
        collect()
        module, train, group = self._bare_dit(), self.config.train, self.group
        places = sync_places(train, self.places, self.model.dit.freezes_blocks)
        sync = FlatSync(module, train.optimizer, train.steps, places=places)

        def work() -> None:
            sync.finish_step(0, 0.0, 1.0, float(group.size), lambda phase: None)
            sync.begin_step()

        sync.form(group, None)
        sync.begin_step()
        seconds = tuple(timed(work, self.device, group) for _ in range(WARM_UP + repeats))[WARM_UP:]
        self._let_go(sync.gradients)
        return PointTimes(seconds=seconds)

    def measure(
        self, module: Module, shape: ProfiledShape, repeats: int, rates: SliceRates | None = None
    ) -> PointTimes:
        """Seconds of a cascade, several times after a warm-up, and the memory that it takes beside all modules where
        that is counted. `rates`: by which a bag slices spatial-temporal blocks, the same on all members."""
        from ops.models.experts import slice_by

        self._settle()
        if module == "dit":
            slice_by(self.dit, rates)
        self._gathered.clear()
        work, need_gib = self.begun(module, shape)
        seconds = tuple(timed(work, self.device, self.group) for _ in range(repeats))
        moved = self._gathered[WARM_UP:]
        return PointTimes(
            seconds=seconds,
            need_gib=need_gib,
            gathered_bytes=max((num_bytes for num_bytes, _ in moved), default=0),
            gathered_s=statistics.median([took() if num_bytes else 0.0 for num_bytes, took in moved]) if moved else 0.0,
        )

    def _settle(self) -> None:
        """Where memory is counted, a worker's modules are all there beside every cascade."""
        if self._settled or (self.device.type == "cpu" and not self.config.workers.memory_gib):
            return
        _ = self.dit, self.vae, self.text, self.image
        self.meter.settled()
        self._settled = True

    def begun(self, module: Module, shape: ProfiledShape) -> tuple[Callable[[], object], float | None]:
        """A cascade after its warm-up, in which what it takes is counted: of the DiT with the inputs that it makes
        (pixels and captions come from the feeder)."""
        make: Callable[[ProfiledShape], Callable[[], object]] = getattr(self, f"_{module}")
        given = None if module == "dit" else make(shape)
        self._room_gib = self.meter.start()
        try:
            work = given or make(shape)
            for _ in range(WARM_UP):
                work()
        finally:
            need_gib = self.meter.stop()
        # from the second run on a GPU may keep what attention gives, as in training
        return work, self.attention.end(need_gib) if module == "dit" else need_gib

    def _text(self, shape: ProfiledShape) -> Callable[[], object]:
        from actors.worker.encoding import NoMeasure, encode_texts

        captions = [self._caption(shape.text_tokens)] * shape.batch
        pictures = [np.zeros((*_PICTURE, 3), np.uint8)] * (shape.batch if self.model.text.sees_picture else 0)
        return lambda: encode_texts(self.text, captions, self.group, NoMeasure(), self.device, pictures)

    def _caption(self, tokens: int) -> str:
        """A caption of about this many tokens."""
        words = ["moving"]
        while self.text.count(" ".join(words)) < min(tokens, self.model.text.most_tokens) and len(words) < 4096:
            words.append("shape")
        return " ".join(words)

    def _vae(self, shape: ProfiledShape) -> Callable[[], object]:
        import torch

        bucket = shape.bucket
        size = (shape.batch, bucket.frames, bucket.height, bucket.width, 3)
        video = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

        from actors.worker.encoding import NoMeasure, encode_clips
        from actors.worker.loading import Modules

        modules = Modules(
            config=self.model, geometry=self.geometry, dit=self.dit, vae=self.vae, text=self.text, image=self.image
        )
        return lambda: encode_clips(modules, self.frame, video, self.group, NoMeasure(), self.device)

    def _dit(self, shape: ProfiledShape) -> Callable[[], object]:
        """Forward and backward of one packed batch, gradients accumulated as in training; in a bag after the handoff
        of its inputs."""
        import torch

        from actors.worker.stopwatch import stopwatch_of
        from ops.flow.train_pass import packed_loss
        from ops.models.experts import keep_attention, transformers
        from ops.packed.conditions import Conditions
        from ops.packed.packing import Layout, Sequence
        from ops.precision import half_products

        dit = transformers(self.dit)[0]  # a pass is of one of two experts, which are alike
        bucket, patch, group = shape.bucket, self.geometry.patch, self.group
        grid = self.geometry.token_grid(bucket.frames, bucket.height, bucket.width)
        generator = torch.Generator().manual_seed(0)
        images, by_frame = self.frame.image_tokens, self.config.train.flow.by_frame
        sequences = [Sequence(grid, shape.text_tokens, images, frame_times=by_frame)] * shape.batch
        place, recurs = (group.size, group.rank, self.device), self.model.text.is_padded
        layout = Layout(sequences, *place, recurs, in_halves=self.model.dit.in_halves)
        width = self.model.dit.out_channels * patch[0] * patch[1] * patch[2]
        target = torch.randn(layout.local_tokens, width, generator=generator).to(self.device)
        tokens = torch.randn(layout.local_tokens, self.frame.width, generator=generator).to(self.device)
        text = torch.randn(shape.batch * shape.text_tokens, self.model.dit.text_dim, generator=generator).to(
            self.device
        )
        times = torch.full((layout.num_times,), 500.0, device=self.device)
        weights = torch.full((shape.batch,), 1.0 / shape.batch, device=self.device)
        dtype = next(dit.parameters()).dtype
        image = pooled = None
        if self.image is not None:
            image = torch.randn(shape.batch * self.frame.image_tokens, self.image.dim, generator=generator)
            image = image.to(self.device, dtype)
        if self.model.text.pooled:
            pooled = torch.randn(shape.batch, self.model.text.pooled, generator=generator).to(self.device, dtype)
        told = Conditions(image=image, pooled=pooled)
        cast = half_products(self.device, self.config.train.autocast == "bfloat16")
        gather, watch = self._gathering(shape, grid), stopwatch_of(self.device)

        def work() -> None:
            began = watch.mark()
            inputs = gather()
            self._gathered.append((inputs.bytes_received, partial(watch.seconds, began, watch.mark())))
            keep_attention(dit, self.attention.begin(layout, self._room_gib))
            with cast:
                predicted = dit(tokens.to(dtype), times, text.to(dtype), layout, group, told)
            packed_loss(predicted.float(), target, layout, weights).backward()

        return work

    def _gathering(self, shape: ProfiledShape, grid: tuple[int, int, int]) -> Callable[[], Inputs]:
        """What a cascade begins with: encode results, of which every member has made its share, go to the ranks that
        take them. Where there is one member all are in place."""
        import math

        import torch

        from actors.messages import StepSample
        from actors.worker.handoff import EncodeResult, EncodeStore, gather_inputs

        group, store = self.group, EncodeStore()
        double = next(self.dit.parameters()).dtype == torch.float64
        dtype = torch.float64 if double else torch.float32
        widths = self.frame.width, self.model.dit.text_dim
        rows = {"vae": math.prod(grid) + self.frame.tail, "text": shape.text_tokens}
        samples = [
            StepSample(step=0, item="", index=i, key="", grid=grid, weight=1 / shape.batch) for i in range(shape.batch)
        ]
        sources = {module: tuple(i % group.size for i in range(shape.batch)) for module in rows}
        made = [
            (module, EncodeResult(id=samples[i].id, rows=torch.zeros(rows[module], width, dtype=dtype).to(self.device)))
            for module, width in zip(rows, widths, strict=True)
            for i, rank in enumerate(sources[module])
            if rank == group.rank
        ]

        def gather() -> Inputs:
            for module, result in made:
                store.keep(module, result)
            return gather_inputs(samples, sources, store, {}, group, self.device, widths, dtype, tail=self.frame.tail)

        return gather


def _let_fall(parameter: Tensor) -> None:
    parameter.grad = None
