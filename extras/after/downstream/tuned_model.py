"""A fine-tuned model: stock transformers' classes with a new head, made for training and read again to predict.

TUNED is the --output_dir of finetune.py: model/ is the stock adapter or model, calibration.safetensors what
predictions of its held-out proteins were like.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from torch import Tensor

from common.cli import UserError, one_line
from common.files.content_hash import combined_hash
from common.files.runs import final_model_of
from common.files.safe_files import read_json
from common.models.family import NO_STOCK, encoder_family
from common.models.layers.hf_directory import LM_HEAD, TASK_HEADS, dropout_of, local_directory, model_hash
from extras.after.downstream.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_hash_of,
    base_name_of,
    merged,
)
from extras.after.downstream.labels import TaskSpec
from extras.after.downstream.probe_fits import Outputs
from extras.after.downstream.results import RESULTS
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.downstream.tuning_flags import TuningFlags
from extras.after.inference.embedding import EmbeddingFlags
from extras.after.inference.encoder import Encoder, Progress, Protein, embed
from extras.after.inference.packed import windows

logger = logging.getLogger(__name__)
MODEL, CALIBRATION = "model", "calibration.safetensors"
HEADS = tuple(name.removesuffix(".") for name in TASK_HEADS)


def targets_of(args: TuningFlags) -> str:
    """--target_modules, by default the family's."""
    return args.target_modules or encoder_family(str(args.model_name_or_path)).lora_targets


def stock_class(family: Any, of_residues: bool) -> Any:
    """transformers' class of a family with a head, which from then on says nothing of a new one."""
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # that the head is new
    kind = "ForTokenClassification" if of_residues else "ForSequenceClassification"
    return getattr(transformers, family.stock + kind)


def open_stock(name: str, task: TaskSpec, new_head: bool = False) -> tuple[Any, dict[str, Any]]:
    """(transformers' model in fp32 with the task's classes, what loading it says). new_head: in the place of one of
    other classes."""
    labels = dict(enumerate(task.classes or ("value",)))
    return stock_class(encoder_family(name), task.of_residues).from_pretrained(
        local_directory(name),
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
        problem_type="single_label_classification" if task.classes else "regression",
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=new_head,
    )


def make_model(args: TuningFlags, task: TaskSpec) -> Any:
    """Stock transformers' model with a new head, wrapped by peft unless --full. UserError as StateDictAdapter.read."""
    name = str(args.model_name_or_path)
    family = encoder_family(name)
    if not family.stock:
        raise UserError(f"--model_name_or_path {name}: {NO_STOCK}")
    config = config_for_proteins(name)
    for _ in family.adapter.read(name, config)[0]:
        pass  # it checks vocabulary and weights
    if dropout := dropout_of(config):
        logger.info("Trained with the dropout of config.json: %s", ", ".join(f"{n} {p}" for n, p in dropout.items()))
    torch.manual_seed(args.seed)
    model, loading = open_stock(name, task, new_head=True)
    if lacking := sorted(
        key for key in loading["missing_keys"] if not key.startswith(("classifier.", "score.", "esm.contact_"))
    ):
        raise UserError(f"--model_name_or_path {name}: transformers does not find {lacking[0]} there: export it anew")
    model.config.architectures = [type(model).__name__]  # as `save_pretrained` of a whole model sets it
    if args.full:
        for key, parameter in model.named_parameters():
            parameter.requires_grad = "contact_head" not in key and "position_embeddings" not in key
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(
        task_type=TaskType.TOKEN_CLS if task.of_residues else TaskType.SEQ_CLS,
        r=args.value("lora_r"),
        lora_alpha=args.value("lora_alpha"),
        lora_dropout=args.value("lora_dropout"),
        target_modules=targets_of(args).split(","),
    )
    try:
        wrapped: Any = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"--target_modules {args.target_modules}: {one_line(error)[:160]}") from error
    config = wrapped.active_peft_config
    config.base_model_name_or_path = name  # not its place in the Hub's cache
    # Sets, whose order in adapter_config.json would differ from process to process.
    config.target_modules, config.modules_to_save = sorted(config.target_modules), sorted(config.modules_to_save)
    return wrapped


