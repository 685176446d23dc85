"""Time of spatial-temporal layers with sliced all-to-alls: a stream that computes and one that communicates.

The order of launches is that of `ops.spatial_temporal.run_layers` (ScaleFusion, Algorithm 1): before a layer, the parts
of its first `lead` slices go out as the slices of the layer before end, the rest when that layer has ended. A slice
computes when all its parts have come.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Of one layer, in any unit: its compute, and the all-to-all before it."""

    compute: float
    exchange: float
    slices: int = 1
    lead: int = 0  # of its slices, those whose parts go out under the layer before


def finished(layers: list[LayerTimes]) -> float:
    """When the last layer has ended. Cutting costs nothing in this model."""
    compute_free = exchange_free = 0.0
    sources = [0.0] * layers[0].slices  # when the slices before the first layer ended: they are there
    arrived: list[float] = []
    for number, layer in enumerate(layers):
        part = layer.exchange / (layer.slices * len(sources))
        after = sources[-1]
        if number == 0:
            arrived = [0.0] * layer.slices
            for target in range(layer.lead):
                for _ in sources:
                    exchange_free += part
                arrived[target] = exchange_free
        for target in range(layer.lead, layer.slices):
            for _ in sources:
                exchange_free = max(exchange_free, after) + part
            arrived[target] = exchange_free
        following = layers[number + 1] if number + 1 < len(layers) else None
        coming = [0.0] * (following.slices if following else 0)
        ended = []
        for target in range(layer.slices):
            compute_free = max(compute_free, arrived[target]) + layer.compute / layer.slices
            ended.append(compute_free)
            if following is not None:  # its leads leave as this slice ends
                for led in range(following.lead):
                    lead_part = following.exchange / (following.slices * layer.slices)
                    exchange_free = max(exchange_free, compute_free) + lead_part
                    coming[led] = exchange_free
        sources, arrived = ended, coming
    return compute_free


def pairs(
    compute: tuple[float, float],
    exchange: float,
    *,
    slices: int = 1,
    temporal_lead: int = 0,
    spatial_lead: int = 0,
    count: int = 28,
) -> float:
    """`count` pairs of a spatial and a temporal layer, each behind an all-to-all of `exchange`. L_T is the lead of
    spatial layers, which run in slices of T, L_S that of temporal ones."""
    spatial = LayerTimes(compute=compute[0], exchange=exchange, slices=slices, lead=temporal_lead)
    temporal = LayerTimes(compute=compute[1], exchange=exchange, slices=slices, lead=spatial_lead)
    return finished([spatial, temporal] * count)
