"""docker/prometheus/heddle.rules.yaml: alerts of gauges and events that there are, which fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.records.events import KINDS
from app.records.alerts import ALERTS
from app.records.metrics import TAGS
from app.records.ray_gauges import CHECKPOINT, EVENT_TIME, SETTINGS, gauge_of

RULES = Path(__file__).parents[2] / "docker" / "prometheus" / "heddle.rules.yaml"


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def test_alerts_ask_for_gauges_and_events_that_there_are() -> None:
    gauges = {gauge_of(tag)[0] for tag in TAGS.values()} | {"heddle_step", EVENT_TIME}
    gauges |= {gauge_of(tag)[0] for tag in (CHECKPOINT, *(tag for tag, *_ in SETTINGS))}
    for name, asked in rules().items():
        assert set(re.findall(r"ray_(heddle_\w+)", asked)) <= gauges, name
        assert set(re.findall(r'of!?="(\w+)"', asked)) <= {kind.event for kind in ALERTS}, name


def test_what_somebody_should_look_at_is_said_in_words() -> None:
    assert set(ALERTS) <= set(KINDS.values()) and len(set(ALERTS)) == len(ALERTS)
    assert all("describe" in vars(kind) for kind in ALERTS)


def series(name: str, values: str, of: str = "", worker: str = "a1") -> dict[str, str]:
    """A gauge of the process that Ray calls `worker`: of a controller that is started again it is another one."""
    return {"series": f'ray_{name}{{run="demo", of="{of}", WorkerId="{worker}"}}', "values": values}


STEPS = series("heddle_step", "0+1x180")
EVERY = series("heddle_checkpoint_every", "10+0x180")
WANTED = series("heddle_run_steps", "1000+0x10 stale")
# what Prometheus saw once a minute, when it is asked, and whether the alert fires then
CASES = {
    "HeddleNoFirstStep": ("HeddleNoFirstStep", [WANTED], "75m", True),
    "HeddleNoFirstStep has just begun": ("HeddleNoFirstStep", [series("heddle_run_steps", "9+0x90")], "50m", False),
    "HeddleNoFirstStep has made it": (
        "HeddleNoFirstStep",
        [series("heddle_run_steps", "9+0x90"), series("heddle_step", "_x50 0 stale")],
        "90m",
        False,
    ),
    "HeddleNoStep stands": ("HeddleNoStep", [series("heddle_step", "0+1x10 10+0x60")], "60m", True),
    "HeddleNoStep goes on": ("HeddleNoStep", [series("heddle_step", "0+1x100")], "60m", False),
    "HeddleNoStep has just begun": ("HeddleNoStep", [series("heddle_step", "_x50 0+0x10")], "60m", False),
    "HeddleNoStep has ended": ("HeddleNoStep", [series("heddle_step", "0+1x10 10+0x29 stale")], "45m", False),
    "HeddleNoStep stands, as often as its controller starts": (
        "HeddleNoStep",
        [series("heddle_step", "10+0x40 stale"), series("heddle_step", "_x45 10+0x20", worker="b2")],
        "60m",
        True,
    ),
    "HeddleNoStep is resumed": (
        "HeddleNoStep",
        [series("heddle_step", "10+0x10 stale"), series("heddle_step", "_x50 10+1x20", worker="b2")],
        "60m",
        False,
    ),
    "HeddleEnded": ("HeddleEnded", [series("heddle_step", "0+1x10 stale")], "22m", True),
    "HeddleEnded goes on": ("HeddleEnded", [series("heddle_step", "0+1x60")], "40m", False),
    "HeddleEnded is started again": (
        "HeddleEnded",
        [series("heddle_step", "0+1x10 stale"), series("heddle_step", "_x16 11+1x20", worker="b2")],
        "22m",
        False,
    ),
    "HeddleUnfinished": ("HeddleUnfinished", [series("heddle_step", "0+1x10 stale"), WANTED], "30m", True),
    "HeddleUnfinished since days": ("HeddleUnfinished", [series("heddle_step", "0+1x10 stale"), WANTED], "60h", True),
    "HeddleUnfinished goes on": ("HeddleUnfinished", [series("heddle_step", "0+1x60"), WANTED], "30m", False),
    "HeddleUnfinished is started again": (
        "HeddleUnfinished",
        [series("heddle_step", "0+1x10 stale"), series("heddle_step", "_x40 5+1x20", worker="b2"), WANTED],
        "45m",
        False,
    ),
    "HeddleUnfinished has finished": (
        "HeddleUnfinished",
        [series("heddle_step", "989+1x10 stale"), series("heddle_run_steps", "1000+0x10 stale")],
        "60m",
        False,
    ),
    "HeddleUnfinished was not scraped at last": (
        "HeddleUnfinished",
        [series("heddle_step", "9985+1x10 stale"), series("heddle_run_steps", "10000+0x10 stale")],
        "60m",
        False,
    ),
    "HeddleEnded is long ago": ("HeddleEnded", [series("heddle_step", "0+1x10 stale")], "60m", False),
    "HeddleStepsComputedAgain by a controller that is started again": (
        "HeddleStepsComputedAgain",
        [series("heddle_step", "0+1x20 stale"), series("heddle_step", "_x23 5+1x60", worker="b2")],
        "25m",
        True,
    ),
    "HeddleStepsComputedAgain has ended": (
        "HeddleStepsComputedAgain",
        [series("heddle_step", "0+1x20 5 6 stale")],
        "25m",
        False,
    ),
    "HeddleStepsComputedAgain": ("HeddleStepsComputedAgain", [series("heddle_step", "0+1x20 5+1x60")], "25m", True),
    "HeddleEvent": ("HeddleEvent", [series(EVENT_TIME, "1200+0x60", "checkpoint_failed")], "30m", True),
    "HeddleEvent is seen for an hour": (
        "HeddleEvent",
        [series(EVENT_TIME, "1200+0x90", "checkpoint_failed")],
        "75m",
        True,
    ),
    "HeddleEvent is long ago": ("HeddleEvent", [series(EVENT_TIME, "1200+0x90", "checkpoint_failed")], "85m", False),
    "HeddleNoCheckpoint": (
        "HeddleNoCheckpoint",
        [STEPS, series("heddle_checkpoint_step", "-1+0x9 9+0x99"), EVERY],
        "40m",
        True,
    ),
    "HeddleNoCheckpoint while the next one is written": (
        "HeddleNoCheckpoint",
        [STEPS, series("heddle_checkpoint_step", "-1+0x9 9+0x10 19+0x99"), EVERY],
        "35m",
        False,
    ),
    "HeddleNoCheckpoint is asked for": (
        "HeddleNoCheckpoint",
        [STEPS, series("heddle_checkpoint_step", "-1+0x99"), series("heddle_checkpoint_every", "0+0x99")],
        "90m",
        False,
    ),
    "HeddleEvent has its own": ("HeddleEvent", [series(EVENT_TIME, "1200+0x60", "skipped")], "30m", False),
    "HeddleStepsSkipped": (
        "HeddleStepsSkipped",
        [series(EVENT_TIME, "60 600 1200 1800+0x60", "skipped"), STEPS],
        "30m",
        True,
    ),
    "HeddleStepsSkipped has ended": (
        "HeddleStepsSkipped",
        [series(EVENT_TIME, "60 600 1200 1800 1800 stale", "skipped"), series("heddle_step", "0+1x4 stale")],
        "30m",
        False,
    ),
    "HeddleGenerationsChange": (
        "HeddleGenerationsChange",
        [series("heddle_elastic_generation", "0+1x8 8+0x60"), STEPS],
        "40m",
        True,
    ),
    "HeddleFewerWorkers": ("HeddleFewerWorkers", [series("heddle_elastic_workers", "8+0x60 4+0x120")], "125m", True),
    "HeddleFewerWorkers for a moment": (
        "HeddleFewerWorkers",
        [series("heddle_elastic_workers", "8+0x60 4+0x10 8+0x120")],
        "125m",
        False,
    ),
    "HeddleWaitsForData": (
        "HeddleWaitsForData",
        [series("heddle_perf_data_wait_s", "1+0x120"), series("heddle_perf_step_time_s", "5+0x120"), STEPS],
        "60m",
        True,
    ),
    "HeddleFewerWorkers than before its controller was started again": (
        "HeddleFewerWorkers",
        [
            series("heddle_elastic_workers", "8+0x30 stale"),
            series("heddle_elastic_workers", "_x35 4+0x120", worker="b2"),
        ],
        "125m",
        True,
    ),
    "HeddleWaitsForData has ended": (
        "HeddleWaitsForData",
        [
            series("heddle_perf_data_wait_s", "1+0x60 stale"),
            series("heddle_perf_step_time_s", "5+0x60 stale"),
            series("heddle_step", "0+1x60 stale"),
        ],
        "65m",
        False,
    ),
    "HeddleSlowerThanPlanned": (
        "HeddleSlowerThanPlanned",
        [series("heddle_plan_predicted_s", "2+0x120"), series("heddle_perf_step_time_s", "5+0x120"), STEPS],
        "90m",
        True,
    ),
}


def test_every_alert_is_tried() -> None:
    assert {alert for alert, *_ in CASES.values()} == set(rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
@pytest.mark.parametrize("case", CASES)
def test_an_alert_fires_when_it_should(case: str, tmp_path: Path) -> None:
    alert, seen, at, fires = CASES[case]
    expr = "count(ALERTS" + f'{{alertname="{alert}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    asked = {"expr": expr, "eval_time": at, "exp_samples": samples}
    trial = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": seen, "promql_expr_test": [asked]}],
    }
    file = tmp_path / "trial.yaml"
    file.write_text(yaml.safe_dump(trial))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
