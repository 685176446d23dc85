"""How far measured costs are from the profile's: learnt from the points that ran, applied to those that did not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from actors.plan.costs.forms import Load

_WIDTH = 0.7  # of the kernel, in natural logarithms: twice the tokens, samples or degree is about that far
_FAR = 1e-3  # weight of points that are far away, where there are no nearer ones


class Drift:
    """A factor for every load: the weighted geometric mean of measured over expected seconds of known loads, near ones
    first (Nadaraya-Watson over the logarithms of tokens, samples and degree)."""

    def __init__(self, loads: Sequence[Load], ratios: Sequence[float], doubt: float) -> None:
        """`ratios` are measured over expected seconds, above 0. With `doubt` above 0 the factor goes to 1 far away from
        all of them, as for expectations that were fitted to the same points; with 0 to their mean."""
        self._at = _places(loads)
        self._log = np.log(np.array(ratios, dtype=float))
        self._doubt = doubt

    def factor(self, load: Load) -> float:
        """What an expectation for this load is to be multiplied by."""
        if not len(self._log):
            return 1.0
        distance = ((self._at - _places([load])) ** 2).sum(axis=1)
        weight = np.exp(-distance / (2 * _WIDTH**2)) + (0.0 if self._doubt else _FAR)
        return math.exp(float(weight @ self._log) / (float(weight.sum()) + self._doubt))


def _places(loads: Sequence[Load]) -> np.ndarray:
    """[n, 3] logarithms of tokens, samples and degree."""
    places: np.ndarray = np.array([(max(one.length, 1), one.batch, one.degree) for one in loads], dtype=float)
    logs: np.ndarray = np.log(places.reshape(len(loads), 3))
    return logs
