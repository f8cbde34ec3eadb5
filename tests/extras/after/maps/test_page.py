"""The page fetches nothing, runs no text of a file, and has each protein's place and values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from extras.after.maps import page
from extras.after.maps.colouring import MISSING, Colouring, of_classes, of_lengths
from extras.after.maps.page import write_page
from extras.after.maps.projections import Projection
from extras.after.maps.vectors import Embedded

EVIL = '</script><script>alert(1)</script><img src="https://example.org/x">'
# Enough of a browser for the script of the page: what it makes and writes is recorded.
BROWSER = """
const made = [];
const fake = id => made[id] ??= new Proxy({id, style: {}, children: [], clientWidth: 800, clientHeight: 600,
  getContext: () => new Proxy({}, {get: (_, name) => (...args) => { drawn.push(name) }, set: () => true}),
  append(...each) { this.children.push(...each) }, replaceChildren(...each) { this.children = each },
  classList: {toggle: () => true}}, {});
const drawn = [];
let number = 0;
globalThis.Option = class { constructor(text) { this.text = text } };
globalThis.devicePixelRatio = 1;
globalThis.addEventListener = () => {};
globalThis.document = {getElementById: fake, createElement: () => fake(`new${number++}`)};
fake("data").textContent = DATA;
SCRIPT
element("canvas").onpointermove({buttons: 0, offsetX: place(0)[0], offsetY: place(0)[1]});
const dots = drawn.filter(name => name === "arc").length;
element("legend").children[0].onclick();
element("search").oninput({target: {value: "p2"}});
console.log(JSON.stringify({dots, note: element("note").textContent, found: [...found],
  legend: element("legend").children.map(row => row.children[1].textContent), hidden: [...hidden]}));
"""


def written(tmp_path, ids: list[str], colourings: list[Colouring]) -> tuple[str, dict]:
    points = np.random.default_rng(0).normal(size=(len(ids), 2))
    embedded = Embedded(ids, np.arange(1, len(ids) + 1), np.zeros((len(ids), 2), np.float32))
    write_page(tmp_path / "map.html", embedded, Projection(points, ("t-SNE 1", "t-SNE 2")), colourings)
    text = (tmp_path / "map.html").read_text()
    return text, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_page_has_no_address_and_runs_no_text_of_a_file(tmp_path):
    classes = of_classes("family", [EVIL, "", "b"])
    text, data = written(tmp_path, [EVIL, "P1", "P2"], [classes])
    plain, _ = written(tmp_path, ["P0", "P1", "P2"], [of_classes("family", ["a", "", "b"])])
    for each in (text, plain):
        assert each.count("<script") == each.count("</script>") == 2
        assert "<img" not in each
        assert "innerHTML" not in each
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+|\b(?:src|href)=|@import|url\(|fetch\(", plain) == []
    assert "default-src 'none'" in plain
    assert data["ids"] == [EVIL, "P1", "P2"]
    assert data["colourings"][0]["texts"] == [EVIL, "", "b"]


def test_page_has_colours_of_classes_and_of_numbers(tmp_path):
    numbers = Colouring("y", ["1", "", "3"], np.array([1.0, np.nan, 3.0]), {})
    _, data = written(tmp_path, ["P0", "P1", "P2"], [of_classes("family", ["a", "", "b"]), numbers])
    classes, of_numbers = data["colourings"]
    assert [classes["colours"][code] for code in classes["codes"]][1] == MISSING
    assert [row[::2] for row in classes["legend"]] == [["a", 1], ["b", 1], ["no value", 1]]
    assert classes["members"] == {"a": ["a"], "b": ["b"], "other classes": [], "no value": [""]}
    assert [row[0] for row in of_numbers["legend"]] == ["1.02", "1.51", "2", "2.49", "2.98", "no value"]
    assert [row[2] for row in of_numbers["legend"]] == [None] * 5 + [1]


def test_page_of_many_proteins_has_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST", 3)
    _, data = written(tmp_path, [f"P{n}" for n in range(9)], [of_lengths(np.arange(1, 10))])
    assert len(data["ids"]) == len(data["x"]) == len(data["colourings"][0]["texts"]) == 3
    assert data["about"] == "3 of 9 proteins"
    assert [int(name[1:]) + 1 for name in data["ids"]] == data["lengths"]


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_script_of_the_page_draws_finds_and_hides(tmp_path):
    text, data = written(
        tmp_path, ["P0", "P1", "P2"], [of_classes("family", ["a", "", "b"]), of_lengths(np.arange(3))]
    )
    script = re.search(r"<script>\n(.*?)</script>", text, re.S)[1].replace('"use strict";', "")
    (tmp_path / "run.js").write_text(
        BROWSER.replace("DATA", json.dumps(json.dumps(data)), 1).replace("SCRIPT", script, 1)
    )
    done = subprocess.run(["node", tmp_path / "run.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["note"] == "P0\n1 residues\nfamily: a"
    assert seen["dots"] == 6  # three at first, three when one is hovered over
    assert seen["legend"] == ["a (1)", "b (1)", "no value (1)"]
    assert (seen["found"], seen["hidden"]) == ([2], ["a"])
