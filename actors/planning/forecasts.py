"""What a model's workers need of memory, by its config alone (`ops.models.forecast`).

For `heddle plan`, `--dry-run` and the first plans of a run, until its workers have measured more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.config import CheckpointConfig, TrainConfig
from actors.plan.costs.needs import SOLO, ClipBatches, NeedKey, NeedLine, Needs, clip_kind, line_through
from actors.plan.spared import NOTHING_SPARED, Spared
from actors.planning.demand import largest_upload
from actors.planning.memory import MemoryForecast
from actors.planning.predicted_needs import graphs_gib, predict_dit, vae_needs, with_attention_kept
from ops.geometry import Geometry, PixelShape
from ops.models.base.tiles import clips_at_once
from ops.models.config import ModelConfig
from ops.shards import bytes_per_weight
from ops.units import GIB
from ops.upload_room import uploads_gib


def sizes_of(model: ModelConfig, train: TrainConfig, cuda: bool) -> MemoryForecast:
    """What is known of a resolved model by counting its weights: no encoder, no need of a cascade."""
    import torch

    from ops.models.float8 import spared_bytes
    from ops.models.frozen_blocks import bytes_of_blocks
    from ops.models.load import dit_skeleton

    skeleton, parameter_bytes = dit_skeleton(model.dit), getattr(torch, train.parameter_dtype).itemsize
    weights = [(p.numel(), p.requires_grad) for p in skeleton.parameters()]
    frozen = model.dit.freezes_blocks
    blocks = bytes_of_blocks(skeleton, parameter_bytes, frozen) if model.dit.fetchable else []
    trained = sum(count for count, wanted in weights if wanted)
    return MemoryForecast(
        parameters=sum(count for count, _ in weights),
        trained=trained,
        parameter_bytes=parameter_bytes,
        spared_bytes=spared_bytes(skeleton, parameter_bytes),
        state_bytes=bytes_per_weight(train.optimizer),
        deepspeed=train.sync == "deepspeed",
        cuda=cuda,
        places=train.places(trained, "cuda" if cuda else "cpu")[0],
        vae_dtype=model.vae.dtype_on("cuda" if cuda else "cpu"),
        in_blocks=sum(blocks),
        largest_block=max(blocks, default=0),
        largest_parameter=max((count for count, wanted in weights if wanted), default=0),
        frozen_blocks=frozen,
    )


def host_weights_gib(model: ModelConfig, train: TrainConfig) -> float:
    """GiB of each node's host memory that weights of a resolved model take with `train.memory.parameters: node`."""
    sizes = sizes_of(model, train, cuda=True)
    return replace(sizes, places=replace(sizes.places, parameters="node")).host_weights_gib


def lora_files_gib(checkpoint: CheckpointConfig, model: ModelConfig) -> float:
    """GiB of host memory that the task takes which writes the LoRA files of checkpoints of a resolved model, on the
    node of the controller, which may be any; 0 where there is none."""
    if checkpoint.lora_files == "off" or not model.dit.lora_rank:
        return 0.0
    from ops.models.lora_files import writing_bytes

    return writing_bytes(model.dit.experts) / GIB


def forecast(
    model: ModelConfig,
    geometry: Geometry,
    train: TrainConfig,
    clips: Sequence[PixelShape],
    degrees: Sequence[int],
    cuda: bool,
    spared: Spared = NOTHING_SPARED,
) -> MemoryForecast:
    """What a resolved model needs, in the first of the places that the settings allow (`possible`). `clips` are the
    shapes that will come, `degrees` those that the DiT may have. What a cache spares is not counted.

    Takes seconds of one core and no memory to speak of, whatever the size of the model.
    """
    return Forecasts(geometry, clips, cuda, spared).of(model, train, degrees)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoders:
    """A model's frozen parts: what their cascades need, and their weights."""

    predicted: dict[NeedKey, NeedLine]
    batches: dict[str, ClipBatches]
    vae_gib: float
    text_gib: float
    image_gib: float
    host_gib: float  # of a node's memory, for all of its GPUs


