"""What the rest of Heddle must know of a model family; one `Family` per folder of `ops/models/`.

Loading, export, LoRA, sampling, parity and the notes before a run iterate over `ops.models.families.FAMILIES` and name
no family themselves. What all families have in common is no field: the first one that differs makes it one, with the
old behaviour as its default.

Imports neither torch nor Ray; the callables that need them import them when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Never

from ops.config import TokenShift
from ops.flow.schedulers import Scheduler
from ops.models.base.config import DiTConfig
from ops.packed.conditions import NOTHING, Conditions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ops.config import FlowConfig
    from ops.models.base.vae import DiffusersVAE

EmptyText = Literal["encoded", "none"]
Cleaning = bool | Literal["lower"]
"""What is done to a caption before its tokenizer (`ops.models.text.prepared`)."""
Json = Mapping[str, Any]  # fields of a JSON file of Diffusers, whose types are its business


def config_normalisation(fields: Json, channels: int, module: object) -> tuple[list[float], list[float]]:
    """The normalisation that config.json alone gives: latents_mean and latents_std, or scaling_factor and
    shift_factor."""
    del module
    mean, std = fields.get("latents_mean"), fields.get("latents_std")
    if mean is not None and std is not None:
        return list(mean), list(std)
    return [fields.get("shift_factor") or 0.0] * channels, [1.0 / float(fields["scaling_factor"])] * channels


@dataclass(frozen=True, kw_only=True, slots=True)
class VAEClass:
    """An autoencoder of Diffusers, or of code of our own. `numbers` reads its config.json: (latent channels, strides
    over t, h, w).

    `normalisation` says what takes its latents to what the transformer was trained on: (mean, standard deviation) of
    each channel. It sees the fields of config.json, the number of channels, and the loaded module, whose buffers hold
    them in some classes.
    """

    name: str
    numbers: Callable[[Json], tuple[int, tuple[int, int, int]]]
    normalisation: Callable[[Json, int, Any], tuple[Any, Any]] = config_normalisation  # lists, or tensors of the module
    can_be_tiled: bool = True  # by the cuts of ops/models/base/vae.py
    of_pictures: bool = False  # its class takes [B, C, H, W]
    masks_clip: bool = False  # its attention has a mask of all pairs of a clip's positions
    # the first part of its encoder, if it sees pixels in fp32 also where weights have 16 bits: its frequencies are so
    # high that a pixel rounded to bf16 is another one to them
    sees_fp32: str = ""
    runs: Callable[[], type[DiffusersVAE]] | None = None  # what cuts and blends as it does; None: DiffusersVAE itself
    cuts_patches: bool = False  # tiles of its encoder are of patches, not of pixels
    decodes_in_time: Callable[[Json], bool] = lambda fields: False  # its decoder gets a time, and maybe noise
    segments: tuple[int, int] | None = None  # frames that it encodes at a time, and from one to the next; None: all
    # The class of an autoencoder that Diffusers does not have, made from config.json (`ops.models.chunked.ChunkCodec`),
    # and how many frames it codes at a time, each for themselves
    own: Callable[[], Callable[[Json], nn.Module]] | None = None
    chunk: Callable[[Json], int] = lambda fields: 0  # 0: all of a clip


def _picture_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride = 2 ** (len(fields.get("block_out_channels", (64,))) - 1)
    return fields.get("latent_channels", 4), (1, stride, stride)


def _picture_vae() -> type[DiffusersVAE]:
    from ops.models.base.picture_vae import PictureVAE

    return PictureVAE


PICTURE_VAE = VAEClass(
    name="AutoencoderKL", numbers=_picture_numbers, can_be_tiled=False, of_pictures=True, runs=_picture_vae
)
"""Stable Diffusion's, of pictures: every frame by itself."""


def _hunyuan_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_s = fields.get("spatial_compression_ratio", 8)
    return fields.get("latent_channels", 16), (fields.get("temporal_compression_ratio", 4), stride_s, stride_s)


def _hunyuan_vae() -> type[DiffusersVAE]:
    from ops.models.base.hunyuan_vae import HunyuanVAE

    return HunyuanVAE


