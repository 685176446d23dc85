"""Options of plans in tests."""

from functools import partial

from actors.plan.schedule.problem import PlanOptions

counted = partial(PlanOptions, counted=True)
"""Searches and proofs end by their counted work only, so a busy machine plans as an idle one does."""
