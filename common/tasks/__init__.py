"""What a run learns: ESM-2 by masks, a decoder by the next token; its flags, model, data, counts, losses, optimiser.

In come flags and ranks, out come batches, loss sums, held-out numbers and an exported model. Knows nothing of steps.
"""
