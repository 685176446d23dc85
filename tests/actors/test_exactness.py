"""Any legal plan gives the gradient of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import TrainMemoryConfig
from actors.messages import OutOfMemory, StaleGeneration
from actors.plan.places import StatePlace
from actors.run.communicators import Communicators
from actors.worker.work_done import WorkDone
from ops.config import FlowConfig, FrameLevels, OptimizerConfig, PictureNoise
from ops.update.node_routes import peers
from ops.update.parameter_places import ParametersOf
from ops.update.parameters import ParameterMemory
from ops.update.peer_sum import PeerSum
from ops.waiting import GroupError
from tests.actors.exactness import (
    Host,
    close_hosts,
    items_of,
    make_hosts,
    one_worker,
    random_cascades,
    run_step,
    train_config,
)
from tests.families.registry import MODELS
from tests.long import in_default_run
from tests.nccl_rules import nccl_rules
from tests.ops.block_copies import in_buffers
from tests.ops.exported import own_shard
from tests.ops.peers import in_host, in_peers

FP64, FP32 = 1e-10, 1e-5  # relative difference of the whole gradient
Nodes = tuple[int, ...] | None  # the node of each worker, in whose memory gradients are added; None: each has its own
SHARED = {"shared": "node", "in GPUs": in_peers, "beside GPUs": in_host}
_CACHE: dict[tuple[int, torch.dtype, str, Nodes, str], list[Host]] = {}


def hosts_of(
    world: int, dtype: torch.dtype, family: str = "wan", nodes: Nodes = None, memory: str = "shared"
) -> list[Host]:
    """Workers are kept between examples, those of one family at a time; each example ends with a clean gradient."""
    key = (world, dtype, family, nodes, memory)
    if any(made[2] != family for made in _CACHE):
        _CACHE.clear()
        close_hosts()
    if key not in _CACHE:
        gradients = "own" if nodes is None else SHARED[memory]
        _CACHE[key] = make_hosts(world, dtype, train_config(), config=MODELS[family], nodes=nodes, gradients=gradients)
    for host in _CACHE[key]:
        host.executor.sync.gradient().zero_()
        host.executor.sync.begin_step()
        host.executor.work = WorkDone()
    return _CACHE[key]


def gradient(hosts: list[Host], nodes: Nodes = None) -> torch.Tensor:
    """The sum over workers, or over one worker of each node."""
    holders = hosts if nodes is None else [hosts[nodes.index(node)] for node in dict.fromkeys(nodes)]
    if nodes is not None and isinstance(hosts[0].executor.sync.gradients.sum, PeerSum):
        return parts(hosts)
    return torch.stack([host.executor.sync.gradient() for host in holders]).sum(0)


def parts(hosts: list[Host]) -> torch.Tensor:
    """The sum over nodes of what their workers hold."""
    found = torch.zeros(hosts[0].executor.sync.total, dtype=torch.float64)
    for host in hosts:
        held = host.executor.sync.gradients.sum
        for lo, hi in held._held:
            found[lo:hi] += held.part(lo, hi)
    return found


def loss(hosts: list[Host]) -> float:
    return sum(host.executor.work.loss(0) for host in hosts)


def compare(
    seed: int,
    world: int,
    dtype: torch.dtype,
    limit: float,
    family: str = "wan",
    nodes: Nodes = None,
    memory: str = "shared",
) -> None:
    rng = np.random.default_rng(seed)
    items = items_of(rng, int(rng.integers(1, 4)), images=MODELS[family].dit.images_only)
    reference = hosts_of(1, dtype, family)
    run_step(reference, items, one_worker(items), finish=False)
    expected, expected_loss = gradient(reference).clone(), loss(reference)
    hosts = hosts_of(world, dtype, family, nodes, memory)
    run_step(hosts, items, random_cascades(rng, items, world), finish=False)
    for host in hosts if nodes is not None else []:
        host.executor.sync.gradients.sum.flush()
    assert loss(hosts) == pytest.approx(expected_loss, rel=limit)
    found = gradient(hosts, nodes)
    difference = (found - expected).norm() / expected.norm()
    assert difference < limit, f"gradient differs by {difference:.2e} on {world} workers"
    layout = hosts[0].executor.sync.layout
    largest = expected.abs().max()
    for slot in layout:
        part = (found[slot.lo : slot.hi] - expected[slot.lo : slot.hi]).abs().max() / largest
        assert part < limit, f"{slot.name} differs by {part:.2e}"


OTHER_MODELS = [name for name in MODELS if name != "wan"]  # which has a test of its own
ALIKE = (  # by the same blocks as another of the family, and other rows
    *("wan of 3 heads", "cogvideox 2b", "hunyuan of two text encoders", "hunyuan i2v latent_concat"),
    *("hunyuan15 i2v", "hunyuan15 of two text encoders", "kandinsky of two text encoders", "ltx 0.9.5"),
    *("ltx2 of all layers of its text", "skyreels i2v"),
)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.integers(2, 6))
def test_any_legal_plan_gives_the_gradient_of_one_worker_in_fp64(seed: int, world: int) -> None:
    compare(seed, world, torch.float64, FP64)


@pytest.mark.parametrize(
    "family",
    in_default_run([name for name in OTHER_MODELS if name not in ALIKE], of=OTHER_MODELS),
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.integers(2, 4))
def test_any_legal_plan_of_every_family_gives_the_gradient_of_one_worker(family: str, seed: int, world: int) -> None:
    compare(seed, world, torch.float64, FP64, family)


@pytest.mark.parametrize(
    "family",
    [
        *("wan", "mochi"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name, model in MODELS.items()
            if name not in ("wan", "mochi") and model.dit.deals_heads and model.dit.num_heads >= 4
        ),
    ],
)
def test_heads_in_halves_give_the_bits_of_whole_exchanges(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NCCL's rules, too: one order of launches on all workers, and equal sizes."""
    model, found = MODELS[family], {}
    for exchange in ("whole", "halves"):
        rng = np.random.default_rng(1)
        config = replace(model, dit=replace(model.dit, exchange=exchange))
        with nccl_rules(monkeypatch) as rules:
            hosts = make_hosts(4, torch.float32, train_config(), config=config)
            items = items_of(rng, 3, images=model.dit.images_only)
            run_step(hosts, items, random_cascades(rng, items, 4), finish=False)
            found[exchange] = (gradient(hosts), loss(hosts), rules.collectives)
    whole, halves = found["whole"], found["halves"]
    assert torch.equal(halves[0], whole[0]) and halves[1] == whole[1]
    assert halves[2] > whole[2], "no bag had two heads for each of its workers"


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.long), 0.25])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.integers(2, 4))
def test_any_legal_plan_gives_the_gradient_of_one_worker_with_first_frames_given(
    noise: float, seed: int, world: int
) -> None:
    train = train_config(flow=FlowConfig(first_frame=0.5, first_frame_noise=noise))
    rng = np.random.default_rng(seed)
    items = items_of(rng, 3)
    reference, hosts = make_hosts(1, torch.float64, train), make_hosts(world, torch.float64, train)
    run_step(reference, items, one_worker(items), finish=False)
    run_step(hosts, items, random_cascades(rng, items, world), finish=False)
    expected = gradient(reference)
    assert (gradient(hosts) - expected).norm() / expected.norm() < FP64
    assert loss(hosts) == pytest.approx(loss(reference), rel=FP64)


