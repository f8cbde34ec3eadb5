"""Tokens to a held-out loss: optimisers, mask rates and other recipes beside tuned AdamW, over several seeds.

    python 0.download_data.py --source my_proteins.fasta.gz --output_dir data
    python 1.tokenize_uniref_csv.py --input_dir data/csv --output_dir data/processed --cluster 0.5
    python -m benchmarks.time_to_loss --dataset_dir data/processed/arrow --output_dir time_to_loss
        [--sizes 1M] [--only adamw,muon] [--seeds 42] [--max_runs 2] [--list]

Each run is one of train_ddp.py. Every learning rate and warm-up of a recipe is run on the first seed, and the best one
(by its last loss of hidden residues) on the others. A finished run is a line of
output_dir/runs.jsonl and is not run again, so that it can all be done in pieces. The table and the picture show what
there is, and the table names what has not been run. The published runs lie in benchmarks/results/time_to_loss.

The decisive runs, for a machine with GPUs and UniRef50 as step 1 leaves it; `--list` shows their commands:

    python -m benchmarks.time_to_loss --decisive --dataset_dir processed/arrow --output_dir decisive [--ranks 8]
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.loss_curves import Curve, Tuned, draw, last_loss, table, verdict
from benchmarks.measuring import PreparedFlags, completed, publish, say, torchrun, where_measured, words
from benchmarks.recipes import CPU_PLANS, DECISIVE_PLANS, DECISIVE_RECIPES, SMALL_PLAN, Plan
from common.cli import UserError, run
from common.data.clusters import DIRECTORY as CLUSTERS
from common.files.safe_files import read_json, read_json_lines
from common.flags import Missing, flag, parse_arguments

EXPLANATION = """Each recipe at its best setting, means over the seeds ± their standard errors. Held-out loss is that
of the hidden residues: 15 % of the residues are selected, and 80 % of those become <mask>. A loss is reached where the
line between two evaluations first crosses it. Curves are noisy while the rate is high: "to stay there" is when a curve
crosses AdamW's last loss for the last time, as a part of AdamW's tokens. AdamW's last loss is that of the same seed,
and all comparisons are of the same seed: the same initial weights, batches and held-out questions. What the unigram
predictor reaches on the same residues stands beside each table."""

FINALISTS = 1  # settings of a recipe that are run on all seeds


@dataclass
class Arguments(PreparedFlags):
    output_dir: str | None = flag(None, "Where the runs, the table and the picture go.")
    sizes: str = flag(",".join(CPU_PLANS), "Which sizes.")
    decisive: bool = flag(False, "The runs for GPUs instead: " + ", ".join(DECISIVE_PLANS) + ".")
    only: str | None = flag(None, "Which recipes: adamw,muon,... Default: all.")
    seeds: str | None = flag(None, "Start runs of these seeds only. Default: all.")
    ranks: int = flag(1, "Processes of a run, each with a GPU if there is one.")
    max_runs: int | None = flag(None, "Start at most so many runs in this call; 0: only the table.")
    list: bool = flag(False, "Start nothing; print each run's state, steps, tokens and command.")
    max_steps: int | None = flag(None, "Shorten all runs to so many steps and 2 evaluations, to try it out.")
    config_overrides: str | None = flag(None, "Change the model, likewise: num_hidden_layers=2,...")
    report: str | None = flag(None, "The table's path; the picture gets .png. Default: output_dir/time_to_loss.md.")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("--dataset_dir", "--output_dir") if self.list else ()

    def missing(self) -> Iterator[Missing]:
        if not self.output_dir:
            yield Missing("--output_dir", "where the runs, the table and the picture go", "time_to_loss")

    def check(self) -> None:
        self.require_at_least(1, "ranks")
        self.require_at_least(2, "max_steps")
        self.require_at_least(0, "max_runs")
        for name, known in (("sizes", CPU_PLANS), ("only", DECISIVE_RECIPES if self.decisive else SMALL_PLAN.recipes)):
            if unknown := set((getattr(self, name) or "").split(",")) - known.keys() - {""}:
                raise UserError(f"--{name} {','.join(sorted(unknown))}: choose of {','.join(known)}")
        if self.seeds and not all(seed.isdigit() for seed in self.seeds.split(",")):
            raise UserError(f"--seeds {self.seeds}: expected numbers such as 42,43")

    @property
    def directory(self) -> Path:
        return Path(self.output_dir or "time_to_loss")

    @property
    def runs(self) -> Path:
        return self.directory / "runs.jsonl"

    @property
    def plans(self) -> dict[str, Plan]:
        plans = DECISIVE_PLANS if self.decisive else {name: CPU_PLANS[name] for name in self.sizes.split(",")}
        chosen = {}
        for name, plan in plans.items():
            only = self.only.split(",") if self.only else plan.recipes
            flags = plan.flags | ({"config_overrides": self.config_overrides} if self.config_overrides else {})
            plan = replace(plan, flags=flags, recipes={recipe: plan.recipes[recipe] for recipe in only})
            if self.max_steps:
                plan = replace(plan, tokens=self.max_steps * plan.tokens_per_step, evaluations=2)
            chosen[name] = plan
        return chosen


@dataclass(frozen=True)
class Run:
    """A run of train_ddp.py."""

    size: str
    plan: Plan
    recipe: str
    rate: float
    warmup: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.recipe}-{self.rate:g}-warmup{self.warmup:g}-seed{self.seed}"

    @property
    def flags(self) -> dict[str, object]:
        """What decides its losses, beside the data. change: of benchmarks.candidates."""
        recipe = self.plan.recipes[self.recipe]
        return {
            "change": recipe.change,
            **self.plan.flags,
            **recipe.flags,
            "learning_rate": self.rate,
            "warmup_steps": self.warmup,
            "seed": self.seed,
            "max_steps": self.plan.steps,
            "eval_steps": self.plan.steps // self.plan.evaluations,
        }

    def command(self, args: Arguments) -> list[str]:
        flags = self.flags | {
            "dataset_dir": args.dataset_dir or "processed/arrow",
            "output_dir": args.directory / self.name,
            "logging_steps": self.flags["eval_steps"],
            "max_skipped_steps": self.plan.steps,  # a rate that is too high has a loss, too
            "save_minutes": 10,
            "save_total_limit": 1,
            "save_final_model": False,
            "do_eval": True,
            "disable_tqdm": True,
        }
        change = flags.pop("change")
        launcher = torchrun(args.ranks) if args.ranks > 1 else [sys.executable]
        changed = ["-m", "benchmarks.candidates", str(change)] if change else []
        return [*launcher, *changed, "train_ddp.py", *words(flags)]

    def saved(self, args: Arguments) -> dict | None:
        """What `start` has left; None if it has not been run with these flags."""
        flags = json.loads(json.dumps(self.flags))
        rows = read_json_lines(args.runs)
        return next((row for row in rows if row["name"] == self.name and row["flags"] == flags), None)

    def curve(self, args: Arguments) -> Curve | None:
        """(tokens, held-out loss of hidden residues) of its evaluations; None if it has not been run."""
        saved = self.saved(args)
        return saved and [(tokens, hidden) for tokens, hidden, _ in saved["curve"]]

    def start(self, args: Arguments) -> None:
        """Train, and leave the curve in place of the run's own files."""
        completed(self.command(args), self.name)
        directory = args.directory / self.name
        rows = read_json_lines(directory / "metrics.jsonl")
        keys = "tokens", "eval_loss_masked", "eval_loss"
        curve = [[row[key] for key in keys] for row in rows if "eval_loss_masked" in row]
        data = read_json(directory / "trainer_state.json")["data"]["dataset"]
        unigram = read_json(directory / "eval_results.json")["eval_unigram_loss_masked"]
        row = {"name": self.name, "flags": self.flags, "dataset": data, "unigram": unigram, "curve": curve}
        with args.runs.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shutil.rmtree(directory)
        say(f"{self.name}: {curve[-1][1]:.4f} (unigram {unigram:.4f}) after {curve[-1][0]:,} tokens")


