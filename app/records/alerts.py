"""Events of a run at which somebody should look: W&B's alerts, and Prometheus's by docker/prometheus/heddle.rules.yaml.

A run goes on by itself after most of them; what they have in common is that a person can help, or has lost something. A
worker that stalls is none of them: the run replaces it, and where that does not help HeddleNoStep says so.
"""

from __future__ import annotations

from actors.records.events import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointPassedOver,
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
    CheckpointPassedOver,
    SamplesFailed,
    LoraFilesFailed,
    HeldOutFailed,
)
