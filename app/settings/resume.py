"""What a resumed run may change: not what is trained, but how long, how fast, and on which machines.

    changes = check_resume(config, folder)      # raises ConfigError for what would train something else

`KINDS` has the kind of every setting; the longest matching name counts, so a whole section can be of one kind. Imports
neither torch nor Ray: a resume is refused before anything starts and before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from actors.state.checkpoint_files import COMPLETE, CheckpointError, is_complete, meta_of, step_folders
from app.settings.config import RunConfig
from app.settings.run_folder import CONFIG, leaves, run_dir
from data.config import SourceConfig
from ops.counted import counted, first_of
from ops.listing import paths_below
from ops.models.folders import resolve
from ops.typed import ConfigError, as_plain

SettingsTree = Mapping[str, object]  # settings as YAML has them
SettingKind = Literal["function", "weights", "sources", "schedule", "free"]


def _names(text: str) -> list[str]:
    return text.split()


FUNCTION = _names("""
    model.dit model.vae model.text model.image
    data.buckets data.batch data.items_per_step data.max_wait data.mixture data.fps data.start_frame
    data.caption_dropout data.engine.decoder
    train.seed train.loss_weight train.flow train.picture_noise train.optimizer.kind
    train.optimizer.prodigy.d0
""")  # another value would train something else
WEIGHTS = _names("""
    model.dit.path model.dit.lora_from model.vae.path model.text.path train.init_from
""")  # may move, must hold the same
SOURCES = ["data.sources"]  # may move; what they hold is compared with the resume token when they are opened
SCHEDULE = _names("""
    model.dit.gradient_checkpointing model.dit.attention model.dit.compile model.dit.cuda_graphs model.dit.exchange
    model.dit.diffusion_forcing
    model.dit.bag_mode model.dit.temporal_slices model.dit.spatial_slices model.dit.temporal_lead model.dit.spatial_lead
    model.text.place model.vae.tiling model.vae.tile_sample_min model.vae.tile_sample_stride
    model.vae.channels_last model.vae.compile
    data.batch.recalibrate data.batch.recalibrate_steps data.batch.recalibrate_change
    data.segments data.min_coverage data.limits data.engine data.cache
    train.steps train.sync train.sum_ctas train.bag_ctas train.parameter_dtype train.autocast train.tf32
    train.max_skipped_steps
    train.memory
    train.optimizer.learning_rate train.optimizer.betas train.optimizer.adam_eps train.optimizer.weight_decay
    train.optimizer.max_grad_norm train.optimizer.lr_scheduler train.optimizer.lr_warmup_steps
    train.optimizer.lr_decay_steps train.optimizer.lr_min_ratio train.optimizer.ema_decay
    train.optimizer.prodigy
    workers planner snapshot checkpoint
