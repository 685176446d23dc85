"""What makes a run fit that does not: its settings changed one at a time, in pairs, and on more workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from actors.config import TrainConfig
from ops.counted import counted
from ops.models.config import ModelConfig

MOST_WORKERS = 64  # that are suggested where fewer are too few
_SHOWN = 4  # pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSetup:
    """What decides whether a run fits its devices. `degrees` are those that its DiT may have; `known` all that are
    legal for the model."""

    model: ModelConfig
    train: TrainConfig
    degrees: tuple[int, ...]
    known: tuple[int, ...]

    @property
    def flat(self) -> bool:
        return self.train.sync == "flat"

    def remembering(self, **places: str) -> TrainedSetup:
        """The setup with other `train.memory`."""
        memory = replace(self.train.memory, **places)  # type: ignore[arg-type]
        return replace(self, train=replace(self.train, memory=memory))


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of settings, as a person writes it; `made` is None where it changes nothing, or cannot be."""

    name: str
    made: Callable[[TrainedSetup], TrainedSetup | None]


def _checkpointed(setup: TrainedSetup) -> TrainedSetup | None:
    dit = setup.model.dit
    changed = replace(setup.model, dit=replace(dit, gradient_checkpointing=True))
    return None if dit.gradient_checkpointing else replace(setup, model=changed)


def _text_on_host(setup: TrainedSetup) -> TrainedSetup | None:
    text = setup.model.text
    changed = replace(setup.model, text=replace(text, place="host"))
    return None if text.place == "host" else replace(setup, model=changed)


def _halved(setup: TrainedSetup) -> TrainedSetup | None:
    if setup.train.parameter_dtype != "float32" or not setup.flat:
        return None
    return replace(setup, train=replace(setup.train, parameter_dtype="bfloat16", autocast="bfloat16"))


def _without_average(setup: TrainedSetup) -> TrainedSetup | None:
    optimizer = setup.train.optimizer
    changed = replace(setup.train, optimizer=replace(optimizer, ema_decay=0.0))
    return replace(setup, train=changed) if optimizer.ema_decay else None


def _halved_vae(setup: TrainedSetup) -> TrainedSetup | None:
    vae = setup.model.vae
    if vae.kind != "diffusers" or vae.dtype_on("cuda") != "float32":
        return None
    return replace(setup, model=replace(setup.model, vae=replace(vae, dtype="bfloat16")))


def _tiled(setup: TrainedSetup) -> TrainedSetup | None:
    vae = setup.model.vae
    changed = replace(setup.model, vae=replace(vae, tiling=True))
    return replace(setup, model=changed) if vae.kind == "diffusers" and not vae.tiling else None


def _any_degree(setup: TrainedSetup) -> TrainedSetup | None:
    return replace(setup, degrees=setup.known) if set(setup.known) - set(setup.degrees) else None


def _state_on_host(setup: TrainedSetup) -> TrainedSetup | None:
    possible = setup.flat and setup.train.memory.state == "device"
    return setup.remembering(state="host") if possible else None


def _shared_gradient(setup: TrainedSetup) -> TrainedSetup | None:
    return setup.remembering(gradients="auto") if setup.flat and setup.train.memory.gradients == "own" else None


def _fetched(setup: TrainedSetup) -> TrainedSetup | None:
    possible = setup.flat and setup.model.dit.fetchable and setup.train.memory.parameters == "replicated"
    return setup.remembering(parameters="node") if possible else None


def _lora(setup: TrainedSetup) -> TrainedSetup | None:
    dit = setup.model.dit
    changed = replace(setup.model, dit=replace(dit, lora_rank=16))
    return None if dit.lora_rank or dit.train_only else replace(setup, model=changed)


def _in_8_bits(setup: TrainedSetup) -> TrainedSetup | None:
    dit = setup.model.dit
    if not dit.lora_rank or dit.frozen_dtype != "same":
        return None
    return replace(setup, model=replace(setup.model, dit=replace(dit, frozen_dtype="float8")))


CHANGES = (  # the smallest first
    Remedy("model.dit.gradient_checkpointing: true", _checkpointed),
    Remedy("model.text.place: host", _text_on_host),
    Remedy("train.parameter_dtype and train.autocast: bfloat16", _halved),
    Remedy("train.optimizer.ema_decay: 0", _without_average),
    Remedy("model.vae.dtype: bfloat16", _halved_vae),
    Remedy("model.vae.tiling: true", _tiled),
    Remedy("planner.degrees: []", _any_degree),
    Remedy("train.memory.state: host", _state_on_host),
    Remedy("train.memory.gradients: auto", _shared_gradient),
    Remedy("train.memory.parameters: node", _fetched),
    Remedy("model.dit.lora_rank: 16", _lora),
    Remedy("model.dit.frozen_dtype: float8", _in_8_bits),
)


def advice(
    setup: TrainedSetup, fits: Callable[[TrainedSetup], bool], fewest: Callable[[TrainedSetup], int | None]
) -> str:
    """One sentence: the changes with which it fits, each of them enough; pairs only where no single one is. `fits` says
    whether a setup fits the workers that there are, `fewest` on how many it would, at most `MOST_WORKERS`."""
    made = [(change, changed) for change in CHANGES if (changed := change.made(setup)) is not None]
    more = fewest(setup)
    found = [counted(more, "worker")] if more is not None else []
    found += [change.name for change, changed in made if fits(changed)]
    if found:
        return f"It fits with {' or with '.join(found)}."
    pairs = []
    for one, other in combinations(CHANGES, 2):
        first = one.made(setup)
        both = other.made(first) if first is not None else None
        if both is not None and fits(both):
            pairs.append(f"{one.name} and {other.name}")
    for change, changed in made:
        if (more := fewest(changed)) is not None:
            pairs.append(f"{change.name} and {counted(more, 'worker')}")
    if pairs:
        return f"It fits with {', or with '.join(pairs[:_SHOWN])}."
    tried = "; ".join(change.name for change, _ in made)
    alone = f"up to {MOST_WORKERS} workers{'; ' if tried else ''}{tried}"
    return f"None of these changes makes it fit, alone or in pairs: {alone}."
