"""Workers with other copies of a frozen model do not train together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.config import WorkersConfig
from actors.held_state import Origin
from actors.messages import WorkerInfo, WorkerSettings
from actors.pool.lookout import Lookout
from actors.pool.membership import Membership
from actors.pool.membership_types import Arrival, Boundary, Limits
from actors.pool.monitor import Monitor
from actors.pool.workers import PoolNews
from actors.progress import Orders
from actors.records.events import WorkerLost
from actors.run.forming import disagreement, first_disagreement
from actors.state.checkpoint_files import GONE, FirstStateLost
from actors.worker.loading import FirstWeights, build_modules
from actors.worker.worker import Worker
from ops.models.config import ModelConfig
from ops.models.load import build_dit
from ops.models.wan.config import WanConfig
from ops.models.weights import checksums, frozen_digests
from ops.update.flat_vector import trainable
from tests.actors.exactness import train_config
from tests.actors.fakes import Handle, Listening, StateHere, controller_of, pool_here
from tests.families.kit import MODEL


def info(worker: str, **frozen: str) -> WorkerInfo:
    return WorkerInfo(worker=worker, node="n", host=f"host-of-{worker}", pid=1, device="cpu",
                      frozen=tuple(frozen.items()))  # fmt: skip


def test_who_holds_other_weights_is_named() -> None:
    assert disagreement([info("w0", vae="1", text="2"), info("w1", vae="1", text="2")]) == ""
    assert disagreement([info("w0")]) == ""
    said = disagreement([info("w0", vae="1", text="2"), info("w1", vae="1", text="3"), info("w2", vae="1", text="2")])
    assert "the weights of text on w1 on host-of-w1 are not those on w0, w2" in said
    later = [info("w0", vae="1", text="2"), info("w1", vae="1"), info("w2", vae="1", text="2")]
    assert disagreement(later) == "", "w1 has not made its text encoder, and compares it when it does"
    said = disagreement([*later, info("w3", vae="1", text="3")])
    assert "text on w3 on host-of-w3 are not those on w0, w2" in said


def test_a_generation_of_workers_that_hold_other_weights_is_not_formed() -> None:
    infos = {"w0": info("w0", vae="1"), "w1": info("w1", vae="2")}
    up = [Arrival(worker=n, info=infos[f"w{n}"]) for n in (0, 1)]
    looks = [[], up]  # the first one while the data is opened
    outcome = controller_of(
        StateHere(-1, first=-1),
        membership=Membership(Limits(min=2, max=2), generation=1),
        pool=pool_here(names=["w0", "w1"]),
        lookout=SimpleNamespace(look=lambda: looks.pop(0) if looks else [], stop="", hopeless=""),
    ).train()
    assert outcome.code == 1 and outcome.last_step == -1
    assert "vae" in outcome.reason and "w1" in outcome.reason


class Loading:
    """A pool whose workers are ready at the next look; `removed` were ended."""

    shunned: tuple[str, ...] = ()
    at_rest: tuple[str, ...] = ()

    def __init__(self, *infos: WorkerInfo) -> None:
        self.ready, self.names, self.removed = list(infos), list[str](), list[str]()
        self.pending, self.misplaced = list[str](), list[str]()

    def poll(self) -> PoolNews:
        ready, self.ready = self.ready, []
        return PoolNews(ready=tuple(ready))

    def start(self, count: int) -> None: ...
    def hosting(self, name: str) -> None: ...
    def remove(self, name: str, frozen: bool = False) -> None:
        self.removed.append(name)


def test_a_worker_with_other_weights_does_not_join_a_run_that_has_taken_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on with those that it has. Before the first step nobody knows whose are the right ones."""
    monkeypatch.setattr("actors.pool.lookout.free_outside", lambda nodes: {})
    monkeypatch.setattr("actors.pool.lookout.draining_nodes", frozenset)
    monkeypatch.setattr("actors.pool.lookout.get", lambda report, timeout: report)
    pool, listener = Loading(info("w0", vae="1", text="2"), info("w1", vae="1")), Listening()
    lookout = Lookout(
        WorkersConfig(min=1, max=6, device="cpu"), pool, Handle(collect=Monitor().collect), listener.on_event
    )
    parts: dict[str, Any] = {"pool": pool, "lookout": lookout, "membership": Membership(Limits(min=2, max=6))}
    generations: Any = controller_of(StateHere(), **parts).generations
    formed: list[tuple[int, ...]] = []
    monkeypatch.setattr(generations, "_form", lambda decision: formed.append(decision.workers))
    generations.look()
    generations.finished(SimpleNamespace(running=SimpleNamespace(generation=1)))
    pool.ready = [info("w2", vae="1"), info("w3", vae="1", text="3"), info("w4", vae="2")]
    generations.look()
    generations.observe(Boundary())
    assert formed == [(0, 1), (0, 1, 2)] and pool.removed == ["w3", "w4"]
    assert [event.describe() for event in listener.told if isinstance(event, WorkerLost)] == [
        f"worker {name} was lost (host-of-{name}: the weights of {part} are not those that the run trains with. Give "
        f"all nodes the same files)"
        for name, part in (("w3", "text"), ("w4", "vae"))
    ]


