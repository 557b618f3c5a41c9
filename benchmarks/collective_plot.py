"""Draws what collective_bench.py has measured: collective_plot.py RESULTS.json PLOT.svg

Run by the Python that has matplotlib, which is Debian's (python3-matplotlib).
"""

import json
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # Text stays text: smaller.
matplotlib.rcParams["svg.hashsalt"] = "resilient"  # The same figures give the same file.
from matplotlib import pyplot  # noqa: E402

LOOKS = {
    "resilient": {"label": "resilient, in PyTorch", "color": "#c1121f", "marker": "o"},
    "native": {"label": "resilient, C++", "color": "#f4a259", "marker": "s"},
    "gloo": {"label": "Gloo, in PyTorch", "color": "#3a6ea5", "marker": "^"},
    "mpich": {"label": "MPICH, C", "color": "#2a9d8f", "marker": "v"},
    "openmpi": {"label": "Open MPI, C", "color": "#6a4c93", "marker": "D"},
    "memcpy": {"label": "memcpy by each rank", "color": "#555555", "linestyle": "--"},
}


def draw(axes, lines, copies):
    """One collective: a line for each peer, or a bar where there are no sizes."""
    if all(size == 0 for points in lines.values() for size, _ in points):
        for place, (peer, points) in enumerate(lines.items()):
            axes.bar(place, points[0][1] * 1e6, color=LOOKS[peer]["color"])
        axes.set_xticks([])
    else:
        for peer, points in {**lines, "memcpy": copies}.items():
            sizes, seconds = zip(*sorted(points), strict=True) if points else ((), ())
            axes.plot(sizes, [s * 1e6 for s in seconds], markersize=3, linewidth=1, **LOOKS[peer])
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main():
    source, target = sys.argv[1], sys.argv[2]
    with open(source) as file:
        results = json.load(file)
    found = defaultdict(lambda: defaultdict(list))  # (ranks, collective) -> peer -> points
    for row in results["rows"]:
        point = (row["bytes"], row["seconds"])
        found[row["ranks"], row["operation"]][row["peer"]].append(point)
    all_ranks = sorted({ranks for ranks, _ in found})
    operations = list(dict.fromkeys(name for _, name in found if name != "copy"))
    width, height = 2.9 * len(operations), 2.9 * len(all_ranks) + 0.7
    figure, grid = pyplot.subplots(
        len(all_ranks), len(operations), figsize=(width, height), squeeze=False
    )
    for line, ranks in zip(grid, all_ranks, strict=True):
        copies = found[ranks, "copy"]["memcpy"]
        for axes, operation in zip(line, operations, strict=True):
            draw(axes, found[ranks, operation], copies)
            axes.set_title(f"{operation}, {ranks} ranks", fontsize=9)
        line[0].set_ylabel("us a call")
    for axes in grid[-1]:
        axes.set_xlabel("bytes a rank" if axes.get_xscale() == "log" else "")
    handles, labels = grid[0][0].get_legend_handles_labels()
    machine = results["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, all ranks on it", fontsize=10)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
