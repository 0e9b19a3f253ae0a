"""Katas: seeded small Python packages with tests, in function families. See family.py for what a family is.

`TRAIN_FAMILIES` and `UNSEEN_FAMILIES` are fixed: an unseen family never gives a training task. The unseen ones are
spread over all kinds, so that they are neither shorter nor longer on the whole (tests/tasks measures it).
"""

from __future__ import annotations

from etude.tasks.katas.package import FAMILIES, SPLITS, TRAIN_FAMILIES, UNSEEN_FAMILIES, Kata, Package, families_of, make_package

__all__ = ["FAMILIES", "SPLITS", "TRAIN_FAMILIES", "UNSEEN_FAMILIES", "Kata", "Package", "families_of", "make_package"]
