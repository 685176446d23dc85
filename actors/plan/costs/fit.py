"""A module's cost model from measured points: non-negative least squares over its forms, and their quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from actors.plan.costs.forms import FORMS, FORMS_OF, Load

POOR_R2 = 0.9  # a fit below this, or with a residual above POOR_RESIDUAL, is reported and not used
POOR_RESIDUAL = 0.5
LEAST_POINTS = 6  # fewer are no fit: they scale the prior
RESIDUAL_POINTS = 24  # of the VAE, from which its residual is tried
# How far a point may be from its law by noise, and how sure is what is known of a bag apart from its points: by what
# all-to-alls of their own took, and by how many of them the code has.
_POINT_DOUBT, _COMM_DOUBT, _CALLS_DOUBT = 0.05, 0.3, 1.0

Expected = Mapping[str, tuple[float, float]]  # coefficient -> (value, doubt relative to it)


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

    def to_json(self) -> dict[str, object]:
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


def model_from(
    module: str,
    prior: Fit,
    loads: Sequence[Load],
    seconds: Sequence[float],
    device: str,
    residual: bool,
    exchange_s: float = 0.0,
    exchange_calls: float = 0.0,
) -> tuple[Fit, list[str]]:
    """(model, notes for the report): a fit of the points, at least one; the scaled prior where they are few or the fit
    is poor. `residual`: with trees on what the VAE's fit leaves. `exchange_s` of the transformer, by a measured
    all-to-all, is what points without a bag cannot say, points of bags say only with their noise, and a prior only
    assumes; 0: not measured. `exchange_calls`: how many all-to-alls a cascade makes; 0: not known."""
    notes = []
    expected = {
        name: (value, doubt)
        for name, value, doubt in (("comm", exchange_s, _COMM_DOUBT), ("calls", exchange_calls, _CALLS_DOUBT))
        if value > 0
    }
    if exchange_s:
        prior = with_exchange(prior, exchange_s)
    if len(loads) >= LEAST_POINTS:
        source = f"fitted to {len(loads)} points of {device}"
        if exchange_s and all(load.degree == 1 for load in loads):
            fitted = with_exchange(fit_form(prior.form, loads, seconds, source), exchange_s)
        elif prior.form not in FORMS_OF[module]:  # blocks of another kind, which only its own form describes
            fitted = fit_form(prior.form, loads, seconds, source, expected)
        else:
            fitted = fit(module, loads, seconds, source, expected)
        if module == "vae" and residual and len(loads) >= RESIDUAL_POINTS:
            fitted = with_residual(fitted, loads, seconds)
        elif module == "vae" and residual:
            notes.append(
                f"vae: {len(loads)} points are too few for the residual of XGBoost, which needs {RESIDUAL_POINTS}; "
                f"the plain fit is used."
            )
        if not fitted.poor:
            return fitted, notes
        notes.append(
            f"{module}: the fit to {fitted.points} points is poor (R^2 {fitted.r2:.3f}, worst residual "
            f"{fitted.worst:.0%}); missing points use the scaled FLOP model."
        )
    return _scaled(prior, loads, seconds, exchange_s), notes


def fit(
    module: str, loads: Sequence[Load], seconds: Sequence[float], source: str, expected: Expected | None = None
) -> Fit:
    """The best of the module's forms on measured points, by R^2. Needs at least two points. Where the latency of
    all-to-alls was measured, the form without it is not tried: of seconds that grow a thousandfold R^2 does not see it.
    """
    other = "arachne" if any(load.call_s for load in loads) else "arachne_calls"
    fits = [fit_form(form, loads, seconds, source, expected) for form in FORMS_OF[module] if form != other]
    return max(fits, key=lambda found: (not found.poor, found.r2))


def fit_form(
    form: str, loads: Sequence[Load], seconds: Sequence[float], source: str, expected: Expected | None = None
) -> Fit:
    """Non-negative fit of one form; AdaptiveLoad's exponent p by grid search on [1.6, 2.4] for the best R^2. What is
    `expected` of coefficients counts like further points, the more the surer it is."""
    target = np.array(seconds)
    known, values, scales = _pseudo_points(FORMS[form].names, expected or {})
    best: Fit | None = None
    for exponent in [1.6 + 0.05 * i for i in range(17)] if form == "adaptiveload" else [2.0]:
        columns = np.array([FORMS[form].features(load, exponent) for load in loads])
        both = np.vstack([columns, known])
        coefficients = nonnegative_fit(both, np.append(target, values), np.append(target, scales))
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


def _pseudo_points(names: Sequence[str], expected: Expected) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns [n, m], values [n], scales [n]): a row says that a coefficient is what is expected, with an error that
    counts, beside those of points, as much as its doubt allows."""
    found = [(names.index(name), *told) for name, told in expected.items() if name in names]
    columns = np.zeros((len(found), len(names)))
    for row, (place, _, _) in enumerate(found):
        columns[row, place] = 1.0
    values = np.array([value for _, value, _ in found])
    return columns, values, np.array([value * doubt / _POINT_DOUBT for _, value, doubt in found])


