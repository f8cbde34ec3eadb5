"""Other programs' flags, launch commands, models and checkpoints."""
