"""What a run may ask its cache for, and what of it is there: the entries of every clip in every shape that a step may
draw it in, and of every caption, of its held-out clips, and the texts of the prompts that its samples are made of.

    found = look(config, cuda=True)
    found.kinds["latents"].missing          # what `heddle data cache` makes

Names are those that a run itself gives (`actors.feed.item_cache`): no pixel is read for them, captions are.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from actors.feed.encoders import Encoders
from actors.feed.item_cache import KINDS, ItemCache
from actors.plan.spared import from_cache
from actors.plan.types import Module
from app.inputs.beside import live_texts
from app.inputs.items import cache_of, open_dataset
from app.inputs.profiles import gpu_of, profile_of
from app.kept.verdict import WholeVerdict
from app.settings.config import RunConfig
from app.validation.clips import held_out_data, held_out_items
from data.cache import OVERHEAD_BYTES, EntryKind, EntryNames, Listing
from data.dataset.dataset import Dataset
from data.dataset.every_draw import ClipCut, every_row, item_of, told_clips
from data.dataset.index import IndexRow
from data.decode import (
    AVI_VERSION,
    DECODE_VERSION,
    PICTURE_VERSION,
    RESAMPLED_VERSION,
    TURNED_VERSION,
    caption_of,
    fault_of,
)
from data.ledger import BadSample, Fault
from data.storage import kept_open
from data.types import Bucket, Clip, DataItem, DecodeJob
from ops.counted import counted
from ops.models.folders import resolve
from ops.typed import ConfigError

log = logging.getLogger(__name__)

_READERS = 16  # captions read at a time: on remote storage each takes a request or two
_ROWS_AT_ONCE = 64  # of one shard, mostly
_FLOAT_BYTES = 4
NO_SOURCE = -1  # of held-out clips, and of texts that no pixels are needed for


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedEntry:
    """An entry that is not there."""

    kind: EntryKind
    key: str
    num_bytes: int  # of latents; of a text as its length has it, about
    caption: str = ""  # of a text
    cut: ClipCut | None = None  # of which clip of `data.sources` it is made; a text that sees no pixels has none
    item: DataItem | None = None  # instead: a held-out clip

    @property
    def source(self) -> int:
        """Number of its source in `data.sources`."""
        return self.cut.source if self.cut is not None else NO_SOURCE


@dataclass(kw_only=True, slots=True)
class KindAccount:
    """The entries of one kind, each counted once however many draws ask for it."""

    there: Counter[int] = field(default_factory=Counter)  # by number in `data.sources`, or NO_SOURCE
    bad: list[WantedEntry] = field(default_factory=list)  # of clips that could not be decoded: they train nothing
    missing: list[WantedEntry] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return self.there.total() + len(self.bad) + len(self.missing)

    @property
    def missing_bytes(self) -> int:
        return sum(one.num_bytes for one in self.missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLook:
    """What a look at a run's data and its cache has found."""

    key: str  # equal for runs that ask for the same entries
    dataset: Dataset
    cache: ItemCache
    listed: dict[EntryKind, Listing]  # all entries that were there
    kinds: dict[EntryKind, KindAccount]  # those that the run asks for
    untold: tuple[Fault, ...]  # samples whose caption cannot be read: their draws train nothing
    moving: int  # clips of which, in some shape, every draw takes another part (`data.start_frame: random`)
    moving_name: str  # of the first of them

    def name_of(self, one: WantedEntry) -> str:
        """How people find it."""
        if one.item is not None:
            return f"the held-out clip {one.item.samples[0].key} as {one.item.bucket}"
        if one.cut is None:
            shown = one.caption if len(one.caption) <= 60 else f"{one.caption[:60]}..."
            return f"the caption {shown!r}"
        return name_of_cut(self.dataset, one.cut)

    def describe(self) -> str:
        """One line, of a cache that lacks nothing."""
        words = {"latents": "clip", "text": "text"}
        told = [
            f"{counted(account.wanted - len(account.bad), words[kind])}"
            f"{f' and {len(account.bad):,} bad' if account.bad else ''}"
            for kind, account in self.kinds.items()
        ]
        return f"cache     has all of {', '.join(told)}: no encoder is loaded for steps (data.cache.only)"

    def lacking(self) -> str:
        """Such as "latents of 12 of 1,200 clips and 3 of 90 texts"; "" where nothing is."""
        told = {kind: (len(account.missing), account.wanted) for kind, account in self.kinds.items()}
        words = {"latents": "latents of {} of {:,} clips", "text": "{} of {:,} texts"}
        return " and ".join(words[kind].format(f"{lacks:,}", wanted) for kind, (lacks, wanted) in told.items() if lacks)


