"""Rules between two sections of a run's settings. Each raises ConfigError for the first thing that breaks it.

`read` is the geometry of a model whose folders have been read (`ops.models.folders.resolve`). Without it nothing is
said of a model from a folder that its settings do not know.
"""

from __future__ import annotations

from dataclasses import fields

from actors.config import CheckpointConfig, PlannerConfig, TrainConfig, WorkersConfig
from app.settings.prompt_line import about_prompt, may_have_options
from app.settings.sections import SampleConfig, ValidationConfig
from data.config import DataConfig
from ops.attention.names import CUDA_ONLY, FORWARD_ONLY_ON_CPU
from ops.attention.table import AttentionTable, name_of
from ops.config import TIMES, FlowConfig, ForcingSchedule
from ops.counted import counted
from ops.degrees import bags_of
from ops.flow.forcing import windows_of
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, VAEConfig, geometry
from ops.models.folders import decodes_in_time
from ops.typed import ConfigError


def check_frame_rate(model: ModelConfig, data: DataConfig, sample: SampleConfig) -> None:
    """A transformer that counts its positions in seconds, or takes the frame rate, is trained at one rate, or at that
    of each clip, and makes the samples of its run at that of its settings."""
    rate, fps = model.dit.clip_rate, data.fps
    if rate is not None and sample.fps not in (rate, SampleConfig().fps):
        raise ConfigError(
            f"sample.fps is {sample.fps:g}, and the transformer of model.dit gets {rate:g} frames per second. Leave "
            f"it out: its samples are of that rate; heddle sample --fps gives it another one."
        )
    if rate is not None and fps not in (0.0, rate):
        raise ConfigError(
            f"data.fps is {fps:g}, and the transformer of model.dit sees time in seconds, at {rate:g} frames per "
            f"second. Set data.fps and model.dit.frame_rate to the same rate, or data.fps to 0: clips keep their own, "
            f"and the transformer gets that of each."
        )


def check_degrees(
    model: ModelConfig, planner: PlannerConfig, workers: WorkersConfig, read: Geometry | None = None
) -> None:
    """Ulysses deals out whole attention heads, and the static strategy needs a worker for each part."""
    dit = model.dit
    legal = dit.degrees(dit.num_heads, "ulysses")
    wanted = {"planner.static_degree": (planner.static_degree,), "planner.degrees": planner.degrees}
    wanted["planner.topology"] = tuple(bags_of(planner.topology)) if planner.topology else ()
    for key, degrees in wanted.items():
        for degree in degrees:
            if planner.sequence == "ulysses" and _is_known(model, read) and dit.deals_heads and degree not in legal:
                raise ConfigError(
                    f"{key} has {degree}, which does not divide the {dit.num_heads} attention heads of "
                    f"model.dit; legal degrees of planner.sequence ulysses are {', '.join(map(str, legal))}. Use one "
                    f"of them, or planner.sequence: auto."
                )
    if planner.strategy == "static" and planner.static_degree > workers.max:
        raise ConfigError(
            f"planner.static_degree {planner.static_degree} needs as many workers; workers.max is "
            f"{workers.max}. Raise workers.max or lower the degree."
        )
    _check_waits(planner, workers)


def _check_waits(planner: PlannerConfig, workers: WorkersConfig) -> None:
    """Workers that a run waits for may come."""
    if planner.misfit != "wait":
        return
    needed = {"planner.degrees": min(planner.degrees, default=1)}
    if planner.topology and planner.strategy in ("knapsack", "knapformer"):
        needed["planner.topology"] = sum(size * count for size, count in bags_of(planner.topology).items())
    for key, count in needed.items():
        if count > workers.max:
            raise ConfigError(
                f"{key} needs {count} workers, for which planner.misfit wait would wait; workers.max is {workers.max}. "
                f"Raise workers.max, leave {key} out, or set misfit to adapt."
            )


