"""How long the house takes to open its door: importing `etude`, `etude --help`, and what the launcher adds.

Each number is the median wall time of fresh processes. Ours and the peer alternate, so that a busy minute hits both.
The floor to compare with is the interpreter itself (`python -c pass`); the launcher's peer is the same command without it.
Goal: `etude --help` under 0.3 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from etude.bench import Row

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ROOT / "etude"
STAMP = ROOT / ".venv" / ".etude-stamp"


def seconds(argv: list[str]) -> float:
    """Wall time of one process, from spawn to exit."""
    start = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def medians(commands: dict[str, list[str]], rounds: int) -> dict[str, float]:
    """Median seconds of each command, measured in turns; the first turn warms the page cache and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, argv in commands.items():
            elapsed = seconds(argv)
            if turn:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def run(device: str, quick: bool) -> list[Row]:
    python = sys.executable
    commands = {
        "python": [python, "-c", "pass"],
        "import": [python, "-c", "import etude"],
        "help": [python, "-P", "-m", "etude.cli", "--help"],
    }
    launched = STAMP.exists() and Path(python).parent == STAMP.parent / "bin"
    if launched:
        # the interpreter that runs this, not whatever shim `python3` is on PATH: only the launcher's own work counts
        commands["launcher"] = [python, str(LAUNCHER), "--help"]
    t = medians(commands, 10 if quick else 60)

    def row(name: str, ours: float, peer: float, peer_name: str) -> Row:
        return Row(name=name, unit="ms", ours=1e3 * ours, peer=1e3 * peer, peer_name=peer_name, higher_is_better=False)

    rows = [
        row("import etude", t["import"], t["python"], "python -c pass"),
        row("etude --help", t["help"], t["python"], "python -c pass"),
    ]
    if launched:
        rows.append(row("./etude --help", t["launcher"], t["help"], "python -m etude.cli --help"))
        rows.append(Row(name="launcher overhead", unit="ms", ours=1e3 * (t["launcher"] - t["help"]), higher_is_better=False))
    else:
        print("the launcher is not measured: this Python is not the .venv that ./etude installs")
    return rows
