"""What `heddle check` does with what it has seen: a table, what is wrong, and an exit code."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from actors.outcome import Exit
from actors.state.checkpoint_files import newest_step
from app.check.facts import MARKED, GpuFacts, RunPaths
from app.check.findings import ClusterFacts, Finding, findings
from app.check.looks import look_at
from app.inputs.checkpoints import checkpoint_folder
from app.settings.config import RunConfig
from app.settings.run_folder import run_dir
from data.storage import is_local
from ops.counted import counted
from ops.listing import nearest_folder
from ops.typed import ConfigError


def run_check(config: RunConfig | None, *, as_json: bool = False) -> int:
    """Looks at the cluster to which Ray is connected, and prints what was found. Returns the exit code: 1 where a run
    on it would end, hang or be slow. `config` has absolute paths."""
    with marked(config) as paths:
        seen = look_at(paths, lambda part: None if as_json else print(f"looking at {part}", flush=True))
    found = findings(seen)
    if as_json:
        print(json.dumps({"findings": [asdict(one) for one in found], "seen": asdict(seen)}, indent=1, allow_nan=False))
    else:
        print("\n".join([*table(seen), *sentences(found, config)]))
    return Exit.FAILURE if any(one.fatal for one in found) else Exit.OK


@contextmanager
def marked(config: RunConfig | None) -> Iterator[RunPaths]:
    """The local files of a run, and for so long a marker in its folder, or in the nearest one above that exists, and in
    that of its cache, where there is one. Raises ConfigError where there can be none in the run's."""
    if config is None:
        yield RunPaths()
        return
    model, cache = config.model, config.data.cache
    paths = (model.dit.path, model.vae.path, model.text.path, None if model.image is None else model.image.path)
    folders = [path for path in paths if path is not None]
    if config.train.init_from and newest_step(run_dir(config)) == -1:  # a run with a state does not read it
        folders.append(str(checkpoint_folder(Path(config.train.init_from))))
    sources = (*config.data.sources, *(config.validation.sources if config.validation.every else ()))
    with ExitStack() as gone:
        try:
            marker = gone.enter_context(_marker_in(config.run.dir))
        except OSError as error:
            raise ConfigError(
                f"run.dir {config.run.dir} cannot be written ({error.strerror}). Name another folder."
            ) from None
        cache_marker = ""
        if cache.only and os.path.isdir(cache.path):
            with suppress(OSError):  # a cache that this user may only read is there or not
                cache_marker = gone.enter_context(_marker_in(cache.path))
        yield RunPaths(
            marker=marker,
            run_dir=config.run.dir,
            cache_marker=cache_marker,
            cache=cache.path if cache.only else "",  # else each node may have its own
            sources=tuple(source.path for source in sources if not source.synthetic),
            media=tuple(dict.fromkeys(source.media for source in sources if source.media and is_local(source.media))),
            folders=tuple(dict.fromkeys(folders)),
        )


@contextmanager
def _marker_in(folder: str) -> Iterator[str]:
    marker = nearest_folder(Path(folder)) / f"{MARKED}{uuid.uuid4().hex}"
    marker.write_text("", encoding="utf-8")
    try:
        yield str(marker)
    finally:
        with suppress(OSError):
            os.unlink(marker)


def table(seen: ClusterFacts) -> list[str]:
    """A line for each node, and one for the network."""
    lines = []
    for node in seen.nodes:
        gpus = [gpu for gpu in seen.gpus if gpu.host == node.host]
        disk = "" if node.disk_gib is None else f", disk {node.disk_gib:,.0f} GiB"
        shared = "" if node.shared_gib is None else f", /dev/shm {node.shared_gib:,.0f} GiB"
        lines.append(
            f"{node.host:<20} {_gpus(gpus)}{counted(node.cores, 'core')}, memory {node.room_gib:,.0f} GiB"
            f"{shared}{disk} free, torch {node.software.get('torch', 'none')}, ray {node.software.get('ray', 'none')}"
        )
    if seen.talk is not None:
        what = "GPUs" if seen.gpus else "nodes"
        lines.append(f"{'a sum':<20} over {seen.talk.members} {what}: {seen.talk.gb_per_s:.2f} GB/s from each")
    return lines


def _gpus(gpus: list[GpuFacts]) -> str:
    usable = [gpu for gpu in gpus if not gpu.unusable]
    if not usable:
        return ""
    speeds, names = [gpu.tflops for gpu in usable], sorted({gpu.name for gpu in usable})
    return f"{len(usable)} x {' and '.join(names)} of {min(speeds):.0f} to {max(speeds):.0f} TFLOP/s, "


def sentences(found: list[Finding], config: RunConfig | None) -> list[str]:
    """What is wrong, and what to look at next."""
    lines = [f"{'wrong' if one.fatal else 'note'}: {one.text}." for one in found]
    if not any(one.fatal for one in found):
        lines.append(
            "nothing is wrong"
            if config is not None
            else "nothing is wrong; --config RUN.yaml looks at a run's files, too"
        )
    return lines