def check_schedule(train: TrainConfig) -> None:
    """Warm-up and decay have room within the run."""
    if train.optimizer.lr_warmup_steps > train.steps:
        raise ConfigError(
            f"train.optimizer.lr_warmup_steps {train.optimizer.lr_warmup_steps} is longer than the run "
            f"of train.steps {train.steps}; shorten the warm-up."
        )
    warmup, decay = train.optimizer.lr_warmup_steps, train.optimizer.lr_decay_steps
    if warmup + decay > train.steps:
        raise ConfigError(
            f"train.optimizer.lr_warmup_steps {warmup} and lr_decay_steps {decay} are together longer than the run of "
            f"train.steps {train.steps}; shorten one of them."
        )


def check_buckets(data: DataConfig, model: ModelConfig, read: Geometry | None = None) -> None:
    """The model can take every bucket."""
    if (strides := _geometry(model, read)) is None:
        return
    for shape in (shape for buckets in data.tables for shape in buckets.table):
        frames, height, width = map(int, shape.split("x"))
        try:
            strides.token_grid(frames, height, width)
        except ValueError as error:
            raise ConfigError(f"data.buckets.table {shape}: {error}") from None


def check_images(model: ModelConfig, data: DataConfig, sample: SampleConfig) -> None:
    """A transformer of pictures is given pictures, and makes them."""
    if not model.dit.images_only:
        return
    tables = data.tables
    frames = {int(shape.split("x")[0]) for buckets in tables for shape in buckets.table}
    frames |= {count for buckets in tables for count in buckets.frames}
    frames |= {int(count) for buckets in tables for counts in buckets.open_sora.values() for count in counts}
    if frames - {1}:
        raise ConfigError(
            f"data.buckets has clips of {max(frames)} frames, and the transformer of model.dit is for pictures. Leave "
            f"buckets of one frame."
        )
    if any(not may_have_options(prompt) for prompt in sample.prompts):
        _check_picture(sample)


def _check_picture(sample: SampleConfig) -> None:
    if sample.frames != 1:
        raise ConfigError(
            f"sample.frames is {sample.frames}, and the transformer of model.dit makes pictures. Set it to 1."
        )


def check_flow(model: ModelConfig, flow: FlowConfig, read: Geometry | None = None) -> None:
    """What is said of a flow is for a transformer that is trained by one, and its times are those of the weights. Where
    noise levels are cut, each transformer has some."""
    if model.dit.told_signal and flow.num_train_timesteps != 1000:
        raise ConfigError(
            f"train.flow.num_train_timesteps is {flow.num_train_timesteps}, and the transformer of model.dit takes "
            f"the share of signal of 1000. Leave it out."
        )
    if model.dit.diffusion is None:
        if flow.levels != (0.0, 1.0) and _is_known(model, read):
            _check_cut(model.dit, flow)
        return
    usual = FlowConfig()
    for name in (setting.name for setting in fields(flow)):
        if (value := getattr(flow, name)) != getattr(usual, name):
            raise ConfigError(
                f"train.flow.{name} is {value}, and the transformer of model.dit is trained by diffusion, with times "
                f"drawn evenly: nothing of train.flow is used. Leave it out."
            )


def _check_cut(dit: DiTConfig, flow: FlowConfig) -> None:
    from ops.flow.objective import CutDensity  # needs NumPy

    for expert in dit.experts:
        try:
            CutDensity.of(flow, flow.flow_shift if flow.token_shift is None else 1.0, expert.sigmas)
        except ValueError as error:
            other = " A run of the other expert alone is model.dit.expert high or low." if len(dit.experts) > 1 else ""
            raise ConfigError(f"{error}{other}") from None


def check_pictures(train: TrainConfig, model: ModelConfig, data: DataConfig, read: Geometry | None = None) -> None:
    """Noise on pictures is other noise in every step."""
    if train.picture_noise is None:
        return
    if _is_known(model, read) and not (model.dit.starts_from_image or model.dit.gives_first_frame):
        raise ConfigError(
            "train.picture_noise is set, and the transformer of model.dit makes clips from text alone; leave it out."
        )
    if data.cache.path and data.cache.latents:
        raise ConfigError(
            f"train.picture_noise gives a picture other noise in every step, and data.cache.path {data.cache.path} "
            f"would keep the latents of one. Set data.cache.latents: false."
        )


