"""What cascades of a model, and the graphs of small ones, need of memory: predicted on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.plan.costs.needs import BAG, SOLO, NeedLine, Needs, line_through
from actors.planning.memory import MemoryForecast
from ops.degrees import surplus
from ops.geometry import Geometry, PixelShape
from ops.models.config import ModelConfig
from ops.units import GIB

if TYPE_CHECKING:
    from ops.models.forecast import EncoderNeed, Precision

_POOL = 1.5  # times what a block computes with that the allocator takes for its graphs (H200, four pictures of 256p)
_SLOTS = 5  # times the rows of a pass that its graphs hold beside it: in, out, the gradients of both, and small ones


def predict_dit(
    needs: Needs,
    model: ModelConfig,
    geometry: Geometry,
    clips: Sequence[PixelShape],
    degrees: Sequence[int],
    precision: Precision,
    by_frame: bool = False,
) -> None:
    """Fill in what the DiT `needs`, from passes of two sizes on one worker, one of them with the longest caption, too;
    of one size at the lowest and the highest degree, and of the smallest at the highest. `by_frame`: each frame has a
    time of its own, and with it rows of the modulation.

    Captions are of any length, and a row of text takes less than one of video (where text is only attended to, a
    thirtieth), so a line through clips with one caption would be below those with a shorter one. A rank of a bag holds
    the whole text or a part of it, by the model; the whole is what counts. Of many rows the peak is in the exchange, of
    few it comes after it, beside the gradients of a block's weights: of two lines the larger one (Wan2.1-14B in bags:
    0.670 MiB of a row; below 10,500 rows 136 MiB and 0.657 MiB of a row). The line of a bag lies above both. Degrees
    at which ranks share heads are on the same line with rows that weigh more: with the copies of keys and values the
    peak grows linearly or not at all, so what the largest of them needs is enough for the others.
    """
    from ops.models.first_frame import FirstFrame
    from ops.models.forecast import dit_need_gib
    from ops.packed.packing import Sequence as PackedSequence

    def need_gib(sequence: PackedSequence, degree: int = 1) -> float:
        return dit_need_gib(model.dit, [sequence], degree, precision)

    by_size = sorted(clips, key=lambda clip: geometry.tokens(*clip))
    t, h, w = geometry.token_grid(*by_size[-1])
    images = FirstFrame.of(model).image_tokens
    longest = max(model.text.most_tokens, 2)
    grids = [(t, h, max(w, 2)), (t, h, max(w, 2) // 2), geometry.token_grid(*by_size[0])]
    large, small, least = (PackedSequence(grid, 1, images, frame_times=by_frame) for grid in grids)
    many, few, with_text = need_gib(large), need_gib(small), need_gib(replace(small, text_tokens=longest))
    slope = (many - few) / (large.tokens - small.tokens)
    text_gib = max(0.0, with_text - few) / (longest - 1)  # of a row
    alone = NeedLine(fixed_gib=few - slope * small.tokens - text_gib, gib_per_unit=slope)
    needs.predicted["dit", SOLO], needs.text_rows[SOLO] = alone, text_gib / slope

    heads = model.dit.num_heads if model.dit.deals_heads else None  # that are dealt out over a bag
    wanted = sorted({degree for degree in degrees if degree > 1})
    bags = [degree for degree in wanted if heads is None or heads % degree == 0] or wanted[:1]
    if not bags:
        return
    rows = {degree: large.tokens / degree for degree in {bags[0], bags[-1]}}
    peaks = {degree: need_gib(large, degree) - text_gib for degree in rows}
    fixed = alone.fixed_gib
    if len(rows) > 1:  # the exchange takes a little more of each row at a higher degree
        fixed = line_through((rows[bags[-1]], rows[bags[0]]), (peaks[bags[-1]], peaks[bags[0]])).fixed_gib
    fixed = max(0.0, min(fixed, *peaks.values()))
    slope = max((peaks[degree] - fixed) / rows[degree] for degree in rows)
    if least.tokens < large.tokens:
        peak = need_gib(least, bags[-1]) - text_gib
        fixed = max(fixed, peak - slope * least.tokens / bags[-1])
    needs.predicted["dit", BAG], needs.text_rows[BAG] = NeedLine(fixed_gib=fixed, gib_per_unit=slope), text_gib / slope

    needs.num_heads, needs.copied = heads or 0, 0.0
    if heads is None:
        return
    by_surplus = sorted((surplus(heads, degree), degree) for degree in set(wanted) - set(bags))
    for share, degree in {*by_surplus[:1], *by_surplus[-1:]}:
        peak = need_gib(large, degree) - text_gib
        extra = (peak - fixed) * degree / large.tokens / slope - 1
        needs.copied = max(needs.copied, extra / share)


def with_attention_kept(needs: Needs, row_bytes: int) -> Needs:
    """What transformers need whose passes keep `row_bytes` of attention for every row, of text too."""
    found = replace(needs, predicted={}, text_rows={})
    for key, line in needs.predicted.items():
        slope = line.gib_per_unit + row_bytes / GIB
        text_gib = needs.text_rows[key[1]] * line.gib_per_unit + row_bytes / GIB
        found.predicted[key] = replace(line, gib_per_unit=slope)
        found.text_rows[key[1]] = text_gib / slope
    return found


def vae_needs(model: ModelConfig, clips: Sequence[PixelShape], device: str) -> dict[PixelShape, EncoderNeed]:
    """Need of one clip of each shape, of which some follow from others where it grows with the area."""
    from ops.models.first_frame import FirstFrame
    from ops.models.folders import needs_by_area
    from ops.models.forecast import vae_need

    frame, by_area = FirstFrame.of(model), needs_by_area(model.vae)
    found: dict[PixelShape, EncoderNeed] = {}
    whole: dict[int, tuple[EncoderNeed, int]] = {}  # frames -> what a clip of an area needs
    for frames, height, width in dict.fromkeys(clips):
        if not by_area:
            found[frames, height, width] = vae_need(model.vae, 1, frames, height, width, device, frame)
            continue
        if frames not in whole:
            whole[frames] = vae_need(model.vae, 1, frames, height, width, device, frame), height * width
        need, area = whole[frames]
        share = height * width / area
        found[frames, height, width] = replace(need, peak_gib=share * need.peak_gib, left_gib=share * need.left_gib)
    return found


def graphs_gib(
    model: ModelConfig,
    geometry: Geometry,
    clips: Sequence[PixelShape],
    sizes: MemoryForecast,
    precision: Precision,
    by_frame: bool = False,
) -> float:
    """GiB of the CUDA graphs of small passes: what one block of the largest computes with, the gradients of a block,
    and what goes into graphs and comes out of them; of each expert. As many clips of one shape as a small pass takes,
    whatever batches have."""
    from ops.models.experts import most_in_small_pass
    from ops.models.first_frame import FirstFrame
    from ops.models.forecast import dit_need_gib
    from ops.packed.packing import Sequence as PackedSequence

    text, images = model.text.most_tokens, FirstFrame.of(model).image_tokens
    shapes = [PackedSequence(geometry.token_grid(*clip), text, images, frame_times=by_frame) for clip in clips]
    passes = [(most_in_small_pass(model.dit, one), one) for one in shapes]
    count, one = max(passes, key=lambda found: found[0] * (found[1].tokens + found[1].text_tokens))
    if not count:
        return 0.0
    blocks, row_gib = sum(model.dit.block_counts), model.dit.dim * sizes.parameter_bytes / GIB
    checkpointed = replace(model.dit, gradient_checkpointing=True)
    few, more = (dit_need_gib(checkpointed, [one] * number, 1, precision) for number in (1, 2))
    inputs = blocks * count * one.tokens * row_gib  # of all blocks, which are in no graph
    computed = max(few + (count - 1) * (more - few) - inputs, 0.0)
    slots = _SLOTS * count * (one.tokens + one.text_tokens) * row_gib
    gradients = sizes.trained / blocks * sizes.parameter_bytes / GIB
    return len(model.dit.experts) * (_POOL * computed + slots) + gradients
