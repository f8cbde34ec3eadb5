"""--hub_model_id: what is refused before a run, and an upload by huggingface_hub to a server of its protocol."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common.cli import UserError
from extras.publish.push_to_hub import check_push
from tests.forked import run_script
from tests.training_fixtures import environment, flags_of


class Hub(BaseHTTPRequestHandler):
    """Takes a repository and a commit whose files come in its body."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        answer: dict = {}
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.url}/me/model"}
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/commit/main"):
            answer = {"success": True, "commitOid": "ab" * 20, "commitUrl": f"{self.server.url}/me/model/commit/ab"}
        self._answer(answer)

    def do_GET(self):
        self._answer({})

    def _answer(self, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.status, server.url = [], 200, f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def pushed(dataset, out, hub):
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    argv = flags_of(dataset, out, max_steps=1, hub_model_id="me/model")
    return run_script("train_ddp.py", *argv, env=environment() | variables, anew=("huggingface_hub",))


def test_push_uploads_the_final_model(dataset, tmp_path, hub):
    done = pushed(dataset, tmp_path / "out", hub)
    assert done.returncode == 0, done.stderr
    (created,) = [json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create"]
    assert created["visibility"] == "private"
    (commit,) = [body for path, _, body in hub.asked if path.endswith("/commit/main")]
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    files = {line["path"]: base64.b64decode(line["content"]) for line in lines if "content" in line}
    there = {path.name: path.read_bytes() for path in (tmp_path / "out" / "final_model").iterdir()}
    assert files == there
    assert {token for _, token, _ in hub.asked} == {"Bearer secret"}


def test_push_that_fails_keeps_the_model(dataset, tmp_path, hub):
    hub.status = 403
    done = pushed(dataset, tmp_path / "out", hub)
    assert done.returncode == 2, done.stderr
    assert "is complete: hf upload me/model" in done.stderr.splitlines()[-1]
    assert (tmp_path / "out" / "final_model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "variables", "said"),
    [
        ("model", {}, "expected a name on the Hub"),
        ("me/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("me/model", {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_TOKEN": ""}, "no token"),
    ],
)
def test_push_is_refused_before_the_run(name, variables, said, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=said):
        check_push(name)