def name_of_cut(dataset: Dataset, cut: ClipCut) -> str:
    """Such as "a of clips/00000.tar as 17x480x832"."""
    row = dataset.indexes[cut.source].row(cut.row)
    part = f" from frame {cut.start_frame}" if cut.start_frame else ""
    return f"{row.key} of {row.shard} as {cut.bucket}{part}"


def look(
    config: RunConfig,
    *,
    cuda: bool,
    modules: Sequence[Module],
    bad_list: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CacheLook:
    """What the cache of a run on GPUs (`cuda`) or CPUs has of these modules' results, and lacks. Of clips whose part
    every draw chooses anew nothing is wanted: `moving` counts them. `progress` hears of samples.

    Raises DataError and ValueError as the opening of the data does.
    """
    asked = _Asked(config, cuda, modules, bad_list)
    return _look(asked, asked.key(), asked.listed(), progress)


def _look(
    asked: _Asked,
    key: str,
    listed: dict[EntryKind, Listing],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CacheLook:
    survey, total = _Survey(asked, listed), asked.dataset.ledger.planned
    for done, (row, cuts, told) in enumerate(survey.read(every_row(asked.dataset)), start=1):
        survey.add_row(row, cuts, told)
        progress(done, total)
    asked.add_beside(survey)
    return survey.found(key)


class _Asked:
    """What a run asks its cache for: its data, and what it takes from there beside its steps."""

    def __init__(self, config: RunConfig, cuda: bool, modules: Sequence[Module], bad_list: Path | None = None) -> None:
        """Raises as `look`."""
        self._config, self.modules = config, tuple(modules)
        self._model, self.geometry = resolve(config.model)
        profile = profile_of(config, self._model, self.geometry)
        self.dataset = open_dataset(config, self.geometry, profile, bad_list=bad_list)
        self.cache = cache_of(config, config.data, cuda=cuda)
        self._encoders = self.cache.encoders

    def listed(self) -> dict[EntryKind, Listing]:
        """What is there."""
        return {kind: self.cache.cache.listing(kind) for kind in map(KINDS.__getitem__, self.modules)}

    def add_beside(self, survey: _Survey) -> None:
        """Its held-out clips, and the texts of its samples."""
        config = self._config
        if config.validation.every and config.validation.sources:
            of_held_out = ItemCache(held_out_data(config), self._encoders, self.geometry)
            for item in held_out_items(replace(config, model=self._model), self.geometry):
                survey.add_item(item, of_held_out)
        for text in live_texts(config) if not self._encoders.picture_rows else ():
            survey.add_text(text)

    def key(self) -> str:
        """Equal for runs that ask for the same entries: of all that their names are made of. For the rows of a source
        the hash of its index stands, and what its files are: names of latents go by where a clip lies and its time."""
        none = Listing(entries=EntryNames(), bad=EntryNames())
        beside = _Survey(self, {KINDS[module]: none for module in self.modules})
        self.add_beside(beside)
        names_beside = sorted(one.key for account in beside.kinds.values() for one in account.missing)
        plan, data = self.dataset.planner, self._config.data
        stages = [
            (
                [weight > 0 for weight in stage.weights],
                stage.crop,
                [[str(choice.bucket) for choice in choices] for choices in stage.choices],
            )
            for stage in plan.stages
        ]
        versions = DECODE_VERSION, AVI_VERSION, TURNED_VERSION, RESAMPLED_VERSION, PICTURE_VERSION
        decoder = data.engine.decoder, *versions
        names = self.modules, self._encoders, self.geometry, decoder, data.limits, plan.identity, stages
        found = hashlib.blake2b(repr((*names, names_beside)).encode(), digest_size=16)
        for index, population in zip(self.dataset.indexes, plan.populations, strict=True):
            found.update(population.shape.tobytes())  # that each row has, and which rows are drawn
            for one in index.parts:
                made = one.file.stat()
                found.update(repr((one.part, str(one.file.absolute()), made.st_size, made.st_mtime_ns)).encode())
        return found.hexdigest()


class _Survey:
    """Counts entries, each once."""

    def __init__(self, asked: _Asked, listed: dict[EntryKind, Listing]) -> None:
        self._dataset, self._cache, self._geometry = asked.dataset, asked.cache, asked.geometry
        self._modules = asked.modules
        self.kinds: dict[EntryKind, KindAccount] = {kind: KindAccount() for kind in listed}
        self._listed = listed
        self._marks = {
            kind: (np.zeros(len(listing.entries), bool), np.zeros(len(listing.bad), bool))
            for kind, listing in listed.items()
        }
        self._missing: set[bytes] = set()
        self._untold: list[Fault] = []
        self._moving, self._moving_name = 0, ""

    @property
    def _sees_pixels(self) -> bool:
        return bool(self._cache.encoders.picture_rows)

    def read(
        self, rows: Iterator[tuple[IndexRow, list[ClipCut]]]
    ) -> Iterator[tuple[IndexRow, list[ClipCut], list[str | BadSample]]]:
        """Each row with its captions, or why one cannot be read: several are read at a time."""
        waiting: deque[tuple[list[tuple[IndexRow, list[ClipCut]]], Future[list[list[str | BadSample]]]]] = deque()
        with ThreadPoolExecutor(_READERS) as readers:
            for some in _batched(rows, _ROWS_AT_ONCE):
                clips = [told_clips(self._dataset, row) if "text" in self._modules else [] for row, _ in some]
                waiting.append((some, readers.submit(_read_captions, self._dataset, some[0][1][0].bucket, clips)))
                if len(waiting) > 2 * _READERS:
                    yield from _joined(*waiting.popleft())
            while waiting:
                yield from _joined(*waiting.popleft())

    def add_row(self, row: IndexRow, cuts: Sequence[ClipCut], told: Sequence[str | BadSample]) -> None:
        """A row of the training data."""
        texts = dict.fromkeys(text for text in told if isinstance(text, str))
        for error in (error for error in told if isinstance(error, BadSample)):
            clip = row.clip()
            self._untold.append(fault_of(clip, error.reason, error.offset, error.detail))
        moving = [cut for cut in cuts if cut.moves] if "vae" in self._modules or self._sees_pixels else []
        if moving:
            self._moving += 1
            self._moving_name = self._moving_name or name_of_cut(self._dataset, moving[0])
        for cut in cuts:
            if cut.moves:
                continue
            item = item_of(self._dataset, "cache", [cut], [row])
            self._add_latents(item, self._cache, cut=cut)
            if self._sees_pixels:
                self._add_texts(texts, self._cache.frames(item)[0], cut=cut)
        if not self._sees_pixels:
            self._add_texts(texts)

    def add_item(self, item: DataItem, cache: ItemCache) -> None:
        """A held-out clip."""
        (clip,) = item.job.clips
        try:
            text = caption_of(clip, item.job)
        except BadSample:  # it is counted as unread
            return
        self._add_latents(item, cache, item=item)
        self._add_texts([text], cache.frames(item)[0], item=item if self._sees_pixels else None)

    def add_text(self, text: str) -> None:
        """One that no clip has."""
        self._add_texts([text])

    def found(self, key: str) -> CacheLook:
        return CacheLook(
            key=key,
            dataset=self._dataset,
            cache=self._cache,
            listed=self._listed,
            kinds=self.kinds,
            untold=tuple(self._untold),
            moving=self._moving,
            moving_name=self._moving_name,
        )

    def _add_latents(
        self, made: DataItem, cache: ItemCache, cut: ClipCut | None = None, item: DataItem | None = None
    ) -> None:
        if "vae" not in self._modules:
            return
        rows, width = cache.shape("vae", made.bucket)
        size = rows[-1] * width * _FLOAT_BYTES + OVERHEAD_BYTES
        self._count(WantedEntry(kind="latents", key=cache.latents(made)[0], num_bytes=size, cut=cut, item=item))

    def _add_texts(
        self, texts: Iterable[str], frame: str = "", cut: ClipCut | None = None, item: DataItem | None = None
    ) -> None:
        if "text" not in self._modules:
            return
        for text in texts:
            size = text_rows(text, self._cache.encoders) * self._cache.encoders.text_width * _FLOAT_BYTES
            self._count(
                WantedEntry(
                    kind="text",
                    key=self._cache.text(text, frame),
                    num_bytes=size + OVERHEAD_BYTES,
                    caption=text,
                    cut=cut,
                    item=item,
                )
            )

    def _count(self, one: WantedEntry) -> None:
        account, listed, marks = self.kinds[one.kind], self._listed[one.kind], self._marks[one.kind]
        for names, seen in zip((listed.entries, listed.bad), marks, strict=True):
            if (place := names.place(one.key)) < 0:
                continue
            if not seen[place]:
                seen[place] = True
                if names is listed.entries:
                    account.there[one.source] += 1
                else:
                    account.bad.append(one)
            return
        if (name := bytes.fromhex(one.key)) not in self._missing:
            self._missing.add(name)
            account.missing.append(one)


def text_rows(text: str, encoders: Encoders) -> int:
    """Rows of a caption's embedding, about."""
    tokens = min(encoders.max_length, int(len(text) / encoders.chars_per_token) + 1)
    return min(max(tokens + encoders.picture_rows, encoders.least_text), encoders.most_text)


def check_only(config: RunConfig, *, cuda: bool) -> str:
    """What a run that trains from its cache alone finds there, in words. Raises ConfigError where it would miss an
    entry, and what `look` raises. A cache that had everything is not asked for each clip again by a run that asks for
    the same, as long as the same entries are there."""
    told, why = _answer(config, cuda=cuda, keeps=True)
    if why:
        raise ConfigError(why)
    return told


def _answer(config: RunConfig, *, cuda: bool, keeps: bool) -> tuple[str, str]:
    """(what is there, in a line; why the run would not start with that). `keeps`: where it would, a later start asks
    for the list of entries alone."""
    asked = _Asked(config, cuda, from_cache(config.data.cache))
    key, listed = asked.key(), asked.listed()
    verdict = WholeVerdict.of(asked.cache.cache.root, key, listed.values())
    if told := verdict.told():
        return told, ""
    found = _look(asked, key, listed)
    if why := _why_not_only(found, config):
        lacking = found.lacking() or "latents of clips that no draw begins at the same frame"
        return f"cache     lacks {lacking}: as it is this run does not start", why
    if keeps:
        verdict.keep(found.describe())
    return found.describe(), ""


def keep_filled(found: CacheLook) -> None:
    """After all that a look has missed was made: a run that asks for the same need not look at each clip, unless an
    entry has gone meanwhile, such as a damaged one that another run has met."""
    if found.kinds.keys() != found.listed.keys():
        return  # texts alone were made
    store = found.cache.cache
    try:
        now = {kind: store.listing(kind) for kind in found.listed}
    except OSError as error:
        log.warning("whether the cache is whole is not known (%s): the next start looks at every clip", error)
        return
    for kind, account in found.kinds.items():
        if not now[kind].has_all_of(found.listed[kind]):
            return
        for one in account.missing:
            if now[kind].entries.place(one.key) >= 0:
                account.there[one.source] += 1
            elif now[kind].bad.place(one.key) >= 0:
                account.bad.append(one)
            else:
                return
        account.missing.clear()
    WholeVerdict.of(store.root, found.key, now.values()).keep(found.describe())


def cache_preview(config: RunConfig) -> tuple[str, str]:
    """(what of a cache that a run trains from alone is there, in a line; why it would not start with that); both "" of
    another run. Raises what `look` raises."""
    if not from_cache(config.data.cache):
        return "", ""
    return _answer(config, cuda=bool(gpu_of(config)), keeps=False)


def _why_not_only(found: CacheLook, config: RunConfig) -> str:
    """Why a run cannot train from its cache alone, with what would help; "" where it can."""
    if found.moving:
        return (
            f"data.cache.only is true and data.start_frame is random: of {counted(found.moving, 'clip')} longer than "
            f"their bucket every draw takes another part, the first is {found.moving_name}. Set data.start_frame: "
            f"fixed, or 4 for four parts of each, or take texts alone from the cache (data.cache.latents: false)."
        )
    missing = [one for account in found.kinds.values() for one in account.missing]
    if not missing:
        return ""
    return (
        f"data.cache.only is true, and {config.data.cache.path} lacks {found.lacking()}, the first is "
        f"{found.name_of(missing[0])}. Make them with `heddle data cache --config RUN.yaml` and the same --set, or set "
        f"data.cache.only: false."
    )


def _read_captions(dataset: Dataset, bucket: Bucket, rows: Sequence[Sequence[Clip]]) -> list[list[str | BadSample]]:
    job = dataset.job("cache", bucket, (), crop=False)
    with kept_open():
        return [[_caption(clip, job) for clip in clips] for clips in rows]


def _caption(clip: Clip, job: DecodeJob) -> str | BadSample:
    try:
        return caption_of(clip, job)
    except BadSample as error:
        return error


def _joined(
    some: list[tuple[IndexRow, list[ClipCut]]], told: Future[list[list[str | BadSample]]]
) -> Iterator[tuple[IndexRow, list[ClipCut], list[str | BadSample]]]:
    for (row, cuts), texts in zip(some, told.result(), strict=True):
        yield row, cuts, texts


def _batched(
    rows: Iterator[tuple[IndexRow, list[ClipCut]]], size: int
) -> Iterator[list[tuple[IndexRow, list[ClipCut]]]]:
    some: list[tuple[IndexRow, list[ClipCut]]] = []
    for row in rows:
        some.append(row)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
