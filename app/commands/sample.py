"""`heddle sample`. Heavy imports come after parsing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from app.commands.options import After
from app.settings.option_groups import in_groups
from app.settings.sections import LongPrompts

if TYPE_CHECKING:
    from app.sampling.clips import ClipChanges, ClipOrder, Crew
    from ops.models.added_lora import LoraFile

_FORCING = ("base_num_frames", "overlap_history", "addnoise_condition", "ar_step", "causal_block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Material:
    """What clips are made of: weights, prompts and pictures."""

    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Run folder (its latest), a checkpoint, or an exported folder.")
    ] = None
    after: After = None
    published: Annotated[
        Path | None, typer.Option("--from", help="Instead: the Diffusers folder of a published pipeline.")
    ] = None
    lora_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--lora",
            metavar="PATH",
            help="Of a folder: factors to add to its weights, a .safetensors file by Diffusers', PEFT's, ComfyUI's or "
            "kohya's names; for two experts the folder of both. Repeatable.",
        ),
    ] = None
    lora_scales: Annotated[
        list[float] | None,
        typer.Option(
            "--lora-scale",
            metavar="NUMBER",
            help="What they are multiplied with: one for all, or one for each; default: 1.",
        ),
    ] = None
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="What to show; options of its own may follow (--w 832 --h 480 --f 81, as in sample.prompts). "
            "Repeatable; default: sample.prompts of the run's config.",
        ),
    ] = None
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts", help="Text file, one prompt per line, after those of --prompt; # begins a comment."),
    ] = None
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", metavar="PATH", help="First frame, for image to video: one for all prompts, or one for each."
        ),
    ] = None
    last_images: Annotated[
        list[Path] | None,
        typer.Option(
            "--last-image",
            metavar="PATH",
            help="Last frame, where the transformer takes one: one for all, or one for each.",
        ),
    ] = None
    other: Annotated[
        Path | None, typer.Option("--other", help="Run or checkpoint of the other expert, where there are two.")
    ] = None

    def folder(self) -> Path:
        """Where the weights are. Raises BadParameter."""
        given = [path for path in (self.checkpoint, self.published) if path is not None]
        if len(given) != 1:
            raise typer.BadParameter("give --checkpoint RUN or --from FOLDER, one of the two.")
        if self.published is not None and not (self.published / "model_index.json").is_file():
            raise typer.BadParameter(
                f"--from {self.published} has no model_index.json; give the folder of a Diffusers pipeline."
            )
        if self.after is not None and self.published is not None:
            raise typer.BadParameter("--after is of a run: give --checkpoint RUN.")
        return given[0]

    def loras(self) -> list[LoraFile]:
        """The files of --lora with their scales. Raises BadParameter where these do not go together."""
        from ops.models.added_lora import LoraFile

        files, scales = self.lora_files or [], self.lora_scales or [1.0]
        if self.lora_scales and len(scales) not in {1, len(files)}:
            raise typer.BadParameter(
                f"--lora-scale is given {len(scales)} times and --lora {len(files)} times; give one scale for all "
                f"files, or one for each."
            )
        if self.lora_scales and not files:
            raise typer.BadParameter("--lora-scale needs --lora FILE.")
        if any(not math.isfinite(scale) for scale in scales):
            raise typer.BadParameter(f"--lora-scale {scales} must be finite numbers.")
        each = scales * len(files) if len(scales) == 1 else scales
        return [LoraFile(path=str(file), scale=scale) for file, scale in zip(files, each, strict=True)]

    def texts(self) -> list[str]:
        """The prompts that were given; none where those of the run are meant. Raises ConfigError, also for options
        of a prompt that are none."""
        from app.settings.prompt_line import PromptLine, named
        from app.settings.prompts import read_prompts

        prompts = self.prompts or []
        for number, prompt in enumerate(prompts):
            PromptLine.of(prompt, named(number, prompt))
        return [*prompts, *(read_prompts(self.prompts_file) if self.prompts_file else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clip:
    """What clips are like, where it is not as the run says."""

    frames: Annotated[int | None, typer.Option(help="Frames of a clip; default: sample.frames.", min=1)] = None
    height: Annotated[int | None, typer.Option(help="Pixels; default: sample.height.", min=1)] = None
    width: Annotated[int | None, typer.Option(help="Pixels; default: sample.width.", min=1)] = None
    steps: Annotated[int | None, typer.Option(help="Steps of the sampler; default: sample.steps.", min=1)] = None
    timesteps: Annotated[
        str | None, typer.Option(help="Instead of --steps: the time of each, falling, with commas; 1000 is pure noise.")
    ] = None
    guidance_scale: Annotated[float | None, typer.Option(help="1 switches it off; default: sample.guidance_scale.")] = (
        None
    )
    guidance_scale_2: Annotated[
        float | None, typer.Option("--guidance-scale-2", help="Of the expert for low noise, where there are two.")
    ] = None
    flow_shift: Annotated[float | None, typer.Option(help="Default: sample.flow_shift, or that of the training.")] = (
        None
    )
    decode_timestep: Annotated[
        float | None, typer.Option(help="Of a decoder that takes a time (LTX-Video from 0.9.1 on): 0 to 1.")
    ] = None
    decode_noise_scale: Annotated[
        float | None, typer.Option(help="Share of noise in the latents that it gets; default: that time.")
    ] = None
    base_num_frames: Annotated[
        int | None,
        typer.Option(help="Of weights for diffusion forcing: frames of a window, of which longer clips have several."),
    ] = None
    overlap_history: Annotated[
        int | None, typer.Option(help="Frames that a window takes over from the one before.")
    ] = None
    addnoise_condition: Annotated[
        float | None, typer.Option(help="Noise on these as the transformer sees them, as a time of 1000; 20 is usual.")
    ] = None
    ar_step: Annotated[
        int | None,
        typer.Option(help="Steps by which a block of frames begins after the one before it; 0: all together."),
    ] = None
    causal_block_size: Annotated[
        int | None, typer.Option(help="Latent frames of a block, which attends to itself and blocks before it.")
    ] = None
    no_forcing: Annotated[
        bool, typer.Option("--no-forcing", help="All frames at once and one noise level, whatever sample.forcing says.")
    ] = False
    negative_prompt: Annotated[str | None, typer.Option(help="Default: sample.negative_prompt.")] = None
    seed: Annotated[int | None, typer.Option(help="Of the noise; default: sample.seed.")] = None
    fps: Annotated[
        float | None, typer.Option(help="Of the files; a transformer that takes a frame rate gets it, too.")
    ] = None

    def check(self) -> None:
        """Raises BadParameter where options do not go together."""
        if self.steps is not None and self.timesteps is not None:
            raise typer.BadParameter("give --steps or --timesteps, one of the two.")
        if self.flow_shift is not None and self.timesteps is not None:
            raise typer.BadParameter("--timesteps are not shifted: leave --flow-shift out.")

    def changes(self) -> ClipChanges:
        """Raises BadParameter for times that are none, and for settings of a forcing that is switched off."""
        from app.sampling.clips import ClipChanges

        times = _times(self.timesteps) if self.timesteps is not None else None
        forced = {name: value for name in _FORCING if (value := getattr(self, name)) is not None}
        if forced and self.no_forcing:
            raise typer.BadParameter(f"give --no-forcing or --{next(iter(forced)).replace('_', '-')}, one of the two.")
        return ClipChanges(
            frames=self.frames,
            height=self.height,
            width=self.width,
            fps=self.fps,
            seed=self.seed,
            steps=self.steps,
            timesteps=times,
            guidance_scale=self.guidance_scale,
            guidance_scale_2=self.guidance_scale_2,
            flow_shift=self.flow_shift,
            negative_prompt=self.negative_prompt,
            decode_timestep=self.decode_timestep,
            decode_noise_scale=self.decode_noise_scale,
            forcing=forced,
            no_forcing=self.no_forcing,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """Which workers make the clips, if not this process."""

    workers: Annotated[
        int | None,
        typer.Option(help="Ray workers that share the prompts; the same command continues what was stopped.", min=1),
    ] = None
    together: Annotated[
        bool, typer.Option("--together", help="With --workers: all make each clip together, for the first one sooner.")
    ] = False
    cluster: Annotated[
        str | None,
        typer.Option(help="With --workers: address of a Ray cluster; default: RAY_ADDRESS, else this machine."),
    ] = None

    def check(self) -> None:
        """Raises BadParameter where options do not go together."""
        if self.workers is None and (self.together or self.cluster):
            raise typer.BadParameter("--together and --cluster need --workers N.")

    def crew(self, out: Path, device: str) -> Crew | None:
        """Makes clips on workers of a Ray that lasts as long; None: this process makes them."""
        workers, together = self.workers, self.together
        if not workers:
            return None

        def make(order: ClipOrder) -> list[Path]:
            from app.run.borrowed_ray import borrowed_ray
            from app.sampling.clip_worker import ClipJob
            from app.sampling.clips import batch_limit
            from app.sampling.spread import check_alike, spread
            from app.sampling.ways import check_together

            if together:
                check_alike(order.prompts, order.settings)
                grid = order.geometry.token_grid(order.settings.frames, order.settings.height, order.settings.width)
                check_together(workers, order.config.model.dit, order.settings.sampler, grid)
            batch = batch_limit(order.settings, order.geometry)
            job = ClipJob.of(order, device)
            with borrowed_ray(self.cluster, workers):
                return spread(job, order.prompts, out, workers, first=order.first, batch=batch, together=together)

        return make


@in_groups
def sample(
    *,
    material: _Material,
    out: Annotated[
        Path | None, typer.Option("--out", help="x.mp4, or a folder; default: RUN/samples, of other folders samples/.")
    ] = None,
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
    clip: _Clip,
    long_prompts: Annotated[
        str | None,
        typer.Option(help="cut or refuse: prompts longer than the encoder takes; default: sample.long_prompts."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    spread: _Spread,
) -> None:
    """Make clips from a checkpoint: MP4s and a contact sheet."""
    from app.sampling.model import chosen_checkpoint, one_checkpoint
    from app.sampling.sample import default_out, run

    folder = material.folder()
    if long_prompts not in (None, *get_args(LongPrompts)):
        raise typer.BadParameter(f"--long-prompts {long_prompts} is none of {', '.join(get_args(LongPrompts))}.")
    clip.check()
    spread.check()
    changes, texts, loras = clip.changes(), material.texts(), material.loras()
    folder = chosen_checkpoint(folder, material.after)
    if out is None:
        folder = one_checkpoint(folder)  # which gives the files their name
        out = default_out(folder, texts, loras)
    run(
        folder,
        texts,
        out,
        changes=changes,
        images=material.images or [],
        last_images=material.last_images or [],
        other=material.other,
        loras=loras,
        ema=ema,
        device=device,
        long_prompts=cast("LongPrompts | None", long_prompts),
        crew=spread.crew(out, device),
    )


def _times(given: str) -> tuple[float, ...]:
    try:
        times = tuple(float(time) for time in given.split(","))
    except ValueError:
        times = ()
    if not times or any(not 0 < after < time for time, after in pairwise((math.inf, *times))):
        raise typer.BadParameter(f"--timesteps {given} must be falling numbers above 0, with commas: 1000,900,500.")
    return times
