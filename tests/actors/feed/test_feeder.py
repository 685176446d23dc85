"""The feeder without Ray: what a cache holds and what of it is of use, and counts that survive every restart."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray

from actors.config import WorkersConfig
from actors.feed.encoders import Encoders, plan_item, text_keys
from actors.feed.feeder import Feeder
from actors.feed.step_source import StepSource
from actors.step import StepBatches
from app.inputs.items import items_from_data
from app.settings.config import RunConfig
from app.settings.sections import RunSection
from data.cache import Cache
from data.config import BatchConfig, BucketsConfig, CacheConfig, DataConfig, EngineConfig, LimitsConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.ledger import Fault, Reason
from data.tools.synthetic import SynthConfig, synthesize
from data.types import Bucket, DataItem, SampleRef
from ops.geometry import Geometry
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.hunyuan.config import HunyuanConfig

MODEL = ModelConfig()
WIDTH = 48 * 4


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    synthesize(folder, SynthConfig(clips=30, images=10, shards=2, seed=3))
    return folder


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)


def config(clips: Path, cache: Path | None = None) -> DataConfig:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    return DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=("1x64x96", "9x64x96")),
        items_per_step=2,
        caption_dropout=0.0,
        start_frame="fixed",
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        max_wait=8,
        engine=EngineConfig(kind="pool", decode_workers=1, lookahead=1),
        limits=LimitsConfig(max_bad_fraction=1.0),
        cache=CacheConfig(path=str(cache) if cache else "", min_free_gib=0.0),
    )


@pytest.fixture
def make(clips: Path, tmp_path: Path) -> Iterator[Callable[[], Feeder]]:
    made: list[Feeder] = []

    def feeder() -> Feeder:
        cached = config(clips, tmp_path / "cache")
        made.append(Feeder(cached, Geometry(), 0, Encoders.of(MODEL), str(tmp_path)))
        return made[-1]

    yield feeder
    for one in made:
        if one._engine is not None:
            one._engine.stop()


def fill(feeder: Feeder, steps: int) -> Cache:
    """What workers would have put for the first steps."""
    cache = feeder._cache
    assert cache is not None
    for step in range(steps):
        for item in feeder.dataset.step(step).items:
            latents, texts = feeder._cache_keys(item)
            tokens = Geometry().tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
            for name in latents:
                cache.put("latents", name, np.ones((tokens, WIDTH), np.float32))
            for name in texts:
                cache.put("text", name, np.ones((5, MODEL.text.d_model), np.float32))
    return cache


def zero_the_end(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def foreign_type(path: Path) -> None:
    cache = Cache(CacheConfig(path=str(path.parents[2]), min_free_gib=0.0))
    path.unlink()
    cache.put("latents", path.stem, np.ones((2, 2), np.int8))


def foreign_shape(path: Path) -> None:
    cache = Cache(CacheConfig(path=str(path.parents[2]), min_free_gib=0.0))
    path.unlink()
    cache.put("latents", path.stem, np.ones((3, WIDTH), np.float32))


@pytest.mark.parametrize("damage", [zero_the_end, foreign_type, foreign_shape, lambda path: path.write_bytes(b"")])
def test_an_item_whose_latents_are_damaged_is_encoded_again(
    make: Callable[[], Feeder], damage: Callable[[Path], Any]
) -> None:
    feeder = make()
    cache = fill(feeder, 2)
    victim = feeder.dataset.step(0).items[1]
    feeder.start(0)  # the engine has asked for pixels of nothing by now
    damage(cache._path("latents", feeder._cache_keys(victim)[0][0]))
    items = feeder.items(0)
    assert [item.cached for item in items.items] == [("text", "vae"), ("text",)]
    assert {key for key in items.cached if key[0] == "vae"} == {("vae", items.items[0].id)}
    for _ in range(2):  # also when the step is asked for again
        spared, decoded = feeder.batches(0).references
        assert spared.video.shape[1] == 0 and decoded.video.shape[1] == victim.bucket.frames and decoded.video.any()
    assert feeder.items(0) is items
    assert feeder.ledger()["delivered"] == feeder.dataset.step(0).num_samples
    assert [item.cached for item in feeder.items(1).items] == [("text", "vae")] * 2


def test_a_text_that_is_damaged_is_encoded_again(make: Callable[[], Feeder]) -> None:
    feeder = make()
    cache = fill(feeder, 1)
    name = feeder._cache_keys(feeder.dataset.step(0).items[0])[1][0]
    zero_the_end(cache._path("text", name))
    assert "text" not in feeder.items(0).items[0].cached and "vae" in feeder.items(0).items[0].cached


def folder(path: Path) -> Path:
    for name, content in {
        "vae/config.json": '{"_class_name": "AutoencoderKLWan"}',
        "vae/model.bin": "w",
        "text_encoder/config.json": '{"model_type": "t5", "d_model": 8}',
        "text_encoder/model.safetensors": "w",
        "tokenizer/spiece.model": "t",
        "transformer/model.safetensors": "not an encoder's",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    return path


def encoders(path: Path, device: str = "cpu", **vae: Any) -> Encoders:
    settings = VAEConfig(kind="diffusers", path=str(path), **vae)
    return Encoders.of(ModelConfig(vae=settings, text=TextConfig(path=str(path))), device)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("vae/config.json", "vae"),
        ("vae/model.bin", "vae"),
        ("text_encoder/config.json", "text"),
        ("text_encoder/model.safetensors", "text"),
        ("tokenizer/spiece.model", "text"),
        ("tokenizer/added.json", "text"),
        ("transformer/model.safetensors", ""),
    ],
)
def test_the_names_of_encoders_cover_every_file_of_their_folders(tmp_path: Path, file: str, changes: str) -> None:
    before = encoders(folder(tmp_path))
    (tmp_path / file).write_text("x")
    after = encoders(tmp_path)
    assert (before.vae != after.vae, before.text != after.text) == (changes == "vae", changes == "text")


@pytest.mark.parametrize(("pad_to", "rows"), [(0, 34), (32, 48), (64, 64)])
def test_plans_count_the_rows_that_captions_are_padded_with(pad_to: int, rows: int) -> None:
    """Captions of 3 and 200 characters, cut at 64 tokens."""
    encoders = Encoders.of(replace(MODEL, text=TextConfig(max_length=64, pad_to=pad_to)))
    samples = tuple(
        SampleRef(source=0, epoch=0, row=row, start_frame=0, key=str(row), caption_chars=chars, content="")
        for row, chars in enumerate([3, 200])
    )
    item = plan_item(DataItem(id="s0.0", bucket=Bucket(17, 64, 96), samples=samples), encoders, ())
    assert item.text_tokens == rows


def test_latents_of_image_to_video_have_names_of_their_own() -> None:
    """They hold what is told of the first frame, too: shapes, frames and names of a text-to-video run do not fit."""
    plain = resolve(MODEL)[0]
    told = replace(MODEL, dit=replace(MODEL.dit, first_frame="channels"), image=ImageConfig(d_model=16))
    models = [MODEL, told, replace(told, image=ImageConfig(d_model=16, seed=1)), replace(told, image=None)]
    encoders = [Encoders.of(resolve(model)[0]) for model in models]
    assert len({one.vae for one in encoders}) == 4
    assert encoders[0].vae == Encoders.of(plain).vae and "first_frame" not in encoders[0].vae
    widths = [(one.latent_width, one.latent_tail) for one in encoders]
    assert widths == [(48 * 4, 0), (100 * 4, 1), (100 * 4, 1), (100 * 4, 0)]  # 5 rows of 16 numbers fit in one


@pytest.mark.parametrize(("more", "found"), [(0, False), (1, True)])
def test_cached_results_of_image_to_video_have_the_rows_of_the_image(
    clips: Path, tmp_path: Path, more: int, found: bool
) -> None:
    dit = replace(MODEL.dit, first_frame="channels")
    model, geometry = resolve(replace(MODEL, dit=dit, image=ImageConfig(d_model=16)))
    feeder = Feeder(config(clips, tmp_path / "cache"), geometry, 0, Encoders.of(model), str(tmp_path))
    item = feeder.dataset.step(0).items[0]
    tokens = geometry.tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
    names = feeder._cache_keys(item)[0]
    assert feeder._cache is not None
    for name in names:
        feeder._cache.put("latents", name, np.ones((tokens + more, 400), np.float32))
    assert (feeder._load("vae", 0, item, names) is not None) == found


@pytest.mark.parametrize(("rows", "found"), [(3, True), (6, True), (7, False)])
def test_cached_text_of_two_encoders_has_the_rows_of_the_vector(
    clips: Path, tmp_path: Path, rows: int, found: bool
) -> None:
    """At most four rows of a caption and two of 20 numbers in rows of 16."""
    text = TextConfig(kind="hunyuan", max_length=4, d_model=16, num_heads=2, num_layers=1, pooled_dim=20)
    model, geometry = resolve(replace(MODEL, dit=HunyuanConfig(num_single_layers=1), text=text))
    feeder = Feeder(config(clips, tmp_path / "cache"), geometry, 0, Encoders.of(model), str(tmp_path))
    item = feeder.dataset.step(0).items[0]
    names = feeder._cache_keys(item)[1]
    assert feeder._cache is not None
    for name in names:
        feeder._cache.put("text", name, np.ones((rows, 16), np.float32))
    assert (feeder._load("text", 0, item, names) is not None) == found


def of_pictures(clips: Path, folder: Path) -> tuple[Feeder, ModelConfig, Geometry]:
    """A feeder for a text encoder that sees first frames."""
    text = TextConfig(kind="hunyuan_i2v", max_length=20, d_model=16, num_heads=2, num_layers=1, pooled_dim=16)
    dit = HunyuanConfig(num_single_layers=1, first_frame="token_replace")
    model, geometry = resolve(replace(MODEL, dit=dit, text=text))
    return Feeder(config(clips, folder / "cache"), geometry, 0, Encoders.of(model), str(folder)), model, geometry


def keep(feeder: Feeder, model: ModelConfig, geometry: Geometry, texts: bool = True) -> DataItem:
    """Results of the first item, as workers would have put them."""
    item, cache = feeder.dataset.step(0).items[0], feeder._cache
    assert cache is not None
    latent_names, text_names = feeder._cache_keys(item)
    tokens = geometry.tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
    for name in latent_names:
        cache.put("latents", name, np.ones((tokens, feeder._encoders.latent_width), np.float32))
    for name in text_names if texts else ():
        cache.put("text", name, np.ones((model.text.most_tokens + model.text.tail, 16), np.float32))
    return item


def test_a_text_of_a_first_frame_is_named_by_it_and_counted_with_its_rows(clips: Path, tmp_path: Path) -> None:
    feeder, model, _ = of_pictures(clips, tmp_path)
    step = feeder.dataset.step(0)
    (item, *_) = step.items
    named = feeder._text_names(item)
    job, encoders = feeder.dataset.job(item), feeder._encoders
    later = replace(item, samples=tuple(replace(s, start_frame=s.start_frame + 1) for s in item.samples))
    larger = replace(item, bucket=replace(item.bucket, height=2 * item.bucket.height))
    for other in (later, larger):
        assert not set(text_keys(other, job, encoders, feeder._config)) & set(named)
    assert text_keys(item, job, encoders, feeder._config) == named
    alone = replace(encoders, picture_rows=0)
    assert text_keys(later, job, alone, feeder._config) == text_keys(item, job, alone, feeder._config)
    assert encoders.picture_rows == model.text.picture_rows == 4
    assert (
        plan_item(item, encoders, ()).text_tokens == plan_item(item, replace(alone, least_text=0), ()).text_tokens + 4
    )


def test_pixels_are_spared_only_where_the_texts_of_first_frames_are_kept_too(clips: Path, tmp_path: Path) -> None:
    """The answer stands when workers fill the cache between the planner's question and the engine's."""
    feeder, model, geometry = of_pictures(clips, tmp_path)
    item = keep(feeder, model, geometry, texts=False)
    assert feeder.items(0).items[0].cached == ("vae",) and feeder.dataset.needs_pixels(item)
    keep(feeder, model, geometry)
    assert feeder.dataset.needs_pixels(item)
    again, _, _ = of_pictures(clips, tmp_path)
    assert not again.dataset.needs_pixels(item) and again.items(0).items[0].cached == ("text", "vae")


def test_a_damaged_text_of_a_first_frame_has_its_item_decoded(clips: Path, tmp_path: Path) -> None:
    feeder, model, geometry = of_pictures(clips, tmp_path)
    item = keep(feeder, model, geometry)
    assert feeder._cache is not None and not feeder.dataset.needs_pixels(item)
    zero_the_end(feeder._cache._path("text", feeder._text_names(item)[0]))
    assert feeder.items(0).items[0].cached == ()
    assert feeder.dataset.needs_pixels(item) and feeder.dataset.latents_denied(item)


def test_a_text_of_a_first_frame_that_is_gone_since_it_was_named_has_its_item_decoded(
    clips: Path, tmp_path: Path
) -> None:
    """As after another item of the same clip and caption has found it damaged."""
    feeder, model, geometry = of_pictures(clips, tmp_path)
    item = keep(feeder, model, geometry)
    assert feeder._cache is not None and not feeder.dataset.needs_pixels(item)
    feeder._cache._path("text", feeder._text_names(item)[0]).unlink()
    assert feeder.items(0).items[0].cached == ()
    assert feeder.dataset.needs_pixels(item) and feeder.dataset.latents_denied(item)


def test_no_pixels_are_spared_for_texts_of_first_frames_that_the_cache_is_not_asked_for(
    clips: Path, tmp_path: Path
) -> None:
    """A folder may hold texts of another run, and this one have data.cache.text off."""
    feeder, model, geometry = of_pictures(clips, tmp_path)
    item = keep(feeder, model, geometry)
    without = replace(feeder._config, cache=replace(feeder._config.cache, text=False))
    asked = Feeder(without, geometry, 0, feeder._encoders, str(tmp_path))
    assert asked.items(0).items[0].cached == ("vae",) and asked.dataset.needs_pixels(item)


def test_the_name_of_a_t5_is_what_it_was_before_there_were_other_encoders() -> None:
    """So embeddings that are in a cache are found again."""
    known = (
        '{"d_model": 64, "dtype": "float32", "files": [], "max_length": 226, "num_heads": 4, "num_layers": 2, '
        '"pad_to": 0, "path": null, "seed": 0, "unmasked": 0}'
    )
    assert Encoders.of(ModelConfig()).text == known
    pair = Encoders.of(resolve(ModelConfig(dit=HunyuanConfig(), text=TextConfig(kind="hunyuan")))[0]).text
    assert '"kind": "hunyuan"' in pair and '"pooled_dim": 32' in pair
    raw = Encoders.of(ModelConfig(text=TextConfig(cleaned=False, empty="none"))).text
    assert '"cleaned": false' in raw and '"empty": "none"' in raw


def test_an_empty_caption_that_is_no_text_is_kept_in_the_cache(clips: Path, tmp_path: Path) -> None:
    """As an array without rows, which is what is wanted of it."""
    model, geometry = resolve(replace(MODEL, text=replace(MODEL.text, empty="none")))
    feeder = Feeder(config(clips, tmp_path / "cache"), geometry, 0, Encoders.of(model), str(tmp_path))
    item = feeder.dataset.step(0).items[0]
    names = feeder._cache_keys(item)[1]
    assert feeder._cache is not None
    for name in names:
        feeder._cache.put("text", name, np.ones((0, model.text.d_model), np.float32))
    assert feeder._load("text", 0, item, names) is not None


def test_the_name_of_a_text_encoder_holds_what_it_computes_in(tmp_path: Path) -> None:
    assert encoders(folder(tmp_path)).text != encoders(tmp_path, "cuda").text


def test_the_name_of_a_vae_says_what_it_computes_in_and_not_how(tmp_path: Path) -> None:
    usual = encoders(folder(tmp_path)).vae
    assert usual == encoders(tmp_path, dtype="float32").vae == encoders(tmp_path, "cuda", dtype="float32").vae
    assert usual == encoders(tmp_path, channels_last="on", compile=True).vae
    half = encoders(tmp_path, "cuda").vae
    assert half == encoders(tmp_path, dtype="bfloat16").vae != encoders(tmp_path, dtype="float16").vae
    assert usual not in (half, encoders(tmp_path, dtype="float16").vae)
    known = '{"channels": 48, "dtype": "float32", "files": [], "kind": "haar", "patch": [1, 2, 2], "path": null, '
    assert Encoders.of(ModelConfig(), "cuda").vae.startswith(known), "latents in a cache of before are found again"


# counts


class Engine:
    """Hands out steps of a plan without decoding; of some steps the first samples are bad, always the same."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def start(self, first_step: int) -> None:
        self.dataset.rewind_draws(first_step)

    def batches(self, step: int) -> list[Any]:
        self.dataset.count_draws(step, faults(step, drawn(self.dataset, step)))
        return [None] * len(self.dataset.step(step).items)

    def release(self, step: int) -> None:
        pass

    def counts(self) -> dict[str, Any]:
        return self.dataset.ledger.summary()


