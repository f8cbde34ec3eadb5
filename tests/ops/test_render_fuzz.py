"""render.sh with any value of any variable: refused in one line, or that very value wherever it stands.

What is expected is made without render.sh: the template's own YAML with the values put into its strings, so that
nothing else may change either.
"""

from __future__ import annotations

import functools
import random
import re
import shutil

import pytest

from tests.ops.manifests import (
    FILE_SYSTEM,
    GUIDE,
    KUBERNETES,
    SWITCHED,
    TEMPLATES,
    documents,
    run_shell,
    switches_of,
)

pytestmark = pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed")
EVERYTHING = GUIDE | FILE_SYSTEM | SWITCHED | {"IMAGE_URI": "registry/image:tag", "RUN_ID": "7", "HUGEPAGES": "5120Mi"}
EVERYTHING |= {"INIT_FROM": "/fsx-shared/start/final_model", "GUIDE": "0", "SHARDS": "8"}
FLAGS = {"DOWNLOAD_FLAGS": "", "PREPROCESS_FLAGS": "--a=1", "TRAIN_FLAGS": "--b", "TEXT_FLAGS": "--dataset=x --c"}
NUMBERS = (
    "completions",
    "parallelism",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "numNodes",
    "nvidia.com/gpu",
    "vpc.amazonaws.com/efa",
)
# The template with the most variables, but for those that only another one has.
OTHERS = {
    "CP_SIZE": "train-ddp-cp-template.yaml",
    "TEXT_FLAGS": "train-clm-template.yaml",
    "DOWNLOAD_FLAGS": "download-data-template.yaml",
    "PREPROCESS_FLAGS": "preprocess-template.yaml",
    "SHARDS": "prepare-shards-template.yaml",
    **dict.fromkeys([*FILE_SYSTEM, "AWS_REGION"], "fsx-pv-pvc-template.yaml"),
}
VALUES = (
    *("1", "2", "16", "0", "00", "010", "08", "+1", "-1", "1.0", "1e3", "0x10", "0o10", "0b1", "1_000", "12:30:45"),
    *("yes", "no", "on", "true", "null", "NULL", "~", "NaN", ".inf", "-", "--", "---", "...", "@x", "=", "!x"),
    *("!!str", "*a", "&a", "%x", "a:", "a: b", ": b", "#", "a #b", "#a", "[1]", "{a: 1}", '"', "'", 'a"b', "a\\"),
    *("|", ">", "?", "a b", " a", "a ", "\t", "a\tb", "a\n", "\na", "a\n    b: 1", "a\r", "a\x1b[2J", "\x7f"),
    *("ä", "a\u0085b: 1", "a\u2028  b: 1", "\u2029", "\ufeffa", "\ud7ff", "𝟙", "٣", "2001-01-01", "a" * 300),
    *("$(x)", "$x", "${HOME}", "$$", "`x`", "a;b", "a|b", "a>b", "*"),
    *("/fsx-shared", "/fsx-shared/", "/fsx-shared/a/", "/fsx-shared/../tmp/x", "/fsx-shared/./a", "/fsx-shared//a"),
    *("/fsx-shared/..", "/fsx-sharedx", "/tmp", "../a", "a/../b", "./a", "a/.", "..", ".", "a..b", "/fsx-shared/.a"),
    *("A", "a-", "-a", "a_b", "a.b", "a" * 42, "a" * 43, "9" * 30, "16Gi", "1.5Gi", "-1Gi", "0Mi", "Gi", "1 Gi"),
)


def expected(node, values: dict[str, str], key: str = ""):
    """A part of a template's YAML with values in the place of `${NAME}`."""
    if isinstance(node, dict):
        return {key: expected(value, values, key) for key, value in node.items()}
    if isinstance(node, list):
        return [expected(value, values, key) for value in node]
    if not isinstance(node, str):
        return node
    filled = re.sub(r"\$\{([A-Z_]+)\}", lambda found: values[found[1]], node)
    return int(filled) if key in NUMBERS and node.startswith("${") else filled


