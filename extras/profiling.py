"""--profile_steps A-B: a torch profiler trace of these steps, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from common.cli import UserError
from common.distributed.world import World
from common.training.run_directory import TRACES
from extras.monitor.watchdog import SAVE

logger = logging.getLogger(__name__)


def parse_steps(text: str) -> range:
    """Parse "A-B" or "A": steps A to B inclusive, counted from 1."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--profile_steps {text}: expected steps as A-B, say 10-12, counted from 1")
    return range(first, last + 1)


class StepProfiler:
    """Profiles --profile_steps on this rank: call `before` and `after` each step."""

    def __init__(self, steps: str | None, world: World, output_dir: Path):
        self.steps = parse_steps(steps) if steps else range(0)
        self.world, self.directory = world, (output_dir / TRACES).parent
        self.profile: profile | None = None
        self.first = 0

    def before(self, step: int) -> None:
        if step in self.steps and self.profile is None:
            self.first = step  # not the range's first if the run resumed inside it
            activities = [ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities)
            self.profile.start()

    def after(self, step: int, ends: bool = False) -> None:
        """After the last of these steps, or when the run `ends` before it, write the trace. Collective."""
        if self.profile is None or not (ends or step >= self.steps[-1]):
            return
        trace, self.profile = self.profile, None
        self.world.watch.mark(SAVE, step)
        trace.stop()
        path = self.directory / f"rank{self.world.rank}-steps-{self.first}-{step}.json.gz"
        with self.world.raise_together():
            self.directory.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(path))
        logger.info("Trace of steps %d-%d: %s (one per rank)", self.first, step, path)
