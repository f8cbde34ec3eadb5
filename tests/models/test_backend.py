"""--backend: which one is chosen and logged, and the errors where Transformer Engine cannot be used."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from common.checkpoint.checkpointer import Checkpointer, CheckpointFlags
from common.checkpoint.reader import open_checkpoint
from common.cli import UserError, setup_logging
from common.distributed.world import World
from common.flags import with_flags
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.models.layers.backend import COMPILED, check_device, choose_backend
from common.models.layers.linear import Linear
from extras.families.decoders.causal_arguments import CausalArguments, DecoderFlags
from extras.families.decoders.family import FAMILY as DECODERS
from tests.models.reference import packed, random_batch
from tests.training.test_bad_input import refused
from tests.training_fixtures import arguments, on_ranks, train

CPU = torch.device("cpu")
without_te = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a transformer_engine with the given module body: present, but broken."""

    def install(body: str) -> None:
        package = tmp_path / "transformer_engine"
        (package / "pytorch").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "pytorch" / "__init__.py").write_text(body)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in loaded():
            monkeypatch.delitem(sys.modules, name)

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.startswith("transformer_engine")]

    yield install
    for name in loaded():  # later tests would find the broken one
        del sys.modules[name]


@without_te
def test_backend_te_missing_is_one_line(dataset, tmp_path):
    error = refused(dataset, tmp_path / "out", backend="te")
    assert "--backend te: it needs an NVIDIA GPU" in error
    assert "--backend torch" in error
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--backend te: Transformer Engine is not installed \(\./install\.sh --gpu"):
        choose_backend(arguments(dataset, backend="te").model, torch.device("cuda"), bf16=True)


@without_te
def test_backend_auto_logs_why_torch(dataset, tmp_path):
    said = train(dataset, tmp_path, max_steps=1)
    assert "Backend: torch (not te: it needs an NVIDIA GPU, and this run is on a CPU)" in said


@without_te
def test_backend_logs_what_gpu_without_te_lacks(dataset, installed):
    """Where the run is on one, and would have used it: not with a flag that is the torch backend's."""
    gpu, lost = torch.device("cuda"), "; this run goes without its fused kernels, and FP8, MXFP8 and NVFP4"
    chosen, why = choose_backend(arguments(dataset).model, gpu, bf16=True)
    assert (chosen, why.startswith("not te: Transformer Engine is not installed (./install.sh --gpu")) == (
        "torch",
        True,
    )
    assert lost in why
    assert lost not in choose_backend(arguments(dataset).model, CPU, bf16=True)[1]
    assert lost not in choose_backend(arguments(dataset, backend="torch").model, gpu, bf16=True)[1]
    installed("raise OSError('libcudnn.so.9')")
    assert lost in choose_backend(arguments(dataset).model, gpu, bf16=True)[1]


def test_backend_te_on_cpu_is_one_line(dataset, installed):
    installed("")
    with pytest.raises(UserError, match="--backend te: it needs an NVIDIA GPU.*--backend torch"):
        choose_backend(arguments(dataset, backend="te").model, CPU, bf16=False)
    chosen, why = choose_backend(arguments(dataset).model, CPU, bf16=False)
    assert chosen == "torch"
    assert "GPU" in why


def test_backend_te_broken_is_one_line(dataset, installed):
    installed("raise OSError('libcudnn.so.9: cannot open shared object file:\\n  No such file')")
    with pytest.raises(UserError, match=r"does not load \(OSError: libcudnn.so.9: cannot .*file: No such file\)"):
        choose_backend(arguments(dataset, backend="te").model, torch.device("cuda"), bf16=False)


def test_backend_compiles_torch_layers_on_gpu(dataset, monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")  # nothing is computed on either
    monkeypatch.setattr("common.models.layers.backend.find_spec", lambda name: object())
    monkeypatch.setenv("CC", "gcc")
    undecided = arguments(dataset)
    assert undecided.model.torch_only() == []  # auto may still take te
    assert undecided.model.compiles(gpu, "torch")[0]
    assert not undecided.model.compiles(gpu, "te")[0]
    assert undecided.model.compiles(cpu, "torch") == (False, None)
    assert arguments(dataset, torch_compile=False).model.compiles(gpu, "torch") == (False, None)
    assert arguments(dataset, torch_compile=True).model.compiles(cpu, "torch") == (True, None)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert undecided.model.compiles(gpu, "torch") == (
        False,
        "Layers are not compiled, which costs speed: Triton needs a C compiler (apt-get install gcc)",
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"torch_compile": True}, COMPILED),
        ({"gelu": "exact"}, "--gelu exact"),
    ],
)
def test_backend_torch_only_flags_conflict_with_te(dataset, installed, flags, named):
    installed("")
    gpu = torch.device("cuda")  # nothing is computed on it here
    with pytest.raises(UserError, match=re.escape(f"--backend te: {named} is")):
        choose_backend(arguments(dataset, backend="te", **flags).model, gpu, bf16=True)
    assert choose_backend(arguments(dataset, **flags).model, gpu, bf16=True) == (
        "torch",
        f"not te: {named} is the torch backend's",
    )