@dataclass
class Tuned:
    """A fine-tuned model, as prediction.py asks for it: its features are the logits. base: the model whose weights are
    those of the encoder, or that the adapter belongs to; head: set by `encoder`."""

    directory: Path
    base: str
    base_hash: str
    hash: str
    task: TaskSpec
    label_column: str
    max_seq_length: int
    bf16: bool
    temperature: float
    scores: np.ndarray
    head: Any = None

    @property
    def of_residues(self) -> bool:
        return self.task.of_residues

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def encoder(self, flags: EmbeddingFlags, device: torch.device) -> Encoder:
        """The encoder that this project runs, with the merged weights. flags: those of `base`, which is here now."""
        name = str(flags.model_name_or_path)
        has_adapter = (self.directory / MODEL / ADAPTER_CONFIG).is_file()
        stock, _ = open_stock(name, self.task, new_head=has_adapter)  # which has the head
        if has_adapter:
            stock = merged(stock, self.directory / MODEL, HEADS)
        self.head = next(getattr(stock, head) for head in HEADS if hasattr(stock, head)).eval()
        family = encoder_family(name)
        expected, _ = family.adapter.expected(family.load_config(name))
        own = {key: tensor for key, tensor in stock.state_dict().items() if key.split(".")[0] not in HEADS}
        unused = {key: torch.zeros(x.shape) for key, x in expected.items() if key not in own}  # to predict residues
        return Encoder(flags, device, SimpleNamespace(config=stock.config, state_dict=lambda: unused | own))

    @torch.inference_mode()
    def embed(self, encoder: Encoder, part: list[Protein], done: Progress, *_: Any) -> list[Tensor]:
        """The logits [C] of each protein, or [L, C] of its residues. Those of a protein in windows are their mean,
        weighted by the residues that each window stands for."""
        if self.of_residues:
            return [self.head(hidden) for hidden in embed(encoder, part, done)]
        longest, alphabet = encoder.flags.max_seq_length, encoder.alphabet
        pieces = [
            (n, window)
            for n, (_, text) in enumerate(part)
            for window in windows(len(text) // alphabet.width, alphabet.room(text, longest))
        ]
        texts = [(part[n][0], window.residues_of(part[n][1], alphabet.width)) for n, window in pieces]
        logits = self.head(torch.stack(embed(encoder, texts, done, "cls"))[:, None])
        sums = torch.zeros(len(part), logits.shape[1])
        for (n, window), row in zip(pieces, logits, strict=True):
            sums[n] += row * ((window.end - window.begin) / (len(part[n][1]) // alphabet.width))
        return list(sums)

    def outputs(self, features: np.ndarray) -> Outputs:
        """features: logits [N, C]."""
        if not self.classes:
            return Outputs(features[:, 0])
        return Outputs(np.array(self.classes)[features.argmax(1)], features)


def is_tuned(directory: Path) -> bool:
    return (directory / RESULTS).is_file() and (directory / MODEL / "config.json").is_file()


def read_tuned(directory: Path, given: str | None) -> Tuned:
    """given: --model_name_or_path. UserError for files that are missing or damaged, of an earlier version, or whose
    classes are not those of the model."""
    model, where = directory / MODEL, f"--model {directory}"
    if not (directory / CALIBRATION).exists():
        raise UserError(f"{where}: has no {CALIBRATION}, as in earlier versions: run finetune.py again")
    try:
        results, config = read_json(directory / RESULTS), read_json(model / "config.json")
        made_from, task = results["made_from"], TaskSpec(results["task"], tuple(results["classes"]))
        full = not (model / ADAPTER_CONFIG).exists()
        base = str(model) if full else given or base_name_of(model)
        base_hash = "" if full else base_hash_of(config, made_from, where)
        names = [name for _, name in sorted((int(n), name) for n, name in config["id2label"].items())]
        values = {name: made_from[name] for name in ("label_column", "max_seq_length", "bf16")}
        found = load_file(directory / CALIBRATION)
        scores, temperature = found["scores"], float(found["temperature"][0])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read: {one_line(error)[:120]}: run finetune.py again") from error
    if full and given:
        raise UserError(f"--model_name_or_path {given}: no effect, as all weights are those of --model: leave it out")
    if tuple(names) != (task.classes or ("value",)):
        raise UserError(
            f"{model}: its classes are {', '.join(names)[:80]}, those of {RESULTS} {', '.join(task.classes)[:80]}: "
            "run finetune.py again"
        )
    base_hash, base = base_hash or model_hash(base), final_model_of(base)
    own = combined_hash([directory / CALIBRATION, *([] if full else [model / ADAPTER_WEIGHTS])])
    return Tuned(directory, base, base_hash, own, task, **values, temperature=temperature, scores=scores)


def write_whole(directory: Path, name: str, stock: Any) -> None:
    """The weights, and the language-model head that the model had, for score.py. stock: all its weights were trained;
    it has no such head.

    Under published names, which transformers 5's `save_pretrained` does not keep (docs/compatibility.md).
    """
    family = encoder_family(name)
    adapter, config = family.adapter, family.load_config(name)
    pieces, extras = adapter.read(name, config)
    own = {now: x for key, x in stock.state_dict().items() if (now := adapter.current_name(key, config))}
    own |= adapter.constants(config)
    published = adapter.to_hf(dict(pieces).__getitem__, config, extras)
    head = {key: tensor for key, tensor in published if key not in own}
    for file, tensors in (("model.safetensors", own), (LM_HEAD, head)):
        save_torch({key: x.contiguous().cpu() for key, x in tensors.items()}, directory / file, {"format": "pt"})
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # else readable by their owner only


def write_calibration(path: Path, scores: np.ndarray, temperature: float) -> None:
    save_file({"scores": scores.astype(np.float64), "temperature": np.array([temperature])}, path)
