"""Checkpoints: written, found whole, and read."""