def drawn(dataset: Dataset, step: int) -> Counter[int]:
    """Samples of a step by source."""
    return Counter(sample.source for item in dataset.step(step).items for sample in item.samples)


def faults(step: int, of: Counter[int]) -> list[Fault]:
    reason = Reason.DECODE_ERROR if step % 3 else Reason.DECODE_TIMEOUT
    return [Fault(reason=reason, shard="s", key=str(step), source=max(of))] * (step % 5 == 2)


class Actor:
    """A plain object behind the interface of a Ray actor."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return Mock(remote=getattr(self._plain, name))


def source(clips: Path, monkeypatch: pytest.MonkeyPatch) -> StepSource:
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns=1, timeout=None: (asked, []))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    monkeypatch.setattr("actors.feed.feeder.make_engine", lambda dataset, config: Engine(dataset))
    plain = two_sources(clips)
    return StepSource(
        lambda: Actor(Feeder(plain, Geometry(), 0, Encoders.of(MODEL), "")), Geometry(), "sample", 10**6, 60.0
    )


def two_sources(clips: Path) -> DataConfig:
    plain = config(clips)
    often, seldom = replace(plain.sources[0], weight=0.9), replace(plain.sources[0], weight=0.1, name="seldom")
    return replace(plain, sources=(often, seldom))


Counts = tuple[int, int, int]  # draws scheduled, delivered, bad


def total(drawn: Counter[int], bad: Counter[int]) -> dict[int, Counts]:
    """By source."""
    return {source: (drawn[source], drawn[source] - bad[source], bad[source]) for source in (0, 1)}


def told(ledger: dict[str, Any]) -> dict[int, Counts]:
    return {
        source: (counts["scheduled"], counts["delivered"], sum(counts["skipped"].values()))
        for source, counts in enumerate(ledger["sources"])
    }


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_exact_after_any_restart_of_feeder_and_controller(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Feeders die, controllers die, runs fall back to a snapshot or a checkpoint; the sums over the committed steps are
    what the ledger must say, of every source."""
    chance, plan = random.Random(seed), Dataset.open(two_sources(clips), Geometry(), 0)
    at, committed = source(clips, monkeypatch), -1
    at.open(0)
    held: dict[int, Any] = {-1: None}  # committed step -> what keepers or a checkpoint hold beside the state
    restarts = Counter[str]()
    for _ in range(30):
        for step in (committed + 1, committed + 2):  # two are under way
            at.data(step)
        for _ in range(2):
            committed += 1
            held[committed] = json.loads(json.dumps(at.release(committed)))
        event = chance.choice(["none", "none", "feeder", "controller", "fallback", "fallback of a new controller"])
        restarts[event] += 1
        if "fallback" in event:
            committed = max(-1, committed - chance.choice([0, 0, 1, 3, 12]))
        if "controller" in event:
            at = source(clips, monkeypatch)
        if event != "none":
            # while the controller lives, the position that is found elsewhere may be an old one
            known = chance.randint(-1, committed) if event == "feeder" else committed
            at.open(committed + 1, held[known])
            assert told(at.ledger()) == counted(plan, committed + 1), event
    at.open(committed + 1, held[committed])
    expected = counted(plan, committed + 1)
    assert told(at.ledger()) == expected and min(bad for _, _, bad in expected.values()) > 0 and len(restarts) > 3