def begins_with(worker: str, **sums: int) -> WorkerInfo:
    return replace(info(worker), first=tuple(sums.items()))


def test_who_begins_with_other_weights_is_named() -> None:
    alike = [begins_with(f"w{i}", head=1, body=2) for i in range(3)]
    assert first_disagreement(alike) == "" and first_disagreement(alike[:1]) == ""
    said = first_disagreement([*alike[:2], begins_with("w2", head=1, body=3)])
    assert "the first weights on w2 on host-of-w2 are not those of the other workers (first in body)" in said
    for other in (begins_with("w2", head=1), begins_with("w2", head=1, body=2, tail=3)):
        assert "on w2 on host-of-w2" in first_disagreement([*alike[:2], other])


def test_who_lacks_the_checkpoint_that_a_run_begins_with_is_named_one_or_all() -> None:
    lacks = [replace(info(f"w{n}"), first=(("head", 1), ("train.init_from", GONE))) for n in range(3)]
    has = replace(lacks[2], first=(("head", 1), ("train.init_from", 7)))
    said = first_disagreement([*lacks[:2], has], "/runs/a/checkpoints/step-3")
    assert "init_from /runs/a/checkpoints/step-3 is no complete checkpoint for w0 on host-of-w0, w1 on" in said
    assert "w2" not in said
    assert "w2 on host-of-w2, and the run has no state of its own" in first_disagreement(lacks, "/runs/a")
    assert first_disagreement([has, replace(has, worker="w3")], "/runs/a") == ""


def started(monkeypatch: pytest.MonkeyPatch, init_from: Path) -> Worker:
    """A worker as its process makes it, but for Ray."""
    monkeypatch.setattr("actors.worker.worker.node_id", lambda: "n")
    monkeypatch.setattr("actors.worker.worker.given_gpu", lambda: "")
    monkeypatch.setattr("actors.worker.worker.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("actors.worker.heartbeat.get", lambda reference, timeout: Orders(generation=-1))
    monkeypatch.setattr(Worker, "_on_sigterm", lambda self: None)
    monkeypatch.setattr("actors.worker.worker.stay_near", lambda numa: None)
    silent = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda seen: threading.Event().wait()))
    monitor: Any = SimpleNamespace(beat=silent)
    settings = WorkerSettings(
        model=MODEL, train=train_config(init_from=str(init_from)), workers=WorkersConfig(device="cpu")
    )
    return Worker("w0", settings, monitor)


