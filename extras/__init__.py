"""What a flag or a script asks for: imported inside the function that needs it, never by common/ at module level."""

import common  # noqa: F401  (before torch: see there)
