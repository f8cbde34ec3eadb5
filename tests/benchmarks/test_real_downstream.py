"""benchmarks.real_downstream: archives are only unpacked, tables are what they say, and the page has their figures."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.contact_baselines import untrained_model
from benchmarks.real_downstream import MAVENN, TABLES, fetch, mutations_of, page, read_chains, read_measured, unpack
from common.cli import UserError
from common.models.esm2.config import load_config
from common.models.layers.config_base import override
from extras.after.downstream.contacts import ContactEvaluation
from extras.after.inference.correlation import BLOSUM62, RESIDUES
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures
from tests.training_fixtures import TINY_OVERRIDES

SETUP = b"import pathlib; pathlib.Path('ran').touch()"


def make_tar(path: Path, *members: tarfile.TarInfo | str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in ("pkg/setup.py", "pkg/data/kept.pdb", *members):
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = 0 if info.linkname else len(SETUP)
            archive.addfile(info, io.BytesIO(SETUP))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    "members",
    [
        ("pkg/data/../../../out.pdb",),
        (link("pkg/data/up", "../../..", tarfile.SYMTYPE), "pkg/data/up/out.pdb"),
        (link("pkg/data/out.pdb", "/etc/hostname", tarfile.SYMTYPE),),
        (link("pkg/data/out.pdb", "../../../secret", tarfile.LNKTYPE),),
        (link("pkg/data/out.pdb", "", tarfile.CHRTYPE),),
    ],
    ids=["dots", "through a link", "symbolic link", "hard link", "device"],
)
def test_unpack_refuses_names_outside(tmp_path, monkeypatch, members):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").touch()
    archive = make_tar(tmp_path / "pkg.tar.gz", *members)
    with pytest.raises(UserError, match=r"pkg\.tar\.gz: cannot be unpacked: "):
        unpack(archive, "pkg/data/", tmp_path / "new")
    assert files_of(tmp_path) - {"new/pkg/data/kept.pdb"} == {"pkg.tar.gz", "secret"}


def test_unpack_writes_its_folder_alone_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tar, wheel = make_tar(tmp_path / "pkg.tar.gz", "/out.pdb", "out.pdb"), tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pkg/setup.py", "pkg/data/kept.pdb", "pkg/data/../../../dots.pdb", "/out.pdb"):
            archive.writestr(name, SETUP)
    assert unpack(tar, "pkg/data/", tmp_path / "of_tar") == tmp_path / "of_tar/pkg/data"
    unpack(wheel, "pkg/data/", tmp_path / "of_wheel")
    unpacked = {"of_tar/pkg/data/kept.pdb", "of_wheel/pkg/data/kept.pdb", "of_wheel/pkg/data/dots.pdb"}
    assert files_of(tmp_path) == {"pkg.tar.gz", "pkg.whl", *unpacked}
    with pytest.raises(UserError, match="it has no pkg/other/"):
        unpack(wheel, "pkg/other/", tmp_path / "of_wheel")
    wheel.write_bytes(b"neither")
    with pytest.raises(UserError, match=r"pkg\.whl: cannot be unpacked"):
        unpack(wheel, "pkg/data/", tmp_path / "of_wheel")


def test_fetch_takes_the_file_of_this_sha256_alone(tmp_path):
    index, cache = tmp_path / "index", tmp_path / "cache"
    answer = index / MAVENN.package / MAVENN.version / "json"
    answer.parent.mkdir(parents=True)
    (tmp_path / "there.whl").write_bytes(b"wheel")
    urls = [{"filename": "other", "url": ""}, {"filename": MAVENN.file, "url": (tmp_path / "there.whl").as_uri()}]
    answer.write_text(json.dumps({"urls": urls}))
    archive = MAVENN._replace(sha256=hashlib.sha256(b"wheel").hexdigest())
    path = fetch(archive, cache, index.as_uri())
    answer.unlink()
    assert fetch(archive, cache, index.as_uri()).read_bytes() == b"wheel"
    with pytest.raises(UserError, match="another sha256 than"):
        fetch(MAVENN, cache, index.as_uri())
    path.unlink()
    with pytest.raises(UserError, match=r"mavenn-.*\.whl: not to be had from file:"):
        fetch(archive, cache, index.as_uri())
    assert files_of(cache) == set()


def write_measured(path: Path, wild_type: str, rows: int = 60) -> list[tuple[str, int, float]]:
    """A table like mavenn's of single and double mutants."""
    rng = np.random.default_rng(len(wild_type))
    made = []
    for number in range(rows):
        letters, mutations = list(wild_type), 1 + number % 2
        for at in rng.choice(len(letters), mutations, replace=False):
            letters[at] = rng.choice([letter for letter in RESIDUES if letter != wild_type[at]])
        made.append(("".join(letters), mutations, float(rng.normal())))
    with gzip.open(path, "wt") as file:
        file.write("\n".join(["set,dist,y,x", *(f"training,{count},{y},{x}" for x, count, y in made)]))
    return made


