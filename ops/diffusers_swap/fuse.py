"""Put the fused ops into a Diffusers transformer that is trained with other tools.

    from diffusers import WanTransformer3DModel
    from ops.diffusers_swap.fuse import fuse

    transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    fuse(transformer)      # Counter({'WanAttnProcessor': 60, 'WanTransformerBlock': 30, ...})

Knows the transformers of Wan, HunyuanVideo, FLUX and CogVideoX. Parameters, their names, hooks and isinstance checks
stay as they are: each module gets a subclass of its class with another forward. Modules of other classes, subclasses of
the known ones too, stay untouched: in another transformer of Diffusers only the norms that it shares are swapped.
LoRA (`add_adapter`), `compile_repeated_blocks` and `save_pretrained` may come before or after, `fully_shard` after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fuse(model: nn.Module) -> Counter[str]:
    """Swap norms, modulation, gates and QK-norm of `model` in place; how many of each class were swapped.

    Raises ValueError, and swaps nothing, if there is nothing to swap or a part is sharded already. A second call swaps
    nothing and raises nothing.
    """
    from ops.diffusers_swap import forwards  # heavy: Diffusers takes seconds to import

    parts = list(_parts(model))
    for part in parts:
        kind = type(part)
        if isinstance(part, FSDPModule) and any(base in forwards.FUSED for base in kind.__mro__):
            raise ValueError(f"{kind.__name__} is sharded already, under a class of its own; fuse before fully_shard.")
    swapped: Counter[str] = Counter()
    already = 0
    for part in parts:
        kind = type(part)
        already += kind in forwards.FUSED.values()
        if kind in forwards.FUSED:
            swapped[kind.__name__] += 1
            part.__class__ = forwards.FUSED[kind]
    if not swapped and not already:
        raise ValueError(
            f"fuse found nothing to swap in a {type(model).__name__}. It knows the Diffusers transformers "
            "of Wan, HunyuanVideo, FLUX and CogVideoX."
        )
    return swapped


def unfuse(model: nn.Module) -> Counter[str]:
    """Give every module that `fuse` swapped its own class back; how many of each."""
    from ops.diffusers_swap import forwards  # heavy: as above

    originals = {fused: original for original, fused in forwards.FUSED.items()}
    restored: Counter[str] = Counter()
    for part in list(_parts(model)):
        if type(part) in originals:
            restored[type(part).__name__] += 1
            part.__class__ = originals[type(part)]
    return restored


def _parts(model: nn.Module) -> Iterator[object]:
    """All modules, and the processors of those that have one."""
    for module in model.modules():
        yield module
        processor = getattr(module, "processor", None)
        if processor is not None and not isinstance(processor, nn.Module):  # a module among `modules` otherwise
            yield processor
