"""extras/migrate.py, extras/interop/flag_tables.py: other programs' flags in the parser's errors, whole commands."""

from __future__ import annotations

import random
import re
import shlex
from contextlib import suppress

import pytest

from common.cli import UserError
from common.flags import flag_specs, flat
from common.training.command_line import TASKS, arguments_of, parse_run
from extras.interop.flag_tables import CLM_DEFAULTS, PROGRAMS, RECIPE, RECIPE_OBJECTS, TRAINER_DEFAULTS
from extras.migrate import STRATEGIES, check, hint, main, strategy_of, translate

SPECS = [
    spec for script in STRATEGIES for task in TASKS for spec in flag_specs(arguments_of(strategy_of(script), task))
]
OURS, OPTIONS = {spec.name for spec in SPECS}, {option for spec in SPECS for option in spec.options}


def refused(line: str, script: str = "train_ddp.py") -> str:
    with pytest.raises(UserError) as error:
        parse_run(None, strategy_of(script), shlex.split(line))
    return str(error.value).rpartition(" (see ")[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_table_names_our_flags_or_a_reason(program):
    for theirs, ours in PROGRAMS[program].items():
        assert ours.flag or ours.why, theirs
        words = [word for given in ours.values.values() for word in given.split()]
        named = {*ours.flag.split(), *(word.removeprefix("--").partition("=")[0] for word in words)}
        assert named <= OURS, theirs
        for flag in re.findall(r"(?<!torchrun's )--(\w+)", ours.why):
            assert flag in OURS | {"rdzv_endpoint"}, (theirs, flag)
    assert set(RECIPE_OBJECTS.values()) <= OURS


@pytest.mark.parametrize("program", PROGRAMS)
def test_table_is_what_the_error_says(program):
    """Rows of flags that the scripts know (decoders have --model_type) are for extras.migrate only."""
    dashes = "" if program == "NVIDIA's recipe" else "--"
    rows = {f"{dashes}{name}=[1,2]": ours for name, ours in PROGRAMS[program].items() if dashes + name not in OPTIONS}
    said = refused(shlex.join(rows))
    assert "did you mean" not in said
    for word, ours in rows.items():
        assert f"{word}: {hint(word)}" in said
        assert ours.why in hint(word)
        assert all(f"--{name}" in hint(word) for name in ours.flag.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fp8_config.enabled=true", "fp8_config.enabled=true: here --fp8"),
        (
            "--early_stopping_threshold=1",
            "--early_stopping_threshold=1: none: --early_stopping_patience counts any gain as better",
        ),
        ("fp8_config.enabled=false", "fp8_config.enabled=false: here --fp8=false"),
        ("--use_fsdp", "--use_fsdp: use train_fsdp2.py"),
        ("--use-fsdp", "--use-fsdp: use train_fsdp2.py"),
        (
            "--fsdp_sharding_strategy=FULL_SHARD",
            "--fsdp_sharding_strategy=FULL_SHARD: here --sharding_strategy=full (of train_fsdp2.py)",
        ),
        ("checkpoint.ckpt_dir='/a b'", "checkpoint.ckpt_dir=/a b: here '--output_dir=/a b'"),
        ("adamw_kwargs.betas=[0.9,0.95]", "adamw_kwargs.betas=[0.9,0.95]: here --adam_beta1=0.9 --adam_beta2=0.95"),
        (
            "fp8_config.fp8_recipe_kwargs.margin=1",
            "fp8_config.fp8_recipe_kwargs.margin=1: here --fp8_recipe_kwargs '{\"margin\": 1}'",
        ),
        (
            "'fp8_config.fp8_recipe_kwargs={margin: 1,amax_compute_algo:\"max\"}'",
            'fp8_config.fp8_recipe_kwargs={margin: 1,amax_compute_algo:"max"}: '
            'here \'--fp8_recipe_kwargs={"margin": 1,"amax_compute_algo": "max"}\'',
        ),
        (
            "config_kwargs={num_hidden_layers:2,hidden_size:64}",
            "config_kwargs={num_hidden_layers:2,hidden_size:64}: here "
            "--config_overrides=num_hidden_layers=2,hidden_size=64",
        ),
        ("--flash_attention=fa2", "--flash_attention=fa2: here --attention=flash2 (its name until 0.5)"),
        ("config_kwargs.=", "config_kwargs.="),
        ("--sharding_strategy full", "--sharding_strategy full: it is a flag of train_fsdp2.py"),
        ("--lr 1", "--lr 1: it is a flag of --task clm; this is --task mlm: give --learning_rate"),
        ("fp8_config.enabeld=true", "fp8_config.enabeld=true"),
        (
            "--foo 1 logger.frequency=5 --mixed_precision no",
            "--foo 1; logger.frequency=5: here --logging_steps=5; --mixed_precision no: here --bf16 (no FP16)",
        ),
    ],
)
def test_error_of_another_programs_flag_names_ours(line, said):
    assert refused(line) == f"unknown flag {said}"


