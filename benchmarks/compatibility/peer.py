"""Other programs at models' directories, each run in an environment of its own (environments.py).

python -P peer.py READER JOB.json RESULT

JOB: {"models": {name: directory}, "ids": {name: [[token id, ...], ...]}, "texts": [...], "save": a directory or null}.
RESULT.json gets {"versions": {package: version}, "models": {name: {"refused": line} or {"said": line}}}, RESULT.npz
`name/n`, what the reader computes of the ids n in float32: [tokens, vocabulary], or its last layer, [tokens, hidden].
It imports nothing of this project.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
NAMED = ("transformers", "tokenizers", "huggingface_hub", "peft", "sentence-transformers", "fair-esm", "esm-cpp")
NAMED += ("faesm", "einops", "accelerate", "onnx", "onnxscript", "onnxruntime", "safetensors", "torch", "numpy")
QKV = ("query", "key", "value")
# One layer of fair-esm's ESM2: its module, that of transformers'.
FAIR = {
    **{f"self_attn.{x[0]}_proj": f"attention.self.{x}" for x in QKV},
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}
FAIR_REST = {
    "emb_layer_norm_after": "esm.encoder.emb_layer_norm_after",
    "contact_head.regression": "esm.contact_head.regression",
    "lm_head.dense": "lm_head.dense",
    "lm_head.layer_norm": "lm_head.layer_norm",
}


class Said(logging.Handler):
    """The warnings of a library's log, and of Python."""

    def __init__(self, name: str):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_line(text: object) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(text)).split())


def of_torch(model, ids: list[list[int]]) -> list[np.ndarray]:
    model = model.eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in ids]


def auto_class(directory: Path):
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    kind = "CausalLM" if architecture.endswith("CausalLM") else "MaskedLM"
    return getattr(transformers, f"AutoModelFor{kind}")


def by_transformers(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """from_pretrained; save: where to save it again, with what it says of the keys."""
    model, info = auto_class(directory).from_pretrained(directory, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[what])):
            logging.getLogger("transformers").warning("%s: %d, first %s", what, len(keys), keys[0])
    if save:
        model.save_pretrained(save)
        for path in directory.glob("*token*"):
            (save / path.name).write_bytes(path.read_bytes())
        if (directory / "vocab.txt").exists():
            (save / "vocab.txt").write_bytes((directory / "vocab.txt").read_bytes())
    return of_torch(model, ids)


def by_load_state_dict(directory: Path, ids: list, strict: bool) -> list[np.ndarray]:
    """A stock model of random weights, then the file's tensors by their names."""
    from safetensors.torch import load_model
    from transformers import AutoConfig, EsmForMaskedLM

    torch.manual_seed(0)
    model = EsmForMaskedLM(AutoConfig.from_pretrained(directory, trust_remote_code=False))
    missing, unexpected = load_model(model, directory / "model.safetensors", strict=strict)
    if missing or unexpected:
        words = f"missing {len(missing)}, unexpected {len(unexpected)}, first {sorted([*missing, *unexpected])[0]}"
        logging.getLogger("transformers").warning("returned, not raised: %s", words)
    return of_torch(model, ids)


