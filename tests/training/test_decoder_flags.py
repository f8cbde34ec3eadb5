"""The FSDP guides' command lines, and what became of each of their flags."""

from __future__ import annotations

import logging
import math
import os

import pytest

from common.cli import UserError
from common.flags import flag_specs, flat
from common.training.command_line import COUNTERPARTS, TASKS, arguments_of, parse_run, task_name
from common.training.schedule import SCHEDULES
from extras.families.decoders.causal_arguments import CausalArguments
from extras.families.decoders.config import PRESETS
from extras.families.text.tokenizers import ByteTokenizer
from tests.data_fixtures import load_script
from tests.decoder_fixtures import train_decoder, write_text
from tests.marks import cases
from tests.training_fixtures import _main, on_ranks, rows

# TRAINING_ARGS of the guides' logs, word for word.
LLAMA3_1_8B = (
    "--max_context_width=8192",
    "--num_key_value_heads=8",
    "--intermediate_size=14336",
    "--hidden_width=4096",
    "--num_layers=32",
    "--num_heads=32",
    "--model_type=llama_v3",
    "--tokenizer=hf-internal-testing/llama-tokenizer",
    "--checkpoint_freq=50",
    "--validation_freq=25",
    "--max_steps=100",
    "--checkpoint_dir=./checkpoints",
    "--dataset=allenai/c4",
    "--dataset_config_name=en",
    "--resume_from_checkpoint=./checkpoints",
    "--train_batch_size=1",
    "--val_batch_size=1",
    "--sharding_strategy=full",
    "--offload_activations=1",
)
MIXTRAL = (
    *("--train_batch_size=4", "--val_batch_size=4", "--max_steps=5000", "--seed=42", "--bf16=1", "--grad_clip=1.0"),
    *("--weight_decay=0.2", "--beta1=0.9", "--beta2=0.95", "--activation_checkpointing=1"),
    *("--intermediate_size=14336", "--num_key_value_heads=8", "--logging_freq=1", "--max_context_width=32768"),
    *("--vocab_size=32000", "--hidden_width=4096", "--num_layers=32", "--num_heads=32", "--resid_pdrop=0.1"),
    *("--embd_pdrop=0.1", "--attn_pdrop=0.1", "--summary_first_pdrop=0.1", "--initializer_range=0.02"),
    *("--model_type=mixtral", "--rotary_pct=0.25", "--rotary_emb_base=10000", "--lr=0.0001"),
    *("--lr_decay_style=cosine", "--min_lr=1e-5", "--warmup=0.0032", "--plateau=0.0", "--dataset=allenai/c4"),
    *("--tokenizer=mistralai/Mixtral-8x7B-v0.1", "--epochs=3", "--dataset_config_name=en", "--limit_all_gathers=1"),
    *("--sharding_strategy=full", " #", "https://pytorch.org/docs/stable/fsdp.html", "--offload_activations=1"),
)
MATHSTRAL = (
    *("--train_batch_size=1", "--val_batch_size=1", "--max_steps=5000", "--seed=42", "--grad_clip=1.0"),
    *("--weight_decay=0.2", "--beta1=0.9", "--beta2=0.95", "--activation_checkpointing=1"),
    *("--intermediate_size=14336", "--num_key_value_heads=8", "--logging_freq=1", "--max_context_width=32768"),
    *("--vocab_size=32768", "--hidden_width=4096", "--num_layers=32", "--num_heads=32", "--resid_pdrop=0.1"),
    *("--embd_pdrop=0.1", "--attn_pdrop=0.1", "--summary_first_pdrop=0.1", "--initializer_range=0.02"),
    *("--model_type=mistral", "--rotary_pct=0.25", "--rotary_emb_base=10000", "--lr=0.0001"),
    *("--lr_decay_style=cosine", "--min_lr=1e-5", "--warmup=0.0032", "--plateau=0.0", "--dataset=allenai/c4"),
    *("--tokenizer=mistralai/mathstral-7B-v0.1", "--epochs=3", "--checkpoint_dir=./checkpoints/mathstral-7B"),
    *("--resume_from_checkpoint=./checkpoints/mathstral-7B", "--checkpoint_freq=50", "--validation_freq=500"),
    *("--dataset_config_name=en", "--limit_all_gathers=1", "--sharding_strategy=full", " #"),
    *("https://pytorch.org/docs/stable/fsdp.html", "--offload_activations=1"),
)
GUIDES = {"llama3_1_8b": LLAMA3_1_8B, "mistral_8x7b": MIXTRAL, "mathstral_7b": MATHSTRAL}
# What makes their runs tiny: sizes, steps, and places of this machine, in the place of their own.
TINY = {"max_context_width": 32, "num_key_value_heads": 2, "intermediate_size": 64, "hidden_width": 32}
TINY |= {"num_layers": 2, "num_heads": 4, "vocab_size": 272, "max_steps": 4, "checkpoint_freq": 2}
TINY |= {"validation_freq": 2, "disable_tqdm": 1}
# The guides' arguments.py: what each of their flags defaults to, and by which name it is here.
DEFAULTS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "max_steps": 5000,
    "seed": 12345,
    "bf16": True,
    "max_grad_norm": 1.0,
    "weight_decay": 0.2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "activation_checkpointing": "full",
    "offload_activations": False,
    "logging_steps": 1,
    "max_seq_length": 2048,
    "sharding_strategy": "full",
    "cpu_offload": False,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "min_lr": 1e-5,
    "warmup_steps": 0.0032,
    "plateau": 0.0,
    "train_split": "train",
    "val_split": "validation",
    "num_train_epochs": 3,
    "save_steps": 1000,
    "eval_steps": None,
    "validation_batches": 10,
}


