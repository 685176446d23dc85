"""Image encoders: the vision tower of CLIP, from a local folder or small and random. Pictures in, rows out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ops.models.config import ImageConfig
from ops.models.files import check_files
from ops.models.folders import component
from ops.models.frozen import Source, frozen, read_whole
from ops.models.place import on_device
from ops.models.seeded import drawn_from
from ops.packed.uploads import upload

if TYPE_CHECKING:
    from transformers import CLIPVisionConfig, CLIPVisionModel


class ImageEncoder(Protocol):
    """Frozen encoder of pictures."""

    dim: int
    tokens: int

    def encode(self, pictures: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] of any size -> fp32 [B, tokens, dim]. A picture's rows do not depend on its batch."""
        ...


Preprocessor = Callable[..., Mapping[str, Tensor]]  # an image processor of Transformers: resizes, crops, normalises


class CLIPImages:
    """CLIP's vision tower as WanImageToVideoPipeline uses it: the hidden states before the last layer."""

    def __init__(
        self, encoder: CLIPVisionModel, processor: Preprocessor, config: ImageConfig, device: torch.device | str
    ) -> None:
        self.device = torch.device(device)
        on_device(encoder, self.device).requires_grad_(False).eval()
        self.encoder = encoder
        self.processor = processor
        self.dim, self.tokens = config.d_model, config.tokens

    def save_processor(self, folder: Path) -> None:
        """What WanImageToVideoPipeline loads as its image_processor/."""
        self.processor.save_pretrained(folder)  # type: ignore[attr-defined]  # every one of Transformers has it

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        inputs = self.processor(images=list(pictures.cpu().numpy()), return_tensors="pt")["pixel_values"]
        (there,) = upload([inputs], self.device)
        return vision_rows(self.encoder, there.to(self.encoder.dtype))


def vision_rows(encoder: CLIPVisionModel, pixels: Tensor) -> Tensor:
    """The hidden states before the last layer, fp32 [B, tokens, dim], of prepared pictures [B, 3, size, size]."""
    rows: Tensor = encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2].float()
    return rows


def random_clip(config: ImageConfig, device: torch.device | str) -> CLIPImages:
    """A small vision tower with weights drawn from `config.seed`: the same on every worker."""
    from transformers import CLIPVisionModel  # heavy: seconds to import
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    with drawn_from(config.seed):
        encoder = CLIPVisionModel(_random_shape(config))
    side = {"height": config.size, "width": config.size}
    processor = CLIPImageProcessorPil(size={"shortest_edge": config.size}, crop_size=side)
    return CLIPImages(encoder, processor, config, device)


def clip_skeleton(config: ImageConfig) -> CLIPVisionModel:
    """The vision tower of a config as its class makes it: what a folder's config.json describes, or the random one."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    if not config.path:
        return CLIPVisionModel(_random_shape(config))
    folder = component(config.path, "image_encoder")
    return CLIPVisionModel(CLIPVisionConfig.from_pretrained(folder, local_files_only=True))


def image_size(encoder: CLIPVisionModel) -> int:
    """Height and width that it sees, in pixels."""
    size: int = encoder.config.image_size  # type: ignore[assignment]  # Transformers allows other forms, CLIP has none
    return size


def _random_shape(config: ImageConfig) -> CLIPVisionConfig:
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=config.d_model,
        intermediate_size=4 * config.d_model,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        image_size=config.size,
        patch_size=config.patch,
    )


def folder_clip(config: ImageConfig, device: torch.device | str, shared: bool = False) -> CLIPImages:
    """CLIP from `config.path`: image_encoder/ and image_processor/ of a pipeline, or one folder with both. In fp32, as
    the published pipelines run it. `shared` as `ops.models.frozen.frozen`."""
    from transformers import CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    assert config.path is not None
    folder = component(config.path, "image_encoder")
    check_files(folder)

    def read(dtype: torch.dtype) -> CLIPVisionModel:
        return read_whole(CLIPVisionModel, folder, None, dtype)

    source = Source(folder=folder, read=read, bare=lambda: clip_skeleton(config))
    encoder = frozen(source, torch.float32, torch.device(device), shared)
    assert isinstance(encoder, CLIPVisionModel)
    # the processor that needs Pillow alone: resizing by torchvision gives other pixels
    processor = CLIPImageProcessorPil.from_pretrained(processor_of(folder), local_files_only=True)
    return CLIPImages(encoder, processor, config, device)


def processor_of(image_encoder: Path) -> Path:
    """The image processor's folder: beside that of its encoder, or the same."""
    beside = image_encoder.parent / "image_processor"
    return beside if beside.is_dir() else image_encoder
