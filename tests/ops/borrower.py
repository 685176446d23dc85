"""A process that borrows a node's memory and does what its lines of input say; it answers each with a line.

lock LO HI       acquire and keep
tries LO HI      whether the lock can be had now (and let go again)
write AT VALUE   one byte
back             give the memory back
"""

from __future__ import annotations

import sys

from ops.memory.lending import borrow
from ops.memory.node_memory import RangeLock


def main() -> None:
    memory = borrow(int(sys.argv[1]))
    lock = RangeLock(memory)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *values = line.split()
        numbers = [int(value) for value in values]
        if command == "lock":
            lock.acquire(*numbers, lambda: None)
            print("locked", flush=True)
        elif command == "tries":
            free = lock.try_acquire(*numbers)
            if free:
                lock.release(*numbers)
            print(free, flush=True)
        elif command == "write":
            memory.buffer[numbers[0]] = numbers[1]
            print("written", flush=True)
        elif command == "back":
            lock.close()
            memory.close()
            print("given back", flush=True)


if __name__ == "__main__":
    main()
