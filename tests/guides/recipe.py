"""Rows of the guide NVIDIA's recipe esm2_native_te (tests/guides/rows.py says what a row is)."""

from __future__ import annotations

import json
import os
import re
import shutil

from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from tests.guides.checks import (
    Here,
    Row,
    all_of,
    asks,
    defaults,
    leaves,
    parses,
    translates,
    typed,
)
from tests.guides.elsewhere import differs, documented, held
from tests.guides.images import Image, builds, collects_tests, complete, starts_in_image
from tests.guides.session import ROOT
from tests.models.reference import packed, random_batch
from tests.patience import run

SANITY = {"config_name": "facebook/esm2_t6_8M_UR50D", "max_steps": 250, "per_device_train_batch_size": 2}
L0 = "python train_fsdp2.py --config-name L0_sanity"


def inference(here: Here) -> None:
    """The guide's Python: AutoModel and AutoTokenizer, on the green fluorescent protein's first residues."""
    from transformers import AutoModel, AutoTokenizer

    directory = str(here.demonstration() / "out" / "final_model")
    model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer("MSKGEELFTGVVPILVELDGDVNGHKFSVSGEGEGDATYGKLTLKFICTTGKLPVPWPTL", return_tensors="pt")
    model.eval()
    assert model(**inputs).last_hidden_state.shape[:2] == (1, 62)


def layers_get_multiples_of_16(here: Here) -> None:
    """Packs of 1, 17 and 70 tokens, in the model."""
    model, rows = build_model(esm2_config(layers=1, hidden_size=32, heads=2), seed=1), []
    model.encoder.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    for tokens in (1, 17, 70):
        model(**packed(random_batch([tokens])))
    assert len(rows) == 3
    assert [number for number in rows if number % 16] == []


def test_script_runs_pytest(here: Here) -> None:
    """./test.sh as it stands; install.sh and Python write down what they are asked."""
    assert os.access(ROOT / "test.sh", os.X_OK)
    shutil.copy(ROOT / "test.sh", here.tmp)
    for name in ("install.sh", ".venv/bin/python"):
        (here.tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (here.tmp / name).write_text('#!/bin/sh\necho "$0 $*" >>calls\n')
        (here.tmp / name).chmod(0o755)
    assert run(["./test.sh", "-k", "packing"], 60, cwd=here.tmp).returncode == 0
    install, tests = (here.tmp / "calls").read_text().splitlines()
    assert install == "./install.sh --dev"
    assert re.search(r"/\.venv/bin/python -m pytest .* -k packing$", tests)


def development_container(here: Here) -> None:
    """devcontainer.json names a Dockerfile that can be built, and VSCode's tests are pytest's."""
    folder = ROOT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text())
    build = settings["build"]
    complete(Image((folder / build["context"]).resolve(), folder / build["dockerfile"]))
    vscode = settings["customizations"]["vscode"]
    assert "ms-python.python" in vscode["extensions"]
    assert vscode["settings"]["python.testing.pytestEnabled"]


