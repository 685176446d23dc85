"""Forms of cost models: what seconds of a (module, shape, degree) grow with.

B samples, S tokens per sample (video + text), k degree. Every form is linear in non-negative coefficients over named
features, so that a fit is one small least-squares problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ops.models.base.tiling import DealtTiles


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCost:
    """What text costs a transformer, in what as many video tokens cost it: as much, where both are one sequence."""

    row: float = 1.0  # of a row's products with weights
    across: float = 2.0  # attention of a video token and a row, over that of a pair of video tokens
    within: float = 1.0  # attention of a pair of rows
    replicated: bool = False  # every member of a bag computes all rows, as it is only keys and values to the video


JOINT = TextCost()


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one cascade computes: the point at which a cost model is evaluated."""

    batch: int
    frames: int
    height: int
    width: int
    text_tokens: int
    tokens: int  # video tokens of one sample
    degree: int
    token_frames: int = 1  # frames of its token grid
    slices: float = 1.0  # of a spatial-temporal layer that a member of a bag runs, mean of the two kinds
    exposed: float = 1.0  # share of its exchanges that no computation hides
    exchanged: float = 1.0  # what a bag sends, over what Ulysses would: more where ranks share heads
    by_ulysses: bool = False  # of a spatial-temporal transformer: a member has positions of all frames in every block
    call_s: float = 0.0  # of an all-to-all of its bag that sends nothing, on one node; 0: not measured
    text: TextCost = JOINT  # of the DiT
    dealt: DealtTiles | None = None  # of a VAE: what the busiest member encodes

    @property
    def length(self) -> int:
        """Logical length of one sample: text plus video (AdaptiveLoad's S)."""
        return self.tokens + self.text_tokens

    @property
    def rows(self) -> float:
        """Rows of one sample that a member of its bag multiplies with weights, counted as video tokens."""
        text = self.text.row * self.text_tokens
        return self.tokens / self.degree + text if self.text.replicated else (self.tokens + text) / self.degree

    @property
    def pairs(self) -> float:
        """Pairs of one sample that attend to each other, by a member of its bag, counted as pairs of video tokens."""
        text = self.text_tokens * (self.text.across * self.tokens + self.text.within * self.text_tokens)
        return (self.tokens * self.tokens + text) / self.degree

    @property
    def sent(self) -> float:
        """Rows that a member of its bag sends to others: V_comm of Arachne's Eq. 9, by Ulysses B S (k - 1) / k^2."""
        return self.batch * self.length * (self.degree - 1) / self.degree**2 * self.exchanged


@dataclass(frozen=True, slots=True)
class CostForm:
    """A family of cost models, linear in its coefficients."""

    names: tuple[str, ...]
    features: Callable[[Load, float], tuple[float, ...]]
    once: tuple[str, ...] = ()  # names that a cascade pays once, however many shapes it packs: launches that they share


def _arachne(load: Load, exponent: float) -> tuple[float, ...]:
    """Arachne Eq. 9: (alpha1 B S + alpha2 B S^2) / k + V_comm / BW(k), plus a launch constant. V_comm as far
    as no attention hides it."""
    return 1.0, load.batch * load.rows, load.batch * load.pairs, load.sent * load.exposed


def _arachne_calls(load: Load, exponent: float) -> tuple[float, ...]:
    """As `_arachne`, where all-to-alls take time however little they send: the calls of a cascade."""
    return *_arachne(load, exponent), load.call_s


def _spatial_temporal(load: Load, exponent: float) -> tuple[float, ...]:
    """Blocks that attend in turn within a frame, to the text there, and along a position. Every member has all text; an
    exchange moves the activations of a block once, and counts as far as it is exposed: by Ulysses all of it. The member
    with most frames and most positions decides; every slice has its own launches."""
    return _in_turn(load, 0)


def _spatial_temporal_text(load: Load, exponent: float) -> tuple[float, ...]:
    """As `_spatial_temporal`, where blocks of both kinds attend to the text."""
    return _in_turn(load, load.text_tokens)


def _in_turn(load: Load, temporal_text: int) -> tuple[float, ...]:
    frames, degree = load.token_frames, load.degree
    positions = load.tokens / frames
    temporal = load.batch * frames * -(-positions // degree)
    spatial = temporal if load.by_ulysses else load.batch * -(-frames // degree) * positions
    keys = spatial * (positions + load.text_tokens) + temporal * (frames + temporal_text)
    moved = load.batch * load.tokens * (degree - 1) / degree**2
    rows = (spatial + temporal) / 2 + load.batch * load.text.row * load.text_tokens
    return load.slices, rows, keys / 2, moved * load.exposed * load.exchanged


def _knapformer(load: Load, exponent: float) -> tuple[float, ...]:
    """KnapFormer Eq. 2 without a constant: k 24 l d^2 and k gamma 4 l^2 d, per sequence, shared by the bag."""
    return load.batch * load.rows, load.batch * load.pairs


def _adaptiveload(load: Load, exponent: float) -> tuple[float, ...]:
    """AdaptiveLoad: a + b B S^p, shared by the bag."""
    return 1.0, load.batch * load.length**exponent / load.degree


def _tiles(load: Load, exponent: float) -> tuple[float, ...]:
    """Arachne's VAE: tiles dealt round-robin, the busiest worker decides; linear in tile volume, and in tiles, each of
    which has its launches: of pictures they are most of it."""
    assert load.dealt is not None, "a load of a VAE has its tiles"
    return 1.0, float(load.dealt.pixels), float(load.dealt.count)


def _pixels(load: Load, exponent: float) -> tuple[float, ...]:
    return 1.0, load.batch * load.frames * load.height * load.width / load.degree, load.batch / load.degree


def _captions(load: Load, exponent: float) -> tuple[float, ...]:
    """Captions are dealt whole: the member with most of them decides."""
    return 1.0, float(-(-load.batch // load.degree) * max(load.text_tokens, 1))


FORMS = {
    "arachne": CostForm(("constant", "alpha1", "alpha2", "comm"), _arachne, ("constant",)),
    "arachne_calls": CostForm(("constant", "alpha1", "alpha2", "comm", "calls"), _arachne_calls, ("constant", "calls")),
    # clips of one grid go through these layers together, those of another after them, with launches of their own
    "spatial_temporal": CostForm(("constant", "linear", "attention", "comm"), _spatial_temporal),
    "spatial_temporal_text": CostForm(("constant", "linear", "attention", "comm"), _spatial_temporal_text),
    "knapformer": CostForm(("linear", "quadratic"), _knapformer),
    "adaptiveload": CostForm(("a", "b"), _adaptiveload, ("a",)),
    "tiles": CostForm(("constant", "volume", "tile"), _tiles),
    "pixels": CostForm(("constant", "pixel", "sample"), _pixels),
    "captions": CostForm(("constant", "token"), _captions, ("constant",)),
}
FORMS_OF = {
    "dit": ("arachne", "arachne_calls", "adaptiveload", "knapformer"),
    "vae": ("tiles", "pixels"),
    "text": ("captions",),
}
