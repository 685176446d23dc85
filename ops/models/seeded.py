"""First values from a seed by PyTorch's own generator, of which a process has one for all its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_DRAWING = threading.RLock()


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """A context in which the CPU's generator begins with `seed`; afterwards it is as it was. One thread at a time: a
    worker may read the first weights for its state, while an aside beside its steps reads them, too."""
    import torch

    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
