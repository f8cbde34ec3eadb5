"""Fixed runs of 30 steps in two commits: the same losses, checkpoints and final_model, bit for bit?

    python -m benchmarks.same_bits --before 9077214 --fasta my_proteins.fasta.gz [--only fsdp2 text]

Both commits are cloned and run with this environment, by the commands that a user types; the earlier one prepares the
data. The later commit also resumes each run of the earlier one from its checkpoint of step 20. Exit status 1 where
anything differs. Runs give --warmup_steps, whose default in short runs has changed since version 0.2.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.commits import called, prepare
from benchmarks.measuring import ROOT, publish, say, torchrun, where_measured
from common.checkpoint.reader import open_checkpoint
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from extras.interop.stored_tensors import StoredTensors

PROTEINS = 400  # the first ones of --fasta
STEPS, SAVED = 30, 20
MEASURED = re.compile("second|runtime|memory|tflops|slowest")  # figures of the machine, not of the model
COMMON = f"--max_steps {STEPS} --save_steps {SAVED} --logging_steps 1 --do_eval --eval_steps 10 --seed 7 --use_cpu"
ESM2 = (
    "--config_name facebook/esm2_t6_8M_UR50D --max_seq_length 128 --tokens_per_pack 256 --learning_rate 1e-3 "
    "--warmup_steps 1 "
    "--config_overrides num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
)
PREPARED = f"{ESM2} --dataset_dir {{data}}/processed/arrow"
DECODER = (
    "--num_layers 2 --hidden_width 48 --num_heads 6 --num_key_value_heads 2 --intermediate_size 80 --vocab_size 272 "
    "--max_context_width 64 --initializer_range 0.1 --lr 1e-3 --tokenizer bytes"
)
RUNS = {  # name: (ranks, script and flags)
    "ddp": (2, f"train_ddp.py {PREPARED} --gradient_accumulation_steps 2"),
    "fsdp2": (2, f"train_fsdp2.py {PREPARED} --bf16 --activation_checkpointing selective"),
    "mfsdp": (2, f"train_mfsdp.py {PREPARED} --bf16"),
    "cp": (2, f"train_ddp_cp.py {PREPARED} --cp_size 2"),
    "fp8": (1, f"train_ddp.py {PREPARED} --bf16 --fp8 --emulate_precision --quant_stats --quant_stats_freq 10"),
    "streamed": (
        1,
        f"train_ddp.py {ESM2} --dataset {{data}}/proteins.fasta.gz --eval_dataset {{data}}/proteins.fasta.gz",
    ),
    "decoder": (2, f"train_fsdp2.py --model_type llama_v3 {DECODER} --dataset {{data}}/documents"),
    "text": (1, f"train_ddp.py --model_type mixtral {DECODER} --dataset_dir {{data}}/text"),
}
# Megatron-FSDP needs GPUs. Each commit's own tests have what stands in for CUDA and NCCL: argument 1 is the module.
WITHOUT_GPU = """
import importlib, runpy, sys
module = sys.argv.pop(1)
del sys.argv[0]
import common
importlib.import_module(module).install()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STAND_INS = ("megatron_on_cpu.py", "megatron_cpu.py", "mfsdp_on_cpu.py", "megatron_fsdp_on_cpu.py")


@dataclass
class Arguments(Flags):
    before: str = flag("", "The earlier commit.")
    after: str = flag("HEAD", "The later one.")
    fasta: str = flag("", f"Proteins; the first {PROTEINS} are used.")
    only: list[str] | None = flag(None, f"Some of the runs: {', '.join(RUNS)}.")
    keep: str | None = flag(None, "Leave both commits, the data and all runs there: a new directory.")
    output: str | None = flag(None, "Also write the table there.")

    def check(self) -> None:
        if not self.before or not self.fasta:
            raise UserError("say which --before and what --fasta")
        for name in self.only or ():
            if name not in RUNS:
                raise UserError(f"--only {name}: choose {', '.join(RUNS)}")
        if self.keep and Path(self.keep).exists():
            raise UserError(f"--keep {self.keep}: exists: choose a new directory")


