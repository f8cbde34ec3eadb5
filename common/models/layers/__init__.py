"""Attention, linear layers, the residual stream, recomputation, the choice of backend, Hugging Face directories."""
