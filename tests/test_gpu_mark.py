"""`pytest -m gpu` runs where torch, triton, numpy, pyyaml and pytest are all that is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.few_packages import few_packages

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(600)
def test_gpu_tests_are_collected_with_few_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(command, cwd=ROOT, env=few_packages(tmp_path), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    ran = re.search(r"(\d+) (skipped|passed)", done.stdout)
    assert "error" not in done.stdout and ran and int(ran[1]) >= 29, done.stdout