def check_more_than_first(
    model: ModelConfig, data: DataConfig, begun: int = 0, before: DataConfig | None = None, most: int = 0
) -> None:
    """A transformer that starts from a picture is trained on clips that go on from it. Segments with pictures that are
    over are no fault: those that end within the first `begun` steps, which earlier starts have made, or no later than
    the ones that ended in `before`, the data of the last start, within the `most` steps that the run has ever had: a
    crash may have cost some of these.
    """
    if not model.dit.starts_from_image:
        return
    ends = [stage.until_step for stage in data.stages]
    ended = [] if before is None else [end for end in _ends_of_pictures(before).values() if end <= most]
    over = max([begun, *ended])
    pictures = [number for number, end in _ends_of_pictures(data).items() if not end or end > over]
    if not pictures:
        return
    number = pictures[0]
    own = data.stages[number].buckets is not None
    raise ConfigError(
        f"{f'data.segments.{number}' if own else 'data'}.buckets has buckets of one frame, and the transformer of "
        f"model.dit is given the first frame of each clip: a picture is no more than that, and teaches to copy it. "
        f"{_without_pictures(number, [0, *ends][number], ends[number], begun, own=own)}"
    )


def _ends_of_pictures(data: DataConfig) -> dict[int, int]:
    """Ends of the segments with buckets of one frame, by their numbers; 0: there is none."""
    stages = zip(data.stages, data.tables)
    return {number: stage.until_step for number, (stage, buckets) in enumerate(stages) if buckets.has_pictures}


def _without_pictures(number: int, begin: int, end: int, begun: int, *, own: bool) -> str:
    """How a segment from step `begin` to `end` gets along without them. What a run has trained on stays: a resume
    takes other buckets for a segment that is to come, and another end for the one that it stands in."""
    if begun > begin:
        return (
            f"What is trained stays: let data.segments end these buckets after {counted(begun, 'step')}, by an entry "
            f"with until_step: {begun}, and go on with buckets of more frames, {{until_step: {end}, buckets: {{...}}}}."
        )
    if begun and not own:
        return f"Give data.segments.{number} buckets of its own, of more frames."
    return "Leave buckets of more frames."


def check_cache(data: DataConfig, model: ModelConfig, sample: SampleConfig) -> None:
    """Samples of a run that takes its texts from a cache have theirs there, too."""
    live = sample.is_live and not model.dit.lacks_expert
    if data.cache.only and data.cache.text and live and model.text.sees_picture:
        raise ConfigError(
            f"data.cache.only is true, and sample.every {sample.every} makes clips of texts that the text encoder of "
            f"model.text sees with a picture: the cache has none of them. Set sample.every: 0 and make clips by "
            f"`heddle sample`, or data.cache.text: false."
        )


def check_levels(model: ModelConfig, flow: FlowConfig, read: Geometry | None = None) -> None:
    """Times and noise levels by frame are for a transformer that takes them, those of a first frame for one that is not
    given it."""
    dit, known = model.dit, _is_known(model, read)
    if known and flow.first_frame and not dit.frame_times:
        raise ConfigError(
            f"train.flow.first_frame is {flow.first_frame:g}, and the transformer of model.dit takes one time for all "
            f"of a clip; set it to 0."
        )
    if known and flow.by_frame and not dit.levels_by_frame:
        raise ConfigError(
            f"train.flow.frame_levels is {flow.frame_levels}, and the transformer of model.dit takes one noise level "
            f"for all of a clip; set it to one."
        )
    if flow.first_frame and dit.gives_first_frame:
        raise ConfigError(
            f"train.flow.first_frame is {flow.first_frame:g}, and the transformer of model.dit is given the first "
            f"frame of every clip; set it to 0."
        )


def check_sample(
    sample: SampleConfig,
    checkpoint: CheckpointConfig,
    model: ModelConfig,
    flow: FlowConfig,
    read: Geometry | None = None,
) -> None:
    """Samples are made from checkpoints, in sizes that the model can make, and from pictures where it needs them. What
    lines of prompts say instead is for `check_prompts`."""
    if not sample.prompts or any(not may_have_options(prompt) for prompt in sample.prompts):
        _check_clips(sample, model, flow, read)
    if model.vae.path is None:
        check_decode(model.vae, sample)
    _check_sample_every(sample, checkpoint)


