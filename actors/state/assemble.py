"""Puts the parts of a run's state together and asks the keepers how far the run is."""

from __future__ import annotations

from pathlib import Path

from actors.config import RuntimeConfig
from actors.outcome import Events
from actors.state.checkpoint_writer import Writer
from actors.state.checkpoints_on_disk import CheckpointsOnDisk
from actors.state.keeper_fleet import Keepers
from actors.state.run_state import PositionSource, RunState
from ops.models.config import ModelConfig
from ops.shards import bytes_per_weight


def assemble_state(
    run: str,
    config: RuntimeConfig,
    model: ModelConfig,
    positions: PositionSource,
    events: Events,
) -> RunState:
    """The state of a run. Waits for keepers that live, as long as `snapshot.patience_s`. Raises OtherKeepers."""
    keepers = Keepers(run, config.snapshot, events.tell)
    # Keepers refuse generations that they have left behind, also when the monitor has forgotten them.
    standing = keepers.take_over(config.snapshot.patience_s)
    disk = CheckpointsOnDisk(Path(config.run_dir), events.tell)
    return RunState(
        config,
        model,
        keepers=keepers,
        standing=standing,
        writer=Writer(
            Path(config.run_dir),
            config.checkpoint,
            config.train.steps - 1,
            events,
            weight_bytes=bytes_per_weight(config.train.optimizer),
            unmoved=disk.unmoved,
            disown=disk.disown,
        ),
        disk=disk,
        positions=positions,
        tell=events.tell,
    )