def test_a_first_frame_that_is_given_is_another_loss() -> None:
    items = [item for item in items_of(np.random.default_rng(5), 6) if item.frames > 1][:1]
    losses = []
    for first_frame, noise in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.9)):
        flow = FlowConfig(first_frame=first_frame, first_frame_noise=noise)
        hosts = make_hosts(1, torch.float64, train_config(flow=flow))
        run_step(hosts, items, one_worker(items), finish=False)
        losses.append(loss(hosts))
    noisy, clean, little = losses
    assert abs(noisy - clean) > 1e-3 * noisy and abs(clean - little) > 1e-4 * clean


@pytest.mark.parametrize(
    ("family", "levels", "first_frame"),
    [
        ("skyreels", "rising", 0.5),
        pytest.param("wan", "independent", 0.0, marks=pytest.mark.long),
        pytest.param("ltx", "rising", 0.5, marks=pytest.mark.long),
        pytest.param("ltx2", "independent", 0.0, marks=pytest.mark.long),
        pytest.param("wan", "rising", 0.5, marks=pytest.mark.long),
        pytest.param("ltx", "independent", 0.0, marks=pytest.mark.long),
        pytest.param("skyreels", "independent", 0.0, marks=pytest.mark.long),
    ],
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.integers(2, 4))
def test_any_legal_plan_gives_the_gradient_of_one_worker_with_levels_by_frame(
    family: str, levels: FrameLevels, first_frame: float, seed: int, world: int
) -> None:
    flow = FlowConfig(frame_levels=levels, first_frame=first_frame, first_frame_noise=first_frame / 4)
    train, rng = train_config(flow=flow), np.random.default_rng(seed)
    items = items_of(rng, 3)
    reference = make_hosts(1, torch.float64, train, config=MODELS[family])
    hosts = make_hosts(world, torch.float64, train, config=MODELS[family])
    run_step(reference, items, one_worker(items), finish=False)
    run_step(hosts, items, random_cascades(rng, items, world), finish=False)
    expected = gradient(reference)
    assert (gradient(hosts) - expected).norm() / expected.norm() < FP64
    assert loss(hosts) == pytest.approx(loss(reference), rel=FP64)


