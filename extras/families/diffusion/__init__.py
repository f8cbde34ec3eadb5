"""Masked diffusion: an encoder trained at all mask rates, and the bound on the log-likelihood that it gives."""
