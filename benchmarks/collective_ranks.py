"""Ranks that time torch's collectives: collective_ranks.py BACKEND RANKS DIRECTORY.

One process imports torch, then forks the ranks; collective_bench.py tells them what to do and
describes how.
"""

import ctypes
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


class Measurement:
    """The collective of one command, on tensors of its own."""

    def __init__(self, name, nbytes):
        ranks = dist.get_world_size()
        whole = max(nbytes // 4, 1)
        part = max(whole // ranks, 1)
        in_parts = name in ("reduce_scatter", "all_to_all")
        out_parts = name in ("all_gather", "all_to_all")
        self.name = name
        self.ranks = ranks
        self.input = torch.ones(
            part * ranks if in_parts else part if name == "all_gather" else whole
        )
        self.output = torch.zeros(
            part * ranks if out_parts else part if name == "reduce_scatter" else whole
        )

    def call(self):
        """One collective as a function of the call's number."""
        given, result = self.input, self.output
        if self.name == "all_reduce":
            return lambda _: dist.all_reduce(given)
        if self.name == "broadcast":
            # The root goes round: a fixed one would be ahead of its receivers.
            return lambda number: dist.broadcast(given, number % self.ranks)
        if self.name == "all_gather":
            return lambda _: dist.all_gather_into_tensor(result, given)
        if self.name == "reduce_scatter":
            return lambda _: dist.reduce_scatter_tensor(result, given)
        if self.name == "all_to_all":
            return lambda _: dist.all_to_all_single(result, given)
        return lambda _: dist.barrier()

    def is_right(self):
        """Whether the result of one call is."""
        self.call()(0)
        in_place = self.name in ("all_reduce", "broadcast", "barrier")
        result = self.input if in_place else self.output
        expected = self.ranks if self.name in ("all_reduce", "reduce_scatter") else 1
        right = bool((result == expected).all())
        self.input.zero_()  # Its sum with itself stays what it is.
        return right

    def seconds(self, calls):
        call = self.call()
        dist.barrier()
        began = time.perf_counter()
        for number in range(calls):
            call(number)
        return time.perf_counter() - began


def serve(rank, directory):
    with open(f"{directory}/rank-{rank}") as commands, open(f"{directory}/answers", "w") as answers:

        def answer(text):
            print(rank, text, file=answers, flush=True)

        answer("ready")
        for line in commands:
            words = line.split()
            if words[0] == "end":
                break
            name, nbytes, calls = words[0], int(words[1]), int(words[2])
            try:
                measurement = Measurement(name, nbytes)
                right = measurement.is_right()
                answer(measurement.seconds(calls) if right else f"error: {name} gave nonsense")
            except Exception as error:
                answer(f"error: {str(error).splitlines()[0]}")


def rank_main(backend, rank, ranks, directory):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    os.environ["RESILIENT_LINGER"] = "1s"
    url = f"file://{directory}/init"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=ranks)
    serve(rank, directory)
    dist.destroy_process_group()


def main():
    backend, ranks, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(backend, rank, ranks, directory)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