def parse(*words: str, script: str = "train_fsdp2.py"):
    return parse_run("", load_script(script).FsdpFlags, list(words))


@pytest.mark.parametrize("name", GUIDES)
def test_decoder_flags_of_guides_are_accepted_unchanged(name, caplog):
    with caplog.at_level(logging.INFO):
        args = parse(*GUIDES[name])
    config, told = args.model.decoder_config(args.data.max_seq_length)
    assert told.startswith(f"Model: {name}")
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (4096, 32, 8)
    # Theirs had 50,432 words and no rotation of Llama 3's; a base that is given counts, and is said.
    assert config.vocab_size == {"llama3_1_8b": 128256, "mistral_8x7b": 32000, "mathstral_7b": 32768}[name]
    assert config.rope_theta == (500000 if name == "llama3_1_8b" else 10000)
    assert ("rope_theta 10000.0, not 1000000.0" in told) == (name != "llama3_1_8b")
    flags = args.strategy
    assert (flags.activation_checkpointing, flags.offload_activations, flags.sharding_strategy) == (
        "full",
        True,
        "full",
    )
    comment = "Not a flag, taken for a comment: # https://pytorch.org/docs/stable/fsdp.html" in caplog.text
    assert comment == (" #" in GUIDES[name])


@pytest.mark.parametrize("name", cases(GUIDES, slow={"mistral_8x7b", "mathstral_7b"}))
def test_decoder_commands_of_guides_train(name, tmp_path, monkeypatch):
    """Word for word but for sizes and places, twice: the second start finds the first one's checkpoints."""
    text = tmp_path / "text"
    write_text(text / "en")  # as in C4: a configuration is a folder
    ByteTokenizer().save(tmp_path / "tokenizer")
    instead = TINY | {"dataset": text, "tokenizer": tmp_path / "tokenizer"}
    words = [
        f"--{flag}={instead.pop(flag)}" if (flag := word[2:].partition("=")[0]) in instead else word
        for word in GUIDES[name]
    ]
    words += [f"--{flag}={value}" for flag, value in instead.items()]
    monkeypatch.chdir(tmp_path)
    for start in ("first", "second"):
        codes, said = on_ranks(2, _in, str(tmp_path), words)
        assert codes == [0, 0], said
        assert ("nothing to train" in said[0]) == (start == "second")
    out = tmp_path / {"mistral_8x7b": "out/mixtral", "mathstral_7b": "checkpoints/mathstral-7B"}.get(
        name, "checkpoints"
    )
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert (out / "final_model" / "config.json").exists()
    for flag in ("resid_pdrop", "limit_all_gathers", "rotary_pct"):
        assert (f"--{flag} " in said[0]) == any(word.startswith(f"--{flag}=") for word in words)


def _in(directory: str, words: list[str]) -> None:
    os.chdir(directory)
    _main(words, "train_fsdp2.py")


def test_decoder_sizes_must_match_given_weights(tmp_path):
    PRESETS["llama3_2_1b"].config.to_transformers().save_pretrained(tmp_path)
    given = (f"--model_name_or_path={tmp_path}", "--dataset=x")
    config, _ = parse("--hidden_width=2048", "--num_layers=16", *given).model.decoder_config(64)
    assert config.hidden_size == 2048
    args = parse("--hidden_width=2048", "--num_layers=15", *given)
    with pytest.raises(UserError, match="^--num_hidden_layers: cannot change the weights of --model_name_or_path"):
        args.model.decoder_config(64)


def test_decoder_defaults_are_the_guides():
    args = parse("--model=llama2_7b", "--dataset=x")
    assert DEFAULTS.items() <= flat(args).items()


# Of the first batches in Mathstral's and Mixtral's logs.
MATHSTRAL_RATES = ["0.000006", "0.000013", "0.000019", "0.000025", "0.000031", "0.000038"]


