"""Settings of the data path. Imports neither torch nor Ray, so configs load in milliseconds.

data:
  sources: [{kind: webdataset, path: "shards/{00000..00003}.tar", weight: 1.0}]
  buckets: {table: ["1x64x96", "17x64x96", "17x96x64"]}
  batch:   {memory_tokens: 4096, compute: 2.0e6, exponent: 1.6}
  items_per_step: 4
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from data.kinds import SourceKind
from ops.ranges import SECONDS, above, between, check_numbers

SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
# s3://KEY:SECRET@bucket, abfs://:SECRET@account, also after options, which hold an = first; AWS's secrets may hold a /
SECRET = re.compile(r"://(?:[^/@]*=[^/@]*@)?[^/:=@]*:[^@]+@")
# options of PyArrow and fsspec, and what signs an address
SECRET_OPTION = re.compile(
    r"://(?:.*?[?&])?(sig|signature|x-(?:amz|goog)-(?:signature|security-token)|client_secret|account_key|secret_key|"
    r"sas_token|access_token|api_key|token|secret|password)=",
    re.IGNORECASE,
)
# Open-Sora's nine ratios (width:height) and their transposes
OPEN_SORA_RATIOS = (
    "2.39:1",
    "2:1",
    "16:9",
    "1.85:1",
    "9:16",
    "5:8",
    "3:2",
    "4:3",
    "1:1",
    "1:2.39",
    "1:2",
    "1:1.85",
    "8:5",
    "2:3",
    "3:4",
)


def check_no_secret(path: str) -> None:
    """Raises ValueError, without the secret, for a URI that holds one."""
    where = f"before @{path.rpartition('@')[2].partition('?')[0]}" if SECRET.search(path) else ""
    if not where and (option := SECRET_OPTION.search(path)):
        where = f"as {option[1]}="
    if where:
        raise ValueError(
            f"data.sources: a URI with a secret {where}, which logs and the run's config.yaml would show. Give it by "
            f"the environment, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Where samples come from. `weight` is a share of the mixture; all weights sum to 1, or none is given."""

    # webdataset: shards (braces, "::" lists); koala, panda, manifest: the table; pairs, mds: the folder.
    # Several as A::B; PyArrow URIs too
    path: str
    kind: SourceKind = "auto"  # auto: told by its files
    name: str = ""  # shown in reports; empty: the last part of the path
    media: str = ""  # folder of the videos a table names; empty: beside the table
    caption: str = "txt|json:caption"  # members or JSON fields tried in order; `a+b` offers several, one is drawn
    # trigger word: put before every caption as it stands, "sks style, " with its last space; a caption that is dropped
    # has none
    caption_prefix: str = ""
    # that of samples without a text; "": none, or caption_prefix alone. null: they are refused as no_caption
    default_caption: str | None = None
    weight: float = 0.0  # 0 in all sources: shares follow the number of admitted samples
    loss_weight: float = 1.0  # the loss of its samples counts times this: of a set of regularisation below 1
    filters: tuple[str, ...] = ()  # rules on index columns: "aesthetic_score >= 4.5"; what they refuse is counted
    shuffle_window: int = 8  # samples are shuffled within this many shards at a time, so reads stay near each other
    index: str = ""  # folder of the index; empty: beside the source, or in the user's cache
    synthetic: bool = False  # FOLDER/shards/{00000..00003}.tar of drawn clips, made by `heddle train` when not there

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("data.sources: a source without a path. Give its shards, table or folder.")
        if self.path.startswith("pipe:"):
            raise ValueError(
                f"data.sources path {self.path!r}: pipe: runs a shell command and is refused. "
                f"Give local paths or a file system URI."
            )
        for uri in (self.path, self.media, self.index):
            check_no_secret(uri)
        if "://" in self.index:
            raise ValueError(
                f"data.sources index {self.index!r} is a URI; an index is a local or shared folder. Give its path."
            )
        if self.synthetic and (self.kind not in ("auto", "webdataset") or "/shards/" not in self.path):
            raise ValueError(
                f"data.sources path {self.path!r}: a synthetic source is of kind webdataset, its path "
                f"FOLDER/shards/{{00000..00003}}.tar."
            )
        if self.weight < 0:
            raise ValueError(f"data.sources weight {self.weight} of {self.path} is negative. Use 0..1.")
        check_numbers(
            "data.sources", self, weight=between(0, 1e9), loss_weight=above(0, 1e6), shuffle_window=between(0)
        )
        for name in ("caption_prefix", "default_caption"):
            _check_text(name, getattr(self, name))
        if self.shuffle_window < 1:
            raise ValueError(f"data.sources shuffle_window {self.shuffle_window} must be at least 1 shard.")


