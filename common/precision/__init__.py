"""Which layer computes in which number format: the plan, emulation, Transformer Engine."""
