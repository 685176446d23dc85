"""Every event the controller writes is either told in a line or knowingly left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.events import FATES, describe

ACTORS = Path(__file__).parent.parent.parent / "actors"
LEFT_OUT = {"end", "stack"}  # the next generation tells it; a stack is read in the file

DETAILS = {
    "worker": "w1",
    "host": "h",
    "generation": 2,
    "workers": ["w0"],
    "step": 4,
    "seconds": 1.5,
    "why": "it died",
    "detail": "waiting for w1",
    "to_step": 3,
    "lost_steps": 2,
    "loss": None,
    "grad_norm": None,
    "from_step": 0,
    "origin": "new",
    "target": 3,
    "code": 75,
    "mib_per_keeper": 1.5,
    "keepers": 2,
    "keeper": "run/keeper/a",
    "silent": ["run/keeper/a"],
    "repairs": 3,
    "mib_needed": 9,
    "mib_room": 1,
    "folder": "step-9",
    "speed": {"w0": 1.0},
}


def test_events_of_the_controller_have_words() -> None:
    sources = "".join(path.read_text() for path in ACTORS.rglob("*.py"))
    written = set(re.findall(r"(?:_event|_tell)\(\s*\"(\w+)\"", sources))
    assert {"generation", "dead", "recovered"} <= written
    for name in written - LEFT_OUT:
        assert describe({"event": name, **DETAILS}), f"event {name} has no words"


@pytest.mark.parametrize(("name", "fate"), FATES.items())
def test_a_worker_and_its_fate_make_a_sentence(name: str, fate: str) -> None:
    assert describe({"event": name, "worker": "w1"}) == f"worker w1 {fate}"


def test_a_fallback_names_the_steps_that_run_again() -> None:
    assert describe({"event": "fallback", "to_step": 3, "lost_steps": 2}).endswith("steps 4 to 5 run again")
