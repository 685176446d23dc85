"""How workers make each clip together: as one bag, or as two halves for guidance's two branches, by what each costs.

    way = cheapest_way(5, model, settings, geometry, profile)       # 4 of 5 workers, in two halves of 2, say
    one.join(rank, way, host, port)                                 # the same on every rank

Two halves compute as much as one bag that has as many workers, and their exchanges have half the ends; an odd worker
has no half. Pure: the caller knows the costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actors.plan.costs.point import Samples
from ops.models.base.flops import ALL_TRAINED
from ops.models.load import trained_part
from ops.spatial_temporal.choice import SliceRates, choose
from ops.typed import ConfigError

if TYPE_CHECKING:
    from actors.plan.costs.profile import Profile
    from app.sampling.clips import ClipSettings
    from ops.flow.sampling import SamplerConfig
    from ops.geometry import Geometry
    from ops.models.base.config import DiTConfig
    from ops.models.config import ModelConfig

Halves = Literal["auto", "never", "always"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BagWay:
    """One bag or two, of `size` workers each; spatial-temporal layers choose their slices by `rates`."""

    bags: int
    size: int
    step_s: float  # that a denoising step is expected to take
    rates: SliceRates | None = None

    @property
    def workers(self) -> int:
        return self.bags * self.size

    def describe(self) -> str:
        """The way in words, for a person."""
        parts = f"two halves of {self.size}" if self.bags == 2 else f"one bag of {self.size}"
        return f"{parts}, {self.step_s:.3g} s a step expected"


def has_two_branches(dit: DiTConfig, sampler: SamplerConfig) -> bool:
    """Whether a step is two forwards, which two bags can run side by side."""
    return sampler.is_guided and not dit.takes_guidance


def has_blocks(sampler: SamplerConfig) -> bool:
    """Whether frames attend to those of their own block and of blocks before it alone."""
    return sampler.forcing is not None and sampler.forcing.causal_block_size > 1


def most_members(dit: DiTConfig, grid: tuple[int, int, int]) -> int | None:
    """The most members of a bag for clips of this token grid; None: as many as there are."""
    return None if dit.deals_heads else max(grid[0], grid[1] * grid[2])


def legal_sizes(
    workers: int, dit: DiTConfig, sampler: SamplerConfig, grid: tuple[int, int, int], halves: Halves = "auto"
) -> list[tuple[int, int]]:
    """Ways, as (bags, workers of each), in which at most one worker has no place. Attention by blocks deals out whole
    heads."""
    sizes = [(1, workers)] if halves != "always" or not has_two_branches(dit, sampler) else []
    if halves != "never" and has_two_branches(dit, sampler) and workers > 1:
        sizes.append((2, workers // 2))
    most = most_members(dit, grid)
    sizes = [(bags, size) for bags, size in sizes if most is None or size <= most]
    return [(bags, size) for bags, size in sizes if not (has_blocks(sampler) and dit.num_heads % size)]


def check_together(workers: int, dit: DiTConfig, sampler: SamplerConfig, grid: tuple[int, int, int]) -> None:
    """Raises ConfigError for more workers than one bag, or two halves, can have for clips of this token grid."""
    if legal_sizes(workers, dit, sampler, grid):
        return
    if has_blocks(sampler):
        fewer = next(n for n in range(workers - 1, 0, -1) if legal_sizes(n, dit, sampler, grid))
        raise ConfigError(
            f"--workers {workers} --together: frames that attend by blocks (causal_block_size) need bags, or halves of "
            f"bags, that divide the {dit.num_heads} attention heads. Use {fewer} workers."
        )
    most = most_members(dit, grid)
    assert most is not None, "nothing else is refused"
    most *= 2 if has_two_branches(dit, sampler) else 1
    raise ConfigError(
        f"--workers {workers} --together: a clip has {grid[0]} frames of {grid[1] * grid[2]} positions, which are "
        f"dealt to at most {most} workers here. Use {most} or fewer, or larger clips."
    )


def cheapest_way(
    workers: int,
    model: ModelConfig,
    settings: ClipSettings,
    geometry: Geometry,
    profile: Profile,
    halves: Halves = "auto",
) -> BagWay:
    """The cheapest way by a profile of the model on the device of these workers. `check_together` comes before."""
    dit, sampler = model.dit, settings.sampler
    grid = geometry.token_grid(settings.frames, settings.height, settings.width)
    rates = None if dit.deals_heads else profile.slice_rates()
    forwards = 2 if has_two_branches(dit, sampler) else 1
    ways = [
        BagWay(
            bags=bags,
            size=size,
            step_s=forwards / bags * forward_s(model, settings, grid, profile, size),
            rates=rates,
        )
        for bags, size in legal_sizes(workers, dit, sampler, grid, halves)
    ]
    return min(ways, key=lambda way: way.step_s)


def forward_s(
    model: ModelConfig, settings: ClipSettings, grid: tuple[int, int, int], profile: Profile, degree: int
) -> float:
    """Seconds of a forward of one clip. A profile prices passes of training, with points those of the run's own and
    else of all weights (`profile_for`): of blocks that attend to all rows a pass is as many forwards as its products
    are, of spatial-temporal ones the rates of slices know."""
    dit, text = model.dit, model.text.most_tokens
    if not dit.deals_heads:
        assert dit.slicing is not None, "a bag deals out frames and positions"
        frames, positions = grid[0], grid[1] * grid[2]
        costs = profile.slice_rates().layer_costs(frames, positions, 1, text, degree)
        return dit.num_layers * choose(frames, positions, degree, costs, False, dit.slicing).total_s
    clip = Samples.of(1, (settings.frames, settings.height, settings.width), text)
    part = trained_part(dit) if has_points(profile) else ALL_TRAINED
    return profile.seconds("dit", clip, degree) / part.products(dit.gradient_checkpointing)


def has_points(profile: Profile) -> bool:
    """Whether passes of the transformer were measured."""
    return bool(profile.points("dit")[0])
