"""A worker's memory before a worker exists: what its states take, what is left for cascades, what would fit better.

Predicted from the config alone (`ops.models.forecast`), for `heddle plan`, `--dry-run` and the first plans of a run,
until its workers have measured more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actors.config import TrainConfig
from actors.plan.costs.needs import (
    BAG,
    SOLO,
    ClipBatches,
    NeedKey,
    NeedLine,
    Needs,
    Samples,
    clip_kind,
    footprint,
    line_through,
)
from actors.plan.places import BESIDE, Places
from actors.plan.types import USABLE
from data.buckets import BucketTable
from data.config import DataConfig
from ops.degrees import surplus
from ops.geometry import Geometry, PixelShape
from ops.models.base.tiles import clips_at_once
from ops.models.config import ModelConfig
from ops.shards import EDGE, STAGE, bytes_per_weight, held_elements, padding, shard_bounds
from ops.update.node_routes import peers
from ops.upload_room import uploads_gib

if TYPE_CHECKING:
    from ops.models.forecast import EncoderNeed, Precision

GIB = 2**30
CONTEXT_GIB = 2.0  # CUDA's context, cuBLAS, cuDNN, and the communicator of all workers, without its all-to-alls
BARE_CONTEXT_GIB = 0.5  # of it, what is there when weights have been read and nothing has been computed
_POOL = 1.5  # times what a block computes with that the allocator takes for its graphs (H200, four pictures of 256p)
_SLOTS = 5  # times the rows of a pass that its graphs hold beside it: in, out, the gradients of both, and small ones
PEER_GIB = 0.44  # of an NCCL communicator for each peer, once it has run an all-to-all (NVIDIA/nccl#1685, 8 x H100)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """GiB that a worker holds when nothing runs."""

    weights: float
    gradient: float
    optimizer: float  # its part of master, moments and average
    vae: float
    text: float
    image: float
    graphs: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradient + self.optimizer + self.vae + self.text + self.image + self.graphs

    def describe(self) -> str:
        """The parts in words, for a person."""
        return (
            f"weights {self.weights:.2f}, gradient {self.gradient:.2f}, optimizer {self.optimizer:.2f}, "
            f"VAE {self.vae:.2f}, text encoder {self.text:.2f}"
            + (f", image encoder {self.image:.2f}" if self.image else "")
            + (f", CUDA graphs {self.graphs:.2f}" if self.graphs else "")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """What a model's workers need: all counted in weights, so that any number of workers is only arithmetic."""

    parameters: int
    trained: int
    parameter_bytes: int  # of one parameter; of frozen ones in 8 bits what it would be
    state_bytes: int  # of one trained weight, over all workers
    deepspeed: bool = False
    vae_gib: float = 0.0
    text_gib: float = 0.0
    image_gib: float = 0.0
    needs: Needs = field(default_factory=Needs)
    cuda: bool = True
    places: Places = BESIDE
    per_node: int = 8  # workers that a node has room for: it is filled before the next one gets any
    vae_dtype: str = "float32"  # what the VAE computes in there
    host_encoders_gib: float = 0.0  # of each node's memory, for all of its GPUs
    host_uploads_gib: float = 0.0  # of its node's memory for what each worker sends to its GPU
    spared_bytes: int = 0  # by frozen weights in 8 bits
    in_blocks: int = 0  # bytes of weights of blocks, if they can be fetched; else 0. Beside LoRA the frozen ones alone
    largest_block: int = 0  # bytes of the largest in a buffer
    frozen_blocks: bool = False  # what can be fetched is frozen; what is trained lies on the device
    graphs_gib: float = 0.0  # of CUDA graphs of small passes, which a GPU has where it has room for them
    has_graphs: bool = False

    def possible(self, train: TrainConfig, per_node: int) -> list[MemoryForecast]:
        """Forecasts with gradients, state and parameters in each of the places that the settings allow, the fastest
        first."""
        places = train.places(self.trained, "cuda" if self.cuda else "cpu", fetchable=self.in_blocks > 0)
        return [replace(self, places=one, per_node=per_node) for one in places]

    def states(self, workers: int, here: int = 0) -> StateSizes:
        """What the fullest of `workers` workers has on its device. The flat engine: parameters, an fp32 gradient, a
        shard of the state (ZeRO-1); what lies in memory of its node is in `actors.state.hosts`. `here` are on that
        node; 0: as many as on the smallest one, where a device holds the most of its node's gradient."""
        # In fp32 the own range of the parameters is the master copy, where the state lies beside it: on the device.
        is_master = self.parameter_bytes >= 4 and not self.deepspeed and not self._fetches_trained and self.cuda
        shard = self.state_bytes - (4 if is_master else 0)
        largest = max(hi - lo for lo, hi in shard_bounds(self.trained, workers))
        return StateSizes(
            weights=self._weight_bytes() / GIB,
            gradient=self._gradient_bytes(workers, largest, here or min(self.nodes(workers))) / GIB,
            optimizer=0.0 if self.cuda and self.places.state == "host" else largest * shard / GIB,
            vae=self.vae_gib,
            text=self.text_gib,
            image=self.image_gib,
            graphs=self.graphs_gib if self.has_graphs else 0.0,
        )

    def nodes(self, workers: int) -> tuple[int, ...]:
        """Workers of each node."""
        full, rest = divmod(workers, self.per_node)
        return (*[self.per_node] * full, *([rest] if rest else []))

    @property
    def exchanges(self) -> bool:
        """Whether at the end of a step ranks of different nodes send each other gradients or parameters by all-to-alls
        of the communicator of all workers."""
        return self.cuda and not self.deepspeed and (self.places.gradients != "own" or self._fetches_trained)

    def exchange_gib(self, workers: int) -> float:
        """GiB of a GPU that its peers of other nodes take in that communicator."""
        numbers = [number for number, count in enumerate(self.nodes(workers)) for _ in range(count)]
        return PEER_GIB * max(peers(numbers)) if self.exchanges else 0.0

    @property
    def fetches(self) -> bool:
        """Blocks are fetched from host memory of their node. (A CPU computes with it: its workers map all of it.)"""
        return self.cuda and self.places.parameters == "node"

    @property
    def _fetches_trained(self) -> bool:
        return self.fetches and not self.frozen_blocks

    def _weight_bytes(self) -> int:
        """Bytes of the transformer's weights, on the device."""
        if self._fetches_trained:
            return self.parameters * self.parameter_bytes - self.in_blocks + 2 * self.largest_block
        fetched = self.in_blocks - 2 * self.largest_block if self.fetches else 0
        return self._all_weight_bytes - fetched

    @property
    def _all_weight_bytes(self) -> int:
        flat = self.trained * 4 if self.deepspeed else (self.trained + padding(self.trained)) * self.parameter_bytes
        return (self.parameters - self.trained) * self.parameter_bytes - self.spared_bytes + flat

    def _gradient_bytes(self, workers: int, largest: int, here: int) -> int:
        """What it takes of the device of one of `here` workers of a node."""
        if self.deepspeed:  # fp32 parameters, reduced in one bucket of their size
            return 8 * self.trained
        if self.places.gradients == "own":
            return self._own_gradient_bytes
        if not self.cuda:  # each of a node's workers maps all of it
            return 4 * self.trained
        if self.places.gradients == "host":
            return 0
        staged = 2 * (STAGE + 2 * EDGE) * self.parameter_bytes
        edges = EDGE * (-(-workers // here) + 1)  # of each range, and after the last one
        return 4 * (held_elements(self.trained, largest, workers, here) + edges) + staged

    @property
    def _own_gradient_bytes(self) -> int:
        return 4 * (self.trained + padding(self.trained))

    @property
    def host_weights_gib(self) -> float:
        """GiB of each node's host memory that hold the parameters."""
        if not self.fetches:
            return 0.0
        return (self.in_blocks if self.frozen_blocks else self.trained * self.parameter_bytes) / GIB

    @property
    def loaded_gib(self) -> float:
        """GiB of a device that a worker takes before its first generation: weights are read to the device, also trained
        ones that go to host memory from there, and a gradient of its own is there, too."""
        weights = self.parameters * self.parameter_bytes if self._fetches_trained else self._weight_bytes()
        own = self.places.gradients == "own" and not self.deepspeed
        gradient = self._own_gradient_bytes if own else 0
        return (weights + gradient) / GIB + self.vae_gib + self.text_gib + self.image_gib

    @property
    def state_gib(self) -> float:
        """GiB of the training state, of all workers together."""
        return self.trained * self.state_bytes / GIB

    def room_gib(self, memory_gib: float, workers: int, bags_gib: float) -> float:
        """GiB that a cascade may take on a device of `memory_gib`, on a GPU beside `bags_gib` for communicators of
        bags; negative where the states do not fit."""
        other = CONTEXT_GIB + bags_gib + self.exchange_gib(workers) if self.cuda else 0.0
        usable = USABLE * (memory_gib - other)
        room = usable - self.states(workers).total
        return min(room, usable - self.loaded_gib) if usable < self.loaded_gib else room


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What must run on some workers: one clip of each shape, with the longest captions, at some degree."""

    geometry: Geometry
    clips: tuple[PixelShape, ...]
    text_tokens: int
    bag_peers: int

    @classmethod
    def of(cls, data: DataConfig, model: ModelConfig, geometry: Geometry, bag_peers: int) -> Demand:
        """The demand of a run's data."""
        tokens = min(data.batch.text_tokens, model.text.most_tokens)
        return cls(geometry=geometry, clips=tuple(clips_of(data, geometry)), text_tokens=tokens, bag_peers=bag_peers)

    def need_gib(self, needs: Needs, degrees: Sequence[int], workers: int) -> float:
        """The largest cascade, with the DiT at the degree at which it needs least; infinite where none is legal."""
        legal = [degree for degree in degrees if degree <= workers]
        return max((self._need_of(needs, clip, legal) for clip in self.clips), default=0.0)

    def fits(self, found: MemoryForecast, degrees: Sequence[int], workers: int, memory_gib: float) -> bool:
        """Whether it does on that number of workers with `memory_gib` each."""
        room = found.room_gib(memory_gib, workers, communicators_gib(degrees, workers, self.bag_peers))
        return self.need_gib(found.needs, degrees, workers) <= room

    def with_graphs(
        self, found: MemoryForecast, degrees: Sequence[int], workers: Sequence[int], memory_gib: float
    ) -> MemoryForecast:
        """The forecast with the graphs that a worker has which finds room for them beside all else."""
        return replace(found, has_graphs=self.graphs_least_gib(found, degrees, workers) <= memory_gib)

    def graphs_least_gib(self, found: MemoryForecast, degrees: Sequence[int], workers: Sequence[int]) -> float:
        """GiB of a GPU on which there is room for graphs with each of these numbers of workers: many have smaller parts
        of the state each, and communicators that one has not. Infinite where blocks are fetched, of which there are
        none."""
        if found.fetches:
            return math.inf
        return max(self.least_gib(found, degrees, count) for count in workers) + found.graphs_gib / USABLE

    def fewest(
        self, found: MemoryForecast, degrees: Sequence[int], memory_gib: float, least: int, most: int
    ) -> int | None:
        """The smallest number of workers from `least` to `most` on which it fits."""
        counts = range(least, most + 1)
        return next((workers for workers in counts if self.fits(found, degrees, workers, memory_gib)), None)

    def least_gib(self, found: MemoryForecast, degrees: Sequence[int], workers: int) -> float:
        """GiB of a GPU on which it fits with that number of workers; of the least degree where all take more
        workers."""
        legal = [degree for degree in degrees if degree <= workers] or [min(degrees)]
        need = self.need_gib(found.needs, legal, max(legal))
        taken = max(found.states(workers).total + need, found.loaded_gib)
        other = communicators_gib(degrees, workers, self.bag_peers) + found.exchange_gib(workers)
        return CONTEXT_GIB + other + taken / USABLE

    def _need_of(self, needs: Needs, clip: PixelShape, degrees: Sequence[int]) -> float:
        one, tokens = [replace(_clip(clip), text_tokens=self.text_tokens)], self.geometry.tokens
        dit = min((needs.gib(footprint("dit", one, k, tokens, needs)) or 0.0 for k in degrees), default=math.inf)
        return max(dit, *(needs.gib(footprint(module, one, 1, tokens)) or 0.0 for module in ("vae", "text")))


def clips_of(data: DataConfig, geometry: Geometry) -> list[PixelShape]:
    """The shapes of all buckets, of every segment of the run."""
    return [(one.frames, one.height, one.width) for one in BucketTable.buckets_of(data.tables, geometry)]


def largest_upload(clips: Sequence[PixelShape]) -> int:
    """Bytes of the pixels, uint8, that a VAE takes to its device at once, of clips of these shapes."""
    return max((3 * math.prod(clip) * clips_at_once(*clip) for clip in clips), default=0)


def sizes_of(model: ModelConfig, train: TrainConfig, cuda: bool) -> MemoryForecast:
    """What is known of a resolved model by counting its weights: no encoder, no need of a cascade."""
    import torch

    from ops.models.float8 import spared_bytes
    from ops.models.frozen_blocks import bytes_of_blocks
    from ops.models.load import dit_skeleton

    skeleton, parameter_bytes = dit_skeleton(model.dit), getattr(torch, train.parameter_dtype).itemsize
    weights = [(p.numel(), p.requires_grad) for p in skeleton.parameters()]
    frozen = model.dit.freezes_blocks
    blocks = bytes_of_blocks(skeleton, parameter_bytes, frozen) if model.dit.fetchable else []
    trained = sum(count for count, wanted in weights if wanted)
    return MemoryForecast(
        parameters=sum(count for count, _ in weights),
        trained=trained,
        parameter_bytes=parameter_bytes,
        spared_bytes=spared_bytes(skeleton, parameter_bytes),
        state_bytes=bytes_per_weight(train.optimizer.ema_decay > 0),
        deepspeed=train.sync == "deepspeed",
        cuda=cuda,
        places=train.places(trained, "cuda" if cuda else "cpu")[0],
        vae_dtype=model.vae.dtype_on("cuda" if cuda else "cpu"),
        in_blocks=sum(blocks),
        largest_block=max(blocks, default=0),
        frozen_blocks=frozen,
    )


def host_weights_gib(model: ModelConfig, train: TrainConfig) -> float:
    """GiB of each node's host memory that weights of a resolved model take with `train.memory.parameters: node`."""
    sizes = sizes_of(model, train, cuda=True)
    return replace(sizes, places=replace(sizes.places, parameters="node")).host_weights_gib


def forecast(
    model: ModelConfig,
    geometry: Geometry,
    train: TrainConfig,
    clips: Sequence[PixelShape],
    degrees: Sequence[int],
    cuda: bool,
) -> MemoryForecast:
    """What a resolved model needs, in the first of the places that the settings allow (`possible`). `clips` are the
    shapes that will come, `degrees` those that the DiT may have.

    Takes seconds of one core and no memory to speak of, whatever the size of the model.
    """
    return Forecasts(geometry, clips, cuda).of(model, train, degrees)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoders:
    """A model's frozen parts: what their cascades need, and their weights."""

    predicted: dict[NeedKey, NeedLine]
    batches: dict[str, ClipBatches]
    vae_gib: float
    text_gib: float
    image_gib: float
    host_gib: float  # of a node's memory, for all of its GPUs


class Forecasts:
    """Forecasts of models that differ in some settings: what they have in common is predicted once."""

    def __init__(self, geometry: Geometry, clips: Sequence[PixelShape], cuda: bool) -> None:
        self._geometry, self._clips, self._cuda = geometry, tuple(clips), cuda
        self._dit: dict[object, Needs] = {}
        self._encoders: dict[object, _Encoders] = {}

    def of(self, model: ModelConfig, train: TrainConfig, degrees: Sequence[int]) -> MemoryForecast:
        """As `forecast`."""
        import torch

        from ops.models.first_frame import FirstFrame
        from ops.models.forecast import Precision

        dtype = getattr(torch, train.parameter_dtype)
        precision = Precision(parameters=dtype, autocast=train.autocast == "bfloat16", cuda=self._cuda)
        by_frame = train.flow.by_frame
        key = model.dit, model.text, model.image, tuple(degrees), precision, by_frame
        if key not in self._dit:
            self._dit[key] = Needs()
            predict_dit(self._dit[key], model, self._geometry, self._clips, degrees, precision, by_frame)
        frozen = model.vae, model.text, model.image, FirstFrame.of(model)
        if frozen not in self._encoders:
            self._encoders[frozen] = self._of_encoders(model)
        dit, encoders = self._dit[key], self._encoders[frozen]
        if train.memory.attention == "kept" and model.dit.gradient_checkpointing:
            dit = with_attention_kept(dit, model.dit.kept_bytes(2 if precision.autocast else dtype.itemsize))
        sizes = sizes_of(model, train, self._cuda)
        graphs = self._cuda and model.dit.cuda_graphs and model.dit.compiles and 1 in degrees
        return replace(
            sizes,
            graphs_gib=graphs_gib(model, self._geometry, self._clips, sizes, precision, by_frame) if graphs else 0.0,
            vae_gib=encoders.vae_gib,
            text_gib=encoders.text_gib,
            image_gib=encoders.image_gib,
            host_encoders_gib=encoders.host_gib,
            host_uploads_gib=uploads_gib(largest_upload(self._clips)) if self._cuda else 0.0,
            needs=Needs(
                predicted={**dit.predicted, **encoders.predicted},
                text_rows=dict(dit.text_rows),
                copied=dit.copied,
                num_heads=dit.num_heads,
                batches=dict(encoders.batches),
            ),
        )

    def _of_encoders(self, model: ModelConfig) -> _Encoders:
        import torch

        from ops.models.forecast import image_need, text_need

        device = "cuda" if self._cuda else "cpu"
        predicted: dict[NeedKey, NeedLine] = {}
        batches: dict[str, ClipBatches] = {}
        vae_gib = 0.0
        image = image_need(model.image, 1) if model.image is not None else None
        picture = image.peak_gib if image is not None else 0.0  # a VAE cascade encodes each clip's first frame, too
        for shape, found in _vae_needs(model, self._clips, device).items():
            vae_gib, kind, peak = found.weights_gib, clip_kind(_clip(shape)), found.peak_gib + picture
            predicted["vae", kind] = NeedLine(fixed_gib=0.0, gib_per_unit=peak)
            batches[kind] = ClipBatches(clips_at_once(*shape), found.left_gib / peak)
        longest = model.text.most_tokens
        encoder = getattr(torch, model.text.dtype_on(device))
        few, more = (text_need(model.text, count, longest, encoder) for count in (1, 4))
        predicted["text", SOLO] = line_through((longest, 4.0 * longest), (few.peak_gib, more.peak_gib))
        return _Encoders(
            predicted=predicted,
            batches=batches,
            vae_gib=vae_gib,
            text_gib=few.weights_gib,
            image_gib=image.weights_gib if image is not None else 0.0,
            host_gib=few.host_gib if self._cuda else 0.0,
        )


def graphs_gib(
    model: ModelConfig,
    geometry: Geometry,
    clips: Sequence[PixelShape],
    sizes: MemoryForecast,
    precision: Precision,
    by_frame: bool = False,
) -> float:
    """GiB of the CUDA graphs of small passes: what one block of the largest computes with, the gradients of a block,
    and what goes into graphs and comes out of them; of each expert. As many clips of one shape as a small pass takes,
    whatever batches have."""
    from ops.models.experts import most_in_small_pass
    from ops.models.first_frame import FirstFrame
    from ops.models.forecast import dit_need_gib
    from ops.packed.packing import Sequence as PackedSequence

    text, images = model.text.most_tokens, FirstFrame.of(model).image_tokens
    shapes = [PackedSequence(geometry.token_grid(*clip), text, images, frame_times=by_frame) for clip in clips]
    passes = [(most_in_small_pass(model.dit, one), one) for one in shapes]
    count, one = max(passes, key=lambda found: found[0] * (found[1].tokens + found[1].text_tokens))
    if not count:
        return 0.0
    blocks, row_gib = sum(model.dit.block_counts), model.dit.dim * sizes.parameter_bytes / GIB
    checkpointed = replace(model.dit, gradient_checkpointing=True)
    few, more = (dit_need_gib(checkpointed, [one] * number, 1, precision) for number in (1, 2))
    inputs = blocks * count * one.tokens * row_gib  # of all blocks, which are in no graph
    computed = max(few + (count - 1) * (more - few) - inputs, 0.0)
    slots = _SLOTS * count * (one.tokens + one.text_tokens) * row_gib
    gradients = sizes.trained / blocks * sizes.parameter_bytes / GIB
    return len(model.dit.experts) * (_POOL * computed + slots) + gradients


def with_attention_kept(needs: Needs, row_bytes: int) -> Needs:
    """What transformers need whose passes keep `row_bytes` of attention for every row, of text too."""
    found = replace(needs, predicted={}, text_rows={})
    for key, line in needs.predicted.items():
        slope = line.gib_per_unit + row_bytes / GIB
        text_gib = needs.text_rows[key[1]] * line.gib_per_unit + row_bytes / GIB
        found.predicted[key] = replace(line, gib_per_unit=slope)
        found.text_rows[key[1]] = text_gib / slope
    return found


def _clip(shape: PixelShape) -> Samples:
    return Samples(count=1, frames=shape[0], height=shape[1], width=shape[2])


def predict_dit(
    needs: Needs,
    model: ModelConfig,
    geometry: Geometry,
    clips: Sequence[PixelShape],
    degrees: Sequence[int],
    precision: Precision,
    by_frame: bool = False,
) -> None:
    """Two sizes alone, one of them with the longest caption, too; one size at the lowest and the highest degree, and
    the smallest one at the highest. `by_frame`: each frame has a time of its own, and with it rows of the modulation.

    Captions are of any length, and a row of text takes less than one of video (where text is only attended to, a
    thirtieth), so a line through clips with one caption would be below those with a shorter one. A rank of a bag holds
    the whole text or a part of it, by the model; the whole is what counts. Of many rows the peak is in the exchange, of
    few it comes after it, beside the gradients of a block's weights: of two lines the larger one (Wan2.1-14B in bags:
    0.670 MiB of a row; below 10,500 rows 136 MiB and 0.657 MiB of a row). The line of a bag lies above both. Degrees
    at which ranks share heads are on the same line with rows that weigh more: with the copies of keys and values the
    peak grows linearly or not at all, so what the largest of them needs is enough for the others.
    """
    from ops.models.first_frame import FirstFrame
    from ops.models.forecast import dit_need_gib
    from ops.packed.packing import Sequence as PackedSequence

    by_size = sorted(clips, key=lambda clip: geometry.tokens(*clip))
    t, h, w = geometry.token_grid(*by_size[-1])
    images = FirstFrame.of(model).image_tokens
    longest = max(model.text.most_tokens, 2)
    grids = [(t, h, max(w, 2)), (t, h, max(w, 2) // 2), geometry.token_grid(*by_size[0])]
    large, small, least = (PackedSequence(grid, 1, images, frame_times=by_frame) for grid in grids)
    told = replace(small, text_tokens=longest)
    many, few, with_text = (dit_need_gib(model.dit, [s], 1, precision) for s in (large, small, told))
    slope = (many - few) / (large.tokens - small.tokens)
    text_gib = max(0.0, with_text - few) / (longest - 1)  # of a row
    line = NeedLine(fixed_gib=few - slope * small.tokens - text_gib, gib_per_unit=slope)
    needs.predicted["dit", SOLO], needs.text_rows[SOLO] = line, text_gib / slope
    heads = model.dit.num_heads if model.dit.deals_heads else None  # that are dealt out over a bag
    wanted = sorted({degree for degree in degrees if degree > 1})
    bags = [degree for degree in wanted if heads is None or heads % degree == 0] or wanted[:1]
    if bags:
        rows = {degree: large.tokens / degree for degree in {bags[0], bags[-1]}}
        peaks = {degree: dit_need_gib(model.dit, [large], degree, precision) - text_gib for degree in rows}
        fixed = line.fixed_gib
        if len(rows) > 1:  # the exchange takes a little more of each row at a higher degree
            fixed = line_through((rows[bags[-1]], rows[bags[0]]), (peaks[bags[-1]], peaks[bags[0]])).fixed_gib
        fixed = max(0.0, min(fixed, *peaks.values()))
        slope = max((peaks[degree] - fixed) / rows[degree] for degree in rows)
        if least.tokens < large.tokens:
            peak = dit_need_gib(model.dit, [least], bags[-1], precision) - text_gib
            fixed = max(fixed, peak - slope * least.tokens / bags[-1])
        needs.predicted["dit", BAG] = NeedLine(fixed_gib=fixed, gib_per_unit=slope)
        needs.text_rows[BAG] = text_gib / slope
        needs.num_heads, needs.copied = heads or 0, 0.0
        if heads is None:
            return
        by_surplus = sorted((surplus(heads, degree), degree) for degree in set(wanted) - set(bags))
        for share, degree in {*by_surplus[:1], *by_surplus[-1:]}:
            peak = dit_need_gib(model.dit, [large], degree, precision) - text_gib
            extra = (peak - fixed) * degree / large.tokens / slope - 1
            needs.copied = max(needs.copied, extra / share)


def _vae_needs(model: ModelConfig, clips: Sequence[PixelShape], device: str) -> dict[PixelShape, EncoderNeed]:
    """Need of one clip of each shape. It grows with the area where a clip is neither cut nor taken as pictures."""
    from ops.models.first_frame import FirstFrame
    from ops.models.folders import is_of_pictures
    from ops.models.forecast import vae_need

    frame, in_parts = FirstFrame.of(model), model.vae.tiling or is_of_pictures(model.vae)
    found: dict[PixelShape, EncoderNeed] = {}
    whole: dict[int, tuple[EncoderNeed, int]] = {}  # frames -> what a clip of an area needs
    for frames, height, width in dict.fromkeys(clips):
        if in_parts:
            found[frames, height, width] = vae_need(model.vae, 1, frames, height, width, device, frame)
            continue
        if frames not in whole:
            whole[frames] = vae_need(model.vae, 1, frames, height, width, device, frame), height * width
        need, area = whole[frames]
        share = height * width / area
        found[frames, height, width] = replace(need, peak_gib=share * need.peak_gib, left_gib=share * need.left_gib)
    return found


def communicators_gib(degrees: Sequence[int], workers: int, bag_peers: int) -> float:
    """GiB of a GPU that the communicators of its bags take at most: with `bag_peers` peers (0: no limit) of all bags
    that these degrees allow. A larger bag, which is planned where no smaller one is legal, is open alone."""
    bags = [degree for degree in degrees if 1 < degree <= workers]
    all_peers = sum(math.comb(workers - 1, degree - 1) * (degree - 1) for degree in bags)
    legal = [degree for degree in bags if not bag_peers or degree <= bag_peers + 1]
    most = max(bag_peers, 0 if legal else min(bags, default=1) - 1)
    return PEER_GIB * (min(most, all_peers) if bag_peers else all_peers)
