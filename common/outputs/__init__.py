"""What a run leaves on disk and tells: checkpoints, rows and results, traces, pictures, trackers; and its directory.

In come state and numbers, out come files, and a state to go on from. Knows nothing of models, data and steps.
"""
