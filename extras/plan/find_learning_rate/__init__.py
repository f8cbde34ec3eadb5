"""Short runs at several learning rates (--find_learning_rate)."""
