"""How worker processes are started."""

from __future__ import annotations

from actors.pool.workers import worker_environment


def test_pytorch_never_ends_a_worker_by_itself() -> None:
    """Names of ProcessGroupNCCL.hpp. A monitor or a dump would act minutes after the error was handled; a watchdog that
    meets an error of the device ends the process unless this is switched off."""
    set_for = worker_environment(1, {})
    assert set_for["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == set_for["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert set_for["TORCH_NCCL_DUMP_ON_TIMEOUT"] == set_for["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert set_for["OMP_NUM_THREADS"] == "1"


def test_the_allocator_is_as_the_user_has_set_it() -> None:
    assert worker_environment(1, {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "PYTORCH_ALLOC_CONF" not in worker_environment(1, {name: "max_split_size_mb:512"}), "it is inherited"