def nonnegative_fit(columns: np.ndarray, target: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Exact non-negative least squares, by trying every subset of the few columns.

    columns [n, m] with m <= 6, target [n], scale [n] > 0: what a residual is relative to, the target unless given.
    Returns [m] coefficients, zero where a column does not help.
    """
    scale = target if scale is None else scale
    rows, wanted = columns / scale[:, None], target / scale
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            chosen = rows[:, subset]
            largest = np.abs(chosen).max(axis=0)
            if not largest.all():
                continue
            solution = np.linalg.lstsq(chosen / largest, wanted, rcond=None)[0] / largest
            if (solution < 0).any():
                continue
            error = float(((chosen @ solution - wanted) ** 2).sum())
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


def with_residual(found: Fit, loads: Sequence[Load], seconds: Sequence[float]) -> Fit:
    """Arachne's second stage: XGBoost on what the linear model leaves, kept if it helps on points it has not seen.

    For profiles whose `residual` is "xgboost"; reading one checks that the package is there.
    """
    import xgboost

    columns = np.array([_of_tiles(load) for load in loads])
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
        row = np.array([_of_tiles(load)])
        return float(np.exp(np.clip(booster.predict(xgboost.DMatrix(row))[0], -0.7, 0.7)))

    predicted = np.array([found.predict(load) * residual(load) for load in loads])
    r2, worst = quality(predicted, np.array(seconds))
    return replace(found, source=found.source + " with an XGBoost residual", r2=r2, worst=worst, residual=residual)


def _of_tiles(load: Load) -> tuple[float, ...]:
    """What trees see of a VAE's cascade: the largest tile, how many the busiest member has, and how many members there
    are."""
    assert load.dealt is not None, "a load of a VAE has its tiles"
    return *map(float, load.dealt.shape), float(load.dealt.count), float(load.batch), float(load.degree)


def with_exchange(found: Fit, exchange_s: float) -> Fit:
    """The model with measured all-to-alls, where its form has them."""
    names = FORMS[found.form].names
    if "comm" not in names:
        return found
    return replace(
        found, coefficients=tuple(exchange_s if n == "comm" else c for n, c in zip(names, found.coefficients))
    )


def _scaled(prior: Fit, loads: Sequence[Load], seconds: Sequence[float], exchange_s: float = 0.0) -> Fit:
    """The prior times the median ratio of measured to predicted seconds; a measured exchange is not scaled."""
    work = with_exchange(prior, 0.0) if exchange_s else prior
    sent = [prior.predict(load) - work.predict(load) for load in loads]
    # of a point that is mostly exchange, a tenth is work at least: noise cannot make it nothing
    ratios = sorted(
        max(s - out, 0.1 * s) / max(work.predict(load), 1e-12)
        for load, s, out in zip(loads, seconds, sent, strict=True)
    )
    ratio = ratios[len(ratios) // 2]
    scaled = replace(
        prior,
        source=f"{prior.source} x {ratio:.3g} from {len(loads)} points",
        coefficients=tuple(c * ratio for c in prior.coefficients),
        worst=max(abs(ratio / r - 1) for r in ratios),
        points=len(loads),
    )
    return with_exchange(scaled, exchange_s) if exchange_s else scaled


def knapformer_constants(found: Fit, width: int) -> tuple[float, float]:
    """(k, gamma) of a KnapFormer fit: seconds per FLOP, and the relative cost of attention FLOPs."""
    linear, quadratic = found.coefficients
    if linear <= 0:
        raise ValueError(f"the fit has no linear part ({found.coefficients}); measure shorter sequences too.")
    return linear / (24.0 * width**2), quadratic * 6.0 * width / linear
