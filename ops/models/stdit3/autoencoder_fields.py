"""What the config.json of Open-Sora's video autoencoder says, and what it leaves to the published code. No torch."""

from __future__ import annotations

from ops.models.base.family import Json

NAME = "VideoAutoencoderPipeline"  # its class there
SDXL: Json = {  # of the AutoencoderKL of frames, as far as it matters; a folder may say other numbers in vae_2d
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
}
TEMPORAL: Json = {  # of the autoencoder over time, VAE_Temporal_SD; others in vae_temporal
    "filters": 128,
    "num_res_blocks": 4,
    "channel_multipliers": (1, 2, 2, 4),
    "temporal_downsample": (False, True, True),
    "num_groups": 32,
}


def spatial(fields: Json) -> Json:
    """Arguments of AutoencoderKL."""
    return _filled(SDXL, fields.get("vae_2d"))


def temporal(fields: Json) -> Json:
    """Numbers of the autoencoder over time."""
    return _filled(TEMPORAL, fields.get("vae_temporal"))


def chunk_of(fields: Json) -> int:
    """Frames that are coded together. Raises ValueError where the folder has no chunks."""
    chunk = fields.get("micro_frame_size")
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(
            f"micro_frame_size is {chunk}: autoencoders of Open-Sora are run in chunks of frames here, 17 as published."
        )
    return chunk


def numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    """(latent channels, strides over time, height and width)."""
    pictures, over_time = spatial(fields), temporal(fields)
    side = 2 ** (len(pictures["block_out_channels"]) - 1)
    return int(pictures["latent_channels"]), (2 ** sum(over_time["temporal_downsample"]), side, side)


def _filled(usual: Json, given: Json | None) -> Json:
    return {key: (given or {}).get(key, value) for key, value in usual.items()}
