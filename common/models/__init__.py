"""One folder a model family, and the layers that families share. Knows nothing of data and parallelism."""
