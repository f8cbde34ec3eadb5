"""Aliases of modules that moved to extras/."""
