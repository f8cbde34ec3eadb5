"""The run, from its first line to its last: start, loop, step, progress, end; dry, timed, or exported afterwards.

In come a strategy's wrapped model and flags, out comes an output directory. Knows nothing of strategies.
"""
