"""`heddle bench halves`: a layer on a device and a link of given speeds."""

from __future__ import annotations

from collections import Counter

import pytest

from app.bench.halves import HALVES, WHOLE, LayerSeconds, Stretch, drawn, measured, run
from ops.typed import ConfigError


def test_each_half_is_attended_and_carried_by_itself() -> None:
    found = measured(attention_s=0.06, exchange_s=0.03, rounds=1)
    assert found.keys() == {WHOLE, HALVES}
    for way, one in found.items():
        times = 2 if way == HALVES else 1
        seen = Counter((stretch.lane, stretch.name) for stretch in one.timeline)
        assert seen == {
            ("link", "q, k, v"): 2 * times,  # their gradients come home as they went
            ("link", "result"): 2 * times,
            ("device", "attention"): times,
            ("device", "its backward"): times,
        }
        computed = sum(s.end_s - s.start_s for s in one.timeline if s.lane == "device")
        assert computed == pytest.approx(3 * 0.06)
        assert sum(s.end_s - s.start_s for s in one.timeline if s.lane == "link") == pytest.approx(2 * (0.03 + 0.01))
        assert one.exposed_s >= one.least_exposed_s - 1e-6 and one.seconds >= computed + one.least_exposed_s - 1e-6
    assert found[WHOLE].least_exposed_s == pytest.approx(0.08) == 2 * found[HALVES].least_exposed_s


def test_a_timeline_has_a_line_for_device_and_link() -> None:
    stretches = [("link", 0.0, 0.25), ("device", 0.25, 0.75), ("link", 0.75, 1.0)]
    one = LayerSeconds(
        way=WHOLE,
        exchange_s=0.25,
        seconds=1.0,
        exposed_s=0.5,
        timeline=tuple(Stretch(lane=lane, name="", start_s=start, end_s=end) for lane, start, end in stretches),
    )
    device, link = drawn(one)
    assert device.split() == ["device", "." * 18 + "#" * 36 + "." * 18]
    assert link.split() == ["link", "#" * 18 + "." * 36 + "#" * 18]


@pytest.mark.parametrize("shares", ["0.1;0.3", "0", "0.3,-1"])
def test_shares_that_are_no_numbers_above_0_are_refused(shares: str) -> None:
    with pytest.raises(ConfigError, match=f"--shares {shares} is not a list of numbers above 0"):
        run(attention=0.1, shares=shares, rounds=1)


def test_a_table_and_a_picture_of_each_way_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run(attention=0.02, shares="0.5", rounds=1)
    out = capsys.readouterr().out
    assert [line.split(" | ")[1] for line in out.splitlines() if line.startswith("| 0.50")] == [WHOLE, HALVES]
    assert out.count(" device ") == out.count("   link ") == 2
