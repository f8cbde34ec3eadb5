"""Which layer computes in which number format: plan, formats, emulation, Transformer Engine, statistics.

In come flags and a model, out comes a model that rounds as told. Knows nothing of data and strategies.
"""
