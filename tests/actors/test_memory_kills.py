from actors.memory_kills import in_short
from actors.run.failures import last_line

# Ray 2.56, shortened in the middle
TEXT = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.7, ID: 353c97d1536423a17d866caa) was 22.87GB used / 23.54GB limit (0.971)
OOM kill reason: Memory usage 24556187008B exceeded threshold of 24012677120B (95.0% of 25276502016B limit)
Object store memory usage: [- objects spillable: 1
Ray killed 1 worker(s) based on the killing policy
Selected to kill: (Task: job ID=01000000, lease ID=0094e922, task name=TrainController.__init__, required resources={},
pid=30721, actual memory used=0.05GB, worker ID=6de4dbcc) ]
Top 10 memory users:
PID MEM(GB) COMMAND
19239 1.50 python other.py
Consider provisioning more memory on this node or reducing task parallelism by requesting more CPUs per task."""


def test_a_kill_for_memory_is_told_in_two_sentences() -> None:
    for text in (TEXT, " ".join(TEXT.split())):
        told = in_short(text)
        assert told.startswith(
            "Ray ended TrainController.__init__ (pid 30721, 0.05 GB) because 22.87 of 23.54 GB of node 10.0.0.7 were "
            "in use, more than 95.0% of it. Free memory there"
        )
        assert len(told) < 300 and "objects" not in told
    assert last_line(TEXT) == in_short(TEXT)


def test_other_texts_stay() -> None:
    assert in_short("ValueError: 3 is too many") == "ValueError: 3 is too many"
    assert last_line("Traceback\nValueError: 3 is too many") == "ValueError: 3 is too many"
