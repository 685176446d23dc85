"""`python -m app.bench.gpu`: measures every figure that is promised for a GPU, in one call on a machine that has one.

    python -m app.bench.gpu                         # nine minutes on the GPU, most valuable first
    python -m app.bench.gpu --out DIR --minutes 5   # the same folder again: goes on where it stopped
    python -m app.bench.gpu --only step. ceilings   # what begins with these, in this order
    python -m app.bench.gpu --rehearse              # all of it, small, on the CPU

Needs torch, triton, numpy, pyyaml and this tree; no Ray, no PyAV, no Diffusers (without it the VAE is left out). DIR
gets results.jsonl, a line per measurement as it comes, report.md with the targets and with what streams did beside
each other, and timelines/ with the traces of that. A measurement that kills the process or its device, or has taken
four times as long as expected and a minute, is a failure by name, and a fresh process goes on after it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app.bench.gpu.supervise import AGAIN, interrupted_once, leave_for_another, supervised
from ops.code_path import ROOT

if TYPE_CHECKING:
    from app.bench.gpu.lines import Facts

USAGE, FAILED = 2, 1
LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)


def main(arguments: list[str]) -> int:
    """The exit code: 0, 1 where a rehearsal failed, 2 for a call that cannot be answered (one sentence on stderr)."""
    options = _options(arguments)
    if not (options.inner or options.rehearse or options.list):
        own = [sys.executable, "-m", "app.bench.gpu", *arguments, "--inner", "--began", repr(options.began)]
        return supervised(own, _say)
    if options.inner:
        interrupted_once()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        return _run(options, arguments)
    except ValueError as error:
        if not type(error).__module__.startswith(("app.", "__main__")) and type(error) is not ValueError:
            raise
        print(error, file=sys.stderr)
        return USAGE


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it (default 9)")
    parser.add_argument("--out", type=Path, help="folder of the results (default bench-out/gpu-DEVICE)")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on the CPU, Triton in its interpreter")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="beginnings of names, in order")
    parser.add_argument("--retry", action="store_true", help="measure again what failed in this folder")
    parser.add_argument("--list", action="store_true", help="print names and expected seconds, measure nothing")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)  # the process that measures
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)  # of the call
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    _check_packages()
    import torch

    from app.bench.gpu.catalogue import catalogue, chosen
    from app.bench.gpu.measurement import Place
    from app.bench.gpu.runner import REPORT, Budget, run_all
    from ops.attention.sdpa import leave_out_cudnn

    if not 0 <= options.minutes < float("inf"):
        raise ValueError(f"--minutes {options.minutes:g} is no time. Give minutes from 0 on.")
    if not options.rehearse and not options.list and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here. Run it with --rehearse for all of it, small, on the CPU.")
    cuda = torch.cuda.is_available() and not options.rehearse
    place = Place(device=torch.device("cuda", 0) if cuda else torch.device("cpu"), rehearse=options.rehearse)
    if not cuda:
        torch.set_num_threads(1)
    leave_out_cudnn()  # as workers do
    wanted = catalogue(place)
    if options.only:
        wanted = chosen(wanted, options.only)
    if options.list:
        print("\n".join(f"{one.estimate_s:5.0f} s  {one.name}" for one in wanted))
        return 0
    facts = _facts(options.rehearse, arguments)
    folder: Path = options.out or ROOT / "bench-out" / f"gpu-{re.sub(r'[^a-z0-9]+', '-', facts.device.lower())}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be a folder: {error.strerror}. Give another.") from None
    budget = Budget(began=options.began, seconds=60 * options.minutes)
    end = leave_for_another if options.inner else None
    done = run_all(wanted, place, folder, facts, budget, _say, options.retry, end)
    if done.dead and options.inner:
        _say("the device answers this process no more.")
        return AGAIN  # also --retry: what has failed since the call began is not run again
    failed = [line.name for line in done.lines if line.error]
    _say(f"\n{(folder / REPORT).read_text(encoding='utf-8').split('## Every figure')[0]}")
    _say(f"{len(done.lines)} measured or left out, {len(failed)} failed, {len(done.skipped)} without time: {folder}")
    return FAILED if failed and options.rehearse else 0


def _without(arguments: list[str]) -> list[str]:
    """The arguments that a person gave."""
    return arguments[: arguments.index("--inner")] if "--inner" in arguments else arguments


def _check_packages() -> None:
    """Raises ValueError naming what is missing or too old."""
    for name in ("torch", "triton", "numpy", "yaml"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"the package {name} is not installed; this needs torch, triton, numpy and pyyaml.")
    import torch
    import triton

    for name, version, least in (
        ("torch", torch.__version__, LEAST_TORCH),
        ("triton", triton.__version__, LEAST_TRITON),
    ):
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < least:
            raise ValueError(f"{name} {version} is older than {'.'.join(map(str, least))}, the least that this takes.")


def _facts(rehearsal: bool, arguments: list[str]) -> Facts:
    import torch
    import triton

    from app.bench.gpu.lines import Facts

    cuda = torch.cuda.is_available() and not rehearsal
    return Facts(
        device=torch.cuda.get_device_name(0) if cuda else "CPU",
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        commit=_commit(),
        command=" ".join(["python -m app.bench.gpu", *_without(arguments)]),
        rehearsal=rehearsal,
    )


def _commit() -> str | None:
    """The commit of the tree, with a plus where files differ from it; None where git or its folder is missing."""
    try:
        found = [
            subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, timeout=20, check=True)
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