def test_error_of_another_scripts_key_of_a_file_of_flags_says_so():
    said = "unknown flag --cuda_graphs: it is a key of a file of flags of train_ddp.py"
    assert refused("--cuda_graphs", script="train_fsdp2.py") == said


def test_error_of_a_file_of_the_recipe_names_the_table(tmp_path):
    (tmp_path / "L0.yaml").write_text("fp8_config:\n  enabled: true\n")
    assert "--fp8_config: a group of the recipe's: docs/flags.md" in refused(str(tmp_path / "L0.yaml"))


RECIPE_DATA = "dataset.load_dataset_kwargs.path=/path/to/download/directory"
ESM2 = "--config_name=facebook/esm2_t6_8M_UR50D --dataset_dir=/fsx/processed/arrow --output_dir=/fsx/out"
GUIDES = {  # commands of the five guides that train: {theirs: (our script, flags with values that they must give)}
    "python train_ddp.py": ("train_ddp.py", {"max_steps": 250}),
    "torchrun --nproc_per_node=2 train_fsdp2.py": ("train_fsdp2.py", {"max_steps": 250}),
    "python train_mfsdp.py": ("train_mfsdp.py", {"max_steps": 250}),
    "python train_fsdp2.py --config-name L0_sanity fp8_config.enabled=true": ("train_fsdp2.py", {"fp8": True}),
    "python train_fsdp2.py --config-name L0_sanity fp4_config.enabled=true": ("train_fsdp2.py", {"fp4": True}),
    "python train_fsdp2.py --config-name L0_sanity \\\n  fp8_config.enabled=true \\\n  fp4_config.enabled=true \\\n"
    "  'fp8_layers=[1,2,3]' \\\n  'fp4_layers=[4,5,6]'\n": (
        "train_fsdp2.py",
        {"fp8": True, "fp4": True, "fp8_layers": "1,2,3", "fp4_layers": "4,5,6", "max_steps": 250},
    ),
    "python train_fsdp2.py quant_stats_config.enabled=true quant_stats_config.quant_log_dir=./logs/quant_stats "
    "quant_stats_config.quant_stats_file=./fp8_debugging_stats.yaml fp8_config.enabled=true": (
        "train_fsdp2.py",
        {"quant_stats": True, "quant_stats_dir": "./logs/quant_stats", "fp8": True, "max_steps": 250},
    ),
    "python train_fsdp2.py --config-name L0_sanity use_sequence_packing=true": (
        "train_fsdp2.py",
        {"sequence_packing": True},
    ),
    "python train_fsdp2.py --config-name L0_sanity fp8_config.enabled=true use_sequence_packing=true": (
        "train_fsdp2.py",
        {"fp8": True, "sequence_packing": True},
    ),
    "python train_ddp.py use_sequence_packing=true": ("train_ddp.py", {"sequence_packing": True, "max_steps": 250}),
    "torchrun --nproc_per_node=4 train_ddp_cp.py --config-name L0_sanity_cp cp_size=4": (
        "train_ddp_cp.py",
        {"cp_size": 4, "tokens_per_pack": 1600},
    ),
    "python train_fsdp2.py --config-name L0_sanity model_tag=facebook/esm2_t6_8M_UR50D": (
        "train_fsdp2.py",
        {"config_name": "facebook/esm2_t6_8M_UR50D", "backend": "hf"},
    ),
    "python train_fsdp2.py --config-name L0_sanity config_name_or_path=nvidia/esm2_t6_8M_UR50D use_te=false": (
        "train_fsdp2.py",
        {"config_name": "facebook/esm2_t6_8M_UR50D", "backend": "hf"},
    ),
    f"HF_DATASETS_OFFLINE=1 python train_fsdp2.py --config-name L0_sanity {RECIPE_DATA}": (
        "train_fsdp2.py",
        {"dataset": "/path/to/download/directory"},
    ),
    "python train_fsdp2.py --config-name L0_sanity checkpoint.ckpt_dir=/path/to/ckpt_dir "
    "checkpoint.save_every_n_steps=100": ("train_fsdp2.py", {"output_dir": "/path/to/ckpt_dir", "save_steps": 100}),
    "python train_fsdp2.py --config-name L0_sanity checkpoint.ckpt_dir=/c checkpoint.resume_from_checkpoint=true "
    "checkpoint.save_final_model=true hydra.verbose=true": (
        "train_fsdp2.py",
        {"output_dir": "/c", "resume_from_checkpoint": None, "save_final_model": True},
    ),
    "srun -l torchrun --nproc_per_node=8 --nnodes=2 train_mfsdp.py --config-name L1_3B num_train_steps=1_000 "
    "fp8_config.enabled=true fp8_config.fp8_recipe=transformer_engine.common.recipe.MXFP8BlockScaling "
    "fp8_config.fp8_format=E4M3": (
        "train_mfsdp.py",
        {"stop_at_step": 1000, "max_steps": 500_000, "fp8_recipe": "mxfp8", "fp8_format": "e4m3"},
    ),
    "torchrun --nproc_per_node=4 train_fsdp2_cp.py --config-name bench_b200_15b_mxfp8_cp4": (
        "train_fsdp2.py",
        {"config_name": "facebook/esm2_t48_15B_UR50D", "fp8_recipe": "mxfp8", "cp_size": 4, "stop_at_step": 500},
    ),
    f"torchrun --nproc_per_node=1 --nnodes=4 /workspace/train.py {ESM2} --bf16=True --do_eval=True --do_train=True "
    "--do_preprocess=False --num_train_epochs=1 --max_train_samples=100000 --torch_compile=True "
    "--pad_to_max_length=True --tokenizer_name=facebook/esm2_t6_8M_UR50D --ddp_bucket_cap_mb=125": (
        "train_ddp.py",
        {"ddp_bucket_cap_mb": 125, "bf16": True, "max_train_samples": 100_000},
    ),
    "accelerate launch --num_processes=2 --num_machines=2 --machine_rank=$(POD_RANK) --rdzv_backend=etcd "
    "--main_process_port=2379 --main_process_ip=etcd --use_fsdp --fsdp_sharding_strategy=FULL_SHARD "
    "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=EsmLayer "
    "--fsdp_backward_prefetch=BACKWARD_PRE --fsdp_cpu_ram_efficient_loading=True --fsdp_sync_module_states=True "
    f"--fsdp_use_orig_params=True /workspace/train.py {ESM2} --overwrite_output_dir --torch_compile=False": (
        "train_fsdp2.py",
        {"sharding_strategy": "full", "overwrite_output_dir": True, "torch_compile": False},
    ),
    "torchrun --nproc_per_node=8 --nnodes=4 --rdzv_id=288 --rdzv_backend=c10d --rdzv_endpoint=p5-dy-gpu-1 "
    "../src/train.py --max_context_width=8192 --num_key_value_heads=8 --intermediate_size=14336 --hidden_width=4096 "
    "--num_layers=32 --num_heads=32 --model_type=llama_v3 --tokenizer=hf-internal-testing/llama-tokenizer "
    "--checkpoint_freq=50 --validation_freq=25 --max_steps=100 --checkpoint_dir=./checkpoints --dataset=allenai/c4 "
    "--dataset_config_name=en --resume_from_checkpoint=./checkpoints --train_batch_size=1 --val_batch_size=1 "
    "--sharding_strategy=full --offload_activations=1": (
        "train_fsdp2.py",
        {"model_type": "llama_v3", "max_steps": 100, "output_dir": "./checkpoints", "save_steps": 50},
    ),
    "torchrun ./train.py --train_batch_size=4 --val_batch_size=4 --max_steps=5000 --seed=42 --bf16=1 --grad_clip=1.0 "
    "--weight_decay=0.2 --beta1=0.9 --beta2=0.95 --activation_checkpointing=1 --intermediate_size=14336 "
    "--num_key_value_heads=8 --logging_freq=1 --max_context_width=32768 --vocab_size=32000 --hidden_width=4096 "
    "--num_layers=32 --num_heads=32 --resid_pdrop=0.1 --embd_pdrop=0.1 --attn_pdrop=0.1 --summary_first_pdrop=0.1 "
    "--initializer_range=0.02 --model_type=mixtral --rotary_pct=0.25 --rotary_emb_base=10000 --lr=0.0001 "
    "--lr_decay_style=cosine --min_lr=1e-5 --warmup=0.0032 --plateau=0.0 --dataset=allenai/c4 "
    "--tokenizer=mistralai/Mixtral-8x7B-v0.1 --epochs=3 --dataset_config_name=en --limit_all_gathers=1 "
    "--sharding_strategy=full ' #' https://pytorch.org/docs/stable/fsdp.html --offload_activations=1": (
        "train_fsdp2.py",
        {"model_type": "mixtral", "seed": 42, "rope_theta": 10_000.0, "offload_activations": True},
    ),
    "python run_mlm.py --model_type esm --fp16 --eval_strategy no --warmup_ratio 0.1 --max_steps -1 --push_to_hub "
    f"{ESM2}": (
        "train_ddp.py",
        {"bf16": True, "warmup_steps": 0.1, "do_eval": False, "max_steps": -1},
    ),
    "python run_mlm.py --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
    f"""'{{"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"}}' {ESM2}""": (
        "train_ddp.py",
        {"lr_scheduler_type": "wsd", "lr_decay_steps": 20.0, "min_lr_rate": 0.1},
    ),
    "torchrun run_clm.py --config_name meta-llama/Llama-3.2-1B --tokenizer_name meta-llama/Llama-3.2-1B "
    "--dataset_name allenai/c4 --dataset_config_name en --block_size 1024 --num_train_epochs 1 --output_dir out "
    "--max_steps 100 --torch_dtype bfloat16 --gradient_checkpointing": (
        "train_ddp.py",
        {"model": "meta-llama/Llama-3.2-1B", "max_seq_length": 1024, "max_steps": 100, "gradient_checkpointing": True},
    ),
}


