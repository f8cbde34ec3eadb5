"""A job's nodes, disks and network before it starts: what was found, and one line a problem.

In comes torchrun's environment, out comes a report. Knows nothing of training.
"""
