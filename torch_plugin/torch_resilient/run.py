"""resilient-run: starts the ranks of a job on a host, watches them, and replaces those that die.

    resilient-run --nproc 4 train.py --epochs 10

The console script's front; the parts are in `_launch`.
"""

import sys

from torch_resilient import _server
from torch_resilient._launch import LaunchError, options
from torch_resilient._launch.launcher import Launcher
from torch_resilient._launch.output import last_words


def main(arguments=None):
    """Console script `resilient-run`. Returns the exit code."""
    wanted = options.parse(arguments)
    try:
        return Launcher(wanted).run()
    except (OSError, _server.ProgramMissingError, LaunchError) as error:
        last_words(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