@functools.cache
def template_of(name: str) -> tuple[list[dict], list[str]]:
    """(its YAML with all switches on that leave its policy in, these switches)."""
    text = re.sub(r"(?m)^  annotations: \{.*\n", "", (KUBERNETES / name).read_text())  # of plain envsubst
    switches = [switch for switch in switches_of(name) if switch != "open"]
    text = re.sub(rf"(?m)^.*# \[not ({'|'.join(switches)})\]\n", "", text) if switches else text
    text = re.sub(r"(?m)^( *)# \[\w+\] ", r"\1", text).replace(" --cp_size=2 ", " --cp_size=[CP_SIZE] ")
    text = re.sub(r"(?m)^( *value: ).* # (\[[A-Z]+_FLAGS\])$", r'\1" \2"', text)
    text = re.sub(r"(?m)^( *[\w./-]+: )(?:.* )?# (\S*\[[A-Z_]+\]\S*)$", r'\1"\2"', text)
    return documents(re.sub(r"\[([A-Z]+(?:_[A-Z]+)+|NAMESPACE|MEMORY|HUGEPAGES|SHARDS)\]", r"${\1}", text)), switches


def assert_refused_or_exact(name: str, variables: dict[str, str]) -> bool:
    """Whether the template was rendered."""
    template, switches = template_of(name)
    flags = f"--with {','.join(switches)} " if switches else ""
    done = run_shell(f"kubernetes/render.sh {flags}{name}", variables)
    if done.returncode:
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert line.isprintable()
        return False
    told = dict(variables)
    for flags in FLAGS:  # words for a variable of the pod, in which the kubelet takes $$ for $
        told[flags] = re.sub(r"[\n\r\t]", " ", told[flags]).replace("$", "$$")
    told["TRAIN_FLAGS"] = f"--model_name_or_path={told['INIT_FROM']} {told['TRAIN_FLAGS']}"
    if "metrics" in switches:
        shown = f"--metrics_port=9464 --metrics_host=0.0.0.0 --run_name={told['JOB_NAME']}"
        told["TRAIN_FLAGS"] = f"{shown} {told['TRAIN_FLAGS']}"
    assert documents(done.stdout) == expected(template, told)
    return True


@pytest.mark.parametrize("template", TEMPLATES)
def test_render_keeps_every_yaml_value(template):
    assert assert_refused_or_exact(template, EVERYTHING | FLAGS)


def cases() -> list[tuple[str, str]]:
    """Of each variable some values, and each value for some variables; the same ones each time."""
    draw, found = random.Random(32), set()
    names = sorted({*EVERYTHING, *FLAGS} - {"ACCOUNT", "TAG", "REGISTRY", "DOCKER_IMAGE_NAME"})  # those are IMAGE_URI
    for value in VALUES:
        found.add((draw.choice(names), value))
    for name in names:
        found.add((name, draw.choice(VALUES)))
    return sorted(found)


@pytest.mark.slow
def test_render_keeps_or_refuses_any_value():
    rendered = set()
    for name, value in cases():
        if assert_refused_or_exact(OTHERS.get(name, "train-ddp-template.yaml"), EVERYTHING | FLAGS | {name: value}):
            rendered.add(name)
    assert {"TRAIN_FLAGS", "MODEL", "RUN_ID"} <= rendered


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUM_NODES", "010"),
        ("NUM_NODES", "0"),
        ("MIN_NODES", "3"),
        ("GPU_PER_NODE", "08"),
        ("OUTPUT_DIR", "/fsx-shared/../tmp/x"),
        ("TARGET_PATH", "/fsx-shared/a/./b"),
        ("MODEL", "../../other"),
        ("JOB_NAME", "123"),
        ("MEMORY", "yes"),
        ("TRAIN_FLAGS", "--a\u2028                - name: HOME"),
    ],
)
def test_render_refuses_values_of_another_meaning(name, value):
    assert not assert_refused_or_exact("train-ddp-template.yaml", EVERYTHING | FLAGS | {name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("RUN_ID", "010"), ("NAMESPACE", "123"), ("IMAGE_URI", "1e3"), ("TRAIN_FLAGS", "ä #: ${HOME}")]
)
def test_render_quotes_values_that_yaml_would_convert(name, value):
    assert assert_refused_or_exact("train-ddp-template.yaml", EVERYTHING | FLAGS | {name: value})


def test_render_switch_is_no_pattern():
    done = run_shell("kubernetes/render.sh --with '.*' train-ddp-template.yaml", EVERYTHING)
    assert (done.returncode, done.stdout) == (2, "")