def test_levels_by_frame_are_another_loss() -> None:
    items = [item for item in items_of(np.random.default_rng(5), 6) if item.frames > 1][:1]
    losses = []
    for levels in ("one", "independent", "rising"):
        hosts = make_hosts(1, torch.float64, train_config(flow=FlowConfig(frame_levels=levels)))
        run_step(hosts, items, one_worker(items), finish=False)
        losses.append(loss(hosts))
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    "family",
    [
        "wan flf2v",
        pytest.param("cogvideox 5b i2v", marks=pytest.mark.long),
        pytest.param("hunyuan i2v token_replace", marks=pytest.mark.long),
    ],
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.integers(2, 4))
def test_any_legal_plan_gives_the_gradient_of_one_worker_with_noise_on_pictures(
    family: str, seed: int, world: int
) -> None:
    rng = np.random.default_rng(seed)
    items = items_of(rng, 2)
    model, noisy = MODELS[family], train_config(picture_noise=PictureNoise(mean=-1.0))
    clean, alone = (make_hosts(1, torch.float64, train, config=model) for train in (train_config(), noisy))
    for hosts in (clean, alone):
        run_step(hosts, items, one_worker(items), finish=False)
    assert abs(loss(clean) - loss(alone)) > 1e-5 * loss(clean)
    many = make_hosts(world, torch.float64, noisy, config=model)
    run_step(many, items, random_cascades(rng, items, world), finish=False)
    expected = gradient(alone)
    assert (gradient(many) - expected).norm() / expected.norm() < FP64
    assert loss(many) == pytest.approx(loss(alone), rel=FP64)


@pytest.mark.parametrize("family", [name for name, model in MODELS.items() if model.dit.clip_rate])
def test_a_clip_of_another_frame_rate_is_another_loss(family: str) -> None:
    items = [item for item in items_of(np.random.default_rng(5), 6) if item.frames > 1][:1]
    losses = []
    for rate in (0.0, MODELS[family].dit.clip_rate, 60.0):
        hosts = hosts_of(1, torch.float64, family)
        run_step(hosts, items, one_worker(items), finish=False, frame_rate=rate)
        losses.append(loss(hosts))
    assert losses[0] == losses[1] and abs(losses[2] - losses[0]) > 1e-6 * losses[0]


