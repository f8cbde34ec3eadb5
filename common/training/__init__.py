"""The training run: loop, step, optimiser, evaluation, checkpoints and results."""
