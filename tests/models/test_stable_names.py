"""Exports have the published names of tensors, whatever transformers writes today, and repair what it wrote."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmcConfig, EsmcForMaskedLM, EsmForMaskedLM

from common.cli import UserError
from common.hooks import extra
from common.models.esm2.config import esm2_config, load_config
from common.models.esm2.convert import CONTACT_CHAINS
from common.models.family import family_of
from common.models.layers.initialise import initialise
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.export import export_model
from tests.forked import run_script
from tests.models.reference import as_transformers_5_24, published_names, reference_model
from tests.training_fixtures import same_bits

TINY = esm2_config(2, 32, 4)
MOVED = "esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq"


def export(family, config, directory):
    """An export of random weights; its tensors."""
    with torch.device("meta"):
        model = family.make(config)
    model.to_empty(device="cpu")
    initialise(model, 0, config.initializer_range)
    family.adapter.save(family.adapter.to_hf(model.state_dict().__getitem__, config), config, directory)
    return load_file(directory / "model.safetensors")


def test_esm2_of_any_alphabet_has_the_published_names(tmp_path):
    configs = [TINY, *(TINY.in_alphabet(extra().alphabet(name, name)) for name in ("saprot", "codon"))]
    for number, config in enumerate(configs):
        assert export(family_of("esm"), config, tmp_path / str(number)).keys() == published_names(2)


def test_esm2_with_sets_has_the_published_names_and_its_own(tmp_path):
    family = family_of("esm_sets")
    export(family_of("esm"), TINY, tmp_path / "plain")
    config = family.load_config(str(tmp_path / "plain"))
    config.set_every = 2
    names = export(family, config, tmp_path / "sets").keys()
    own = {name for name in names if name.startswith("esm.encoder.set_layer.")}
    assert names - own == published_names(2)
    norm = "esm.encoder.set_layer.1.attention.LayerNorm."
    assert {name for name in own if name.startswith(norm)} == {f"{norm}weight", f"{norm}bias"}


def test_esmc_has_the_names_of_transformers_modules(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    stock = EsmcForMaskedLM(EsmcConfig(**sizes))
    stock.config.save_pretrained(tmp_path / "config")
    family = family_of("esmc")
    names = export(family, family.load_config(str(tmp_path / "config")), tmp_path / "out").keys()
    assert names == {name for name, _ in stock.named_parameters()}


@pytest.fixture
def written(tmp_path):
    """(what transformers 5.24 writes of a stock model with random weights and another eps, its tensors)."""
    reference_model(esm2_config(2, 32, 4, layer_norm_eps=1e-12), seed=3).save_pretrained(tmp_path / "stock")
    stock = tmp_path / "stock" / "model.safetensors"
    ours = tmp_path / "published"
    export_model(tmp_path / "stock", ours)
    tensors = as_transformers_5_24(load_file(ours / "model.safetensors"))
    assert sum(name.endswith((".gamma", ".beta")) for name in tensors) == 8
    assert MOVED in tensors
    save_file(tensors, stock, {"format": "pt"})
    config = tmp_path / "stock" / "config.json"  # of a fitted contact head, which needs eager attention
    fitted = {CONTACT_CHAINS: ["0123"], "attn_implementation": "eager"}
    config.write_text(json.dumps(json.loads(config.read_text()) | fitted))
    return tmp_path / "stock", tensors


def test_renamed_norms_are_read_as_transformers_reads_them(written):
    directory, _ = written
    encoder = Encoder(EncoderFlags(str(directory), use_cpu=True))
    ids = encoder.alphabet.encode(b"MKTAYIAKQRQISFVKSHFSRQ")
    stock = EsmForMaskedLM.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = stock(torch.from_numpy(ids).long()[None]).logits[0]
    torch.testing.assert_close(encoder.logits([ids])[0], expected, atol=1e-5, rtol=0)


def test_export_of_a_model_gives_published_names_and_the_same_bits(written, tmp_path):
    directory, tensors = written
    done = run_script("extras.export", directory, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = (
        f"{directory}: 8 tensors renamed: .beta to .bias, .gamma to .weight; {MOVED} written as 2 tensors, one a layer"
    )
    assert said in done.stderr + done.stdout
    repaired = load_file(tmp_path / "out" / "model.safetensors")
    assert repaired.keys() == published_names(2)
    assert same_bits(as_transformers_5_24(repaired), tensors)
    before, after = (json.loads((each / "config.json").read_text()) for each in (directory, tmp_path / "out"))
    assert before == after
    again = run_script("extras.export", tmp_path / "out", tmp_path / "again")
    assert "no tensor renamed, all names are the published ones" in again.stderr + again.stdout
    assert load_config(str(tmp_path / "again")) == load_config(str(tmp_path / "out"))


def test_export_of_a_model_that_lacks_something_is_one_line(written, tmp_path):
    directory, tensors = written
    del tensors["esm.encoder.layer.1.LayerNorm.gamma"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"it has no tensor esm\.encoder\.layer\.1\.LayerNorm\.weight"):
        export_model(directory, tmp_path / "out")
    (directory / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: cannot be used"):
        export_model(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
