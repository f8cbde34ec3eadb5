"""The memory of a run without running it (--dry_run)."""
