"""The run, from its first line to its last: flags, loop, step, checkpoints, evaluation, results.

In come a strategy's wrapped model and flags, out comes an output directory. Knows nothing of strategies.
"""