def check_prompts(sample: SampleConfig, model: ModelConfig, flow: FlowConfig, read: Geometry | None = None) -> None:
    """Options on the lines of prompts are some, and the model can make what they ask for. For prompts that a person
    gives: those that a run has kept may be of before there were options, and are read whatever they say."""
    for number, prompt in enumerate(sample.prompts):
        with about_prompt(number, prompt):
            own = sample.of_prompt(number)
            for picture in (*own.images, *own.last_images):
                _check_local("its picture", picture)
            if model.dit.images_only:
                _check_picture(own)
            _check_clips(own, model, flow, read)


def _check_clips(sample: SampleConfig, model: ModelConfig, flow: FlowConfig, read: Geometry | None) -> None:
    """Settings of clips, of one prompt or of none, are those that the model can follow."""
    known = _is_known(model, read)
    if known:
        _check_given_pictures(sample, model.dit, flow)
    _check_sampler(sample, model.dit, flow, known)
    if sample.prompts and (strides := _geometry(model, read)) is not None:
        _check_sample_size(sample, strides)


def _check_given_pictures(sample: SampleConfig, dit: DiTConfig, flow: FlowConfig) -> None:
    if sample.prompts and dit.starts_from_image and not sample.images:
        raise ConfigError(
            "sample.images is empty, and the transformer of model.dit starts from a picture; give one for each of "
            "sample.prompts, or one for all."
        )
    if sample.images and not (dit.starts_from_image or flow.knows_given_frames):
        raise ConfigError("sample.images is given, but model.dit makes video from text alone; leave it out.")
    if sample.last_images and not dit.takes_last_frame:
        raise ConfigError("sample.last_images is given, but model.dit takes no last frame; leave it out.")
    if sample.prompts and dit.takes_last_frame and not sample.last_images:
        raise ConfigError(
            "sample.last_images is empty, and the transformer of model.dit makes clips between two pictures; give one "
            "for each of sample.prompts, or one for all."
        )


def _check_sampler(sample: SampleConfig, dit: DiTConfig, flow: FlowConfig, known: bool) -> None:
    if sample.guidance_scale_2 is not None and not dit.two_experts:
        raise ConfigError(
            f"sample.guidance_scale_2 is {sample.guidance_scale_2:g}, of the expert for low noise, and model.dit has "
            f"one transformer for all noise levels; leave it out."
        )
    if known and sample.forcing is not None and not dit.levels_by_frame:
        raise ConfigError(
            "sample.forcing is given, and the transformer of model.dit takes one noise level for all of a clip; leave "
            "it out."
        )
    if sample.flow_shift is not None and (dit.diffusion is not None or dit.sampled_unshifted):
        why = "sampled by DDIM, which has none" if dit.diffusion else "sampled without one, as its pipeline does"
        raise ConfigError(
            f"sample.flow_shift is {sample.flow_shift:g}, and the transformer of model.dit is {why}. Leave it out."
        )
    if sample.timesteps and dit.diffusion is not None:
        raise ConfigError(
            f"sample.timesteps is {list(sample.timesteps)}, and the transformer of model.dit is sampled by DDIM, which "
            f"has its own. Leave it out."
        )
    if dit.diffusion is not None and sample.steps > TIMES:
        raise ConfigError(
            f"sample.steps is {sample.steps}, and the transformer of model.dit is sampled by DDIM, which has {TIMES} "
            f"times. Set it to {TIMES} or less."
        )
    if sample.timesteps and sample.timesteps[0] > flow.num_train_timesteps:
        raise ConfigError(
            f"sample.timesteps begins with {sample.timesteps[0]:g}, and pure noise has the time "
            f"{flow.num_train_timesteps} (train.flow.num_train_timesteps). Begin there or below."
        )


def _check_sample_every(sample: SampleConfig, checkpoint: CheckpointConfig) -> None:
    if not sample.every:
        return
    if not sample.prompts:
        raise ConfigError(
            f"sample.every is {sample.every} but sample.prompts is empty; give at least one prompt "
            f"or set sample.every: 0."
        )
    if checkpoint.every == 0:
        raise ConfigError(
            f"checkpoint.every is 0, so checkpoints are made at the end only, but sample.every "
            f"{sample.every} makes samples from checkpoints. Set checkpoint.every to a divisor of "
            f"{sample.every}, or sample.every: 0."
        )
    if sample.every % checkpoint.every:
        raise ConfigError(
            f"sample.every {sample.every} must be a multiple of checkpoint.every "
            f"{checkpoint.every}: samples are made from checkpoints."
        )


