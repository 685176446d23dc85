import subprocess
import sys

from app.bench.data import DECODERS, FIRST, INDEXERS, PLAIN, Cost, table, timed


def cost(way: str, clips: int = 60, wall: float = 2.0, cpu: float = 2.0, memory: float = 100.0) -> Cost:
    return Cost(way=way, clips=clips, wall_s=wall, cpu_s=cpu, memory_mib=memory)


def test_ratios_are_taken_to_the_plain_loops_right_before_and_after() -> None:
    costs = []
    for load in (1.0, 4.0, 1.5):  # a busy round slows all ways alike; its first loops ran on a quicker machine
        for way in DECODERS[1:-1]:
            costs += [cost(PLAIN, cpu=load), cost(way, cpu=2.0 * load)]
        costs += [cost(PLAIN, cpu=3.0 * load), cost(DECODERS[-1], cpu=2.5 * load), cost(PLAIN, cpu=1.5 * load)]
        costs += [cost(INDEXERS[0], 3000, cpu=load), cost(INDEXERS[1], 100, cpu=load)]
        costs += [cost(FIRST[0], wall=1.0 * load, memory=200), cost(FIRST[1], wall=5.0 * load, memory=800)]
    text = table(costs, "title")
    assert "| Heddle, Ray Data | 16.00 | 30.00 | 0.80 |" in text  # 24 clips/s over the mean of 20 and 40
    assert "Heddle, Ray Data: 0.8 x decoding everything" in text
    assert "30 x an av.open probe" in text
    assert "0.20 of read_webdataset's; memory 200 MiB, 0.25 of its" in text


def test_cpu_seconds_of_child_processes_count() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\ntime.sleep(0.2)"
    measured = timed(lambda: len([subprocess.run([sys.executable, "-c", burn], check=True) for _ in range(2)]))
    assert measured.clips == 2
    assert 0.7 < measured.cpu_s < 3.0
