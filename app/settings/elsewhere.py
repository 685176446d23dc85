"""Names of settings that users bring from other trainers: where ours stand, or what is done in place of one."""

from __future__ import annotations

_EPOCHS = (
    "train.steps (steps = epochs x samples / samples of a step; heddle train --dry-run says how often the steps draw "
    "each sample)"
)
_BEFOREHAND = "data.cache.path (a run fills it as it goes, `heddle data cache --config RUN.yaml` beforehand)"
_FROM_CACHE = "data.cache.only (after `heddle data cache --config RUN.yaml`, which fills data.cache.path)"
_REPEATS = "data.sources (weight of each, a share of the draws; how often all are drawn follows from train.steps)"
_THEIRS = {  # ours, and what others call it
    "model.dit.path": "pretrained_model_name_or_path model_path model_paths model_name name_or_path ckpt_path",
    "model.dit.path (a folder: nothing is downloaded)": "model_id_with_origin_paths",
    "model.dit.path (base: a preset of configs/models/ goes with it)": "task",
    "run.dir": "output_dir output_path save outputs",
    "run.name": "run_name output_name tracker_name wandb_run_name wandb_name",
    "the command line option --resume": "resume_from_checkpoint resume resume_from",
    "train.init_from": "load finetune start_from_scratch",
    "train.init_moments": "no_load_optim",
    "checkpoint.every": (
        "checkpointing_steps training_state_checkpointing_steps ckpt_every save_steps save_interval save_every "
        "save_every_n_steps"
    ),
    "checkpoint.every (a checkpoint is the whole state)": "save_state",
    "checkpoint.every (in steps)": "save_every_n_epochs checkpoint_every_n_minutes",
    "checkpoint.keep_last": "checkpoints_total_limit keep_n_latest checkpointing_limit max_step_saves_to_keep",
    "train.steps": "max_train_steps max_steps num_steps steps train_steps train_iters",
    "train.memory.parameters": "blocks_to_swap offload_param",
    "train.memory.state": "offload_optimizer",
    "train.sync": "deepspeed deepspeed_config",
    _EPOCHS: "num_epochs max_train_epochs num_train_epochs max_epochs epochs",
    "train.optimizer.learning_rate": "lr learning_rate unet_lr",
    "train.optimizer.kind": "optimizer_type optimizer_name use_muon optim",
    "train.optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "train.optimizer.adam_eps": "epsilon adam_eps eps",
    "train.optimizer.lr_scheduler": "lr_scheduler lr_decay_style",
    "train.optimizer.lr_min_ratio (a share of learning_rate)": "min_lr",
    "train.optimizer.lr_warmup_steps": "lr_warmup_steps warmup_steps lr_warmup_iters lr_warmup_fraction",
    "train.optimizer.lr_decay_steps": "lr_decay_iters lr_wsd_decay_iters num_decay_steps",
    "train.optimizer.max_grad_norm": "max_grad_norm grad_clip gradient_clipping clip_grad",
    "train.optimizer.weight_decay": "weight_decay",
    "train.optimizer.ema_decay": "ema_decay use_ema",
    "train.optimizer (betas, adam_eps and weight_decay; of Prodigy train.optimizer.prodigy)": "optimizer_args",
    "train.optimizer.prodigy.use_bias_correction": "bias_correction",
    "train.autocast": "mixed_precision dtype",
    "train.autocast (or train.parameter_dtype, with masters in fp32)": "bf16",
    "train.tf32": "allow_tf32",
    "train.seed": "seed",
    "model.dit.gradient_checkpointing": (
        "gradient_checkpointing use_gradient_checkpointing activation_checkpointing activation_checkpointing_mode "
        "recompute_activations recompute_granularity recompute_method grad_checkpoint "
        "use_gradient_checkpointing_offload"
    ),
    "model.dit.compile": "compile",
    "model.dit.attention": "attn_mode attn_provider flash_attn sdpa split_attn xformers",
    "model.vae.tiling": "vae_tiling enable_tiling",
    "model.vae.dtype": "vae_dtype",
    "model.vae.path": "vae_path",
    "model.text.path": "text_encoder text_encoder_path t5_path t5 llm_path",
    "model.text.max_length": "max_sequence_length",
    "checkpoint.lora_files (of heddle export the option --dtype)": "save_precision save_dtype",
    "model.dit.lora_rank": "lora_rank rank adapter network_module lora_base_model linear network_dim",
    "model.dit.lora_rank (0: in full)": "training_type",
    "model.dit.lora_alpha": "lora_alpha network_alpha linear_alpha",
    "model.dit.lora_targets": "network_args lora_target_modules target_modules",
    "model.dit.lora_from": "network_weights lora_checkpoint preset_lora_path init_from_existing",
    "model.dit.lora_dora": "use_dora",
    "model.dit.frozen_dtype": "fp8_base fp8_scaled fp8_models fp8 quantize transformer_dtype",
    "model.text.place": "fp8_t5 fp8_llm",
    "model.dit.train_only": "trainable_modules trainable_params trainable_models",
    "data.buckets": "bucket_config",
    "data.buckets.resolutions": "resolution",
    "data.buckets.resolutions (data.limits.max_pixels is a guard against broken files)": "max_pixels",
    "data.buckets.table": "height width video_resolution_buckets",
    "data.buckets.frames": "target_frames frame_buckets",
    "data.buckets.ratios": "enable_bucket enable_ar_bucket min_ar max_ar num_ar_buckets",
    "data.buckets.undersize": "bucket_no_upscale",
    "data.fps": "source_fps target_fps",
    "data.fps (of clips; that of samples is sample.fps)": "fps",
    "data.sources": (
        "dataset data_path dataset_config data_root folder_path dataset_base_path dataset_metadata_path "
        "video_directory video_jsonl_file image_directory image_jsonl_file data_file_keys"
    ),
    _REPEATS: "num_repeats dataset_repeat repeats",
    "data.sources (caption of each)": "caption_ext caption_extension caption_column",
    "data.sources (caption_prefix of each)": "caption_prefix trigger_word id_token",
    "data.sources (default_caption of each)": "default_caption class_tokens instance_prompt skip_empty_caption",
    "data.sources (loss_weight of each)": "prior_loss_weight",
    "data.cache.path": "cache_directory cached_video cached_text precomputation_dir",
    _BEFOREHAND: (
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
        "enable_precomputation"
    ),
    _FROM_CACHE: "cache_only precomputation_once",
    "data.batch": (
        "batch_size train_batch_size micro_batch_size_per_gpu train_micro_batch_size_per_gpu micro_batch_size"
    ),
    "data.items_per_step (batches of a step, on however many workers; data.batch sizes each)": "global_batch_size",
    "data.items_per_step": "gradient_accumulation_steps",
    "train.flow.flow_shift": "flow_shift discrete_flow_shift train_timestep_shift shift",
    "sample.flow_shift": "validation_timestep_shift sample_shift",
    "train.flow.min_timestep (a time of num_train_timesteps: 0.875 is 875)": "min_t",
    "train.flow.max_timestep (a time of num_train_timesteps: 0.875 is 875)": "max_t",
    "model.dit.expert (of two; other cuts are train.flow.min_timestep and max_timestep)": (
        "min_timestep_boundary max_timestep_boundary"
    ),
    "train.flow.weighting_scheme": "timestep_sampling timestep_sample_method weighting_scheme flow_weighting_scheme",
    "train.flow.mode_scale": "mode_scale flow_mode_scale",
    "train.flow.logit_std": "sigmoid_scale flow_logit_std",
    "train.flow.logit_mean": "flow_logit_mean",
    "data.caption_dropout": "training_cfg_rate caption_dropout_rate caption_dropout_p",
    "sample.prompts": "validation_prompts",
    "sample.prompts (a list, or a text file whose lines may have --w, --h, --f and the like)": "sample_prompts",
    "sample.every": "validation_steps sample_every_n_steps sample_every",
    "sample.first": "sample_at_first",
    "sample.every (in steps)": "sample_every_n_epochs",
    "validation.every (in steps)": "eval_every_n_epochs",
    "validation.every": "eval_every_n_steps eval_interval",
    "validation.first": "eval_before_first_step",
    "validation.clips (and validation.draws)": "eval_iters",
    "validation.sources (planner.split is whether a batch may run in parts)": "split",
    "validation.sources": "validation_dataset_file",
    "sample.steps": "num_inference_steps",
    "sample.guidance_scale": "guidance_scale",
    "model.dit.trained_guidance": "embedded_cfg_scale embedded_guidance flux_guidance_value",
    "sample.frames": "num_frames",
    "planner.degrees": "sp_size context_parallel_size sequence_parallel ulysses_size ulysses_degree cp_degree",
    "planner.degrees (which by planner.sequence auto need not divide the heads)": "ring_degree ring_size",
    "workers.max (that decode: data.engine.decode_workers)": "num_workers",
    "data.engine.decode_workers": "dataset_num_workers dataloader_num_workers max_data_loader_n_workers",
    "workers.max": "dp_degree nproc_per_node num_gpus num_processes world_size",
    "track": "report_to log_with use_wandb enable_wandb wandb logging_dir",
    "track (wandb, which takes WANDB_PROJECT from the environment)": (
        "wandb_project tracker_project_name log_tracker_name wandb_tracker_name"
    ),
    "track (wandb, which takes WANDB_ENTITY from the environment)": "wandb_entity",
}
ELSEWHERE = {name: ours for ours, theirs in _THEIRS.items() for name in theirs.split()}