def settings_on(seed: int, size: str, plan: Plan, recipe: str) -> list[Run]:
    how = plan.recipes[recipe]
    return [Run(size, plan, recipe, rate, warmup, seed) for warmup in how.warmups for rate in how.rates]


def runs_of(args: Arguments, size: str, plan: Plan, recipe: str) -> list[Run]:
    """All settings on the first seed; once those are done, also the best on the other seeds."""
    first = settings_on(plan.seeds[0], size, plan, recipe)
    curves = [run.curve(args) for run in first]
    if None in curves:
        return first
    ranked = sorted(zip(first, curves, strict=True), key=lambda pair: last_loss(pair[1]))
    return first + [replace(run, seed=seed) for seed in plan.seeds[1:] for run, _ in ranked[:FINALISTS]]


def missing_runs(args: Arguments) -> Iterator[Run]:
    """The next run, until none is left of those that are asked for."""
    seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else None
    for size, plan in args.plans.items():
        for recipe in plan.recipes:
            for _ in range(2):  # the second time with the finalists
                for each in runs_of(args, size, plan, recipe):
                    if (seeds is None or each.seed in seeds) and each.curve(args) is None:
                        yield each


def curves_of(args: Arguments, size: str, plan: Plan, recipe: str) -> dict[tuple[float, float], dict[int, Curve]]:
    """{(rate, warm-up): {seed: curve}} of all finished runs."""
    found: dict[tuple[float, float], dict[int, Curve]] = {}
    for seed in plan.seeds:
        for each in settings_on(seed, size, plan, recipe):
            if (curve := each.curve(args)) is not None:
                found.setdefault((each.rate, each.warmup), {})[seed] = curve
    return found


def tuned(args: Arguments, size: str, plan: Plan, recipe: str) -> Tuned | None:
    """The recipe's best setting: of those on the most seeds, the one with the lowest mean of the last loss."""
    found = curves_of(args, size, plan, recipe)
    settings = [Tuned(rate, warmup, curves) for (rate, warmup), curves in found.items()]
    return min(settings, key=lambda setting: (-len(setting.curves), setting.loss), default=None)


