"""Settings that every family of transformers has. Each family adds its own: `ops/models/<family>/config.py`.

Imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

from ops.attention.table import AttentionSetting
from ops.config import Diffusion, Spacing
from ops.degrees import SequenceSetting, default_degrees
from ops.models.base.flops import ALL_TRAINED, ForwardFlops, TrainedPart
from ops.ranges import above, between, check_numbers
from ops.spatial_temporal.slicing import Slicing

CudaGraphsSetting = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig:
    """The diffusion transformer. With `path`, everything but the runtime switches is read from its config.json.

    A base: a model is described by the subclass of its family, whose default of `architecture` is the family's name.
    """

    architecture: str  # the family
    path: str | None = None  # a Diffusers folder (the pipeline's, or its transformer/)
    num_layers: int = 4  # this and the sizes below are read from the folder of `path`, where one is given
    num_heads: int = 4
    head_dim: int = 32
    ffn_dim: int = 512
    freq_dim: int = 64  # width of the sinusoidal timestep embedding, where the family has a choice
    text_dim: int = 64  # width of the text encoder's output
    in_channels: int = 16  # latent channels of the VAE, and after them those of conditions
    out_channels: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    rope_theta: float = 10000.0
    gradient_checkpointing: bool = False  # blocks are computed again in the backward, for less memory
    # auto: the fastest that serves device and shape; a name: that one or an error; a .json file of python -m
    # app.bench.gpu: auto by what was measured on the workers' device, and the settings of a run hold what the file says
    attention: AttentionSetting = "auto"
    # how heads travel in a bag: whole, or in two halves, one of which travels while the other is attended; auto: in
    # halves between GPUs, where one half alone fills a GPU for long enough (ops.packed.exchange_halves)
    exchange: Literal["auto", "whole", "halves"] = "auto"
    # torch.compile of the blocks: a minute or more in the first cascades, then fewer calls of the host and fewer passes
    # over memory between fused ops, attention and matrix products. Results differ by rounding. auto: by the profile's
    # seconds of both ways (heddle profile), decided once for a run; its settings hold true or false
    compile: bool | Literal["auto"] = False
    # CUDA graphs of the blocks, in passes that come again and are less work for a GPU than for its host, as those of a
    # few pictures; auto: where the worker that runs them finds them faster. On the CPU blocks run as written
    cuda_graphs: CudaGraphsSetting = False
    lora_rank: int = 0  # 0 trains all weights; > 0 trains LoRA factors of the attention and MLP projections
    lora_alpha: float = 0.0  # 0 means equal to the rank
    # factors of these projections alone: patterns of a name or of its end after a dot (to_q, attn1.*, blocks.1?.ffn.*).
    # []: of all those of attention and MLP
    lora_targets: tuple[str, ...] = ()
    lora_dora: bool = False  # DoRA: beside the factors, the length of every row of their sum with the weight is trained
    # with LoRA, in what the frozen projections are kept. same: as all weights. float8: those of attention and MLP in 8
    # bits, with a scale for each row (ops.models.float8)
    frozen_dtype: Literal["same", "float8"] = "same"
    # trains these weights alone: patterns of their names, or of the modules that hold them (blocks.3[0-9], *.attn1,
    # *.bias). []: all, or the factors of LoRA
    train_only: tuple[str, ...] = ()
    lora_from: str | None = None  # factors to begin with: a .safetensors file of PEFT or Diffusers, or its folder

    def __post_init__(self) -> None:
        own = next(field.default for field in fields(self) if field.name == "architecture")
        if self.architecture != own:
            raise ValueError(f"model.dit.architecture is {self.architecture}; these are settings of {own}.")
        check_numbers(
            "model.dit",
            self,
            num_layers=between(1, 1000),
            num_heads=between(1, 1024),
            head_dim=between(2, 1024),
            ffn_dim=between(1, 1 << 20),
            freq_dim=between(2, 1 << 16),
            text_dim=between(1, 1 << 16),
            in_channels=between(1, 1 << 16),
            out_channels=between(1, 1 << 16),
            patch=between(1, 64),
            eps=above(0, 1.0),
            rope_theta=above(0, 1e12),
            lora_rank=between(0, 1 << 16),
            lora_alpha=between(0, 1e6),
        )
        if self.lora_from and not self.lora_rank:
            raise ValueError("model.dit.lora_from names factors, and lora_rank is 0. Set it to the rank of the file.")
        if self.lora_targets and not self.lora_rank:
            raise ValueError(
                f"model.dit.lora_targets {list(self.lora_targets)} names what gets LoRA factors, and lora_rank is 0. "
                f"Set the rank, or leave lora_targets out."
            )
        if self.lora_dora and not self.lora_rank:
            raise ValueError("model.dit.lora_dora is true, and lora_rank is 0. Set the rank, or leave lora_dora out.")
        if self.frozen_dtype != "same" and not self.lora_rank:
            raise ValueError(
                f"model.dit.frozen_dtype is {self.frozen_dtype}, and lora_rank is 0: it is for projections that LoRA "
                f"freezes. Set the rank, or leave frozen_dtype out."
            )
        if self.train_only and self.lora_rank:
            raise ValueError(
                f"model.dit.train_only {list(self.train_only)} and lora_rank {self.lora_rank}: LoRA trains factors and "
                f"freezes all weights. Leave one of the two out."
            )
        if self.compile is True and not self.compiles:
            raise ValueError(
                f"model.dit.compile is true, and blocks of architecture {self.architecture} are not compiled: one code "
                f"does not serve all their shapes. Set it to false."
            )
        if self.cuda_graphs is True and not self.compiles:
            raise ValueError(
                f"model.dit.cuda_graphs is true, and blocks of architecture {self.architecture} are not captured: what "
                f"they are given is made anew for every pass. Set it to false."
            )
        if self.cuda_graphs and self.compile:
            both = f"{self.cuda_graphs} and compile {self.compile}".lower()
            raise ValueError(
                f"model.dit.cuda_graphs {both}: blocks run by graphs or compiled. Leave one of the two out."
            )
        if self.freq_dim % 2:
            raise ValueError(
                f"model.dit.freq_dim {self.freq_dim} is odd; it holds sine and cosine pairs. Use an even one."
            )
        if self.head_dim % 2:
            raise ValueError(f"model.dit.head_dim {self.head_dim} is odd; RoPE rotates pairs. Use an even head_dim.")

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    def without_lora(self) -> Self:
        """The settings of the plain transformer, which has no factors."""
        return replace(self, lora_rank=0, lora_targets=(), lora_dora=False, lora_from=None, frozen_dtype="same")

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """Head sizes that RoPE gives to (t, h, w); even, and their sum is the head's."""
        raise NotImplementedError(f"{type(self).__name__} does not say how RoPE splits a head.")

    @property
    def image_width(self) -> int:
        """Width of the image embeddings that the blocks attend to; 0: none."""
        return 0

    @property
    def pooled_width(self) -> int:
        """Width of the vector that stands for a whole text; 0: none."""
        return 0

    def with_pooled(self, dim: int) -> Self:
        """The same for a text encoder that makes a pooled vector. Raises ValueError where the transformer takes
        none."""
        raise ValueError(
            f"model.text.kind makes a pooled vector of {dim} numbers, and a transformer of architecture "
            f"{self.architecture} takes none. Use kind: t5."
        )

    def with_glyphs(self, dim: int) -> Self:
        """The same for a text encoder whose results have rows of glyphs, of this width. Raises ValueError where the
        transformer takes none."""
        raise ValueError(
            f"model.text.kind makes rows of what captions quote, of {dim} numbers, and a transformer of architecture "
            f"{self.architecture} takes none. Use kind: t5, or that of its own pipeline."
        )

    def with_vision(self, dim: int) -> Self:
        """The same for a text whose rows of the first frame, of this width, an encoder of its own makes. Raises
        ValueError where the transformer takes none."""
        raise ValueError(
            f"model.text.kind makes rows of the first frame, of {dim} numbers, and a transformer of architecture "
            f"{self.architecture} takes none. Use that of its own pipeline."
        )

    @property
    def takes_guidance(self) -> bool:
        """Whether the weights are distilled: given the guidance scale, they need no second forward to sample."""
        return False

    @property
    def starts_from_image(self) -> bool:
        """Whether a clip is made from its first frame."""
        return False

    @property
    def image_rows(self) -> int:
        """Rows of the image embeddings of a clip, where the weights have a place for each; 0: any number."""
        return 0

    @property
    def takes_last_frame(self) -> bool:
        """Whether a clip is made from its last frame, too."""
        return False

    @property
    def encodes_frame_alone(self) -> bool:
        """Whether the VAE sees the first frame that a clip is made from without grey frames after it."""
        return False

    @property
    def condition_scale(self) -> float:
        """What the latent of a first frame is multiplied with before it becomes channels."""
        return 1.0

    @property
    def drops_first_latent(self) -> bool:
        """Whether the frames of a sampled clip's first latent are not shown."""
        return False

    @property
    def gives_first_frame(self) -> bool:
        """Whether the first latent frame of every clip is given as it is (`frame_times`)."""
        return False

    @property
    def picture_every(self) -> int:
        """n: every n-th row that a text encoder makes of the first frame counts as text; 0: it sees no frame."""
        return 0

    @property
    def diffusion(self) -> Diffusion | None:
        """The diffusion that it is trained by; None: it predicts the velocities of a flow."""
        return None

    @property
    def spacing(self) -> Spacing:
        """How its pipeline spaces noise levels."""
        return "even"

    @property
    def sampled_unshifted(self) -> bool:
        """Whether its pipeline samples without the flow shift of the training, whatever its scheduler says."""
        return False

    @property
    def told_signal(self) -> bool:
        """Whether its weights take the share of signal as their time (0 to 1000), where other families take that of
        noise. The transformer itself converts it."""
        return False

    @property
    def images_only(self) -> bool:
        """Whether clips are pictures, of one frame."""
        return False

    @property
    def clip_rate(self) -> float | None:
        """Frames per second that all clips must have, where positions are counted in seconds or the rate is an
        input."""
        return None

    def at_rate(self, frame_rate: float) -> Self:
        """This config for clips of another frame rate (1/s), if the transformer takes one."""
        del frame_rate
        return self

    @property
    def part(self) -> str:
        """The folder of its weights in a pipeline of Diffusers."""
        return "transformer"

    @property
    def sigmas(self) -> tuple[float, float]:
        """The noise levels [low, high) for which this transformer is: all, or those of one of two experts."""
        return 0.0, 1.0

    @property
    def experts(self) -> tuple[Self, ...]:
        """The settings of each transformer that is trained: of one, or of one for high noise and one for low."""
        return (self,)

    @property
    def expert_name(self) -> str:
        """Which of two experts it is, "high" or "low"; "": neither, or both."""
        return ""

    @property
    def lacks_expert(self) -> bool:
        """Whether this is one of two experts, and the other is not trained."""
        return self.sigmas != (0.0, 1.0)

    @property
    def two_experts(self) -> bool:
        """Whether two transformers share the noise levels, be one of them trained or both."""
        return self.lacks_expert or len(self.experts) > 1

    def other_expert(self) -> Self:
        """The settings of the transformer for the other noise levels, in the same folder."""
        raise NotImplementedError(f"{type(self).__name__} knows of no second expert.")

    def of_pipeline(self, index: Mapping[str, object]) -> Self:
        """This config with what a pipeline's model_index.json says of its transformers."""
        return self

    @property
    def frame_times(self) -> bool:
        """Whether frames of a clip may have times of their own, and so a first frame be given clean."""
        return False

    @property
    def levels_by_frame(self) -> bool:
        """Whether every latent frame of a clip may have a noise level of its own (diffusion forcing)."""
        return False

    def fitted(self, channels: int, stride: tuple[int, int, int], text_dim: int, image_dim: int) -> Self:
        """The same for a VAE of these latent channels and strides over t, h, w, and for encoders of these widths (0: no
        image encoder). Raises ValueError for an image encoder that this transformer does not listen to."""
        del stride
        if image_dim:
            raise ValueError(
                f"model.image makes embeddings, and a transformer of architecture {self.architecture} takes none. "
                f"Leave model.image out."
            )
        return replace(self, in_channels=channels, out_channels=channels, text_dim=text_dim)

    @property
    def spatial_temporal(self) -> bool:
        """Whether blocks attend in turn within a frame and along a position."""
        return False

    @property
    def slicing(self) -> Slicing | None:
        """How a bag slices blocks that attend in turn within a frame and along a position; None: it runs Ulysses."""
        return None

    @property
    def deals_heads(self) -> bool:
        """Whether a bag deals out attention heads, by Ulysses; else frames and positions, in slices."""
        return self.slicing is None

    @property
    def in_halves(self) -> bool | None:
        """`exchange`, as a layout takes it."""
        return None if self.exchange == "auto" else self.exchange == "halves"

    def degrees(self, most: int, setting: SequenceSetting = "auto") -> tuple[int, ...]:
        """Sizes, up to `most`, of bags that are planned where nobody names any: those that deal out heads well; all of
        them where frames and positions are dealt out, whose slices may have any lengths."""
        if not self.deals_heads:
            return tuple(range(1, most + 1))
        return default_degrees(self.num_heads, setting, most)

    @property
    def flops(self) -> ForwardFlops:
        """What its blocks compute of a sample. Prices of plans and the figures of a run follow from it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its blocks compute.")

    @property
    def compiles(self) -> bool:
        """Whether one compiled code serves its blocks for any rows, text and sequences."""
        return not self.spatial_temporal

    def kept_bytes(self, element_bytes: int) -> int:
        """Bytes of a row that all blocks keep where the output of attention is kept (`ops.packed.kept_attention`): its
        elements, and a logarithm of a sum for every head. Text goes through attention with the video, or is attended to
        in a call of its own, and so is an image."""
        calls = 1 if self.flops.within else 2 + (self.image_width > 0)
        return calls * sum(self.block_counts) * self.num_heads * (self.head_dim * element_bytes + 4)

    @property
    def fetchable(self) -> bool:
        """Whether weights of its blocks may lie elsewhere and be fetched for a pass, in which their activations are
        computed again: the frozen ones where some are, else all of one transformer."""
        return self.gradient_checkpointing and (self.freezes_blocks or len(self.experts) == 1)

    @property
    def freezes_blocks(self) -> bool:
        """Whether some weights of blocks are not trained."""
        return self.lora_rank > 0 or bool(self.train_only)

    @property
    def usual_part(self) -> TrainedPart:
        """What is trained, without a look at the names of weights (`ops.models.load.trained_part`): all, or so little
        in every block that its own gradients do not count."""
        return TrainedPart(weights=0.0) if self.freezes_blocks else ALL_TRAINED

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Transformer blocks of each kind, in the order in which a token passes them."""
        return (self.num_layers,)
