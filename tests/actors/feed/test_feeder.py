"""The feeder without Ray: what a cache holds and what of it is of use, and counts that survive every restart."""

from __future__ import annotations

import errno
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.config import TrainConfig, WorkersConfig
from actors.feed.encoders import Encoders
from actors.feed.feeder import EngineOf, Feeder
from actors.feed.growth import Growth
from actors.feed.item_cache import ItemCache
from actors.feed.item_facts import ItemFacts
from actors.feed.step_source import StepSource, item_facts
from actors.outcome import Tell, silent
from actors.plan.types import Item
from actors.records.events import FeederRenewed, RunEvent
from actors.step import StepBatches, StepItems
from app.inputs.items import items_from_data
from app.settings.config import RunConfig
from app.settings.sections import RunSection
from data.cache import Cache
from data.config import BatchConfig, BucketsConfig, CacheConfig, DataConfig, EngineConfig, LimitsConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.engines.engine import make_engine
from data.errors import DataError
from data.ledger import Fault, Reason
from data.tools.synthetic import SynthConfig, synthesize
from data.types import Bucket, DataItem, DecodeJob, NeedsPixels, SampleRef
from ops.geometry import Geometry
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import TEXT_RECIPES, TextKind
from ops.models.folders import resolve
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.ltx.config import LTXConfig
from tests.actors.fakes import Remote
from tests.long import in_default_run

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


def feeder_of(data: DataConfig, folder: Path, model: ModelConfig = MODEL, engine_of: EngineOf = make_engine) -> Feeder:
    resolved, geometry = resolve(model)
    facts = item_facts(data, TrainConfig(), WorkersConfig(device="cpu"), resolved, geometry)
    return Feeder(data, facts, 0, str(folder), engine_of)


def planned(feeder: Feeder, step: int) -> list[Item]:
    """The items of a step as the planner sees them."""
    return [item.plan for item in feeder.items(step)]


def cache_of(feeder: Feeder) -> ItemCache:
    assert feeder._cache is not None
    return feeder._cache


@pytest.fixture
def make(clips: Path, tmp_path: Path) -> Iterator[Callable[[], Feeder]]:
    made: list[Feeder] = []

    def feeder() -> Feeder:
        made.append(feeder_of(config(clips, tmp_path / "cache"), tmp_path))
        return made[-1]

    yield feeder
    for one in made:
        if one._engine is not None:
            one._engine.stop()


def fill(feeder: Feeder, steps: int) -> Cache:
    """What workers would have put for the first steps."""
    items, cache = cache_of(feeder), cache_of(feeder).cache
    for step in range(steps):
        for item in feeder.dataset.step(step).items:
            names = items.names(item)
            tokens = Geometry().tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
            for name in names.latents:
                cache.put("latents", name, np.ones((tokens, WIDTH), np.float32))
            for name in names.texts:
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
    damage(cache._path("latents", cache_of(feeder).names(victim).latents[0]))
    feeder.start(0)
    items = feeder.items(0)
    assert [item.cached for item in planned(feeder, 0)] == [("text", "vae"), ("text",)]
    for _ in range(2):  # also when the step is asked for again
        batches = feeder.batches(0)
        spared, decoded = batches.references
        assert spared.video.shape[1] == 0 and decoded.video.shape[1] == victim.bucket.frames and decoded.video.any()
        first, second = (item.plan.id for item in items)
        assert set(batches.cached) == {("text", first), ("vae", first), ("text", second)}
    assert feeder.items(0) is items
    assert feeder.ledger()["delivered"] == feeder.dataset.step(0).num_samples
    assert [item.cached for item in planned(feeder, 1)] == [("text", "vae")] * 2


def test_what_is_decoded_is_what_plans_are_told_while_workers_fill_the_cache(make: Callable[[], Feeder]) -> None:
    """The engine looks at steps 0 and 1 when it begins, and the planner asks for them after they were filled; it asks
    for step 2 before the engine does."""
    feeder = make()
    feeder.start(0)
    told = feeder.items(2)
    fill(feeder, 4)
    for step, pixels in ((0, True), (1, True), (2, True), (3, False)):
        batches = feeder.batches(step)
        assert [item.cached for item in planned(feeder, step)] == [() if pixels else ("text", "vae")] * 2
        assert [batch.video.shape[1] > 0 for batch in batches.references] == [pixels] * 2
        assert bool(batches.cached) != pixels
    assert feeder.items(2) is told
    feeder.start(0)  # again: nothing of it is on a worker
    assert [item.cached for item in planned(feeder, 0)] == [("text", "vae")] * 2
    assert [batch.video.shape[1] for batch in feeder.batches(0).references] == [0, 0]


