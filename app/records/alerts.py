"""Events of a run at which somebody should look: W&B's alerts, and Prometheus's by docker/prometheus/heddle.rules.yaml.

A run goes on by itself after most of them; what they have in common is that a person can help, or has lost something.
"""

from __future__ import annotations

from actors.records.events import (
    CheckpointDamaged,
    CheckpointFailed,
    ClusterRefused,
    DataAwaited,
    DecodingAwaited,
    HeldOutFailed,
    KeepersSilent,
    LinkSlow,
    LoraFilesFailed,
    MemoryShort,
    NodeRests,
    RunEvent,
    RunFailed,
    SamplesFailed,
    SnapshotsFailed,
    StepSkipped,
    StepsLost,
    StorageAwaited,
    WorkersAwaited,
    WorkersLeftOut,
)

ALERTS: tuple[type[RunEvent], ...] = (
    RunFailed,
    WorkersAwaited,
    WorkersLeftOut,
    NodeRests,
    LinkSlow,
    ClusterRefused,
    DecodingAwaited,
    StorageAwaited,
    DataAwaited,
    StepSkipped,
    StepsLost,
    MemoryShort,
    KeepersSilent,
    SnapshotsFailed,
    CheckpointFailed,
    CheckpointDamaged,
    SamplesFailed,
    LoraFilesFailed,
    HeldOutFailed,
)
