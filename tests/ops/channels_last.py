"""Convolutions that lay out their outputs as those of cuDNN do: a CPU gives every one of three dimensions as it is
written, whatever lies how."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.models.base.vae import DiffusersVAE
from ops.models.chunked import ChunkedVAE

Coder = DiffusersVAE | ChunkedVAE
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def check_channels_last(laid_out: Coder, plain: Coder, video: Tensor) -> None:
    """Two clips, `video` and another, are coded by `laid_out`, which has channels last, as by the same one without.
    Of one clip alone some strides would count for nothing."""
    videos, seen = torch.cat([video, 255 - video]), as_by_cudnn(laid_out.model)
    latents = plain.encode(videos)
    torch.testing.assert_close(laid_out.encode(videos), latents, atol=1e-5, rtol=1e-4)
    assert seen and all(seen)
    seen.clear()
    assert (laid_out.decode(latents).int() - plain.decode(latents).int()).abs().max() <= 1  # rounding to 8 bits
    assert any(seen)


def as_by_cudnn(model: nn.Module) -> list[bool]:
    """Convolutions of the module give outputs with channels last where their weight or input is so. Notes of each from
    now on, that could tell, whether it did."""
    seen: list[bool] = []

    def lay_out(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        layout = _FORMATS[output.dim()]
        given = (inputs[0], module.weight)
        assert isinstance(module.weight, Tensor)
        if any(_tells(one) and one.is_contiguous(memory_format=layout) for one in given):
            output = output.contiguous(memory_format=layout)
        if _tells(output):
            seen.append(output.is_contiguous(memory_format=layout))
        return output

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(lay_out)
    return seen


def _tells(tensor: Tensor) -> bool:
    """Whether its two layouts differ."""
    return tensor.shape[1] > 1 and tensor[0, 0].numel() > 1
