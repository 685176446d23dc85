"""Measures of balance and speed in the words of the papers, for plans and for what ran. Pure: numbers in, numbers out.

A *load* of a worker is what its share of the step's DiT cascades comes to: a cascade of B samples of S tokens (text and
video) on k workers gives each of them B S / k tokens and B S^2 / k of pressure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# p of B S^p, AdaptiveLoad sec. 3.2: a grid on [1.6, 2.4], and the most linear one before it for models of few tokens
EXPONENTS = tuple(round(1.0 + 0.1 * n, 1) for n in range(15))


def cv_step(tokens: Sequence[float]) -> float:
    """(len_max - len_min) / len_max of tokens per worker, AdaptiveLoad sec. 4.1; 0 where nobody has any.

    Two workers with 100 and 75 tokens: 0.25.
    """
    most = max(tokens, default=0.0)
    return (most - min(tokens)) / most if most > 0 else 0.0


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation of the population over the mean; 0 where the mean is 0.

    Of B S^2 per worker it is AdaptiveLoad's compute CV (sec. 4.3.2), of TFLOP/s per rank that of Arachne (Fig. 10, 11).
    Values 1 and 3: 0.5.
    """
    mean = statistics.fmean(values) if values else 0.0
    if not mean > 0:
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) / mean


def workload_imbalance(loads: Sequence[float]) -> float | None:
    """WIR: the largest load over the smallest (KnapFormer sec. 4.2); None where a worker has none.

    Loads 6 and 4: 1.5.
    """
    return max(loads) / min(loads) if loads and min(loads) > 0 else None


def flops_utilization(tflop: float, seconds: float, peak_tflops: Sequence[float]) -> float | None:
    """Share of what the devices could have computed: TFLOP / (seconds * sum of peaks).

    With the FLOPs of the model it is MFU (PaLM, appendix B: a recomputed forward is no work), with all that was
    computed HFU (KnapFormer sec. 4.2: F forward, 2F backward, F recomputed). None where a peak is not known. 40 TFLOP
    in 2 s on two devices of 50 TFLOP/s: 0.4.
    """
    if not peak_tflops or min(peak_tflops) <= 0 or seconds <= 0:
        return None
    return tflop / (seconds * sum(peak_tflops))


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's r; None of fewer than three pairs, or where one side does not vary.

    AdaptiveLoad sec. 3.2 finds 0.35 between step time and tokens, 0.92 between step time and B S^p.
    """
    if len(xs) < 3:
        return None
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    var_x = math.fsum((x - mean_x) ** 2 for x in xs)
    var_y = math.fsum((y - mean_y) ** 2 for y in ys)
    if var_x <= 0 or var_y <= 0:
        return None
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / math.sqrt(var_x * var_y)


def wait_sync(waited: Sequence[float], came: Sequence[float]) -> list[float]:
    """Seconds that each worker waited for others in a step (AdaptiveLoad sec. 3.2, `wait_sync`).

    `waited` inside its bags, `came` when it was ready for the gradient sum, which begins when the last one is.
    Workers that waited 1 and 0 s and came at 10 and 12 s: 3 and 0 s.
    """
    last = max(came, default=0.0)
    return [inside + last - own for inside, own in zip(waited, came, strict=True)]
