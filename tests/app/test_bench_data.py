import subprocess
import sys
from pathlib import Path

from app.bench.data import DECODERS, FIRST, INDEXERS, PLAIN, Cost, table

ROOT = Path(__file__).parents[2]


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
    """In a process of its own: what earlier tests have left running counts as well. Each child stays for a second when
    it has worked, so that a look comes in time."""
    code = """
import subprocess, sys
from app.bench.data import timed
burn = "import time; [None for _ in iter(lambda: time.process_time() < 0.4, False)]; time.sleep(1)"
def work():
    both = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    return len(both)
measured = timed(work, look_s=0.05)
print(measured.clips, measured.cpu_s)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    clips, seconds = done.stdout.split()
    assert clips == "2" and 0.7 < float(seconds) < 3.0