def test_the_gradient_depends_on_the_first_frame() -> None:
    """Image to video: other condition channels, or another image embedding, is another gradient."""
    rng = np.random.default_rng(3)
    items = items_of(rng, 1)
    hosts = hosts_of(1, torch.float64, "wan i2v")
    run_step(hosts, items, one_worker(items), finish=False)
    expected = gradient(hosts).clone()
    layout = {slot.name: slot for slot in hosts[0].executor.sync.layout}
    image, patch = layout["condition_embedder.image_embedder.ff.net.2.weight"], layout["patch_embedding.weight"]
    assert expected[image.lo : image.hi].abs().max() > 1e-6
    channels = expected[patch.lo : patch.hi].view(48, 20, 4).abs().amax(dim=(0, 2))
    noisy, mask, condition = channels.split([8, 4, 8])  # of the condition, motion is zero: its picture stands still
    assert noisy.min() > 1e-3 and mask.min() > 1e-3 and condition.max() > 1e-3


@pytest.mark.long  # as in fp64, which hides less
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), world=st.sampled_from([2, 3, 4]))
def test_any_legal_plan_gives_the_gradient_of_one_worker_in_fp32(seed: int, world: int) -> None:
    compare(seed, world, torch.float32, FP32)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.sampled_from([(0, 0), (0, 0, 0, 1), (0, 1, 0, 2), (0,) * 6]))
def test_gradients_that_nodes_add_are_that_of_one_worker_in_fp64(seed: int, nodes: tuple[int, ...]) -> None:
    compare(seed, len(nodes), torch.float64, FP64, nodes=nodes)


@pytest.mark.parametrize("memory", ["in GPUs", pytest.param("beside GPUs", marks=pytest.mark.long)])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), nodes=st.sampled_from([(0, 0, 0, 1), (0, 1, 0, 2), (0,) * 4]))
def test_gradients_that_gpus_of_nodes_add_are_that_of_one_worker_in_fp64(
    memory: str, seed: int, nodes: tuple[int, ...]
) -> None:
    compare(seed, len(nodes), torch.float64, FP64, nodes=nodes, memory=memory)


def test_a_wrong_share_of_a_sample_would_be_noticed() -> None:
    """The comparison above can fail: leaving out one cascade changes the gradient by far more than its limit."""
    rng = np.random.default_rng(1)
    items = items_of(rng, 3)
    reference, hosts = hosts_of(1, torch.float64), hosts_of(2, torch.float64)
    run_step(reference, items, one_worker(items), finish=False)
    plan = one_worker(items)
    run_step(hosts, items, [c for c in plan if c.item != items[0].id], finish=False)
    assert (gradient(hosts) - gradient(reference)).norm() / gradient(reference).norm() > 1e-3


USUAL: list[tuple[int, Nodes, StatePlace]] = [(4, (0, 0, 0, 1), "host")]
PLACES: list[StatePlace] = ["device", "host"]
OTHERS = [
    (world, nodes, state)
    for world, nodes in [(1, None), (2, None), (3, None), (4, None), (1, (0,)), (3, (0, 0, 0)), (4, (0, 0, 0, 1))]
    for state in PLACES
    if (world, nodes, state) not in USUAL
]


