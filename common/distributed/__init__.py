"""Processes: ranks and meshes, agreement, signals, failures, and what a parallelism strategy does to a model."""
