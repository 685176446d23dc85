"""Losses of a small model, trained twice on this machine: batches of equal tokens, and under the dual constraint.

Both runs have the same weights at the start, the same clips, and as many items in a step; what differs is how many
clips an item has. One process, the plain loop of `app/bench/recipe.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from ops.code_path import ROOT

CONFIG = ROOT / "configs" / "bench" / "batch-losses.yaml"
BUCKETS = ("1x64x96", "9x64x96", "17x64x96", "33x64x96")
# M_comp and p: an item costs as much as two clips of the longest bucket, which has 256 tokens with its text
DUAL = {"compute": 2 * 256.0**2, "exponent": 2.0}
BATCHES: Mapping[str, Mapping[str, float]] = {"equal tokens": {}, "dual constraint": DUAL}


def losses_by_batches(steps: int, clips: int = 120) -> dict[str, list[float]]:
    """The loss of every step on a data set of this number of clips, by how batches are sized."""
    from app.bench.peers.contest import prepare

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path, _ = prepare(Path(folder), CONFIG, BUCKETS, steps, 1, clips)
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        equal = settings["data"]["batch"]
        for name, limits in BATCHES.items():
            settings["data"]["batch"] = {**equal, **limits}
            path.write_text(yaml.safe_dump(settings))
            found[name] = trained(path, steps)
    return found


def trained(config: Path, steps: int) -> list[float]:
    """The loss of every step of a plain loop."""
    import torch

    from app.bench.recipe import Recipe
    from data.decode import decode_job

    recipe = Recipe(config)
    optimizer = recipe.optimizer()
    losses = []
    for step in recipe.steps(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in step:
            batch = decode_job(micro.job)
            loss = recipe.loss(recipe.dit, micro, recipe.latents(batch.video), recipe.words(batch.captions))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(recipe.dit.parameters(), recipe.train.optimizer.max_grad_norm, foreach=True)
        optimizer.step()
        losses.append(total)
    return losses
