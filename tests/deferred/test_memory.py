"""No rank ever has the memory of the whole model, measured by the operating system."""

import json
import subprocess
import sys
from pathlib import Path


def test_peak_of_one_stage() -> None:
    arguments = ["--stages", "8", "--layers", "16", "--width", "512", "--vocabulary", "1000"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.deferred", *arguments],
        cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = json.loads(result.stdout)
    grown = found["peak"] - found["before"]
    assert found["whole"] > 200e6
    assert grown < found["stage"] + 30e6, found
