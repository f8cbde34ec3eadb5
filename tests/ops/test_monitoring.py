"""monitoring/: real Prometheus on a real run. Each alert fires when it should, each panel has something to show."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.conftest import ROOT
from tests.live_runs import LiveRun
from tests.ops.manifests import TRAINING, containers, documents, pods, render, values
from tests.ops.policy import METRICS, PROMETHEUS, broken_rules
from tests.patience import run, wait_until
from tests.test_documents import anchors
from tests.training_fixtures import free_port

MONITORING = ROOT / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
NAMES = [rule["alert"] for rule in ALERTS]
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")), reason="prometheus is not installed"
)


@needs_prometheus
def test_prometheus_takes_the_configuration():
    checked = run(["promtool", "check", "config", "prometheus.yaml"], cwd=MONITORING)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def outcome(directory: Path, rules: list[dict]) -> subprocess.CompletedProcess:
    """monitoring/alerts_test.yaml on these alerts."""
    (directory / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "training", "rules": rules}]}))
    shutil.copy(MONITORING / "alerts_test.yaml", directory)
    return run(["promtool", "test", "rules", "alerts_test.yaml"], cwd=directory)


@needs_prometheus
def test_alerts_fire_and_do_not_fire(tmp_path):
    done = outcome(tmp_path, ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("name", NAMES)
def test_alerts_that_never_or_always_fire_are_found(tmp_path, name):
    """By alerts_test.yaml; also one that waits for nothing."""
    index = NAMES.index(name)
    fires = re.sub(r" > .*", " > -1e12", ALERTS[index]["expr"], flags=re.S)
    changes = [{"expr": "vector(0) > 1"}, {"expr": fires}, *([{"for": "0s"}] if "for" in ALERTS[index] else [])]
    for change in changes:
        rules = [rule | (change if rule is ALERTS[index] else {}) for rule in ALERTS]
        done = outcome(tmp_path, rules)
        assert done.returncode != 0, change
        assert name in done.stderr + done.stdout


def test_alerts_have_their_section_in_the_page():
    there = anchors(ROOT / "docs" / "operating.md")
    for rule in ALERTS:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor) == ("docs/operating.md", rule["alert"].lower())
        assert anchor in there


def test_dashboard_has_each_panel_once_and_none_over_another():
    cells = []
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        cells += [(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


class Server:
    """A Prometheus of the project's own configuration, but for its port, its pace, and the target."""

    def __init__(self, directory: Path, target: int):
        self.port = free_port()
        text = (MONITORING / "prometheus.yaml").read_text()
        assert text.count("localhost:9464") == 1
        config = text.replace("localhost:9464", f"127.0.0.1:{target}").replace("15s", "1s")
        (directory / "prometheus.yaml").write_text(config)
        shutil.copy(MONITORING / "alerts.yaml", directory)
        own = [f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{self.port}"]
        self.log = directory / "prometheus.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={directory}/prometheus.yaml", *own], stderr=log, stdout=log
            )

    def get(self, what: str, **query: str) -> dict:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{what}?{urlencode(query)}", timeout=30) as answer:
                return json.load(answer)["data"]
        except (URLError, ConnectionError):
            assert self.process.poll() is None, self.log.read_text()
            return {}

    def ask(self, expression: str) -> list[dict]:
        return self.get("query", query=expression).get("result", [])


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    (directory := tmp_path / "prometheus").mkdir()
    server = Server(directory, free_port())
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)


@needs_prometheus
def test_prometheus_sees_a_run_as_dashboard_and_alerts_ask(dataset, tmp_path, server):
    """Each expression of the dashboard has a value of the run; each metric of the alerts is there, and none fires."""
    target = re.search(r"127\.0\.0\.1:(\d+)", (tmp_path / "prometheus" / "prometheus.yaml").read_text())[1]
    name = 'a "run" of \\ mine'
    flags = {"max_steps": 100_000, "save_steps": 10, "save_total_limit": 2, "do_eval": True, "eval_steps": 5}
    flags |= {"straggler_every": 2, "peak_tflops_per_gpu": 0.1, "run_name": name, "metrics_port": target}
    asked = {each.replace("$run", ".+") for each in EXPRESSIONS}
    with LiveRun(dataset, tmp_path / "out", tmp_path, nproc=2, **flags) as live:
        live.until(lambda: all(map(server.ask, asked)), poll=0.5)
        shown = {each: server.ask(each) for each in asked}
        metrics = {metric for rule in ALERTS for metric in re.findall(r"esm2_\w+", rule["expr"])}
        assert [metric for metric in sorted(metrics) if not server.ask(metric)] == []
        assert server.get("alerts")["alerts"] == []
        assert server.get("rules")["groups"][0]["rules"][0]["health"] == "ok"
    assert {result["metric"]["run"] for results in shown.values() for result in results} == {name}
    assert wait_until(lambda: not server.ask("esm2_step"), poll=0.5)  # gone with the run


@pytest.mark.skipif(not shutil.which("envsubst"), reason="envsubst (gettext-base) is not installed")
@pytest.mark.parametrize("template", TRAINING)
def test_render_opens_the_metrics_to_prometheus_alone(template):
    """What the pods show, where they say so, and who may ask; the user's flags and name of the run win."""
    guard, job = documents(render(template, "metrics", JOB_NAME="mine", TRAIN_FLAGS="--run_name=theirs"))
    theirs, own = guard["spec"]["ingress"]
    assert "ports" not in own
    assert theirs == {"from": [PROMETHEUS], "ports": METRICS}
    (pod,) = pods(job)
    annotations = pod["metadata"]["annotations"]
    assert (annotations["prometheus.io/scrape"], annotations["prometheus.io/port"]) == ("true", "9464")
    (container,) = containers(job)
    flags = values(container)["TRAIN_FLAGS"].split()
    assert flags == ["--metrics_port=9464", "--metrics_host=0.0.0.0", "--run_name=mine", "--run_name=theirs"]
    theirs["ports"] = [{"port": 22}]
    assert "security" in broken_rules(guard)
