"""Formats on disk: proteins, tokens, clusters, JSON, output directories; read and written, nothing about why.

In come paths, out come arrays (and back). Knows nothing of processes, models and training.
"""
