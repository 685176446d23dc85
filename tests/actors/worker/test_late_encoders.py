"""An encoder whose results are in a cache is made when one of them is missing, and no sooner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from actors.config import WorkersConfig
from actors.messages import CascadeTask, StaleGeneration, WorkerSettings
from actors.plan.types import ENCODED, Item, Module
from actors.worker import loading
from actors.worker.loading import LateEncoder, Modules, build_modules, late_sizes
from actors.worker.worker import Worker
from data.cache import Cache, kept_kinds
from data.config import CacheConfig
from ops.models.config import ModelConfig, VAEConfig
from tests.actors.exactness import make_hosts, one_worker, run_step, train_config
from tests.families.kit import MODEL
from tests.ops.test_frozen import t5_folder
from tests.ops.test_vae import every

CPU = torch.device("cpu")
ITEMS = [Item(id=f"s0.{n}", batch=2, frames=5, height=32, width=32, text_tokens=12) for n in range(2)]


def never() -> Any:
    raise AssertionError("nothing has to be encoded here")


def task_of(step: int, module: Module = "text", generation: int = 1) -> CascadeTask:
    return CascadeTask(
        generation=generation,
        step=step,
        cascade="c0",
        name=f"{module} s{step}",
        module=module,
        bag=(0,),
        samples=(),
        pieces=(),
        planned_start_s=0.0,
        planned_end_s=1.0,
    )


def without_encoders(modules: Modules) -> Modules:
    return Modules(
        config=modules.config,
        geometry=modules.geometry,
        dit=modules.dit,
        vae=LateEncoder(never),
        text=LateEncoder(never),
        image=None,
    )


def test_a_worker_that_is_given_all_results_makes_no_encoder() -> None:
    hosts = make_hosts(2, torch.float32, train_config())
    alone = make_hosts(1, torch.float32, train_config())
    hosts[1].executor.modules = without_encoders(hosts[1].executor.modules)
    plan = [replace(c, workers=(1,) if c.module == "dit" else (0,)) for c in one_worker(ITEMS)]
    loss = run_step(hosts, ITEMS, plan)
    assert loss == pytest.approx(run_step(alone, ITEMS, one_worker(ITEMS)), rel=1e-6)
    assert all(hosts[1].executor.modules.lacks(module) for module in ("text", "vae"))


@pytest.mark.parametrize("cached", [(), ("text",), ("vae", "text")])
def test_encoders_are_made_at_once_unless_a_cache_has_results_of_theirs(
    cached: tuple[Module, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for part in ("text", "vae"):
        build = getattr(loading, f"build_{part}")
        noted = lambda *given, build=build, part=part, **named: (made.append(part), build(*given, **named))[1]  # noqa: E731
        monkeypatch.setattr(loading, f"build_{part}", noted)
    settings = WorkerSettings(model=MODEL, train=train_config(), workers=WorkersConfig(), cached=cached)
    modules = build_modules(settings, CPU)
    assert sorted(made) == sorted({"text", "vae"} - set(cached))
    assert [modules.lacks("text"), modules.lacks("vae")] == ["text" in cached, "vae" in cached]
    for module in ("vae", "text", "vae"):
        modules.ready(module)
    assert sorted(made) == ["text", "vae"] and not modules.lacks("vae") and not modules.lacks("dit")
    assert modules.text is modules.text and modules.vae.channels == 8


def test_a_task_that_may_not_run_makes_no_encoder() -> None:
    (host,) = make_hosts(1, torch.float32, train_config())
    executor, encoding = host.executor, host.encoding
    executor.modules = without_encoders(executor.modules)
    worker: Any = SimpleNamespace(executor=executor)
    for module in ENCODED:
        stale = task_of(3, module, generation=executor.generation + 1)
        encode = (
            partial(encoding.text, stale, []) if module == "text" else partial(encoding.vae, stale, np.empty(0), [])
        )
        for call in (partial(Worker._ready, worker, module, stale), encode):
            with pytest.raises(StaleGeneration):
                call()


def folders(tmp_path: Path) -> ModelConfig:
    every("wan").model.save_pretrained(tmp_path / "vae")
    return replace(MODEL, vae=VAEConfig(kind="diffusers", path=str(tmp_path)), text=t5_folder(tmp_path))


def test_what_encoders_will_take_is_known_before_they_are_made(tmp_path: Path) -> None:
    model = folders(tmp_path)
    settings = WorkerSettings(model=model, train=train_config(), workers=WorkersConfig(), cached=("text", "vae"))
    modules = build_modules(settings, CPU)
    on_cpu, on_gpu = late_sizes(modules, CPU), late_sizes(modules, torch.device("cuda"))
    assert late_sizes(modules, CPU, never=("vae", "text")) == (0.0, 0.0), "a run that takes all from its cache"
    without_text = late_sizes(modules, CPU, never=("text",))
    host = replace(modules.config, text=replace(modules.config.text, place="host"))
    visiting = late_sizes(SimpleNamespace(config=host, lacks=modules.lacks), torch.device("cuda"))  # type: ignore[arg-type]
    modules.ready("vae"), modules.ready("text")
    vae, text = (
        sum(p.numel() for p in module.parameters())
        for module in (modules.vae.model, modules.text.encoder)  # type: ignore[attr-defined]
    )
    assert on_cpu.device * 2**30 == on_cpu.host * 2**30 == 4 * (vae + text)
    assert without_text.device * 2**30 == without_text.host * 2**30 == 4 * vae
    assert (on_gpu.device * 2**30, on_gpu.host) == (2 * (vae + text), 0.0)
    assert (visiting.device * 2**30, visiting.host * 2**30) == (2 * vae, 2 * text)
    assert late_sizes(modules, CPU) == (0.0, 0.0)


def test_a_cache_that_has_nothing_of_a_kind_spares_no_encoder(tmp_path: Path) -> None:
    config = CacheConfig(path=str(tmp_path))
    assert kept_kinds(CacheConfig()) == kept_kinds(config) == ()
    Cache(config).put("text", "ab" * 32, torch.zeros(2, 3).numpy())
    assert kept_kinds(config) == ("text",) and kept_kinds(replace(config, text=False)) == ()


def test_workers_that_make_other_encoders_later_do_not_train_together(tmp_path: Path) -> None:
    store = HashStore()

    def worker(name: str, folder: Path) -> Any:
        settings = WorkerSettings(
            model=folders(folder), train=train_config(), workers=WorkersConfig(), cached=("text", "vae")
        )
        made = SimpleNamespace(name=name, settings=settings, device=CPU, _store=store, _late_digests={}, loads=[])
        made.executor = SimpleNamespace(
            modules=build_modules(settings, CPU),
            meter=SimpleNamespace(settled=lambda: made.loads.append("settled")),
            admit=lambda generation: None,
        )
        made._late = late_sizes(made.executor.modules, CPU)
        made.heartbeat = SimpleNamespace(activity=lambda name, *rest: made.loads.append(name))
        made._compare_late = lambda: Worker._compare_late(made)
        return made

    first, same = worker("w0", tmp_path / "one"), worker("w1", tmp_path / "two")
    for one in (first, same):
        Worker._ready(one, "text", task_of(3))
        Worker._ready(one, "text", task_of(4))
        assert one.loads == ["load text encoder", "settled"], "once"
    other = worker("w2", tmp_path / "three")
    file = tmp_path / "three" / "text_encoder" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-2, 2)
        opened.write(b"\x01\x02")
    with pytest.raises(
        ValueError, match=r"the weights of model\.text\.path on w2 on .* are not those of other workers"
    ):
        Worker._ready(other, "text", task_of(5))
