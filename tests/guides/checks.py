"""What is asked of a row: its command worked (tests/guides/session.py), parses, translates, or is tested elsewhere.

A check is a function of `Here` that asserts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.cli import UserError
from common.flags import flat, parse_arguments
from common.training.command_line import parse_run
from tests.data_fixtures import DOWNLOAD, TOKENIZE, load_script
from tests.guides.session import ROOT, Call, Typed, run_in_pod
from tests.ops.manifests import containers, pods
from tests.ops.pod import started

STRATEGIES = {
    "train_ddp.py": "DdpFlags",
    "train_ddp_cp.py": "DdpCpFlags",
    "train_fsdp2.py": "FsdpFlags",
    "train_mfsdp.py": "MegatronFlags",
}


@dataclass(frozen=True)
class Here:
    """What a check may look at: the row's command, what came of it, and one real run, made when asked."""

    command: str
    typed: Typed | None
    tmp: Path
    demonstration: Callable[[], Path]


Check = Callable[[Here], None]


# ---- flags of the scripts, by their real parsers --------------------------------------------------------------------


def flags_of(script: str, words: list[str]) -> dict:
    """The flags as the script itself reads them. UserError where it refuses them."""
    if script == "0.download_data.py":
        return vars(parse_arguments("", DOWNLOAD.Arguments, words))
    if script == "1.tokenize_uniref_csv.py":
        return vars(parse_arguments("", TOKENIZE.TokenizeFlags, words))
    return flat(parse_run("", getattr(load_script(script), STRATEGIES[script]), words))


def trained(words: tuple[str, ...]) -> tuple[str, dict]:
    """The script that a launcher's, srun's or python's words start, and its flags."""
    at = next(
        n
        for n, word in enumerate(words)
        if Path(word).name in (*STRATEGIES, "0.download_data.py", "1.tokenize_uniref_csv.py")
    )
    given = [str(ROOT / word) if word.startswith("configs/") else word for word in words[at + 1 :]]
    return Path(words[at]).name, flags_of(Path(words[at]).name, given)


def given_to_script(here: Here) -> list[str]:
    """The words after the script in the row's command."""
    words = shlex.split(here.command)
    return words[next(n for n, word in enumerate(words) if word.endswith(".py")) + 1 :]


def assert_has(flags: dict, expected: dict) -> None:
    assert {name: flags.get(name, "no such flag") for name in expected} == expected


def parses(script: str, **expected) -> Check:
    """The script takes the flags of the row's command, whatever the name of the script in it."""

    return lambda here: assert_has(flags_of(script, given_to_script(here)), expected)


def defaults(script: str, *words: str, **expected) -> Check:
    """What the script does if no flag says otherwise."""
    return lambda here: assert_has(flags_of(script, list(words)), expected)


def translates(script: str, hints: tuple[str, ...] = (), **expected) -> Check:
    """`python -m extras.migrate` makes a command of it that the script takes.

    hints: what the script says if it is given the guide's own words.
    """

    def check(here: Here) -> None:
        from extras.migrate import translate

        made = translate(shlex.split(here.command))
        assert made.script == script
        if not script.endswith(".py"):  # a job script, with its own flags
            assert (ROOT / script).is_file()
            return
        assert_has(flags_of(made.script, made.argv), expected)
        if hints:
            refuses(script, *hints)(here)

    return check


def refuses(script: str, *hints: str) -> Check:
    """The script refuses the row's flags in one line that has `hints` in it, without a guess."""

    def check(here: Here) -> None:
        with pytest.raises(UserError) as refused:
            flags_of(script, given_to_script(here))
        said = str(refused.value)
        assert [hint for hint in hints if hint not in said] == [], said
        assert "did you mean" not in said
        assert "\n" not in said

    return check


def understands(script: str) -> Check:
    """The script takes the row's flags, or says in one line what to give instead, without a guess."""

    def check(here: Here) -> None:
        said = "taken: "
        try:
            flags_of(script, given_to_script(here))
        except UserError as error:
            said = str(error)
        assert re.fullmatch("(?!.*did you mean).*: .*", said)

    return check


