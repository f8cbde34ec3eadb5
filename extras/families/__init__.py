"""Model families besides ESM-2: a folder each, and a line in extras/catalogue.py."""
