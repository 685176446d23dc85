"""The FLOP model: costs of a transformer on a device that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.costs.fit import Fit
from actors.plan.costs.forms import mean_keys
from ops.models.base.config import DiTConfig


def flop_coefficients(
    dit: DiTConfig,
    tflops: float,
    *,
    vae_flops_per_pixel: float,
    text_flops_per_token: float,
    launch_s: float,
    exchange_gbps: float,
    image_flops: float = 0.0,
) -> dict[str, Fit]:
    """The FLOP model of a transformer: 24 S d^2 + 4 S^2 d per layer (KnapFormer Eq. 1), 4x in training with recompute.

    `image_flops` are those of an image encoder for the first frame of a sample, which runs beside the VAE.
    MLP width and cross-attention enter through their real sizes; Ulysses moves 4 activations of width d per layer and
    pass, spatial-temporal parallelism one forward and one backward (ScaleFusion, section 4.1).
    """
    rate = tflops * 1e12
    layers = sum(dit.block_counts)
    d = dit.dim
    passes = 4.0 if dit.gradient_checkpointing else 3.0
    linear = passes * layers * (8.0 * d * d + 4.0 * d * dit.ffn_dim) / rate
    quadratic = passes * layers * 4.0 * d / rate
    form, moved = "arachne", 4.0 * passes
    if dit.spatial_temporal:  # by Ulysses every second block moves its activations
        form = "spatial_temporal" if dit.text_share == 0.5 else "spatial_temporal_text"
        moved = 2.0 * passes if dit.deals_heads else 2.0
    exchange = layers * 4.0 * d * moved / (exchange_gbps * 1e9)
    return {
        "dit": _analytic(form, (launch_s * layers, linear, quadratic, exchange)),
        "vae": _analytic("pixels", (launch_s * 10, vae_flops_per_pixel / rate, image_flops / rate)),
        "text": _analytic("captions", (launch_s * 4, text_flops_per_token / rate)),
    }


def exchange_seconds(dit: DiTConfig, bytes_per_s: float) -> float:
    """The coefficient of a transformer's all-to-alls, in training, where a member sends so many bytes a second."""
    nothing = {"vae_flops_per_pixel": 0.0, "text_flops_per_token": 0.0, "launch_s": 0.0}
    return flop_coefficients(dit, 1.0, exchange_gbps=bytes_per_s / 1e9, **nothing)["dit"].coefficients[-1]


def _analytic(form: str, coefficients: tuple[float, ...]) -> Fit:
    return Fit(source="FLOP model", form=form, coefficients=coefficients)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTWork:
    """FLOPs of a transformer's cascades as KnapFormer counts them (sec. 3.1 Eq. 1: 24 S d^2 + 4 S^2 d per block and
    forward), with the real width of the MLP. Encoders are not counted, nor are projections of cross-attention (2 % of
    Wan2.1-1.3B, 7 % of 14B)."""

    layers: int
    dim: int
    ffn_dim: int
    recomputes: bool  # gradient checkpointing computes every forward once more
    # LoRA and train_only: of products with frozen weights the backward computes one side of two. What few trained
    # weights take besides is not counted
    frozen: bool = False
    spatial_temporal: bool = False  # tokens attend within a frame, or along a position
    text_share: float = 0.5  # then: the share of blocks that attend to the text, too

    @classmethod
    def of(cls, dit: DiTConfig) -> DiTWork:
        return cls(
            layers=sum(dit.block_counts),
            dim=dit.dim,
            ffn_dim=dit.ffn_dim,
            recomputes=dit.gradient_checkpointing,
            frozen=dit.lora_rank > 0 or bool(dit.train_only),
            spatial_temporal=dit.spatial_temporal,
            text_share=dit.text_share,
        )

    def model_tflop(self, samples: int, length: int, text: int = 0, frames: int = 1) -> float:
        """TFLOP of forward and backward of so many samples of `length` text and video tokens: three times the forward,
        without what checkpointing computes again. This is what MFU counts (PaLM, appendix B). Blocks of two kinds also
        ask how many of the tokens are text, and over how many frames the others lie."""
        linear, attention = self._forward(length, text, frames)
        return samples * ((2.0 if self.frozen else 3.0) * linear + 3.0 * attention) / 1e12

    def computed_tflop(self, samples: int, length: int, text: int = 0, frames: int = 1) -> float:
        """The same with what checkpointing computes again, F of F + 2F + F (KnapFormer sec. 4.2): what HFU counts."""
        again = sum(self._forward(length, text, frames)) if self.recomputes else 0.0
        return self.model_tflop(samples, length, text, frames) + samples * again / 1e12

    def _forward(self, length: int, text: int, frames: int) -> tuple[float, float]:
        """FLOPs of one sample's products with weights, and of its attention."""
        d = self.dim
        rows, keys = length, float(length)
        if self.spatial_temporal:
            rows = length - text
            keys = mean_keys(rows, text, frames, self.text_share)
        return self.layers * rows * (8.0 * d * d + 4.0 * d * self.ffn_dim), self.layers * 4.0 * rows * keys * d
