"""From a run's config to what the planner takes: the same for a run and for its preview."""

from __future__ import annotations

from actors.config import PlannerConfig
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.problem import PlanOptions
from actors.planning.learned import refuse_other, setting_of
from ops.geometry import Geometry
from ops.models.config import ModelConfig

LEAST_GAIN = 0.1
"""A run has not measured most pieces of a cut batch, and every cascade more costs calls: a cut must promise more."""


def options_of(config: PlannerConfig, *, budget_s: float, replans: bool) -> PlanOptions:
    """`replans`: only the first step of a plan will be executed, as in a run; a preview shows all of them."""
    return PlanOptions(
        strategy=config.strategy,
        budget_s=budget_s,
        degrees=config.degrees,
        topology=config.topology,
        static_degree=config.static_degree,
        split=config.split,
        lookahead=config.lookahead,
        update_waits=True,
        replans=replans,
        least_gain=LEAST_GAIN,
        bag_peers=config.bag_peers,
    )


def profile_of(config: PlannerConfig, model: ModelConfig, geometry: Geometry, device: str = "") -> Profile:
    """Measured latencies where the config names them, else the FLOP model. Raises PlanError for a bad file, and for one
    that says it is of another model or attention backend, or of another device than `device` where that is given."""
    if config.profile:
        profile = read_profile(config.profile)
        refuse_other(profile, setting_of(model, device), config.profile)
        return profile
    return Profile.from_flops(model.dit, model.vae, model.text, geometry, model.image)
