"""What every benchmark says about its run, and how it is kept. Needs no torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path


def parser(about: str) -> argparse.ArgumentParser:
    """`about` is shown as it is written."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> dict:
    model = ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cpu": model,
        "load": round(os.getloadavg()[0], 2),
    }


def write(path: Path, results: dict) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")
