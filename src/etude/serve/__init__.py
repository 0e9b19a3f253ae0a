"""Serving an engine to others: an OpenAI-compatible endpoint, and the engine protocol itself, over HTTP."""
