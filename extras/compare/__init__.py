"""Compare finished runs: what differs, tables, curves, paired differences (python -m extras.compare)."""
