"""The command line of resilient-run."""

import argparse
import os
import sys

from torch_resilient._launch.backoff import STEADY_SECONDS

_SPARE_WAIT = "30s"  # Its start; one that waits takes the seat at once.


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="resilient-run",
        description="Runs a script as the ranks of a job and replaces ranks that die.",
    )
    parser.add_argument("--nproc", type=_positive, default=1, help="number of ranks (default 1)")
    _add_nodes(parser)
    _add_deaths(parser)
    parser.add_argument("--store", metavar="HOST:PORT", help="a running store; default: its own")
    parser.add_argument(
        "--store-data",
        metavar="DIR",
        help="where its own store keeps its state (default: a temporary directory)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="token that the store asks for and the ranks present (default: RESILIENT_TOKEN_FILE)",
    )
    parser.add_argument("--job", metavar="NAME", help="name of the job on the store")
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="also write what each rank says to DIR/rank-R.out and DIR/rank-R.err",
    )
    parser.add_argument(
        "--log-only", action="store_true", help="with --log-dir: and not to the console"
    )
    parser.add_argument("--events", metavar="FILE", help="write what happens as JSON lines")
    parser.add_argument(
        "--no-python", action="store_true", help="the script is a program, not Python"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, python -m")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.store and options.store_data:
        parser.error("--store-data is for a store of its own; leave it or --store out")
    if options.log_only and not options.log_dir:
        parser.error("--log-only needs --log-dir, as the output would go nowhere")
    _check_nodes(parser, options)
    _check_min_world(parser, options)
    return options


def worker_command(options):
    if options.no_python:
        return [options.script, *options.args]
    python = [sys.executable, "-u"]
    if options.module:
        python.append("-m")
    return [*python, options.script, *options.args]


def seat_wait(options, spares):
    """How long a lost seat is waited for: where nobody starts anything again, for spares (of all
    nodes) that are about to come, if at all."""
    starts = options.restart_policy == "replace" and options.max_restarts > 0
    if starts or (spares and not options.min_world):
        return "10min"
    return _SPARE_WAIT if spares else None


def _add_deaths(parser):
    """What is done when a rank dies."""
    parser.add_argument(
        "--max-restarts",
        type=_not_negative,
        default=3,
        metavar="K",
        help="how many deaths are followed by a start, in total (default 3)",
    )
    parser.add_argument(
        "--steady-after",
        type=_not_negative,
        default=int(STEADY_SECONDS),
        metavar="S",
        help="a rank that again and again ends within S seconds of its start is restarted with"
        " growing pauses, 0.5 s to 30 s (default 60; 0: always at once)",
    )
    parser.add_argument(
        "--spares",
        type=_not_negative,
        default=0,
        metavar="K",
        help="start K more processes, which wait for a rank to be lost and take its seat",
    )
    parser.add_argument(
        "--restart-policy",
        choices=("replace", "all", "never"),
        default="replace",
        help="what a death is followed by: the rank alone is started again (default), all ranks"
        " are ended and started anew, or the job ends",
    )
    parser.add_argument(
        "--min-world",
        type=_positive,
        metavar="M",
        help="go on without ranks that were lost and are not started again, as long as M are left;"
        " the script's elastic does so too (RESILIENT_MIN_WORLD)",
    )


def _add_nodes(parser):
    parser.add_argument(
        "--nnodes",
        type=_positive,
        default=1,
        metavar="N",
        help="number of hosts; a resilient-run on each, with --store, --job and --node-rank",
    )
    parser.add_argument(
        "--node-rank", type=_not_negative, metavar="R", help="which of them this is, from 0"
    )


def _check_nodes(parser, options):
    if options.nnodes == 1:
        if options.node_rank:
            parser.error(f"--node-rank {options.node_rank} needs --nnodes")
        return
    if options.node_rank is None or options.node_rank >= options.nnodes:
        parser.error(f"--nnodes {options.nnodes} needs --node-rank 0 to {options.nnodes - 1}")
    if not options.store:
        parser.error(f"--nnodes {options.nnodes} needs --store: one that all hosts reach")
    if not options.job and not os.environ.get("RESILIENT_JOB"):
        parser.error(f"--nnodes {options.nnodes} needs --job (or RESILIENT_JOB): the same on all")


def _check_min_world(parser, options):
    if options.min_world is None:
        return
    if options.nnodes == 1 and options.min_world > options.nproc:
        parser.error(f"--min-world {options.min_world} is more than the {options.nproc} of --nproc")
    if options.restart_policy == "all":
        parser.error("--min-world is for --restart-policy replace or never: all starts all anew")


def _positive(text):
    number = _not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _not_negative(text):
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)