@pytest.mark.parametrize(
    ("world", "nodes", "state"), [*USUAL, *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)]
)
def test_parameters_after_twenty_steps_do_not_depend_on_the_number_of_workers(
    world: int, nodes: Nodes, state: StatePlace
) -> None:
    hosts = make_hosts(
        world,
        torch.float32,
        train_config(memory=TrainMemoryConfig(state=state)),
        nodes=nodes,
        gradients="own" if nodes is None else "node",
    )
    reference = make_hosts(1, torch.float32, train_config())
    rng = np.random.default_rng(0)
    for step in range(20):
        items = items_of(rng, 2, step)
        run_step(reference, items, one_worker(items, step), step)
        run_step(hosts, items, random_cascades(rng, items, world, step), step)
    expected = torch.cat([p.detach().flatten() for p in reference[0].executor.modules.dit.parameters()])
    for host in hosts:
        found = torch.cat([p.detach().flatten() for p in host.executor.modules.dit.parameters()])
        assert (found - expected).norm() / expected.norm() < 1e-5
        first = torch.cat([p.detach().flatten() for p in hosts[0].executor.modules.dit.parameters()])
        assert torch.equal(found, first), "workers hold different parameters"


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["stdit3", "latte"])
def test_spatial_temporal_families_train_to_equal_parameters_on_any_number_of_workers(family: str, world: int) -> None:
    """20 steps of random plans, with bags of one to four workers that slice each pack by itself. With a learning rate
    of 1e-2 a step of this STDiT3 doubles whatever rounding is there, also on one worker that packs otherwise."""
    model, rng = MODELS[family], np.random.default_rng(0)
    train = train_config(optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=1.0, ema_decay=0.9))
    reference = make_hosts(1, torch.float64, train, config=model)
    hosts = make_hosts(world, torch.float64, train, config=model)
    degrees = set()
    for step in range(20):
        items = items_of(rng, 2, step)
        cascades = random_cascades(rng, items, world, step)
        degrees |= {len(one.workers) for one in cascades if one.module == "dit"}
        run_step(reference, items, one_worker(items, step), step)
        run_step(hosts, items, cascades, step)
    assert degrees == set(range(1, world + 1))
    expected, *found = (weights_of([host]) for host in [*reference, *hosts])
    assert all((each - expected).norm() / expected.norm() < FP64 and torch.equal(each, found[0]) for each in found)


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_every_family_trains_to_equal_parameters_on_other_workers_and_after_a_resume(family: str) -> None:
    """20 steps on one worker, and on three that are replaced by two after the tenth. In fp64: in fp32 AdamW takes the
    rounding of small gradients to 1e-5 of the parameters within as many steps."""
    model, rng = MODELS[family], np.random.default_rng(0)
    rate = 1e-3 if model.dit.architecture == "stdit3" else 1e-2  # as above
    train = train_config(optimizer=OptimizerConfig(learning_rate=rate, max_grad_norm=1.0, ema_decay=0.9))
    reference = make_hosts(1, torch.float64, train, config=model)
    hosts = make_hosts(3, torch.float64, train, config=model)
    for step in range(20):
        if step == 10:
            shards = [own_shard(host.executor.sync) for host in hosts]
            for host in hosts:
                host.executor.leave()
            hosts = make_hosts(2, torch.float64, train, config=model, shards=shards)
        items = items_of(rng, 2, step, model.dit.images_only)
        run_step(reference, items, one_worker(items, step), step)
        run_step(hosts, items, random_cascades(rng, items, len(hosts), step), step)
    expected, *found = (
        torch.cat([p.detach().flatten() for p in host.executor.modules.dit.parameters()])
        for host in [*reference, *hosts]
    )
    assert all((each - expected).norm() / expected.norm() < 1e-10 and torch.equal(each, found[0]) for each in found)
    fresh = make_hosts(1, torch.float64, train, config=model)[0].executor.modules.dit.parameters()
    assert (torch.cat([p.detach().flatten() for p in fresh]) - expected).norm() / expected.norm() > 1e-2


WHOLE = [family for family, model in MODELS.items() if not model.dit.train_only]  # once per node only what is trained


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("wan", in_buffers),
        ("stdit3", "node"),  # in a bag a block runs in slices, each of which fetches it
        *(pytest.param(family, "node", marks=pytest.mark.long) for family in WHOLE if family != "stdit3"),
        *(pytest.param(family, in_buffers, marks=pytest.mark.long) for family in WHOLE if family != "wan"),
    ],
)
def test_any_plan_with_parameters_once_per_node_trains_as_one_worker(
    family: str, parameters: ParameterMemory | ParametersOf
) -> None:
    """On four workers of two nodes, which add into one gradient of each node, too; then on two, from their state."""
    model, rng = MODELS[family], np.random.default_rng(0)
    places = {"gradients": "node", "parameters": parameters, "config": model}
    reference = make_hosts(1, torch.float64, train_config(), config=model)
    hosts = make_hosts(4, torch.float64, train_config(), nodes=(0, 0, 0, 1), **places)
    for step in range(4):
        if step == 2:
            shards = [own_shard(host.executor.sync) for host in hosts]
            for host in hosts:
                host.executor.leave()
            hosts = make_hosts(2, torch.float64, train_config(), nodes=(0, 0), shards=shards, **places)
        items = items_of(rng, 2, step, model.dit.images_only)
        run_step(reference, items, one_worker(items, step), step)
        run_step(hosts, items, random_cascades(rng, items, len(hosts), step), step)
    expected, *found = (weights_of([host]) for host in [*reference, *hosts])
    assert all((each - expected).norm() / expected.norm() < FP64 and torch.equal(each, found[0]) for each in found)


