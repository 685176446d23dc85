"""What loading takes of host memory: the weights once, in the dtype that is trained, and one tensor beside them."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config

from actors.config import TrainConfig, WorkersConfig
from actors.messages import WorkerSettings
from actors.worker.loading import build_modules
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_json
from ops.models.load import dit_skeleton
from ops.models.text import t5_skeleton
from ops.models.wan.config import WanConfig
from tests.ops.weights_holder import shared_kib

WAN_14B = WanConfig(  # configs/models/wan2.1-14b.yaml
    num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, freq_dim=256, text_dim=4096, gradient_checkpointing=True
)
SMALL = replace(WAN_14B, num_layers=3, num_heads=8, ffn_dim=4096, text_dim=64)
GIB = 2**30


def sparse_folder(folder: Path, config: WanConfig) -> int:
    """The transformer of a pipeline in bf16. Returns the bytes of its weights."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(dit_json(config)))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    return sparse_file(file, dit_skeleton(config).state_dict())


def sparse_file(path: Path, state: Mapping[str, torch.Tensor]) -> int:
    """Weights in bf16 as a header and a hole: as long as the real file, and without room on the disk."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in state.items():
        size = 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def anonymous_bytes() -> int:
    """Resident memory of this process that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def load(folder: str, config: WanConfig, answers: Connection) -> None:
    """In a process of its own: the peak of anonymous memory above what was there before, and seconds."""
    torch.set_num_threads(1)
    model = ModelConfig(
        dit=replace(config, path=folder),
        vae=VAEConfig(channels=16),
        text=TextConfig(d_model=config.text_dim, num_layers=1, num_heads=1),
    )
    train = TrainConfig(parameter_dtype="bfloat16", autocast="bfloat16")
    settings = WorkerSettings(model=model, train=train, workers=WorkersConfig(), cached=("text", "vae"))
    # loaded first, so that what libraries import and keep is no part of the figure
    build_modules(replace(settings, model=replace(model, dit=WanConfig(path=f"{folder}/tiny"))), torch.device("cpu"))
    before, peak, over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            peak[0] = max(peak[0], anonymous_bytes() - before)
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.perf_counter()
    modules = build_modules(settings, torch.device("cpu"))
    seconds = time.perf_counter() - started
    over.set()
    watching.join()
    assert next(modules.dit.parameters()).dtype == torch.bfloat16
    answers.send((max(peak[0], anonymous_bytes() - before), seconds))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        # half of Wan2.1-14B's blocks and more take more memory than test machines have to spare
        pytest.param(replace(WAN_14B, num_layers=10), marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
    ids=["0.1 GiB", "a quarter of Wan2.1-14B"],
)
def test_a_worker_that_loads_takes_a_tenth_more_than_its_weights(config: WanConfig, tmp_path: Path) -> None:
    num_bytes = sparse_folder(tmp_path, config)
    sparse_folder(tmp_path / "tiny", replace(SMALL, num_layers=1, num_heads=1, ffn_dim=64, text_dim=config.text_dim))
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=load, args=(str(tmp_path), config, theirs), daemon=True)
    process.start()
    assert mine.poll(800), "it does not load"
    peak, seconds = mine.recv()
    process.join()
    print(f"{num_bytes / GIB:.2f} GiB of weights: {peak / GIB:.2f} GiB at the peak, {seconds:.1f} s")
    assert 0.98 * num_bytes <= peak <= 1.1 * num_bytes


def keep_loaded(settings: WorkerSettings, answers: Connection) -> None:
    """A worker of a CPU as far as its modules go. What it compares with others reads all weights."""
    modules = build_modules(settings, torch.device("cpu"))
    answers.send(dict(modules.digests()))
    time.sleep(3600)


@pytest.mark.long
def test_two_workers_of_a_node_have_a_text_encoder_once(tmp_path: Path) -> None:
    text = TextConfig(path=str(tmp_path), d_model=512)
    (tmp_path / "text_encoder").mkdir()
    T5Config(vocab_size=384, d_model=512, d_kv=64, d_ff=2048, num_layers=4, num_heads=8).save_pretrained(
        tmp_path / "text_encoder"
    )
    with torch.device("meta"):
        weights = dict(t5_skeleton(text).named_parameters())
    sparse_file(tmp_path / "text_encoder" / "model.safetensors", weights)
    ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = ModelConfig(dit=WanConfig(num_layers=1), vae=VAEConfig(channels=16), text=text)
    settings = WorkerSettings(model=model, train=TrainConfig(), workers=WorkersConfig())
    context = multiprocessing.get_context("forkserver")
    workers, told = [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        workers.append(context.Process(target=keep_loaded, args=(settings, theirs), daemon=True))
        workers[-1].start()
        told.append(mine)
    digests = []
    for one in told:
        assert one.poll(300), "it does not load"
        digests.append(one.recv())
    shares = [shared_kib(worker.pid or 0) for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    assert digests[0] == digests[1] and list(digests[0]) == ["model.text.path"]
    wanted = 4 * sum(weight.numel() for weight in weights.values()) / 1024
    assert [resident for resident, _ in shares] == pytest.approx([wanted] * 2, rel=0.02)
    assert sum(share for _, share in shares) == pytest.approx(wanted, rel=0.02)
