"""Draws what recovery_bench.py has measured: recovery_plot.py RESULTS.json PLOT.svg

Run by the Python that has matplotlib, which is Debian's (python3-matplotlib).
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text: smaller.
matplotlib.rcParams["svg.hashsalt"] = "resilient"  # The same figures give the same file.
from matplotlib import pyplot  # noqa: E402

LEAST_SECONDS = 1e-4  # Zero has no place on the axis.


def main():
    source, target = sys.argv[1], sys.argv[2]
    with open(source) as file:
        results = json.load(file)
    runs = [run for run in results["runs"] if run["summary_s"]]
    figure, axes = pyplot.subplots(figsize=(9, 0.7 + 0.35 * sum(len(r["summary_s"]) for r in runs)))
    names = []
    for color, run in enumerate(runs):
        for phase, found in run["summary_s"].items():
            p50, most = (max(found[name], LEAST_SECONDS) for name in ("p50", "max"))
            axes.plot([p50, most], [len(names)] * 2, color=f"C{color}", linewidth=2)
            axes.plot([p50], [len(names)], "o", color=f"C{color}")
            names.append(f"{run['form']}: {phase}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds, p50 (dot) to max")
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
