"""Steps 0 and 1: from a source of proteins to shuffled CSV, and from CSV to tokenised splits.

In come URLs, FASTA and CSV, out come directories that are complete or not there. Knows nothing of models.
"""