def test_captions_are_not_read_for_a_cache_without_texts(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(clips, tmp_path / "cache")
    feeder = feeder_of(replace(data, cache=replace(data.cache, text=False)), tmp_path)
    (item, *_) = feeder.dataset.step(0).items
    monkeypatch.setattr("actors.feed.item_cache.captions_of", lambda job: pytest.fail("who encodes it reads it"))
    names = cache_of(feeder).names(item)
    assert len(names.latents) == item.batch and names.texts == ()


def test_items_of_other_sizes_are_looked_up_anew(make: Callable[[], Feeder]) -> None:
    """They have the ids of those that were decoded ahead."""
    feeder = make()
    fill(feeder, 6)
    feeder.start(0)
    before = {step: planned(feeder, step) for step in range(3)}
    feeder.resize({"from": 2, "sizes": {"1x64x96": 3, "9x64x96": 1}})
    assert [planned(feeder, step) for step in range(2)] == [before[0], before[1]]
    assert planned(feeder, 2) != before[2], "other batches"
    for item in feeder.dataset.step(2).items:
        (found,) = [one for one in planned(feeder, 2) if one.id == item.id]
        held = cache_of(feeder)
        assert found.cached == held.named(held.names(item))


def test_a_text_that_is_damaged_is_encoded_again(make: Callable[[], Feeder]) -> None:
    feeder = make()
    cache = fill(feeder, 1)
    name = cache_of(feeder).names(feeder.dataset.step(0).items[0]).texts[0]
    zero_the_end(cache._path("text", name))
    assert planned(feeder, 0)[0].cached == ("vae",)


def test_items_are_encoded_where_the_cache_says_nothing_of_its_entries(
    make: Callable[[], Feeder], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeder = make()
    cache = fill(feeder, 1)
    asked = os.stat

    def stale(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(str(cache.root)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return asked(path, **how)

    monkeypatch.setattr(os, "stat", stale)
    assert [item.cached for item in planned(feeder, 0)] == [(), ()]


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
    bucket, limits = Bucket(17, 64, 96), LimitsConfig()
    job = DecodeJob(item="s0.0", bucket=bucket, clips=(), fps=0.0, crop=False, limits=limits, decoder="")
    assert encoders.text_tokens(DataItem(job=job, samples=samples)) == rows


def test_latents_of_image_to_video_have_names_of_their_own() -> None:
    """They hold the condition of the first frame, too: shapes, frames and names of a text-to-video run do not fit."""
    plain = resolve(MODEL)[0]
    told = replace(MODEL, dit=replace(MODEL.dit, first_frame="channels"), image=ImageConfig(d_model=16))
    both = replace(told, dit=replace(told.dit, pos_embed_seq_len=10))  # the last frame, too
    models = [MODEL, told, replace(told, image=ImageConfig(d_model=16, seed=1)), replace(told, image=None), both]
    encoders = [Encoders.of(resolve(model)[0]) for model in models]
    assert len({one.vae for one in encoders}) == 5
    assert encoders[0].vae == Encoders.of(plain).vae and "first_frame" not in encoders[0].vae
    widths = [(one.latent_width, one.latent_tail) for one in encoders]
    # 5 and 10 rows of 16 numbers fit in one
    assert widths == [(48 * 4, 0), (100 * 4, 1), (100 * 4, 1), (100 * 4, 0), (100 * 4, 1)]


@pytest.mark.parametrize(("more", "found"), [(0, False), (1, True)])
def test_cached_results_of_image_to_video_have_the_rows_of_the_image(
    clips: Path, tmp_path: Path, more: int, found: bool
) -> None:
    dit = replace(MODEL.dit, first_frame="channels")
    model = replace(MODEL, dit=dit, image=ImageConfig(d_model=16))
    feeder = feeder_of(config(clips, tmp_path / "cache"), tmp_path, model)
    item = feeder.dataset.step(0).items[0]
    tokens = feeder.dataset.geometry.tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
    for name in cache_of(feeder).names(item).latents:
        cache_of(feeder).cache.put("latents", name, np.ones((tokens + more, 400), np.float32))
    assert ("vae" in planned(feeder, 0)[0].cached) == found


@pytest.mark.parametrize(("rows", "found"), [(3, True), (6, True), (7, False)])
def test_cached_text_of_two_encoders_has_the_rows_of_the_vector(
    clips: Path, tmp_path: Path, rows: int, found: bool
) -> None:
    """At most four rows of a caption and two of 20 numbers in rows of 16."""
    text = TextConfig(kind="hunyuan", max_length=4, d_model=16, num_heads=2, num_layers=1, pooled_dim=20)
    model = replace(MODEL, dit=HunyuanConfig(num_single_layers=1), text=text)
    feeder = feeder_of(config(clips, tmp_path / "cache"), tmp_path, model)
    for name in cache_of(feeder).names(feeder.dataset.step(0).items[0]).texts:
        cache_of(feeder).cache.put("text", name, np.ones((rows, 16), np.float32))
    assert ("text" in planned(feeder, 0)[0].cached) == found


def of_pictures(clips: Path, folder: Path, text: bool = True) -> tuple[Feeder, TextConfig]:
    """A feeder for a text encoder that sees first frames; whether its run keeps texts in the cache."""
    settings = TextConfig(kind="hunyuan_i2v", max_length=20, d_model=16, num_heads=2, num_layers=1, pooled_dim=16)
    dit = HunyuanConfig(num_single_layers=1, first_frame="token_replace")
    data = config(clips, folder / "cache")
    data = replace(data, cache=replace(data.cache, text=text))
    model = replace(MODEL, dit=dit, text=settings)
    return feeder_of(data, folder, model), resolve(model)[0].text


def keep(feeder: Feeder, text: TextConfig, texts: bool = True) -> DataItem:
    """Results of the first item, as workers would have put them."""
    item, cache = feeder.dataset.step(0).items[0], cache_of(feeder).cache
    names, width = cache_of(feeder).names(item), feeder._facts.encoders.latent_width
    tokens = feeder.dataset.geometry.tokens(item.bucket.frames, item.bucket.height, item.bucket.width)
    for name in names.latents:
        cache.put("latents", name, np.ones((tokens, width), np.float32))
    for name in names.texts if texts else ():
        cache.put("text", name, np.ones((text.most_tokens + text.tail, 16), np.float32))
    return item


def test_transformers_that_take_a_frame_rate_are_told_that_of_each_clip(clips: Path, tmp_path: Path) -> None:
    counts = replace(MODEL, dit=LTXConfig(num_layers=1, num_heads=2, head_dim=16, ffn_dim=128))
    for model, fps in ((counts, 0.0), (counts, 25.0), (MODEL, 0.0)):
        feeder = feeder_of(replace(config(clips), fps=fps), tmp_path, model)
        own = model is counts and fps == 0
        for item, drawn in zip(feeder.dataset.step(0).items, feeder.items(0), strict=True):
            rates = tuple(clip.fps for clip in item.job.clips)
            assert drawn.frame_rates == (rates if own else ()) and any(rates) == any(
                not c.image for c in item.job.clips
            )
            samples = StepItems.of(0, [drawn], feeder.dataset.geometry, "sample").items[item.id].samples
            assert [sample.frame_rate for sample in samples] == list(rates if own else (0.0,) * len(samples))


def test_samples_have_the_loss_weight_of_their_source(clips: Path, tmp_path: Path) -> None:
    (source,) = config(clips).sources
    both = (source, replace(source, name="prior", loss_weight=0.25))
    feeder = feeder_of(replace(config(clips), sources=both), tmp_path)
    drawn = feeder.items(0) + feeder.items(1)
    samples = [
        s for one in StepItems.of(0, drawn, feeder.dataset.geometry, "token").items.values() for s in one.samples
    ]
    assert {(s.key[0], s.loss_weight) for s in samples} == {("0", 1.0), ("1", 0.25)}
    assert sum(s.weight for s in samples) == pytest.approx(1, rel=1e-12), "shares of the step do not know of it"
    assert all(one.loss_weights == () for one in feeder_of(config(clips), tmp_path).items(0))


def test_a_text_of_a_first_frame_is_named_by_it_and_counted_with_its_rows(clips: Path, tmp_path: Path) -> None:
    feeder, text = of_pictures(clips, tmp_path)
    (item, *_) = feeder.dataset.step(0).items
    facts = feeder._facts
    later = replace(item, samples=tuple(replace(s, start_frame=s.start_frame + 1) for s in item.samples))
    larger = replace(item, job=replace(item.job, bucket=replace(item.bucket, height=2 * item.bucket.height)))

    def named(one: DataItem, by: ItemFacts = facts) -> tuple[str, ...]:
        return ItemCache(feeder._config, by.encoders, by.geometry).names(one).texts

    for other in (later, larger):
        assert not set(named(other)) & set(named(item))
    alone = replace(facts, encoders=replace(facts.encoders, picture_rows=0))
    assert named(later, alone) == named(item, alone)
    assert facts.encoders.picture_rows == text.picture_rows == 4
    assert facts.encoders.text_tokens(item) == replace(alone.encoders, least_text=0).text_tokens(item) + 4


def test_pixels_are_spared_only_where_the_texts_of_first_frames_are_kept_too(clips: Path, tmp_path: Path) -> None:
    """The answer stands when workers fill the cache between the planner's question and the engine's."""
    feeder, text = of_pictures(clips, tmp_path)
    item = keep(feeder, text, texts=False)
    assert planned(feeder, 0)[0].cached == ("vae",) and feeder._needs_pixels(item)
    keep(feeder, text)
    assert feeder._needs_pixels(item)
    again, _ = of_pictures(clips, tmp_path)
    assert not again._needs_pixels(item) and planned(again, 0)[0].cached == ("text", "vae")


def damaged(path: Path) -> None:
    zero_the_end(path)


@pytest.mark.parametrize("harm", [damaged, Path.unlink])
def test_a_text_of_a_first_frame_that_is_damaged_or_gone_has_its_item_decoded(
    clips: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    feeder, text = of_pictures(clips, tmp_path)
    item = keep(feeder, text)
    harm(cache_of(feeder).cache._path("text", cache_of(feeder).names(item).texts[0]))
    assert feeder._needs_pixels(item) and planned(feeder, 0)[0].cached == ("vae",)


def test_no_pixels_are_spared_for_texts_of_first_frames_that_the_cache_is_not_asked_for(
    clips: Path, tmp_path: Path
) -> None:
    """A folder may hold texts of another run, and this one have data.cache.text off."""
    item = keep(*of_pictures(clips, tmp_path))
    asked, _ = of_pictures(clips, tmp_path, text=False)
    assert planned(asked, 0)[0].cached == ("vae",) and asked._needs_pixels(item)


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
    assert '"cleaned": "lower"' in Encoders.of(ModelConfig(text=TextConfig(cleaned="lower"))).text


@pytest.mark.parametrize("kind", [kind for kind, recipe in TEXT_RECIPES.items() if recipe.crop])
def test_the_name_of_a_text_holds_the_prompt_around_its_caption(kind: TextKind) -> None:
    """Another prompt makes other rows of the same caption."""
    recipe, text = TEXT_RECIPES[kind], TextConfig(kind=kind)
    assert json.loads(Encoders.of(ModelConfig(text=text)).text)["prompt"] == [recipe.template, recipe.crop]


def test_an_empty_caption_that_is_no_text_is_kept_in_the_cache(clips: Path, tmp_path: Path) -> None:
    """As an array without rows, which is what is wanted of it."""
    model = replace(MODEL, text=replace(MODEL.text, empty="none"))
    feeder = feeder_of(config(clips, tmp_path / "cache"), tmp_path, model)
    for name in cache_of(feeder).names(feeder.dataset.step(0).items[0]).texts:
        cache_of(feeder).cache.put("text", name, np.ones((0, model.text.d_model), np.float32))
    assert planned(feeder, 0)[0].cached == ("text",)


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

    def __init__(self, dataset: Dataset, config: DataConfig, needs_pixels: NeedsPixels) -> None:
        self.dataset = dataset

    def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
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


class Asked(Remote):
    """A method that runs when it is asked; in a thread group of its own, where the pulse is, it does nothing."""

    def options(self, **options: Any) -> Remote:
        return Remote()


class Actor:
    """A plain object behind the interface of a Ray actor."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return Asked(getattr(self._plain, name))


def source(
    clips: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_of: EngineOf = Engine,
    *,
    steps: int = 10**6,
    growth: Growth | None = None,
    tell: Tell = silent,
) -> StepSource:
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    monkeypatch.setattr(ray, "wait", lambda asked, num_returns=1, timeout=None: (asked, []))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    plain = two_sources(clips)
    make = lambda: Actor(feeder_of(plain, clips, engine_of=engine_of))  # noqa: E731
    return StepSource(make, Geometry(), "sample", steps, 60.0, nodes=list, growth=growth, tell=tell)


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


@pytest.mark.parametrize("seed", in_default_run([0, 1], of=range(6)))
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


class Watched(Engine):
    """Notes which of several engines has begun where, and which has handed out what."""

    def __init__(self, dataset: Dataset, config: DataConfig, begun: list[int], handed: list[tuple[int, int]]) -> None:
        super().__init__(dataset, config, lambda item: True)
        self._begun, self._handed = begun, handed

    def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
        super().start(first_step, avoid)
        self._first = first_step
        self._begun.append(first_step)

    def batches(self, step: int) -> list[Any]:
        self._handed.append((self._first, step))
        return super().batches(step)


def passed(at: StepSource, steps: int) -> list[object]:
    """What a run of these `steps` sees of its data, and the account in the end."""
    at.open(0)
    found = list[object]()
    for step in range(steps):
        assert any(at.has(step) for _ in range(3)), "a feeder that takes over holds nothing up for long"
        for ahead in range(step, min(step + 4, steps)):  # for the planner
            assert at.items(ahead) is not None or ahead > step + 1
        data = at.data(step)
        samples = [(s.key, s.weight) for item in data.items.items.values() for s in item.samples]
        released = json.dumps(at.release(step - 1)) if step else ""
        found.append((tuple(data.batches), samples, data.epoch, released))
    return [*found, json.dumps(at.release(steps - 1)), at.ledger()]


def test_a_feeder_that_takes_over_goes_on_exactly(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, positions and accounts are those of a run with one feeder, and each step is handed out once."""
    steps, events, begun, handed = 60, list[RunEvent](), list[int](), list[tuple[int, int]]()
    expected = passed(source(clips, monkeypatch, steps=steps), steps)
    growth = Growth(most_bytes=-(1 << 60), settling_steps=5, steady_steps=1)  # over as soon as it has settled
    watched: EngineOf = lambda dataset, config, needs_pixels: Watched(dataset, config, begun, handed)  # noqa: E731
    at = source(clips, monkeypatch, watched, steps=steps, growth=growth, tell=events.append)
    assert passed(at, steps) == expected
    assert told(at.ledger()) == counted(Dataset.open(two_sources(clips), Geometry(), 0), steps)
    renewed = [event.from_step for event in events if isinstance(event, FeederRenewed)]
    assert begun == [0, *renewed] and len(renewed) > 3 and renewed[-1] < steps
    assert min(later - one for one, later in zip(begun, renewed)) > 5, "each has settled before"
    owners = [max(first for first in begun if first <= step) for step in range(steps)]
    assert handed == list(zip(owners, range(steps))), "in order, and none twice"


def counted(plan: Dataset, steps: int, judged: int | None = None) -> dict[int, Counts]:
    """What the ledger must say after `steps` steps, of which only the first `judged` were looked at."""
    each = [drawn(plan, step) for step in range(steps)]
    bad = [fault.source for step, of in enumerate(each[:judged]) for fault in faults(step, of)]
    return total(sum(each, Counter()), Counter(bad))


@pytest.mark.parametrize("known", [0, 7, 30, None])
def test_steps_that_are_walked_over_are_counted_from_the_plan(clips: Path, known: int | None) -> None:
    """Nobody has counted them here: all are scheduled, none is missing; only which were bad among them is not known."""
    plain = two_sources(clips)
    first, then = (Dataset.open(plain, Geometry(), 0) for _ in range(2))
    engine = Engine(first, plain, lambda item: True)
    tokens = {}
    for step in range(40):
        tokens[step] = first.token(step)
        engine.batches(step)
    if known is not None:
        then.resume(json.loads(json.dumps(tokens[known])))
    Engine(then, plain, lambda item: True).start(40)
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
    assert [tuple(planned(feeder, step)) for step in range(2)] == warm
    auto = replace(preview, workers=WorkersConfig(device="auto"))
    assert [len(step) for step in items_from_data(feeder.dataset, 2, auto, MODEL)] == [2, 2], "no cluster is asked"


def batches_of(data: StepSource, steps: range) -> list[list[tuple[str, tuple[str, ...]]]]:
    found = []
    for step in steps:
        items = data.data(step).items.items.values()
        found.append([("x".join(map(str, i.bucket)), tuple(s.key for s in i.samples)) for i in items])
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


def test_sizes_that_are_decided_before_a_prepared_feeder_starts_begin_nothing(clips: Path) -> None:
    """What it begins at is not known yet: from the first draw on it would walk through all steps of the run."""
    begun: list[int] = []
    watched: EngineOf = lambda dataset, config, needs_pixels: Watched(dataset, config, begun, [])  # noqa: E731
    feeder, started = (feeder_of(two_sources(clips), clips, engine_of=watched) for _ in range(2))
    record: Any = {"from": 4, "sizes": {"1x64x96": 2, "9x64x96": 1}}
    feeder.prepare()
    feeder.resize(record)
    assert begun == []
    started.start(0)
    started.resize(record)
    for one in (feeder, started):
        one.start(6, started.token(6))
    assert begun == [0, 4, 6, 6] and planned(feeder, 6) == planned(started, 6)


def test_what_a_cache_held_of_a_step_is_let_go_with_the_step(make: Callable[[], Feeder]) -> None:
    """A long run would keep all encode results, in the object store."""
    feeder = make()
    fill(feeder, 3)
    feeder.start(0)
    for step in range(3):
        feeder.batches(step)
    feeder.release(1)
    assert min(feeder._known) == 2


def test_batches_of_other_sizes_are_decoded_on_no_node_that_is_avoided_either(clips: Path) -> None:
    avoided: list[tuple[int, Sequence[str]]] = []

    class Placed(Engine):
        def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
            super().start(first_step, avoid)
            avoided.append((first_step, avoid))

    engine_of: EngineOf = lambda dataset, config, needs_pixels: Placed(dataset, config, needs_pixels)  # noqa: E731
    feeder = feeder_of(two_sources(clips), clips, engine_of=engine_of)
    feeder.start(0, None, ("n2",))
    feeder.resize({"from": 4, "sizes": {"1x64x96": 2, "9x64x96": 1}})
    assert avoided == [(0, ("n2",)), (4, ("n2",))]


@pytest.mark.parametrize(("feeders", "known"), [(1, True), (2, False)])
def test_a_feeder_of_several_does_not_tell_its_memory(feeders: int, known: bool, clips: Path) -> None:
    """It is not renewed: the others would open their data while the run waits."""
    data = config(clips)
    feeder = feeder_of(replace(data, engine=replace(data.engine, kind="ray", feeders=feeders)), clips, engine_of=Engine)
    feeder.start(0)
    assert bool(feeder.batches(0).feeder_bytes) is known


def test_a_start_tells_what_is_dropped_and_how_often_the_rest_is_drawn(clips: Path, tmp_path: Path) -> None:
    """The job of a user whose clips mostly fit no bucket ended normally, and said nothing."""
    data = config(clips)
    resolved, geometry = resolve(MODEL)
    facts = item_facts(data, TrainConfig(), WorkersConfig(device="cpu"), resolved, geometry)
    feeder = Feeder(data, facts, 0, str(tmp_path), make_engine, steps=6)
    told: dict[str, Any] = dict(feeder.start(0))
    try:
        assert told["listed"] == told["indexed"] - told["planned"] == sum(told["reasons"].values()) > 0
        lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
        assert len(lines) == told["listed"] and {"source", "key", "reason", "detail"} <= lines[0].keys()
        batches = [feeder.batches(step) for step in range(6)]
        samples = sum(len(item.keys) for step in range(6) for item in feeder.items(step))
        assert told["forecast"]["draws"] == samples and told["forecast"]["steps"] == 6
        assert [one.epoch for one in batches] == [feeder.dataset.epoch(step + 1) for step in range(6)]
        assert batches[-1].epoch == pytest.approx(samples / told["planned"])
    finally:
        assert feeder._engine is not None
        feeder._engine.stop()


def test_a_start_with_too_little_of_its_data_is_refused(clips: Path, tmp_path: Path) -> None:
    """`data.min_coverage` was for previews alone."""
    with pytest.raises(DataError, match=r"data\.min_coverage asks for 90%"):
        feeder_of(replace(config(clips), min_coverage=0.9), tmp_path).start(0)


def test_a_list_of_dropped_samples_that_cannot_be_written_ends_no_run(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actors.feed.feeder.write_dropped", full)
    feeder = feeder_of(config(clips), tmp_path)
    told = feeder.start(0)
    assert feeder._engine is not None
    feeder._engine.stop()
    assert "listed" not in told and "not listed: [Errno 28] No space left" in caplog.text