RECIPE = {
    1: Row(
        "ESM-2 in BF16, FP8, MXFP8, NVFP4, with context parallelism (parsed)",
        all_of(
            *(
                defaults(script, *common, **expected)
                for common in [
                    ("--config_name=facebook/esm2_t6_8M_UR50D", "--dataset=x", "--max_steps=1", "--output_dir=o")
                ]
                for script, common, expected in (
                    ("train_ddp.py", (*common, "--bf16"), {"bf16": True}),
                    ("train_fsdp2.py", (*common, "--fp8", "--fp8_recipe=mxfp8"), {"fp8_recipe": "mxfp8"}),
                    ("train_fsdp2.py", (*common, "--fp4"), {"fp4": True}),
                    ("train_ddp_cp.py", (*common, "--cp_size=2"), {"cp_size": 2}),
                )
            )
        ),
    ),
    2: Row(
        "AMPLIFY",
        all_of(
            differs("AMPLIFY"),
            held("extras/families/amplify/test_runs.py::test_amplify_run_of_every_strategy_equals_one_process"),
        ),
    ),
    3: Row(
        "FP8 from 8.9 (by blocks: 9.0), MXFP8 and NVFP4 from 10.0",
        held("precision/test_plan.py::test_plan_refuses_unsupported_device"),
    ),
    4: typed("an image of the folder", "docker build -t esm2_native_te .", builds("esm2_native_te"), blocks=(1,)),
    5: typed(
        "a shell in it, in the folder of the train scripts",
        "docker run -it --gpus all --network host --ipc=host --rm -v ${PWD}:/workspace/bionemo esm2_native_te "
        "/bin/bash",
        starts_in_image("train_ddp.py", "train_ddp_cp.py", "train_fsdp2.py", "train_mfsdp.py"),
        blocks=(2,),
    ),
    6: Row(
        "uv venv --python 3.12 --seed; pip install --index-url, --no-build-isolation: install.sh, torch first",
        all_of(
            held("ops/test_install.py::test_install_compiles_after_torch_with_constraints"),
            differs("uv venv"),
        ),
        blocks=(3,),
    ),
    7: typed(
        "the plain CUDA image, and its tests (collected)",
        "docker build -t esm2_native_te_cuda -f Dockerfile.cuda .\n"
        "docker run -it --gpus all --network host --ipc=host --rm -v ${PWD}:/workspace/bionemo esm2_native_te_cuda "
        '/bin/bash -c "pytest -v ."',
        builds("esm2_native_te_cuda", "Dockerfile.cuda"),
        collects_tests,
        blocks=(4,),
    ),
    8: Row(
        "a script alone, on one device (train_fsdp2.py and train_mfsdp.py: parsed)",
        held(
            "test_configs.py::test_script_without_flags_is_the_sanity_run",
            "test_configs.py::test_script_without_flags_trains",
        ),
        "python train_ddp.py  # or train_fsdp2.py / train_mfsdp.py",
        blocks=(5,),
    ),
    9: Row(
        "two ranks train the same run as one",
        held(
            "training/test_fsdp2.py::test_fsdp2_every_layout_equals_one_process",
            "test_configs.py::test_sanity_run_of_one_process_is_complete_for_two",
        ),
        "torchrun --nproc_per_node=2 train_fsdp2.py  # or train_mfsdp.py / train_ddp.py",
        blocks=(6,),
    ),
    10: Row("slurm.sh (parsed)", translates("slurm/train_fsdp.sh"), "sbatch slurm.sh"),
    11: Row(
        "DDP, FSDP2 and Megatron-FSDP train the same model",
        held("training/test_mfsdp.py::test_mfsdp_every_strategy_equals_one_process_and_fsdp2"),
    ),
    12: Row(
        "FP8 in all layers",
        translates("train_fsdp2.py", ("--fp8",), fp8=True, fp8_layers=None, bf16=True, **SANITY),
        f"{L0} fp8_config.enabled=true",
        blocks=(7,),
    ),
    13: Row(
        "NVFP4",
        translates("train_fsdp2.py", ("--fp4",), fp4=True, bf16=True, **SANITY),
        f"{L0} fp4_config.enabled=true",
        blocks=(8,),
    ),
    14: Row("L0_sanity by its name (parsed)", parses("train_fsdp2.py", **SANITY), L0, blocks=(7, 8)),
    15: Row(
        "another recipe, by its class",
        translates("train_ddp.py", fp8=True, fp8_recipe="mxfp8", fp8_format="e4m3"),
        "python train_ddp.py --config-name L0_sanity fp8_config.enabled=true fp8_config.fp8_format=E4M3 "
        "fp8_config.fp8_recipe=transformer_engine.common.recipe.MXFP8BlockScaling",
    ),
    16: Row(
        "layers 1-3 in FP8, 4-6 in FP4",
        translates("train_fsdp2.py", ("--fp8", "--fp4", "--fp8_layers", "--fp4_layers"), fp8=True, fp4=True),
        f"{L0} fp8_config.enabled=true fp4_config.enabled=true 'fp8_layers=[1,2,3]' 'fp4_layers=[4,5,6]'",
        blocks=(9,),
    ),
    17: Row(
        "the other format takes the layers that are left; none listed: all",
        held("precision/test_plan.py::test_plan_assigns_formats_to_layers"),
        blocks=(9,),
    ),
    18: Row(
        "statistics of quantisation",
        translates(
            "train_fsdp2.py",
            ("--quant_stats", "--fp8"),
            quant_stats=True,
            quant_stats_file="./fp8_debugging_stats.yaml",
            fp8=True,
        ),
        "python train_fsdp2.py quant_stats_config.enabled=true quant_stats_config.quant_log_dir=./logs/quant_stats "
        "quant_stats_config.quant_stats_file=./fp8_debugging_stats.yaml fp8_config.enabled=true",
        blocks=(10,),
    ),
    19: Row(
        "fp8_debugging_stats.yaml, Transformer Engine's format; freq",
        held(
            "precision/test_stats.py::test_stats_file_of_guides_is_accepted",
            "precision/test_stats_plan.py::test_stats_plan_of_example_file",
        ),
        blocks=(10,),
    ),
    20: Row(
        "only the quantised layers are logged, and of these the file's",
        held(
            "precision/test_stats_plan.py::test_stats_plan_of_example_file",
            "precision/test_stats_plan.py::test_stats_plan_selects_layers",
        ),
    ),
    21: Row(
        "sequence packing",
        translates("train_fsdp2.py", ("sequence_packing",), sequence_packing=True),
        f"{L0} use_sequence_packing=true",
        blocks=(11,),
    ),
    22: Row(
        "FP8 and packing",
        translates("train_fsdp2.py", ("--fp8", "sequence_packing"), sequence_packing=True, fp8=True),
        f"{L0} fp8_config.enabled=true use_sequence_packing=true",
        blocks=(12,),
    ),
    23: Row(
        "packs are filled up to a multiple of 16 tokens for FP8; sizes of the model must be multiples",
        all_of(layers_get_multiples_of_16, held("precision/test_plan.py::test_plan_requires_size_multiples")),
        blocks=(12,),
    ),
    24: Row(
        "train_ddp_cp with L0_sanity_cp, --cp_size (parsed)",
        parses("train_ddp_cp.py", cp_size=2, tokens_per_pack=1600),
        "python train_ddp_cp.py --config-name L0_sanity_cp --cp_size=2",
    ),
    25: Row(
        "1,2,7,8 and 3,4,5,6",
        held("distributed/test_context_parallel.py::test_cp_split_matches_the_guide"),
        blocks=(13,),
    ),
    26: Row(
        "every sequence of a pack is sliced",
        held("distributed/test_context_parallel.py::test_cp_split_splits_each_sequence_separately"),
        blocks=(13,),
    ),
    27: Row(
        "transformers' own model",
        translates("train_fsdp2.py", ("--backend",), backend="hf"),
        f"{L0} model_tag=facebook/esm2_t6_8M_UR50D",
        blocks=(14,),
    ),
    28: Row(
        "the recipe's data set, streamed (parsed)",
        parses("train_fsdp2.py", dataset="nvidia/esm2_uniref_pretraining_data", streaming=True),
        "train_fsdp2.py --config_name=facebook/esm2_t6_8M_UR50D --dataset=nvidia/esm2_uniref_pretraining_data "
        "--streaming --max_steps=1 --output_dir=out",
        blocks=(15,),
    ),
    29: typed(
        "a copy of it",
        "export HF_TOKEN=hf_token\n"
        "hf download nvidia/esm2_uniref_pretraining_data --repo-type dataset --local-dir "
        "/path/to/download/directory",
        asks("hf", "--repo-type dataset"),
        blocks=(16,),
    ),
    30: Row(
        "the copy is trained on",
        translates("train_fsdp2.py", ("--dataset",), dataset="/path/to/download/directory"),
        f"HF_DATASETS_OFFLINE=1 {L0} dataset.load_dataset_kwargs.path=/path/to/download/directory",
        blocks=(17,),
    ),
    31: Row(
        "checkpoints every 100 steps",
        translates("train_fsdp2.py", ("--output_dir", "--save_steps"), output_dir="/path/to/ckpt_dir", save_steps=100),
        f"{L0} checkpoint.ckpt_dir=/path/to/ckpt_dir checkpoint.save_every_n_steps=100",
        blocks=(18,),
    ),
    32: Row(
        "from the newest checkpoint",
        translates("train_fsdp2.py", ("--output_dir",), output_dir="/path/to/ckpt_dir"),
        f"{L0} checkpoint.ckpt_dir=/path/to/ckpt_dir checkpoint.resume_from_checkpoint=true",
        blocks=(19,),
    ),
    33: Row("final_model/ at the end", leaves("out/final_model/model.safetensors")),
    34: Row(
        "checkpoint.save_final_model",
        translates("train_mfsdp.py", ("--save_final_model",), save_final_model=True),
        "python train_mfsdp.py --config-name L0_sanity checkpoint.save_final_model=true",
    ),
    35: Row(
        "checkpoints of all three strategies; of any on any other (Megatron-FSDP's: by ./test.sh --slow)",
        all_of(
            held(
                "training/test_fsdp2.py::test_fsdp2_checkpoint_of_any_layout_resumes_on_any_other",
                "training/test_mfsdp.py::test_mfsdp_resume_after_kill_and_stop_is_same_run",
            ),
            held("training/test_mfsdp.py::test_mfsdp_checkpoint_of_any_strategy_resumes_on_any_other", slow=True),
        ),
    ),
    36: Row(
        "the loader's state; here also with other numbers of workers and ranks",
        held(
            "training/test_resume.py::test_resume_with_other_number_of_loader_workers",
            "training/test_resume.py::test_resume_with_other_world_size_keeps_global_batch",
        ),
    ),
    37: Row("inference with AutoModel", inference, blocks=(20,)),
    38: Row(
        "recipes_local_test.py: ./test.sh",
        all_of(differs("recipes_local_test.py"), test_script_runs_pytest),
        "./ci/scripts/recipes_local_test.py bionemo-recipes/recipes/esm2_native_te/",
        blocks=(21,),
    ),
    39: Row(
        "hydra.verbose=true",
        all_of(
            translates("train_fsdp2.py", ("hydra.verbose=true: none: there are no debug lines",), **SANITY),
            differs("hydra.verbose=true"),
        ),
        f"{L0} hydra.verbose=true",
    ),
    40: Row(
        "models of the recipe (nv_esm): the weights of the stock model",
        all_of(differs("nv_esm"), held("extras/test_nv_esm.py::test_recipe_model_has_the_weights_of_its_stock_model")),
    ),
    41: Row(
        "benchmarks of throughput: a table, and a program whose rows are the scripts' own runs",
        all_of(
            differs("plots of speed and convergence at 15B"),
            documented("docs/hardware.md", "(../benchmarks/results/gpu_throughput.md)"),
            documented("benchmarks/results/gpu_throughput.md", "tokens/s"),
            held("benchmarks/test_gpu_throughput.py::test_row_is_the_scripts_own_run"),
        ),
    ),
    42: Row("a development container of VSCode", all_of(differs("Dev Container"), development_container)),
    43: Row(
        "context-parallel ranks share a pack, data ranks have their own",
        held("data/test_loader.py::test_loader_gives_context_parallel_ranks_the_same_packs"),
        blocks=(13,),
    ),
    44: Row(
        "a run with context parallelism is that of one",
        held("training/test_context_parallel.py::test_cp_run_equals_one_process"),
    ),
    45: Row(
        "statistics need a quantised layer", held("precision/test_stats_plan.py::test_stats_flags_refused_in_one_line")
    ),
    46: Row("several nodes, of a Slurm cluster", held("ops/test_slurm.py::test_slurm_runs_the_readmes_commands")),
}
