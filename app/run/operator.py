"""A live run as an operator reaches it: the handle of its monitor, and what that answers."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from actors.names import NAMESPACE, RUN_ID
from app.run.cluster import ClusterAddress, must_answer, not_let_in
from app.run.lock import lock_path
from app.run.outcomes import read_outcome
from app.settings.run_folder import LORA_SCRATCH, LORA_STOPPED
from ops.typed import ConfigError

if TYPE_CHECKING:
    from actors.pool.monitor import MonitorReport
    from actors.refs import Method, Ref

T = TypeVar("T")
ANSWER_S = 30.0
_ENDS_S = 3.0  # after its Ray a run ends within this, and then says how
_LOOK_S = 0.25


class NoMonitor(ConfigError):
    """The cluster answers, and the run has no monitor there: its controller is still starting, or has taken its last
    step."""


class OperatorHandle(Protocol):
    """What an operator asks of the actor `actors.pool.monitor.Monitor`."""

    @property
    def report(self) -> Method[[], MonitorReport]: ...
    @property
    def drain(self) -> Method[[tuple[str, ...]], None]: ...
    @property
    def scale(self) -> Method[[int], None]: ...
    @property
    def stop(self) -> Method[[str], None]: ...
    @property
    def stopped(self) -> Method[[], None]: ...
    @property
    def trouble(self) -> Method[[], str]: ...
    @property
    def ping(self) -> Method[[], bool]: ...


def monitor_of(folder: Path) -> OperatorHandle:
    """The monitor of the live run in this folder. Raises LookupError where there is none on this cluster."""
    from actors.names import find_monitor

    handle: OperatorHandle = find_monitor(folder)
    return handle


def answer(run: Path, reference: Ref[T]) -> T:
    """What the monitor says. Raises ConfigError when it ended before it could, or says nothing."""
    from ray.exceptions import GetTimeoutError

    from actors.ray_calls import GONE, get

    try:
        return get(reference, timeout=ANSWER_S)
    except GONE:
        raise ConfigError(
            how_it_ended(run)
            or f"the monitor of run {run} ended before it answered. The run is ending, or starts another one: "
            f"`heddle workers list {run}` says whether it lives; then ask again."
        ) from None
    except GetTimeoutError:
        raise ConfigError(f"the monitor of run {run} has not answered for {ANSWER_S:g} s; ask again.") from None


def how_it_ended(run: Path) -> str:
    """How a run has ended, in a sentence, from its folder; "" for a run that may be alive."""
    outcome = read_outcome(run)
    if outcome is None or lives(run):
        return ""
    return f"run {run} has ended: {outcome.reason} (exit code {outcome.code})."


def monitor(run: Path) -> OperatorHandle:
    """The monitor actor of a live run. Raises ConfigError when there is no such run or cluster, NoMonitor when there is
    no such actor.

    Call it before anything imports Ray: only at its import Ray reads whether it has to send a token.
    """
    if not (run / RUN_ID).is_file():
        raise ConfigError(f"{run} is not the folder of a run that was started; give that of a run, such as runs/demo.")
    if ended := how_it_ended(run):
        raise ConfigError(ended)
    address = address_of(run)
    must_answer(address)  # "auto" is looked for below
    import ray

    try:
        if not ray.is_initialized():
            address = _of_this_machine() if address == "auto" else address
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise not_let_in(address, "set RAY_ADDRESS to the run's cluster") from None
    try:
        return monitor_of(run)
    except LookupError as error:
        raise NoMonitor(str(error)) from None


def ask_to_leave_lora_files(run: Path) -> bool:
    """Have a run that has taken its last step not wait for LoRA files. False where none wait."""
    try:
        (run / LORA_SCRATCH / LORA_STOPPED).touch()
    except OSError:  # the folder is there while some wait
        return False
    return True


def lives(run: Path) -> bool:
    """Whether the run's folder says that a start of it has not ended: so does that of one that was killed."""
    try:
        return lock_path(run.absolute(), "driver").exists()
    except OSError:  # storage that does not answer for a moment is no end of a run
        return True


def address_of(run: Path) -> str:
    """RAY_ADDRESS, else the address in the run's cluster.json; without that file any cluster of this machine. Raises
    ConfigError where the file's cluster does not answer: another one knows nothing of the run."""
    known = ClusterAddress.read(run)
    given = os.environ.get("RAY_ADDRESS", "")
    if known is None or given not in ("", known.address):
        return given or "auto"
    if not given and not known.answers():
        raise _not_there(run, known.address)
    if known.auth:
        os.environ.setdefault("RAY_AUTH_MODE", known.auth)
    return known.address


def _not_there(run: Path, address: str) -> ConfigError:
    """Why the run's cluster does not answer: how the run ended, which it may say a moment after its Ray is gone."""
    deadline = time.monotonic() + _ENDS_S
    while not (ended := how_it_ended(run)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return ConfigError(
        ended
        or f"the Ray cluster of run {run} at {address} has ended, or this machine does not reach it. If the run is "
        f"ending or starting, ask again in a minute; if it was killed, `heddle train --resume` continues it; if its "
        f"cluster is there, set RAY_ADDRESS to an address of it, HOST:PORT, that this machine reaches."
    )


def _of_this_machine() -> str:
    """The cluster that Ray takes for "auto". Raises ConfigError where it does not answer: Ray would try for minutes."""
    from ray._private.services import get_ray_address_from_environment

    otherwise = "set RAY_ADDRESS to the run's cluster"
    try:
        address: str = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise not_let_in("auto", otherwise) from None
    if not ClusterAddress(address=address, auth="").answers():
        raise not_let_in(f"{address} (the last one of this machine)", otherwise)
    return address