# ---- commands that were typed ---------------------------------------------------------------------------------------


def runs(*checks: Callable[[Typed], None]) -> Check:
    """The command worked."""

    def check(here: Here) -> None:
        assert here.typed is not None, "the shell ended before this command"
        assert here.typed.status == 0, here.typed.text("err") or here.typed.text("out")
        for each in checks:
            each(here.typed)

    return check


def asks(program: str, *patterns: str) -> Callable[[Typed], None]:
    """It asked `program` for things that match, in this order."""

    def check(typed: Typed) -> None:
        asked = [str(call) for call in typed.of(program)]
        rest = iter(asked)
        for pattern in patterns:
            assert any(re.search(pattern, call) for call in rest), f"{pattern}: {asked}"

    return check


def prints(text: str) -> Callable[[Typed], None]:
    def check(typed: Typed) -> None:
        assert text in typed.text("out")

    return check


def applies(*objects: str, namespace: str = "default") -> Callable[[Typed], None]:
    """kubectl got these objects (Kind/name), all good but for the image's name, and perhaps policies besides."""

    def check(typed: Typed) -> None:
        from tests.ops.policy import broken_rules  # skips the row where its packages are missing

        there = [f"{d['kind']}/{d['metadata']['name']}" for d in typed.manifest]
        assert [each for each in there if not each.startswith(("NetworkPolicy/", "Secret/"))] == list(objects)
        for document in typed.manifest:
            broken = broken_rules(document)
            broken.pop("image", None)
            assert broken == {}
            assert document["metadata"].get("namespace", namespace) == namespace

    return check


def image(name: str) -> Callable[[Typed], None]:
    def check(typed: Typed) -> None:
        assert {c["image"] for d in typed.manifest for c in containers(d)} == {name}

    return check


def resources(**of_a_pod: int) -> Callable[[Typed], None]:
    """Pods of the training job, and what each asks for: GPUs and EFA devices."""

    def check(typed: Typed) -> None:
        (job,) = [d for d in typed.manifest if d["kind"] == "PyTorchJob"]
        worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        (container,) = containers(job)
        for kind in ("requests", "limits"):
            asked = container["resources"][kind]
            found = {"gpus": asked["nvidia.com/gpu"], "efa": asked["vpc.amazonaws.com/efa"]}
            assert found | {"pods": worker["replicas"]} == of_a_pod

    return check


def pod_runs(script: str, says: str = "", **expected) -> Callable[[Typed], None]:
    """The pod's own command starts this script with these flags, as its parser reads them, and logs `says`."""

    def check(typed: Typed) -> None:
        (container,) = [c for d in typed.manifest for c in containers(d)]
        words, variables = started(container, {})
        calls, said = run_in_pod(words, variables, typed.record / "pod")
        found, flags = trained(calls[-1].words)
        assert found == script
        assert_has(flags, expected)
        assert says in said

    return check