def counted(plan: Dataset, steps: int, judged: int | None = None) -> dict[int, Counts]:
    """What the ledger must say after so many steps, of which only the first `judged` were looked at."""
    each = [drawn(plan, step) for step in range(steps)]
    bad = [fault.source for step, of in enumerate(each[:judged]) for fault in faults(step, of)]
    return total(sum(each, Counter()), Counter(bad))


@pytest.mark.parametrize("known", [0, 7, 30, None])
def test_steps_that_are_walked_over_are_counted_from_the_plan(clips: Path, known: int | None) -> None:
    """Nobody has counted them here: all are scheduled, none is missing; only who was bad among them is not known."""
    plain = two_sources(clips)
    first, then = (Dataset.open(plain, Geometry(), 0) for _ in range(2))
    engine = Engine(first)
    tokens = {}
    for step in range(40):
        tokens[step] = first.token(step)
        engine.batches(step)
    if known is not None:
        then.resume(json.loads(json.dumps(tokens[known])))
    Engine(then).start(40)
    assert told(then.ledger.summary()) == counted(first, 40, known or 0)


def test_batches_come_with_the_position_behind_them(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = source(clips, monkeypatch)
    at.open(0)
    answer: StepBatches = at._feeder.batches.remote(0)
    assert answer.position["step"] == 1 and answer.position["draws"]["sources"]["0"]["scheduled"] > 0


def test_a_preview_tells_the_planner_of_the_same_items_as_a_run(make: Callable[[], Feeder], clips: Path) -> None:
    """With text lengths of their captions, before and after a cache holds one of two steps."""
    feeder = make()
    preview = RunConfig(run=RunSection(name="preview"), data=feeder._config, workers=WorkersConfig(device="cpu"))
    cold = items_from_data(feeder.dataset, 2, preview, MODEL)
    plain = replace(preview, data=config(clips))
    assert items_from_data(feeder.dataset, 2, plain, MODEL) == cold
    assert len({item.text_tokens for step in cold for item in step}) > 1
    fill(feeder, 1)
    warm = items_from_data(feeder.dataset, 2, preview, MODEL)
    assert [item.cached for step in warm for item in step] == [("text", "vae")] * 2 + [()] * 2
    assert [feeder.items(step).items for step in range(2)] == warm


def batches_of(data: StepSource, steps: range) -> list[list[tuple[str, tuple[str, ...]]]]:
    found = []
    for step in steps:
        items = data.data(step).items
        found.append([(f"{i.frames}x{i.height}x{i.width}", keys) for i, keys in zip(items.items, items.keys)])
    return found


def test_sizes_that_a_run_decided_on_hold_for_any_feeder_after_it(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided while it goes on, known from the start, and after a return to an earlier step: the same batches."""
    live = source(clips, monkeypatch)
    live.open(0)
    before = batches_of(live, range(4))
    at = live.next_unasked
    assert at == 4
    record: Any = {"from": at, "sizes": {"1x64x96": 2, "9x64x96": 1}}
    live.resize(record)
    after = batches_of(live, range(4, 12))
    assert {len(keys) for items in after for bucket, keys in items if bucket == "1x64x96"} == {2}
    assert {len(keys) for items in before for bucket, keys in items if bucket == "1x64x96"} != {2}
    again = source(clips, monkeypatch)
    again.resize(record)
    again.open(0)
    assert batches_of(again, range(12)) == before + after
    live.open(2, live.token(2))  # the feeder was lost, and two steps with it
    assert batches_of(live, range(2, 12)) == before[2:] + after
    resumed = source(clips, monkeypatch)
    resumed.open(8, again.token(8))  # from a checkpoint alone: its token has the decision
    assert batches_of(resumed, range(8, 12)) == after[4:]