def listing(args: Arguments) -> Iterator[str]:
    for size, plan in args.plans.items():
        yield f"# {size}: {plan.title}; {plan.steps} steps of {plan.tokens_per_step:,} tokens, "
        yield f"{plan.steps * plan.tokens_per_step:,} in all\n"
        for recipe, how in plan.recipes.items():
            runs = runs_of(args, size, plan, recipe)
            for each in runs:
                state = "to do" if each.curve(args) is None else "done "
                yield f"{state} {each.name}: {shlex.join(['python', *each.command(args)[1:]])}\n"
            settings = len(how.rates) * len(how.warmups)
            if len(runs) == settings:
                yield f"then  {recipe}: the best {min(FINALISTS, settings)} of {settings} on seeds "
                yield f"{', '.join(map(str, plan.seeds[1:]))}\n"


def check_dataset(args: Arguments) -> None:
    """UserError if the finished runs are of several."""
    runs = [
        each
        for size, plan in args.plans.items()
        for recipe in plan.recipes
        for seed in plan.seeds
        for each in settings_on(seed, size, plan, recipe)
    ]
    if len({saved["dataset"] for each in runs if (saved := each.saved(args))}) > 1:
        raise UserError(f"{args.output_dir}: has runs of different datasets: take one --output_dir for each")


def unigram_loss(args: Arguments, size: str, plan: Plan) -> float | None:
    """Of the unigram predictor on the hidden residues, which are those of every run; None before the first."""
    runs = (each for recipe in plan.recipes for each in settings_on(plan.seeds[0], size, plan, recipe))
    return next((saved["unigram"] for each in runs if (saved := each.saved(args))), None)


def settings_table(args: Arguments, size: str, plan: Plan) -> list[str]:
    """Markdown: the last loss of every run."""
    lines = [f"| recipe | rate | warm-up | {' | '.join(f'seed {seed}' for seed in plan.seeds)} |"]
    lines.append("|---|--:|--:" + "|--:" * len(plan.seeds) + "|")
    for recipe in plan.recipes:
        for (rate, warmup), curves in curves_of(args, size, plan, recipe).items():
            of_seeds = [f"{last_loss(curves[seed]):.4f}" if seed in curves else "" for seed in plan.seeds]
            lines.append(f"| {recipe} | {rate:g} | {warmup:.0%} | {' | '.join(of_seeds)} |")
    return lines


def not_run(args: Arguments, size: str, plan: Plan) -> str:
    lacking = []
    for recipe in plan.recipes:
        runs = runs_of(args, size, plan, recipe)
        todo = [each.name.removeprefix(f"{size}-{recipe}-") for each in runs if each.curve(args) is None]
        if len(todo) == len(runs):
            lacking.append(recipe)
        elif todo:
            unselected = len(runs) == len(settings_on(plan.seeds[0], size, plan, recipe))
            lacking.append(f"{recipe} ({', '.join(todo)}{', then the best on the other seeds' * unselected})")
    return f"Not run: {', '.join(lacking)}." if lacking else "All recipes have been run."


def report(args: Arguments) -> None:
    """Write and print the tables of all sizes, with what has not been run, and draw the picture."""
    check_dataset(args)
    sections, panels = [], {}
    for size, plan in args.plans.items():
        recipes = {name: best for name in plan.recipes if (best := tuned(args, size, plan, name)) is not None}
        sections += [f"## {size}: {plan.title}", ""]
        steps = f"{plan.steps} steps of {plan.tokens_per_step:,} tokens, {plan.evaluations} evaluations."
        if (unigram := unigram_loss(args, size, plan)) is not None:
            steps += f" The unigram predictor has {unigram:.4f} nats."
        sections += [steps, ""]
        if recipes:
            panels[size] = recipes
            sections += [*table(recipes, plan.losses), "", verdict(recipes, plan.goal, len(plan.seeds)), ""]
            sections += ["The last loss of every run:", "", *settings_table(args, size, plan), ""]
        sections += [not_run(args, size, plan), ""]
    path = Path(args.report or args.directory / "time_to_loss.md")
    picture = [f"![held-out loss by tokens]({path.with_suffix('.png').name})", ""] if panels else []
    where = "\n\n".join(where_measured("benchmarks.time_to_loss", "torch"))
    by_clusters = (Path(str(args.dataset_dir)) / "train" / CLUSTERS).exists()
    held_out = f"Held-out proteins: {'whole clusters' if by_clusters else 'drawn one by one'}."
    head = ["# Tokens to a held-out loss", "", where, "", EXPLANATION, "", held_out, ""]
    publish("\n".join([*head, *picture, *sections]), str(path))
    if panels:
        draw(panels, path.with_suffix(""))


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if args.list:
        print("".join(listing(args)), end="")
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(missing_runs(args)):
        if number == args.max_runs:
            break
        say(f"starting {each.name}")
        each.start(args)
    report(args)


if __name__ == "__main__":
    run(main)
