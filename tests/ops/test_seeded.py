"""First values do not depend on what other threads of the process draw meanwhile."""

from __future__ import annotations

import threading

import torch

from ops.models.seeded import drawn_from


def test_two_threads_draw_one_after_the_other_and_leave_the_generator_as_it_was() -> None:
    """A worker reads its first weights for its state, while an aside beside its steps reads them, too."""
    before = torch.get_rng_state()
    alone = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    found: dict[int, torch.Tensor] = {}
    half, inside, go = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        half.wait(10)
        with drawn_from(2):
            inside.set()
            go.wait(10)
            found[2] = torch.randn(4)

    thread = threading.Thread(target=other)
    thread.start()
    with drawn_from(1):
        half.set()
        assert not inside.wait(0.3)
        found[1] = torch.randn(4)
        with drawn_from(2):  # of a part inside of another one
            assert torch.equal(torch.randn(4), alone[1])
    go.set()
    thread.join(10)
    assert torch.equal(found[1], alone[0]) and torch.equal(found[2], alone[1])
    assert torch.equal(before, torch.get_rng_state())