def _check_text(name: str, text: str | None) -> None:
    """Raises ValueError for half a surrogate pair, which no file of settings and no block of captions could hold."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"data.sources {name} {text!r} is no text: {error.reason} at character {error.start}. Leave it out."
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketsConfig:
    """Which shapes a clip may take: an explicit table, one generated from pixel budgets and ratios, or Open-Sora's."""

    PLACE: ClassVar[str] = "data.buckets"  # as its errors name it; in a segment they name that (`ops.typed.build`)
    # What says of which kind the table is, and what else belongs to that kind: a file's kind replaces that of the files
    # under its `base:` (`app.settings.files.merge`).
    KINDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "table": (),
        "resolutions": ("frames",),  # ratios say nothing to the others
        "open_sora": (),
    }

    table: tuple[str, ...] = ()  # explicit: FRAMESxHEIGHTxWIDTH, for example 17x480x832
    resolutions: tuple[str, ...] = ()  # generated: 256px (256^2 pixels) or 480p (480^2 * 16/9 pixels)
    ratios: tuple[str, ...] = ("16:9", "3:2", "4:3", "1:1", "3:4", "2:3", "9:16")  # generated: width:height
    frames: tuple[int, ...] = ()  # generated: frame counts, 4k+1 for causal VAEs; 1 is a still image
    open_sora: dict[str, Any] = field(default_factory=dict)  # pasted from Open-Sora: {"256px": {1: [1.0, 45]}}
    max_ratio_error: float = 1.5  # a clip whose aspect ratio is further than this factor from every bucket is dropped
    min_area: float = 0.8  # a clip joins a resolution when it has at least this share of its pixels
    # clips with fewer pixels than min_area of the smallest resolution; upscale: they join it
    undersize: Literal["drop", "upscale"] = "drop"
    # downscale: a clip is scaled to cover its bucket, then cut to its middle. crop: a clip that is larger than its
    # bucket is cut to its middle unscaled. drop: as downscale, without clips larger than the largest resolution
    oversize: Literal["downscale", "crop", "drop"] = "downscale"
    # videos shorter than every video bucket; image: their first frame joins a bucket of 1 frame
    short_videos: Literal["drop", "image"] = "drop"

    def __post_init__(self) -> None:
        given = [name for name in ("table", "resolutions", "open_sora") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"data.buckets gives {' and '.join(given)}; they exclude each other. Keep one.")
        if self.resolutions and not self.frames:
            raise ValueError("data.buckets.resolutions needs data.buckets.frames, for example [1, 17, 33].")
        for shape in self.table:
            if SHAPE.fullmatch(shape) is None:
                raise ValueError(f"data.buckets.table {shape!r} is not FRAMESxHEIGHTxWIDTH, for example 17x480x832.")
        check_numbers("data.buckets", self, frames=between(1), max_ratio_error=between(0, 1e9))
        if self.max_ratio_error < 1:
            raise ValueError(f"data.buckets.max_ratio_error {self.max_ratio_error} is a factor and must be at least 1.")
        if not 0 < self.min_area <= 1:
            raise ValueError(f"data.buckets.min_area {self.min_area} must lie in (0, 1].")

    @property
    def has_videos(self) -> bool:
        """Whether any bucket may have more than one frame."""
        return (
            bool(self.open_sora)
            or any(frames > 1 for frames in self.frames)
            or any(not shape.startswith("1x") for shape in self.table)
        )

    @property
    def has_pictures(self) -> bool:
        """Whether any bucket has one frame. Entries of a pasted table that are switched off are none."""
        rows = [row for rows in self.open_sora.values() if isinstance(rows, Mapping) for row in rows.items()]
        return (
            any(str(frames) == "1" and not _is_off(value) for frames, value in rows)
            or (bool(self.resolutions) and 1 in self.frames)
            or any(int(shape.split("x")[0]) == 1 for shape in self.table)
        )


