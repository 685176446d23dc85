"""What a forward pass of a transformer computes, as numbers that follow from its settings. Imports neither torch nor
Ray.

S video tokens in F frames and L rows of text of one sample; d width, f width of the MLP. A multiply and an add are two.
Counted are the products of blocks with their weights and their attention, as KnapFormer has it (section 3.1, Eq. 1:
24 S d^2 + 4 S^2 d of a block with f = 4 d). Left out is what is once per sample or outside of the blocks: modulation,
embeddings, refiners of the text, image embeddings, the last projection.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardFlops:
    """FLOPs of all blocks: video S + text L of products with weights, pair S P + across S L + within L^2 of attention.

    P is what a video token meets of its own kind: S, or the mean of a frame and a position, (S / F + F) / 2, where
    blocks attend to these `in_turn`.
    """

    video: float
    text: float
    pair: float
    across: float  # video to text, and text to video where it attends
    within: float = 0.0
    in_turn: bool = False

    def linear(self, tokens: int, text: int) -> float:
        """FLOPs of a sample's products with weights."""
        return self.video * tokens + self.text * text

    def attention(self, tokens: int, text: int, frames: int = 1) -> float:
        """FLOPs of a sample's attention; `frames` of the token grid count where blocks attend in turn."""
        met = (tokens / frames + frames) / 2 if self.in_turn else tokens
        return tokens * (self.pair * met + self.across * text) + self.within * text * text


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPart:
    """What of the blocks is trained, as far as it decides what a training pass computes of its forward. Gradients go
    back to the first block that has a trained weight, and only there gradient checkpointing computes `again`; a product
    costs one forward more for the gradient of its rows, and one for that of its weights where these are trained.

    >>> TrainedPart().products(again=False), TrainedPart(weights=0.0).products(again=False)  # LoRA: nothing of weights
    (3.0, 2.0)
    """

    # Share of the weights of products that have gradients, as if each met as many rows: too much where those that the
    # text alone meets are trained (HunyuanVideo's stream of it 0.25; of the products of 32,760 tokens and a text of 256
    # it is 0.0026; Wan's `*.attn2*` 0.20 for 0.11), and too little where they alone are frozen.
    weights: float = 1.0
    blocks: float = 1.0  # share of the blocks through which gradients go

    def products(self, again: bool) -> float:
        """Products with weights of a pass, in those of its forward."""
        return 1.0 + self.blocks * (1.0 + again) + self.weights

    def attention(self, again: bool) -> float:
        """The same of attention, whose backward is two forwards."""
        return 1.0 + self.blocks * (2.0 + again)

    def ways(self, again: bool) -> float:
        """How often activations of a bag change hands, in what a forward moves: backward as often as forward."""
        return 1.0 + self.blocks * (1.0 + again)


ALL_TRAINED = TrainedPart()


def joint_flops(blocks: int, dim: int, ffn_dim: int) -> ForwardFlops:
    """Blocks through which text and video go as one sequence, with weights of one size."""
    row, pair = blocks * (8.0 * dim * dim + 4.0 * dim * ffn_dim), blocks * 4.0 * dim
    return ForwardFlops(video=row, text=row, pair=pair, across=2 * pair, within=pair)


def crossing_flops(blocks: int, dim: int, ffn_dim: int) -> ForwardFlops:
    """Blocks in which video attends to itself and then to the text, of which they take keys and values alone."""
    pair = blocks * 4.0 * dim
    return ForwardFlops(
        video=blocks * (12.0 * dim * dim + 4.0 * dim * ffn_dim), text=blocks * 4.0 * dim * dim, pair=pair, across=pair
    )
