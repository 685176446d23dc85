"""What commands say beside what they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

LINES = """
import logging
from app.settings.terminal import set_up_logging
set_up_logging(debug={})
logging.getLogger("data.dataset").info("%s to read", 3)
logging.getLogger("data.dataset").warning("%s is gone", "a")
logging.getLogger("others").info("unheard")
"""


@pytest.mark.parametrize(
    ("debug", "told"),
    [
        (False, ["3 to read", "WARNING data.dataset: a is gone"]),
        (True, ["INFO data.dataset: 3 to read", "WARNING data.dataset: a is gone"]),
    ],
)
def test_what_is_told_is_a_sentence_and_a_warning_says_whose_it_is(debug: bool, told: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LINES.format(debug)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == told
