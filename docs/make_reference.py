"""Write docs/reference_metrics.md and docs/reference_files.md: what a training run writes.

python docs/make_reference.py

tests/test_reference.py runs a model and finds each key and file of it here, and no key here that nothing writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.training.log_row import FIELDS  # noqa: E402
from docs.make_flags import table  # noqa: E402
from docs.script_figures import HEAD, SCRIPTS, TABLES  # noqa: E402
from extras.prepare.sources.mixture import fields_of  # noqa: E402

# (key, unit, meaning). <file>, <range>: see the page.
TRAINING = [(field.name, field.unit, field.meaning) for field in FIELDS]
OF_SOURCES = [(field.name, field.unit, field.meaning) for field in fields_of(0, "<source>")]
EVALUATION = [
    (
        "eval_loss",
        "nats per target",
        "mean over all selected residues of the validation split, those that the model is shown among them: to "
        "compare with published losses; of a decoder over all predicted tokens",
    ),
    ("perplexity", "", "exp(`eval_loss`)"),
    ("eval_accuracy", "fraction", "of the same targets, the likeliest token is the right one"),
    ("eval_selected_tokens", "residues", "selected: hidden, kept and replaced ones"),
    ("eval_tokens", "tokens", "predicted tokens, of a decoder"),
    (
        "eval_loss_masked",
        "nats per residue",
        "mean over the hidden residues (`<mask>`): what verdicts, the best model and comparisons rest on",
    ),
    ("eval_perplexity_masked", "", "exp(`eval_loss_masked`)"),
    ("eval_accuracy_masked", "fraction", "of the hidden residues, the likeliest one is the right one"),
    ("eval_masked_tokens", "residues", "hidden"),
    (
        "eval_loss_kept",
        "nats per residue",
        "mean over the selected residues that stay visible: what a model learns first, to copy",
    ),
    ("eval_kept_tokens", "residues", "kept; a random one that hit the true one is among them"),
    ("eval_loss_random", "nats per residue", "mean over the selected residues that another one replaces"),
    ("eval_random_tokens", "residues", "replaced by another one"),
    ("eval_samples", "sequences", "evaluated"),
    ("eval_clusters", "clusters", "of the proteins with a hidden residue, where step 1 split by clusters"),
    ("eval_runtime", "s", "of the evaluation, without the baselines'"),
    ("eval_samples_per_second", "sequences/s", "of all ranks"),
    ("eval_steps_per_second", "batches/s", "of one rank"),
    (
        "eval_unigram_loss",
        "nats per residue",
        "compare with `eval_loss`: of residue frequencies, mixed with the shown residue as is best at these rates",
    ),
    ("eval_unigram_accuracy", "fraction", "of the same, over the same residues"),
    ("eval_unigram_perplexity", "", "of the same"),
    (
        "eval_unigram_loss_masked",
        "nats per residue",
        "compare with `eval_loss_masked`: of residue frequencies alone, over the same hidden residues",
    ),
    ("eval_unigram_accuracy_masked", "fraction", "of the same"),
    ("eval_unigram_perplexity_masked", "", "of the same"),
    (
        "eval_neighbours_loss_masked",
        "nats per residue",
        "compare with `eval_loss_masked`: of the two visible neighbours on each side, over the same hidden residues",
    ),
    ("eval_neighbours_accuracy_masked", "fraction", "of the same"),
    ("eval_neighbours_perplexity_masked", "", "of the same"),
    (
        "eval_below_unigram_masked",
        "nats per residue",
        "`eval_unigram_loss_masked` less `eval_loss_masked`: the model is better by so much",
    ),
    (
        "eval_below_unigram_masked_stderr",
        "nats per residue",
        "standard error of that, paired, over proteins (over clusters, where the data have them)",
    ),
    ("eval_below_neighbours_masked", "nats per residue", "`eval_neighbours_loss_masked` less `eval_loss_masked`"),
    ("eval_below_neighbours_masked_stderr", "nats per residue", "standard error of that, likewise"),
    (
        "eval_nelbo",
        "nats per residue",
        "`--objective mdlm`, `eval_nelbo`: bound of -log p of held-out proteins, over all their residues",
    ),
    ("eval_nelbo_stderr", "nats per residue", "standard error of that, over proteins or their clusters"),
    ("eval_unigram_nelbo", "nats per residue", "compare with `eval_nelbo`: of residue frequencies alone"),
    (
        "eval_loss_masked_with_homologs",
        "nats per residue",
        "`--set_tokens`: of the held-out proteins that have others of their cluster, each behind up to `set_size` - 1 "
        "of them, over the same hidden residues",
    ),
    ("eval_loss_masked_without_homologs", "nats per residue", "of the same proteins, each alone"),
    ("eval_homologs_gain_masked", "nats per residue", "the second less the first"),
    ("eval_homologs_gain_masked_stderr", "nats per residue", "standard error of that, over clusters"),
    ("eval_homologs_samples", "sequences", "these proteins, those without a hidden residue left out"),
    (
        "eval_predecessors_<number>_loss_masked",
        "nats per residue",
        "of those with so many before them: `1`, `2_3`, `4_7`, `8_up`",
    ),
    ("eval_predecessors_<number>_alone_loss_masked", "nats per residue", "of the same proteins, each alone"),
    ("eval_predecessors_<number>_gain_masked", "nats per residue", "the second less the first"),
    ("eval_predecessors_<number>_gain_masked_stderr", "nats per residue", "standard error of that, over clusters"),
    ("eval_predecessors_<number>_samples", "sequences", "these proteins"),
    (
        "eval_loss_residues",
        "nats per residue",
        "of a protein decoder, read forwards, over residues alone: beside the bound of masked diffusion",
    ),
    ("eval_loss_residues_stderr", "nats per residue", "standard error of that, over proteins or their clusters"),
    ("eval_perplexity_residues", "", "exp(`eval_loss_residues`)"),
    ("eval_tokens_residues", "residues", "predicted"),
    ("eval_unigram_loss_residues", "nats per residue", "compare with it: of residue frequencies"),
    ("eval_below_unigram_residues", "nats per residue", "the second less the first"),
    ("eval_below_unigram_residues_stderr", "nats per residue", "standard error of that, likewise"),
    ("best_global_step", "optimiser steps", "`--load_best_model_at_end`: of the model that results are of"),
    ("eval_contacts_<range>_p_at_l", "fraction", "`--eval_contacts`: of the L likeliest pairs, those in contact"),
    ("eval_contacts_<range>_p_at_l2", "fraction", "of the L/2 likeliest"),
    ("eval_contacts_<range>_p_at_l5", "fraction", "of the L/5 likeliest"),
    ("eval_contacts_<range>_nearest_p_at_l", "fraction", "baseline: of the L pairs nearest in the sequence"),
    ("eval_contacts_<range>_chance", "fraction", "of all pairs of the range"),
    ("eval_mutations_<file>_masked", "", "`--eval_mutations`: Spearman's correlation, masked marginals"),
    ("eval_mutations_<file>_wild_type", "", "the same, wild-type marginals"),
    (
        "eval_mutations_<file>_masked_homologs",
        "",
        "the same with `<file>.a3m`, of models that read sets; also wild_type",
    ),
    *(
        (f"eval_probe_<file>_{baseline}{name}", unit, f"{of}{meaning}")
        for baseline, of in (("", "`--eval_probe`: "), ("baseline_", "of a probe of the composition: "))
        for name, unit, meaning in (
            ("spearman", "", "rank correlation, of numbers"),
            ("pearson", "", "correlation, of numbers"),
            ("r2", "", "explained variance, of numbers"),
            ("mae", "the label's", "mean absolute error, of numbers"),
            ("accuracy", "fraction", "of classes"),
            ("balanced_accuracy", "fraction", "mean over the classes"),
            ("macro_f1", "fraction", "mean over the classes"),
            ("auroc", "fraction", "of two classes"),
        )
    ),
]
RESULTS = [
    ("train_loss", "nats per target", "mean over the steps of the run that have a target and were not skipped"),
    ("train_runtime", "s", "training steps, of all starts"),
    ("train_samples", "sequences", "in the training data; trained on, if their number is not known"),
    ("train_samples_per_second", "sequences/s", "of all ranks"),
    ("train_steps_per_second", "optimiser steps/s", ""),
    ("train_tokens_per_second", "tokens/s", "of all ranks, without padding"),
    ("train_unknown_characters", "tokens", "`<unk>`"),
    ("total_flos", "FLOP", "of all steps and ranks"),
    ("backend", "name", "`torch`, `te`, `hf` or `hf_flash`: what computed the layers"),
    ("attention", "name", "the kernels of `--attention`, on a GPU"),
    ("attention_kernels", "name", "those that ran in the first step, by the profiler, on a GPU"),
    ("gelu", "name", "the GELU"),
]

YOU = "you"
# (name, format, content, who reads it). <step>, <rank>, <first>, <last>: numbers.
FILES = [
    ("metrics.jsonl", "JSON lines", "a row every `--logging_steps`, and each evaluation", "curves, report, a resume"),
    ("train_results.json", "JSON", "of the whole run, when it has ended", YOU),
    ("eval_results.json", "JSON", "of the last evaluation", YOU),
    ("test_results.json", "JSON", "of the test split, at the end", YOU),
    (
        "eval_losses.parquet",
        "Parquet",
        "a row a held-out protein: nats over its hidden residues, their number, its cluster",
        "`extras.compare`",
    ),
    ("eval_losses_best.parquet", "Parquet", "the same, of the best evaluation while training", "`extras.compare`"),
    ("test_losses.parquet", "Parquet", "the same, of the test split; `eval_NAME_losses.parquet` of other sets", YOU),
    ("all_results.json", "JSON", "the three together, as transformers' Trainer has them", "curves, report"),
    ("trainer_state.json", "JSON", "the run's state and all rows, as `log_history`", "what reads the Trainer's"),
    (
        "training_curves.<format>",
        "PNG; SVG, PDF by `python -m extras.report`",
        "loss, learning rate, gradient norm, speed",
        YOU,
    ),
    (
        "run_info.json",
        "JSON",
        "title of the curves, first step of each start",
        "curves, report",
    ),
    ("quant_stats.jsonl", "JSON lines", "`--quant_stats`: a row for each tensor", "`extras.formats.stats_report`"),
    ("quant_stats.<format>", "PNG, SVG, PDF", "drawn by `python -m extras.formats.stats_report`", YOU),
    ("profile/rank<rank>-steps-<first>-<last>.json.gz", "Chrome trace", "`--profile_steps`", "ui.perfetto.dev"),
    ("logs/events.out.tfevents.*", "TensorBoard", "`--report_to tensorboard`", "TensorBoard"),
    ("wandb_run.json", "JSON", "the run's id at W&B", "a resume"),
    ("wandb/*", "W&B", "`--report_to wandb`", "`wandb sync`"),
    (
        "find_learning_rate/*",
        "JSON, Markdown, PNG",
        "`--find_learning_rate`: trials, table, picture",
        f"{YOU}, a resume",
    ),
    ("sample/*", "FASTA", "the generated proteins of `--dataset sample`", "the run"),
    (".run", "JSON", "lock of the directory, and the job that wrote here last", "the next start"),
    (".saved", "empty", "some checkpoint was once complete here", "the next start"),
    (".starts", "JSON", "starts in a row without a new state, on disk or in memory; nodes", "`extras.launch`"),
    ("checkpoint-<step>/manifest.json", "JSON", "size and CRC-32 of each file; the model's fingerprint", "a resume"),
    ("checkpoint-<step>/metadata.json", "JSON", "which tensors lie where", "a resume"),
    ("checkpoint-<step>/__<rank>_0.distcp", "safetensors", "a rank's share of weights and optimiser", "a resume"),
    ("checkpoint-<step>/trainer_state.json", "JSON", "steps, tokens, position in the data", "a resume"),
    ("checkpoint-<step>/config.json", "JSON", "the model's sizes", "`extras.export`, embed.py, score.py"),
    (
        "checkpoint-<step>/model.safetensors",
        "safetensors",
        "`--save_hf`: as in final_model",
        "transformers",
    ),
    ("checkpoint-<step>/tokenizer_config.json", "JSON", "likewise", "transformers"),
    ("checkpoint-<step>/vocab.txt", "text", "likewise (others: tokenizer.json)", "transformers"),
    ("checkpoint-<step>/README.md", "Markdown", "likewise", YOU),
    ("superseded-checkpoint-<step>/*", "", "a checkpoint later than the one that the run resumed from", YOU),
    ("tmp-checkpoint-<step>/*", "", "a checkpoint being written or removed", "nobody"),
    ("final_model/config.json", "JSON", "the model's sizes", "transformers, and the scripts after training"),
    ("final_model/model.safetensors", "safetensors", "weights; a large model has several and an index", "the same"),
    ("final_model/tokenizer_config.json", "JSON", "the tokenizer", "the same"),
    ("final_model/vocab.txt", "text", "a line for each token (ESM-2)", "the same"),
    ("final_model/tokenizer.json", "JSON", "the tokenizer (others)", "the same"),
    ("final_model/README.md", "Markdown", "model card: results, flags, versions", f"{YOU}, the Hub"),
]


def code(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(f"`{name}`", *more) for name, *more in rows]


def metrics_page() -> str:
    """The text of docs/reference_metrics.md."""
    head = ("key", "unit", "meaning")
    return f"""# Metrics

