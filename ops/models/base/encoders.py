"""The frozen encoders of published pipelines by their numbers alone: fields of a config.json. No torch.

With them the memory of a published model is predicted where nothing of it is downloaded (`heddle bench headroom`).
"""

from __future__ import annotations

from ops.models.base.family import Json

UMT5_XXL: Json = {
    "model_type": "umt5",
    "vocab_size": 256384,
    "d_model": 4096,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
}
T5_XXL: Json = {**UMT5_XXL, "model_type": "t5", "vocab_size": 32128}
LLAMA_8B: Json = {
    "model_type": "llama",
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
QWEN2_5_VL_7B: Json = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
}
GEMMA3_12B: Json = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
}
LTX2_CONNECTORS: Json = {  # numbers of LTX2TextConnectors are its defaults
    "_class_name": "LTX2TextConnectors",
    "caption_channels": 3840,
    "text_proj_in_factor": 49,
    "rope_type": "split",
}
BYT5_SMALL: Json = {
    "model_type": "t5",
    "vocab_size": 384,  # bytes; without the tokens of colours and fonts that Glyph-SDXL-v2 adds, a few MB
    "d_model": 1472,
    "d_ff": 3584,
    "d_kv": 64,
    "num_heads": 6,
    "num_layers": 12,
    "feed_forward_proj": "gated-gelu",
}
SIGLIP_SO400M: Json = {  # patch 14 of 384 pixels
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
CLIP_L: Json = {
    "model_type": "clip_text_model",
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
}
PICTURE_VAE_FIELDS: Json = {  # of Stable Diffusion's autoencoder
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}
