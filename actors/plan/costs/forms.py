"""Cost models: seconds of a (module, shape, degree) from a few coefficients, by FLOPs or fitted to measurements.

B samples, S tokens per sample (video + text), k degree. Every fitted model is linear in non-negative coefficients over
named features, so a fit is one small least-squares problem and its quality (R^2, worst residual) is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

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


def nonnegative_fit(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Exact non-negative least squares of relative residuals, by trying every subset of the few columns.

    columns [n, m] with m <= 6, target [n] > 0. Returns [m] coefficients, zero where a column does not help.
    """
    rows = columns / target[:, None]
    ones = np.ones(len(target))
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            chosen = rows[:, subset]
            scale = np.abs(chosen).max(axis=0)
            if not scale.all():
                continue
            solution = np.linalg.lstsq(chosen / scale, ones, rcond=None)[0] / scale
            if (solution < 0).any():
                continue
            error = float(((chosen @ solution - ones) ** 2).sum())
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(columns.shape[1])
                best[list(subset)] = solution
    return best


def quality(predicted: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """(R^2, worst relative residual) of a prediction."""
    total = float(((target - target.mean()) ** 2).sum())
    r2 = 1.0 - float(((predicted - target) ** 2).sum()) / total if total > 0 else 1.0
    return r2, float(np.abs(predicted / target - 1.0).max())


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


def fit(module: str, loads: Sequence[Load], seconds: Sequence[float], source: str) -> Fit:
    """The best of the module's forms on measured points, by R^2. Needs at least two points."""
    fits = [fit_form(form, loads, seconds, source) for form in FORMS_OF[module]]
    return max(fits, key=lambda found: (not found.poor, found.r2))


def fit_form(form: str, loads: Sequence[Load], seconds: Sequence[float], source: str) -> Fit:
    """Non-negative fit of one form; AdaptiveLoad's exponent p by grid search on [1.6, 2.4] for the best R^2."""
    target = np.array(seconds)
    best: Fit | None = None
    for exponent in [1.6 + 0.05 * i for i in range(17)] if form == "adaptiveload" else [2.0]:
        columns = np.array([FORMS[form].features(load, exponent) for load in loads])
        coefficients = nonnegative_fit(columns, target)
        r2, worst = quality(columns @ coefficients, target)
        if best is None or r2 > best.r2:
            best = Fit(
                source=f"{form} form {source}",
                form=form,
                exponent=exponent,
                coefficients=tuple(float(c) for c in coefficients),
                r2=r2,
                worst=worst,
                points=len(target),
            )
    assert best is not None
    return best


def knapformer_constants(found: Fit, width: int) -> tuple[float, float]:
    """(k, gamma) of a KnapFormer fit: seconds per FLOP, and the relative cost of attention FLOPs."""
    linear, quadratic = found.coefficients
    if linear <= 0:
        raise ValueError(f"the fit has no linear part ({found.coefficients}); measure shorter sequences too.")
    return linear / (24.0 * width**2), quadratic * 6.0 * width / linear


def fit_memory(loads: Sequence[Load], peak_gib: Sequence[float]) -> tuple[float, float, Fit]:
    """(states GiB, GiB per token of a worker) of Arachne Eq. 8, with the quality of the fit."""
    columns = np.array([(1.0, load.batch * load.length / load.degree) for load in loads])
    target = np.array(peak_gib)
    states, per_token = (float(c) for c in nonnegative_fit(columns, target))
    r2, worst = quality(columns @ np.array([states, per_token]), target)
    return (
        states,
        per_token,
        Fit(
            source=f"states + B S m / k from {len(loads)} peaks",
            form="captions",
            coefficients=(states, per_token),
            r2=r2,
            worst=worst,
            points=len(loads),
        ),
    )


def with_residual(found: Fit, loads: Sequence[Load], seconds: Sequence[float]) -> Fit:
    """Arachne's second stage: XGBoost on what the linear model leaves, kept if it helps on points it has not seen.

    For profiles whose `residual` is "xgboost"; reading one checks that the package is there.
    """
    import xgboost

    columns = np.array([(load.frames, load.height, load.width, load.batch, load.degree) for load in loads], dtype=float)
    ratio = np.array(seconds) / np.array([found.predict(load) for load in loads])
    options = {"max_depth": 3, "eta": 0.15, "lambda": 2.0, "seed": 0, "nthread": 1, "verbosity": 0}

    def train(rows: np.ndarray) -> xgboost.Booster:
        return xgboost.train(options, xgboost.DMatrix(columns[rows], label=np.log(ratio[rows])), num_boost_round=60)

    unseen = np.zeros(len(ratio))
    folds = np.arange(len(ratio)) % 5
    for fold in range(5):
        unseen[folds == fold] = train(folds != fold).predict(xgboost.DMatrix(columns[folds == fold]))
    plain, helped = np.abs(np.log(ratio)).mean(), np.abs(np.log(ratio) - unseen).mean()
    if helped > 0.9 * plain:
        return found
    booster = train(np.ones(len(ratio), dtype=bool))

    def residual(load: Load) -> float:
        row = np.array([(load.frames, load.height, load.width, load.batch, load.degree)], dtype=float)
        return float(np.exp(np.clip(booster.predict(xgboost.DMatrix(row))[0], -0.7, 0.7)))

    predicted = np.array([found.predict(load) * residual(load) for load in loads])
    r2, worst = quality(predicted, np.array(seconds))
    return replace(found, source=found.source + " with an XGBoost residual", r2=r2, worst=worst, residual=residual)


def flop_coefficients(
    dit: DiTConfig,
    tflops: float,
    *,
    vae_flops_per_pixel: float,
    text_flops_per_token: float,
    launch_s: float,
    exchange_gbps: float,
) -> dict[str, Fit]:
    """The FLOP model of a transformer: 24 S d^2 + 4 S^2 d per layer (KnapFormer Eq. 1), 4x in training with recompute.

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
        "vae": _analytic("pixels", (launch_s * 10, vae_flops_per_pixel / rate, 0.0)),
        "text": _analytic("captions", (launch_s * 4, text_flops_per_token / rate)),
    }


def _analytic(form: str, coefficients: tuple[float, ...]) -> Fit:
    return Fit(source="FLOP model", form=form, coefficients=coefficients)
