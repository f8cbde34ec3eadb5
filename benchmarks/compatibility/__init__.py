"""What opens what: exports and other programs, in pinned versions (docs/compatibility.md)."""
