"""`heddle bench sequence`: what a clip costs at each degree, by the ways in which a bag can share attention.

Priced by the FLOP model of a device and its link, as a run without a profile plans; only what is sent differs:
- Ulysses, where the degree divides the heads; else shared heads (`ops.packed.context_parallel`): what Heddle runs.
- Ulysses in halves, where a rank has two heads or more: as much is sent, and half of it hidden by attention
  (`ops.packed.exchange_halves`), which plans do not count on before bags are measured.
- USP: Ulysses over the largest common divisor of degree and heads, keys and values gathered over the rest, and summed
  by reduce-scatter on the way back.
- ring: keys and values travel round the bag, on the way back their gradients, too. Once without overlap, once with as
  much of it hidden behind attention as there is attention: no ring is faster.
H heads, k ranks, n rows of a rank; Ulysses sends 4 n H (k - 1) / k rows of a head in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from actors.plan.costs.fit import Fit
from actors.plan.costs.forms import FORMS, Load
from actors.plan.costs.point import Samples
from actors.planning.options import flop_profile
from app.bench.workload import CONFIGS
from app.settings.config import RunConfig
from ops.degrees import default_degrees, exchanged
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.typed import ConfigError

_WAYS = 3.0  # forward, its recomputation, and backward, on which as much is sent
SHARED, HALVES, USP, RING, HIDDEN = (
    "shared heads",
    "Ulysses in halves",
    "USP, K and V gathered",
    "ring",
    "ring, hidden by attention",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedWay:
    """Forward and backward of a clip in a bag."""

    degree: int
    way: str
    sent: float  # over what Ulysses would send
    seconds: float


def ways_of(heads: int, degree: int) -> dict[str, float]:
    """What each way sends over what Ulysses would at this degree, mean of forward, recomputation and backward."""
    group = math.gcd(heads, degree)
    ulysses = 4 * (degree - 1) / degree
    found = {SHARED if heads % degree else "Ulysses": exchanged(heads, degree)}
    if degree == 1:
        return found
    if heads % degree == 0 and heads > degree:
        found[HALVES] = found["Ulysses"]
    if heads % degree:
        found[USP] = (4 * (group - 1) / group + 2 * (degree / group - 1)) / ulysses
    back = 4 * (degree - 1) / ulysses  # K, V and their gradients travel
    found[RING] = found[HIDDEN] = (2 * 2 * (degree - 1) / ulysses + back) / _WAYS
    return found


def priced(fit: Fit, load: Load, heads: int) -> Iterator[PricedWay]:
    """Ways for a clip at the load's degree."""
    load = replace(load, exposed=1.0)  # what attention hides is taken off below
    terms = [c * x for c, x in zip(fit.coefficients, FORMS[fit.form].features(load, fit.exponent), strict=True)]
    parts = dict(zip(FORMS[fit.form].names, terms, strict=True))
    link, attention = parts["comm"] / load.exchanged, parts["alpha2"]
    for way, sent in ways_of(heads, load.degree).items():
        seconds = sum(terms) - parts["comm"] + sent * link
        if way in (HALVES, HIDDEN):
            seconds -= min(attention, sent * link / (2 if way == HALVES else 1))
        yield PricedWay(degree=load.degree, way=way, sent=sent, seconds=seconds)


def geometry_of(preset: str, model: ModelConfig) -> Geometry:
    """The geometry by the usual numbers of the family's VAE, as no folder is read. Raises ConfigError where the
    transformer was trained with another VAE."""
    if model.vae.kind == "diffusers":
        channels, stride = FAMILIES[model.dit.architecture].vae.numbers({})
        if channels != model.dit.out_channels:
            raise ConfigError(
                f"--preset {preset} takes latents of {model.dit.out_channels} channels, and the VAE of its family "
                f"usually makes {channels}: its strides are not known. Use another preset."
            )
    else:
        stride = model.vae.temporal, model.vae.spatial, model.vae.spatial
    return Geometry(vae_stride=stride, patch=model.dit.patch)


def run(
    preset: Annotated[str, typer.Option(help="A model of configs/models.")] = "wan2.1-1.3b",
    clip: Annotated[str, typer.Option(help="FRAMESxHEIGHTxWIDTH.")] = "81x480x832",
    device: Annotated[str, typer.Option(help="A GPU of the table of devices.")] = "NVIDIA H100",
    text: Annotated[int, typer.Option(help="Text tokens of a sample.", min=0)] = 512,
    most: Annotated[int, typer.Option(help="The largest degree.", min=1)] = 16,
) -> None:
    """Seconds of one clip, by degree and way."""
    model = RunConfig.load(CONFIGS / "models" / f"{preset}.yaml", ["run.name=bench"]).model
    if model.dit.spatial_temporal:
        raise ConfigError(
            f"--preset {preset} deals out no attention heads: its bags run by spatial-temporal parallelism."
        )
    geometry, shape = geometry_of(preset, model), clip.split("x")
    if len(shape) != 3 or not all(size.isdecimal() for size in shape):
        raise ConfigError(f"--clip {clip} is not FRAMESxHEIGHTxWIDTH, such as 81x480x832.")
    frames, height, width = map(int, shape)
    clips = Samples.of(1, (frames, height, width), text)
    try:
        geometry.token_grid(frames, height, width)
    except ValueError as error:
        raise ConfigError(f"--clip {clip} of {preset}: {error}") from None
    profile = flop_profile(model, geometry, device)
    fit, heads = profile.model_of("dit"), model.dit.num_heads
    assert fit is not None and fit.form == "arachne", "the FLOP model of families with full attention"
    print(f"{preset}, {heads} heads, {clip}, {device}: {fit.source}")
    print("| degree | way | sent, of Ulysses | seconds | GPU-seconds |\n|---|---|---|---|---|")
    degrees = {k for k in (*default_degrees(heads, most=most), *default_degrees(most)) if k <= most}
    for degree in sorted(k for k in degrees if heads % k == 0 or k & (k - 1) == 0):
        for one in priced(fit, profile.load_of("dit", clips, degree), heads):
            print(
                f"| {degree} | {one.way} | {one.sent:.2f} | {one.seconds:.3f} | {degree * one.seconds:.2f} |",
                flush=True,
            )