_SHARDED = (
    "every worker has batches of its own, and the optimizer's state is always sharded over all workers; where weights "
    "lie is train.memory.parameters."
)
_EVERY_STEP = "every step is logged: it has a line in the metrics of its run (below run.dir), and a point in curves."
_OTHERWISE = {  # names, and what is done in place of them
    "is_reg": (
        "a set of regularisation is an entry of data.sources with a loss_weight, 1 as the others or below; its weight "
        "says how many of its samples are drawn."
    ),
    "tp_size tp_degree tensor_parallel_size tensor_model_parallel_size pipeline_stages pp_degree "
    "pipeline_model_parallel_size": (
        "layers and their matrices are not split over GPUs: a clip is, by its tokens (planner.degrees), and weights "
        "that fit no GPU lie once in each node's memory (train.memory.parameters)."
    ),
    "dp_shard dp_replicate dp_shards zero_stage zero_optimization use_distributed_optimizer fsdp": _SHARDED,
    "log_interval logging_steps steps_per_print": _EVERY_STEP,
    "fp16": (
        "nothing is trained in fp16, whose small gradients need a loss scale; bfloat16 is train.autocast, or "
        "train.parameter_dtype."
    ),
    "decouple": "weight decay is always decoupled, and train.optimizer.weight_decay says how much.",
    "beta3": "that of Prodigy is the square root of the second of train.optimizer.betas.",
    "slice_p": (
        "Prodigy's sums are of all weights; its state is sharded over all workers, and lies in host memory where a GPU "
        "has no room for it (train.memory.state)."
    ),
    "text_encoder_lr": "text encoders are frozen; train.optimizer.learning_rate is that of the transformer.",
    "lora_dropout network_dropout": "LoRA is trained without dropout; captions are dropped by data.caption_dropout.",
    "frame_extraction frame_sample frame_stride video_clip_mode": (
        "of a longer clip each draw takes successive frames, from its first one (data.start_frame fixed, as head or "
        "single_beginning), from any (random, the default), or from one of as many parts, spread evenly over the clip, "
        "as data.start_frame says (uniform, chunk, slide, multiple_overlapping); frames that lie further apart come by "
        "a lower data.fps."
    ),
    "framewise_flow_shift": (
        "the shift is that of a clip: train.flow.flow_shift, or by its tokens, and so its frames, "
        "train.flow.token_shift; a noise level for each frame is train.flow.frame_levels."
    ),
    "preserve_distribution_shape": (
        "levels between train.flow.min_timestep and train.flow.max_timestep always keep the form of their density."
    ),
}
DONE_OTHERWISE = {name: sentence for names, sentence in _OTHERWISE.items() for name in names.split()}
"""Names of settings that have none here, and what is done instead."""

