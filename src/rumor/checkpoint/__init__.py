"""Checkpoints: a whole run on disk, each rank in a file of its own."""

from rumor.checkpoint.checkpoint import load, save

__all__ = ["load", "save"]
