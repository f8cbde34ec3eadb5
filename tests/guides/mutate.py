"""Break a promise of the guides at a time: a row of tests/guides must fail.

python -m tests.guides.mutate [PART OF A CHANGE'S NAME]

Copies the checkout, makes one change in the copy, runs tests/guides/test_rows.py, takes the change back, and goes on
with the next one: ten seconds each on a quiet machine. Prints the rows that failed; status 1 if a change failed none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Change:
    """of: a file. old: a passage that becomes `new`, wherever it is; "": the file is removed."""

    of: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"{self.of}: {self.old!r} -> {self.new!r}" if self.old else f"{self.of} removed"

    def make(self, checkout: Path) -> None:
        path = checkout / self.of
        text = path.read_text()
        if self.old not in text:
            raise SystemExit(f"error: {self}: the file has no such passage")
        if self.old:
            path.write_text(text.replace(self.old, self.new))
        else:
            path.unlink()


CHANGES = (
    Change("Dockerfile"),
    Change("Dockerfile.cuda"),
    Change("Dockerfile.cuda", "COPY tests tests/\n"),
    Change("Dockerfile", "WORKDIR /workspace", "WORKDIR /opt"),
    Change("push.sh"),
    Change("enroot.sh"),
    Change("test.sh"),
    Change("1.tokenize_uniref_csv.py"),
    Change("train_mfsdp.py"),
    Change("fp8_debugging_stats.yaml"),
    Change("slurm/create_venv.sh"),
    Change("slurm/mathstral_7b-training.sbatch"),
    Change("slurm/llama2_13b-training.sbatch"),
    Change("slurm/train_ddp.sh", "--job-name=esm2-ddp", "--job-name=ddp"),
    Change("slurm/train_fsdp.sh", "out-fsdp", "results"),
    Change("kubernetes/view-fsx.yaml"),
    Change("kubernetes/llama3_2_1b-fsdp.yaml"),
    Change("kubernetes/preprocess-template.yaml", "/processed", "/tokens"),
    Change("kubernetes/train-ddp-template.yaml", "vpc.amazonaws.com/efa: ${EFA_PER_NODE}", "vpc.amazonaws.com/efa: 1"),
    Change("kubernetes/train-ddp-template.yaml", "  name: esm2 # [JOB_NAME]", "  name: pretrain # [JOB_NAME]"),
    Change("kubernetes/train-fsdp-template.yaml", "fsdp-output", "fsdp"),
    Change("configs/guide_fsdp.yaml", "packs_per_step: 22", "packs_per_step: 24"),
    Change("configs/guide_ddp.yaml", "esm2_t6_8M", "esm2_t12_35M"),
    Change("configs/sanity.yaml", "max_steps: 250", "max_steps: 25"),
    Change(
        "extras/interop/flag_tables.py", '"checkpoint.ckpt_dir": Ours("output_dir")', '"checkpoint.ckpt_dir": Ours()'
    ),
    Change("extras/families/decoders/config.py", '"llama3_1_8b": GuideRun(100,', '"llama3_1_8b": GuideRun(10,'),
    Change("common/distributed/strategy.py", "ddp_bucket_cap_mb", "bucket_megabytes"),
    Change("common/data/flags.py", "max_train_samples", "max_training_samples"),
    Change("docs/differences.md", "| 8M has 7,840,794 parameters", "| 8M has 8M parameters"),
)


def copy(checkout: Path) -> None:
    """The files that git knows or would take, with .venv and shared/ as links."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (source := ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, checkout / name)
    (checkout / ".venv").symlink_to(ROOT / ".venv")
    if (ROOT.parent / "shared").exists():
        (checkout.parent / "shared").symlink_to(ROOT.parent / "shared")


def failed_rows(checkout: Path) -> list[str]:
    """What pytest says has failed, and "collection" if it could not begin."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/guides/test_rows.py"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True)
    found = re.findall(r"^(?:FAILED|ERROR) \S+?(?:::(\S+))?(?: - .*)?$", done.stdout, re.MULTILINE)
    return [name or "collection" for name in found] or (["collection"] if done.returncode else [])


def main() -> None:
    wanted = [change for change in CHANGES if not sys.argv[1:] or sys.argv[1] in str(change)]
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory) / "checkout"
        copy(checkout)
        if before := failed_rows(checkout):
            raise SystemExit(f"error: without a change these fail: {', '.join(before)}")
        for change in wanted:
            original = (checkout / change.of).read_bytes()
            change.make(checkout)
            rows = failed_rows(checkout)
            missed += not rows
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            print(f"{change}: {', '.join(rows[:3]) or 'NO ROW FAILED'}{more}", flush=True)
            (checkout / change.of).write_bytes(original)
            shutil.copymode(ROOT / change.of, checkout / change.of)
    print(f"{len(wanted) - missed} of {len(wanted)} changes failed a row")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
