"""Kernels, optimisers and strategies that plain PyTorch does not have."""
