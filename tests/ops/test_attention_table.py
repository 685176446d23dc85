"""`auto` by a measured table: which backend it says, and where the rules decide instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.export.parity import our_velocity, parity_sample
from ops.attention import varlen
from ops.attention.backend import Backend
from ops.attention.flash import Flash3
from ops.attention.lengths import Lengths
from ops.attention.names import BackendName
from ops.attention.table import AttentionTable, TableRow, kind_of_lengths, mean_length, name_of
from ops.attention.varlen import attention, backend_of, check_backend, choose, serving
from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.models.load import build_dit
from ops.packed.packing import Layout, Sequence
from ops.packed.sequence_parallel import sequence_parallel_attention
from tests.families.registry import VARIANTS
from tests.ops.attention_tables import row, table
from tests.ops.test_attention import OnCuda

pytestmark = pytest.mark.usefixtures("hopper")

BOTH = table(("flash", 1024, 1.0), ("cudnn", 1024, 4.0), ("flash", 16384, 100.0), ("cudnn", 16384, 50.0))


def without_flash3(name: BackendName) -> Backend:
    return Flash3(installed=False) if name == "flash3" else backend_of(name)


def auto(of: AttentionTable, q: OnCuda, *pair: Lengths) -> str:
    return choose(q, (pair[0], pair[-1]), without_flash3, of).name  # type: ignore[arg-type]


def test_the_fastest_at_a_measured_length_comes_first() -> None:
    assert BOTH.fastest(128, True, 1024, True) == ["flash", "cudnn"]
    assert BOTH.fastest(128, True, 16384, True) == ["cudnn", "flash"]


def test_seconds_between_two_lengths_are_powers_of_the_length() -> None:
    """flash takes 1 s at 1,024 and 100 s at 16,384, cuDNN 4 and 50: they meet where 4 (50 / 4)^x = 100^x, x = 2/3."""
    meet = 1024 * 16 ** (2 / 3)
    assert BOTH.fastest(128, True, 0.99 * meet, True)[0] == "flash"
    assert BOTH.fastest(128, True, 1.01 * meet, True)[0] == "cudnn"


def test_far_from_all_that_was_measured_a_table_says_nothing() -> None:
    assert BOTH.fastest(128, True, 512, True)[0] == "flash" and BOTH.fastest(128, True, 32768, True)[0] == "cudnn"
    assert BOTH.fastest(128, True, 511, True) == BOTH.fastest(128, True, 32769, True) == []
    assert BOTH.fastest(64, True, 1024, True) == BOTH.fastest(128, False, 1024, True) == []


def test_one_sequence_and_several_of_one_length_are_one_curve() -> None:
    mixed = replace(BOTH, rows=tuple(replace(r, lengths="equal") if r.length == 1024 else r for r in BOTH.rows))
    assert mixed.fastest(128, True, 2000, True) == BOTH.fastest(128, True, 2000, True) != []
    assert [kind_of_lengths(n) for n in ((5,), (5, 5), (5, 6))] == ["one", "equal", "unequal"]
    assert mean_length((7,)) == mean_length((7, 7)) == 7 and mean_length((1, 3)) == 2.5


def test_a_backend_without_a_backward_serves_calls_without_gradient() -> None:
    forward_only = TableRow(backend="flex", head_dim=128, lengths="one", length=1024, forward_s=0.1)
    of = replace(BOTH, rows=(*BOTH.rows, forward_only))
    assert of.fastest(128, True, 1024, False) == ["flex", "flash", "cudnn"]
    assert of.fastest(128, True, 1024, True) == ["flash", "cudnn"]


def test_one_that_was_measured_at_one_length_counts_there_alone() -> None:
    of = replace(BOTH, rows=(*BOTH.rows, row("sdpa", 16384, 0.1)))
    assert of.fastest(128, True, 16384, True)[0] == "sdpa" and "sdpa" not in of.fastest(128, True, 16000, True)


def test_auto_follows_the_table() -> None:
    long, short = Lengths.of((16384,)), Lengths.of((1024,))
    assert auto(BOTH, OnCuda(), long) == "cudnn" and auto(BOTH, OnCuda(), short) == "flash"
    other = table(("flash", 16384, 10.0), ("cudnn", 16384, 50.0))
    assert auto(other, OnCuda(), long) == "flash"
    unequal = table(("flash", 1000, 3.0), ("flex", 1000, 1.0), lengths="unequal")
    assert auto(unequal, OnCuda(), Lengths.of((900, 1100))) == "flex"


def test_a_backend_that_cannot_serve_a_call_is_passed_over() -> None:
    wide = table(("cudnn", 2048, 1.0), ("flex", 2048, 2.0), ("flash", 2048, 3.0), head_dim=256)
    assert auto(wide, OnCuda(size=256), Lengths.of((2048,))) == "flex"
    missing = table(("flash3", 2048, 1.0), ("flex", 2048, 2.0))
    assert auto(missing, OnCuda(), Lengths.of((2048,))) == "flex"


def test_what_costs_the_host_for_new_lengths_is_not_chosen_for_those_of_captions() -> None:
    fast = table(("cudnn", 600, 1.0), ("flex", 600, 1.5), ("flash", 600, 2.0))
    assert auto(fast, OnCuda(), Lengths.of((600,))) == "flex"  # too short for a plan of cuDNN
    assert auto(fast, OnCuda(), Lengths.of((600,), recur=False)) == "flash"


def test_rules_decide_where_the_table_is_not_of_the_call() -> None:
    slow = table(("flash", 2048, 2.0), ("flex", 2048, 1.0))
    one, other = Lengths.of((2048,)), Lengths.of((2049,))
    assert auto(slow, OnCuda(), one) == "flex"
    assert auto(slow, OnCuda(), one, other) == "cudnn"  # cross-attention
    assert auto(slow, OnCuda(torch.float16), one) == "cudnn"
    assert auto(slow, OnCuda(size=64), one) == "cudnn"
    assert auto(replace(slow, device="CPU"), OnCuda(), one) == "cudnn"
    assert choose(torch.zeros(2048, 1, 128, dtype=torch.bfloat16), (one, one), table=slow).name == "sdpa"


ON_CPU = table(("flex", 16, 1.0), ("sdpa", 16, 2.0), head_dim=8, device="CPU", dtype="float32")


def test_a_call_runs_the_backend_that_the_table_names(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for backend in (backend_of("sdpa"), backend_of("flex")):
        run = type(backend).run

        def noted(self: Backend, *given: object, run=run) -> Tensor:  # type: ignore[no-untyped-def]
            ran.append(self.name)
            return run(self, *given)

        monkeypatch.setattr(type(backend), "run", noted)
    q, lengths = torch.randn(16, 2, 8), Lengths.of((16,))
    flex = attention(q, q, q, lengths, lengths, ON_CPU)
    sdpa = attention(q, q, q, lengths, lengths, table(("sdpa", 16, 1.0), head_dim=8, device="CPU", dtype="float32"))
    assert ran == ["flex", "sdpa"]
    torch.testing.assert_close(flex, sdpa)
    attention(q.requires_grad_(), q, q, lengths, lengths, ON_CPU)  # flex has no backward there
    assert ran[2:] == ["sdpa"]


def test_what_a_table_adds_to_the_rules_is_known_without_a_call() -> None:
    flex = table(("flash", 2048, 2.0), ("flex", 2048, 1.0))
    assert serving(OnCuda(), without_flash3, flex) == ["cudnn", "flash", "flex"]  # type: ignore[arg-type]
    assert serving(OnCuda(torch.float32), without_flash3, flex) == ["sdpa"]  # type: ignore[arg-type]


def test_a_table_of_another_device_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    check_backend(ON_CPU, cpu, torch.float32, 8)
    with pytest.raises(ValueError, match=r"attention is a table of GPU, and this device is CPU\. Give one that"):
        check_backend(BOTH, cpu, torch.bfloat16, 128)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    check_backend(replace(BOTH, device="NVIDIA H200"), cuda, torch.bfloat16, 128)
    with pytest.raises(ValueError, match=r"a table of NVIDIA H100, and this device is NVIDIA H200\."):
        check_backend(replace(BOTH, device="NVIDIA H100"), cuda, torch.bfloat16, 128)


def test_a_row_that_stands_twice_and_seconds_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="attention flash of head_dim 128, lengths one and length 1024 stands twice"):
        table(("flash", 1024, 1.0), ("flash", 1024, 2.0))
    with pytest.raises(ValueError, match="forward_s 0 of attention flash is not above 0"):
        table(("flash", 1024, 0.0))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_table_reaches_every_attention_of_a_model(config: DiTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that a named backend would compute; Mochi's pooling of the text is by rules whatever is set."""
    given: list[AttentionTable | None] = []
    kept = choose

    def noted(q: Tensor, lengths: varlen.Pair, *, table: AttentionTable | None = None) -> Backend:
        given.append(table)
        return kept(q, lengths, table=table)

    monkeypatch.setattr(varlen, "choose", noted)
    our_velocity(build_dit(replace(config, attention=ON_CPU), 0), parity_sample(config))
    asked = [one for one in given if one is not None]
    assert len(asked) >= sum(config.block_counts) and all(one is ON_CPU for one in asked)
    assert len(given) - len(asked) == (config.architecture == "mochi")
    assert name_of(ON_CPU) == "auto" and name_of("flex") == "flex"


