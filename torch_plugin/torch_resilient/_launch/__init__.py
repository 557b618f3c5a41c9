"""The parts of resilient-run. Standard library only: the launcher must not pay for torch, nor die
of it."""


class LaunchError(Exception):
    """The job could not be started; the text says why."""
