"""What cascades need of a device's memory, without the device: the model's own code on tensors that have no data.

The transformer runs forward and backward (`train_pass`, with FlatSync's hooks) under FakeTensorMode while its storages
are counted. Peaks are exact for what PyTorch's operators allocate; workspaces of cuBLAS and cuDNN and fragments are not
in them. The need is linear in the rows of a rank, so two sizes make a line; where all blocks are alike it is also
linear in their number, so that two short models stand for a deep one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.attention.backend import Backend
from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName
from ops.attention.varlen import standing_in
from ops.comm.collectives import Group
from ops.config import FlowConfig, OptimizerConfig
from ops.flow.objective import FlowObjective
from ops.flow.train_pass import PassClip, PassSettings, train_pass
from ops.models.base.config import DiTConfig
from ops.models.base.vae import DiffusersVAE, latents_of
from ops.models.chunked import ChunkedVAE
from ops.models.config import ImageConfig, TextConfig, VAEConfig
from ops.models.experts import slice_by, transformers
from ops.models.first_frame import FirstFrame
from ops.models.frozen_blocks import FrozenBlocks, frozen_in_blocks
from ops.models.image import Preprocessor, clip_skeleton, image_size, vision_rows
from ops.models.load import bare_dit, bare_vae
from ops.models.text import T5Text, t5_skeleton
from ops.models.text_glyphs import GlyphText
from ops.models.text_layers import LayersText, skeletons
from ops.models.text_pair import PooledText, pooled_text, recipe_of
from ops.models.text_pair_shapes import pair_skeleton
from ops.models.text_picture import Eyes
from ops.models.text_vision import SiglipRows, siglip_size, siglip_skeleton
from ops.packed.conditions import NOTHING, Conditions
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify
from ops.shards import Bounds, Slot
from ops.spatial_temporal.choice import WHOLE
from ops.storages import StorageCount, storage_bytes
from ops.units import GIB
from ops.update.gradient_places import GradientsOf, gradients_in
from ops.update.node_gradients import NodeGradients
from ops.update.node_parameters import Held, NodeParameters, bytes_laid_out, laid_out
from ops.update.node_routes import routes
from ops.update.parameters import Received
from ops.update.peer_sum import PeerSum
from ops.update.sync import FlatSync
from ops.update.sync_places import SyncPlaces
from ops.waiting import PendingCollective

_SHORT = (2, 3)  # blocks of the models that stand for a deep one


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What the parameters are, what is computed in, and on what kind of device."""

    parameters: torch.dtype = torch.float32
    autocast: bool = False
    cuda: bool = False  # attention as FlashAttention's kernels allocate; else as the CPU's


