"""A worker's memory before a worker exists: what its states take, and what is left for cascades.

The sizes come from `actors.planning.forecasts`, what has to fit beside them from `actors.planning.demand`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors.config import TrainConfig
from actors.plan.costs.needs import Needs
from actors.plan.places import BESIDE, Places
from actors.plan.types import USABLE
from ops.shards import EDGE, STAGE, held_elements, padding, shard_bounds
from ops.units import GIB
from ops.update.node_routes import peers
from ops.update_room import pinned_gib

CONTEXT_GIB = 2.0  # CUDA's context, cuBLAS, cuDNN, and the communicator of all workers, without its all-to-alls
BARE_CONTEXT_GIB = 0.5  # what of CONTEXT_GIB is there when weights have been read and nothing has been computed
PEER_GIB = 0.44  # of an NCCL communicator for each peer, once it has run an all-to-all (NVIDIA/nccl#1685, 8 x H100)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """GiB that a worker holds when nothing runs."""

    weights: float
    gradient: float
    optimizer: float  # its part of master, moments and average
    vae: float
    text: float
    image: float
    graphs: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradient + self.optimizer + self.vae + self.text + self.image + self.graphs

    def describe(self) -> str:
        """The parts in words, for a person."""
        return (
            f"weights {self.weights:.2f}, gradient {self.gradient:.2f}, optimizer {self.optimizer:.2f}, "
            f"VAE {self.vae:.2f}, text encoder {self.text:.2f}"
            + (f", image encoder {self.image:.2f}" if self.image else "")
            + (f", CUDA graphs {self.graphs:.2f}" if self.graphs else "")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """What a model's workers need: all counted in weights, so that any number of workers is only arithmetic."""

    parameters: int
    trained: int
    parameter_bytes: int  # of one parameter; of frozen ones in 8 bits what it would be
    state_bytes: int  # of one trained weight, over all workers
    deepspeed: bool = False
    vae_gib: float = 0.0
    text_gib: float = 0.0
    image_gib: float = 0.0
    needs: Needs = field(default_factory=Needs)
    cuda: bool = True
    places: Places = BESIDE
    per_node: int = 8  # workers that a node has room for: it is filled before the next one gets any
    vae_dtype: str = "float32"  # what the VAE computes in there
    host_encoders_gib: float = 0.0  # of each node's memory, for all of its GPUs
    host_uploads_gib: float = 0.0  # of its node's memory for what each worker sends to its GPU
    largest_parameter: int = 0  # weights of the largest that is trained
    spared_bytes: int = 0  # by frozen weights in 8 bits
    in_blocks: int = 0  # bytes of weights of blocks, if they can be fetched; else 0. Beside LoRA the frozen ones alone
    largest_block: int = 0  # bytes of the buffer into which the largest of these blocks is fetched
    frozen_blocks: bool = False  # what can be fetched is frozen; what is trained lies on the device
    graphs_gib: float = 0.0  # of CUDA graphs of small passes, which a GPU has where it has room for them
    has_graphs: bool = False

    def possible(self, train: TrainConfig, per_node: int) -> list[MemoryForecast]:
        """Forecasts with gradients, state and parameters in each of the places that the settings allow, the fastest
        first."""
        places = train.places(self.trained, "cuda" if self.cuda else "cpu", fetchable=self.in_blocks > 0)
        return [replace(self, places=one, per_node=per_node) for one in places]

    def states(self, workers: int, here: int = 0) -> StateSizes:
        """What the fullest of `workers` workers has on its device. The flat engine: parameters, an fp32 gradient, a
        shard of the state (ZeRO-1); what lies in memory of its node is in `actors.state.hosts`. `here` are on that
        node; 0: as many as on the smallest one, where a device holds the most of its node's gradient."""
        # In fp32 the own range of the parameters is the master copy, where the state lies beside it: on the device.
        is_master = self.parameter_bytes >= 4 and not self.deepspeed and not self._fetches_trained and self.cuda
        shard = self.state_bytes - (4 if is_master else 0)
        largest = max(hi - lo for lo, hi in shard_bounds(self.trained, workers))
        return StateSizes(
            weights=self._weight_bytes() / GIB,
            gradient=self._gradient_bytes(workers, largest, here or min(self.nodes(workers))) / GIB,
            optimizer=0.0 if self.cuda and self.places.state == "host" else largest * shard / GIB,
            vae=self.vae_gib,
            text=self.text_gib,
            image=self.image_gib,
            graphs=self.graphs_gib if self.has_graphs else 0.0,
        )

    def nodes(self, workers: int) -> tuple[int, ...]:
        """Workers of each node."""
        full, rest = divmod(workers, self.per_node)
        return (*[self.per_node] * full, *([rest] if rest else []))

    @property
    def exchanges(self) -> bool:
        """Whether at the end of a step ranks of different nodes send each other gradients or parameters by all-to-alls
        of the communicator of all workers."""
        return self.cuda and not self.deepspeed and (self.places.gradients != "own" or self._fetches_trained)

    def exchange_gib(self, workers: int) -> float:
        """GiB of a GPU that its peers of other nodes take in that communicator."""
        numbers = [number for number, count in enumerate(self.nodes(workers)) for _ in range(count)]
        return PEER_GIB * max(peers(numbers)) if self.exchanges else 0.0

    @property
    def fetches(self) -> bool:
        """Blocks are fetched from host memory of their node. (A CPU computes with it: its workers map all of it.)"""
        return self.cuda and self.places.parameters == "node"

    @property
    def _fetches_trained(self) -> bool:
        return self.fetches and not self.frozen_blocks

    def _weight_bytes(self) -> int:
        """Bytes of the transformer's weights, on the device."""
        if self._fetches_trained:
            return self.parameters * self.parameter_bytes - self.in_blocks + 2 * self.largest_block
        fetched = self.in_blocks - 2 * self.largest_block if self.fetches else 0
        return self._all_weight_bytes - fetched

    @property
    def _all_weight_bytes(self) -> int:
        flat = self.trained * 4 if self.deepspeed else (self.trained + padding(self.trained)) * self.parameter_bytes
        return (self.parameters - self.trained) * self.parameter_bytes - self.spared_bytes + flat

    def _gradient_bytes(self, workers: int, largest: int, here: int) -> int:
        """Bytes of the gradient on the device of a worker, one of `here` on its node. `largest`: elements of the
        largest range of a worker."""
        if self.deepspeed:  # fp32 parameters, reduced in one bucket of their size
            return 8 * self.trained
        if self.places.gradients == "own":
            return self._own_gradient_bytes
        if not self.cuda:  # each of a node's workers maps all of it
            return 4 * self.trained
        if self.places.gradients == "host":
            return 0
        staged = 2 * (STAGE + 2 * EDGE) * self.parameter_bytes
        edges = EDGE * (-(-workers // here) + 1)  # of each range, and after the last one
        return 4 * (held_elements(self.trained, largest, workers, here) + edges) + staged

    @property
    def _own_gradient_bytes(self) -> int:
        return 4 * (self.trained + padding(self.trained))

    @property
    def host_weights_gib(self) -> float:
        """GiB of each node's host memory that hold the parameters."""
        if not self.fetches:
            return 0.0
        return (self.in_blocks if self.frozen_blocks else self.trained * self.parameter_bytes) / GIB

    @property
    def host_pinned_gib(self) -> float:
        """GiB of its node's memory through which each worker's gradients and updates go to its GPU and come from it."""
        if not self.cuda or self.deepspeed:
            return 0.0
        return pinned_gib(
            self.trained,
            self.largest_parameter,
            self.parameter_bytes,
            host_gradients=self.places.gradients == "host",
            host_state=self.places.state == "host",
            host_parameters=self._fetches_trained,
        )

    @property
    def loaded_gib(self) -> float:
        """GiB of a device that a worker takes before its first generation: weights are read to the device, also trained
        ones that go to host memory from there, and a gradient of its own is there, too."""
        weights = self.parameters * self.parameter_bytes if self._fetches_trained else self._weight_bytes()
        own = self.places.gradients == "own" and not self.deepspeed
        gradient = self._own_gradient_bytes if own else 0
        return (weights + gradient) / GIB + self.vae_gib + self.text_gib + self.image_gib

    @property
    def state_gib(self) -> float:
        """GiB of the training state, of all workers together."""
        return self.trained * self.state_bytes / GIB

    def room_gib(self, memory_gib: float, workers: int, bags_gib: float) -> float:
        """GiB that a cascade may take on a device of `memory_gib`, on a GPU beside `bags_gib` for communicators of
        bags; negative where the states do not fit."""
        other = CONTEXT_GIB + bags_gib + self.exchange_gib(workers) if self.cuda else 0.0
        usable = USABLE * (memory_gib - other)
        room = usable - self.states(workers).total
        return min(room, usable - self.loaded_gib) if usable < self.loaded_gib else room


def communicators_gib(degrees: Sequence[int], workers: int, bag_peers: int) -> float:
    """GiB of a GPU that the communicators of its bags take at most: with `bag_peers` peers (0: no limit) of all bags
    that these degrees allow. A larger bag, which is planned where no smaller one is legal, is open alone."""
    bags = [degree for degree in degrees if 1 < degree <= workers]
    all_peers = sum(math.comb(workers - 1, degree - 1) * (degree - 1) for degree in bags)
    legal = [degree for degree in bags if not bag_peers or degree <= bag_peers + 1]
    most = max(bag_peers, 0 if legal else min(bags, default=1) - 1)
    return PEER_GIB * (min(most, all_peers) if bag_peers else all_peers)
