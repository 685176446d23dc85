"""A module's cost model from measured points: non-negative least squares over its forms, and their quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from actors.plan.costs.forms import FORMS, FORMS_OF, Load
from actors.plan.costs.left_out import LeftOut, Pricing, left_out

# A fit below this, or with a residual above POOR_RESIDUAL, is used only if it prices points that were left out better
# than the scaled FLOP model does.
POOR_R2 = 0.9
POOR_RESIDUAL = 0.5
BETTER = 0.9  # of the error of what has fewer numbers or more physics: above it what is better may be so by luck
LEAST_POINTS = 6  # fewer are no fit: they scale the prior
RESIDUAL_POINTS = 24  # of the VAE, from which its residual is tried
EXPONENTS = tuple(1.6 + 0.05 * step for step in range(17))  # of the AdaptiveLoad form, that are tried
_ALIKE = 2.0  # largest over smallest of some seconds, up to which they count as nearly constant
_ROUNDS = 4  # of a fit whose errors are relative to what it says; the first are to what was measured
_LEAST_PART = 0.1  # of a measured point is what an error is relative to, at least
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
    unseen: LeftOut | None = None  # of what was chosen by its errors at points that were left out

    @property
    def poor(self) -> bool:
        """Whether its quality alone does not speak for it."""
        return self.r2 < POOR_R2 or self.worst > POOR_RESIDUAL

    @property
    def quality(self) -> str:
        """The quality in words that hold for what is nearly constant, too."""
        if self.unseen is not None:
            return f"R^2 {self.r2:.3f}, error at points left out {self.unseen}"
        if not self.poor:
            return f"R^2 {self.r2:.3f}, worst residual {self.worst:.0%}"
        verdict = "poor" if self.worst > POOR_RESIDUAL else "nearly constant, or noisy"
        return f"R^2 {self.r2:.3f}, worst residual {self.worst:.0%}: {verdict}"

    def predict(self, load: Load) -> float:
        """Seconds of a load on one node."""
        features = FORMS[self.form].features(load, self.exponent)
        seconds = sum(c * x for c, x in zip(self.coefficients, features))
        return seconds * self.residual(load) if self.residual is not None else seconds

    def once(self, load: Load) -> float:
        """Seconds of its prediction that a load does not take again beside others in one cascade."""
        form = FORMS[self.form]
        features = form.features(load, self.exponent)
        return sum(c * x for name, c, x in zip(form.names, self.coefficients, features) if name in form.once)

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
            **({"unseen_median": self.unseen.median, "unseen_worst": self.unseen.worst} if self.unseen else {}),
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
    """(model, notes for the report): a fit of the points, at least one; the scaled prior where they are few. Where the
    fit is poor, what prices points that it has not seen best (`_by_points_left_out`).

    `residual`: with trees on what the VAE's fit leaves. `exchange_s` of the transformer, by a measured all-to-all, is
    what points without a bag cannot say, points of bags say only with their noise, and a prior only assumes; 0: not
    measured. `exchange_calls`: how many all-to-alls a cascade makes; 0: not known.
    """
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
        chosen, note = _by_points_left_out(module, fitted, prior, loads, seconds, source, expected, exchange_s)
        return chosen, [*notes, f"{module}: {note}"]
    return _scaled(prior, loads, seconds, exchange_s), notes


def _by_points_left_out(
    module: str,
    fitted: Fit,
    prior: Fit,
    loads: Sequence[Load],
    seconds: Sequence[float],
    source: str,
    expected: Expected,
    exchange_s: float,
) -> tuple[Fit, str]:
    """(what prices left-out points best, a note on it) of a poor fit, the module's other forms, the prior on a constant
    floor, and the scaled prior. The last has the physics of large shapes, and stays unless another is clearly
    better."""
    scaled = _scaled(prior, loads, seconds, exchange_s)
    by_scale = left_out(lambda some, of: _scaled(prior, some, of, exchange_s).predict, loads, seconds)
    found = []
    for form in _tried(module, loads) if prior.form in FORMS_OF[module] else (prior.form,):
        one = fitted if fitted.form == form else fit_form(form, loads, seconds, source, expected)

        def refit(some: Sequence[Load], of: Sequence[float], one: Fit = one) -> Pricing:
            return fit_form(one.form, some, of, "", expected, (one.exponent,)).predict

        found.append(replace(one, unseen=left_out(refit, loads, seconds)))
    if "constant" in FORMS[prior.form].names:
        floored = left_out(lambda some, of: _on_a_floor(prior, some, of, exchange_s).predict, loads, seconds)
        found.append(replace(_on_a_floor(prior, loads, seconds, exchange_s), unseen=floored))
    best = min(found, key=lambda one: one.unseen.log_error if one.unseen else np.inf)
    assert best.unseen is not None
    if best.unseen.log_error > BETTER * by_scale.log_error:
        note = (
            f"the fit to {len(loads)} points is poor (R^2 {fitted.r2:.3f}, worst residual {fitted.worst:.0%}). Error "
            f"at points left out: {best.unseen}, of the scaled FLOP model {by_scale}; missing points use the latter."
        )
        return scaled, note
    alike = max(seconds) <= _ALIKE * min(seconds)
    why = "they are nearly constant" if alike else "they vary by more than their work explains"
    note = (
        f"the fit to {len(loads)} points has R^2 {best.r2:.3f}, as {why} ({min(seconds):.3g} to {max(seconds):.3g} s). "
        f"Error at points left out: {best.unseen}, of the scaled FLOP model {by_scale}; missing points use the fit."
    )
    return best, note


def fit(
    module: str, loads: Sequence[Load], seconds: Sequence[float], source: str, expected: Expected | None = None
) -> Fit:
    """The best of the module's forms on measured points, by R^2. Needs at least two points. Where the latency of
    all-to-alls was measured, the form without it is not tried: of seconds that grow a thousandfold R^2 does not see it.
    """
    fits = [fit_form(form, loads, seconds, source, expected) for form in _tried(module, loads)]
    return max(fits, key=lambda found: (not found.poor, found.r2))


def _tried(module: str, loads: Sequence[Load]) -> list[str]:
    other = "arachne" if any(load.call_s for load in loads) else "arachne_calls"
    return [form for form in FORMS_OF[module] if form != other]


def fit_form(
    form: str,
    loads: Sequence[Load],
    seconds: Sequence[float],
    source: str,
    expected: Expected | None = None,
    exponents: Sequence[float] = EXPONENTS,
) -> Fit:
    """Non-negative fit of one form; AdaptiveLoad's exponent p by grid search on [1.6, 2.4], or of `exponents`, for the
    best R^2. What is `expected` of coefficients counts like further points, the more the surer it is."""
    target = np.array(seconds)
    known, values, scales = _pseudo_points(FORMS[form].names, expected or {})
    best: Fit | None = None
    columns_of = _columns_of(form, loads)
    for exponent in exponents if form == "adaptiveload" else (2.0,):
        columns = columns_of(exponent)
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


def _columns_of(form: str, loads: Sequence[Load]) -> Callable[[float], np.ndarray]:
    """Features [n, m] of these loads, for an exponent."""
    if form != "adaptiveload":
        return lambda exponent: np.array([FORMS[form].features(load, exponent) for load in loads])
    # of 17 exponents and 2,000 points, one by one, this took longer than all else in a fit
    lengths, shares = np.array([(load.length, load.batch / load.degree) for load in loads]).T
    return lambda exponent: np.column_stack([np.ones(len(loads)), shares * lengths**exponent])


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
    if len(rows) > columns.shape[1] + 1:  # every subset has the same errors by the few rows of R
        triangle = np.asarray(np.linalg.qr(np.column_stack([rows, wanted]), mode="r"))
        rows, wanted = triangle[:, :-1], triangle[:, -1]
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
    if helped > min(0.9 * plain, plain - 1e-9):  # less is rounding
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


def _on_a_floor(prior: Fit, loads: Sequence[Load], seconds: Sequence[float], exchange_s: float) -> Fit:
    """The prior with a constant of its own: what every cascade takes however little it computes, such as launches, and
    one scale for the work of all. Both are relative to what they say, not to what was measured: else a few points that
    were too quick would draw a constant to themselves. A measured exchange stays as it is."""
    place = FORMS[prior.form].names.index("constant")
    alone = with_exchange(prior, 0.0) if exchange_s else prior
    work = replace(alone, coefficients=tuple(0.0 if n == place else c for n, c in enumerate(alone.coefficients)))
    columns = np.array(
        [(FORMS[prior.form].features(load, prior.exponent)[place], work.predict(load)) for load in loads]
    )
    sent = [prior.predict(load) - alone.predict(load) for load in loads]
    target = np.array([max(s - out, 0.1 * s) for s, out in zip(seconds, sent, strict=True)])
    scale = target
    for _ in range(_ROUNDS):
        fixed, ratio = nonnegative_fit(columns, target, scale)
        scale = np.maximum(columns @ (fixed, ratio), _LEAST_PART * target)
    found = replace(
        work,
        source=f"{prior.source} x {ratio:.3g} beside {1e3 * fixed:.3g} ms from {len(loads)} points",
        coefficients=tuple(float(fixed if n == place else c * ratio) for n, c in enumerate(work.coefficients)),
        points=len(loads),
    )
    found = with_exchange(found, exchange_s) if exchange_s else found
    r2, worst = quality(np.array([found.predict(load) for load in loads]), np.array(seconds))
    return replace(found, r2=r2, worst=worst)


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
