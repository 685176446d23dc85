"""Settings of the runtime: workers, planner, snapshots, checkpoints. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.plan.devices import ProductPrecision
from actors.plan.places import (
    AttentionMemory,
    GradientSetting,
    ParameterSetting,
    Places,
    StateSetting,
    gpu_places,
    parameter_places,
)
from actors.plan.registry import StrategyName
from actors.plan.types import Cluster
from data.config import DataConfig
from ops.config import FlowConfig, OptimizerConfig, PictureNoise
from ops.degrees import SequenceSetting, bags_of
from ops.models.config import ModelConfig
from ops.ranges import SECONDS, SEED, above, between, check_numbers

_LEAST_START_S = 600.0  # for a device or file system that is slow to answer
_OWN_BYTES_PER_S = 2.5e7  # that a worker gets of a slow storage
_SHARED_BYTES_PER_S = 1e9  # of a storage that all workers read at the same time
_GRADIENT_BYTES = 4  # per trained weight, whatever the parameters are
_SHARED_GRADIENT_BYTES = 64 << 20  # a smaller one has room on every worker, and is summed in a fixed order there


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    """The elastic pool: one worker per GPU (or per CPU slot)."""

    min: int = 1  # with fewer the run waits
    max: int = 4  # as many as there is room for, up to this
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPUs of the cluster, where PyTorch can use them
    # fill: a node gets workers as long as it has room, then the next, so that bags stay inside nodes; spread: Ray deals
    # them over the nodes.
    placement: Literal["fill", "spread"] = "fill"
    # The nodes as a YAML file describes them (configs/clusters), or NODESxGPUS. What it says of NICs, NVLink, memory
    # nodes and speeds counts instead of what the workers report; a file that does not match them ends the run.
    cluster: str = ""
    cpus_per_worker: float = 1.0  # what Ray reserves for a worker; fractions share a core
    torch_threads: int = 1  # of a worker; what a GPU's worker updates in host memory has its share of the node's cores
    # auto: a GPU's worker runs on the cores of the memory node at which its GPU sits, as far as it may use them. none:
    # the system places it.
    numa_binding: Literal["auto", "none"] = "auto"
    # GiB of each worker's device that the run may use. 0: all of a GPU, and no limit on the CPU, where a number has the
    # tensors of every worker counted.
    memory_gib: float = 0.0
    # Below `min` for longer than this: checkpoint and stop with exit code 75. It does not run while workers load that
    # would make enough, unless storage has kept others from it since one has loaded. A process that is not heard of has
    # three quarters of it while it runs.
    wait_s: float = 300.0
    heartbeat_s: float = 0.5  # seconds between a worker's signs of life
    # A worker that loads its modules for longer hangs, and is given up, as is one whose process is not heard of for so
    # long before. 0: ten minutes, the time in which it reads the weights at 25 MB/s, and that in which all workers read
    # them from a storage of 1 GB/s together.
    start_s: float = 0.0
    # Silent for this long: suspected, then replaced; the actor that hears the workers is started again. Nodes that do
    # not answer each other for this long, though they all answer the run, are not trained on together.
    suspect_s: float = 20.0
    # A worker that waits for another one for longer gives the generation up, as one of them hangs; a death is noticed
    # at once. The limit of a step is `patience_factor` times the seconds that its plan and its end should take, but no
    # less than `collective_timeout_s`, and `first_step_s` more where a worker runs a shape for the first time: it may
    # compile or tune kernels for minutes.
    collective_timeout_s: float = 120.0
    patience_factor: float = 5.0  # see collective_timeout_s
    state_timeout_s: float = 1800.0  # to fetch a worker's part of the state from keepers that live, before a first step
    # In a generation that has not finished a step, a worker that is still busy when the others gave up is left alone
    # for so long: its first steps may compile or tune kernels for minutes, and a new worker would begin that anew.
    first_step_s: float = 900.0
    # From this number of workers on they are called through a relay on each node: a letter with all calls of a step
    # takes the controller as long as one of them. 0: every worker is called by itself.
    relay_from: int = 128
    # a cascade that takes this many times its prediction, and 30 s at least, is reported with its stack
    stall_factor: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"workers.min {self.min} and workers.max {self.max} must satisfy 1 <= min <= max.")
        check_numbers(
            "workers",
            self,
            max=between(1, 1 << 16),
            cpus_per_worker=above(0, 1 << 16),
            torch_threads=between(1, 1024),
            memory_gib=between(0, 1 << 20),
            wait_s=between(0, SECONDS),
            heartbeat_s=above(0, SECONDS),
            start_s=between(0, SECONDS),
            suspect_s=above(0, SECONDS),
            first_step_s=above(0, SECONDS),
            state_timeout_s=above(0, SECONDS),
            collective_timeout_s=above(0, SECONDS),
            patience_factor=between(1, 1e9),
            relay_from=between(0, 1 << 16),
            stall_factor=above(0, 1e9),
        )

    def start_patience_s(self, weights_bytes: int) -> float:
        """How long a worker may load that reads `weights_bytes`."""
        read_s = weights_bytes / _OWN_BYTES_PER_S + self.max * weights_bytes / _SHARED_BYTES_PER_S
        return self.start_s or _LEAST_START_S + read_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """What decides degrees, workers and order of the cascades."""

    # cascade: searches for the plan of least time. The others are published methods to compare it with, or rules: see
    # actors/plan/strategies/
    strategy: StrategyName = "cascade"
    budget_s: float = 0.2  # planning time per step; spent while the previous step runs
    lookahead: int = 1  # how many coming steps may have text and VAE cascades in gaps of this one
    # auto: bags of any degree, also where ranks have to share heads (context parallelism), as priced; ulysses: only
    # degrees that divide the heads.
    sequence: SequenceSetting = "auto"
    degrees: tuple[int, ...] = ()  # allowed DiT degrees; empty: divisors of the heads and, with auto, powers of two
    profile: str | None = None  # measured latencies (JSON); without it costs come from FLOPs and live measurements
    topology: str = ""  # knapsack, knapformer: 16 bags of 1 GPU and 4 of 2 are g1n16+g2n4; empty: chosen by itself
    static_degree: int = 1  # static only: the degree of every cascade of the transformer
    split: bool = True  # a batch may run as several cascades
    # Peers of all bags of a worker together: what is open beyond it is closed. Each takes 0.44 GiB of a GPU
    # (NVIDIA/nccl#1685), eleven of them 4.84; a bag with more peers is planned only where no smaller one is legal.
    # 0: no limit.
    bag_peers: int = 11
    # where the workers cannot follow topology or degrees. adapt: plans follow the nearest that they can; wait: the run
    # waits for other workers, for workers.wait_s at most
    misfit: Literal["adapt", "wait"] = "adapt"

    def __post_init__(self) -> None:
        check_numbers(
            "planner",
            self,
            degrees=between(1, 1 << 16),
            static_degree=between(1, 1 << 16),
            bag_peers=between(0, 1 << 16),
        )
        try:
            if self.topology:
                bags_of(self.topology)
        except ValueError as error:
            raise ValueError(f"planner.{error}") from None
        if self.budget_s > SECONDS or self.lookahead > 64:
            raise ValueError(
                f"planner.budget_s {self.budget_s:g} must be at most {SECONDS:g}, planner.lookahead {self.lookahead} "
                f"at most 64."
            )
        if self.budget_s < 0 or self.lookahead < 0:
            raise ValueError(
                f"planner.budget_s {self.budget_s:g} and planner.lookahead {self.lookahead} must be 0 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotConfig:
    """State of committed steps in host memory: of the nodes of its workers, and copies on others. Without (`enabled`
    false) the state after a loss is that of the last checkpoint."""

    enabled: bool = True  # false: after a loss the run goes back to its last checkpoint
    # Steps from one snapshot to the next; with N, a loss costs up to N - 1 steps, which are computed again. auto: as
    # few as take at most 2 % of the steps' time, by what was measured, and no more than `checkpoint.every`: every step
    # where a snapshot costs less than that.
    every: int | Literal["auto"] = "auto"
    copies: int = 1  # on other nodes; a loss of more nodes at once goes back to the last checkpoint
    # How long a keeper that lives and does not answer is waited for before it counts as lost, and a worker that copies
    # its state for a snapshot.
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.patience_s <= 0:
            raise ValueError(f"snapshot.patience_s is {self.patience_s:g}; it must be larger than 0.")
        if (self.every != "auto" and self.every < 1) or self.copies < 1:
            raise ValueError(
                f"snapshot.every {self.every} and snapshot.copies {self.copies} must be at least 1; "
                f"snapshot.enabled: false switches snapshots off."
            )
        check_numbers("snapshot", self, copies=between(1, 64), patience_s=above(0, SECONDS))
        if self.every != "auto":
            check_numbers("snapshot", self, every=between(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """State on durable storage."""

    every: int = 100  # steps from one checkpoint to the next; 0: only at the end
    keep_last: int = 3  # older ones are deleted; 0: all are kept
    keep_every: int = 0  # also keep the first checkpoint at or after each multiple of this many steps; 0: none of them
    # Of a run with lora_rank: files of the factors for Diffusers and ComfyUI in lora/step-N/ of its folder, from each
    # checkpoint as soon as it is whole, as heddle export --lora-only makes them. The numbers that they hold, or off.
    # They stay when their checkpoint is deleted.
    lora_files: Literal["off", "float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        check_numbers("checkpoint", self, every=between(0), keep_last=between(0), keep_every=between(0))

    def num_kept(self, steps: int) -> int:
        """The most checkpoints that are there at a time in a run of as many steps."""
        written = -(-steps // self.every) if self.every else 1
        if not self.keep_last:
            return written
        multiples = steps // self.keep_every if self.keep_every else 0
        return min(written, self.keep_last + multiples)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainMemoryConfig:
    """Where training keeps what is as large as the model."""

    # own: every worker has a whole fp32 gradient, summed at the end of a step. node: the workers of a node add into
    # one, in memory that CPU workers share, or of which each GPU holds a part. host: GPUs add into one in host memory.
    # auto: on CPUs node from 64 MiB of gradient on; on GPUs node where they have no room for the largest clip else, or
    # host where they cannot reach each other.
    gradients: GradientSetting = "auto"
    # Master weights, moments and EMA of a worker's part. device: beside its weights, with a copy in host memory. host:
    # in host memory alone, where it is updated and is its own snapshot: a GPU holds weights and gradient. Both take two
    # versions of host memory. auto: host where a GPU has no room for the largest clip else.
    state: StateSetting = "auto"
    # replicated: all weights on every worker. node: those of all blocks once in host memory of each node; GPUs copy a
    # block for its forward and again for its backward (`model.dit.gradient_checkpointing`), beside the block before it.
    # Beside LoRA: the frozen ones of blocks. auto: node where a GPU has no room for the largest clip in any other way,
    # and an event says so.
    parameters: ParameterSetting = "auto"
    # With gradient checkpointing: what attention gives. auto: a GPU keeps it for cascades of long clips where it has
    # room beside them: 15 % less time for Wan2.1-1.3B at 480p81 on an H200, and the same bits. kept: always.
    # recomputed: never.
    attention: AttentionMemory = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What is optimized, for how long."""

    steps: int = 1000  # of the whole run, also after a resume
    seed: int = 0  # of weights, noise and the order of the data
    # flat: Heddle's own sharded optimizer; deepspeed: DeepSpeed's ZeRO-1
    sync: Literal["flat", "deepspeed"] = "flat"
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights that compute; masters are float32
    autocast: Literal["none", "bfloat16"] = "none"  # bfloat16: matrix products of float32 weights in it
    # Whether a GPU may multiply what is left in fp32 (a VAE, an image encoder; all of a run in float32) with 10 bits
    # after the point, which is up to eight times as fast. auto: where the run computes in bfloat16. The time embedding
    # and what modulates the blocks never do.
    tf32: Literal["auto", "on", "off"] = "auto"
    # Multiprocessors (CTAs) of a GPU that NCCL may take for the sum of gradients and for sharing parameters, which run
    # beside cascades: fewer leave more to these. 0: as NCCL finds best.
    sum_ctas: int = 0
    # The same of the exchanges of a bag (the workers of one cascade), which run beside its attention: of heads, and of
    # encode results.
    bag_ctas: int = 0
    loss_weight: Literal["sample", "token"] = "sample"  # what counts alike in a step's loss: clips, or their tokens
    max_skipped_steps: int = 10  # of any 1000 steps, skipped for a NaN or infinite gradient norm; more end the run
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    # A run, or one of its checkpoints (runs/A/checkpoints/step-499): step 0 begins with what it has learned, its
    # weights, moments and EMA. Data, schedule and all else are this run's; the transformer is the same.
    init_from: str | None = None
    init_moments: bool = True  # false: of init_from the weights alone; moments and EMA begin anew
    picture_noise: PictureNoise | None = None  # other noise in every step, so latents are not cached
    memory: TrainMemoryConfig = field(default_factory=TrainMemoryConfig)

    def __post_init__(self) -> None:
        check_numbers(
            "train",
            self,
            steps=between(1),
            seed=between(0, SEED),
            max_skipped_steps=between(0),
            sum_ctas=between(0, 64),
            bag_ctas=between(0, 64),
        )
        for name, ctas in (("sum_ctas", self.sum_ctas), ("bag_ctas", self.bag_ctas)):
            if ctas & (ctas - 1):
                raise ValueError(
                    f"train.{name} is {ctas}; NCCL rounds what is no power of two. Set it to 1, 2, 4, 8, 16, 32 or 64, "
                    f"or to 0: as NCCL finds best."
                )
        if self.sync == "deepspeed" and self.sum_ctas:
            raise ValueError(
                f"train.sync deepspeed sums in a group of its own, which train.sum_ctas ({self.sum_ctas}) does not "
                f"reach. Set train.sum_ctas: 0, or train.sync: flat."
            )
        if self.sync == "deepspeed" and self.optimizer.kind == "muon":
            raise ValueError(
                "train.sync deepspeed cuts matrices, which train.optimizer.kind muon needs whole. Set kind to adamw, "
                "or train.sync: flat."
            )
        if self.sync == "deepspeed" and self.optimizer.kind == "prodigy":
            raise ValueError(
                "train.sync deepspeed has AdamW alone, and train.optimizer.kind is prodigy. Set kind to adamw, or "
                "train.sync: flat."
            )
        if self.sync == "deepspeed" and self.parameter_dtype != "float32":
            raise ValueError(
                f"train.sync deepspeed keeps fp32 parameters; train.parameter_dtype is {self.parameter_dtype}. Set it "
                f"to float32 (with train.autocast: bfloat16), or train.sync: flat."
            )
        if self.sync == "deepspeed" and self.memory.gradients in ("node", "host"):
            raise ValueError(
                f"train.sync deepspeed sums each worker's own gradients; train.memory.gradients is "
                f"{self.memory.gradients}. Set it to auto or own, or train.sync: flat."
            )
        if self.sync == "deepspeed" and self.memory.state == "host":
            raise ValueError(
                "train.sync deepspeed keeps optimizer state on the device; train.memory.state is host. Set it to auto "
                "or device, or train.sync: flat."
            )
        if self.sync == "deepspeed" and self.memory.parameters == "node":
            raise ValueError(
                "train.sync deepspeed has all parameters on each worker; train.memory.parameters is node. Set it to "
                "auto or replicated, or train.sync: flat."
            )

    @property
    def allows_tf32(self) -> bool:
        """Whether products of fp32 numbers may be in TF32."""
        if self.tf32 == "auto":
            return "bfloat16" in (self.autocast, self.parameter_dtype)
        return self.tf32 == "on"

    @property
    def products(self) -> ProductPrecision:
        """In what a GPU multiplies the transformer's matrices."""
        if "bfloat16" in (self.autocast, self.parameter_dtype):
            return "bfloat16"
        return "tf32" if self.allows_tf32 else "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of a number that attention gives, and that the transformer's bags send, forward and backward."""
        return 2 if self.products == "bfloat16" else 4

    def places(self, weights: int, device: str, fetchable: bool = False) -> tuple[Places, ...]:
        """Where gradients, state and parameters of a model with `weights` trained weights may lie, with workers on
        `device` (cpu or cuda): what is taken if it fits, the fastest first. `fetchable`: the model's blocks can be
        fetched."""
        if self.sync == "deepspeed":
            return (Places("own", "device"),)
        if device != "cpu":
            held = parameter_places(self.memory.parameters, fetchable)
            return gpu_places(self.memory.gradients, self.memory.state, held)
        gradients, state = self.memory.gradients, self.memory.state
        if gradients == "auto":
            gradients = "node" if weights * _GRADIENT_BYTES >= _SHARED_GRADIENT_BYTES else "own"
        (fetched,) = parameter_places(self.memory.parameters, fetchable=False)  # auto is for GPUs
        return (Places(gradients, "host" if state == "host" else "device", fetched),)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """What the controller needs to know: the run's settings without those of the command line."""

    run_dir: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    workers: WorkersConfig
    planner: PlannerConfig
    snapshot: SnapshotConfig
    checkpoint: CheckpointConfig
    config_yaml: str = ""  # the resolved config, stored with every checkpoint
    cluster: Cluster | None = None  # of `workers.cluster`
