"""Names become configurations, and what would be computed differently is refused."""

from __future__ import annotations

import pytest
import transformers
from transformers import CONFIG_MAPPING, BertConfig, EsmConfig

from common.cli import UserError
from common.models.esm2.config import ESM2_SIZES, Esm2Config, esm2_config, load_config
from common.models.family import family_of
from common.models.layers.config_base import override
from tests.training_fixtures import train

# facts.md: layers, hidden size, heads
PUBLISHED = {
    "facebook/esm2_t6_8M_UR50D": (6, 320, 20),
    "facebook/esm2_t12_35M_UR50D": (12, 480, 20),
    "facebook/esm2_t30_150M_UR50D": (30, 640, 20),
    "facebook/esm2_t33_650M_UR50D": (33, 1280, 20),
    "facebook/esm2_t36_3B_UR50D": (36, 2560, 40),
    "facebook/esm2_t48_15B_UR50D": (48, 5120, 40),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_names_resolve_offline(name):
    config = load_config(name)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == PUBLISHED[name]
    assert config.intermediate_size == 4 * config.hidden_size
    assert (config.vocab_size, config.max_position_embeddings, config.layer_norm_eps) == (33, 1026, 1e-5)
    assert (config.pad_token_id, config.mask_token_id, config.token_dropout) == (1, 32, True)
    assert config.position_embedding_type == "rotary"
    assert config.tie_word_embeddings
    assert not config.emb_layer_norm_before
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.0


@pytest.mark.parametrize("name", ["facebook/esm2_t6_8M", "esm2_t6_8M_UR50D", "/nowhere/model", "./nowhere", "a b/c"])
def test_preset_unknown_name_lists_known_ones(name):
    with pytest.raises(UserError) as caught:
        load_config(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: no ")
    assert "\n" not in message
    assert all(known in message for known in ESM2_SIZES)


def test_preset_of_local_directory_is_its_config(tmp_path):
    esm2_config(3, 96, 6, layer_norm_eps=1e-6, token_dropout=False).to_transformers().save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 96, 6)
    assert (config.layer_norm_eps, config.token_dropout) == (1e-6, False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"emb_layer_norm_before": True}, "emb_layer_norm_before"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"vocab_size": 40}, "vocab_size"),
        ({"pad_token_id": 0}, "pad_token_id"),
        ({"mask_token_id": 31}, "mask_token_id"),
        ({"is_decoder": True}, "is_decoder"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_attention_heads": 64}, "even head dimension"),
    ],
)
def test_preset_with_unsupported_settings_is_refused(tmp_path, changes, named):
    config = esm2_config(2, 64, 4)
    for field, value in changes.items():
        setattr(config, field, value)
    config.to_transformers().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=named) as caught:
        load_config(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_preset_with_dropout_is_read_and_refused_in_training(dataset, tmp_path, name):
    esm2_config(2, 64, 4, **{name: 0.1}).to_transformers().save_pretrained(tmp_path / "given")
    assert vars(load_config(str(tmp_path / "given")))[name] == 0.1
    said = train(dataset, tmp_path / "out", max_steps=1, expect=2, config_name=tmp_path / "given")
    assert f"{tmp_path / 'given'}: {name} is 0.1, and training here has no dropout: set it to 0" in said


def test_families_have_a_class_in_transformers_or_say_that_it_has_none():
    """`stock` is its name; where an export has the authors' names instead, transformers knows no such model_type."""
    known = {name.lower() for name in CONFIG_MAPPING}
    for name in ("esm", "esmc"):
        assert hasattr(transformers, f"{family_of(name).stock}ForMaskedLM")
    for name in ("amplify", "e1", "esm_sets"):
        assert not family_of(name).stock
        assert name not in known
    assert {"esm", "esmc", "llama", "mistral", "mixtral"} <= known


def test_config_json_defaults_equal_transformers(tmp_path):
    """transformers' own defaults, read through its own class from the same file."""
    (tmp_path / "config.json").write_text('{"model_type": "esm"}')
    stock, ours = EsmConfig.from_pretrained(tmp_path), Esm2Config.read(tmp_path / "config.json")
    fields = {name: value for name, value in vars(ours).items() if name not in ("others", "hidden_act", "alphabet")}
    assert fields == {name: getattr(stock, name) for name in fields}
    assert not hasattr(stock, "hidden_act")


def test_config_round_trip_through_transformers(tmp_path):
    stock = EsmConfig(**esm2_config(3, 96, 6).to_transformers().to_dict() | {"a_lab": {"of": ["its", "own"]}})
    stock.save_pretrained(tmp_path)
    assert Esm2Config.read(tmp_path / "config.json").to_transformers().to_dict() == stock.to_dict()


def test_config_json_of_other_architecture_is_refused(tmp_path):
    BertConfig(vocab_size=33).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type is 'bert'"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "esm", "hidden_size": "wide"}'])
def test_config_json_broken_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: config.json cannot be used (")
    assert "\n" not in str(caught.value)


def test_config_json_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        load_config(str(tmp_path))


def test_config_overrides_keep_types():
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), "num_hidden_layers=2, layer_norm_eps=1e-6")
    assert (config.num_hidden_layers, config.layer_norm_eps, config.hidden_size) == (2, 1e-6, 320)
    assert override(config, "token_dropout=False").token_dropout is False


@pytest.mark.parametrize(
    "changes",
    [
        *(
            "hidden_sise=64",
            "hidden_size",
            "hidden_size=",
            "hidden_size=1.5",
            "token_dropout=2",
            "",
            "hidden_size=64,",
        ),
        *("model_type=bert", "hidden_dropout_prob=0.1", "vocab_size=40", "num_attention_heads=3"),
        *("num_attention_heads=0", "num_hidden_layers=0", "num_hidden_layers=-1", "hidden_size=0"),
        *("intermediate_size=0", "layer_norm_eps=nan", "layer_norm_eps=0", "initializer_range=-1"),
    ],
)
def test_config_overrides_impossible_are_refused(changes):
    with pytest.raises(UserError, match="--config_overrides") as caught:
        override(load_config("facebook/esm2_t6_8M_UR50D"), changes)
    assert "\n" not in str(caught.value)