def by_peft(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """Stock model under LoRA that changes nothing yet; save: adapter and merged model, with random matrices."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForMaskedLM

    base = AutoModelForMaskedLM.from_pretrained(directory, trust_remote_code=False)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(QKV)))
    found = of_torch(model, ids)
    if save:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1)
        found += of_torch(model, ids)
        model.save_pretrained(save / "adapter")
        model.merge_and_unload().save_pretrained(save / "merged")
        (save / "merged" / "vocab.txt").write_bytes((directory / "vocab.txt").read_bytes())
    return found


def by_sentence_transformers(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return [each.numpy() for each in model.encode(texts, output_value="token_embeddings", convert_to_numpy=False)]


def by_faesm(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """Without flash-attn, which needs a GPU."""
    from faesm.esm import FAEsmForMaskedLM

    model = FAEsmForMaskedLM.from_pretrained(directory, use_fa=False).eval()  # loads through transformers' class
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([row]))["logits"][0].numpy() for row in ids]


def by_fair_esm(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """The package's ESM2 with the file's tensors under its names; its LayerNorms have eps 1e-5."""
    from esm.model.esm2 import ESM2
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    sizes = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    model = ESM2(*sizes, token_dropout=config["token_dropout"]).eval()
    stored = load_file(directory / "model.safetensors")
    pairs = FAIR_REST | {
        f"layers.{n}.{ours}": f"esm.encoder.layer.{n}.{theirs}"
        for n in range(sizes[0])
        for ours, theirs in FAIR.items()
    }
    state = {f"{ours}.{x}": stored[f"{theirs}.{x}"] for ours, theirs in pairs.items() for x in ("weight", "bias")}
    words = stored["esm.embeddings.word_embeddings.weight"]
    state |= {"embed_tokens.weight": words, "lm_head.weight": words, "lm_head.bias": stored["lm_head.bias"]}
    for n in range(sizes[0]):
        name = "rotary_embeddings.inv_freq"
        state[f"layers.{n}.self_attn.rot_emb.inv_freq"] = stored[f"esm.encoder.layer.{n}.attention.self.{name}"]
    model.load_state_dict(state, strict=True)
    with torch.inference_mode():
        return [model(torch.tensor([row]))["logits"][0].numpy() for row in ids]


def by_esm_cpp(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    import esm_cpp

    model = esm_cpp.Model.load_from_safetensors(str(directory / "model.safetensors"))
    return [np.array(model.forward(np.array(row, dtype=np.int32))) for row in ids]


def by_onnx(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """ONNX Runtime on what extras.onnx writes."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as scratch:
        session = onnxruntime.InferenceSession(export_onnx(directory, scratch), providers=["CPUExecutionProvider"])
        fed = [{"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)} for row in ids]
        return [session.run(["logits"], each)[0][0] for each in fed]


def by_onnx_in_node(directory: Path, ids: list, texts: list, save: Path | None) -> list[np.ndarray]:
    """The same file, by the JavaScript of docs/serving.md."""
    (block,) = re.findall(r"```js\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    tokens = (directory / "vocab.txt").read_text().split()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        export_onnx(directory, scratch)
        Path(scratch, "node_modules").symlink_to(Path(sys.prefix, "node_modules"))
        for row in ids:
            protein = json.dumps([tokens[n] for n in row[1:-1]])
            code = block.replace('"MKTAYIAKQR"', protein).replace("out/final_model", str(directory.resolve()))
            Path(scratch, "run.mjs").write_text(f"{code}\nconsole.log(JSON.stringify(Array.from(found.logits.data)));")
            done = subprocess.run(["node", "run.mjs"], cwd=scratch, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(one_line(done.stderr))
            found.append(np.array(json.loads(done.stdout), np.float32).reshape(len(row), -1))
    return found


def export_onnx(directory: Path, scratch: str) -> Path:
    file = Path(scratch) / "model.onnx"
    command = [sys.executable, "-m", "extras.onnx", str(directory), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return file


READERS = {
    "transformers": by_transformers,
    "strict": lambda directory, ids, texts, save: by_load_state_dict(directory, ids, strict=True),
    "lenient": lambda directory, ids, texts, save: by_load_state_dict(directory, ids, strict=False),
    "peft": by_peft,
    "sentence-transformers": by_sentence_transformers,
    "fair-esm": by_fair_esm,
    "faesm": by_faesm,
    "esm-cpp": by_esm_cpp,
    "onnx": by_onnx,
    "onnx in node": by_onnx_in_node,
}


def fresh(directory: Path, layers: int, hidden: int, heads: int, vocabulary: str, ids: list) -> list[np.ndarray]:
    """Save a stock ESM of random weights with EsmConfig's own eps, 1e-12; its logits before."""
    from transformers import EsmConfig, EsmForMaskedLM

    torch.manual_seed(2)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    tokens = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "num_attention_heads": heads}
    more = {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False}
    more |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = EsmForMaskedLM(EsmConfig(**sizes, **tokens, **more))
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        parameter.data.normal_(centre, 0.2)
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text(vocabulary)
    return of_torch(model, ids)


def versions() -> dict[str, str]:
    """Of the packages there; a package must be the one that Python imports."""
    found = {}
    for name in NAMED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for file in Path(sys.prefix, "node_modules").glob("onnxruntime-node/package.json"):
        found["onnxruntime-node"] = json.loads(file.read_text())["version"]
    if "transformers" in sys.modules:
        assert found["transformers"] == import_module("transformers").__version__
    return found


def main() -> None:
    reader, job, result = sys.argv[1:]
    work = json.loads(Path(job).read_text())
    said, arrays, models = Said("transformers"), {}, {}
    if work.get("fresh"):
        logits = fresh(Path(work["fresh"].pop("directory")), **work["fresh"])
        arrays |= {f"fresh/{n}": each for n, each in enumerate(logits)}
    for name, directory in work["models"].items():
        said.lines.clear()
        save = Path(work["save"]) / name if work.get("save") else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = READERS[reader](Path(directory), work["ids"][name], work["texts"], save)
        except Exception as error:  # whatever it raises is what a user reads
            models[name] = {"refused": one_line(f"{type(error).__name__}: {error}")}
            continue
        models[name] = {"said": one_line(said.lines[0]) if said.lines else ""}
        arrays |= {f"{name}/{n}": each.astype(np.float32) for n, each in enumerate(found)}
    np.savez(f"{result}.npz", **arrays)
    Path(f"{result}.json").write_text(json.dumps({"versions": versions(), "models": models}))


if __name__ == "__main__":
    main()
