"""How every family's transformer is called:

    velocity = dit(tokens, timesteps, text, layout, group, conditions)

`PackedTransformer.forward` checks the inputs and hands them to `velocity`, which a family defines.
S sequences, n rows of this rank, D width, d head size, T rows of the (replicated) text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.packed.compiled_blocks import CompiledBlocks
from ops.packed.conditions import NOTHING, Conditions
from ops.packed.graphed_blocks import GraphedBlocks
from ops.packed.kept_attention import keeping_attention
from ops.packed.packing import Layout
from ops.spatial_temporal.choice import SliceRates, SlicingRule
from ops.spatial_temporal.slicing import WHOLE_LAYERS

R = TypeVar("R")


class ForwardInputs(NamedTuple):
    """What one forward is given; see `PackedTransformer.forward`."""

    tokens: Tensor
    timesteps: Tensor
    text: Tensor
    layout: Layout
    group: Group
    conditions: Conditions


class TextBlockInputs(NamedTuple):
    """What all blocks of one forward share, of families whose blocks have a cross-attention to the text."""

    text: Tensor  # [T, D]
    modulation: Tensor  # [num_tables, 6, D]: a row of each sequence, of each frame, or [2 S] (`Layout.times`)
    cos: Tensor  # [n, d / 2]; [n, D / 2] where heads are turned apart
    sin: Tensor
    layout: Layout
    group: Group
    image: Tensor | None = None  # [I, D]


class PackedTransformer(nn.Module):
    """A diffusion transformer over packed sequences, which share one sequence-parallel group."""

    config: DiTConfig
    block_parts: ClassVar[tuple[str, ...]] = ("segments", "video_exchange", "local_lengths", "text", "image")
    """Parts of a layout that its blocks use, index tensors and lengths."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_size = math.prod(config.patch)
        self.keeps_attention = False  # with gradient checkpointing: a pass may keep what attention gives
        self.rates: SliceRates | None = None  # by which a bag slices spatial-temporal blocks; equal on all its ranks
        # what runs a block whose weights lie elsewhere (ops.update.node_parameters); None: they are on the device
        self.fetched: Callable[[nn.Module], Callable[..., Any]] | None = None
        self.compiled: CompiledBlocks | None = None  # blocks run as written where their weights are fetched
        self.graphed: GraphedBlocks | None = None  # neither with compiled blocks nor with fetched weights

    def forward(
        self,
        tokens: Tensor,
        timesteps: Tensor,
        text: Tensor,
        layout: Layout,
        group: Group,
        conditions: Conditions = NOTHING,
    ) -> Tensor:
        """tokens [n, C * patch], timesteps [S], text [sum text_tokens, text_dim] -> [n, C_out * patch].

        `timesteps` are sigma * num_train_timesteps, or times of a diffusion: one per sequence, or one per frame of each
        (`Layout.num_times`) where the family takes those. Features are channel first on both sides, as `patchify` makes
        them. Collective over the group: every rank of the bag calls it (and its backward) for the same layouts in the
        same order, also with n = 0. Raises ValueError for shapes that do not fit the layout.
        """
        self._check(tokens, timesteps, text, layout)
        if self.compiled is not None:
            self.compiled.prepare(layout)
        if self.graphed is not None:
            self.graphed.begin(layout)
        return self.velocity(ForwardInputs(tokens, timesteps, text, layout, group, conditions))

    def velocity(self, given: ForwardInputs) -> Tensor:
        """The family's forward pass, of inputs that fit: [n, C_out * patch]."""
        raise NotImplementedError

    def how_sliced(self) -> SlicingRule:
        """How its spatial-temporal blocks are sliced on a bag, in this forward."""
        assert self.config.spatial_temporal, "blocks that attend to all rows are not sliced"
        slicing = self.config.slicing or WHOLE_LAYERS
        return SlicingRule(slicing=slicing, rates=self.rates, training=torch.is_grad_enabled())

    def all_blocks(self) -> list[nn.Module]:
        """What `run` runs, stack by stack: the layers of all lists of modules."""
        return [block for stack in self.children() if isinstance(stack, nn.ModuleList) for block in stack]

    def run(self, block: Callable[..., R], *inputs: object) -> R:
        """Runs a block. With gradient checkpointing its activations are computed again in the backward instead of
        kept, its collectives too, in the same order on every rank of the bag. So it is with weights that are fetched:
        in the backward they are fetched again."""
        call = block
        if self.fetched is not None:
            assert isinstance(block, nn.Module), "its weights are known by the module"
            call = self.fetched(block)
        elif self.compiled is not None:
            assert isinstance(block, nn.Module), "blocks of a kind share their code"
            call = self.compiled(block)
        elif self.graphed is not None:
            assert isinstance(block, nn.Module), "its weights are known by the module"
            if (graphs := self.graphed(block, inputs)) is not None:
                return cast(R, graphs(*inputs))
        if (self.config.gradient_checkpointing or self.fetched is not None) and torch.is_grad_enabled():
            # there is no dropout
            contexts = keeping_attention if self.keeps_attention else noop_context_fn
            outputs: R = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            return outputs
        return call(*inputs)

    def _check(self, tokens: Tensor, timesteps: Tensor, text: Tensor, layout: Layout) -> None:
        if layout.has_frame_times and not self.config.levels_by_frame:
            raise ValueError(
                f"a time for each frame: a transformer of architecture {self.config.architecture} and these settings "
                f"takes one for all of a clip. Set train.flow.frame_levels to one."
            )
        wanted = {
            "tokens": (tokens, (layout.local_tokens, self.config.in_channels * self.patch_size)),
            "timesteps": (timesteps, (layout.num_times,)),
            "text": (text, (sum(layout.text_lengths), text.shape[-1])),
        }
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} do not fit the layout of {len(layout)} sequences on rank "
                    f"{layout.rank} of {layout.degree}: expected {shape}."
                )
