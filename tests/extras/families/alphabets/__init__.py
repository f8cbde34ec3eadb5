"""Alphabets of ESM-2-shaped models: declared, prepared, trained, exported, scored."""