HUNYUAN_VAE = VAEClass(
    name="AutoencoderKLHunyuanVideo",
    numbers=_hunyuan_numbers,
    segments=(16, 12),
    runs=_hunyuan_vae,
    masks_clip=True,
)
"""HunyuanVideo's and Kandinsky 5.0's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraNames:
    """Which linear layers get factors: those below `blocks` (prefixes) whose name ends with one of `projections`."""

    blocks: tuple[str, ...]
    projections: tuple[str, ...]
    # our name of a layer, `*` for the number of its block -> the one in the original code, by which ComfyUI and kohya's
    # trainers name factors. Several with one name there are one layer, with their rows in this order; layers that are
    # not here have one name. None: files with such names are neither read nor written
    original: Mapping[str, str] | None = None
    swapped: tuple[str, ...] = ()  # of these original layers, the halves of the rows are the other way round
    # the same to further names that are read, of trainers that cut layers as we do; one layer each, also of those
    # below `blocks` that get no factors here
    read_too: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def even_sigmas(config: DiTConfig, flow: FlowConfig) -> Scheduler:
    """The scheduler of a pipeline that passes even sigmas, and the shift of the clip's tokens to a dynamic
    FlowMatchEuler."""
    del config
    line = flow.token_shift
    if line is None or line.law != "line":
        return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings={"shift": flow.flow_shift})
    settings = {
        "use_dynamic_shifting": True,
        "base_image_seq_len": line.base_tokens,
        "max_image_seq_len": line.max_tokens,
        "base_shift": line.base,
        "max_shift": line.max,
    }
    return Scheduler(name="FlowMatchEulerDiscreteScheduler", settings=settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureRecipe:
    """How a text encoder sees the first frame of a clip: in place of one token of the prompt, before the caption."""

    mark: str  # the prompt's last such token ends what stands between the caption and the answer
    dropped: int  # tokens there, the mark among them, whose states are dropped
    processor: str = "image_processor"  # the folder in a pipeline of what prepares pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRecipe:
    """A SigLIP of its own that sees the first frame of a clip: its rows stand in the text beside those of the caption,
    in a negative prompt's, too."""

    encoder: str = "image_encoder"  # its folder in a pipeline
    processor: str = "feature_extractor"  # that of what prepares pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecipe:
    """How published weights saw a caption: as the states of one encoder, and by a second one, as the pooled vector of
    CLIP or as the states of a ByT5 that reads what the caption quotes (glyphs); or as what connectors make of the
    states of all layers of one encoder.

    Its name in `Family.texts` is a value of model.text.kind.
    """

    # the encoder whose states are the text, as Transformers names its type
    states: Literal["llama", "llava", "t5", "qwen2_5_vl_text", "gemma3_text"]
    second: Literal["clip", "byt5", "connectors"] = "clip"
    states_parts: tuple[str, str] = ("text_encoder", "tokenizer")  # its folders in a pipeline
    second_parts: tuple[str, str] = ("text_encoder_2", "tokenizer_2")  # those of the second encoder
    template: str = "{}"  # of the prompt; {} is the caption
    system: str = ""  # what a chat template makes the prompt of, beside the caption; "": the prompt is of no chat
    blank: str = ""  # what stands for an empty caption
    crop: int = 0  # tokens of the prompt before the caption, whose states are dropped
    skipped_layers: int = 0  # of the states' encoder, its last ones
    final_norm: bool = False  # of that encoder: whether its states are normalised
    cleaned: bool = False  # whether both encoders see the caption cleaned (`ops.models.text.clean`), or as it is
    stripped: bool = False  # or without white space around it
    template_is_set: bool = False  # its pipeline has the template as an attribute, where others take it in a call
    note: str = ""  # what an export says of its pipeline, where Diffusers has another template than the weights saw
    second_tokens: int = 77  # rows that the second encoder sees: CLIP this number always, ByT5 at most
    # every caption is encoded over max_length rows without a mask, and all of them are text to the transformer
    keeps_padding: bool = False
    picture: PictureRecipe | None = None  # of an encoder of captions that sees the first frame, too
    vision: VisionRecipe | None = None  # of one that sees the first frame alone

    @property
    def sees_picture(self) -> bool:
        """Whether a text is made of a caption and the first frame of its clip."""
        return self.picture is not None or self.vision is not None

    @property
    def glyph_rows(self) -> int:
        """Rows of a text, at most, that are of what its caption quotes."""
        return self.second_tokens if self.second == "byt5" else 0

    def prompt(self, caption: str) -> str:
        """What the tokenizer of the states gets."""
        return self.template.format(caption or self.blank)

    @property
    def first_encoders(self) -> tuple[str, ...]:
        """What the encoder in text_encoder/ may be, as Transformers names its type."""
        return (self.states,) if self.states_parts[0] == "text_encoder" else ("clip_text_model", "clip")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFiles:
    """What the JSON files in the folder of a pipeline say; {} where there is none."""

    index: Json = field(default_factory=dict)  # model_index.json
    transformer: Json = field(default_factory=dict)  # its config.json
    vae: Json = field(default_factory=dict)
    scheduler: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """What published weights were trained with beside the numbers in their config.json: with other settings they would
    see what they have never seen. Settings that are not here are as usual (text) or chosen freely (dit, flow)."""

    text: Mapping[str, object]  # of model.text beside the path
    dit: Mapping[str, object] = field(default_factory=dict)  # of model.dit
    flow: Mapping[str, object] = field(default_factory=dict)  # of train.flow
    fps: float | None = None  # of its clips (1/s); None: of pictures, or of several rates, which the weights get