def test_the_loss_of_a_clip_counts_times_its_weight_on_any_plan() -> None:
    """A factor of each clip alone: the step's loss and gradient are linear in the factors, however it is planned, and
    losses by item are those without."""
    rng = np.random.default_rng(8)
    items = items_of(rng, 4)
    factors = {f"0/0/{one.id}/{n}": 0.25 + 1.5 * float(rng.random()) for one in items for n in range(one.batch)}
    plain, heavy = dict.fromkeys(factors, 1.0), {key: 1 + 2 * factor for key, factor in factors.items()}
    losses, gradients, by_item = [], [], []
    for world, weights in ((1, plain), (1, factors), (3, factors), (2, heavy)):
        hosts = make_hosts(world, torch.float64, train_config())
        cascades = one_worker(items) if world == 1 else random_cascades(rng, items, world)
        run_step(hosts, items, cascades, finish=False, loss_weights=weights.__getitem__)
        losses.append(loss(hosts))
        gradients.append(gradient(hosts).clone())
        found: dict[str, float] = {}
        for host in hosts:
            for item, (value, _) in host.executor.work._item_losses.items():
                found[item] = found.get(item, 0.0) + value
        by_item.append(found)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(losses[1], rel=FP64)
    assert losses[3] == pytest.approx(losses[0] + 2 * losses[1], rel=FP64)
    assert (gradients[2] - gradients[1]).norm() / gradients[1].norm() < FP64
    assert (gradients[3] - gradients[0] - 2 * gradients[1]).norm() / gradients[3].norm() < FP64
    for other in by_item[1:]:
        assert other == pytest.approx(by_item[0], rel=FP64)


def test_a_bad_clip_takes_its_share_with_it_and_not_its_factor() -> None:
    """The mean is over the good clips, as without factors."""
    rng = np.random.default_rng(5)
    items = [item for item in items_of(rng, 6) if item.batch > 1][:1]
    last = items[0].batch - 1
    less = [replace(items[0], batch=last)]
    with_bad, without = make_hosts(1, torch.float64, train_config()), make_hosts(1, torch.float64, train_config())
    bad = frozenset({(items[0].id, last)})
    found = run_step(with_bad, items, one_worker(items), bad=bad, loss_weights=lambda key: 0.5)
    expected = run_step(without, less, one_worker(less))
    assert found == pytest.approx(0.5 * expected, rel=1e-12)


