"""Lines of JSON in a file that another process writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[dict[str, Any]]:  # of several programs, each with keys of its own
    """Whole lines of a file that may be written at this moment, or not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
