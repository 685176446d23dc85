"""`heddle families`: what can be trained, and what each preset of it takes. Counted without memory or weights.

heddle families
heddle families my.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.settings.files import read
from ops.config import OptimizerConfig
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import resolve
from ops.models.load import num_trained
from ops.shards import bytes_per_weight
from ops.typed import ConfigError, Node, build
from ops.units import GIB

PRESETS = Path(__file__).parent.parent.parent / "configs" / "models"
HEAD = ("model", "family", "layers", "heads", "width", "weights", "bfloat16", "state", "degrees")


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetSize:
    """A model of a config file. `weights` are those of the transformer, `trained` those of them that the config trains,
    or its factors."""

    name: str
    dit: DiTConfig
    weights: int
    trained: int

    @property
    def degrees(self) -> str:
        """Sizes of bags that are planned where a config names none."""
        return " ".join(map(str, self.dit.degrees(self.dit.num_heads))) if self.dit.deals_heads else "any"

    def cells(self) -> tuple[str, ...]:
        """One line of the table, in the order of `HEAD`."""
        state = self.trained * bytes_per_weight(OptimizerConfig())
        return (
            self.name,
            self.dit.architecture,
            "+".join(map(str, self.dit.block_counts)),
            str(self.dit.num_heads),
            str(self.dit.dim),
            f"{self.weights / 1e9:.2f} B" if self.weights >= 1e8 else f"{self.weights / 1e6:.1f} M",
            f"{2 * self.weights / GIB:.1f} GiB",
            f"{state / GIB:.1f} GiB",
            self.degrees,
        )


def print_families(presets: Sequence[Path]) -> None:
    """Body of the command."""
    for name, family in FAMILIES.items():
        whose = f" of {family.own_code.name}" if family.own_code else ""
        vaes = " or ".join(vae.name for vae in (family.vae, *family.own_vaes))
        print(f"{name:10} {family.diffusers_class}{whose}, {vaes}")
    files = list(presets) or sorted(PRESETS.glob("*.yaml"))
    rows = [HEAD, *(size_of(file).cells() for file in files)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("state: fp32 weights, two moments and the average of AdamW, which all workers share")
    print("where to get the folder of each: its file's first lines, or the table in docs/models.md")


def size_of(path: Path) -> PresetSize:
    """What a config file says of its transformer, and its folder, where that is there. Raises ConfigError for a file
    without one."""
    node = read(path)
    section = node.value.get("model") if isinstance(node.value, dict) else None
    if not isinstance(section, Node):
        raise ConfigError(f"{path} has no section model; give a config of a model or of a run.")
    model = build(ModelConfig, section, path="model")
    try:
        dit = resolve(model)[0].dit
    except (OSError, ValueError):  # as the presets' before anything is downloaded
        dit = model.dit
    dit = replace(dit, path=None)
    whole = replace(dit.without_lora(), train_only=())
    weights = num_trained(whole)
    return PresetSize(name=path.stem, dit=dit, weights=weights, trained=weights if dit == whole else num_trained(dit))
