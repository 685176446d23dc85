"""`heddle data synth DIR`: make the demo dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from app.settings.terminal import say
from data.config import SourceConfig
from ops.counted import counted
from ops.units import MIB


def synth(
    folder: Path,
    clips: int | None = None,
    images: int | None = None,
    shards: int | None = None,
    seed: int = 0,
    sizes: Sequence[tuple[int, int]] = (),
    frames: Sequence[int] = (),
    koala: bool = True,
) -> dict[str, object]:
    """Write WebDataset shards and a Koala-36M style table of synthetic clips, say what was made, return the summary.

    Raises ValueError when `folder` already holds either.
    """
    from data.tools.synthetic import SynthConfig, synthesize

    base = SynthConfig()
    config = SynthConfig(
        clips=base.clips if clips is None else clips,
        images=base.images if images is None else images,
        shards=shards or base.shards,
        seed=seed,
        sizes=tuple(sizes) or base.sizes,
        frames=tuple(frames) or base.frames,
        koala=koala,
    )
    summary = synthesize(folder, config)
    say(
        f"{summary['clips']} clips and {summary['images']} still images in {counted(config.shards, 'shard')}: "
        f"{summary['shards']} ({int(str(summary['bytes'])) / MIB:.1f} MiB)",
        sys.stdout,
    )
    if summary["koala"]:
        say(f"the clips as a Koala-36M table: {summary['koala']}", sys.stdout)
    return summary


def make_missing(sources: Iterable[SourceConfig]) -> None:
    """Make the set of every synthetic source whose folder is not there, such as on a cluster that runs the demo."""
    for source in sources:
        shards = Path(source.path.partition("/shards/")[0]) / "shards"
        if source.synthetic and not shards.exists():
            try:
                synth(shards.parent)
            except ValueError:
                if not shards.exists():  # else another start has made it meanwhile
                    raise