""")  # may change, and the run says so
FREE = ["run", "model.hub", "sample", "validation", "track", "train.init_moments"]
_TABLES: tuple[tuple[list[str], SettingKind], ...] = (
    (FUNCTION, "function"),
    (WEIGHTS, "weights"),
    (SOURCES, "sources"),
    (SCHEDULE, "schedule"),
    (FREE, "free"),
)
KINDS: dict[str, SettingKind] = {name: kind for names, kind in _TABLES for name in names}

FIRST = ("model.dit.lora_from", "train.init_from", "train.init_moments")  # what a run begins with that has no state
MOVABLE = ("path", "kind", "media", "index", "name", "synthetic")  # of a source
RUNTIME = (
    "path",
    "gradient_checkpointing",
    "attention",
    "compile",
    "cuda_graphs",
    "exchange",
    "expert",
    "frame_rate",
    "trained_guidance",
    "causal_temporal_positioning",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_dora",
    "frozen_dtype",
    "train_only",
)  # of model.dit beside a config.json


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs from the run's earlier start."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        of_sources = _source_changes(self.key, self.old, self.new) if self.key in SOURCES else ""
        return of_sources or f"{self.key} {_short(self.old)} -> {_short(self.new)}"


def kind_of(key: str) -> SettingKind:
    """Raises KeyError for a setting that nobody has classified."""
    name = key
    while name not in KINDS:
        if "." not in name:
            raise KeyError(key)
        name = name.rpartition(".")[0]
    return KINDS[name]


def check_resume(config: RunConfig, folder: Path | None = None, *, checkpoint: Path | None = None) -> list[Change]:
    """What changed since the run's last start, but for free settings. Raises ConfigError for another training than that
    of the `checkpoint` that is continued, by default the newest state."""
    folder = folder or run_dir(config)
    saved, where, checkpoint = _trained(folder, checkpoint)
    if saved is None:
        return []
    now: SettingsTree = as_plain(config)
    begins = checkpoint is None  # with what these files hold, unless its state lives in keepers
    refused = [change for change in differences(saved, now) if is_refused(change, saved, now, begins=begins)]
    if refused:
        raise ConfigError(
            f"--resume would train something else than {where}: {', '.join(map(str, refused))}. Restore "
            f"{'it' if len(refused) == 1 else 'them'}{_by_its_own(folder)}, or start anew with another run.name or "
            f"--overwrite.{_why_begins(refused, begins)}{_ways_on(refused, saved, checkpoint)}"
        )
    last = _yaml(folder / "config.yaml") or saved
    return [change for change in differences(last, now) if kind_of(change.key) != "free"]


def _by_its_own(folder: Path) -> str:
    """How a run goes on whose run file or preset has changed since."""
    own = folder / CONFIG
    return f", resume by the run's own settings (--config {own} --resume)" if own.is_file() else ""


def _why_begins(refused: Sequence[Change], begins: bool) -> str:
    """A sentence on why what the run begins with may not be another; "" where that is not refused."""
    if not begins or all(change.key not in FIRST for change in refused):
        return ""
    return " The run has no checkpoint, so that it would begin with other weights than its first steps."


def _ways_on(refused: Sequence[Change], saved: SettingsTree, checkpoint: Path | None) -> str:
    """A sentence on how these settings may be other ones while what the run has learned stays; "" where none can."""
    if checkpoint is None:
        return ""
    ways, parts = [], [_of_segment(change) for change in refused]
    if all(parts):
        entry = "the last entry" if _value(saved, "data", "segments") else "an entry"
        new = ", ".join(dict.fromkeys(part for part in parts if part))
        ways.append(
            f"restore {'it' if len(refused) == 1 else 'them'} and let data.segments change what comes: {entry} with "
            f"until_step: {_step(checkpoint) + 1}, and one more, {{until_step: 0, {new}}}"
        )
    if not any(change.key.startswith("model.dit.") for change in refused):  # another transformer
        ways.append(f"begin another run.name with --set train.init_from={checkpoint}")
    return f" To go on with what it has learned, {'; or '.join(ways)}." if ways else ""


def _of_segment(change: Change) -> str:
    """What an entry of `data.segments` says for a changed setting; "" where none can."""
    for section in ("data.buckets", "data.batch"):
        if change.key.startswith(f"{section}."):
            return f"{section.removeprefix('data.')}: {{...}}"
    if change.key == "data.items_per_step":
        return f"items_per_step: {change.new}"
    if change.key == "data.sources" and _without_weights(change.old) == _without_weights(change.new):
        return "weights: [...]"
    return ""


def _without_weights(sources: object) -> list[SettingsTree]:
    return [{name: value for name, value in one.items() if name != "weight"} for one in _without_places(sources)]


def differences(old: SettingsTree, new: SettingsTree) -> list[Change]:
    """Settings whose values differ. A setting that the older file lacks had its default, also one of a source; one that
    no longer exists is ignored."""
    architecture = _value(new, "model", "dit", "architecture")  # whose settings `new` has
    text = f"run: {{name: usual}}\nmodel: {{dit: {{architecture: {architecture}}}}}"
    usual = dict(leaves(as_plain(RunConfig.from_yaml(text))))
    before = {key: _sources(value) if key in SOURCES else value for key, value in leaves(old, known=usual)}
    return [
        Change(key, before.get(key, usual[key]), value)
        for key, value in leaves(new, known=usual)
        if before.get(key, usual[key]) != value
    ]


def is_refused(change: Change, old: SettingsTree, new: SettingsTree, *, begins: bool = False) -> bool:
    """Whether going on with this change would train something else. `begins`: no checkpoint holds a state, so that what
    the run begins with is read again."""
    if change.key == "train.optimizer.ema_decay":  # the state holds an average, or it does not
        return bool(change.old) != bool(change.new)
    if begins and change.key in FIRST:
        return change.key != "train.init_moments" or bool(_value(old, "train", "init_from"))
    if change.key in ("model.dit.lora_from", "train.init_from"):  # in the state; no file is read into that
        return not change.old
    if change.key.startswith("data.batch.") and _limited_nothing(old):
        return False
    if change.key == "model.image":  # a section that may be absent is one value
        return not _same_encoder(change.old, change.new)
    match kind_of(change.key):
        case "function":
            return not _ignored(change, old, new)
        case "weights":
            return not _same_files(change.old, change.new)
        case "sources":
            return _without_places(change.old) != _without_places(change.new)
    return False


def _limited_nothing(tree: SettingsTree) -> bool:
    """Whether `data.batch` is auto and was given no numbers: then every segment had limits of its own."""
    return bool(_value(tree, "data", "batch", "auto")) and not _value(tree, "data", "batch", "compute")


def _ignored(change: Change, old: SettingsTree, new: SettingsTree) -> bool:
    """Whether a setting has no effect: with weights from a folder, before and now, the folder's own config.json
    counts, for what it names."""
    section, _, name = change.key.rpartition(".")
    if section not in ("model.dit", "model.vae", "model.text"):
        return False
    module = section.removeprefix("model.")
    if not all(_value(tree, "model", module, "path") for tree in (old, new)):
        return False
    own = {
        "dit": RUNTIME,
        "vae": ("kind", "dtype"),
        "text": ("kind", "max_length", "pad_to", "unmasked", "cleaned", "empty"),
    }[module]
    return name not in own and (module != "dit" or _same_transformer(name, change.old, new))


def _same_transformer(name: str, value: object, tree: SettingsTree) -> bool:
    """Whether the transformer that its folder describes is the same with this value of the setting. True where the
    folder cannot be read, which the start refuses."""
    model = tree["model"]
    assert isinstance(model, Mapping)
    trees = (model, {**model, "dit": {**model["dit"], name: value}})
    try:
        found = [RunConfig.from_yaml(json.dumps({"run": {"name": "usual"}, "model": one})).model for one in trees]
        now, before = (resolve(one)[0].dit for one in found)
    except (OSError, ValueError):
        return True
    return now == before


def _same_encoder(old: object, new: object) -> bool:
    """Whether an image encoder is the same. With folders, before and now, their files count, and not other settings."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return old == new
    if old.get("path") and new.get("path"):
        return _same_files(old["path"], new["path"])
    return old == new


