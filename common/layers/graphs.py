"""What stays out of the graphs that torch.compile makes."""

from __future__ import annotations

# torch's own decorator for its code, the same in 2.11 to 2.13: torch.compiler.disable at the first call. That one
# imports the compiler where it decorates, which was a fifth of the time that `--help` takes.
from torch._compile import _disable_dynamo as outside_graphs

__all__ = ["outside_graphs"]
