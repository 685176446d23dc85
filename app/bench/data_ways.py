"""What `heddle bench data` compares, one way per process: python -m app.bench.data_ways WAY ROOT BUCKET BATCH CLIPS"""

from __future__ import annotations

import io
import itertools
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from app.bench.data import DECODERS, FIRST, INDEXERS, MEMORY, Cost, timed
from app.bench.tree import Tree
from data.config import BatchConfig, BucketsConfig, DataConfig, EngineConfig, LimitsConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.decode import SCALING, SOON, covering, decode_job, decode_video
from data.engines.blocks import as_batch
from data.engines.engine import Engine
from data.types import Clip, DecodeJob
from ops.geometry import Geometry

T = TypeVar("T")

WORKERS = 2
ITEMS = 2  # per step
WARM_STEPS = 1
ENGINE_EPOCHS = 2
SETTLED_SHARE = 0.25  # of a core: below this over a second, nothing is being decoded
MEASURES = 10  # readings of the memory while many clips go by


@dataclass(frozen=True, slots=True)
class Setting:
    """What each way of loading has to load."""

    root: Path
    bucket: str
    batch: int
    clips: int  # 0: each once


def config(setting: Setting) -> DataConfig:
    source = SourceConfig(path=str(setting.root / "shards"), index=str(setting.root / "index"))
    engine = EngineConfig(decode_workers=WORKERS, decode_cpus=0.5, object_store_mb=512)
    return DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=(setting.bucket,)),
        items_per_step=ITEMS,
        engine=engine,
        batch=BatchConfig(memory_tokens=1e9, max_batch=setting.batch),
        caption_dropout=0.0,
        fps=16.0,
        start_frame="fixed",
    )


def dataset(setting: Setting) -> Dataset:
    return Dataset.open(config(setting), Geometry(), seed=0)


def steps_of(data: Dataset) -> int:
    """The number of steps that draw each clip about once; clips that wait for their bucket to fill are left out."""
    return data.ledger.planned // (next(iter(data.batch_sizes().values())) * ITEMS)


def jobs(data: Dataset) -> Iterator[DecodeJob]:
    for step in range(WARM_STEPS, WARM_STEPS + steps_of(data)):
        for item in data.step(step).items:
            yield item.job


def plain(setting: Setting) -> Cost:
    return _spread(list(jobs(dataset(setting))), decode_plainly)


def everything(setting: Setting) -> Cost:
    """Every frame at full size as RGB, then the wanted ones resized: how Open-Sora reads a video."""
    work = list(jobs(dataset(setting)))
    return _spread(work[: max(len(work) // 4, WORKERS)], decode_everything)


def _spread(work: list[DecodeJob], decode: Callable[[list[DecodeJob]], int]) -> Cost:
    """The cost of decoding jobs in WORKERS processes that have started and warmed up."""
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(decode, [work[:1]] * WORKERS))
        return timed(lambda: sum(pool.map(decode, [work[number::WORKERS] for number in range(WORKERS)])))


def decode_plainly(work: list[DecodeJob]) -> int:
    """The plain loop: read, decode up to the last wanted frame, scale and cut each wanted one, stack."""
    scaler = VideoReformatter()
    for job in work:
        for clip in job.clips:
            wanted = _wanted(clip, job)
            with _opened(clip) as container:
                decoded = itertools.islice(container.decode(_one_thread(container)), wanted[-1] + 1)
                frames = {n: _scaled(frame, job, scaler) for n, frame in enumerate(decoded) if n in wanted}
            np.stack([frames[n] for n in wanted])
    return sum(len(job.clips) for job in work)


def _wanted(clip: Clip, job: DecodeJob) -> list[int]:
    """Numbers of the frames nearest to the times of the bucket's frames."""
    step = clip.fps / job.fps
    return [clip.start_frame + int(k * step + SOON * min(step, 1)) for k in range(job.bucket.frames)]


def _opened(clip: Clip) -> InputContainer:
    with open(clip.media, "rb") as shard:
        shard.seek(clip.offset)
        return av.open(io.BytesIO(shard.read(clip.size)), mode="r")


def _one_thread(container: InputContainer) -> VideoStream:
    stream = container.streams.video[0]
    stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
    return stream


def _scaled(frame: av.VideoFrame, job: DecodeJob, scaler: VideoReformatter) -> np.ndarray:
    height, width = covering(frame.height, frame.width, job.bucket.height, job.bucket.width, crop=False)
    scaled = scaler.reformat(frame, width=width, height=height, format="rgb24", interpolation=SCALING, threads=1)
    top, left = (height - job.bucket.height) // 2, (width - job.bucket.width) // 2
    return scaled.to_ndarray()[top : top + job.bucket.height, left : left + job.bucket.width]


def decode_everything(work: list[DecodeJob]) -> int:
    for job in work:
        for clip in job.clips:
            with _opened(clip) as container:
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(_one_thread(container))]
            _resize(np.stack(frames)[_wanted(clip, job)], job)
    return sum(len(job.clips) for job in work)


def _resize(frames: np.ndarray, job: DecodeJob) -> np.ndarray:
    import torch

    torch.set_num_threads(1)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2).float()
    size = (job.bucket.height, job.bucket.width)
    return torch.nn.functional.interpolate(video, size=size, mode="bilinear", antialias=True).byte().numpy()