def _check_sample_size(sample: SampleConfig, strides: Geometry) -> None:
    try:
        grid = strides.token_grid(sample.frames, sample.height, sample.width)
    except ValueError as error:
        raise ConfigError(f"sample.frames/height/width cannot be generated: {error}") from None
    check_forcing(sample.forcing, grid[0], strides, bool(sample.images))


def check_forcing(forcing: ForcingSchedule | None, frames: int, geometry: Geometry, from_picture: bool) -> None:
    """A clip of `frames` latent frames is one of whole blocks, and none of these makes a given picture anew."""
    if forcing is None:
        return
    if geometry.patch[0] > 1:
        raise ConfigError(
            f"sample.forcing: a token of model.dit.patch {list(geometry.patch)} is of {geometry.patch[0]} latent "
            f"frames, and windows and blocks are of tokens of one. Leave it out."
        )
    try:
        windows_of(forcing, frames, geometry.vae_stride[0])
    except ValueError as error:
        raise ConfigError(f"sample.forcing: {error}") from None
    if from_picture and forcing.causal_block_size > 1:
        raise ConfigError(
            f"sample.forcing.causal_block_size is {forcing.causal_block_size}, and a block would make the picture that "
            f"a clip begins with anew. Set it to 1."
        )


def check_validation(validation: ValidationConfig, checkpoint: CheckpointConfig, data: DataConfig) -> None:
    """Held-out losses are of checkpoints, and of clips that are not trained on."""
    trained = {source.path for source in data.sources}
    if doubled := next((source.path for source in validation.sources if source.path in trained), ""):
        raise ConfigError(
            f"validation.sources has {doubled}, which data.sources trains on; give clips that are in no other source."
        )
    if validation.every and (checkpoint.every == 0 or validation.every % checkpoint.every):
        raise ConfigError(
            f"validation.every {validation.every} must be a multiple of checkpoint.every {checkpoint.every}: the loss "
            f"is that of checkpoints."
        )


def check_decode(vae: VAEConfig, sample: SampleConfig) -> None:
    """A time and noise of decoding are for decoders that take them. Reads the folder of the autoencoder."""
    given = {"decode_timestep": sample.decode_timestep, "decode_noise_scale": sample.decode_noise_scale}
    for name, value in given.items():
        if value and not decodes_in_time(vae):
            raise ConfigError(
                f"sample.{name} is {value:g}, and the decoder of model.vae takes no time and no noise; leave it out."
            )


def _is_known(model: ModelConfig, read: Geometry | None) -> bool:
    """Whether the settings of the transformer are those of its weights."""
    return model.dit.path is None or read is not None


def _geometry(model: ModelConfig, read: Geometry | None) -> Geometry | None:
    """None where folders say it that have not been read."""
    if read is not None:
        return read
    return geometry(model) if model.vae.kind == "haar" and model.dit.path is None else None


def check_attention(model: ModelConfig, train: TrainConfig, workers: WorkersConfig) -> None:
    """The attention backend works on some machine with these settings. What a worker's device lacks, the worker says
    when it starts."""
    setting = model.dit.attention
    if isinstance(setting, AttentionTable) and workers.device == ("cpu" if setting.on_cuda else "cuda"):
        raise ConfigError(
            f"model.dit.attention is a table of {setting.device}, and workers.device is {workers.device}. Give one "
            f"that python -m app.bench.gpu wrote on such a device, or set attention: auto."
        )
    name = name_of(setting)
    if workers.device == "cpu" and name in CUDA_ONLY + FORWARD_ONLY_ON_CPU:
        raise ConfigError(
            f"model.dit.attention {name} cannot train on workers.device cpu. Use auto or sdpa, or workers on cuda."
        )
    if name in CUDA_ONLY and train.autocast == "none" and train.parameter_dtype == "float32":
        raise ConfigError(
            f"model.dit.attention {name} takes bfloat16 and float16; train.autocast is none and train.parameter_dtype "
            f"float32. Set train.autocast: bfloat16, or attention: auto."
        )


