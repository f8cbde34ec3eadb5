"""A family in one folder: an alphabet of 8 tokens and one layer. tests/models/test_toy_family.py trains it."""
