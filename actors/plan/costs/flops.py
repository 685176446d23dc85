"""The FLOP model: costs of a transformer on a device that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.costs.fit import Fit
from actors.plan.costs.forms import TextCost
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ALL_TRAINED, ForwardFlops, TrainedPart
from ops.models.config import DTYPE_BYTES, ImageConfig, TextConfig, VAEConfig
from ops.models.hunyuan.config import HunyuanConfig


def flop_coefficients(
    dit: DiTConfig,
    tflops: float,
    *,
    vae_flops_per_pixel: float,
    text_flops_per_token: float,
    launch_s: float,
    exchange_gbps: float,
    image_flops: float = 0.0,
    text_copies_s: float = 0.0,
    encoder_tflops: float | None = None,
    part: TrainedPart | None = None,
    element_bytes: int = 4,
) -> dict[str, Fit]:
    """The FLOP model of a transformer, by what its family says of a forward: 3 of them where all is trained, 4 with
    recompute; of what `part` of it is trained (None: `usual_part`) less.

    `image_flops` are those of an image encoder for the first frame of a sample, which runs beside the VAE;
    `text_copies_s` comes before every text cascade; encoders run at `encoder_tflops` (None: at `tflops`).
    Coefficients are of video tokens; what text costs beside them is in a load (`text_cost`). Ulysses moves 4
    activations of width d per layer on each way, backward as many as forward, each number in `element_bytes`;
    spatial-temporal parallelism one forward and one backward (ScaleFusion, section 4.1).
    """
    rate, encoder_rate, forward = tflops * 1e12, (encoder_tflops or tflops) * 1e12, dit.flops
    layers = sum(dit.block_counts)
    part, again = part or dit.usual_part, dit.gradient_checkpointing
    linear, quadratic = part.products(again) * forward.video / rate, part.attention(again) * forward.pair / rate
    form, moved = "arachne", 4.0 * part.ways(again)
    if forward.in_turn:  # by Ulysses every second block moves its activations
        form = "spatial_temporal" if forward.across < forward.pair else "spatial_temporal_text"
        moved = 2.0 * part.ways(again) if dit.deals_heads else 2.0
    exchange = layers * element_bytes * dit.dim * moved / (exchange_gbps * 1e9)
    return {
        "dit": _analytic(form, (launch_s * layers, linear, quadratic, exchange)),
        "vae": _analytic("pixels", (launch_s * 10, vae_flops_per_pixel / encoder_rate, image_flops / encoder_rate)),
        "text": _analytic("captions", (launch_s * 4 + text_copies_s, text_flops_per_token / encoder_rate)),
    }


def flop_costs(
    dit: DiTConfig,
    vae: VAEConfig,
    text: TextConfig,
    image: ImageConfig | None,
    *,
    tflops: float,
    vae_flops_per_pixel: float | None,
    text_flops_per_token: float | None,
    launch_s: float,
    exchange_gbps: float,
    host_gbps: float,
    encoder_tflops: float | None,
    part: TrainedPart | None,
    element_bytes: int,
) -> dict[str, Fit]:
    """The FLOP model of a transformer with its encoders; of those whose FLOPs are not given, by their settings. Weights
    of a text encoder that lie in host memory are copied for every cascade: as many as its products have."""
    if vae_flops_per_pixel is None:
        vae_flops_per_pixel = 200.0 if vae.kind == "haar" else 2e5
    if text_flops_per_token is None:
        text_flops_per_token = 24.0 * text.d_model**2 * text.num_layers
    text_bytes = text_flops_per_token / 2 * DTYPE_BYTES[text.dtype_on("cuda")] if text.place == "host" else 0.0
    # a prompt around the caption, and of a first frame more rows than are text, are computed, too
    text_flops_per_token *= text.encoded_tokens / text.most_tokens
    if dit.in_channels > dit.out_channels and not dit.encodes_frame_alone:
        vae_flops_per_pixel *= 2  # the first frame, followed by grey, is encoded as a clip of its own
    return flop_coefficients(
        dit,
        tflops,
        vae_flops_per_pixel=vae_flops_per_pixel,
        text_flops_per_token=text_flops_per_token,
        text_copies_s=text_bytes / (host_gbps * 1e9),
        image_flops=24.0 * image.d_model**2 * image.num_layers * image.tokens if image else 0.0,
        launch_s=launch_s,
        exchange_gbps=exchange_gbps,
        encoder_tflops=encoder_tflops,
        part=part,
        element_bytes=element_bytes,
    )


def text_cost(dit: DiTConfig) -> TextCost:
    """What text costs the transformer, over what video tokens do."""
    forward = dit.flops
    return TextCost(
        row=forward.text / forward.video,
        across=forward.across / forward.pair,
        within=forward.within / forward.pair,
        replicated=not forward.within,
    )


def exchange_seconds(
    dit: DiTConfig, bytes_per_s: float, element_bytes: int = 4, part: TrainedPart | None = None
) -> float:
    """The coefficient of a transformer's all-to-alls, in training, where a member sends `bytes_per_s`."""
    nothing = {"vae_flops_per_pixel": 0.0, "text_flops_per_token": 0.0, "launch_s": 0.0}
    fits = flop_coefficients(
        dit, 1.0, exchange_gbps=bytes_per_s / 1e9, part=part, element_bytes=element_bytes, **nothing
    )
    return fits["dit"].coefficients[-1]