def check_first(model: ModelConfig, train: TrainConfig) -> None:
    """One thing says what training begins with."""
    if model.dit.lora_from and train.init_from:
        raise ConfigError(
            f"model.dit.lora_from {model.dit.lora_from} and train.init_from {train.init_from} both say which factors "
            f"training begins with; leave one of them out."
        )


def check_places(
    model: ModelConfig, train: TrainConfig, workers: WorkersConfig, planner: PlannerConfig, sample: SampleConfig
) -> None:
    """What is read by its path alone has one: only data come from the stores of `data.storage`."""
    weights = {
        "model.dit.path": model.dit.path,
        "model.dit.lora_from": model.dit.lora_from,
        "model.vae.path": model.vae.path,
        "model.text.path": model.text.path,
        "model.image.path": model.image.path if model.image else None,
        "train.init_from": train.init_from,
    }
    for name, place in weights.items():
        if place and "://" in place:
            raise ConfigError(f"{name} {place!r} is a URI; weights lie in a local or shared folder. Give its path.")
    files = {"planner.profile": planner.profile, "workers.cluster": workers.cluster}
    for name, pictures in (("sample.images", sample.images), ("sample.last_images", sample.last_images)):
        files |= {f"{name}.{number}": picture for number, picture in enumerate(pictures)}
    for name, file in files.items():
        _check_local(name, file)


def _check_local(name: str, file: str | None) -> None:
    if file and "://" in file:
        raise ConfigError(f"{name} {file!r} is a URI; it is read as a local or shared file. Give its path.")


def check_experts(model: ModelConfig, train: TrainConfig) -> None:
    """Two experts are updated apart."""
    if train.sync == "deepspeed" and len(model.dit.experts) > 1:
        raise ConfigError(
            "train.sync is deepspeed, which updates all weights together, and model.dit.expert is both; set train.sync "
            "to flat, or train one expert."
        )


def check_memory(train: TrainConfig, workers: WorkersConfig, model: ModelConfig) -> None:
    """Host memory beside a device is for GPUs; blocks whose weights are fetched are computed again, and trained."""
    if workers.device == "cpu" and train.memory.gradients == "host":
        raise ConfigError(
            "train.memory.gradients host is host memory beside GPUs; workers.device is cpu. Set gradients to node, "
            "which is host memory there, or auto."
        )
    if train.memory.attention == "recomputed" and not model.dit.gradient_checkpointing:
        raise ConfigError(
            "train.memory.attention recomputed is a way of gradient checkpointing; model.dit.gradient_checkpointing is "
            "false, which keeps everything. Set it to true, or attention to auto."
        )
    if train.memory.parameters == "node" and not model.dit.gradient_checkpointing:
        raise ConfigError(
            "train.memory.parameters node fetches a block's weights again in backward, where its activations are "
            "computed again; model.dit.gradient_checkpointing is false. Set it to true, or parameters to auto or "
            "replicated."
        )
    if train.memory.parameters == "node" and model.dit.compile is True:
        raise ConfigError(
            "train.memory.parameters node fetches weights block by block, and model.dit.compile compiles blocks with "
            "their weights. Set compile to false, or parameters to auto or replicated."
        )
    if train.memory.parameters == "node" and model.dit.cuda_graphs is True:
        raise ConfigError(
            "train.memory.parameters node fetches weights block by block, and model.dit.cuda_graphs reads them where "
            "they lay. Set cuda_graphs to false, or parameters to auto or replicated."
        )
    if train.memory.attention == "kept" and model.dit.cuda_graphs:
        raise ConfigError(
            f"train.memory.attention kept and model.dit.cuda_graphs {str(model.dit.cuda_graphs).lower()}: graphs "
            f"compute all of a block again. Set attention to auto, which keeps it in long passes alone, or cuda_graphs "
            f"to false."
        )
    if train.memory.parameters == "node" and len(model.dit.experts) > 1 and not model.dit.freezes_blocks:
        raise ConfigError(
            "train.memory.parameters node holds the blocks of one transformer, and model.dit.expert is both. Set "
            "parameters to auto or replicated, or train one expert."
        )
