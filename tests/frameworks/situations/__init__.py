"""Situations in which programs start, train and end: each with Gloo, and with resilient.

`situation.py` says what one is and how its ranks are started, `programs.py`, `uses.py` and
`ends.py` hold what the ranks run, `registry.py` has them all, and `runner.py` runs one.
"""
