"""Steps 0 and 1: download, shuffle, partition, split and tokenise. Outputs are complete or absent."""
