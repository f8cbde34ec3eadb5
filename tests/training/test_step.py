"""Between a step's first batch and the numbers that are read at its end the host asks the device for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.crops import Pack
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.precision import Precision
from common.shape_buckets import predicted_positions
from common.training.command_line import parse_run
from common.training.load_model import load_model
from common.training.masked_lm import MaskedLM
from common.training.optim import build_adamw
from common.training.step import Stepper
from common.training.task import BuiltModel
from extras.interop.hf_backend import StockEsm
from extras.plan.dry_run.memory_estimate import fake_run
from extras.plan.step_model.counts import counted
from tests.data_fixtures import load_script
from tests.training_fixtures import arguments, flags_of

FLAGS = {"train_ddp.py": "DdpFlags", "train_fsdp2.py": "FsdpFlags"}


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", {}),
        ("train_fsdp2.py", {}),
        pytest.param("train_fsdp2.py", {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_stepper_passes_never_synchronize_with_gpu(tmp_path, script, flags):
    module = load_script(script)
    argv = flags_of(None, tmp_path, **flags, dataset="sample", bf16=True, dry_run=True, world_size=2, use_cpu=False)
    args = parse_run("", getattr(module, FLAGS[script]), argv)
    with fake_run(args, module.build) as run:
        batch = run.task.example(1024)
        with counted() as work:
            for last in (False, True):
                with run.strategy.micro_batch(last):
                    run.task.loss_sum(run.strategy.model, batch).backward()
            run.strategy.clip(1.0)
            run.optimizer.step()
    assert work.kernels > 100
    assert dict(work.waits) == {}


def test_stepper_synchronizes_once(dataset):
    """On a CPU, whose attention reads the boundaries of sequences inside its operator."""
    args, world = arguments(dataset), World(0, 0, 1, torch.device("cpu"))
    model = build_model(esm2_config(layers=2, hidden_size=64, heads=4), seed=1)
    built = BuiltModel(model, "torch", "erf", (), Precision(), {})
    task, strategy = MaskedLM(built, args, world), Strategy(model)
    optimizer = build_adamw(model.parameters(), args.optimizer)
    stepper = Stepper(task, strategy, Precision(), optimizer, world, 1.0)
    batches = [task.example(100), task.example(150)]
    before = []
    optimizer.register_step_post_hook(lambda *_: before.append(dict(work.waits)))
    with counted() as work:
        result = stepper.step(0, 1e-3, batches, task.counts(batches))
    assert result.loss > 0
    assert not result.skipped
    assert before == [{}], "the optimiser is launched before anything is read"
    assert dict(work.waits) == {"tolist": 1}


def test_collator_predicted_positions_equal_the_models():
    torch.manual_seed(0)
    model = build_model(esm2_config(layers=1, hidden_size=64, heads=4), seed=1)
    pack = {"input_ids": torch.randint(4, 24, (90,)), "cu_seqlens": torch.tensor([0, 50, 90], dtype=torch.int32)}
    pack |= {"max_seqlen": 50, "labels": torch.where(torch.rand(90) < 0.3, torch.randint(4, 24, (90,)), -100)}
    pack["labels"][0] = 7  # where fillers are looked up
    found, given = model(**pack), model(**pack, predicted=predicted_positions(pack["labels"]))
    asked = pack["labels"] != -100
    logits = model(**{name: value for name, value in pack.items() if name != "labels"}).logits[asked]
    expected = torch.nn.functional.cross_entropy(logits, pack["labels"][asked], reduction="sum")
    assert torch.equal(found.loss_sum, given.loss_sum)
    assert torch.equal(found.correct, given.correct)
    assert given.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert given.correct == (logits.argmax(-1) == pack["labels"][asked]).sum()


def test_collator_fills_packs_up_to_one_shape_on_gpu(dataset):
    """On a CPU, where each filler costs time, packs have only those that matmuls need."""

    def tokens(device: str, **flags) -> int:
        args, world = arguments(dataset, backend="torch", **flags), World(0, 0, 1, torch.device(device))
        built = load_model(args, world, device=torch.device("cpu"))
        task = MaskedLM(built, args, world)
        return len(task.collator(1)(Pack.empty(), np.zeros(0, dtype=np.uint8))["input_ids"])

    assert tokens("cuda", tokens_per_pack=4096, per_device_train_batch_size=8) == 4096
    assert tokens("cuda", pad_to_max_length=True) == 1  # padding is never computed
    assert tokens("cpu") == 1
    assert not StockEsm.takes_fillers  # which would make rows of empty sequences