def test_a_worker_starts_without_the_checkpoint_that_its_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has a state of its own reads it no more, and the other run may have removed it."""
    worker = started(monkeypatch, tmp_path / "gone")
    assert worker._failed is None, worker._failed
    assert worker._first_sums[-1] == ("train.init_from", GONE)
    dit, config = worker.executor.modules.dit, worker.executor.modules.config.dit
    first = worker._first.source(dit, config)  # as each generation makes it
    with pytest.raises(FirstStateLost, match=r"gone is gone.* steps that it has taken are lost\. Put that .* --resume"):
        first(0, 10)


class Recovering(StateHere):
    """Recovers from `origin`; None is a new run."""

    def __init__(self, origin: Origin | None) -> None:
        super().__init__(-1, first=-1)
        self._origin = origin

    def recover(self, commits: object) -> SimpleNamespace:
        return SimpleNamespace(origin=self._origin, newly_safe=self._went_on())

    def _went_on(self) -> Iterator[None]:
        self.asked.append("went on")
        raise RuntimeError("far enough")
        yield


def test_a_new_run_begins_only_with_equal_weights() -> None:
    infos = {"w0": begins_with("w0", head=1), "w1": begins_with("w1", head=2)}
    for origin, refused in ((None, True), (Origin(step=3), False)):
        up = [Arrival(worker=n, info=infos[f"w{n}"]) for n in (0, 1)]
        looks, state = [[], up], Recovering(origin)
        controller = controller_of(
            state,
            membership=Membership(Limits(min=2, max=2), generation=1),
            pool=pool_here(names=["w0", "w1"]),
            lookout=SimpleNamespace(look=lambda left=looks: left.pop(0) if left else [], stop="", hopeless=""),
        )
        if refused:
            outcome = controller.train()
            assert outcome.code == 1 and "the first weights on w1 on host-of-w1" in outcome.reason
        else:
            with pytest.raises(RuntimeError, match="far enough"):
                controller.train()
        assert ("went on" in state.asked) != refused


def test_checksums_see_a_single_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(5, 3).to(dtype)
        other = tensor.clone()
        other.view(torch.int16)[2, 1] ^= 1
        assert checksums([("a", tensor)]) == checksums([("a", tensor.clone())]) != checksums([("a", other)])


def test_sums_of_a_part_of_other_memory_are_those_of_a_copy() -> None:
    """It may begin between two words of 8 bytes."""
    whole = torch.randn(40)
    for dtype in (torch.float32, torch.bfloat16):
        for first in range(4):
            part = whole.to(dtype)[first : first + 21]
            assert checksums([("a", part)]) == checksums([("a", part.clone())])


def test_a_digest_covers_what_is_loaded_from_a_folder_and_never_trained(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            self.model = torch.nn.Linear(2, 2).bfloat16()
            torch.nn.init.constant_(self.model.weight, value)
            torch.nn.init.constant_(self.model.bias, 0)

    base = WanConfig(num_layers=1, num_heads=2, head_dim=8, ffn_dim=16, freq_dim=8, lora_rank=2)
    dit = build_dit(base, 0)
    from_folder = replace(base, path=str(tmp_path))
    config = ModelConfig(dit=from_folder, vae=replace(MODEL.vae, kind="diffusers", path=str(tmp_path)), text=MODEL.text)
    first = frozen_digests(config, dit, Holder(1), Holder(1))
    assert [part for part, _ in first] == ["model.dit.path", "model.vae.path"], "a random text encoder needs none"
    assert frozen_digests(config, dit, Holder(1), Holder(2)) == first
    with torch.no_grad():
        trainable(dit)[0][1].add_(1)
    assert frozen_digests(config, dit, Holder(1), Holder(1)) == first
    assert frozen_digests(config, dit, Holder(2), Holder(1))[0] == first[0]
    assert frozen_digests(config, dit, Holder(2), Holder(1))[1] != first[1]
    with torch.no_grad():
        next(p for p in dit.parameters() if not p.requires_grad).view(-1)[0] += 1
    assert frozen_digests(config, dit, Holder(1), Holder(1))[0] != first[0]


def test_attention_that_the_device_lacks_is_refused_before_weights_are_read() -> None:
    model = replace(MODEL, dit=replace(MODEL.dit, attention="cudnn"))
    settings = WorkerSettings(model=model, train=train_config(), workers=WorkersConfig())
    with pytest.raises(ValueError, match=r"model.dit.attention cudnn cannot be used here: .* needs a CUDA device"):
        build_modules(settings, torch.device("cpu"))


def test_training_in_bf16_starts_from_the_weights_in_fp32() -> None:
    first, train = FirstWeights(train_config(seed=3)), train_config(parameter_dtype="bfloat16")
    settings = WorkerSettings(model=MODEL, train=train, workers=WorkersConfig())
    modules = build_modules(settings, torch.device("cpu"))
    given = torch.cat([p.detach().flatten() for _, p in trainable(build_dit(modules.config.dit, 3))])
    computed = torch.cat([p.detach().flatten() for _, p in trainable(modules.dit)])
    assert computed.dtype == torch.bfloat16 and torch.equal(computed, given.bfloat16())
    for forget in (lambda: None, first.trained):  # also when all state is lost after some steps
        forget()
        shard_of = first.source(modules.dit, modules.config.dit)
        parts = [shard_of(lo, hi).arrays["master"] for lo, hi in ((0, 100), (100, given.numel()))]
        assert torch.equal(torch.cat([torch.from_numpy(part) for part in parts]), given)
