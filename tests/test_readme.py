"""The README's commands work as written (with fewer steps and smaller models), and quickstart.sh does its job."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT
from tests.data_fixtures import proteins
from tests.typed import alarming, blocks, checkout_in, join_lines, sh, smaller

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return checkout_in(tmp_path_factory.mktemp("checkout"))


def test_readme_commands_run_in_order(checkout):
    commands = blocks(README, "bash")
    assert len(commands) == 2
    for command in commands:
        done = sh(smaller(command), checkout)
        assert done.returncode == 0, done.stderr[-2000:]
        assert alarming(done) == []
    for name in re.findall(r"`([\w.]+(?:\.jsonl|\.png|\.json))`", README):
        assert (checkout / "out" / name).exists() or name == "training_curves.png", name
    (python,) = blocks(README, "python")
    done = sh(
        f"python - <<'E'\n{python}\nprint(sum(p.numel() for p in model.parameters()), len(tokenizer))\nE", checkout
    )
    assert done.stdout.split() == ["7512474", "33"], done.stderr[-2000:]  # 7,512,353 and 121 of the contact head


def test_readme_links_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_readme_is_short():
    assert README.count("\n") <= 150


def test_readme_table_has_commands_that_are_typed():
    """Each stands in a block that a test types: of the README, of a page (tests/test_documents.py), or Slurm's and
    Kubernetes' (tests/ops)."""
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    typed = [block for text in [README, *pages] for block in blocks(text, "bash")] + blocks(README, "sh")
    lines = {
        re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for line in join_lines("\n".join(typed)).splitlines()
    }
    table = README[README.index("## What you can do") : README.index("## How it compares")]
    commands = re.findall(r"\| `(.+)` \|$", table.replace("\\|", "|"), re.M)
    assert len(commands) == 15
    assert [command for command in commands[1:] if command not in lines] == []
    assert commands[0] == "./quickstart.sh --fasta my_proteins.fasta"  # test_quickstart_trains_and_resumes


def test_quickstart_trains_and_resumes(checkout, tmp_path):
    """Run for real on a few proteins, from elsewhere; the second run finds all done and ends on the same table."""
    (tmp_path / "my.fasta").symlink_to(checkout / "my_proteins.fasta")
    script = checkout / "quickstart_small.sh"
    whole = (ROOT / "quickstart.sh").read_text()
    script.write_text(whole.replace("_pack 4096", "_pack 512").replace("20 --steps 50", "20 --steps 2"))
    command = f"bash {script} --fasta my.fasta --steps 2 --output out"
    first = sh(f"{command} --generate", tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    assert alarming(first) == []
    for expected in ("before training", "unigram predictor", "after training", "tokens/s", "final_model", "Next:"):
        assert expected in first.stdout, first.stdout[-2000:]
    known = first.stdout[first.stdout.index("== New proteins") :]
    for expected in ("proteins     20, 20 different", "nats a residue", "composition", "nearest", "generated.fasta"):
        assert expected in known, known
    assert (tmp_path / "out" / "generated.fasta").read_text().count(">") == 20
    chosen = (tmp_path / "out" / "run.json").stat()
    again = sh(command, tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    table = first.stdout[first.stdout.index("held-out proteins") : first.stdout.index("speed")]
    assert table in again.stdout
    assert "Resuming after step 2" in again.stderr
    assert (tmp_path / "out" / "run.json").stat().st_mtime_ns == chosen.st_mtime_ns, "chosen anew"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [("ur50_id", "ur90_id", "sequence"), ("id", "sequence")])
def test_quickstart_trains_on_a_directory_of_parquet(checkout, tmp_path, columns):
    rows = [{"ur50_id": f"C{n // 2}", "ur90_id": f"P{n}", "id": f"P{n}", "sequence": text} for n, (_, text) in
            enumerate(proteins(1000))]  # fmt: skip
    for number in range(2):
        path = tmp_path / f"my_data/part-{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows[number::2]).select(columns), path)
    script = checkout / "quickstart_parquet.sh"
    script.write_text((ROOT / "quickstart.sh").read_text().replace("--tokens_per_pack 4096", "--tokens_per_pack 512"))
    done = sh(f"bash {script} --dataset my_data --steps 2 --output out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert alarming(done) == []
    assert "after training" in done.stdout
    assert (tmp_path / "out/model/final_model/config.json").exists()
    assert not (tmp_path / "out/csv").exists()


def test_quickstart_with_a_text_ends_in_a_sample(checkout, tmp_path):
    script = checkout / "quickstart_text.sh"
    whole = (ROOT / "quickstart.sh").read_text()
    script.write_text(whole.replace("_width 256", "_width 32").replace("batch_size 8", "batch_size 1"))
    (tmp_path / "my.txt").write_text("The run ends.\n\n" * 60)
    done = sh(f"bash {script} --text my.txt --steps 2 --output out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert alarming(done) == []
    assert "held-out text" in done.stdout
    assert re.search(r"^== 5/5 What it writes\nThe ", done.stdout, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text /no/such/file", "no such file"),
        ("--fasta /no/such/file", "no such file"),
        ("--dataset /no/such/directory", "no such file or directory, and no OWNER/NAME of the Hub"),
        ("--dataset . --fasta README.md", "give one of them"),
        ("--steps many", "a number of steps"),
        ("--steps", "needs a value"),
        ("--text README.md --generate", "--generate: of proteins"),
        ("--frobnicate", "unknown argument"),
    ],
)
def test_quickstart_refuses_bad_arguments_in_one_line(arguments, message):
    done = sh(f"./quickstart.sh {arguments}", ROOT)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
