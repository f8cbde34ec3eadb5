"""What a flag or a script asks for. Importing this package hands its catalogue to the core (common/hooks.py)."""

import common  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
from common import hooks
from extras import catalogue

hooks.hand_in(catalogue)
