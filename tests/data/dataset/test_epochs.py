"""How often a run's steps draw its samples is foretold, and counted while it trains."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import BatchConfig, BucketsConfig, DataConfig, SegmentConfig, SourceConfig
from data.dataset.coverage import account, check_coverage
from data.dataset.dataset import Dataset
from data.dataset.epochs import forecast
from data.errors import DataError
from data.in_words import EpochForecast
from data.ledger import Ledger
from ops.geometry import Geometry

SMALL = BucketsConfig(table=("1x32x48", "9x32x48"), max_ratio_error=2.5)


def dataset(clips: Path, **changes: object) -> Dataset:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    config = DataConfig(
        sources=(source,),
        buckets=SMALL,
        items_per_step=3,
        batch=BatchConfig(memory_tokens=600, text_tokens=48),
    )
    return Dataset.open(replace(config, **changes), Geometry(), seed=0)  # type: ignore[arg-type]


def drawn(data: Dataset, steps: int) -> Counter[int]:
    return Counter(ref.source for n in range(steps) for item in data.step(n).items for ref in item.samples)


def curriculum(until: int) -> tuple[SegmentConfig, ...]:
    return (SegmentConfig(until_step=until, items_per_step=7), SegmentConfig(until_step=0))


def test_a_forecast_is_what_the_steps_draw(clips: Path) -> None:
    data = dataset(clips, segments=curriculum(20))
    found = forecast(data, 50)
    assert found.exact and found.samples == 60
    assert found.draws == drawn(data, 50).total() > 60
    assert found.epochs == pytest.approx(found.draws / 60) and found.sources == {"shards": found.epochs}


def test_a_long_run_is_told_from_a_part_of_every_segment(clips: Path) -> None:
    data = dataset(clips, segments=curriculum(150))
    exact = forecast(data, 400)
    about = forecast(data, 400, most_draws=250)
    assert exact.exact and not about.exact
    assert about.draws == pytest.approx(exact.draws, rel=0.1)
    assert forecast(data, 10**12, most_draws=250).draws > 10**12, "as long as it likes: no more is looked at"


def test_a_source_of_few_samples_and_much_weight_is_drawn_more_often(clips: Path) -> None:
    shards = SourceConfig(path=str(clips / "shards"), name="many", weight=0.25, index=str(clips / "index"))
    few = replace(shards, path=str(clips / "shards" / "00000.tar"), name="few", weight=0.75)
    data = dataset(clips, sources=(shards, few))
    found, counts = forecast(data, 80), drawn(data, 80)
    planned = [data.ledger.sources[n].planned for n in (0, 1)]
    assert found.sources == {"many": counts[0] / planned[0], "few": counts[1] / planned[1]}
    assert found.sources["few"] > 5 * found.sources["many"]
    assert f"(many {found.sources['many']:.2g}, few " in found.sentence


def test_a_forecast_reads_as_a_sentence() -> None:
    few = EpochForecast(steps=2000, draws=8000, samples=30)
    assert few.sentence == "2,000 steps draw 8,000 samples, each of the 30 about 267 times"
    many = replace(few, samples=200_000, exact=False, sources={"a": 0.04, "b": 0.041})
    assert many.sentence == "2,000 steps draw about 8,000 samples, 4% of 200,000"
    assert "0.008% of 100,000,000" in replace(few, samples=100_000_000).sentence


def test_the_epoch_of_a_step_counts_what_was_drawn_up_to_it_also_after_a_resume(clips: Path) -> None:
    data = dataset(clips)
    seen = 0
    for step in range(30):
        seen += sum(item.batch for item in data.step(step).items)
        assert data.epoch(step + 1) == pytest.approx(seen / 60)
    token = json.loads(json.dumps(data.token(12)))
    again = dataset(clips)
    again.resume(token)
    assert [again.epoch(step) for step in (12, 20)] == [data.epoch(step) for step in (12, 20)]


def test_an_account_of_a_run_ends_with_its_steps(clips: Path) -> None:
    """That of a large set would otherwise be walked for an hour, and tell of epochs that the run never sees."""
    found = account(dataset(clips), run_steps=2)
    assert found.steps == 2 and found.not_reached > 0 and found.coverage < 1
    assert found.forecast is not None and found.forecast.steps == 2
    assert account(dataset(clips)).trained == 60 and account(dataset(clips), run_steps=10**6).trained == 60


def test_sources_of_one_name_are_told_apart(clips: Path) -> None:
    shards = SourceConfig(path=str(clips / "shards"), weight=0.25, index=str(clips / "index"))
    data = dataset(clips, sources=(shards, replace(shards, weight=0.75)))
    found = forecast(data, 50).sources
    assert list(found) == ["shards (0)", "shards (1)"] and found["shards (1)"] > 2 * found["shards (0)"]
    assert list(account(data).by_source) == list(found)


@pytest.mark.parametrize(("planned", "least", "passes"), [(55, 0.55, True), (54, 0.55, False), (0, 0.0, True)])
def test_a_coverage_that_is_met_exactly_is_enough(planned: int, least: float, passes: bool) -> None:
    ledger = Ledger()
    ledger.add_indexed(100, 0)
    ledger.add_planned(planned, 0)
    if passes:
        check_coverage(ledger, least)
    else:
        with pytest.raises(DataError, match=r"data\.min_coverage asks for 55%"):
            check_coverage(ledger, least)