@pytest.mark.parametrize("degree", [2, 4])
def test_all_ranks_of_a_bag_choose_alike(degree: int, run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are those of whole sequences wherever their rows lie, and the table is in the settings of every rank."""
    ran: list[str] = []
    kept = choose

    def noted(q: Tensor, lengths: varlen.Pair, *, table: AttentionTable | None = None) -> Backend:
        ran.append(kept(q, lengths, table=table).name)
        return kept(q, lengths, table=table)

    monkeypatch.setattr(varlen, "choose", noted)
    sequences = [Sequence((1, 3, 3), 0), Sequence((1, 5, 5), 0)]
    measured = [("flex", 20.0, 1.0), ("sdpa", 20.0, 2.0)]
    unequal = table(*measured, lengths="unequal", head_dim=8, device="CPU", dtype="float32")  # type: ignore[arg-type]
    whole = [torch.randn(9, 3, 4, 8), torch.randn(25, 3, 4, 8)]

    def run(group: Group) -> Tensor:
        layout = Layout(sequences, group.size, group.rank)
        q, k, v = layout.local(whole).unbind(1)
        return sequence_parallel_attention(q, k, v, layout.video_exchange, group, unequal)

    expected = run(Group.solo())
    ran.clear()
    parts = run_ranks(degree, run)
    assert ran == ["flex"] * degree
    rows = [part.split(Layout(sequences, degree, rank).local_lengths.host) for rank, part in enumerate(parts)]
    torch.testing.assert_close(torch.cat([torch.cat([part[i] for part in rows]) for i in range(2)]), expected)
