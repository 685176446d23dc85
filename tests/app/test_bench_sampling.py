"""What `heddle bench sampling` counts, by the lines that are printed while clips are made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.bench import sampling
from app.bench.sampling import WayTimes, table
from app.sampling.ways import BagWay
from app.settings.prompt_line import PromptLine, text_of
from tests.app.test_sample import tiny_run, write_checkpoint


def test_clips_count_from_the_moment_at_which_workers_are_ready() -> None:
    """The first worker makes a clip while the others still load."""
    times = WayTimes(way="apart")
    lines = [
        (3.0, "1/5 clips, 0:00:09 left"),
        (4.0, "note: 3 worker(s) have loaded the model"),
        (6.0, "3/5 clips, 0:00:04 left"),
        (10.0, "5/5 clips, 0:00:00 left"),
        (10.1, "workers computed 99%, 98%, 97% of the 8.0 s until the last prompt was given out"),
    ]
    for now, line in lines:
        times.hear(line, now)
    assert times.clips_s == [3.0, 6.0, 6.0, 10.0, 10.0]
    assert times.per_minute == pytest.approx(60 * 4 / 6) and times.first_s == 2.0


def test_the_table_has_what_a_bag_was_expected_to_take() -> None:
    times = WayTimes(way="two halves")
    times.hear(f"note: each clip is made by {BagWay(bags=2, size=1, step_s=0.0125).describe()}", 1.0)
    times.hear("1/1 clips, 0:00:00 left", 1.5)
    assert table([times], steps=20).splitlines()[1].split() == ["two", "halves", "120.0", "0.50", "s", "0.25", "s"]


KEPT = {
    "a cat --w 832 --d 3": "a cat",
    "a dog --styled like this": "a dog",
    "a door \u2014w 64 by night": "a door",
    "two -- dashes": "two -- dashes",
}


def test_prompts_that_an_earlier_run_has_kept_are_clips_of_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run()
    write_checkpoint(tmp_path / "run", replace(config, sample=replace(config.sample, prompts=tuple(KEPT))))
    asked: list[list[str]] = []

    def timed(way: Any, job: Any, prompts: Sequence[str], *more: Any) -> WayTimes:
        asked.append(list(prompts))
        job.settings.of_each(prompts)
        return WayTimes(way=way, ready_s=0.0, clips_s=[1.0])

    monkeypatch.setattr(sampling, "_timed", timed)
    monkeypatch.setattr("app.run.borrowed_ray.borrowed_ray", lambda *given: nullcontext())
    sampling.run(tmp_path / "run", prompts=5, device="cpu")
    assert all(texts == [*KEPT.values(), "a cat"] for texts in asked) and len(asked) >= 2
    assert "clips/minute" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["a cat --w 832 --d 3", "--w 64", "a cat", " a cat"])
def test_the_text_of_a_line_is_what_its_options_leave(line: str) -> None:
    assert text_of(line) == PromptLine.of(line).text