def _same_files(old: object, new: object) -> bool:
    """Whether a moved folder holds the same: names and sizes of its files, and its JSON. An old folder that is gone
    cannot be compared and counts as moved."""
    if not (isinstance(old, str) and old and isinstance(new, str) and new):
        return old == new
    return not Path(old).is_dir() or _contents(Path(old)) == _contents(Path(new))


def _contents(folder: Path) -> dict[str, bytes | int]:
    files = [path for path in paths_below(folder) if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.suffix == ".json" else path.stat().st_size
        for path in files
    }


def _sources(listed: object) -> object:
    """Sources with the settings that the file which lists them was written without."""
    if not isinstance(listed, list):
        return listed
    usual: SettingsTree = as_plain(SourceConfig(path="usual"))
    return [{**usual, **source} if isinstance(source, Mapping) else source for source in listed]


def _without_places(sources: object) -> list[SettingsTree]:
    listed = [source for source in sources if isinstance(source, Mapping)] if isinstance(sources, list) else []
    return [{name: value for name, value in source.items() if name not in MOVABLE} for source in listed]


def _value(tree: SettingsTree, *names: str) -> object:
    """The value under these names, one below the other; None where there is none."""
    value: object = tree
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _trained(folder: Path, chosen: Path | None = None) -> tuple[SettingsTree | None, str, Path | None]:
    """The settings of the state that a resume would continue, where they are written, and the checkpoint that holds
    it, which may be `chosen`; None if nothing was trained. Raises LaterFormat."""
    found = [chosen] if chosen is not None else step_folders(folder / "checkpoints")
    checkpoints = [marker for marker in (one / COMPLETE for one in reversed(found)) if marker.is_file()]
    for marker in checkpoints:
        with suppress(OSError):  # the start says so where storage does not give it
            is_complete(marker.parent)  # raises where a later version has written it
        try:
            saved = yaml.safe_load(meta_of(marker.parent)["config"])
        except (OSError, CheckpointError, ValueError, KeyError, TypeError, yaml.YAMLError):
            continue  # a damaged checkpoint is not what the run will continue from
        if isinstance(saved, Mapping):
            return saved, f"the checkpoint after {counted(_step(marker.parent) + 1, 'step')}", marker.parent
    metrics = folder / "metrics.jsonl"
    if not checkpoints and not (metrics.is_file() and metrics.stat().st_size):
        return None, "", None
    return _yaml(folder / "config.yaml"), f"{folder / 'config.yaml'} says", None


def _yaml(path: Path) -> SettingsTree | None:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, Mapping) else None


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1


def _source_changes(key: str, old: object, new: object) -> str:
    """What differs between lists of sources: their number, or else some settings, of which those that are more than a
    place come first; "" for what is no such list."""
    listed = [value for value in (_sources(old), _sources(new)) if isinstance(value, list)]
    if len(listed) < 2 or not all(isinstance(one, Mapping) for value in listed for one in value):
        return ""
    before, after = listed
    if len(before) != len(after):
        return f"{key} {counted(len(before), 'source')} -> {len(after)}"
    found = [
        Change(f"{key}.{index}.{name}", one[name], other.get(name))
        for index, (one, other) in enumerate(zip(before, after))
        for name in one
        if one[name] != other.get(name)
    ]
    found.sort(key=lambda change: change.key.rpartition(".")[2] in MOVABLE)
    return first_of([str(change) for change in found], most=3)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value or '""'
    return text if len(text) <= 60 else f"{text[:57]}..."