@pytest.mark.parametrize(("command", "script", "flags"), [(c, *rest) for c, rest in GUIDES.items()], ids=str)
def test_command_of_a_guide_becomes_one_that_our_parser_accepts(command, script, flags):
    made = translate(shlex.split(command.replace("\\\n", " ")))
    check(made)
    line, *notes = str(made).splitlines()
    assert all(note.startswith("# ") for note in notes)
    words = shlex.split(line)  # as a shell reads it
    assert made.script == script
    args = flat(parse_run(None, strategy_of(script), words[words.index(script) + 1 :]))
    assert flags.items() <= args.items()
    theirs = [word for word in shlex.split(command) if "=" in word and word.partition("=")[0] in RECIPE]
    for word in theirs:  # each is named
        assert any(note.startswith(f"# {word}: ") for note in notes)


def notes(command: str) -> str:
    return "\n".join(translate(shlex.split(command)).notes)


def test_notes_of_the_recipes_smoke_test_name_what_differs():
    sanity = "python train_fsdp2.py --config-name L0_sanity"
    said = notes(sanity)
    for part in (
        "in fp32 here: --bf16",
        "generated proteins here",
        "compiles layers there",
        "num_training_steps there",
    ):
        assert part in said
        assert part in notes("python train_ddp.py"), "the recipe runs it without flags, too"
        assert part in notes("python train_ddp.py  # or train_fsdp2.py / train_mfsdp.py"), "and with a comment"
    said = notes(f"{sanity} dataset.path=x use_torch_compile=true lr_scheduler_kwargs.num_training_steps=500 --bf16")
    assert not any(part in said for part in ("fp32", "generated", "there"))
    assert translate(shlex.split(f"{sanity} fp8_config.enabled=true")).flags == ["--fp8", "--bf16"]


