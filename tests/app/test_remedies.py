"""The advice for a run that does not fit: what is enough alone, what together, or that nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from actors.config import TrainConfig, TrainMemoryConfig
from app.inputs.remedies import CHANGES, TrainedSetup, advice
from ops.config import OptimizerConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.wan.config import WanConfig

SETUP = TrainedSetup(
    model=ModelConfig(
        dit=WanConfig(gradient_checkpointing=False),
        vae=VAEConfig(kind="diffusers", path="vae", dtype="float32"),
        text=TextConfig(),
    ),
    train=TrainConfig(
        optimizer=OptimizerConfig(ema_decay=0.99),
        memory=TrainMemoryConfig(gradients="own", state="device", parameters="replicated"),
    ),
    degrees=(1, 2),
    known=(1, 2, 4),
)
GAINS: dict[str, Callable[[TrainedSetup], bool]] = {  # of each change, how the setup shows it
    "model.dit.gradient_checkpointing: true": lambda s: s.model.dit.gradient_checkpointing,
    "model.text.place: host": lambda s: s.model.text.place == "host",
    "train.parameter_dtype and train.autocast: bfloat16": lambda s: s.train.parameter_dtype == "bfloat16",
    "train.optimizer.ema_decay: 0": lambda s: s.train.optimizer.ema_decay == 0,
    "model.vae.tiling: true": lambda s: s.model.vae.tiling,
    "model.vae.dtype: bfloat16": lambda s: s.model.vae.dtype == "bfloat16",
    "planner.degrees: []": lambda s: s.degrees == (1, 2, 4),
    "train.memory.state: host": lambda s: s.train.memory.state == "host",
    "train.memory.gradients: auto": lambda s: s.train.memory.gradients == "auto",
    "train.memory.parameters: node": lambda s: s.train.memory.parameters == "node",
    "model.dit.lora_rank: 16": lambda s: s.model.dit.lora_rank == 16,
    "model.dit.frozen_dtype: float8": lambda s: s.model.dit.frozen_dtype == "float8",
}
AFTER = {  # what a run must have first
    "train.memory.parameters: node": "model.dit.gradient_checkpointing: true",
    "model.dit.frozen_dtype: float8": "model.dit.lora_rank: 16",
}


def told(*wanted: str, setup: TrainedSetup = SETUP, workers: int | None = None) -> str:
    """The advice where a run fits that has all of these, or where they help on `workers` workers."""

    def has_all(changed: TrainedSetup) -> bool:
        return all(GAINS[name](changed) for name in wanted)

    def fits(changed: TrainedSetup) -> bool:
        return workers is None and has_all(changed)

    return advice(setup, fits, lambda changed: workers if workers is not None and has_all(changed) else None)


@pytest.mark.parametrize("change", [change.name for change in CHANGES if change.name not in AFTER])
def test_every_change_is_named_where_it_is_enough(change: str) -> None:
    assert told(change) == f"It fits with {change}."
    (made,) = [one.made(SETUP) for one in CHANGES if one.name == change]
    assert made is not None and GAINS[change](made)
    (again,) = [one.made(made) for one in CHANGES if one.name == change]
    assert again is None, "what a run has already is no advice"


def test_two_changes_are_named_together_where_none_is_enough() -> None:
    assert told("model.text.place: host", "train.memory.state: host") == (
        "It fits with model.text.place: host and train.memory.state: host."
    )


@pytest.mark.parametrize("change", AFTER)
def test_a_change_that_another_makes_possible_is_named_with_it(change: str) -> None:
    """Blocks are fetched where activations are computed again, and weights are in 8 bits where LoRA freezes them."""
    assert told(change) == f"It fits with {AFTER[change]} and {change}."


def test_more_workers_are_advice_alone_and_beside_a_change() -> None:
    assert told(workers=12) == "It fits with 12 workers."
    assert told("train.memory.state: host", workers=16) == "It fits with train.memory.state: host and 16 workers."


def test_where_nothing_helps_it_says_what_was_tried() -> None:
    said = told("model.text.place: host", "train.memory.state: host", "model.vae.tiling: true")
    assert said.startswith("None of these changes makes it fit, alone or in pairs: up to 64 workers; model.dit.grad")
    assert "model.dit.lora_rank: 16" in said and "parameters: node" not in said, "which this model cannot have alone"


def test_only_what_a_run_may_be_is_advised() -> None:
    dit = replace(SETUP.model.dit, gradient_checkpointing=True, lora_rank=4)
    lora = replace(SETUP, model=replace(SETUP.model, dit=dit))
    offered = {change.name for change in CHANGES if change.made(lora)}
    assert "model.dit.lora_rank: 16" not in offered and "train.memory.parameters: node" in offered
    deepspeed = replace(SETUP, train=TrainConfig(sync="deepspeed"))
    made = {change.name for change in CHANGES if change.made(deepspeed)}
    assert not [name for name in made if name.startswith("train.memory") or "parameter_dtype" in name]
