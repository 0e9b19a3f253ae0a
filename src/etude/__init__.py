"""etude: train a coding agent inside the harness it will be used in, and keep it in training from its use."""

__version__ = "0.1.0"
