from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.bench.planner import SCENARIOS
from app.cli import app
from app.inputs.data_codes import MOST_TEXT, items_from_codes, parse_codes
from ops.geometry import Geometry
from ops.typed import ConfigError

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
# The published launcher's codes of its three scenarios.
CODES = {
    "low-res": "g32b32i256f1s0",
    "mixed-res": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "video": "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
    "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1",
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_codes_give_the_tokens_of_the_scenarios(scenario: str) -> None:
    geometry = Geometry()
    (step,) = items_from_codes(CODES[scenario], 32, 1, 0, geometry)
    expected = [(batch, tokens) for ranks, batch, tokens in SCENARIOS[scenario] for _ in range(ranks)]
    assert [(i.batch, geometry.tokens(i.frames, i.height, i.width)) for i in step] == expected


def test_codes_repeat_until_all_workers_have_one() -> None:
    steps = items_from_codes("g2b3i256f1s0,g1b1i512f85s1", 6, 2, 0, Geometry())
    assert [[i.height for i in step] for step in steps] == [[256, 256, 512] * 2] * 2
    assert len({i.id for step in steps for i in step}) == 12
    assert steps == items_from_codes("g2b3i256f1s0,g1b1i512f85s1", 6, 2, 0, Geometry())
    texts = [i.text_tokens for step in items_from_codes("g8b16i256f1s0", 8, 20, 1, Geometry()) for i in step]
    assert min(texts) >= 0 and max(texts) <= MOST_TEXT and abs(sum(texts) / len(texts) - 196) < 10


def test_a_video_has_a_latent_frame_for_3_4_of_its_own() -> None:
    frames = [code.latent_frames for code in parse_codes("g1b1i256f85s1,g1b1i256f85s0,g1b1i256f1s1")]
    assert frames == [25, 85, 1]


@pytest.mark.parametrize("text", ["g4n8", "g0b1i256f1s0", "g1b1i256f1s2", "g1b1i256f1s0,", "x"])
def test_what_is_no_code_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not gWORKERSbBATCHiPIXELSfFRAMESs0 or s1, for example g16b4"):
        parse_codes(text)


def test_codes_that_do_not_fit_cluster_or_model_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="is for 3 workers, and the cluster's 8 are no multiple of them; give --cluster 1x3 or"
    ):
        items_from_codes("g3b1i256f1s0", 8, 1, 0, Geometry())
    with pytest.raises(ConfigError, match="pictures of 250 pixels do not fit the model"):
        items_from_codes("g1b1i250f1s0", 1, 1, 0, Geometry())


@pytest.mark.parametrize("options", [["--cluster", "1x5"], ["--set", "workers.cluster=1x5"]])
def test_workers_that_do_not_fit_codes_are_refused_before_the_model_is_looked_at(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.models.folders.resolve", lambda _: pytest.fail("looked at the model"))
    result = CliRunner().invoke(app, ["plan", "--config", str(DEMO), "--codes", "g2b4i256f1s0", *options])
    assert isinstance(result.exception, ConfigError) and "the cluster's 5 are no multiple" in str(result.exception)


def test_the_plan_command_takes_codes_for_the_model_of_a_config() -> None:
    options = ["plan", "--config", str(DEMO), "--codes", "g2b4i256f1s0,g2b1i512f17s1", "--cluster", "1x4"]
    result = CliRunner().invoke(app, [*options, "--steps", "2", "--strategy", "knapsack", "--budget", "0.01"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "8 items in 2 steps on 4 workers" in result.output
    bare = CliRunner().invoke(app, [*options[:-2], "--steps", "2", "--strategy", "knapsack", "--budget", "0.01"])
    assert bare.exit_code == 0 and "8 items in 2 steps on 4 workers" in bare.output, "as many as the codes say"
    both = CliRunner().invoke(app, [*options, "--share", "17x480x832=0.5"])
    assert isinstance(both.exception, ConfigError) and "--codes makes a workload" in str(both.exception)
