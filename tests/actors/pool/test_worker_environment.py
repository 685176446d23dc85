"""How worker processes are started."""

from __future__ import annotations

from actors.pool.workers import worker_environment


def test_a_worker_has_the_threads_of_its_config() -> None:
    assert worker_environment(2, {}, cuda=False)["OMP_NUM_THREADS"] == "2"
    assert worker_environment(2, {}, cuda=False)["HF_HUB_DISABLE_PROGRESS_BARS"] == "1", "its log is no terminal"


def test_the_allocator_is_as_the_user_has_set_it() -> None:
    assert worker_environment(1, {}, cuda=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        found = worker_environment(1, {name: "max_split_size_mb:512"}, cuda=True)
        assert "PYTORCH_ALLOC_CONF" not in found, "it is inherited"


def test_only_what_launches_kernels_comes_before_what_decodes() -> None:
    assert worker_environment(1, {}, cuda=True)["RAY_worker_niceness"] == "0"
    assert "RAY_worker_niceness" not in worker_environment(1, {}, cuda=False)
    found = worker_environment(1, {"RAY_worker_niceness": "5"}, cuda=True)
    assert "RAY_worker_niceness" not in found, "it is inherited"


def test_a_worker_sees_its_own_gpu_alone_where_the_cluster_shows_all_to_everyone() -> None:
    """On clusters of frameworks that choose GPUs themselves all of a node's workers would meet on the first."""
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    assert worker_environment(1, {name: "1"}, cuda=True)[name] == "0"