def test_decoder_log_shows_learning_rates():
    """Mathstral's and Mixtral's: warm-up over 16 of 5,000 steps."""
    rate = parse(*MATHSTRAL).optimizer.schedule(5000)
    assert [f"{rate(step):.6f}" for step in range(6)] == MATHSTRAL_RATES
    rate = parse(*LLAMA3_1_8B).optimizer.schedule(100)
    assert f"{rate(0):.6f}" == "0.000100"


@pytest.mark.parametrize("style", [style for style in SCHEDULES["clm"] if style != "annealing"])
def test_decoder_schedule_decays_from_peak_to_minimum(style):
    flags = [f"--lr_decay_style={style}", "--lr=1e-3", "--min_lr=1e-4", "--warmup=0.1"]
    args = parse("--model=llama2_7b", "--dataset=x", *flags, *["--plateau=0.4"] * (style == "plateau"))
    rate = args.optimizer.schedule(100)
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])
    expected = {  # half-way between the end of the warm-up and the last step, which is the 55th
        "constant": 1e-3,
        "linear": (1e-3 + 1e-4) / 2,
        "cosine": (1e-3 + 1e-4) / 2,
        "exponential": math.sqrt(1e-3 * 1e-4),
        "plateau": 1e-3 - 9e-4 * 5 / 50,  # it falls from the 50th on
        "wsd": 1e-3,  # it falls from the 80th on
    }
    assert rate(54) == pytest.approx(expected[style])
    assert rate(99) == rate(500) == pytest.approx(1e-3 if style == "constant" else 1e-4)
    sooner = parse("--model=llama2_7b", "--dataset=x", *flags, "--lr_decay_iters=60").optimizer.schedule(100)
    assert sooner(59) == pytest.approx(1e-3 if style == "constant" else 1e-4)


def test_decoder_wsd_falls_over_lr_decay_steps_to_min_lr_rate():
    flags = ["--model=llama2_7b", "--dataset=x", "--lr=1e-3", "--warmup=0.1", "--lr_decay_style=warmup_stable_decay"]
    rate = parse(*flags, "--lr_decay_steps=40", "--min_lr_rate=0.2").optimizer.schedule(100)
    assert [rate(step) for step in (9, 59)] == [1e-3, 1e-3]
    assert [rate(step) for step in (79, 99)] == pytest.approx([6e-4, 2e-4])
    with pytest.raises(UserError, match="--min_lr_rate 0.2: goes with --lr_scheduler_type linear, .*, not constant"):
        parse(*flags, "--min_lr_rate=0.2", "--lr_decay_style=constant")
    with pytest.raises(UserError, match="--lr_decay_steps 5.0: goes with --lr_scheduler_type wsd, not cosine"):
        parse("--model=llama2_7b", "--dataset=x", "--lr_decay_steps=5")


def test_decoder_annealing_shows_the_guides_rates():
    """Their log has a batch's rate after the schedule's step: that of the next batch."""
    rate = parse(*MATHSTRAL, "--lr_decay_style=annealing").optimizer.schedule(5000)
    assert [f"{rate(step + 1):.6f}" for step in range(6)] == MATHSTRAL_RATES
    words = [*LLAMA3_1_8B, "--lr_decay_style=annealing"]
    rate = parse(*words).optimizer.schedule(100)
    assert rate(0) == 0
    assert [f"{rate(batch + 1):.6f}" for batch in range(6)] == ["0.000100"] * 4 + ["0.000099"] * 2
    assert [rate(batch + 1) for batch in range(90, 98)] == [1e-5] * 8  # as the log of the guide for Kubernetes
    rate = parse(*words, "--lr_decay_iters=50", "--min_lr=0", "--warmup=0").optimizer.schedule(100)
    assert rate(25) == pytest.approx(5e-5)


@pytest.mark.parametrize("name", CausalArguments.idle)
def test_decoder_flag_without_effect_is_logged(name, caplog):
    with caplog.at_level(logging.INFO):
        parse("--model=llama2_7b", "--dataset=x", f"--{name}=1")
    assert caplog.messages == [f"--{name} 1 does nothing: {CausalArguments.idle[name]}"]


def test_decoder_sizes_select_published_model():
    told = {}
    for sizes in ((2048, 16, 32), (3072, 28, 24), (8192, 80, 64), (4096, 32, 32), (64, 2, 4)):
        flags = zip(("hidden_width", "num_layers", "num_heads"), sizes, strict=True)
        args = parse("--model_type=llama_v3", "--dataset=x", *(f"--{name}={size}" for name, size in flags))
        config, line = args.model.decoder_config(2048)
        told[sizes[0]] = (line.split()[1].rstrip(","), config.tie_word_embeddings, config.num_key_value_heads)
    expected = {2048: ("llama3_2_1b", True, 8), 3072: ("llama3_2_3b", True, 8), 8192: ("llama3_1_70b", False, 8)}
    assert told == expected | {4096: ("llama3_1_8b", False, 8), 64: ("llama3_1_8b", False, 4)}


