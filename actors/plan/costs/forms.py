"""Cost models: seconds of a (module, shape, degree) from a few coefficients, by FLOPs or fitted to measurements.

B samples, S tokens per sample (video + text), k degree. Every fitted model is linear in non-negative coefficients over
named features, so a fit is one small least-squares problem and its quality (R^2, worst residual) is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ops.geometry import Geometry
from ops.models.base.config import DiTConfig

POOR_R2 = 0.9  # a fit below this, or with a residual above POOR_RESIDUAL, is reported and not used
POOR_RESIDUAL = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one cascade computes: the point at which a cost model is evaluated."""

    batch: int
    frames: int
    height: int
    width: int
    text_tokens: int
    tokens: int  # video tokens of one sample
    degree: int

    @property
    def length(self) -> int:
        """Logical length of one sample: text plus video (AdaptiveLoad's S)."""
        return self.tokens + self.text_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A cost model: a form (see FORMS) with coefficients, its origin and quality. `worst` is a relative residual.

    `residual` multiplies the prediction (XGBoost on the tile model); it is not part of the JSON.
    """

    source: str
    form: str
    coefficients: tuple[float, ...]
    exponent: float = 2.0  # p of the AdaptiveLoad form
    r2: float = 1.0
    worst: float = 0.0
    points: int = 0
    residual: Callable[[Load], float] | None = None

    @property
    def poor(self) -> bool:
        return self.r2 < POOR_R2 or self.worst > POOR_RESIDUAL

    def predict(self, load: Load) -> float:
        """Seconds of a load on one node."""
        features = FORMS[self.form].features(load, self.exponent)
        seconds = sum(c * x for c, x in zip(self.coefficients, features))
        return seconds * self.residual(load) if self.residual is not None else seconds

    def to_json(self) -> dict[str, Any]:
        named = dict(zip(FORMS[self.form].names, self.coefficients))
        if self.form == "adaptiveload":
            named["p"] = self.exponent
        return {
            "source": self.source,
            "form": self.form,
            "coefficients": named,
            "r2": self.r2,
            "worst_residual": self.worst,
            "points": self.points,
            "poor": self.poor,
            "residual_model": self.residual is not None,
        }


def token_count(geometry: Geometry, frames: int, height: int, width: int) -> int:
    """Video tokens of a clip, rounded up: cost models also price shapes that the VAE would have to crop."""
    st, sh, sw = geometry.vae_stride
    pt, ph, pw = geometry.patch
    latent = (frames - 1) // st + 1 if geometry.causal else max(frames // st, 1)
    return -(-latent // pt) * -(-height // (sh * ph)) * -(-width // (sw * pw))


@dataclass(frozen=True, slots=True)
class CostForm:
    """A family of cost models, linear in its coefficients."""

    names: tuple[str, ...]
    features: Callable[[Load, float], tuple[float, ...]]


def _arachne(load: Load, exponent: float) -> tuple[float, ...]:
    """Arachne Eq. 9: (alpha1 B S + alpha2 B S^2) / k + V_comm / BW(k), plus a launch constant.

    V_comm per GPU of Ulysses is B S (k - 1) / k^2.
    """
    work = load.batch * load.length
    return 1.0, work / load.degree, work * load.length / load.degree, work * (load.degree - 1) / load.degree**2


def _knapformer(load: Load, exponent: float) -> tuple[float, ...]:
    """KnapFormer Eq. 2 without a constant: k 24 l d^2 and k gamma 4 l^2 d, per sequence, shared by the bag."""
    work = load.batch * load.length / load.degree
    return work, work * load.length


def _adaptiveload(load: Load, exponent: float) -> tuple[float, ...]:
    """AdaptiveLoad: a + b B S^p, shared by the bag."""
    return 1.0, load.batch * load.length**exponent / load.degree


def _tiles(load: Load, exponent: float) -> tuple[float, ...]:
    """Arachne's VAE: tiles dealt round-robin, the busiest worker decides; linear in tile volume."""
    count, volume = vae_tiles(load.frames, load.height, load.width)
    return 1.0, -(-load.batch * count // load.degree) * volume


def _pixels(load: Load, exponent: float) -> tuple[float, ...]:
    return 1.0, load.batch * load.frames * load.height * load.width / load.degree, load.batch / load.degree


def _captions(load: Load, exponent: float) -> tuple[float, ...]:
    return 1.0, float(load.batch * max(load.text_tokens, 1)) / load.degree


FORMS = {
    "arachne": CostForm(("constant", "alpha1", "alpha2", "comm"), _arachne),
    "knapformer": CostForm(("linear", "quadratic"), _knapformer),
    "adaptiveload": CostForm(("a", "b"), _adaptiveload),
    "tiles": CostForm(("constant", "volume"), _tiles),
    "pixels": CostForm(("constant", "pixel", "sample"), _pixels),
    "captions": CostForm(("constant", "token"), _captions),
}
FORMS_OF = {"dit": ("arachne", "adaptiveload", "knapformer"), "vae": ("tiles", "pixels"), "text": ("captions",)}
TILE = (16, 256, 256)  # frames, height, width of a VAE tile; neighbours overlap by a quarter in space


def vae_tiles(frames: int, height: int, width: int) -> tuple[int, float]:
    """(tiles of a clip, pixels of one) for a tiled encode; small clips are one smaller tile."""
    sizes = [min(size, tile) for size, tile in zip((frames, height, width), TILE)]
    counts = [-(-frames // TILE[0])]
    for size, tile in zip((height, width), TILE[1:]):
        counts.append(1 if size <= tile else -(-(size - tile) // (tile * 3 // 4)) + 1)
    return counts[0] * counts[1] * counts[2], float(sizes[0] * sizes[1] * sizes[2])


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
