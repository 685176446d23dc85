"""Packed attention: every backend against softmax(q k^T) v of each sequence, and what each one refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from ops.attention import flex, varlen
from ops.attention.backend import Backend
from ops.attention.cudnn import Cudnn
from ops.attention.flash import Flash3
from ops.attention.flex import BLOCK, document_mask
from ops.attention.lengths import Lengths
from ops.attention.names import BackendName
from ops.attention.sdpa import Sdpa, leave_out_cudnn
from ops.attention.varlen import attention, backend_of, check_backend, choose, serving
from tests.ops.attention_cases import CASES, reference

pytestmark = pytest.mark.usefixtures("hopper")

torch.set_num_threads(1)
FP64 = {"atol": 1e-12, "rtol": 1e-12}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_equals_softmax_per_sequence(case: str) -> None:
    q_lengths, k_lengths = CASES[case]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(n), 3, 8, dtype=torch.float64, requires_grad=True) for n in (q_lengths, k_lengths, k_lengths)
    )
    expected = reference(q, k, v, q_lengths, k_lengths)
    actual = attention(q, k, v, Lengths.of(q_lengths), Lengths.of(k_lengths))
    torch.testing.assert_close(actual, expected, **FP64)
    seed = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), seed, allow_unused=True, retain_graph=True)
    given = torch.autograd.grad(actual, (q, k, v), seed, allow_unused=True)
    for got, want, leaf in zip(given, wanted, (q, k, v)):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if got is None else got, zero if want is None else want, **FP64)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_more_sequences_than_a_grid_of_cuda_takes_are_several_calls(
    case: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = Sdpa.run

    def counted(self: Sdpa, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        calls.append(len(q_lengths.host))
        assert q_lengths == Lengths.of(q_lengths.host) and k_lengths == Lengths.of(k_lengths.host)
        return run(self, q, k, v, q_lengths, k_lengths)

    monkeypatch.setattr(Lengths, "__eq__", lambda a, b: a.host == b.host and torch.equal(a.offsets, b.offsets))
    monkeypatch.setattr(Sdpa, "run", counted)
    q_lengths, k_lengths = CASES[case]
    q, k, v = (torch.randn(sum(n), 3, 8, dtype=torch.float64) for n in (q_lengths, k_lengths, k_lengths))
    found = attention(q, k, v, Lengths.of(q_lengths), Lengths.of(k_lengths), most_sequences=most)
    torch.testing.assert_close(found, reference(q, k, v, q_lengths, k_lengths), **FP64)
    assert sum(calls) == len(q_lengths) and max(calls) <= most


def test_lengths_must_pair_up() -> None:
    q = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="2 sequences of queries and 1 of keys"):
        attention(q, q, q, Lengths.of((2, 2)), Lengths.of((4,)))


@pytest.mark.parametrize("lengths", [(3, 3), (5, 5), (5, 2), (), (0, 0)])
def test_rows_that_no_sequence_has_are_refused(lengths: tuple[int, ...]) -> None:
    """Two sequences of one length were taken for halves of the rows, whatever their length."""
    q, packed = torch.zeros(8, 1, 8), Lengths.of(lengths)
    with pytest.raises(ValueError, match=rf"q \(8, 1, 8\).*with the {sum(lengths)} rows of the queries' lengths"):
        attention(q, q, q, packed, packed)


def test_a_batch_a_list_and_negative_lengths_are_refused() -> None:
    batch, q, packed = torch.zeros(2, 4, 1, 8), torch.zeros(8, 1, 8), Lengths.of((4, 4))
    with pytest.raises(ValueError, match=r"q \(2, 4, 1, 8\).*flatten batches into rows"):
        attention(batch, batch, batch, packed, packed)
    with pytest.raises(ValueError, match=r"Lengths.of\(\[\.\.\.\], device\)"):
        attention(q, q, q, [4, 4], [4, 4])
    with pytest.raises(ValueError, match="negative length -1"):
        Lengths.of([9, -1])


PACK = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8)
ON_CPU: tuple[BackendName, ...] = ("sdpa", "flex")


@pytest.mark.parametrize("name", ON_CPU)
@settings(max_examples=40)
@given(pack=PACK, heads=st.sampled_from([1, 3]), size=st.sampled_from([8, 24]), seed=st.integers(0, 99))
def test_backends_equal_softmax_on_random_packs(
    name: BackendName, pack: list[tuple[int, int]], heads: int, size: int, seed: int
) -> None:
    q_lengths, k_lengths = zip(*pack)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(n), heads, size, dtype=torch.float64, generator=generator)
        for n in (q_lengths, k_lengths, k_lengths)
    )
    actual = attention(q, k, v, Lengths.of(q_lengths), Lengths.of(k_lengths), backend=name)
    torch.testing.assert_close(actual, reference(q, k, v, q_lengths, k_lengths), **FP64)


@settings(max_examples=60)
@given(pack=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=6))
def test_document_mask_visits_the_blocks_that_hold_pairs_and_hardly_another(pack: list[tuple[int, int]]) -> None:
    q_lengths, k_lengths = (tuple(n) for n in zip(*pack))
    if not sum(q_lengths):
        return
    mask = document_mask(q_lengths, k_lengths, torch.device("cpu"))
    q_of, k_of = (torch.repeat_interleave(torch.arange(len(pack)), torch.tensor(n)) for n in (q_lengths, k_lengths))
    pairs = q_of[:, None] == k_of[None]
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for row in range(-(-len(q_of) // BLOCK)):
        some = set(mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist())
        full = set(mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].tolist())
        for column in range(-(-len(k_of) // BLOCK)):
            tile = pairs[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            partial = bool(tile.any() and not tile.all())
            assert (column in full) == bool(tile.all())
            # between its own, a block of queries may also visit keys of a sequence that has no queries
            assert (column in some) == partial or (column in some and 0 in q_lengths)


@pytest.mark.parametrize("captured", [True, False])
def test_a_mask_that_a_cuda_graph_reads_outlasts_its_place_among_the_last_masks(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's kernels have addresses: of a mask that was let go, the memory would be somebody else's."""
    read: list[weakref.ref[torch.UntypedStorage]] = []

    def attends(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        read.extend(weakref.ref(one.untyped_storage()) for one in (block_mask.kv_indices, block_mask.kv_num_blocks))
        return q

    monkeypatch.setattr(flex, "_of_graphs", [])
    monkeypatch.setattr(flex, "flex_attention", attends)
    monkeypatch.setattr(flex, "_is_captured", lambda device: captured)
    rows, lengths = torch.zeros(6, 1, 16), Lengths.of((3, 3))
    for _ in range(2):
        attention(rows, rows, rows, lengths, lengths, backend="flex")
    assert len(flex._of_graphs) == captured and len(read) == 4
    for length in range(5, 25):
        document_mask((length,), (length,), torch.device("cpu"))
    assert all((one() is not None) == captured for one in read)


def test_other_lengths_are_no_reason_to_compile_flex_again() -> None:
    """Each pack has a mask of its own; on a device it is traced and compiled with the call."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    for lengths in ((300, 200), (310, 190), (128, 400, 77), (1000, 100, 300, 7), (65, 901)):
        rows = torch.zeros(1, 2, sum(lengths), 16)
        compiled(rows, rows, rows, block_mask=document_mask(lengths, lengths, torch.device("cpu")))
    assert counter.frame_count == 1


@settings(max_examples=30)
@given(pack=PACK, seed=st.integers(0, 99))
def test_auto_on_the_cpu_is_sdpa_bit_for_bit(pack: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [Lengths.of(n) for n in zip(*pack)]
    q, k, v = (torch.randn(n.total, 2, 8, generator=generator) for n in (lengths[0], lengths[1], lengths[1]))
    assert torch.equal(attention(q, k, v, *lengths), attention(q, k, v, *lengths, backend="sdpa"))


@pytest.mark.parametrize("keys", [(1, 1, 1), (1, 4, 1)])
def test_what_sees_one_key_takes_its_value_and_stays_in_the_graph(
    keys: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN takes no single key. Hooks count on a gradient of every weight, and ranks on each other's backward: zeros,
    not none."""
    monkeypatch.setattr("ops.attention.cudnn.sdpa_kernel", lambda backend: nullcontext())
    rows = (2,) * len(keys)
    q, k, v = (torch.randn(sum(n), 2, 8, requires_grad=True) for n in (rows, keys, keys))
    out = backend_of("cudnn").run(q, k, v, Lengths.of(rows), Lengths.of(keys))
    torch.testing.assert_close(out[:2], v[:1].expand(2, 2, 8), atol=0, rtol=0)
    seed = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), seed)
    assert not dq[:2].any() and not dk[:1].any()
    torch.testing.assert_close(dv[0], seed[0] + seed[1])


