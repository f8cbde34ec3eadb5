"""Number formats below bf16: their casts, emulation, Transformer Engine's layers and torch's scaled matmuls."""
