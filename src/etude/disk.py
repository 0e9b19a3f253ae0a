"""What it takes for a name on disk to be a promise.

A writer fills something under another name, flushes it, renames it, and flushes the folder: then whoever finds the final name finds
all of it, after a power cut too.
"""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
