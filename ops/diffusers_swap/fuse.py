"""Put the fused ops into a Diffusers transformer that is trained with other tools.

    from diffusers import WanTransformer3DModel
    from ops.diffusers_swap.fuse import fuse

    transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    fuse(transformer)      # Counter({'WanAttnProcessor': 60, 'WanTransformerBlock': 30, ...})

Knows the transformers of Wan, HunyuanVideo, FLUX and CogVideoX. Parameters, their names, hooks and isinstance checks
stay as they are: each module gets a subclass of its class with another forward. Modules that are not known, or are
subclasses themselves, stay untouched.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def fuse(model: nn.Module) -> Counter[str]:
    """Swap norms, modulation, gates and QK-norm of `model` in place; how many of each class were swapped.

    Raises ValueError if there is nothing to swap. Calling it again swaps nothing and raises nothing.
    """
    from ops.diffusers_swap import forwards  # needs diffusers, which the rest of ops does not

    swapped: Counter[str] = Counter()
    already = 0
    for module in model.modules():
        for part in (module, getattr(module, "processor", None)):
            already += type(part) in forwards.FUSED.values()
            replacement = forwards.FUSED.get(type(part))
            if part is not None and replacement is not None:
                swapped[type(part).__name__] += 1
                part.__class__ = replacement
    if not swapped and not already:
        raise ValueError(
            f"fuse found nothing to swap in a {type(model).__name__}. It knows the Diffusers transformers "
            "of Wan, HunyuanVideo, FLUX and CogVideoX."
        )
    return swapped
