"""`train.init_from`: what a new run begins with, which checkpoint that is, and of which it may not be."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from actors.config import TrainConfig
from actors.state import checkpoint_files
from actors.state.checkpoint_files import FirstStateLost, checksum, load
from actors.worker.loading import FirstWeights
from app.inputs.first_state import with_first_state
from app.settings.config import RunConfig, check
from app.settings.run_folder import save_config
from ops.config import OptimizerConfig
from ops.models.folders import resolve
from ops.models.load import build_dit
from ops.shards import Distance, ShardState, cut, state_names
from ops.typed import ConfigError
from tests.actors.state.test_checkpoint_files import refuse
from tests.app.test_sample import tiny_run

Change = dict[str, object]


def write_checkpoint(run: Path, config: RunConfig, step: int = 3, *, ema: bool = True) -> Path:
    """A checkpoint of two shards with random values in all arrays."""
    from actors.state import checkpoint_files as checkpoint

    folder = checkpoint.step_folder(run / "checkpoints", step)
    checkpoint.begin(folder)
    parameters = checkpoint.trained_parameters(resolve(config.model)[0])
    total = sum(int(np.prod(one["shape"])) for one in parameters)
    made = np.random.default_rng(step)
    arrays = {
        name: made.random(total, np.float32) for name in state_names(OptimizerConfig(ema_decay=0.9 if ema else 0.0))
    }
    for lo, hi in [(0, total // 2), (total // 2, total)]:
        parts = {name: array[lo:hi] for name, array in arrays.items()}
        found = (Distance(d=0.5, d_max=0.5, numerator=0.1),)
        shard = ShardState(updates=step + 1, lo=lo, hi=hi, total=total, arrays=parts, distances=found)
        checkpoint.write_shard(folder, shard)
    checkpoint.seal(folder, {"step": step, "parameters": parameters, "config": config.to_yaml()})
    return folder


def of(config: RunConfig, **train: object) -> RunConfig:
    return replace(config, train=replace(config.train, **train))  # type: ignore[arg-type]


def dit(config: RunConfig, **changes: object) -> RunConfig:
    return replace(config, model=replace(config.model, dit=replace(config.model.dit, **changes)))  # type: ignore[arg-type]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where runs/tiny would be the new run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_means_its_latest_checkpoint_and_a_path_the_one_it_names(here: Path) -> None:
    config = tiny_run()
    first, latest = (write_checkpoint(here / "a", config, step) for step in (3, 7))
    for given, meant, steps in ((here / "a", latest, 8), (first, first, 4)):
        found, said = with_first_state(of(config, init_from=str(given)))
        assert found.train.init_from == str(meant)
        assert said == f"step 0 begins with the weights, moments and EMA of {meant}, after {steps} steps"
    assert with_first_state(config) == (config, "")


def test_the_checkpoint_is_read_for_damage_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, read = tiny_run(), list[Path]()
    folder = write_checkpoint(here / "a", config)

    def damage_of(checkpoint: Path) -> str:
        read.append(checkpoint)
        return ""

    for module in ("app.inputs.first_state", "actors.state.checkpoint_files"):
        monkeypatch.setattr(f"{module}.damage", damage_of)
    for given in (here / "a", here / "a" / "checkpoints", folder):
        read.clear()
        with_first_state(of(config, init_from=str(given)))
        assert read == [folder]


@pytest.mark.parametrize("denied", [False, True], ids=["it answers", "it may not be read"])
def test_a_resume_asks_for_no_more_than_whether_there_is_a_state(
    here: Path, monkeypatch: pytest.MonkeyPatch, denied: bool
) -> None:
    """All files of all checkpoints were asked for, and the first one that may not be read ended it."""
    first = write_checkpoint(here / "a", tiny_run())
    config, own, asked = of(tiny_run(), init_from=str(first)), here / "runs" / "own", list[str]()
    for step in (3, 7):
        write_checkpoint(own, config, step)
    save_config(config, own)
    whole = checkpoint_files.is_complete

    def is_complete(folder: Path) -> bool:
        asked.append(folder.name)
        if denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return whole(folder)

    monkeypatch.setattr(checkpoint_files, "is_complete", is_complete)
    assert with_first_state(config, own) == (config, "")
    assert asked == ["step-7"]


def test_what_is_taken_over_is_told(here: Path) -> None:
    config = tiny_run()
    without = write_checkpoint(here / "a", config, ema=False)
    assert "the weights and moments of" in with_first_state(of(config, init_from=str(without)))[1]
    alone = of(config, init_from=str(without), init_moments=False)
    assert "the weights alone of" in with_first_state(alone)[1]


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("ema", [True, False])
def test_any_number_of_workers_begins_with_the_very_bits(tmp_path: Path, cuts: int, ema: bool) -> None:
    config = tiny_run()
    folder = write_checkpoint(tmp_path, config)
    whole = load(folder)[1]
    total = whole[0].total
    train = TrainConfig(init_from=str(folder), optimizer=OptimizerConfig(ema_decay=0.9 if ema else 0.0))
    resolved = resolve(config.model)[0].dit
    source = FirstWeights(train).source(build_dit(resolved, 5), resolved)
    ends = np.linspace(0, total, cuts + 1).astype(int).tolist()
    for lo, hi in pairwise(ends):
        found, expected = source(lo, hi), cut(whole, lo, hi)
        assert found.distances == whole[0].distances
        assert found.updates == 4 and tuple(found.arrays) == state_names(OptimizerConfig(ema_decay=0.9 if ema else 0.0))
        assert all(np.array_equal(array, expected.arrays[name]) for name, array in found.arrays.items())


def test_without_moments_the_weights_alone_are_taken(tmp_path: Path) -> None:
    config = tiny_run()
    folder = write_checkpoint(tmp_path, config)
    resolved = resolve(config.model)[0].dit
    train = TrainConfig(init_from=str(folder), init_moments=False)
    found = FirstWeights(train).source(build_dit(resolved, 5), resolved)(10, 90)
    assert found.updates == 0 and found.distances == ()
    assert np.array_equal(found.arrays["master"], cut(load(folder)[1], 10, 90).arrays["master"])
    assert not found.arrays["exp_avg"].any() and not found.arrays["exp_avg_sq"].any() and "ema" not in found.arrays


def test_workers_that_see_another_checkpoint_are_told_apart(tmp_path: Path) -> None:
    one, same, other = (
        write_checkpoint(tmp_path / name, tiny_run(), step) for name, step in (("a", 3), ("b", 3), ("c", 4))
    )
    assert checksum(one) == checksum(same) != checksum(other)


REFUSED: list[tuple[Change, str]] = [
    ({"num_layers": 2}, r"another transformer than model\.dit: num_layers 1 there, 2 here\. Use the settings"),
    ({"num_heads": 4, "head_dim": 6}, r"num_heads 2 there, 4 here; head_dim 12 there, 6 here"),  # shapes are the same
    ({"lora_rank": 2}, r"trained the weights themselves, and this run trains factors .* heddle export --checkpoint"),
    ({"train_only": ("blocks.0",)}, r"train_only \(\) there, \('blocks\.0',\) here"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_another_transformer_is_refused(here: Path, changes: Change, sentence: str) -> None:
    config = tiny_run()
    folder = write_checkpoint(here / "a", config)
    with pytest.raises(ConfigError, match=sentence):
        with_first_state(of(dit(config, **changes), init_from=str(folder)))


def test_factors_go_on_from_factors_of_the_same_rank_alone(here: Path) -> None:
    config = dit(tiny_run(), lora_rank=2)
    folder = write_checkpoint(here / "a", config)
    assert with_first_state(of(config, init_from=str(folder)))[1]
    assert with_first_state(of(dit(config, gradient_checkpointing=True), init_from=str(folder)))[1], "how it runs"
    with pytest.raises(ConfigError, match=r"lora_rank 2 there, 4 here"):
        with_first_state(of(dit(config, lora_rank=4), init_from=str(folder)))
    with pytest.raises(ConfigError, match=r"lora_alpha .* there, 1\.0 here"):
        with_first_state(of(dit(config, lora_alpha=1.0), init_from=str(folder)))
    with pytest.raises(ConfigError, match=r"trained factors, and this run trains the weights themselves"):
        with_first_state(of(dit(config, lora_rank=0), init_from=str(folder)))
    with pytest.raises(
        ConfigError, match=r"frozen weights that train\.seed 0 drew, and train\.seed is 7\. Set it to 0"
    ):
        with_first_state(of(config, init_from=str(folder), seed=7))


def test_another_family_is_refused(here: Path) -> None:
    folder = write_checkpoint(here / "a", tiny_run())
    other = RunConfig.load(Path(__file__).parents[2] / "configs" / "runs" / "ltx-tiny.yaml", ["run.name=other"])
    with pytest.raises(ConfigError, match=r"is of architecture wan, and model\.dit\.architecture is ltx"):
        with_first_state(of(other, init_from=str(folder)))


def test_moments_of_another_optimizer_are_refused_and_its_weights_taken(here: Path) -> None:
    config = tiny_run()
    folder = write_checkpoint(here / "a", config)
    other = of(config, init_from=str(folder), optimizer=OptimizerConfig(kind="muon"))
    with pytest.raises(
        ConfigError, match=r"has moments of adamw, and train\.optimizer\.kind is muon\. Set train\.init_mo"
    ):
        with_first_state(other)
    assert with_first_state(of(other, init_moments=False))[1]


def test_what_is_not_there_damaged_or_of_this_very_run_is_refused(here: Path) -> None:
    config = tiny_run()
    with pytest.raises(ConfigError, match="checkpoint runs/a does not exist"):
        with_first_state(of(config, init_from="runs/a"))
    folder = write_checkpoint(here / "a", config)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match=r"init_from .*step-3 is damaged: shard-.*Use another checkpoint"):
        with_first_state(of(config, init_from=str(folder)))
    own = write_checkpoint(here / "runs" / "tiny", config)
    with pytest.raises(
        ConfigError, match=r"lies in the folder of this very run, which begins empty\. Give .*run\.name"
    ):
        with_first_state(of(config, init_from=str(own)))
    both = of(dit(config, lora_rank=2, lora_from="factors.safetensors"), init_from=str(folder))
    with pytest.raises(
        ConfigError, match=r"lora_from factors\.safetensors and train\.init_from .* leave one of them out"
    ):
        check(both)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a", "COMPLETE"),
        ("a", "shard-*"),
        ("a/checkpoints/step-3", "shard-*"),
        ("a/checkpoints/step-3", "COMPLETE"),
    ],
)
def test_what_may_not_be_read_is_refused_before_the_start(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str
) -> None:
    config = tiny_run()
    folder = write_checkpoint(here / "a", config)
    refuse(monkeypatch, next(folder.glob(name)))
    with pytest.raises(ConfigError, match=r"cannot be read: .*Permission denied: .*Have it readable, or "):
        with_first_state(of(config, init_from=str(here / given)))


def test_a_first_state_that_may_not_be_read_later_is_lost_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run ended with "4 generations broke in a row"."""
    config = tiny_run()
    folder = write_checkpoint(here / "a", config)
    model = resolve(config.model)[0].dit
    first = FirstWeights(of(config, init_from=str(folder)).train).source(build_dit(model, 0), model)
    refuse(monkeypatch, next(folder.glob("shard-*")))
    with pytest.raises(FirstStateLost, match=r"init_from: .*Permission denied: '.*'\. The run .* are lost\."):
        first(0, 10)


def test_a_resume_keeps_the_checkpoint_that_its_run_began_with(here: Path) -> None:
    """Also when the other run has gone on since, and its first checkpoints are gone."""
    config = tiny_run()
    first = write_checkpoint(here / "a", config)
    run = here / "runs" / "tiny"
    run.mkdir(parents=True)
    save_config(of(config, init_from=str(first)), run)
    write_checkpoint(here / "a", config, 9)
    given = of(config, init_from=str(here / "a"))
    assert with_first_state(given, run)[0].train.init_from == str(first), "nothing is on disk: it is read again"
    write_checkpoint(run, config, 1)
    (first / "COMPLETE").unlink()
    assert with_first_state(given, run) == (of(config, init_from=str(first)), "")