def exchange_calls(dit: DiTConfig, part: TrainedPart | None = None) -> float:
    """All-to-alls of a bag's training cascade: two around the attention of every block, on each of its ways
    (`ops.packed.sequence_parallel`). What travels in halves counts once: there are twice as many then, and attention
    hides a half. 0 where blocks are exchanged in slices."""
    if dit.spatial_temporal:
        return 0.0
    return 2.0 * (part or dit.usual_part).ways(dit.gradient_checkpointing) * sum(dit.block_counts)


def _analytic(form: str, coefficients: tuple[float, ...]) -> Fit:
    return Fit(source="FLOP model", form=form, coefficients=coefficients)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTWork:
    """FLOPs of a transformer's cascades, by what its family says of a forward (`ForwardFlops`). Encoders are not
    counted."""

    forward: ForwardFlops
    recomputes: bool  # gradient checkpointing computes every forward once more
    part: TrainedPart = ALL_TRAINED

    @classmethod
    def of(cls, dit: DiTConfig, part: TrainedPart | None = None) -> DiTWork:
        """`part` of it that is trained; None: `usual_part`."""
        return cls(forward=dit.flops, recomputes=dit.gradient_checkpointing, part=part or dit.usual_part)

    def model_tflop(self, samples: int, tokens: int, text: int = 0, frames: int = 1) -> float:
        """TFLOP of forward and backward of `samples` samples of video tokens and rows of text: three times the forward
        where all weights are trained, without what checkpointing computes again. This is what MFU counts (PaLM,
        appendix B). Blocks that attend in turn also ask over how many frames the tokens lie."""
        return samples * self._tflop(False, tokens, text, frames)

    def attention_again_tflop(self, tokens: int, text: int = 0, frames: int = 1) -> float:
        """TFLOP of the attention of one sample that checkpointing computes again, unless a cascade keeps it."""
        again = self.part.attention(self.recomputes) - self.part.attention(False)
        return again * self.forward.attention(tokens, text, frames) / 1e12

    def computed_tflop(self, samples: int, tokens: int, text: int = 0, frames: int = 1) -> float:
        """`model_tflop` with what checkpointing computes again, F of F + 2F + F (KnapFormer sec. 4.2), for HFU."""
        return samples * self._tflop(self.recomputes, tokens, text, frames)

    def _tflop(self, again: bool, tokens: int, text: int, frames: int) -> float:
        linear, attention = self.forward.linear(tokens, text), self.forward.attention(tokens, text, frames)
        return (self.part.products(again) * linear + self.part.attention(again) * attention) / 1e12


# HunyuanVideo in bf16 on an H100: only its proportions matter, a profile's points set the level.
PRIORS = flop_coefficients(
    HunyuanConfig(
        num_layers=20, num_single_layers=40, num_heads=24, head_dim=128, ffn_dim=12288, gradient_checkpointing=True
    ),
    400.0,
    vae_flops_per_pixel=2e6,
    text_flops_per_token=1e10,
    launch_s=2e-5,
    exchange_gbps=100.0,
    element_bytes=2,
)