def test_transformers_layers_go_where_a_script_takes_them():
    """Megatron-FSDP cannot shard them; what changes layers is refused with them."""
    stock = "--config-name L0_sanity model_tag=facebook/esm2_t6_8M_UR50D"
    made = translate(shlex.split(f"python train_mfsdp.py {stock}"))
    assert (made.script, made.flags[-1]) == ("train_fsdp2.py", "--backend=hf")
    assert "train_mfsdp.py: train_fsdp2.py: Megatron-FSDP" in "\n".join(made.notes)
    check(made)
    with pytest.raises(UserError, match="--backend hf: --fp8 is not of transformers' layers"):
        check(translate(shlex.split(f"python train_fsdp2.py {stock} fp8_config.enabled=true")))


def test_fsdp_guides_train_py_asks_for_a_model():
    made = translate(shlex.split("torchrun train.py --hidden_width=768 --max_steps=2 --dataset=x --checkpoint_dir=o"))
    assert "without --model_type: gpt_neox there" in made.notes[1]
    with pytest.raises(UserError, match="missing: --model"):
        check(made)


def test_run_of_transformers_trainer_keeps_its_defaults_but_for_those_given():
    made = translate(shlex.split("python run_mlm.py --warmup_ratio 0.1 --weight_decay 0.1"))
    assert made.flags[:2] == ["--warmup_steps=0.1", "--weight_decay=0.1"]
    assert made.flags[2:] == ["--learning_rate=5e-05", "--lr_scheduler_type=linear", "--adam_beta2=0.999"]
    assert "--learning_rate=5e-05: the default there; without it, that here: 0.0004" in made.notes
    causal = translate(shlex.split("python run_clm.py --block_size 512"))
    assert {"--min_lr=0.0", "--seed=42", "--bf16=False", "--max_seq_length=512"} < set(causal.flags)
    assert "--max_seq_length=1024" not in causal.flags


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("sbatch train_ddp.sh", "sbatch slurm/train_ddp.sh"),
        ("sbatch --nodes=2 llama3_1_8b-training.sbatch", "sbatch --nodes=2 slurm/llama3_1_8b-training.sbatch"),
        ("sbatch slurm.sh", "sbatch slurm/train_fsdp.sh"),
        (
            "docker run -v ${TARGET_PATH}:/data ${DOCKER_IMAGE_NAME}:${TAG} python3 0.download_data.py",
            'docker run -v "${TARGET_PATH}:/data" "${DOCKER_IMAGE_NAME}:${TAG}" python3 0.download_data.py',
        ),
        (
            "python3 1.tokenize_uniref_csv.py --input_dir /data/csv --output_dir /data/processed",
            "python3 1.tokenize_uniref_csv.py --input_dir /data/csv --output_dir /data/processed",
        ),
        ("./0.download_data.py --output_dir data", "python 0.download_data.py --output_dir data"),
        (
            "./train_ddp.py --dataset_dir ~/data --output_dir '$DIR/run 1'",
            'python train_ddp.py "--dataset_dir=${HOME}/data" "--output_dir=$DIR/run 1"',
        ),
    ],
)
def test_jobs_and_data_scripts_keep_their_names(command, line):
    assert str(translate(shlex.split(command))).splitlines()[0] == line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kubectl get pods", "no script in this command"),
        ("python other.py --fp16", "other.py: no train script of the guides: train_ddp.py, "),
        ("cd /fsx && python train_ddp.py", "&&: more than one command"),
        ("python train_ddp.py > log", ">: more than one command"),
        ("sbatch", "sbatch without a job script"),
        ("sbatch ../../other.sh", "no job script of this name in slurm/"),
        ("python train_ddp.py --config-name L9_sanity", "--config-name L9_sanity: no file of this name"),
        ("python 'train_ddp.py", "not a command line: No closing quotation"),
        ("python train_ddp.py --config-name L0_sanity seed=1 fp8_config.fp8_recipe=Nonsense", "--fp8_recipe"),
    ],
)
def test_migrate_refuses_in_one_line(command, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["migrate", command])
    with pytest.raises(UserError) as error:
        main()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_migrate_treats_the_command_as_data(tmp_path, monkeypatch, capsys):
    """Nothing of it runs, here or when the output is pasted into a shell."""
    monkeypatch.chdir(tmp_path)
    hostile = "$(touch a) `touch b`; touch c\ntouch d"
    words = [
        "python",
        "train_ddp.py",
        "--config-name",
        "L0_sanity",
        f"checkpoint.ckpt_dir={hostile}",
        f"--x={hostile}",
    ]
    monkeypatch.setattr("sys.argv", ["migrate", *words])
    main()
    said = capsys.readouterr().out
    first = said.index("\n# ")  # the command may hold newlines, in quotes
    assert shlex.split(said[:first])[-1] == f"--output_dir={hostile}"
    assert all(line.startswith("# ") for line in said[first:].strip().splitlines())
    assert list(tmp_path.iterdir()) == []


