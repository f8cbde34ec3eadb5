"""Run the pairs of docs/compatibility.md and write its tables.

python -m benchmarks.compatibility [--environments build/compatibility] [--output docs/compatibility.md]

The first run makes the environments (environments.py), for which pip needs a package index. Exit status 1 if a file of
this project is opened wrongly, or this project opens another's wrongly; what others refuse is a cell.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import argparse
import csv
import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from benchmarks.compatibility.environments import ENVIRONMENTS, NEWEST, TRANSFORMERS, check_versions, python_of
from benchmarks.compatibility.models import KINDS, PROTEIN, exports, inputs, ours, train
from benchmarks.measuring import ROOT, commit, completed, say
from common.cli import UserError, run
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.export import export_model

TOLERANCE = 1e-5  # of the reference's largest less smallest
BEGIN, END = "<!-- tables: ./test.sh --compat writes what follows -->", "<!-- end of the tables -->"
ESM2, MUTATIONS = "ESM-2", ("S2A", "T9W")
# Column: reader of peer.py, environment.
READERS = {
    **{f"transformers {number}": ("transformers", f"transformers-{number}") for number in TRANSFORMERS},
    "fair-esm": ("fair-esm", "fair-esm"),
    "faesm": ("faesm", "faesm"),
    "esm-cpp": ("esm-cpp", "esm-cpp"),
    "peft": ("peft", "peft"),
    "sentence-transformers": ("sentence-transformers", "sentence-transformers"),
    "ONNX": ("onnx", "onnx"),
    "ONNX in Node.js": ("onnx in node", "onnx"),
    "strict=True": ("strict", "transformers-4.57.6"),
    "strict=False": ("lenient", "transformers-4.57.6"),
}
OWN = ("names", "this project", "exported again", "`score.py`")


class Found(NamedTuple):
    """What a reader computed, or why not; what it said besides."""

    arrays: list[np.ndarray] | None
    words: str


class Bench:
    """Peers at work. directory: for what they write."""

    def __init__(self, environments: Path, directory: Path):
        self.environments, self.directory = environments, directory
        self.versions: dict[str, dict[str, str]] = {}
        self.jobs = 0
        self.ids: list[list[int]] = []  # of ESM-2

    def read(self, reader: str, name: str, models: dict[str, Path], save: Path | None = None, **job: Any) -> dict:
        """{model: Found} of a reader in an environment; also of "fresh", if there is one."""
        say(f"{reader} in {name}: {len(models)} directories")
        self.jobs += 1
        result, file = self.directory / f"result-{self.jobs}", self.directory / f"job-{self.jobs}.json"
        ids = {model: inputs(path) for model, path in models.items()}
        texts = ["".join(ESM2_TOKENS.letters[n] for n in row[1:-1]) for row in self.ids]
        job |= {"models": {model: str(path) for model, path in models.items()}, "ids": ids, "texts": texts}
        file.write_text(json.dumps(job | {"save": str(save) if save else None}))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ESM_NUM_THREADS": "1"}
        command = [python_of(name, self.environments), "-P", Path(__file__).with_name("peer.py"), reader, file, result]
        completed(command, f"{reader} in {name}", environment)
        content, arrays = json.loads(Path(f"{result}.json").read_text()), np.load(f"{result}.npz")
        check_versions(name, content["versions"])
        self.versions[name] = content["versions"]
        found = {}
        for model, told in (content["models"] | ({"fresh": {}} if "fresh" in job else {})).items():
            own = [arrays[each] for each in sorted(arrays.files) if each.rpartition("/")[0] == model]
            words = told.get("refused") or told.get("said", "")
            words = words.replace(str(models.get(model, model)), "DIRECTORY")
            found[model] = Found(None if "refused" in told else own, words)
        return found


class Cells:
    """Cells of tables, and the lines that they refer to."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.wrong: list[str] = []

    def note(self, words: str) -> str:
        words = words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
        words = words if len(words) <= 230 else f"{words[:227]}..."
        if words not in self.notes:
            self.notes.append(words)
        return f" ({self.notes.index(words) + 1})"

    def cell(self, found: Found, reference: list[np.ndarray], must: str = "") -> str:
        """must: names what has to agree, for the exit status."""
        if found.arrays is None:
            if must:
                self.wrong.append(f"{must}: {found.words}")
            return "refused" + self.note(found.words)
        difference, allowed = largest(found.arrays, reference)
        said = self.note(found.words) if found.words else ""
        if difference <= allowed:
            return f"{difference:.0e}{said}" if difference else f"0{said}"
        if must:
            self.wrong.append(f"{must}: off by {difference:.1e}")
        return f"**off by {difference:.2g}**{said}"


