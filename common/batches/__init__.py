"""From records to the batches of a step, dealt out by data rank: one order, whatever the machine.

In come stores of tokens or sources as they are, out come tensors and positions. Knows nothing of text and models.
"""
