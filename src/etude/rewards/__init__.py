"""Rewards: reward parts by name (parts.py) and the rules that look for cheating (monitors.py)."""
