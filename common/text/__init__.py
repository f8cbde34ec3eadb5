"""Documents to contexts: tokenizers, text prepared or as it is, cut and put end to end, and the batches of a step.

In come sources or a directory of tokens, out come tensors that ask for the next token. Knows nothing of models.
"""
