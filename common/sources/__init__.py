"""Proteins and documents as users bring them: which files, in which format, record by record, and what is refused.

In come paths and names of the Hub, out come records and complaints that say where. Knows nothing of what for.
"""