def test_backend_auto_takes_te_in_bf16(dataset, installed):
    installed("")
    assert choose_backend(arguments(dataset).model, torch.device("cuda"), bf16=True) == (
        "te",
        "Transformer Engine is here",
    )
    chosen, why = choose_backend(arguments(dataset).model, torch.device("cuda"), bf16=False)
    assert chosen == "torch"
    assert "TF32" in why


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"model": "llama3_2_1b", "fp8": True, "emulate_precision": True}, "--emulate_precision"),
        ({"model": "mistral_8x7b", "torch_compile": True}, COMPILED),
    ],
)
def test_backend_torch_only_flags_of_decoders(installed, flags, named):
    """The rest, refusals and auto's choice, is of one function for both tasks."""
    installed("")
    decoder = partial(with_flags, CausalArguments(), dataset="text.jsonl", bf16=False, **flags)
    gpu = World(0, 0, 1, torch.device("cuda"))  # nothing is computed on it here
    with pytest.raises(UserError, match=re.escape(f"--backend te: {named} is the torch backend's: drop one")):
        DECODERS.choose(decoder(backend="te"), gpu, (), {})
    chosen = DECODERS.choose(decoder(), gpu, (), {})
    assert (chosen.backend, chosen.why) == ("torch", f"not te: {named} is the torch backend's")
    assert f"Backend: torch ({chosen.why})" in chosen.remarks
    with pytest.raises(UserError, match="--backend te: it needs an NVIDIA GPU"):
        DECODERS.choose(decoder(backend="te"), World(0, 0, 1, CPU), (), {})
    assert choose_backend(DecoderFlags(model="llama3_2_1b"), gpu.device, bf16=True) == (
        "te",
        "Transformer Engine is here",
    )


@pytest.mark.parametrize("flags", [{"backend": "jax"}, {"gelu": "sigmoid"}])
def test_backend_unknown_choices_are_refused(dataset, tmp_path, flags):
    ((name, value),) = flags.items()
    assert f"--{name} {value}: choose" in refused(dataset, tmp_path / "out", **flags)


class WithExtraState(torch.nn.Linear):
    """As Transformer Engine's modules do it: bytes, none before the first forward pass, refused when loaded."""

    def get_extra_state(self):
        return torch.tensor(list(b"scales") if self.forwarded else [], dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.numel() == 0, "a pickle"


def _saved_and_restored(out) -> None:
    setup_logging()
    world = World(0, 0, 1, CPU)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    flags = CheckpointFlags(str(out), async_save=False)
    config = esm2_config(1, 64, 4)

    def checkpointer(seed: int, kind: type, scales: dict):
        model = build_model(config, seed)
        model.lm_head.dense.__class__, model.lm_head.dense.forwarded = kind, False
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(**packed(random_batch([9, 20]))).loss_sum.backward()
        optimizer.step()
        return model, Checkpointer(flags, model, optimizer, config, world, 60, scales)

    scale = {"layers.0.proj.scaling_fwd.scale": torch.tensor([3.0])}
    first, writer = checkpointer(0, WithExtraState, scale)
    first.lm_head.dense.forwarded = True
    writer.save(1, {"step": 1})
    kept = open_checkpoint(out / "checkpoint-1").metadata.state_dict_metadata
    assert not [name for name in kept if "extra_state" in name]
    assert "scales.layers.0.proj.scaling_fwd.scale" in kept
    # into a fresh model of the same kind, whose scales are there already; and into one without any
    scale = {name: torch.ones(1) for name in scale}
    for seed, kind, scales in ((1, WithExtraState, scale), (2, Linear, {})):
        model, reader = checkpointer(seed, kind, scales)
        reader.load(out / "checkpoint-1")
        for (name, ours), theirs in zip(model.named_parameters(), first.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
    assert scale["layers.0.proj.scaling_fwd.scale"].item() == 3.0


def test_checkpoint_scales_move_between_backends(tmp_path):
    codes, said = on_ranks(1, _saved_and_restored, tmp_path)
    assert codes == [0], said
    assert said[0].count("FP8 scales are ignored") == 1


@pytest.mark.parametrize(
    ("capability", "head_dim", "backend", "message"),
    [
        ((7, 5), 64, "torch", "Tesla T4 has no bf16 instructions"),
        ((8, 0), 20, "torch", "heads of 20 .* needs multiples of 8"),
        ((8, 0), 20, "te", None),
        ((9, 0), 64, "torch", None),
    ],
)
def test_check_device_refuses_before_kernels(monkeypatch, capability, head_dim, backend, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    check_device(torch.device("cpu"), True, head_dim, backend)
    check_device(torch.device("cuda"), False, head_dim, backend)
    if message is None:
        check_device(torch.device("cuda"), True, head_dim, backend)
    else:
        with pytest.raises(UserError, match=message):
            check_device(torch.device("cuda"), True, head_dim, backend)
