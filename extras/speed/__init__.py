"""Kernels, and ways to split work among ranks, that make runs faster or larger."""