def test_a_clip_that_did_not_decode_counts_for_nothing() -> None:
    """The loss is the mean over the good samples: a bad last sample is as if it had never been there."""
    rng = np.random.default_rng(5)
    items = [item for item in items_of(rng, 6) if item.batch > 1][:1]
    assert items
    bad = frozenset({(items[0].id, items[0].batch - 1)})
    with_bad = make_hosts(2, torch.float64, train_config())
    without = make_hosts(1, torch.float64, train_config())
    losses = (
        run_step(with_bad, items, random_cascades(rng, items, 2), bad=bad),
        run_step(
            without,
            [replace(items[0], batch=items[0].batch - 1)],
            one_worker([replace(items[0], batch=items[0].batch - 1)]),
        ),
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    found, expected = (
        torch.cat([p.detach().flatten() for p in hosts[0].executor.modules.dit.parameters()])
        for hosts in (with_bad, without)
    )
    # AdamW's first step divides by sqrt(v): rounding of tiny gradients is amplified, hence not FP64
    assert (found - expected).norm() / expected.norm() < 1e-7


@dataclass
class BrokenVAE:
    words: str
    channels = 8

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(self.words)


@pytest.mark.parametrize(
    ("words", "first", "later"),
    [
        ("a bad kernel", RuntimeError, StaleGeneration),
        ("out of memory", OutOfMemory, OutOfMemory),  # whoever meets it may tell the planner
    ],
)
def test_a_failed_cascade_refuses_the_rest_of_its_generation(
    words: str, first: type[Exception], later: type[Exception]
) -> None:
    hosts = make_hosts(1, torch.float32, train_config())
    executor, items = hosts[0].executor, items_of(np.random.default_rng(2), 1)
    working, executor.modules.vae = executor.modules.vae, BrokenVAE(words)
    with pytest.raises(first, match=words):
        run_step(hosts, items, one_worker(items))
    executor.modules.vae, hosts[0].error = working, None
    with pytest.raises(later, match="an earlier task of generation 1 failed here" if later is not first else words):
        run_step(hosts, items, one_worker(items))


@pytest.mark.parametrize(
    ("memory", "nodes", "parameters"),
    [
        ("shared", None, "replicated"),
        ("in GPUs", (0, 0, 1, 1), in_buffers),
        pytest.param("in GPUs", (0, 0, 0, 1), "replicated", marks=pytest.mark.long),
        pytest.param("beside GPUs", (0,) * 4, "replicated", marks=pytest.mark.long),
    ],
)
def test_plans_keep_the_rules_of_nccl(
    memory: str, nodes: Nodes, parameters: ParameterMemory | ParametersOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bags that are left and made anew, early sums, one-sided gradients, blocks that are fetched: one order of
    launches, and equal sizes."""
    most, rng = 5, np.random.default_rng(4)
    with nccl_rules(monkeypatch) as rules:
        places = {"gradients": "own" if nodes is None else SHARED[memory], "parameters": parameters}
        hosts = make_hosts(4, torch.float32, train_config(), nodes=nodes, **places)
        account = Communicators(most)
        for step in range(3):
            items = items_of(rng, 2, step)
            run_step(hosts, items, random_cascades(rng, items, 4, step), step, account=account)
        assert rules.collectives > 150 and rules.made_late == 0, "no cascade waits for its communicator to be made"
        for rank in range(4):
            assert 3 < rules.most_peers(rank) <= 3 + most, "the world's, and bags within the limit"


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 3)])
def test_between_nodes_a_worker_meets_no_more_peers_than_memory_is_set_aside_for(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the communicator of all: gradients go one way, parameters back."""
    items = items_of(np.random.default_rng(4), 2)
    with nccl_rules(monkeypatch) as rules:
        hosts = make_hosts(
            4, torch.float32, train_config(), nodes=nodes, gradients=SHARED["in GPUs"], parameters=in_buffers
        )
        run_step(hosts, items, one_worker(items))
        met = [rules.partners(rank, (0, 1, 2, 3)) for rank in range(4)]
    assert [len(partners) for partners in met] == peers(nodes)
    assert all(nodes[other] != nodes[rank] for rank, partners in enumerate(met) for other in partners)


@pytest.mark.parametrize("kind", ["alltoall_base", "reduce_scatter", "all_gather"])
def test_a_step_in_which_a_collective_failed_without_a_word_counts_nowhere(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last one, in a bag that is used no more, in the sum or after the update: the worker that knows ends the
    generation, and from the state before it the step becomes what it would have been."""
    items = items_of(np.random.default_rng(6), 2)
    plan = random_cascades(np.random.default_rng(7), items, 2)
    with nccl_rules(monkeypatch) as rules:
        hosts = make_hosts(2, torch.float64, train_config())
        before = [own_shard(host.executor.sync) for host in hosts]
        run_step(hosts, items, plan)
        called = rules.kinds[kind] // 2
        assert called > 0
        expected = weights_of(hosts)
        hosts = make_hosts(2, torch.float64, train_config(), generation=2, shards=before)
        rules.fail(1, kind, after=called - 1)  # the last of the step
        with pytest.raises(GroupError):
            run_step(hosts, items, plan, generation=2)
        told = hosts[1].executor.broken or ""
        assert hosts[1].done is None and ("COMM_ERROR" in told or "met an error before" in told)
        hosts = make_hosts(2, torch.float64, train_config(), generation=3, shards=before)
        run_step(hosts, items, plan, generation=3)
    assert torch.equal(weights_of(hosts), expected)


def weights_of(hosts: Sequence[Host]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in hosts[0].executor.modules.dit.parameters()])