def of_a_pod(typed: Typed) -> None:
    """The pod that kubectl is asked about is one that the controllers make of what was applied before."""
    (call,) = typed.of("kubectl")
    name = next(word for word in call.words[1:] if not word.startswith("-"))
    applied = [Typed(path.parent, typed.checkout) for path in typed.record.parent.glob("*/manifest")]
    made = []
    for document in (document for each in applied for document in each.manifest):
        own = document["metadata"]["name"]
        if document["kind"] == "PyTorchJob":
            replicas = document["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
            made += [f"{own}-worker-{index}" for index in range(replicas)]
        elif document["kind"] in ("Pod", "Job"):
            made.append(own if document["kind"] == "Pod" else rf"{own}-\w{{5}}")
    assert [pattern for pattern in made if re.fullmatch(pattern, name)], f"{name}: {made}"


def on_volume(path: str) -> Callable[[Typed], None]:
    """Every pod mounts the shared volume there."""

    def check(typed: Typed) -> None:
        found = [pod["spec"] for document in typed.manifest for pod in pods(document)]
        assert found
        for spec in found:
            claims = {
                v["name"]: v["persistentVolumeClaim"]["claimName"]
                for v in spec["volumes"]
                if "persistentVolumeClaim" in v
            }
            (container,) = spec["containers"]
            assert {claims.get(m["name"]): m["mountPath"] for m in container["volumeMounts"]}["fsx-claim"] == path

    return check


def job_runs(script: str, nodes: int, log: str, says: str = "", **expected) -> Callable[[Typed], None]:
    """The batch job starts this script on so many nodes, with these flags, and logs `says` to `log` where it was
    submitted.

    expected: values may have {fsx}, the shared file system.
    """

    def check(typed: Typed) -> None:
        call = _training_step(typed)
        assert f"--nodes={nodes}" in call.words
        found, flags = trained(call.words)
        assert found == script
        fsx = str(typed.record.parent / "fsx")
        assert_has(flags, {name: v.replace("{fsx}", fsx) if isinstance(v, str) else v for name, v in expected.items()})
        assert typed.text("log").strip() == log
        assert (typed.checkout / "slurm" / log).exists()
        assert says in typed.text("said")

    return check


def step_has(*words: str) -> Callable[[Typed], None]:
    """srun itself gets these words; {fsx}, {slurm}: directories."""

    def check(typed: Typed) -> None:
        places = {"fsx": typed.record.parent / "fsx", "slurm": typed.checkout / "slurm"}
        given = _training_step(typed).words
        assert [word for word in words if word.format(**places) not in given] == [], given

    return check


def _training_step(typed: Typed) -> Call:
    """The srun that trains (another one looks at the nodes for the same command)."""
    calls = [call for call in typed.of("srun") if "extras.preflight" not in call.words]
    (call,) = [call for call in calls if any(Path(word).name in STRATEGIES for word in call.words)]
    return call


def all_of(*checks: Check) -> Check:
    def check(here: Here) -> None:
        for each in checks:
            each(here)

    return check


# Of train_results.json and eval_results.json.
TRAIN_KEYS = ("epoch", "total_flos", "train_loss", "train_runtime", "train_samples")
TRAIN_KEYS += ("train_samples_per_second", "train_steps_per_second")
EVAL_KEYS = ("eval_accuracy", "eval_loss", "eval_runtime", "eval_samples", "eval_samples_per_second")
EVAL_KEYS += ("eval_steps_per_second", "perplexity")


# ---- the demonstration: data, training and evaluation, for real -----------------------------------------------------


def has_keys(file: str, *keys: str) -> Check:
    """A results file of the real run has these keys."""

    def check(here: Here) -> None:
        results = json.loads((here.demonstration() / "out" / file).read_text())
        assert [key for key in keys if key not in results] == []

    return check


def logs(step: str, *patterns: str) -> Check:
    """The real run's log of `step` has lines that match, in this order."""

    def check(here: Here) -> None:
        text = (here.demonstration() / f"{step}.log").read_text()
        at = 0
        for pattern in patterns:
            found = re.compile(pattern, re.M).search(text, at)
            assert found, f"{pattern}\n{text}"
            at = found.end()

    return check


def leaves(*patterns: str) -> Check:
    """The real run has left files that match."""

    def check(here: Here) -> None:
        directory = here.demonstration()
        assert [pattern for pattern in patterns if not [*directory.glob(pattern)]] == []

    return check


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    says: str
    check: Check
    command: str = ""
    blocks: tuple[int, ...] = ()
    typed: bool = False
    before: str = ""


def typed(says: str, command: str, *checks, blocks: tuple[int, ...], before: str = "") -> Row:
    """A command that works when it is typed, and what else is checked of it."""
    return Row(says, runs(*checks), command, blocks, True, before)