class Forecasts:
    """Forecasts of models that differ in some settings: what they have in common is predicted once."""

    def __init__(self, geometry: Geometry, clips: Sequence[PixelShape], cuda: bool, spared: Spared) -> None:
        self._geometry, self._clips, self._cuda, self._spared = geometry, tuple(clips), cuda, spared
        self._dit: dict[object, Needs] = {}
        self._encoders: dict[object, _Encoders] = {}

    def of(self, model: ModelConfig, train: TrainConfig, degrees: Sequence[int]) -> MemoryForecast:
        """As `forecast`."""
        import torch

        from ops.models.first_frame import FirstFrame
        from ops.models.forecast import Precision

        dtype = getattr(torch, train.parameter_dtype)
        precision = Precision(parameters=dtype, autocast=train.autocast == "bfloat16", cuda=self._cuda)
        by_frame = train.flow.by_frame
        key = model.dit, model.text, model.image, tuple(degrees), precision, by_frame
        if key not in self._dit:
            self._dit[key] = Needs()
            predict_dit(self._dit[key], model, self._geometry, self._clips, degrees, precision, by_frame)
        frozen = model.vae, model.text, model.image, FirstFrame.of(model)
        if frozen not in self._encoders:
            self._encoders[frozen] = self._of_encoders(model)
        dit, encoders = self._dit[key], self._encoders[frozen]
        if train.memory.attention == "kept" and model.dit.gradient_checkpointing:
            dit = with_attention_kept(dit, model.dit.kept_bytes(2 if precision.autocast else dtype.itemsize))
        sizes = sizes_of(model, train, self._cuda)
        uploads = self._cuda and "vae" not in self._spared.cascades
        graphs = self._cuda and model.dit.cuda_graphs and model.dit.compiles and 1 in degrees
        return replace(
            sizes,
            graphs_gib=graphs_gib(model, self._geometry, self._clips, sizes, precision, by_frame) if graphs else 0.0,
            vae_gib=encoders.vae_gib,
            text_gib=encoders.text_gib,
            image_gib=encoders.image_gib,
            host_encoders_gib=encoders.host_gib,
            host_uploads_gib=uploads_gib(largest_upload(self._clips)) if uploads else 0.0,
            needs=Needs(
                predicted={**dit.predicted, **encoders.predicted},
                text_rows=dict(dit.text_rows),
                copied=dit.copied,
                num_heads=dit.num_heads,
                batches=dict(encoders.batches),
            ),
        )

    def _of_encoders(self, model: ModelConfig) -> _Encoders:
        """What is needed of them: nothing of those that the run never loads, no cascade of those whose results it
        takes from a cache."""
        spared, predicted, batches = self._spared, dict[NeedKey, NeedLine](), dict[str, ClipBatches]()
        vae_gib = image_gib = text_gib = host_gib = 0.0
        if "vae" not in spared.encoders:
            vae_gib, image_gib = self._of_vae(model, predicted, batches)
        if "text" not in spared.encoders:
            text_gib, host_gib = self._of_text(model, predicted)
        return _Encoders(
            predicted={key: line for key, line in predicted.items() if key[0] not in spared.cascades},
            batches=batches,
            vae_gib=vae_gib,
            text_gib=text_gib,
            image_gib=image_gib,
            host_gib=host_gib if self._cuda else 0.0,
        )

    def _of_vae(
        self, model: ModelConfig, predicted: dict[NeedKey, NeedLine], batches: dict[str, ClipBatches]
    ) -> tuple[float, float]:
        """GiB of the weights of VAE and image encoder; what their cascades need goes into the other two."""
        from ops.models.forecast import image_need

        vae_gib = 0.0
        image = image_need(model.image, 1) if model.image is not None else None
        picture = image.peak_gib if image is not None else 0.0  # a VAE cascade encodes each clip's first frame, too
        for shape, found in vae_needs(model, self._clips, "cuda" if self._cuda else "cpu").items():
            vae_gib, kind, peak = found.weights_gib, clip_kind(shape), found.peak_gib + picture
            predicted["vae", kind] = NeedLine(fixed_gib=0.0, gib_per_unit=peak)
            batches[kind] = ClipBatches(clips_at_once(*shape), found.left_gib / peak)
        return vae_gib, image.weights_gib if image is not None else 0.0

    def _of_text(self, model: ModelConfig, predicted: dict[NeedKey, NeedLine]) -> tuple[float, float]:
        """GiB of the text encoder on a device, and on the host; what its cascades need goes into the other."""
        import torch

        from ops.models.forecast import text_need

        longest = model.text.most_tokens
        encoder = getattr(torch, model.text.dtype_on("cuda" if self._cuda else "cpu"))
        few, more = (text_need(model.text, count, longest, encoder) for count in (1, 4))
        predicted["text", SOLO] = line_through((longest, 4.0 * longest), (few.peak_gib, more.peak_gib))
        return few.weights_gib, few.host_gib
