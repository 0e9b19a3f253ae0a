"""Lossless weight deltas: codec, publisher, receiver, object store."""
