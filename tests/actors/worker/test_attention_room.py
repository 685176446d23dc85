"""When a cascade keeps what attention gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.plan.costs.needs import NeedLine, Needs, footprint
from actors.plan.costs.point import Samples
from actors.plan.places import AttentionMemory
from actors.planning.predicted_needs import with_attention_kept
from actors.worker.attention_room import MOST_SIZES, SHARE, WORTH_ROWS, AttentionRoom
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.units import GIB

WAN = WanConfig(num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960, gradient_checkpointing=True)
LONG = Layout([Sequence((21, 30, 52), 512)])  # 480p81
SHORT = Layout([Sequence((1, 30, 52), 512)] * 40)
KEPT_GIB = 30 * 2 * (32760 + 512) * 12 * (2 * 128 + 4) / GIB  # 5.8; 5.5 were measured on an H200


def room(setting: AttentionMemory = "auto", cuda: bool = True) -> AttentionRoom:
    return AttentionRoom.of(WAN, setting, 2, cuda)


def test_it_is_kept_from_the_second_pass_on_where_there_is_room() -> None:
    one = room()
    assert not one.begin(LONG, 100.0) and one.end(20.0) == 20.0
    assert one.begin(LONG, 20.0 + KEPT_GIB / SHARE + 0.01)
    assert one.end(20.0 + KEPT_GIB) == 20.0, "plans are told what it needs without"
    assert not one.begin(LONG, 20.0 + KEPT_GIB / SHARE - 0.01), "there is less room now"


def test_another_size_is_met_for_the_first_time() -> None:
    one = room()
    one.begin(LONG, 100.0)
    one.end(20.0)
    assert not one.begin(Layout([Sequence((21, 30, 52), 512)], degree=2), 100.0)


def test_short_sequences_are_not_worth_it_however_many() -> None:
    one = room()
    assert max(SHORT.lengths) < WORTH_ROWS < max(LONG.lengths)
    one.begin(SHORT, 100.0)
    one.end(20.0)
    assert not one.begin(SHORT, 100.0)


@pytest.mark.parametrize("limit", [None, 100.0])
def test_a_cpu_keeps_it_only_where_it_is_told_to(limit: float | None) -> None:
    for setting, kept in (("auto", False), ("recomputed", False), ("kept", True)):
        one = room(setting, cuda=False)
        one.begin(LONG, limit)
        one.end(1.0)
        assert one.begin(LONG, limit) is kept


def test_an_allocator_that_had_to_try_again_is_not_asked_twice() -> None:
    one = room()
    one.begin(LONG, 100.0)
    one.end(20.0)
    assert one.begin(LONG, 60.0)
    one.end(60.0)
    assert not one.begin(LONG, 100.0)


def test_what_is_always_kept_is_part_of_what_a_pass_needs() -> None:
    one = room("kept")
    one.begin(LONG, 100.0)
    assert one.end(26.0) == 26.0


@pytest.mark.parametrize("degree", [1, 2])
def test_plans_count_it_for_video_and_text_where_it_is_always_kept(degree: int) -> None:
    """A rank of a bag has its part of the video's rows, and all of the text's."""
    kind, row_bytes = ("solo", "bag")[degree - 1], 1 << 20
    plain = Needs(predicted={("dit", kind): NeedLine(fixed_gib=2.0, gib_per_unit=1e-3)}, text_rows={kind: 0.25})
    clips = [Samples(count=3, frames=81, height=480, width=832, text_tokens=512)]
    found = [
        needs.gib(footprint("dit", clips, degree, lambda *clip: 32760, needs))
        for needs in (plain, with_attention_kept(plain, row_bytes))
    ]
    assert found[0] is not None and found[1] is not None
    assert found[1] - found[0] == pytest.approx(3 * (32760 / degree + 512) * row_bytes / GIB)


def test_memory_that_runs_out_with_it_ends_it() -> None:
    one = room("kept")
    assert one.begin(LONG, 100.0)
    one.give_up()
    one.begin(LONG, 100.0)
    assert not one.keeps and one.end(20.0) == 20.0
    assert not one.begin(LONG, 100.0)


def test_without_gradient_checkpointing_there_is_nothing_to_keep() -> None:
    plain = WanConfig(num_layers=2, num_heads=2, head_dim=16, ffn_dim=64)
    assert not AttentionRoom.of(plain, "kept", 2, True).begin(LONG, 100.0)


def test_text_that_goes_through_attention_with_the_video_is_one_call() -> None:
    joint = HunyuanConfig(num_layers=2, num_single_layers=3, num_heads=4, head_dim=8, gradient_checkpointing=True)
    assert AttentionRoom.of(joint, "auto", 2, True).gib_per_row * GIB == 5 * 4 * (8 * 2 + 4)


def test_an_image_that_blocks_attend_to_is_a_call_more() -> None:
    from_image = replace(WAN, first_frame="channels", image_dim=1280)
    assert AttentionRoom.of(from_image, "auto", 2, True).gib_per_row == pytest.approx(room().gib_per_row * 3 / 2)


def test_a_pass_that_failed_keeps_nothing_for_what_comes_before_the_next() -> None:
    one = room("kept")
    for ended in (lambda: one.end(20.0), one.failed, one.give_up):
        one.begin(LONG, 100.0)
        ended()
        assert not one.keeps


def test_captions_of_any_length_do_not_fill_memory_and_sizes_that_come_again_are_remembered() -> None:
    one = room()
    for text in range(2 * MOST_SIZES):
        one.begin(Layout([Sequence((1, 2, 2), 1 + text)]), None)
        one.end(1.0)
        if text % 1000 == 0:
            one.begin(LONG, None)
            one.end(20.0)
    assert len(one._needs) == MOST_SIZES
    assert one.begin(LONG, 100.0), "it came among the last ones"