def test_read_measured_finds_the_wild_type(tmp_path):
    rows = write_measured(tmp_path / "t.csv.gz", "MKVLAGWHDE")
    table = read_measured(tmp_path / "t.csv.gz")
    assert table.wild_type == "MKVLAGWHDE"
    assert list(zip(table.sequences, table.mutations.tolist(), table.measured.tolist(), strict=True)) == rows
    assert mutations_of(table, 2, 100).tolist() == list(range(1, 60, 2))
    drawn = mutations_of(table, 2, 10).tolist()
    assert len(set(drawn)) == 10
    assert drawn == sorted(drawn)
    assert set(drawn) < set(range(1, 60, 2))
    stop = table.sequences[1].replace("W", "*").replace("M", "*")
    assert 1 not in mutations_of(table._replace(sequences=[table.sequences[0], stop, *table.sequences[2:]]), 2, 100)
    for text in ("set,dist,y,x\na,0,1,MKV\na,0,1,MKV\na,2,1,MKA\n", "set,dist,y,x\na,0,1,MK\na,0,1,MKV\n", "a\n1\n"):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(UserError, match=r"bad\.csv: "):
            read_measured(tmp_path / "bad.csv")


def test_page_has_the_figures_of_the_run_and_of_scipy(tmp_path):
    write_structures(tmp_path / "pdb", coil_structures(COIL_STRUCTURES, 42))
    for path in sorted((tmp_path / "pdb").iterdir())[5:]:
        path.unlink()
    for file, wild_type in zip(TABLES.values(), ("MKVLAGWHDE", "MKVLAGWHDEM", "MKVLAGWHDEMK"), strict=True):
        rows = write_measured(tmp_path / file, wild_type)
    model = untrained_model(override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES), 42)
    text = page({"tiny": model}, read_chains([tmp_path / "pdb"] * 2), tmp_path, 20)
    assert "**Only 5 chains, 0 of them of one ribosome" in text
    assert "heads fitted on 2, evaluated on 3 others." in text
    expected = ContactEvaluation(str(tmp_path / "pdb"), 1024).evaluate(model)
    (contacts,) = [line for line in text.splitlines() if line.startswith("| tiny |")]
    # The coils' contacts are of the long range.
    shown = [f"{expected[f'eval_contacts_long_{top}']:.1%}" for top in ("p_at_l", "p_at_l5")]
    assert contacts.strip("| ").split(" | ")[1:] == ["-"] * 4 + shown
    table = read_measured(tmp_path / file)
    drawn = [rows[n] for n in mutations_of(table, 1, 20)]
    changes = [[pair for pair in zip(wild_type, x, strict=True) if pair[0] != pair[1]] for x, _, _ in drawn]
    scores = [BLOSUM62[RESIDUES.index(old), RESIDUES.index(new)] for ((old, new),) in changes]
    (blosum,) = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| blosum62")]
    assert blosum[5].split(" ")[0] == f"{spearmanr(scores, [y for *_, y in drawn]).statistic:.3f}"
    assert len(blosum) == 1 + 2 * len(TABLES)
    assert sum(line.startswith("| tiny, ") for line in text.splitlines()) == 2