def webdataset_loader(setting: Setting) -> Cost:
    """WebLoader over the shards with the same decoder on each sample's bytes, in shard order (it has no plan)."""
    import webdataset

    data = dataset(setting)
    job = data.step(0).items[0].job
    decode = WebDecode(job)
    shards = sorted(str(path) for path in (setting.root / "shards").glob("*.tar"))
    source = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None, empty_check=False).map(decode)
    loader = webdataset.WebLoader(source, batch_size=None, num_workers=WORKERS)
    return timed(lambda: sum(1 for _ in loader))


class WebDecode:
    """Decodes the bytes of a sample as the first clip of a job: its frames, its size."""

    def __init__(self, job: DecodeJob) -> None:
        self.job = job

    def __call__(self, sample: Mapping[str, object]) -> tuple[np.ndarray, str]:
        text = sample["txt"]  # bytes from webdataset, text from Ray
        pixels = np.empty(self.job.shape[1:], np.uint8)
        media = sample["mp4"]
        assert isinstance(media, bytes)
        return decode_video(io.BytesIO(media), self.job.clips[0], self.job, pixels), str(text)


class PlanDataset:
    """The plan's jobs as a map-style dataset."""

    def __init__(self, work: list[DecodeJob]) -> None:
        self.work = work

    def __len__(self) -> int:
        return len(self.work)

    def __getitem__(self, index: int) -> np.ndarray:
        return decode_job(self.work[index]).video


def torch_loader(setting: Setting) -> Cost:
    import torch

    torch.set_num_threads(1)
    work = list(jobs(dataset(setting)))
    loader: Iterable[np.ndarray] = torch.utils.data.DataLoader(PlanDataset(work), batch_size=None, num_workers=WORKERS)  # type: ignore[arg-type]
    return timed(lambda: sum(len(video) for video in loader))


def pool(setting: Setting) -> Cost:
    from data.engines.processes import PoolEngine

    data = dataset(setting)
    return _engine(PoolEngine(data), data)


def ray_data(setting: Setting) -> Cost:
    import ray

    from data.engines.ray_data import RayEngine

    _init_ray()
    data = dataset(setting)
    cost = _engine(RayEngine(data), data)
    ray.shutdown()
    return cost


def _engine(engine: Engine, data: Dataset) -> Cost:
    """Measures from full look-ahead to full look-ahead, so that what was decoded ahead counts neither for nor against
    it, after a first epoch in which all processes have started."""
    epoch = steps_of(data)
    steps = itertools.count()

    def drain(count: int) -> int:
        clips = 0
        for step in itertools.islice(steps, count):
            engine.batches(step)
            engine.release(step)
            clips += data.step(step).num_samples
        settled.append(_settle())
        return clips

    settled: list[Tree] = []
    engine.start(0)
    drain(WARM_STEPS + epoch)
    cost = timed(lambda: drain(ENGINE_EPOCHS * epoch), look_s=2.0)  # its processes stay
    engine.stop()
    idle = settled[-1]  # the second in which nothing was decoded any more
    return replace(
        cost, wall_s=cost.wall_s - 1.0, cpu_s=cost.cpu_s - idle.cpu_s, services_s=cost.services_s - idle.services_s
    )


def _settle() -> Tree:
    """Wait until the child processes are idle. Returns what they took in the last second."""
    while True:
        with Tree() as tree:
            time.sleep(1.0)
        if tree.cpu_s < SETTLED_SHARE:
            return tree