def shift_of(scheduler: Json) -> dict[str, object]:
    """The shift of a published scheduler of flows, as settings of train.flow; without a scheduler none."""
    if not scheduler:
        return {}
    if scheduler.get("use_dynamic_shifting"):
        line = TokenShift(
            base_tokens=scheduler.get("base_image_seq_len", 256),
            max_tokens=scheduler.get("max_image_seq_len", 4096),
            base=scheduler.get("base_shift", 0.5),
            max=scheduler.get("max_shift", 1.15),
        )
        return {"token_shift": line}
    return {"flow_shift": scheduler.get("flow_shift") or scheduler.get("shift") or 1.0, "token_shift": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedUse:
    """How a published pipeline is used, where its weights do not say it themselves."""

    clips: Mapping[str, object]  # size, length, steps, guidance and frame rate: settings of `sample`
    dit: Mapping[str, object] = field(default_factory=dict)  # settings of model.dit that tell its variant
    first_frame: bool = False  # text to video that also takes a first frame


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedParts:
    """The frozen parts of a family's published pipelines, as fields of their config.json (`encoders.py` has usual
    ones)."""

    text: Mapping[str, Json]  # folder of the pipeline -> the encoder in it
    # of a config of this family: where it is not its class's default
    vae: Callable[[DiTConfig], Json] = lambda config: {}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCode:
    """A transformer that Diffusers has no class for: config.json names its class (`name`) in `architectures`, its
    weights lie in `stem`.safetensors, and an export holds it and its encoders but no pipeline."""

    name: str
    stem: str = "model"
    # (config of the family) -> what its files hold among the weights though it follows from the settings: written, and
    # passed over when read (`Family.surplus`)
    constants: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}


def masked_first_frame(latent: Tensor, stride_t: int, last: bool) -> Tensor:
    """A `Family.first_frame`: [C, t, h, w] of the first frame, then zeros -> [C + 1, t, h, w]: a mask, 1 where a
    latent frame is given, after it."""
    del stride_t, last
    joined = latent.new_zeros(len(latent) + 1, *latent.shape[1:])
    joined[:-1] = latent
    joined[-1, 0] = 1
    return joined