Made from the code by `python docs/make_reference.py`. A target is a masked residue, or of a decoder a predicted token.

## Of training

Keys of `metrics.jsonl`, every `--logging_steps`. What stands behind them: [training.md](training.md#metrics).

{table(head, code(TRAINING))}
With `--dataset_mix` also, of each source:

{table(head, code(OF_SOURCES))}
## Of evaluation

Keys of `metrics.jsonl`, every `--eval_steps`, and of `eval_results.json`. `test_results.json` has the same of the test
split, as `test_...` and `test_perplexity`, without contacts, mutations and probes. Sets of `--eval_dataset NAME=...`
have `eval_NAME_...`. An evaluation selects 15 % of the residues (`eval_mlm_probability`), always the same; of those
80 % are hidden behind `<mask>` (`eval_mask_replace_prob`), half of the rest stays, and half is replaced. Without a
residue of a kind there is no loss of it. `<file>`: a file's name without its ending. `<range>`: `short` (6 to 11
residues apart), `medium` (12 to 23) or `long`; L: the chain's length.

{table(head, code(EVALUATION))}
## Of the whole run

Keys of `train_results.json` beside `epoch`. `all_results.json` has those of all three files.

{table(head, code(RESULTS))}
{scripts_section()}"""


def scripts_section() -> str:
    """The part of the page that is about the scripts after training."""
    sections = "\n".join(f"### {script}\n\n{table(HEAD, code(rows))}" for script, rows in SCRIPTS.items())
    tables = "\n".join(f"### {command}\n\n{table(HEAD, rows)}" for command, rows in TABLES.items())
    return f"""## Of the scripts after training

Numbers in the files that they write; those that they print are among them. `[value, low, high]`: a number with its
interval. `<range>` as above; `<metric>`: as of `eval_probe_<file>_<metric>`; `<split>`: `validation`, `test`, also
`train` of counts. `generate.py` writes text or FASTA alone. More: [after.md](after.md).

{sections}
## Of searches and comparisons

Columns of the tables that they print and write.

{tables}"""


def files_page() -> str:
    """The text of docs/reference_files.md."""
    return f"""# Files of a run

Made from the code by `python docs/make_reference.py`. All lie in `--output_dir`. `NAME.partial` is a file being
written. [checkpoints.md](checkpoints.md) says what checkpoints survive.

{table(("file", "format", "content", "read by"), code(FILES))}"""


PAGES = {"reference_metrics.md": metrics_page, "reference_files.md": files_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")
