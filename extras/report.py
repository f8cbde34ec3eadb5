"""Report a run, finished or not, from its files: the table that quickstart prints last, and the curves.

python -m extras.report OUTPUT_DIR [--figure_format png svg pdf] [--dpi N]
"""

from __future__ import annotations

import logging
from pathlib import Path

from common.cli import UserError, run
from common.figures import FigureFlags
from common.files.runs import BASELINES, METRICS, read_run_info
from common.files.safe_files import read_json_lines
from common.training.curves import PlotLabels, draw_curves, read_results
from common.training.verdict import held_out_key, held_out_prefixes, verdicts
from extras.command_line import words_and_flags

logger = logging.getLogger(__name__)
PROGRAM = "python -m extras.report"
NAMES = {"unigram": "unigram predictor", "neighbours": "neighbour predictor"}


def held_out_table(output_dir: Path, prefix: str = "eval") -> str:
    """Held-out loss, perplexity and accuracy before and after training, and of the baselines: of hidden residues, or
    of all tokens of text."""
    results, rows = read_results(output_dir), read_json_lines(output_dir / METRICS)
    key = held_out_key((*rows, results), prefix)
    of = key.removeprefix(f"{prefix}_loss")  # _masked
    keys = (key, "perplexity" if key == "eval_loss" else f"{prefix}_perplexity{of}", f"{prefix}_accuracy{of}")
    rows = [r for r in rows if key in r]
    labels = PlotLabels(*read_run_info(output_dir).get("words", ()))
    name = labels.held_out if prefix == "eval" else f"{prefix.removeprefix('eval_')}: {labels.held_out}"
    lines = [(name, "loss (nats)", "perplexity", "accuracy")]
    first = next((r for r in rows if r["step"] == 0), None)
    if first:
        lines.append(_line("before training", *(first[k] for k in keys)))
    for name, _ in BASELINES:
        theirs = [f"{prefix}_{name}_{what}{of}" for what in ("loss", "perplexity", "accuracy")]
        if known := next((each for each in (results, *rows) if theirs[0] in each), None):
            lines.append(_line(NAMES[name], *(known[k] for k in theirs)))
    if key not in results and rows and rows[-1]["step"]:
        lines.append(_line(f"at step {rows[-1]['step']:,}", *(rows[-1][k] for k in keys)))
    if key in results:
        lines.append(_line("after training", *(results[k] for k in keys)))
    widths = [max(len(row[n]) for row in lines) for n in range(4)]
    text = [
        f"{name:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
        for name, *cells in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def main() -> None:
    words, flags = words_and_flags(__doc__, PROGRAM, FigureFlags)
    if len(words) != 1:
        raise UserError(f"usage: {PROGRAM} OUTPUT_DIR [--figure_format png svg pdf] [--dpi N]")
    output_dir = Path(*words)
    results, rows = read_results(output_dir), read_json_lines(output_dir / METRICS)
    if not results and not rows:
        raise UserError(f"{output_dir}: no run there: it has neither metrics.jsonl nor all_results.json")
    pictures = draw_curves(output_dir, flags)
    if not pictures:
        logger.warning("%s: nothing to draw a curve of: no picture", output_dir / METRICS)
    if not results:
        last = rows[-1]
        loss = next((f", training loss {row['loss']:.4f}" for row in reversed(rows) if "loss" in row), "")
        print(f"not finished: step {last['step']:,} of {last['total_steps']:,}{loss}\n")
    for prefix in held_out_prefixes((results, *rows)):
        print(f"{held_out_table(output_dir, prefix)}\n")
    for line in verdicts(results):
        print(f"{line}\n")
    if "train_tokens_per_second" in results:
        print(f"speed   {results['train_tokens_per_second']:,.0f} tokens/s, without padding")
    for name, path in (("model", output_dir / "final_model"), *(("plot", path) for path in pictures)):
        if path.exists():
            print(f"{name:<7} {path}")


def _line(name: str, loss: float, perplexity: float, accuracy: float) -> tuple[str, str, str, str]:
    return name, f"{loss:.4f}", f"{perplexity:.2f}", f"{accuracy:.1%}"


if __name__ == "__main__":
    run(main)
