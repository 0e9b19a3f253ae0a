"""Muon, AdamW, schedules, and the plain reference twin of each.

    config.py      OptimConfig; free of torch
    build.py       Optimizer: Muon for matrices joined with AdamW for the rest; gradient clipping
    muon.py        Newton-Schulz per head and per expert, by one declarative rule
    adamw.py       AdamW in float32
    schedules.py   learning-rate factors; free of torch
    reference.py   the same in float64, one tensor and one step at a time

Import the modules by name (`from etude.optim.build import build_optimizer`).
"""
