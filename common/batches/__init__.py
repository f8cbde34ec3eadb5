"""From records to the batches of a step, dealt out by data rank: one order, whatever the machine.

In come stores of tokens or files as they are, out come tensors and positions. Knows nothing of models.
"""
