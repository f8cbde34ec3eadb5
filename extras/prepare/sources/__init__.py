"""Readers of users' files: FASTA, CSV, parquet, JSON lines, the Hub, compressed or not; streams of them."""