def _is_off(value: object) -> bool:
    """Whether an entry of Open-Sora's table, [probability, batch size], takes no clip."""
    probability = value[0] if isinstance(value, list | tuple) and value else value
    keep = probability[0] if isinstance(probability, list | tuple) and probability else probability
    return keep == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch size of a bucket of S = text + video tokens: max(1, min(M_mem / S, M_comp / S^p)), rounded down."""

    PLACE: ClassVar[str] = "data.batch"  # the same

    memory_tokens: float = 32768  # M_mem: tokens that fit the device at once
    compute: float = 0.0  # M_comp: S^p units an item may cost; 0: no limit by compute
    exponent: float = 1.6  # p: 1 is all linear layers, 2 all attention
    # With a profile, the planner sizes batches for this many seconds instead of `compute`. With `auto`, M_comp comes
    # from it; 0 there: what one clip of the longest bucket takes by the costs known whenever sizes are set or, where
    # launches take longer than that, doublings of it until they do not, as far as was measured.
    target_s: float = 0.0
    # M_mem from the memory model, M_comp and p from a fit to the profile: found once, when the run begins, and kept in
    # its config.yaml. `data: {batch: auto}` is short for it.
    auto: bool = False
    # Sizes follow what a run measures: when the best size of a bucket has moved by more than `recalibrate_change`, all
    # are set anew between two steps, every `recalibrate_steps` at most. suggest: an event says so, and nothing changes.
    recalibrate: Literal["off", "suggest", "on"] = "off"
    recalibrate_steps: int = 500  # steps from one look to the next
    recalibrate_change: float = 0.15  # a share of the size, 0.15 is 15 %
    max_batch: int = 0  # 0: no further cap
    text_tokens: int = 128  # text tokens of a sample counted in S
    from_table: bool = False  # take the batch sizes of the pasted Open-Sora table instead

    def __post_init__(self) -> None:
        if self.memory_tokens <= 0:
            raise ValueError(f"data.batch.memory_tokens {self.memory_tokens} must be positive.")
        if self.compute < 0 or self.target_s < 0 or self.max_batch < 0 or self.text_tokens < 0:
            raise ValueError("data.batch: compute, target_s, max_batch and text_tokens must not be negative.")
        # more than 2^24 tokens at once fit no device, and a batch is planned sample by sample
        check_numbers(
            "data.batch",
            self,
            memory_tokens=above(0, 1e12),
            compute=between(0, 1e24),
            target_s=between(0, 1e12),
            max_batch=between(0),
            text_tokens=between(0, 1 << 20),
        )
        check_numbers("data.batch", self, recalibrate_steps=between(1, 1 << 31), recalibrate_change=between(0, 100))
        if self.recalibrate != "off" and not (self.auto or self.target_s):
            raise ValueError(
                f"data.batch.recalibrate is {self.recalibrate!r}, and nothing says how long a batch should take. Set "
                f"data.batch.target_s to its seconds, or data.batch.auto to true."
            )
        if (self.auto or self.recalibrate != "off") and self.from_table:
            raise ValueError(
                "data.batch.from_table takes the sizes of the pasted table, and auto or recalibrate others. Keep one."
            )
        if not 1.0 <= self.exponent <= 3.0:
            raise ValueError(f"data.batch.exponent {self.exponent} is outside 1..3 (1 linear, 2 all attention).")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentConfig:
    """A stage of a curriculum, valid for steps before `until_step`. What is left empty is taken from the run."""

    until_step: int  # 0 in the last segment: without end
    buckets: BucketsConfig | None = None
    batch: BatchConfig | None = None
    weights: tuple[float, ...] = ()  # one per source; 0 switches a source off
    items_per_step: int = 0  # 0: as the run

    def __post_init__(self) -> None:
        check_numbers(
            "data.segments", self, until_step=between(0), items_per_step=between(0, 100_000), weights=between(0, 1)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Latents and text embeddings kept by content, shared between runs."""

    path: str = ""  # folder; empty: no cache
    latents: bool = True  # needs data.start_frame: fixed or a number, otherwise every epoch asks for other latents
    text: bool = True  # embeddings of captions
    # What the cache keeps (latents, text) comes from it alone: no worker loads an encoder for it, and a run whose cache
    # lacks an entry does not start. `heddle data cache` fills it beforehand.
    only: bool = False
    min_free_gib: float = 1.0  # stop writing below this much free space

    def __post_init__(self) -> None:
        if "://" in self.path:
            raise ValueError(
                f"data.cache.path {self.path!r} is a URI; a cache is a local or shared folder. Give its path."
            )
        if self.only and not self.path:
            raise ValueError(
                "data.cache.only is true, and data.cache.path is empty: there is no cache to train from. Give a folder."
            )
        if self.only and not (self.latents or self.text):
            raise ValueError(
                "data.cache.only is true, and latents and text of data.cache are both false: the cache keeps nothing. "
                "Set one of them to true."
            )
        check_numbers("data.cache", self, min_free_gib=between(0, 1e9))


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """What a file may ask for before it is refused as a bomb or as broken."""

    max_pixels: int = 4096 * 4096  # of one frame, checked in the header and again by the decoder
    max_frames: int = 100_000  # of one video
    max_member_bytes: int = 8 << 30  # of one file of a tar
    max_caption_bytes: int = 1 << 20  # of the caption of one clip
    max_json_bytes: int = 16 << 20  # of the JSON beside one clip
    max_moov_bytes: int = 64 << 20  # of the header of one MP4
    max_bad_fraction: float = 0.01  # of samples, after the first `bad_after`; more end the run
    bad_after: int = 200  # samples
    max_bad_shards: int = 0  # unreadable or cut shards
    # Of a read that failed, over new connections. Then the run waits for a storage that does not answer, and ends where
    # that refuses, or a file has been cut.
    retries: int = 4

    def __post_init__(self) -> None:
        check_numbers(
            "data.limits",
            self,
            max_pixels=between(1, 1 << 40),
            max_frames=between(1),
            max_member_bytes=between(1, 1 << 50),
            max_caption_bytes=between(1, 1 << 40),
            max_json_bytes=between(1, 1 << 40),
            max_moov_bytes=between(1, 1 << 40),
            bad_after=between(0),
            max_bad_shards=between(0),
            retries=between(0, 1000),
        )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"data.limits.max_bad_fraction {self.max_bad_fraction} must lie in [0, 1].")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How clips are read and decoded."""

    kind: Literal["ray", "pool"] = "ray"  # pool: processes of this machine, without Ray
    decoder: str = "data.decode:decode_clip"  # module:function (clip, job) -> uint8 [T, H, W, 3]; raises BadSample
    # Microbatches decoded at the same time. auto: as many as the CPUs that workers leave, of a node at most 16, and one
    # for each 4 GiB of its memory.
    decode_workers: int | Literal["auto"] = "auto"
    decode_cpus: float = 1.0  # CPUs Ray reserves for each; a fraction shares a core with the workers
    lookahead: int = 2  # steps decoded ahead of the one that trains
    # Bound on decoded pixels that wait to be asked for; at least one microbatch does. auto: a quarter of the smallest
    # object store of a node, at most 16384.
    object_store_mb: int | Literal["auto"] = "auto"
    window: int = 256  # microbatches per Ray Data execution; the next one starts ahead
    stall_s: float = 120.0  # no microbatch for this long: an alarm that names the awaited one
    silent_s: float = 60.0  # a feeder whose process answers nothing for this long is replaced, half of it: a warning
    clip_timeout_s: float = 120.0  # what decoding may take, for each clip; a microbatch has their sum
    feeders: int = 1  # feeder actors; slot s of a step belongs to feeder s % feeders

    def __post_init__(self) -> None:
        given = {
            name: most
            for name, most in (("decode_workers", between(1, 1 << 16)), ("object_store_mb", between(1)))
            if getattr(self, name) != "auto"
        }
        for name in ("lookahead", "window", "feeders", *given):
            if getattr(self, name) < 1:
                raise ValueError(f"data.engine.{name} {getattr(self, name)} must be at least 1.")
        check_numbers(
            "data.engine",
            self,
            **given,
            lookahead=between(1, 1 << 16),
            window=between(1),
            feeders=between(1, 1 << 10),
            stall_s=above(0, SECONDS),
            silent_s=above(0, SECONDS),
            clip_timeout_s=above(0, SECONDS),
            decode_cpus=between(0, 1 << 16),
        )
        if self.kind == "pool" and self.feeders > 1:
            raise ValueError(
                f"data.engine.feeders is {self.feeders}, and data.engine.kind pool has one, whose processes are "
                f"data.engine.decode_workers. Leave it at 1, or set kind to ray."
            )
        if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*", self.decoder):
            raise ValueError(
                f"data.engine.decoder {self.decoder!r} is not module:function, such as data.decode:decode_clip."
            )
        if self.decode_cpus <= 0:
            raise ValueError(f"data.engine.decode_cpus {self.decode_cpus} must be positive; fractions share a core.")


StartFrame = int | Literal["random", "fixed"]
MOST_STARTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is trained on, in which shapes and amounts. With a seed and the index it fixes every step of the run."""

    sources: tuple[SourceConfig, ...] = ()
    buckets: BucketsConfig = field(default_factory=BucketsConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    items_per_step: int = 4  # bucket batches of a step, whatever the number of workers
    max_wait: int = 0  # draws a sample may wait for its bucket to fill; 0: 10 * largest batch * number of buckets
    mixture: Literal["samples", "tokens"] = "samples"  # what the weights of the sources are shares of
    fps: float = 0.0  # clips are resampled to this frame rate by time stamps; 0 keeps their own
    # Which part of a longer clip is trained. fixed: always the first one. A number, 2 or more: as many parts, from its
    # first frames to its last ones, of which each draw takes one.
    start_frame: StartFrame = "random"
    caption_dropout: float = 0.1  # training_cfg_rate: share of samples trained without their caption
    min_coverage: float = 0.0  # least share of indexed samples that can be trained; with fewer no run starts, code 4
    segments: tuple[SegmentConfig, ...] = ()  # a curriculum; empty: one stage
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.items_per_step < 1:
            raise ValueError(f"data.items_per_step {self.items_per_step} must be at least 1.")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"data.caption_dropout {self.caption_dropout} must lie in [0, 1].")
        if self.max_wait < 0 or self.fps < 0:
            raise ValueError("data.max_wait and data.fps must not be negative.")
        check_numbers(
            "data",
            self,
            items_per_step=between(1, 100_000),
            max_wait=between(0, 1 << 50),
            fps=between(0, 100_000),
            min_coverage=between(0, 1),
        )
        if not isinstance(self.start_frame, str) and not 2 <= self.start_frame <= MOST_STARTS:
            raise ValueError(
                f"data.start_frame {self.start_frame:g} must be a number of parts from 2 to {MOST_STARTS:,}; for the "
                "first part alone say fixed, and for any, random."
            )
        weights = [source.weight for source in self.sources]
        if any(weights):
            check_weights(weights, "data.sources")
        if self.cache.only and self.cache.latents and self.engine.feeders > 1:
            raise ValueError(
                f"data.engine.feeders is {self.engine.feeders}, and further feeders decode pixels, of which a run with "
                f"data.cache.only has none. Set it to 1."
            )
        self._check_segments()

    @property
    def stages(self) -> tuple[SegmentConfig, ...]:
        """The segments; of a run without any, one that takes all from the run."""
        return self.segments or (SegmentConfig(until_step=0),)

    @property
    def tables(self) -> tuple[BucketsConfig, ...]:
        """What the steps of the run are drawn from. `buckets` are not among it where every segment has its own."""
        return tuple(segment.buckets or self.buckets for segment in self.stages)

    @property
    def tables_of_batch(self) -> tuple[BucketsConfig, ...]:
        """The tables of the segments that have the limits of the run; () where each has its own."""
        return tuple(segment.buckets or self.buckets for segment in self.stages if segment.batch is None)

    def _check_segments(self) -> None:
        ends = [segment.until_step for segment in self.segments]
        if ends and (ends[-1] != 0 or any(end <= 0 for end in ends[:-1]) or ends[:-1] != sorted(set(ends[:-1]))):
            raise ValueError(f"data.segments until_step {ends} must rise and end with 0 (the last segment has no end).")
        for segment in self.segments:
            if segment.weights and len(segment.weights) != len(self.sources):
                raise ValueError(
                    f"data.segments weights {segment.weights} must be one per source, of which there are "
                    f"{len(self.sources)}. Use 0 for a source that rests."
                )
            if segment.weights:
                check_weights(list(segment.weights), "data.segments")


def check_weights(weights: list[float], where: str) -> None:
    """Raises ValueError unless the weights are shares that sum to 1."""
    total = sum(weights)
    if any(weight < 0 for weight in weights) or abs(total - 1) > 1e-6:
        remedy = ", ".join(f"{weight / total:.6g}" for weight in weights) if total > 0 else "shares between 0 and 1"
        given = ", ".join(f"{weight:g}" for weight in weights)
        raise ValueError(f"{where} weights {given} sum to {total:g}, not 1. Use {remedy}.")
    if where.endswith(".sources") and not all(weights):
        raise ValueError(f"{where} weights {weights}: some sources have none. Give all a share, or none of them.")
