"""Noise by key and place: `ops/flow/noise.py`."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.flow.noise import NoiseKey, normal, rows

KEY = NoiseKey.of(7, 3, "shard-1/000042")


@given(first=st.integers(0, 1000), count=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_a_part_is_a_part_of_the_whole(first: int, count: int) -> None:
    assert torch.equal(normal(KEY, first, count), normal(KEY, 0, 1300)[first : first + count])


def test_chunks_of_rows_are_the_rows_of_the_whole() -> None:
    whole = rows(KEY, slice(0, 37), 12)
    assert whole.shape == (37, 12) and whole.dtype == torch.float32
    parts = [rows(KEY, slice(a, b), 12) for a, b in [(0, 13), (13, 25), (25, 37)]]
    assert torch.equal(torch.cat(parts), whole)


def test_another_seed_step_or_sample_is_another_stream() -> None:
    here = normal(KEY, 0, 64)
    assert torch.equal(here, normal(NoiseKey.of(7, 3, "shard-1/000042"), 0, 64))
    for other in [(8, 3, "shard-1/000042"), (7, 4, "shard-1/000042"), (7, 3, "shard-1/000043")]:
        assert not torch.isclose(here, normal(NoiseKey.of(*other), 0, 64)).any()


def test_noise_is_the_same_in_every_release() -> None:
    """Resumed runs and mixed pools rely on it; a change must be a decision."""
    found = normal(NoiseKey.of(0, 0, "key"), 0, 3)
    torch.testing.assert_close(found, torch.tensor([-0.81352729, -0.66341513, 1.38737702]), atol=1e-6, rtol=0)


def test_it_is_standard_normal_and_white() -> None:
    numbers = normal(KEY, 0, 1_000_000).double().numpy()
    assert abs(numbers.mean()) < 4e-3 and numbers.std() == pytest.approx(1, abs=3e-3)
    ordered = np.sort(numbers)
    expected = torch.special.ndtr(torch.from_numpy(ordered)).numpy()
    assert np.abs(expected - (np.arange(ordered.size) + 0.5) / ordered.size).max() < 1.95 / math.sqrt(ordered.size)
    for lag in (1, 2, 8, 64):  # within a pair, between pairs, between counters, between rows
        assert abs(np.mean(numbers[:-lag] * numbers[lag:])) < 4e-3
    assert np.abs(numbers).max() > 4.5, "tails"


def test_far_places_and_the_first_counter_are_those_of_the_cipher() -> None:
    """Counter 0 under key 0: the known answer of Philox4x64-10 in the authors' Random123 (kat_vectors)."""
    words = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    expected = []
    for word in words:
        radius = math.sqrt(-2 * math.log(((word >> 32) + 0.5) / 2**32))
        angle = 2 * math.pi * (((word & 0xFFFFFFFF) + 0.5) / 2**32)
        expected += [radius * math.cos(angle), radius * math.sin(angle)]
    torch.testing.assert_close(normal(NoiseKey(0, 0), 0, 8), torch.tensor(expected, dtype=torch.float32))
    far = 10**12 + 3
    assert torch.equal(normal(KEY, far, 20)[5:], normal(KEY, far + 5, 15))


def test_places_are_not_negative() -> None:
    with pytest.raises(ValueError, match="place -1"):
        normal(KEY, -1, 4)


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernel_compiles_for_gpus(capability: int) -> None:
    """In a process of its own: this one may interpret kernels."""
    pytest.importorskip("triton")
    code = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ops.flow.noise_kernel import BLOCK, philox_normal
kinds = {{"out": "*fp32", "start": "i64", "blocks": "i64", "low": "i64", "high": "i64", "BLOCK": "constexpr"}}
source = ASTSource(fn=philox_normal, signature=kinds, constexprs={{(5,): BLOCK}})
ptx = triton.compile(source, target=GPUTarget("cuda", {capability}, 32)).asm["ptx"]
assert "0D401921FB54442D18" in ptx.upper(), "two pi in fp64: a rounded one would make other numbers than the CPU"
print(ptx.count("mul.hi.u64") + ptx.count("mad.hi.u64"))
"""
    assert int(compiled(code)) >= 20, "two wide products in each of ten rounds"


def test_numbers_of_a_cascade_are_no_reason_to_compile_again() -> None:
    """Triton makes a kernel for each kind of argument that it sees: 1, multiples of 16, 32 or 64 bits."""
    pytest.importorskip("triton")
    code = """
import itertools
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from ops.flow.noise_kernel import BLOCK, philox_normal
backend = make_backend(GPUTarget("cuda", 90, 32))
bind = create_function_from_signature(philox_normal.signature, philox_normal.params, backend)
out = torch.empty(8)
kinds = set()
for place, number in itertools.product(range(4), (0, 1, 5, 16, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -1, -(2**63))):
    numbers = [3, 3, 3, 3]
    numbers[place] = number
    kinds.add(str(bind(out, *numbers, BLOCK=BLOCK)[1]))
print(len(kinds), kinds.pop().count("i64"))
"""
    assert compiled(code).split() == ["1", "4"]


def compiled(code: str) -> str:
    """What a process prints that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