def prepare_data(checkout: Path, fasta: str, data: Path) -> None:
    """The first proteins as FASTA, through steps 0 and 1, and as documents, as they are and through step 1."""
    data.mkdir()
    records: list[str] = []
    with gzip.open(fasta, "rt") if fasta.endswith(".gz") else open(fasta) as file:
        for line in file:
            if not line.startswith(">"):
                records[-1] += line
            elif len(records) < PROTEINS:
                records.append(line)
            else:
                break
    with gzip.open(data / "proteins.fasta.gz", "wt") as file:
        file.writelines(records)
    (data / "documents").mkdir()
    for split, some in (("train", records[PROTEINS // 10 :]), ("validation", records[: PROTEINS // 10])):
        lines = "".join(json.dumps({"text": record}) + "\n" for record in some)
        (data / "documents" / f"{split}.jsonl").write_text(lines)
    prepare(checkout, str(data / "proteins.fasta.gz"), data)
    text = ["--dataset", data / "documents", "--tokenizer", "bytes", "--output_dir", data]
    called([sys.executable, "1.tokenize_text.py", *text], checkout)


def train(checkout: Path, name: str, data: Path, out: Path) -> None:
    ranks, line = RUNS[name]
    script, *flags = [word.format(data=data) for word in f"{line} {COMMON}".split()]
    command = [script]
    if script == "train_mfsdp.py":
        stand_ins = [path for name in STAND_INS for path in checkout.glob(f"tests/**/{name}")]
        if not stand_ins:
            raise UserError(f"{checkout}: none of {', '.join(STAND_INS)} in its tests: name the stand-in in STAND_INS")
        module = ".".join(stand_ins[0].relative_to(checkout).with_suffix("").parts)
        command = ["-c", WITHOUT_GPU, module, script]
    command = [sys.executable, *command, *flags, "--output_dir", str(out)]
    if ranks > 1:
        command = [*torchrun(ranks), "--no-python", *command]
    called(command, checkout)


def figures(out: Path) -> dict[str, str]:
    """Every figure of the log and of the results, but those that the machine's speed and memory decide."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            row = json.loads(line)
            found |= {f"{path.name} {number} (step {row.get('step')}) {key}": value for key, value in row.items()}
    results = json.loads((out / "all_results.json").read_text())
    found |= {f"all_results.json {key}": value for key, value in results.items()}
    return {key: repr(value) for key, value in found.items() if not MEASURED.search(key)}


def checkpoint(out: Path) -> dict[str, str]:
    """The last checkpoint's tensors, weights and optimiser, whole and hashed, whatever its format."""
    stored, found = StoredTensors(open_checkpoint(out / f"checkpoint-{STEPS}")), {}
    for name in stored.shapes:
        tensor = stored.read(name)
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} sha256 {digest}"
    return found


def final_model(out: Path) -> dict[str, str]:
    content = (out / "final_model" / "model.safetensors").read_bytes()
    return {"model.safetensors sha256": hashlib.sha256(content).hexdigest()}


READERS = (figures, checkpoint, final_model)  # a column each; then the resumed run
COLUMNS = ("losses", "checkpoint", "final_model", "resumed")


def difference(some: dict, others: dict) -> str:
    """The first one, or nothing. A figure that only the later commit has is none."""
    names = [name for name in others if name in some or not name.startswith(("metrics.jsonl", "all_results.json"))]
    pairs = ((name, some.get(name, "missing"), others.get(name, "missing")) for name in dict.fromkeys([*some, *names]))
    return next((f"{name}: {one} / {other}" for name, one, other in pairs if one != other), "")


def resume(checkout: Path, name: str, data: Path, before: Path, out: Path) -> str:
    """Resume in a copy of what the earlier commit had written by step `SAVED`; the first difference at the end."""
    shutil.copytree(before / f"checkpoint-{SAVED}", out / f"checkpoint-{SAVED}")
    for path in before.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        (out / path.name).write_text("".join(line for line in lines if json.loads(line)["step"] <= SAVED))
    written = (out / "metrics.jsonl").read_text()
    train(checkout, name, data, out)
    if not (out / "metrics.jsonl").read_text().startswith(written):  # measured times, too: no other run has these rows
        return f"metrics.jsonl: not the earlier run's up to step {SAVED}: it has not resumed"
    return next(filter(None, (difference(read(before), read(out)) for read in READERS)), "")


def compare(name: str, work: Path) -> list[str]:
    """Of each column of the table: nothing where all is the same, or what differs first."""
    before, after, resumed = (work / "runs" / name / which for which in ("before", "after", "resumed"))
    differences: list[str] = []
    try:
        train(work / "before", name, work / "data", before)
        train(work / "after", name, work / "data", after)
        differences = [difference(read(before), read(after)) for read in READERS]
        differences.append(resume(work / "after", name, work / "data", before, resumed))
    except (UserError, OSError) as error:
        differences.append(f"failed: {' '.join(str(error).split())[-200:]}")
    say(f"{name}: {', '.join(map(word, differences))}")
    return differences


def word(difference: str) -> str:
    if difference.startswith("failed: "):
        return "failed"
    return "different" if difference else "same"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names = args.only or list(RUNS)
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        work = Path(place).resolve()
        for which, commit in (("before", args.before), ("after", args.after)):
            called(["git", "clone", "--quiet", ROOT, work / which], ROOT)
            called(["git", "checkout", "--quiet", "--detach", commit], work / which)
        prepare_data(work / "before", args.fasta, work / "data")
        with ThreadPoolExecutor(2) as pool:  # most of a run is imports, which take one core
            found = dict(zip(names, pool.map(lambda name: compare(name, work), names), strict=True))
    lines = ["| run | ranks | losses | checkpoint | final_model | resumed |", "|---|--:|---|---|---|---|"]
    first = []
    for name, differences in found.items():
        cells = [*map(word, differences), "-", "-", "-"][: len(COLUMNS)]
        lines.append(f"| {name} | {RUNS[name][0]} | {' | '.join(cells)} |")
        first += [f"- {name}, {column}: {each}" for column, each in zip(COLUMNS, differences, strict=False) if each]
    where = where_measured("benchmarks.same_bits", "torch")
    publish("\n\n".join([*where, "\n".join(lines), "\n".join(first)]).rstrip() + "\n", args.output)
    raise SystemExit(1 if first else 0)


if __name__ == "__main__":
    run(main)
