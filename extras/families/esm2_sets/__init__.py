"""ESM-2 that reads homologs: its layers, and attention over sets after every few of them."""
