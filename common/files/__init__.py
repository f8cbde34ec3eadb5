"""Our own formats: records as lines, tokens, clusters, JSON, output directories; read and written, not why.

In come paths, out come arrays (and back). Knows nothing of users' files, processes, models and training.
"""