def _init_ray(warm: bool = False) -> None:
    """A cluster of this machine; a warm one has run a dataset before: Ray Data's actors are up, modules imported."""
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=2 << 30,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    if warm:
        ray.data.range(WORKERS, override_num_blocks=WORKERS).map_batches(import_decoder).take_all()


def import_decoder(rows: T) -> T:
    assert decode_video is not None
    return rows


def index(setting: Setting) -> Cost:
    from data.dataset.index_build import build_index
    from data.ledger import Ledger

    source = config(setting).sources[0]

    def build() -> int:
        with tempfile.TemporaryDirectory() as fresh:
            return len(build_index(source, Path(fresh), Ledger(LimitsConfig()), limits=LimitsConfig()))

    build()
    return timed(lambda: sum(build() for _ in range(3)))


def probe(setting: Setting) -> Cost:
    data = dataset(setting)
    rows = [data.indexes[0].row(row) for row in range(min(len(data.indexes[0]), 200))]

    def look() -> int:
        for row in rows:
            with open(row.path, "rb") as shard:
                shard.seek(row.offset)
                content = io.BytesIO(shard.read(row.size))
            with av.open(content) as container:
                assert container.streams.video[0].width == row.width
        return len(rows)

    return timed(look)


def first_batch(setting: Setting) -> Cost:
    """The first batch from shards without an index."""
    import ray

    from data.engines.ray_data import RayEngine

    _init_ray(warm=True)
    engines = []

    def first() -> int:
        with tempfile.TemporaryDirectory() as fresh:
            usual = config(setting)
            cold = replace(usual, sources=(replace(usual.sources[0], index=fresh),), items_per_step=1)
            engine = RayEngine(Dataset.open(cold, Geometry(), seed=0))
            engines.append(engine)
            engine.start(0)
            return len(as_batch(ray.get(engine.batches(0)[0])).ok)

    cost = timed(first)
    engines[0].stop()
    ray.shutdown()
    return cost


def first_batch_of_read_webdataset(setting: Setting) -> Cost:
    import ray

    from data.engines.executions import await_executions

    data = dataset(setting)
    decode = WebDecode(data.step(0).items[0].job)
    shards = sorted(str(path) for path in (setting.root / "shards").glob("*.tar"))
    _init_ray(warm=True)

    def first() -> int:
        rows = ray.data.read_webdataset(shards, decoder=False).map(lambda row: {"video": decode(row)[0]})
        batches.append(iter(rows.iter_batches(batch_size=setting.batch)))
        return len(next(batches[0])["video"])

    batches: list[Iterator[Any]] = []  # of Ray's many kinds of batches
    cost = timed(first)
    batches.clear()  # its execution ends, which is not part of the wait
    await_executions()
    ray.shutdown()
    return cost


def memory(setting: Setting) -> Cost:
    """The largest private memory of any process of the Ray engine, as the clips go by."""
    import ray

    from data.engines.ray_data import RayEngine

    _init_ray()
    data = dataset(setting)
    engine, course, clips, step = RayEngine(data), [], 0, 0
    engine.start(0)
    start = time.perf_counter()
    for part in range(1, MEASURES + 1):
        with Tree() as tree:
            while clips < part * setting.clips // MEASURES:
                engine.batches(step)
                engine.release(step)
                clips += data.step(step).num_samples
                step += 1
        course.append(tree.memory_mib)
    engine.stop()
    ray.shutdown()
    return Cost(
        clips=clips,
        wall_s=time.perf_counter() - start,
        cpu_s=0.0,
        memory_mib=max(course),
        course_mib=tuple(course),
    )


WAYS: dict[str, Callable[[Setting], Cost]] = {
    **dict(zip(DECODERS, (plain, everything, webdataset_loader, torch_loader, pool, ray_data), strict=True)),
    **dict(zip(INDEXERS, (index, probe), strict=True)),
    **dict(zip(FIRST, (first_batch, first_batch_of_read_webdataset), strict=True)),
    MEMORY: memory,
}


def main() -> None:
    way, root, bucket, batch, clips = sys.argv[1:]
    cost = WAYS[way](Setting(Path(root), bucket, int(batch), int(clips)))
    print(json.dumps({**asdict(cost), "way": way}))


if __name__ == "__main__":
    main()
