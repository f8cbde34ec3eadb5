"""Alphabets of ESM-2-shaped models other than ESM-2's: a file each, which defines ALPHABET."""
