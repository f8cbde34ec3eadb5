"""`--profile_steps A-B`: what the process did in these steps, as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from common.cli import UserError
from common.distributed.world import World
from extras.monitor.watchdog import SAVE

logger = logging.getLogger(__name__)

TRACES = "profile/rank*-steps-*.json.gz"  # under the output directory


def parse_steps(text: str) -> range:
    """ "A-B" (or "A"): the steps A to B, both included, counted from 1."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--profile_steps {text}: expected steps as A-B, say 10-12, counted from 1")
    return range(first, last + 1)


class StepProfiler:
    """Profiles the steps asked for on this rank. `before` each step, `after` it, `close` on every way out."""

    def __init__(self, steps: str | None, world: World, output_dir: Path):
        self.steps = parse_steps(steps) if steps else range(0)
        self.world, self.directory = world, (output_dir / TRACES).parent
        self.profile: profile | None = None

    def before(self, step: int) -> None:
        if step in self.steps and self.profile is None:
            self.first = step  # a resumed run may begin in the middle
            activities = [ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities)
            self.profile.start()

    def after(self, step: int, ends: bool = False) -> None:
        """Write the trace after the last step asked for, or of what there is when the run ends; all ranks together."""
        if self.profile is None or not (ends or step >= self.steps[-1]):
            return
        done, self.profile = self.profile, None
        self.world.watch.mark(SAVE, step)
        done.stop()
        path = self.directory / f"rank{self.world.rank}-steps-{self.first}-{step}.json.gz"
        with self.world.raise_together():
            self.directory.mkdir(exist_ok=True)
            done.export_chrome_trace(str(path))
        logger.info("Trace of steps %d-%d: %s (one a rank)", self.first, step, path)