class _PretendGroup(Group):
    """A group whose other members are not there: its collectives move nothing."""

    def __init__(self, degree: int) -> None:
        super().__init__(None, tuple(range(degree)), 0, 0.0)

    def all_to_all(self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int]) -> None: ...

    def all_to_all_async(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> PendingCollective:
        return PendingCollective(None, None, "nothing")

    def broadcast(self, tensor: Tensor, source_rank: int) -> None: ...


class _FlashShapes(torch.autograd.Function):
    """What FlashAttention 2 and 3 keep and allocate: out and the log-sum-exp, in backward an fp32 sum for dq."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        total = torch.empty_like(q, dtype=torch.float32)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del total
        return grads


class _Flash:
    """Stands for the flash kernels, which the CPU does not have."""

    name: BackendName = "flash"

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        out: Tensor = _FlashShapes.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out


class _PretendBlocks:
    """Two buffers of a GPU for blocks, into which nothing is copied."""

    computes_there = False

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.host_bytes = 0  # of what blocks are copied from
        self._held: Held = lambda block: []
        self._turn = 0

    def hold(self, memory: Tensor, held: Held, largest: int) -> None:
        self.host_bytes = memory.untyped_storage().nbytes()
        self._held, self.buffers = held, [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def let_go(self) -> None:
        self.buffers = []

    def fetch(self, block: int) -> list[Tensor]:
        self._turn = 1 - self._turn
        return laid_out(self._held(block), self.buffers[self._turn])

    def settle(self) -> None: ...


class _FetchedParameters(NodeParameters):
    """Parameters of a node whose other workers are not there."""

    def __init__(
        self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], layout: Sequence[Slot], received: Received
    ) -> None:
        self.blocks_here = _PretendBlocks()
        super().__init__(module, named, layout, self.blocks_here, received)

    def form(self, group: Group, bounds: Bounds, current: bool) -> None:
        self._let_go()
        self._group, self._bounds = group, bounds
        self._flat = torch.empty(self._layout[-1].hi, dtype=self._flat.dtype)
        self._place.hold(self._flat, self._held, max(map(bytes_laid_out, map(self._values_of, self._blocks))))
        self._take_up()


def pass_bytes(
    config: DiTConfig,
    sequences: Sequence[PackedSequence],
    degree: int,
    precision: Precision,
    fetched: bool = False,
) -> tuple[int, int]:
    """(peak of a forward and backward of these sequences on rank 0 of `degree`, bytes of the parameters and gradient).

    The peak is beside parameters, gradient and the inputs, as a worker counts it. Blocks as in `config`, however many;
    with `fetched` their parameters, beside LoRA the frozen ones, come from memory of the host.
    """
    one = config.experts[0]  # a pass is of one expert
    as_written = replace(one, attention="auto", path=None, compile=False, cuda_graphs=False)
    return _of_pass(as_written, tuple(sequences), degree, precision, fetched)


@cache  # half a second each; a command asks for the same ones up to three times, and with each remedy that it tries
def _of_pass(
    config: DiTConfig, sequences: tuple[PackedSequence, ...], degree: int, precision: Precision, fetched: bool
) -> tuple[int, int]:
    layout = _layout_read(sequences, degree)
    images = sum(sequence.image_tokens for sequence in sequences)
    width = config.in_channels * math.prod(config.patch)
    with FakeTensorMode(allow_non_fake_inputs=True), standing_in(_flash(precision)):
        dit = _without_data(config, precision.parameters)
        slice_by(dit, WHOLE)
        frozen = _fetched_frozen(dit) if fetched and config.freezes_blocks else None
        sync = FlatSync(
            dit,
            OptimizerConfig(),
            1,
            places=_places(gradients_in("own", gathers=precision.cuda), fetched and not frozen),
        )
        if fetched and not frozen:
            sync.form(Group.solo(), None)
        sync.begin_step()
        dtype = torch.float64 if precision.parameters == torch.float64 else torch.float32
        clips = [
            PassClip(
                rows=torch.empty(layout.chunk(i).stop - layout.chunk(i).start, width, dtype=dtype),
                text=torch.empty(sequence.text_tokens, config.text_dim, dtype=dtype),
                key=str(i),
                weight=1 / len(sequences),
            )
            for i, sequence in enumerate(sequences)
        ]
        with StorageCount() as count:
            train_pass(
                dit,
                clips,
                layout,
                _PretendGroup(degree) if degree > 1 else Group.solo(),
                PassSettings(
                    objective=FlowObjective(FlowConfig()),
                    seed=0,
                    step=0,
                    latent_width=config.out_channels * math.prod(config.patch),
                    dtype=dtype,
                    autocast=precision.autocast,
                ),
                Conditions(image=torch.empty(images, config.image_width)) if images else NOTHING,
            )
        blocks = frozen or _fetched_trained(sync)
        held = storage_bytes([sync.gradient(), *dit.parameters(), *dit.buffers(), *blocks.buffers])
    return count.peak_bytes, held - blocks.host_bytes


def forward_bytes(
    config: DiTConfig, sequences: Sequence[PackedSequence], degree: int, precision: Precision
) -> tuple[int, int]:
    """(peak of a forward of these sequences on rank 0 of `degree`, as a sampler runs it, beside weights and inputs;
    bytes of the weights)."""
    layout = _layout_read(sequences, degree)
    width = config.in_channels * math.prod(config.patch)
    rows = sum(sequence.text_tokens for sequence in sequences)
    with FakeTensorMode(allow_non_fake_inputs=True), standing_in(_flash(precision)), torch.no_grad():
        dit = _without_data(config, precision.parameters).eval()
        tokens = torch.empty(layout.local_tokens, width, dtype=precision.parameters)
        text = torch.empty(rows, config.text_dim, dtype=precision.parameters)
        group = _PretendGroup(degree) if degree > 1 else Group.solo()
        with StorageCount() as count:
            dit(tokens, torch.empty(len(sequences)), text, layout, group)
        return count.peak_bytes, storage_bytes([*dit.parameters(), *dit.buffers()])


def _layout_read(sequences: Sequence[PackedSequence], degree: int) -> Layout:
    """The layout of rank 0, its index tensors made: they read their own values, which tensors without data have not."""
    layout = Layout(sequences, degree)
    for part in (
        "segments",
        "sequence_segments",
        "seq_index",
        "positions",
        "text_segments",
        "local_text_segments",
        "stream_segments",
        "table_sequences",
        "time_index",
        *([] if layout.has_frame_times else ["joint_segments"]),
    ):
        getattr(layout, part)
    return layout


def _fetched_trained(sync: FlatSync) -> _PretendBlocks:
    """How its blocks come to the device; where they lie there, nothing does."""
    return sync.parameters.blocks_here if isinstance(sync.parameters, _FetchedParameters) else _PretendBlocks()


def _fetched_frozen(dit: nn.Module) -> _PretendBlocks:
    """How the frozen weights of its blocks come to the device from now on."""
    place = _PretendBlocks()
    FrozenBlocks(transformers(dit), place, torch.empty(0))
    place.host_bytes = storage_bytes(map(dit.get_parameter, frozen_in_blocks(dit)))
    return place


def dit_need_gib(config: DiTConfig, sequences: Sequence[PackedSequence], degree: int, precision: Precision) -> float:
    """Peak of one cascade beside the states, by short models where all blocks are alike."""
    # stacks run one after the other; in which of them the peak lies depends on the number of blocks
    stacks = len({sequence.grid for sequence in sequences}) if config.spatial_temporal else 1
    alike = len(config.block_counts) == 1 and stacks == 1 and not (config.train_only or config.lora_targets)
    if not alike or config.num_layers <= max(_SHORT):
        return pass_bytes(config, sequences, degree, precision)[0] / GIB
    few, more = (pass_bytes(replace(config, num_layers=layers), sequences, degree, precision)[0] for layers in _SHORT)
    return (few + (config.num_layers - _SHORT[0]) * (more - few) / (_SHORT[1] - _SHORT[0])) / GIB


class _PretendPeers:
    """A GPU whose memory is counted and whose neighbours are not there."""

    device = torch.device("cpu")

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype)

    def free(self, memory: Tensor) -> None: ...

    def lend(self, memory: Tensor) -> bytes:
        return b""

    def borrow(self, handle: bytes) -> int:
        return 0

    def give_back(self, address: int) -> None: ...

    def stage(self, turn: int) -> None: ...

    def push(self, staged: Tensor, address: int, turn: int) -> None: ...

    def pushed(self) -> None: ...

    def wait(self) -> None: ...


def _places(gradients: GradientsOf, fetched: bool) -> SyncPlaces:
    """These gradients and, with `fetched`, parameters in host memory."""
    if fetched:
        return SyncPlaces(gradients_of=gradients, parameters="node", parameters_of=_FetchedParameters)
    return SyncPlaces(gradients_of=gradients)


class _ReservedGradients(NodeGradients):
    """A node's gradient of which this worker's part is taken, and nothing else."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> None:
        self.part_here = PeerSum(layout[-1].hi, dtype, parameters[0].dtype, _PretendPeers())
        super().__init__(parameters, layout, [self.part_here])

    def form(self, group: Group, bounds: Bounds) -> None:
        self.part_here.reserve(group.rank, bounds, routes(group.nodes))


def states_bytes(
    config: DiTConfig,
    optimizer: OptimizerConfig,
    workers: int,
    precision: Precision,
    per_node: int = 0,
    fetched: bool = False,
) -> tuple[int, int]:
    """What the first of `workers` workers keeps on its GPU between two cascades, as FlatSync makes it: (bytes of
    parameters, gradient and its part of the optimizer's state, those of parameters and gradient alone). The gradient is
    its own or, with `per_node` workers on each node, the part that it holds in its GPU's memory for its node. With
    `fetched` parameters of lower precision than the state lie in memory of the host, but for those outside of blocks;
    beside LoRA the frozen ones of blocks.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), StorageCount() as count:
        dit = _without_data(config, precision.parameters)
        gradients_of = _ReservedGradients if per_node else gradients_in("own")
        frozen = _fetched_frozen(dit) if fetched and config.freezes_blocks else None
        sync = FlatSync(
            dit,
            optimizer,
            1,
            places=_places(gradients_of, fetched and not frozen),
        )
        group = _PretendGroup(workers)
        group.nodes = tuple(rank // (per_node or workers) for rank in range(workers))
        sync.form(group, None)
        gradients = sync.gradients
        staged = gradients.part_here.buffers if isinstance(gradients, _ReservedGradients) else []
        blocks = frozen or _fetched_trained(sync)
        held = [sync.gradient(), *staged, *dit.parameters(), *dit.buffers(), *blocks.buffers]
        return count.live_bytes - blocks.host_bytes, storage_bytes(held) - blocks.host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderNeed:
    """Memory of a frozen encoder: its weights, and the peak of one call beside them."""

    weights_gib: float
    peak_gib: float
    left_gib: float = 0.0  # of the peak that the results of the call take on
    host_gib: float = 0.0  # of weights that lie in host memory between two calls


def vae_need(
    config: VAEConfig,
    batch: int,
    frames: int,
    height: int,
    width: int,
    device: str = "cpu",
    frame: FirstFrame | None = None,
) -> EncoderNeed:
    """Memory for encoding `batch` clips at once on a kind of device, with what `frame` says of their first frames; the
    rows that it leaves are in the peak. Raises ValueError for a folder without a known autoencoder, FileNotFoundError
    without a folder."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        vae = bare_vae(config, device)
        video = torch.empty(batch, frames, height, width, 3, dtype=torch.uint8)
        tiles = vae.plan_tiles(frames, height, width)
        told = frame if frame is not None and frame.is_told else None
        with StorageCount() as count, torch.no_grad():
            clips = video.to("cpu", copy=True)  # to the device
            if len(tiles) == 1:
                latents = list(vae.encode(clips)) if told is None else latents_of(vae, told, clips)
                rows = [patchify(latent.float(), (1, 1, 1)) for latent in latents]
                peak = count.peak_bytes
                left = storage_bytes(rows)
            else:  # one after the other: the first is the largest, and what the others left stays beside it
                seen = clips if told is None or told.alone else told.still(clips)
                tile = vae.encode_tile(seen, tiles[0])
                made = len(tiles) + (len(vae.plan_tiles(told.still_frames(frames), height, width)) if told else 0)
                left = tile.untyped_storage().nbytes() * made
                peak = count.peak_bytes + left - tile.untyped_storage().nbytes()
        weights = list(vae.model.parameters()) if isinstance(vae, DiffusersVAE | ChunkedVAE) else []
        return EncoderNeed(weights_gib=storage_bytes(weights) / GIB, peak_gib=peak / GIB, left_gib=left / GIB)


def text_need(config: TextConfig, captions: int, tokens: int, dtype: torch.dtype) -> EncoderNeed:
    """Memory for encoding captions of `tokens` tokens each, at most `TEXT_BATCH_TOKENS` of them at a time. Rows of
    first frames are among them where the encoder sees these."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            text = _text(replace(config, place="device"), tokens)
        finally:
            torch.set_default_dtype(before)
        with StorageCount() as count:
            pictures = [np.zeros((1, 1, 3), np.uint8)] * captions if config.sees_picture else []
            caption = '""' if config.glyph_dim else ""  # which both encoders read
            rows = [row.float() for row in text.encode([caption] * captions, pictures)]
        del rows
        weights, peak = storage_bytes(text.parameters()) / GIB, count.peak_bytes / GIB
        if config.place == "host":  # the weights come for the call
            return EncoderNeed(weights_gib=0.0, peak_gib=weights + peak, host_gib=weights)
        return EncoderNeed(weights_gib=weights, peak_gib=peak)


def _text(config: TextConfig, tokens: int) -> T5Text | PooledText | GlyphText | LayersText:
    if config.recipe is None:
        return T5Text(t5_skeleton(config), _FixedTokenizer(tokens), config, "cpu")
    recipe = recipe_of(config)
    if recipe.second == "connectors":  # every row is computed, most of them of registers: a caption may fill them
        return LayersText(*skeletons(config), _FixedTokenizer(config.max_length), config, "cpu")
    encoder, second = pair_skeleton(config)
    first, pooled = _FixedTokenizer(tokens + recipe.crop), _FixedTokenizer(recipe.second_tokens)
    if recipe.vision:
        tower = siglip_skeleton(config)
        first = _FixedTokenizer(max(1, tokens - config.picture_rows) + recipe.crop)
        frames = SiglipRows(tower, _unprepared(siglip_size(tower)), config, "cpu")
        return pooled_text(encoder, first, second, pooled, config, "cpu", frames=frames)
    if not recipe.picture:
        return pooled_text(encoder, first, second, pooled, config, "cpu")
    shape: Any = encoder.config  # of a LlavaModel: to torch it may be any attribute
    first = _FixedTokenizer(max(1, tokens - config.picture_rows) + recipe.crop + recipe.picture.dropped)
    first.input_ids[0] = shape.image_token_index
    eyes = Eyes(_unprepared(shape.vision_config.image_size), mark=0)
    return pooled_text(encoder, first, second, pooled, config, "cpu", eyes)


def _unprepared(size: int) -> Preprocessor:
    """Makes pictures of the size that an encoder takes, of any pixels."""

    def prepared(images: Sequence[np.ndarray], **options: object) -> dict[str, Tensor]:
        return {"pixel_values": torch.empty(len(images), 3, size, size)}

    return prepared


def image_need(config: ImageConfig, pictures: int) -> EncoderNeed:
    """Memory for encoding this number of pictures at once. Raises FileNotFoundError without the folder of
    `config.path`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        encoder = clip_skeleton(config)
        encoder.train(False)
        size = image_size(encoder)
        pixels = torch.empty(pictures, 3, size, size)
        with StorageCount() as count, torch.no_grad():
            rows = vision_rows(encoder, pixels.to("cpu", copy=True))
        del rows
        return EncoderNeed(weights_gib=storage_bytes(encoder.parameters()) / GIB, peak_gib=count.peak_bytes / GIB)


class _FixedTokenizer:
    """A tokenizer for which every caption has the same number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.input_ids = [0] * tokens

    def __call__(self, text: str, /, **options: object) -> _FixedTokenizer:
        return self


def _without_data(config: DiTConfig, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast afterwards would make every parameter twice
    try:
        return bare_dit(config).train()
    finally:
        torch.set_default_dtype(before)


def _flash(precision: Precision) -> Backend | None:
    return _Flash() if precision.cuda and (precision.autocast or precision.parameters == torch.bfloat16) else None
