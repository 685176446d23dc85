"""A finished run of 30 steps as the controller would leave it, with one straggler and one lost worker; settings of
PyTorch that a test may change; output that nobody reads."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from app.settings.config import RunConfig

ROOT = Path(__file__).parent.parent.parent
SLOW_STEP, LOSS_STEP, STEPS = 12, 20, 30
EPOCH = 1_700_000_000.0  # unix seconds of the first step


def spans_of_step(step: int, start: float, workers: list[str]) -> list[dict[str, Any]]:
    """Per worker: text, vae and dit of one item, then the gradient sum. w1 is late in SLOW_STEP."""
    spans = []
    for index, worker in enumerate(workers):
        bucket, batch = ([17, 64, 96], 4) if index % 2 == 0 else ([1, 64, 96], 16)
        late = 1.5 if step == SLOW_STEP and worker == "w1" else 0.0
        times = {"text": (0.0, 0.1, 0.1), "vae": (0.1, 0.3, 0.3), "dit": (0.3, 1.0, 1.0 + late)}
        for module, (begin, planned_end, measured_end) in times.items():
            spans.append(
                {
                    "step": step,
                    "worker": worker,
                    "node": "n0",
                    "module": module,
                    "item": f"s{step}.{index}",
                    "name": f"{module} {bucket[0]}f 64x96 b{batch} sp1 s{step}",
                    "cascade": f"s{step}.{index}/{module}/0",
                    "bucket": bucket,
                    "batch": batch,
                    "degree": 1,
                    "start": start + begin,
                    "end": start + measured_end,
                    "planned_start_s": begin,
                    "planned_end_s": planned_end,
                    "step_start": start,
                    "generation": 0,
                    "phases": {"forward": 0.2, "backward": 0.4} if module == "dit" else {},
                }
            )
        begin = 1.0 + (1.5 if step == SLOW_STEP else 0.0)
        spans.append(
            {
                "step": step,
                "worker": worker,
                "node": "n0",
                "module": "finish",
                "item": "",
                "bucket": None,
                "name": f"finish s{step}",
                "cascade": "",
                "batch": 0,
                "degree": len(workers),
                "start": start + begin,
                "end": start + begin + 0.1,
                "planned_start_s": 0.0,
                "planned_end_s": 0.0,
                "step_start": start,
                "generation": 0,
                "phases": {"reduce": 0.05},
            }
        )
    return spans


@pytest.fixture
def cudnn_attention() -> Iterator[None]:
    """A process in which PyTorch takes cuDNN's attention where it is there, as it begins; afterwards as it was."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    config = RunConfig.load(ROOT / "configs" / "runs" / "demo.yaml", [f"run.dir={tmp_path}"])
    folder = tmp_path / "demo"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    now, lines, spans, events = EPOCH, [], [], []
    for step in range(STEPS):
        workers = ["w0", "w1", "w2"] if step < LOSS_STEP else ["w0", "w2"]
        seconds = 1.1 + (1.5 if step == SLOW_STEP else 0.0) + (2.0 if step == LOSS_STEP else 0.0)
        if step == LOSS_STEP:
            events.append({"time": now + 0.5, "event": "dead", "generation": 0, "worker": "w1"})
            events.append({"time": now + 0.6, "event": "end", "generation": 0, "why": "w1 died", "clean": False})
            events.append(
                {"time": now + 0.9, "event": "generation", "generation": 1, "workers": ["w0", "w2"], "why": "w1 died"}
            )
            events.append({"time": now + seconds, "event": "recovered", "generation": 1, "step": 20, "seconds": 1.5})
        spans += spans_of_step(step, now, workers)
        now += seconds
        lines.append(
            {
                "step": step,
                "time": now,
                "loss": 1.0 / (1 + step / 10),
                "grad_norm": 1.0,
                "lr": 1e-3,
                "workers": len(workers),
                "generation": int(step >= LOSS_STEP),
                "step_s": seconds,
                "data_wait_s": 0.01,
                "idle_ratio": 0.05,
                "cv_step": 0.1,
                "cv_compute": 0.2,
                "wir": 1.05,
                "tokens_per_s": 4000.0,
                "predicted_s": 1.05,
                "planning_s": 0.02,
                "loss_by_bucket": {"17x64x96": 0.9, "1x64x96": 0.7},
            }
        )
    for name, records in [("metrics", lines), ("timeline", spans), ("events", events)]:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A stream without a reader, as standard output of `heddle ... | head` with PYTHONUNBUFFERED: each line fails. For
    a test to put there by itself: pytest puts its own back after fixtures."""
    ours, theirs = os.pipe()
    os.close(ours)
    with io.TextIOWrapper(os.fdopen(theirs, "wb", 0), write_through=True) as stream:
        yield stream
