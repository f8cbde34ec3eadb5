"""A trained ESM-2 put to use: embeddings of proteins, scores of mutations.

In come proteins and a directory of weights, out come tables. Knows nothing of training.
"""
