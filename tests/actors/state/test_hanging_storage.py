"""Storage that hangs under a keeper's checkpoint does not keep the next one back. A real keeper."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.held_state import WRITES, WrittenShard
from actors.state import keeper as keeper_module
from actors.state.keeper import Keeper
from tests.rays import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class HangingKeeper(Keeper):
    """Storage hangs under its first checkpoint."""

    def _write(self, folder: Path, step: int, generation: int, lo: int, hi: int) -> WrittenShard:
        if step == 9:
            time.sleep(600)
        return WrittenShard(lo=lo, hi=hi, name="it", size=1, crc32=0)


@pytest.mark.long
def test_a_keeper_whose_storage_hangs_writes_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "Keeper", HangingKeeper)
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    with local_ray(num_cpus=1, log_to_driver=False, namespace="it", runtime_env={"env_vars": {"PYTHONPATH": path}}):
        keeper: Any = keeper_module.spawn("keeper", ray.get_runtime_context().get_node_id(), namespace="it")
        in_writes = keeper.write.options(concurrency_group=WRITES)
        hangs = in_writes.remote(str(tmp_path), 9, 1, [(0, 4)])
        assert not ray.wait([hangs], timeout=3)[0]
        (written,) = ray.get(in_writes.remote(str(tmp_path), 19, 1, [(0, 4)]), timeout=60)
        assert written.name == "it" and not ray.wait([hangs], timeout=0)[0]
        ray.kill(keeper)
