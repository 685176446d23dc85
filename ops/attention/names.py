"""Names of the attention backends, for configs. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import Literal, get_args

BackendName = Literal["flash3", "flash", "cudnn", "flex", "sdpa"]
AttentionName = Literal["auto", "flash3", "flash", "cudnn", "flex", "sdpa"]  # `auto` chooses by device and shape

BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)
CUDA_ONLY: tuple[BackendName, ...] = ("flash3", "flash", "cudnn")
FORWARD_ONLY_ON_CPU: tuple[BackendName, ...] = ("flex",)
