"""The FLOP model: costs of a transformer on a device that nobody has measured."""

from __future__ import annotations

from actors.plan.costs.fit import Fit
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
    pass.
    """
    rate = tflops * 1e12
    layers = sum(dit.block_counts)
    d = dit.dim
    passes = 4.0 if dit.gradient_checkpointing else 3.0
    linear = passes * layers * (8.0 * d * d + 4.0 * d * dit.ffn_dim) / rate
    quadratic = passes * layers * 4.0 * d / rate
    exchange = passes * layers * 4.0 * d * 4.0 / (exchange_gbps * 1e9)
    return {
        "dit": _analytic("arachne", (launch_s * layers, linear, quadratic, exchange)),
        "vae": _analytic("pixels", (launch_s * 10, vae_flops_per_pixel / rate, image_flops / rate)),
        "text": _analytic("captions", (launch_s * 4, text_flops_per_token / rate)),
    }


def _analytic(form: str, coefficients: tuple[float, ...]) -> Fit:
    return Fit(source="FLOP model", form=form, coefficients=coefficients)
