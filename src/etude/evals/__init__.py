"""Evaluation suites, statistics with intervals, and the gate."""
