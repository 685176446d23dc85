"""How the push is launched: one configuration, since it knows no width."""

from __future__ import annotations

from ops.kernels.base.tuning import Launch, Table

TABLE: Table = {}  # no rows by width
# Four elements per thread: with eight the loads are of 128 bits, and the values go through shared memory on their way.
LAUNCH = Launch(chunk=512, warps=4, load_bits=64)
PROGRAMS = 16  # few: they run beside a backward pass, which needs the multiprocessors
