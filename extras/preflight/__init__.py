"""Checks of nodes, disks and network before a job starts."""
