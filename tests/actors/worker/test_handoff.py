"""Encode results reach their DiT cascade whole, in every way a plan can ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages import STORE, CascadeTask
from actors.plan.types import Cascade, Item, Part
from actors.run.dispatch import Holdings, calls_of
from actors.worker.caching import ResultCache, host_copy
from actors.worker.handoff import EncodeResult, EncodeStore, HandoffError, Inputs, gather_inputs
from actors.worker.worker import _published
from data.cache import Cache
from data.config import CacheConfig
from ops.comm.collectives import Group
from ops.geometry import Geometry
from ops.waiting import Cancelled, CancelToken, GroupError
from tests.actors.exactness import items_of, make_hosts, one_worker, run_step, train_config
from tests.actors.fakes import step_items
from tests.families.registry import MODELS
from tests.ops.conftest import _run_ranks as on_ranks

GEOMETRY = Geometry(vae_stride=(4, 8, 8))
SAMPLES = step_items(3, [("a", (5, 32, 32), ["0/0/7", "0/0/8"]), ("b", (1, 32, 32), ["0/0/9"])], GEOMETRY, "sample")


def cascade(
    name: str, module: str, item: str, first: int, count: int, workers: tuple[int, ...], start: float, step: int = 3
) -> Cascade:
    return Cascade(
        id=name,
        module=module,
        step=step,
        parts=(Part(item=item, first=first, count=count),),
        degree=len(workers),
        workers=workers,
        start_s=start,
        end_s=start + 1,
    )


def calls(*cascades: Cascade, holdings: Holdings | None = None) -> list:
    return calls_of(cascades, {3: SAMPLES}, 1, 3, holdings or Holdings())


def test_a_result_stays_in_place_when_its_consumer_is_there() -> None:
    text, vae, dit = calls(
        cascade("t", "text", "b", 0, 1, (1,), 0),
        cascade("v", "vae", "b", 0, 1, (1,), 1),
        cascade("d", "dit", "b", 0, 1, (1,), 2),
    )
    assert text.task.keep == vae.task.keep == (0,) and text.task.publish == vae.task.publish == ()
    assert dit.task.sources == {"text": (0,), "vae": (0,)} and dit.needs == ()


def test_a_result_for_another_worker_is_published_and_named_as_an_argument() -> None:
    made = calls(
        cascade("t", "text", "b", 0, 1, (0,), 0),
        cascade("v", "vae", "b", 0, 1, (2,), 0),
        cascade("d", "dit", "b", 0, 1, (1,), 2),
    )
    assert [c.task.publish for c in made[:2]] == [(0,), (0,)] and made[0].task.keep == ()
    assert made[2].needs == ("t", "v") and made[2].task.sources == {"text": (STORE,), "vae": (STORE,)}


def test_inside_a_bag_the_producer_is_named_by_its_rank() -> None:
    made = calls(
        cascade("t", "text", "b", 0, 1, (3,), 0),
        cascade("v", "vae", "b", 0, 1, (1,), 0),
        cascade("d", "dit", "b", 0, 1, (3, 1), 2),
    )
    assert [c.rank for c in made[2:]] == [1, 3]
    assert made[2].task.sources == {"text": (1,), "vae": (0,)}


def test_a_split_item_is_taken_sample_by_sample() -> None:
    made = calls(
        cascade("t", "text", "a", 0, 2, (0,), 0),
        cascade("v", "vae", "a", 0, 2, (0,), 1),
        cascade("d0", "dit", "a", 0, 1, (0,), 2),
        cascade("d1", "dit", "a", 1, 1, (1,), 2),
    )
    assert made[0].task.keep == (0,) and made[0].task.publish == (1,)
    assert made[3].task.sources["vae"] == (STORE,) and [s.index for s in made[3].task.samples] == [1]


def test_an_encode_whose_consumer_is_not_planned_yet_is_kept_and_published() -> None:
    holdings = Holdings()
    early = calls(
        cascade("t", "text", "b", 0, 1, (0,), 0), cascade("v", "vae", "b", 0, 1, (1, 2), 0), holdings=holdings
    )
    assert [c.task.keep for c in early] == [(0,), (0,), (0,)]
    assert [c.task.publish for c in early] == [(0,), (0,), ()]
    later = calls(cascade("d", "dit", "b", 0, 1, (2,), 0), holdings=holdings)
    assert later[0].task.sources == {"text": (STORE,), "vae": (0,)} and later[0].needs == ("t",)


def test_weights_of_a_step_add_up_to_one() -> None:
    for how in ("sample", "token"):
        samples = step_items(0, [("a", (5, 32, 32), ["1", "2"]), ("b", (1, 32, 32), ["3"])], GEOMETRY, how)
        assert sum(s.weight for of in samples.items.values() for s in of.samples) == pytest.approx(1)


def test_a_result_of_the_wrong_shape_or_dtype_is_refused_by_name() -> None:
    sample = SAMPLES.items["b"].samples[0]
    good = {"vae": torch.zeros(4, 8), "text": torch.zeros(3, 5)}
    sources = {"vae": (STORE,), "text": (STORE,)}

    def gather(vae: torch.Tensor, text: torch.Tensor) -> object:
        fetched = {
            ("vae", sample.id): EncodeResult(id=sample.id, rows=vae),
            ("text", sample.id): EncodeResult(id=sample.id, rows=text),
        }
        return gather_inputs([sample], sources, EncodeStore(), fetched, Group.solo(), torch.device("cpu"), (8, 5))

    assert gather(**good).rows[0].shape == (4, 8)
    for wrong in (
        {"vae": torch.zeros(3, 8)},
        {"vae": torch.zeros(4, 9)},
        {"text": torch.zeros(3, 4)},
        {"vae": torch.zeros(4, 8, dtype=torch.int64)},
        {"text": torch.zeros(5)},
    ):
        with pytest.raises(HandoffError, match=r"sample 0/0/9 \(item b\)"):
            gather(**{**good, **wrong})


def test_bytes_of_the_object_store_and_of_the_bag_are_counted_apart() -> None:
    sample = SAMPLES.items["b"].samples[0]
    rows = {"vae": torch.zeros(4, 8), "text": torch.zeros(3, 5)}
    fetched = {(module, sample.id): EncodeResult(id=sample.id, rows=value) for module, value in rows.items()}
    store = EncodeStore()
    store.keep("text", fetched["text", sample.id])

    def gather(text: int, vae: int) -> Inputs:
        sources = {"text": (text,), "vae": (vae,)}
        return gather_inputs([sample], sources, store, fetched, Group.solo(), torch.device("cpu"), (8, 5))

    mixed = gather(text=0, vae=STORE)
    assert (mixed.bytes_received, mixed.bytes_fetched) == (0, 4 * 8 * 4)
    both = gather(text=STORE, vae=STORE)
    assert both.bytes_fetched == 4 * 8 * 4 + 3 * 5 * 4


def test_what_came_from_other_workers_is_reported_with_the_cascade() -> None:
    hosts = make_hosts(2, torch.float32, train_config())
    items = [Item(id="s0.0", batch=1, frames=5, height=32, width=32, text_tokens=12)]
    plan = [replace(c, workers=(1,)) if c.module == "dit" else c for c in one_worker(items)]
    run_step(hosts, items, plan, finish=False)
    (dit,) = [s for s in hosts[1].executor.work.spans if s.module == "dit"]
    tokens, (patch, _) = 2 * 2 * 2, hosts[1].executor.widths
    assert dit.fetched_bytes == dit.handoff_bytes > tokens * patch * 4 and dit.handoff_s > 0
    run_step(hosts, [replace(items[0], id="s0.1")], one_worker([replace(items[0], id="s0.1")]), finish=False)
    (dit,) = [s for s in hosts[0].executor.work.spans if s.module == "dit"]
    assert dit.handoff_bytes == 0 and dit.handoff_s == 0.0


def test_a_result_that_is_not_there_is_named() -> None:
    with pytest.raises(HandoffError, match="vae result of sample"):
        EncodeStore().take("vae", SAMPLES.items["b"].samples[0].id)


def test_results_are_freed_at_their_consumer() -> None:
    hosts = make_hosts(2, torch.float32, train_config())
    items = items_of(np.random.default_rng(0), 3)
    run_step(hosts, items, one_worker(items))
    assert [len(host.executor.store) for host in hosts] == [0, 0]


class NaNVAE:
    """Encodes like the real one, into nothing usable."""

    def __init__(self, real: object) -> None:
        self.real, self.channels = real, real.channels

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        return self.real.encode(video) * float("nan")


def test_a_step_with_a_nan_loss_changes_nothing_and_names_its_samples() -> None:
    hosts = make_hosts(1, torch.float32, train_config())
    executor, items = hosts[0].executor, items_of(np.random.default_rng(0), 1)
    before = [p.detach().clone() for p in executor.modules.dit.parameters()]
    real, executor.modules.vae = executor.modules.vae, NaNVAE(executor.modules.vae)
    run_step(hosts, items, one_worker(items))
    done = hosts[0].done
    assert not done.result.applied and done.bad_samples[0].startswith("non-finite loss: 0/0/s0.0/")
    assert all(torch.equal(a, b) for a, b in zip(before, executor.modules.dit.parameters(), strict=True))
    executor.modules.vae = real
    assert np.isfinite(
        run_step(
            hosts, items_of(np.random.default_rng(1), 1, 1), one_worker(items_of(np.random.default_rng(1), 1, 1), 1), 1
        )
    )


class InBf16:
    """An encoder that computes in bf16, as those from a folder do on GPUs."""

    def __init__(self, real: Any) -> None:
        self.real, self.channels, self.dim = real, getattr(real, "channels", 0), getattr(real, "dim", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def encode(self, what: Any) -> Any:
        found = self.real.encode(what)
        return found.bfloat16() if isinstance(found, torch.Tensor) else [row.bfloat16() for row in found]

    def encode_tile(self, video: torch.Tensor, tile: Any) -> torch.Tensor:
        return self.real.encode_tile(video, tile).bfloat16()


def test_a_text_of_a_frame_that_did_not_decode_is_not_kept(tmp_path: Path) -> None:
    """Its name says a frame that it was not made of."""
    kept: list[tuple[str, str]] = []
    writer = SimpleNamespace(
        cache=Cache(CacheConfig(path=str(tmp_path))),
        submit_later=lambda kind, key, ready, size: kept.append((kind, key)),
    )
    cache = ResultCache(writer, host_copy)  # type: ignore[arg-type]

    def to_cache(task: CascadeTask, results: list[EncodeResult]) -> None:
        named = tuple(replace(s, text_key=f"t{s.index}", latent_key=f"l{s.index}") for s in task.samples)
        cache(replace(task, samples=named), results)

    model = MODELS["hunyuan i2v token_replace"]
    hosts = make_hosts(1, torch.float32, train_config(), config=model, on_encoded=to_cache)
    items = [Item(id="s0.0", batch=2, frames=5, height=32, width=32, text_tokens=12)]
    run_step(hosts, items, one_worker(items), bad=frozenset({("s0.0", 1)}))
    assert kept == [("text", "t0"), ("latents", "l0")]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_sample_is_not_ok_whose_text_is_of_a_frame_that_did_not_decode(degree: int) -> None:
    """Its latent may come out of a cache, where it is right."""
    sample = SAMPLES.items["b"].samples[0]
    results = {
        "vae": EncodeResult(id=sample.id, rows=torch.zeros(4, 8)),
        "text": EncodeResult(id=sample.id, rows=torch.zeros(3, 5), ok=False),
    }

    def gather(group: Group) -> list[bool]:
        store = EncodeStore()
        store.keep("text", results["text"])
        fetched = {("vae", sample.id): results["vae"]}
        sources = {"text": (0,), "vae": (STORE,)}
        return gather_inputs([sample], sources, store, fetched, group, torch.device("cpu"), (8, 5)).ok

    assert on_ranks(degree, gather) == [[False]] * degree


def test_what_a_bag_may_not_have_finished_is_not_kept(tmp_path: Path) -> None:
    """A collective that was aborted on a device ends without an error. The copies come when the host has gone on."""
    coming: list[Callable[[], np.ndarray]] = []
    writer = SimpleNamespace(
        cache=Cache(CacheConfig(path=str(tmp_path))), submit_later=lambda kind, key, ready, size: coming.append(ready)
    )
    hosts = make_hosts(2, torch.float32, train_config())
    cancel = hosts[0].executor.groups._cancel  # type: ignore[union-attr]
    cache = ResultCache(writer, host_copy, hosts[0].executor.check_of)  # type: ignore[arg-type]
    sample = SimpleNamespace(latent_key="l", text_key="t")
    rows = [EncodeResult(id=(0, "s0.0", 0), rows=torch.ones(4, 8))]  # type: ignore[arg-type]
    for bag in ((0,), (0, 1)):
        cache(SimpleNamespace(module="vae", name="vae s0", bag=bag, samples=(sample,)), rows)  # type: ignore[arg-type]
    alone, shared = coming
    assert (alone() == 1).all() and (shared() == 1).all()
    cancel.set("generation 2 has begun")
    with pytest.raises(Cancelled, match="vae s0 cancelled: generation 2"):
        shared()
    assert (alone() == 1).all()
    cache(SimpleNamespace(module="vae", name="vae s0", bag=(0, 1), samples=(sample,)), rows)  # type: ignore[arg-type]
    hosts[0].executor.groups._cancel = CancelToken()  # type: ignore[union-attr]
    hosts[0].executor.leave()
    with pytest.raises(GroupError, match="closed"):
        coming[-1]()


def test_results_of_encoders_in_bf16_go_every_way(tmp_path: Path) -> None:
    """Kept, shared in a bag, published at once or later, and into the cache: always the same fp32 rows."""
    kept: list[tuple[str, str, np.dtype]] = []
    writer = SimpleNamespace(
        cache=Cache(CacheConfig(path=str(tmp_path))),
        submit_later=lambda kind, key, ready, size: kept.append((kind, key, ready().dtype)),
    )
    cache, published = ResultCache(writer, host_copy), []  # type: ignore[arg-type, var-annotated]

    def to_cache(task: CascadeTask, results: list[EncodeResult]) -> None:
        named = tuple(replace(s, text_key=f"t{s.id}", latent_key=f"l{s.id}") for s in task.samples)
        cache(replace(task, samples=named), results)
        published.extend(_published(task.module, [replace(r, rows=r.rows.cpu()) for r in results]))

    hosts = make_hosts(2, torch.float32, train_config(), on_encoded=to_cache)
    for host in hosts:
        modules = host.executor.modules
        modules.text, modules.vae = InBf16(modules.text), InBf16(modules.vae)
    items = [Item(id=f"s0.{n}", batch=2, frames=5, height=32, width=32, text_tokens=12) for n in range(2)]
    plan = [
        replace(c, workers=workers, degree=len(workers))
        for c, workers in zip(one_worker(items), [(0,), (0,), (1,), (0, 1), (0, 1), (0, 1)], strict=True)
    ]
    run_step(hosts, items, plan)
    assert len(kept) == 8 and {dtype for *_, dtype in kept} == {np.dtype(np.float32)}
    assert len(published) == 8 and {p.rows.dtype for p in published} == {np.dtype(np.float32)}