def no_class(*_: object) -> Never:
    """Stands for what only a family with a class in Diffusers has."""
    raise AssertionError("Diffusers has no class of this family; ask `Family.own_code` first.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParitySample:
    """One sample as a Diffusers class wants it: latent [C, t, h, w], timestep [1] (sigma * 1000), text [L, E]."""

    latent: Tensor
    timestep: Tensor
    text: Tensor
    conditions: Conditions = NOTHING
    clean_frames: int = 0  # of the token grid, at time 0 or `conditions.first_times`; for families with `frame_times`


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`key_map`, `class_defaults`, `fixed_fields`, `read_rest` and `write_rest` together translate between config.json
    and `config`."""

    config: type[DiTConfig]  # its `architecture` is the family's name and that of its folder
    # module(tokens, timesteps, text, layout, group, conditions) -> velocity tokens
    model: Callable[[], type[nn.Module]]

    diffusers_class: str  # of the transformer, whose parameter names are ours; with `own_code` the class there
    own_code: OwnCode | None = None  # None: it is a class of Diffusers
    # the same in the repositories of its authors, as a config.json there names it; "": none does
    authors_class: str = ""
    pipeline_class: Callable[[Any], str] = no_class  # of a config of this family
    needs_vae: bool = False  # that pipeline cannot be made without an autoencoder, also where none is used
    has_guider: bool = False  # its pipeline takes the scale of guidance from a part of its own, guider/
    vae: VAEClass  # that its own pipeline has in Diffusers
    own_vaes: tuple[VAEClass, ...] = ()  # others, which Diffusers does not have
    texts: Mapping[str, TextRecipe] = field(default_factory=dict)  # by values of model.text.kind beside t5
    missing_parts: tuple[str, ...] = ()  # components of the pipeline that a run with T5 does not train with
    missing_note: str = ""  # what a user must know of them
    unused_parts: tuple[str, ...] = ()  # components of the pipeline that no run computes with; exports link them
    # of diffusers.loaders.single_file_utils, for files in the names of the original code; "": none is offered
    converter: str = ""
    # beginnings of names that it leaves -> those in Diffusers
    converted: Mapping[str, str] = field(default_factory=dict)
    surplus: tuple[str, ...] = ()  # parts of names of weights that published folders hold and nothing reads
    # parts of names of weights that its class in Diffusers has and no pass of ours computes with: they are not loaded,
    # and an export holds those of the folder that was trained from, or zeros
    kept: tuple[str, ...] = ()
    # (latent [C, t, h, w] of a clip's first frame followed by grey, or of that frame alone followed by zeros, the VAE's
    # stride over time, whether the last frame is there, too) -> the channels of `config.fitted` after the noisy ones,
    # [Q, t, h, w]
    first_frame: Callable[[Tensor, int, bool], Tensor] | None = None
    hint_share: float = 0.0  # of the first frame in the noise that sampling begins with

    key_map: Mapping[str, str]  # field of `config` -> key of config.json
    class_defaults: Json = field(default_factory=dict)  # of these and further keys, where the class has a default
    fixed_fields: Json  # what our blocks compute; a folder that says otherwise would load and then be wrong
    read_rest: Callable[[Json, Json], dict[str, object]]  # (config.json, fields known so far) -> further fields
    # `Any` is the settings of this very family, which no common parameter type can be.
    write_rest: Callable[[Any], dict[str, object]]  # config -> further keys of config.json

    # attention heads by the names that profiles of published models have, which need not say them
    published_heads: Mapping[str, int] = field(default_factory=dict)

    lora_names: LoraNames
    # that makes a run's samples: of a config of this family (hence `Any`), and of the flow that was trained
    scheduler: Callable[[Any, FlowConfig], Scheduler] = no_class
    shifts_by_tokens: bool = False  # its scheduler takes train.flow.token_shift
    whole_times: bool = False  # sampling as SamplerConfig.whole_times
    passes_sigmas: bool = True  # False: its pipeline leaves them to the scheduler
    # classes of Diffusers by which a published pipeline of it can be sampled, whatever their settings
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    # (config of this family, sample) -> what the Diffusers class takes
    parity_inputs: Callable[[Any, ParitySample], Mapping[str, object]] = no_class
    # within this the class computes in the dtype of its inputs, where it rounds on its way
    parity_mode: Callable[[], AbstractContextManager[object]] = nullcontext
    # what that class gives back, without its batch -> [C_out, t, h, w]
    parity_output: Callable[[Tensor, ParitySample], Tensor] = lambda output, sample: output
    parity_text: Callable[[Any], int] = lambda config: 7  # text rows that the Diffusers class is compared with
    # frames of tokens that the Diffusers class takes, where it takes one number of them
    parity_frames: Callable[[Any], int | None] = lambda config: None

    parts: PublishedParts
    # (model_index.json, config.json of the transformer) of a published pipeline
    published: Callable[[Json, Json], PublishedUse]
    # Raises ValueError for a scheduler of another training than is computed
    recipe: Callable[[PipelineFiles], TrainingRecipe]

    notes: Callable[[str], list[str]] = lambda path: []  # (model.dit.path): what else is to be known of its weights
    # (train.flow, model.text.empty) -> further entries of model_index.json
    index: Callable[[FlowConfig, EmptyText], dict[str, object]] = lambda flow, empty: {}
    # settings of model_index.json that an export has from the folder that was trained from, where `index` says nothing
    kept_in_index: tuple[str, ...] = ()
    # (config of this family, model.text.pad_to) -> how a pipeline is to be called
    export_notes: Callable[[Any, int], list[str]] = lambda config, pad_to: []

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Parts of names of weights in published folders that are not loaded."""
        return (*self.surplus, *self.kept)

    @property
    def text_types(self) -> tuple[str, ...]:
        """What the encoder of the states may be in published pipelines, as Transformers names its type."""
        if self.texts:
            return tuple(dict.fromkeys(recipe.states for recipe in self.texts.values()))
        return tuple(str(fields["model_type"]) for fields in self.parts.text.values())

    def settings(self, **values: object) -> DiTConfig:
        """The settings of a transformer of this family, with its defaults where none are given."""
        return self.config(**values)  # type: ignore[arg-type]  # each family has its own default of `architecture`
