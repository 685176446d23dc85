"""Units of memory, in bytes."""

MIB, GIB = 2**20, 2**30
