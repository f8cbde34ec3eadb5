"""What the scripts share. Scripts import from here; nothing here knows a script."""
