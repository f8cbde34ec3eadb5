"""Runs over sets of homologs: every strategy is the run of one process, resumes are exact, limits are refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from common.models.layers.config_base import TRAINED_SETS
from extras.families.sets.evaluation import record_sets
from tests.extras import encoder_runs
from tests.training_fixtures import NUM_TRAIN, losses, train

SIZES = "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"
SETS = {"set_tokens": 512, "set_size": 8, "tokens_per_pack": 1024}
FAMILIES = {
    "e1": {"model_type": "e1", "config_name": None},
    "esm_sets": {"model_type": "esm_sets", "config_name": "facebook/esm2_t6_8M_UR50D"},
}
RUNS = {kind: encoder_runs.RUN | SETS | {"config_overrides": SIZES} | flags for kind, flags in FAMILIES.items()}


@pytest.fixture(scope="module")
def clustered(dataset, tmp_path_factory):
    """The dataset with random clusters of 6 proteins."""
    arrow = shutil.copytree(dataset, tmp_path_factory.mktemp("clustered") / "arrow")
    index = arrow / "train" / "clusters"
    index.mkdir()
    np.save(index / "members.npy", np.random.default_rng(0).permutation(NUM_TRAIN).astype(np.uint32))
    np.save(index / "offsets.npy", np.arange(0, NUM_TRAIN + 1, 6, dtype=np.uint32))
    return arrow


@pytest.fixture(scope="module", params=RUNS)
def alone(request, clustered, tmp_path_factory):
    """(the family, what one process trained)."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    train(clustered, out, do_eval=True, **RUNS[request.param])
    return request.param, out


@encoder_runs.every_strategy(slow={"train_ddp.py", "train_fsdp2.py", "train_mfsdp.py"})
def test_sets_run_of_every_strategy_equals_one_process(clustered, alone, tmp_path, script, flags):
    kind, out = alone
    encoder_runs.assert_two_ranks_equal_one(clustered, out, tmp_path, script, RUNS[kind] | flags)


def test_the_longest_sets_are_recorded(alone):
    """For the contexts that score.py draws; published weights of unknown training get no record."""
    kind, out = alone
    assert json.loads((out / "final_model" / "config.json").read_text())[TRAINED_SETS] == 512
    others = {TRAINED_SETS: 512}
    record_sets(others, str(out / "final_model"), "0:64,1:128")
    assert others == {TRAINED_SETS: 512}
    if kind == "e1":
        record_sets(published := {}, str(out / "final_model"), "1024")
        assert published == {}


@pytest.mark.slow
def test_sets_run_with_a_ring_equals_one_process(clustered, alone, tmp_path):
    kind, out = alone
    flags = RUNS[kind] | {"cp_comm_type": "p2p", "cp_layout": "contiguous"}
    encoder_runs.assert_two_ranks_equal_one(clustered, out, tmp_path, "train_ddp_cp.py", flags)


def test_sets_run_resumes_bit_identically(clustered, alone, tmp_path):
    kind, out = alone
    encoder_runs.assert_resumes(clustered, out, tmp_path, RUNS[kind])


@pytest.mark.slow
def test_sets_run_with_compiled_layers_equals_one_process(clustered, alone, tmp_path):
    kind, out = alone
    train(clustered, tmp_path, **RUNS[kind] | {"torch_compile": True})
    assert losses(tmp_path) == pytest.approx(losses(out), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"max_seq_length": 9000, "set_tokens": 9000, "tokens_per_pack": 9000},
            "--max_seq_length 9000: this E1 has at",
        ),
        ({"set_size": 513}, "--set_size 513: this E1 has at most 512: lower it"),
        ({"set_tokens": 65537, "tokens_per_pack": 65537}, "--set_tokens 65537: this E1 has at most 65,536: lower it"),
    ],
)
def test_sets_beyond_the_models_limits_are_refused(clustered, tmp_path, flags, said):
    printed = train(clustered, tmp_path / "out", expect=2, **RUNS["e1"] | flags)
    assert said in printed
    assert not (tmp_path / "out").exists()