def largest(found: list[np.ndarray], reference: list[np.ndarray]) -> tuple[float, float]:
    """(the largest difference, what is allowed)."""
    pairs = list(zip(found, reference, strict=False))
    assert len(pairs) == 2
    assert all(a.shape == b.shape for a, b in pairs), [(a.shape, b.shape) for a, b in pairs]
    differences = [float(np.abs(a.astype(np.float64) - b).max()) for a, b in pairs]
    return max(differences), TOLERANCE * max(float(np.ptp(b)) for b in reference)


def read_ours(path: Path, hidden: bool = False) -> Found:
    try:
        return Found(ours(path, inputs(path), hidden), "")
    except UserError as error:
        return Found(None, str(error).replace(f"{path}/", "").replace(f"{path}: ", ""))


def scores(path: Path, reference: list[np.ndarray], directory: Path) -> Found:
    """Wild-type marginals of score.py as the two arrays of a Found, beside those of the reference's logits."""
    (directory / "one.fasta").write_text(f">one\n{PROTEIN}\n")
    (directory / "mutants.csv").write_text("\n".join(["mutant", *MUTATIONS]) + "\n")
    given = {"model_name_or_path": path, "fasta": directory / "one.fasta", "mutations": directory / "mutants.csv"}
    words = [f"--{name}={value}" for name, value in (given | {"output": directory / "scored.csv"}).items()]
    try:
        completed([sys.executable, "score.py", *words, "--wild_type_marginal_only", "--use_cpu"], "score.py")
    except UserError as error:
        return Found(None, str(error).replace(str(path), "DIRECTORY"))
    with (directory / "scored.csv").open() as file:
        found = [float(row["wild_type_marginal"]) for row in csv.DictReader(file)]
    (directory / "scored.csv").unlink()
    logits, place = reference[0].astype(np.float64), ESM2_TOKENS.letters.index
    expected = [logits[int(m[1:-1]), place(m[-1])] - logits[int(m[1:-1]), place(m[0])] for m in MUTATIONS]
    shifted = reference[0].copy()
    shifted[0, 0] += np.abs(np.array(found) - expected).max()
    return Found([shifted, reference[1]], "")


def esm2_files(bench: Bench, made: Path, saved: Path) -> tuple[dict[str, Path], dict[str, list[np.ndarray]]]:
    """({what wrote it: a directory}, {the same: logits that it must give})."""
    reference = ours(made, bench.ids)
    files, references = {"`final_model/`": made}, {"`final_model/`": reference}
    for number in TRANSFORMERS:
        files[f"the same, saved by transformers {number}"] = saved / number / ESM2
    files[f"of {NEWEST}, after `extras.export`"] = saved / "repaired"
    export_model(saved / NEWEST / ESM2, saved / "repaired")
    references |= dict.fromkeys(files, reference)
    vocabulary = (made / "vocab.txt").read_text()
    for number in TRANSFORMERS:
        place = saved / f"fresh-{number}"
        sizes = {"layers": 3, "hidden": 64, "heads": 4, "vocabulary": vocabulary, "ids": bench.ids}
        job = {"directory": str(place), **sizes}
        found = bench.read("transformers", f"transformers-{number}", {}, fresh=job)
        name = f"a new one, by transformers {number}"
        files[name], references[name] = place, found["fresh"].arrays
    (found,) = bench.read("peft", "peft", {"peft": made}, save=saved).values()
    files["peft 0.21.2: merged"], references["peft 0.21.2: merged"] = saved / "peft" / "merged", found.arrays[2:]
    files["peft 0.21.2: adapter"], references["peft 0.21.2: adapter"] = saved / "peft" / "adapter", found.arrays[2:]
    return files, references


def names_in(path: Path) -> str:
    """Which of the names are not the published ones."""
    weights = next(path.glob("*model.safetensors"))
    with safe_open(weights, framework="np") as file:
        names = list(file.keys())
    found = {"gamma, beta": ".LayerNorm.gamma", "`*`": ".*."}
    return "; ".join(word for word, part in found.items() if any(part in name for name in names)) or "published"


