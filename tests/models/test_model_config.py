"""A config.json that somebody else wrote: sizes that no model has, and names of code."""

from __future__ import annotations

import json

import pytest

from common.cli import UserError
from common.models.esm2.config import Esm2Config, esm2_config, load_config
from extras.families.decoders.config import DecoderConfig, load_decoder_config
from tests.guarded import guarded

DECODER = DecoderConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96)
FAMILIES = [(DECODER, load_decoder_config), (esm2_config(2, 64, 4), load_config)]
CODE = {
    "auto_map": {"AutoConfig": "evil.Evil"},
    "custom_pipelines": {"x": {"impl": "evil.Evil"}},
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "experts_implementation": "evil/kernel",
}


@pytest.mark.parametrize(("config", "load"), FAMILIES)
def test_config_drops_names_of_code(tmp_path, config, load):
    content = config.content() | CODE | {"text_config": CODE | {"x": [CODE, 1]}, "id2label": {"0": "helix"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = load(str(tmp_path))
    assert found.others["text_config"] == {"x": [{}, 1]}
    assert found.others["id2label"] == {"0": "helix"}
    assert "evil" not in json.dumps(found.content())
    assert "evil" not in found.to_transformers().to_json_string()


@pytest.mark.parametrize("value", [10**9, 10**18, 10**400, -1, 1.5, "64", True, None, [64]])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize(("config", "load"), FAMILIES)
def test_config_refuses_impossible_sizes(tmp_path, config, load, name, value):
    (tmp_path / "config.json").write_text(json.dumps(config.content() | {name: value}))
    with guarded(tmp_path), pytest.raises(UserError) as caught:
        load(str(tmp_path))
    assert str(caught.value).isprintable()
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_config_of_published_models_is_within_limits():
    assert isinstance(load_config("facebook/esm2_t48_15B_UR50D"), Esm2Config)
    assert load_decoder_config("llama2_70b").num_hidden_layers == 80