VALUES = {
    "train.optimizer.kind": (
        "Optimizers with small states (in 8 bits, Lion, Adafactor, CAME) save memory that is not short here: AdamW's "
        "is sharded over all workers, and lies in host memory where a GPU has no room for it (train.memory.state). "
        "One that finds its own rate is prodigy (D-Adaptation is what came before it). In place of one without a "
        "schedule (schedule-free) give train.optimizer.lr_scheduler."
    ),
}
"""Settings with values that are not taken, and why they are not needed."""

_BY_PRESET = "the model of a run is the preset under its base: (configs/models/), with its folder as model.dit.path."
IN_FILES = {
    "optimizer": "train.optimizer.kind",
    "dit": "model.dit.path",
    "vae": "model.vae.path",
    "text_encoder1": "model.text.path",
    "text_encoder2": "model.text.path",
    "clip": "model.image.path",
    "from_pretrained": "model.dit.path",
    "pretrained": "model.dit.path",
    "model_type": _BY_PRESET,
    "model_version": _BY_PRESET,
    "flash3": "model.dit.attention",
    "sage_attn": "model.dit.attention",
    "enable_flash_attn": "model.dit.attention",
    "use_flash_attn": "model.dit.attention",
    "adapter_type": "model.dit.lora_rank",
    "network_type": "model.dit.lora_rank",
    "persistent_data_loader_workers": "data.engine (decoding goes on beside the run)",
    "plugin": _SHARDED,
    "log_every": _EVERY_STEP,
    "zero_optimization_stage": _SHARDED,
    "offload_optimizer_device": "train.memory.state",
    "offload_param_device": "train.memory.parameters",
    "adam_epsilon": "train.optimizer.adam_eps",
    "recompute_num_layers": "model.dit.gradient_checkpointing (and train.memory.attention)",
    "nnodes": "workers.max",
}
"""The same of names that only whole files of other trainers bring; a run file has them elsewhere, or not at all."""

WORDS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "gpu": "cuda",
    "cpu": "host",
    "wds": "webdataset",
    "sigmoid": "logit_normal",
    "constant_with_warmup": "constant",
    "adamw_optimi": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
}
"""Values as other programs write them, and ours, for every setting that takes it."""