def own_columns(files: dict[str, Path], references: dict, cells: Cells, bench: Bench) -> dict[str, list[str]]:
    """{file: cells of OWN}. An adapter alone, which has no config.json, is refused."""
    rows, again = {}, {}
    for name, path in files.items():
        whole = (path / "config.json").exists()
        names = names_in(path) if whole else "LoRA's"
        found = read_ours(path) if whole else scores(path, references[name], bench.directory)
        rows[name] = [names, cells.cell(found, references[name], f"{name}: read" if whole else "")]
        if whole:
            say(f"{name}: exported again, and scored")
            out = bench.directory / "again" / str(len(again))
            again[name] = train(KINDS[ESM2], path, out, do_train=False, save_final_model=True)
    opened = bench.read("transformers", f"transformers-{NEWEST}", again)
    for name, path in files.items():
        if name in again:
            rows[name].append(cells.cell(opened[name], references[name], f"{name}: exported again"))
            found = scores(path, references[name], bench.directory)
            rows[name].append(cells.cell(found, references[name], f"{name}: score.py"))
    return rows


def esm2_table(bench: Bench, cells: Cells, files: dict[str, Path], references: dict) -> list[str]:
    rows = own_columns(files, references, cells, bench)
    whole = {name: path for name, path in files.items() if (path / "config.json").exists()}
    for column, (reader, environment) in READERS.items():
        found = bench.read(reader, environment, whole)
        for name, path in whole.items():
            hidden = reader == "sentence-transformers"
            reference = read_ours(path, hidden=True).arrays if hidden else references[name]
            must = column.startswith("transformers") and "final_model" in name
            rows[name].append(cells.cell(found[name], reference, f"{name}: {column}" if must else ""))
    head = [*OWN, *READERS]
    filled = {name: row + ["–"] * (len(head) - len(row)) for name, row in rows.items()}
    cut = len(OWN) + len(TRANSFORMERS)
    parts = (slice(cut), slice(cut, None))
    first, second = (table(["file", *head[x]], [[name, *row[x]] for name, row in filled.items()]) for x in parts)
    return [*first, "", *second]


def family_rows(bench: Bench, cells: Cells, made: dict[str, Path], opened: dict[str, dict], saved: Path) -> list[str]:
    rows = []
    for name, path in made.items():
        reference, row = ours(path, inputs(path)), [name]
        for number in TRANSFORMERS:
            is_open = opened[number][name].arrays is not None
            there = cells.cell(opened[number][name], reference, f"{name}: transformers {number}" if is_open else "")
            if not is_open:
                row.append(there)
                continue
            back = cells.cell(
                read_ours(saved / number / name), reference, f"{name} of transformers {number}: read here"
            )
            row.append(f"{there}; {back}")
        rows.append(row)
    return table(["family", *(f"transformers {number}" for number in TRANSFORMERS)], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def versions_table(bench: Bench) -> list[str]:
    rows = []
    for name in ENVIRONMENTS:
        asked = {pin.partition("==")[0] for pin in ENVIRONMENTS[name]}
        found = bench.versions[name]
        parts = (", ".join(f"{p} {v}" for p, v in found.items() if (p in asked) == own) for own in (True, False))
        rows.append([f"`{name}`", *parts])
    return table(["environment", "pinned, and seen at work", "from the project's own"], rows)


def measure(environments: Path, scratch: Path) -> tuple[str, list[str]]:
    """(the tables, what is wrong and is ours)."""
    bench, cells, saved = Bench(environments, scratch), Cells(), scratch / "saved"
    made = exports(scratch)
    bench.ids = inputs(made[ESM2])
    opened = {
        number: bench.read("transformers", f"transformers-{number}", made, save=saved / number)
        for number in TRANSFORMERS
    }
    families = family_rows(bench, cells, made, opened, saved)
    files, references = esm2_files(bench, made[ESM2], saved)
    esm2 = esm2_table(bench, cells, files, references)
    notes = [f"{number}. {words}" for number, words in enumerate(cells.notes, 1)]
    told = f"{date.today().isoformat()}, commit {commit()}, `./test.sh --compat`."
    parts = [
        [told],
        ["### Families", "", *families],
        ["### Files of ESM-2", "", *esm2],
        ["### What readers said", ""] + notes,
    ]
    parts.append(["### Versions", "", *versions_table(bench)])
    return "\n\n".join("\n".join(part) for part in parts), cells.wrong


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.compatibility", description=__doc__, formatter_class=form)
    place, page = ROOT / "build" / "compatibility", ROOT / "docs" / "compatibility.md"
    parser.add_argument("--environments", type=Path, default=place, help="where they are, or are made")
    parser.add_argument("--output", type=Path, default=page, help="a page, whose tables are replaced")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compatibility-") as scratch:
        text, wrong = measure(args.environments.resolve(), Path(scratch))
        text = text.replace(f"{scratch}/", "").replace(f"{ROOT}/", "")
    content = args.output.read_text() if args.output.exists() else f"{BEGIN}\n{END}\n"
    head, _, rest = content.partition(BEGIN)
    args.output.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    for line in wrong:
        say(f"wrong: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    run(main)
