"""Clips and pictures of a run inside the page, with their prompts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from app.records.rundir import RunDir
from ops.counted import counted

MAX_MEDIA_BYTES = 24 << 20  # clips beyond this are named, not embedded
MAX_NAMED = 20  # of these: a month of samples every 100 steps has thousands


def samples_html(run: RunDir, most_bytes: int = MAX_MEDIA_BYTES) -> str:
    """Clips play in place; a picture beside a clip of the same name is its contact sheet and shown under it."""
    figures, left, named, unnamed = [], most_bytes, 0, 0
    files, config_prompts = run.samples(), run.prompts()
    clips = {path: None for path in files if path.suffix == ".mp4"}
    alone = [path for path in files if path.suffix != ".mp4" and path.with_suffix(".mp4") not in clips]
    for path in [*clips, *alone]:
        media = [path, *(p for p in (path.with_suffix(".png"),) if p != path and p.is_file())]
        size = sum(p.stat().st_size for p in media)
        if size > left and named == MAX_NAMED:
            unnamed += 1
            continue
        caption = escape(_caption(path, config_prompts))
        if size > left:
            named += 1
            figures.append(f"<figure><figcaption>{caption} (in samples/, too large to embed)</figcaption></figure>")
            continue
        left -= size
        sheet = " class='sheet'" if path.suffix != ".mp4" else ""
        figures.append(f"<figure{sheet}>{''.join(_embed(p) for p in media)}<figcaption>{caption}</figcaption></figure>")
    more = f"<p class='soft'>{counted(unnamed, 'more file')} in samples/.</p>" if unnamed else ""
    return f"<div class='clips'>{''.join(figures)}</div>{more}" if figures else ""


def _caption(path: Path, config_prompts: Sequence[str]) -> str:
    """NAME.json lists the prompts of NAME-00.mp4, NAME-01.mp4 and so on, or the one of NAME.mp4.

    Without that file step-60-01 is taken for prompt number 1 of the config, drawn at step 60. A contact sheet has no
    caption but its name.
    """
    prompts: Sequence[str]
    name, _, number = path.stem.rpartition("-")
    if not number.isdecimal() or path.with_suffix(".json").is_file():
        name, number = path.stem, ""
    if (listed := path.with_name(f"{name}.json")).is_file():
        prompts = _listed(listed)
    elif match := re.fullmatch(r"(step-\d+)(?:-(\d+))?", path.stem):
        name, number, prompts = match[1], match[2] or "", config_prompts
    else:
        return path.stem
    known = 1 < len(prompts) > int(number) if number else path.suffix == ".mp4" and len(prompts) == 1
    return f"{name}: {prompts[int(number or 0)]}" if known else path.stem


def _listed(path: Path) -> list[str]:
    """The prompts of a file; none where it is cut, or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return list(map(str, found)) if isinstance(found, list) else []


def _embed(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    if path.suffix == ".mp4":
        played = "autoplay loop muted playsinline controls"
        return f"<video {played} aria-label='{escape(path.stem)}' src='data:video/mp4;base64,{data}'></video>"
    return f"<img alt='{escape(path.stem)}' src='data:image/{path.suffix[1:]};base64,{data}'>"