def test_what_a_backend_cannot_do_is_refused_with_value_rule_and_remedy() -> None:
    lengths = Lengths.of((2, 2))
    q = torch.zeros(4, 1, 8, dtype=torch.bfloat16)
    for name in ("flash3", "flash", "cudnn"):
        with pytest.raises(ValueError, match=f"attention {name} needs a CUDA device; these tensors are on cpu. Use"):
            attention(q, q, q, lengths, lengths, backend=name)
    with pytest.raises(ValueError, match="flex has no backward on cpu"):
        attention(q.requires_grad_(), q, q, lengths, lengths, backend="flex")
    with pytest.raises(ValueError, match="attention 'fast' is none of auto, flash3, flash, cudnn, flex, sdpa"):
        attention(q, q, q, lengths, lengths, backend="fast")  # type: ignore[arg-type]


class OnCuda:
    """Queries as a backend looks at them, on a device that this machine does not have."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 128) -> None:
        self.dtype, self.shape, self.is_cuda, self.device = dtype, (4, 2, size), True, torch.device("cuda", 0)
        self.requires_grad = True


def backends(**flash3: bool) -> Callable[[BackendName], Backend]:
    """All backends, of a machine where FlashAttention 3 is so."""
    return lambda name: Flash3(**flash3) if name == "flash3" else backend_of(name)


def refusal(name: BackendName, q: object, *pair: tuple[int, ...]) -> str:
    lengths = (Lengths.of(pair[0]), Lengths.of(pair[1])) if pair else None
    return backend_of(name).why_not(q, lengths) or ""  # type: ignore[arg-type]


def test_refusals_on_cuda_name_dtype_head_size_and_lengths() -> None:
    for name in ("flash3", "flash", "cudnn"):
        assert f"attention {name} takes bfloat16 and float16, not float32" in refusal(name, OnCuda(torch.float32))
        assert "up to" in refusal(name, OnCuda(size=12)) and ", not 12." in refusal(name, OnCuda(size=12))
    assert refusal("flash", OnCuda(size=256)) == "" and "up to 128, not 256" in refusal("cudnn", OnCuda(size=256))
    assert refusal("cudnn", OnCuda()) == "" and refusal("cudnn", OnCuda(), (5, 6), (0, 7)) == ""
    many = (2,) * 65536
    assert "up to 65535 sequences, not 65536" in refusal("cudnn", OnCuda(), many, many)
    assert "from 16, not 8" in refusal("flex", OnCuda(size=8)) and "not float64" in refusal(
        "flex", OnCuda(torch.float64)
    )


def test_a_cudnn_that_reads_beside_its_memory_is_refused() -> None:
    assert "needs cuDNN 91501, not 91002" in (Cudnn(91002).why_not(OnCuda()) or "")  # type: ignore[arg-type]
    assert Cudnn(91501).why_not(OnCuda()) is None  # type: ignore[arg-type]


def test_cudnn_serves_who_names_it_and_nobody_else() -> None:
    """Its backward of a mask may give NaN."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    leave_out_cudnn()
    try:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_flash3_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**flash3: bool) -> str | None:
        return Flash3(**flash3).why_not(OnCuda())  # type: ignore[arg-type]

    assert "needs the package flash_attn_3 (module flash_attn_interface)" in (said(installed=False) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "runs on sm_90; this device is sm_80" in (said(installed=True) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert said(installed=True) is None
    assert "is not offered by PyTorch" in (said(installed=True, offered=False) or "")


def test_auto_on_cuda_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto(q: OnCuda, *pair: tuple[int, ...], flash3: bool = False) -> str:
        lengths = Lengths.of(pair[0]), Lengths.of(pair[-1])
        return choose(q, lengths, backends(installed=flash3)).name  # type: ignore[arg-type]

    assert auto(OnCuda(), (2048, 2048)) == "cudnn" and auto(OnCuda(), (64, 64)) == "flash"
    assert auto(OnCuda(), (2048,), (512,)) == "cudnn" and auto(OnCuda(), (512,), (2047,)) == "flash"
    assert auto(OnCuda(), (2048, 2049)) == "cudnn" and auto(OnCuda(), (2048, 2047)) == "flash"
    assert auto(OnCuda(), (10155, 7207, 5569, 3931, 2948, 1965, 985)) == "cudnn"  # a pack that was measured
    assert auto(OnCuda(), (8192, *[1024] * 15)) == "cudnn" and auto(OnCuda(), (8192, *[1024] * 21)) == "flash"
    assert auto(OnCuda(), (8192, 8193), (512, 512)) == "cudnn"
    assert auto(OnCuda(), (8192, 8190), (512, 512)) == "flash"  # few scores
    assert auto(OnCuda(size=256), (2048,)) == "flash" and auto(OnCuda(torch.float32), (2048,)) == "sdpa"
    assert auto(OnCuda(), (2048, 2047), flash3=True) == "flash3"
    assert auto(OnCuda(torch.float32), (2048,), flash3=True) == "sdpa"


def test_gpus_before_ampere_are_served_by_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for length in (256, 4096):
        chosen = choose(OnCuda(), (Lengths.of((length,)), Lengths.of((length,))), backends(installed=True))  # type: ignore[arg-type]
        assert chosen.name == "sdpa"
    assert serving(OnCuda(), backends(installed=True)) == ["sdpa"]  # type: ignore[arg-type]
    for name in ("flash", "cudnn"):
        assert refusal(name, OnCuda()) == (  # type: ignore[arg-type]
            f"attention {name} runs on sm_80 and later; this device is sm_75. Use sdpa or auto."
        )


def test_lengths_of_captions_are_no_shapes_to_plan() -> None:
    """cuDNN plans each new shape: captions of their true length would be planned for in every cascade."""
    from ops.models.config import TextConfig
    from ops.packed.packing import Layout, Sequence

    def auto(*pair: Lengths) -> str:
        return choose(OnCuda(), (pair[0], pair[-1]), backends(installed=False)).name  # type: ignore[arg-type]

    for padded, backend in ((False, "flash"), (True, "cudnn")):
        layout = Layout([Sequence((5, 20, 20), 77)], text_recurs=padded)
        video, joint = layout.video_exchange.lengths, layout.joint_exchange.lengths
        assert auto(video) == "cudnn" and auto(joint) == backend
        assert joint.cut(slice(0, 1)).recur == layout.text.recur == padded
        shared = Layout([Sequence((5, 20, 20), 77)], 2, 0, text_recurs=padded).joint_exchange.shared(3)
        assert {piece.lengths.recur for piece in shared.pieces} == {padded}
    assert auto(Layout([Sequence((5, 20, 20), 0)]).joint_exchange.lengths) == "cudnn"
    assert TextConfig(max_length=512, pad_to=512).is_padded and not TextConfig(max_length=512).is_padded
    assert not TextConfig(max_length=512, pad_to=128).is_padded


def test_what_auto_comes_to_is_known_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that were measured where flash3 is installed are not those of the same setting where it is not."""
    without, queries = backends(installed=False), (OnCuda(), OnCuda(size=256), OnCuda(torch.float32))
    assert [serving(q, without) for q in queries] == [["cudnn", "flash"], ["flash"], ["sdpa"]]  # type: ignore[arg-type]
    assert serving(OnCuda(), backends(installed=True)) == ["flash3"]  # type: ignore[arg-type]
    assert serving(torch.empty(0, 1, 128)) == ["sdpa"]


def test_flash_and_flash3_put_their_own_kernels_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one flash kernel per process; the last activation must not decide what `flash` is."""
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: active.append(None))
    none = torch.zeros(0, 1, 8)
    for name in ("flash3", "flash3", "flash", "flash"):
        backend_of(name).run(none, none, none, Lengths.of((0,)), Lengths.of((0,)))
    assert active == [None, "FA3", None]


def test_a_named_backend_is_refused_before_training() -> None:
    cpu = torch.device("cpu")
    check_backend("auto", cpu, torch.float32, 12)
    check_backend("flex", cpu, torch.float32, 12, training=False)
    for name in ("flash3", "flash", "cudnn", "flex"):
        with pytest.raises(ValueError, match=f"model.dit.attention {name} cannot be used here: attention {name} "):
            check_backend(name, cpu, torch.bfloat16, 128)


def test_the_setting_reaches_every_attention_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.comm.collectives import Group
    from ops.models.hunyuan.config import HunyuanConfig
    from ops.models.load import build_dit
    from ops.models.wan.config import WanConfig
    from ops.packed.packing import Layout, Sequence

    asked: list[str] = []
    sdpa = backend_of("sdpa")

    def spy(name: BackendName) -> Backend:
        asked.append(name)
        return sdpa

    monkeypatch.setattr(varlen, "backend_of", spy)
    layout = Layout([Sequence((1, 2, 2), 3)])
    for config, calls in ((WanConfig(attention="flex"), 8), (HunyuanConfig(attention="flex", num_single_layers=1), 7)):
        asked.clear()
        dit = build_dit(config, 0)
        tokens, text = torch.zeros(4, 64), torch.zeros(3, config.text_dim)
        dit(tokens, torch.zeros(1), text, layout, Group.solo())
        assert asked == ["flex"] * calls