@pytest.mark.parametrize(
    "words",
    [
        ["--config_name=facebook/esm2_t6_8M_UR50D", "--max_context_width=64"],
        ["--config_name=facebook/esm2_t6_8M_UR50D", "--lr=1e-3"],
        ["--model=llama2_7b", "--mlm_probability=0.2"],
        ["--model=llama2_7b", "--config_name=facebook/esm2_t6_8M_UR50D"],
        ["--model=llama2_7b", "nonsense"],
    ],
)
def test_flags_of_one_task_are_unknown_to_the_other(words):
    with pytest.raises(UserError, match="unknown flag"):
        parse(*words, "--output_dir=out")


IS_OF_MLM = "it is a flag of --task mlm; this is --task clm"
IS_OF_CLM = "it is a flag of --task clm; this is --task mlm"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--task clm --config_name x", f"{IS_OF_MLM}: give --model"),
        ("--model=llama3_2_1b --config-name=x", f"{IS_OF_MLM}: give --model"),
        ("--task mlm --model x", f"{IS_OF_CLM}: give --config_name"),
        ("--lr 1", f"{IS_OF_CLM}: give --learning_rate"),
        ("--model x --gelu tanh", f"{IS_OF_MLM} (see "),
        ("--config_nam x", "did you mean --config_name?"),
    ],
)
def test_parse_run_names_the_task_of_a_flag_and_its_counterpart(words, hint):
    strategy = load_script("train_ddp.py").DdpFlags
    with pytest.raises(UserError, match="unknown flag --") as error:
        parse_run("", strategy, words.split())
    assert f": {hint}" in str(error.value)


def test_counterparts_are_flags_of_the_other_task():
    strategy = load_script("train_ddp.py").DdpFlags
    flags = {task: flat(arguments_of(strategy, task)).keys() for task in TASKS}
    for flag, counterpart in COUNTERPARTS.items():
        [own] = (task for task in TASKS if flag in flags[task])
        assert counterpart not in flags[own]
        assert any(counterpart in flags[task] for task in TASKS)


def test_help_of_esm2_has_no_decoder_flags():
    strategy = load_script("train_fsdp2.py").FsdpFlags
    esm2, decoders = ({spec.name for spec in flag_specs(arguments_of(strategy, task))} for task in ("mlm", "clm"))
    assert {"min_lr", "model", "document_masks"} <= decoders - esm2
    masks = {"mlm_probability", "mlm_probability_end", "mask_replace_prob", "eval_mlm_probability"}
    assert {*masks, "gelu", "pad_to_max_length"} <= esm2 - decoders


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [
        (["--dataset_dir=x"], 5000, 3),
        (["--dataset_dir=x", "--epochs=2"], -1, 2),  # not the default number of steps, whatever the epochs
        (["--dataset_dir=x", "--max_steps=-1"], -1, 3),
        (["--dataset_dir=x", "--num_train_epochs=2", "--max_steps=7"], 7, 2),
        (["--dataset=x", "--epochs=2"], 5000, 2),  # which has no length
    ],
)
def test_decoder_length_is_max_steps_or_epochs(words, steps, epochs):
    args = parse("--model=llama2_7b", *words)
    assert (args.data.max_steps, args.data.num_train_epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("words", "task"),
    [
        (["--config_name=x"], "mlm"),
        (["--model=llama2_7b"], "clm"),
        (["--model-type", "mistral"], "clm"),
        (["--task=clm", "--model_name_or_path=x"], "clm"),
        (["--task", "mlm", "--model=x"], "mlm"),
    ],
)
def test_task_follows_from_flag_or_model(words, task):
    assert task_name(words) == task


def test_task_unknown_is_refused():
    with pytest.raises(UserError, match="^--task dlm: choose mlm, clm$"):
        task_name(["--task=dlm"])


def test_flags_file_selects_decoder(tmp_path):
    (tmp_path / "run.yaml").write_text("model_type: llama_v3\nhidden_width: 64\ndataset: x\nlr: 2e-4\n")
    args = parse(str(tmp_path / "run.yaml"), "--checkpoint_dir=out/x")
    found = (args.model.hidden_size, args.optimizer.learning_rate, args.checkpoint.output_dir)
    assert found == (64, 2e-4, "out/x")


def test_decoder_missing_flags_write_nothing(tmp_path):
    said = train_decoder(None, tmp_path / "out", expect=2)
    assert "missing: --dataset" in said
    assert not (tmp_path / "out").exists()
