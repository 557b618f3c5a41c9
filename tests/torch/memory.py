"""Memory that takes a while to give back."""

import mmap

import torch


def touch(size):
    """`size` bytes in pages of 4 KiB, all in use, as a program has that grew bit by bit. They are
    there as long as what is returned."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return memory
