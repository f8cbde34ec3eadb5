"""The processes of one job: who am I, which data are mine, how do we agree, stop, hang and fail together.

In comes torchrun's environment, out comes a `World`. Knows nothing of what the processes compute.
"""