def test_migrate_of_any_words_is_a_translation_or_an_error_of_the_user():
    rng = random.Random(0)
    pieces = [
        "accelerate",
        "launch",
        "torchrun",
        "python",
        "-m",
        "sbatch",
        "train.py",
        "train_ddp.py",
        "--config-name",
    ]
    pieces += ["-cn", "L0_sanity", "L1_3B", "", "=", "--", "--=", "-1", "#", "é", "\0", "--num_processes=0", "--fp16"]
    pieces += ["--num_machines=0", "--config_name", "fp8_config.fp8_recipe_kwargs.margin=x", "adamw_kwargs.betas=[]"]
    pieces += ["config_kwargs.=", "num_train_steps=x", "checkpoint.ckpt_dir=$(x)", "--model_type", "--mixed_precision"]
    assert all("\n" not in hint(piece) for piece in pieces)
    for _ in range(150):
        words = rng.choices(pieces, k=rng.randrange(12))
        with suppress(UserError):
            assert shlex.split(str(translate(words)), comments=True)


def test_migrate_prints_its_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["migrate", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m extras.migrate 'COMMAND'\n\nTranslate a command")


def test_hint_knows_no_other_words():
    assert [hint(word) for word in ("--max_steps", "max_steps", "a=b", "--", "", "use_fsdp", "=")] == [""] * 7


def test_trainer_defaults_are_those_of_transformers():
    from dataclasses import fields

    from transformers import TrainingArguments

    theirs = {field.name: getattr(field.default, "value", field.default) for field in fields(TrainingArguments)}
    assert {name: str(theirs[name]) for name in TRAINER_DEFAULTS} == TRAINER_DEFAULTS
    assert TRAINER_DEFAULTS.keys() | CLM_DEFAULTS.keys() <= OURS
    assert {name: str(theirs[name]) for name in CLM_DEFAULTS if name in theirs}.items() <= CLM_DEFAULTS.items()
