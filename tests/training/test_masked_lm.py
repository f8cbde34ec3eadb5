"""A run whose mask rate falls: the same numbers on any ranks, workers and backends, and after a resume."""

from __future__ import annotations

import pytest

from tests.training_fixtures import rows, train

MASKS = {"mlm_probability": 0.4, "mlm_probability_end": 0.1, "mask_replace_prob": 0.6, "random_replace_prob": 0.2}
RUN = MASKS | {"max_steps": 6, "packs_per_step": 2, "save_steps": 100, "do_eval": True, "eval_steps": 3}


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, **RUN, dataloader_num_workers=0)
    return rows(out)


def assert_same_numbers(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        held_out = {key for key in other if key.startswith("eval_") and "runtime" not in key and "_per_" not in key}
        for key in {"loss", "grad_norm"} | held_out:
            assert one[key] == pytest.approx(other[key], rel=2e-5), (other["step"], key)  # sums in another order


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        pytest.param("train_ddp_cp.py", 2, {"cp_size": 2}, marks=pytest.mark.slow),
        ("train_fsdp2.py", 2, {}),
        ("train_ddp.py", 1, {"backend": "hf"}),
    ],
    ids=["cp", "fsdp2", "hf"],
)
def test_falling_mask_rate_equals_one_process(dataset, alone, tmp_path, script, nproc, flags):
    train(dataset, tmp_path, nproc, script=script, **RUN | flags)
    assert_same_numbers(rows(tmp_path), alone)


def test_falling_mask_rate_resumes_on_other_ranks_and_workers(dataset, alone, tmp_path):
    train(dataset, tmp_path, 2, **RUN, stop_at_step=3, dataloader_num_workers=2)
    train(dataset, tmp_path, 1, **RUN)
    assert_same_numbers(rows(tmp_path), alone)


def test_falling_mask_rate_changes_training_but_no_question_of_the_evaluation(dataset, alone, tmp_path):
    train(dataset, tmp_path, **RUN | {"mlm_probability_end": None})
    found = rows(tmp_path)
    assert found[0]["loss"] == alone[0]["loss"]
    assert all(one["loss"] != other["loss"] for one, other in zip(found[1:], alone[1:], strict=True))
    for key in ("eval_masked_tokens", "eval_unigram_loss"):
        assert found[-1][key] == alone[-1][key]
