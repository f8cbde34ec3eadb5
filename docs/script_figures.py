"""Tables of docs/reference_metrics.md: the numbers that the scripts after training write.

tests/test_reference.py runs each script and finds each number here, and no row here that nothing writes.
"""

from __future__ import annotations

NONE, OF_ONE_MODEL = "-", "none: of this model"
BOOTSTRAP = "95 % bootstrap percentiles over held-out proteins or clusters (`intervals.over`)"
OVER_IDS = "UniProt ids, drawn for each function type; of clinical assays over proteins"
CHAINS = "`..._stderr`, over chains"
SCORED = "scored.csv.json: correlations.proteins.<protein>"
CONTRADICTING = (
    "results.json: contradicting_labels.proteins",
    "proteins",
    "with two different labels, of the protein or of one of its residues",
    NONE,
    NONE,
)
CALIBRATION = [
    ("results.json: calibration.temperature", "none", "fitted on other labels than these; 1: as it came", "1", NONE),
    *(
        (f"results.json: calibration.{name}{by}", unit, "classes: held-out labels", base, NONE)
        for by, base in (("", NONE), ("_by_temperature", "without it"))
        for name, unit in (("brier", "0 to 2, over all classes"), ("calibration_error", "fraction, 15 bins"))
    ),
]
COUNTED = [
    (".complete.json: results.proteins", "proteins", "of `--fasta`", NONE, NONE),
    (".complete.json: results.residues", "residues", "of all proteins", NONE, NONE),
    (".complete.json: results.unknown", "residues", "characters that became `<unk>`", NONE, NONE),
    (".complete.json: results.with_unknown", "proteins", "that have such characters", NONE, NONE),
    (".complete.json: results.duplicates", "proteins", "whose id is repeated", NONE, NONE),
]
PREDICTED = [
    ("prediction", "the label's", "a protein or residue", NONE, "`low`, `high`"),
    ("low", "the label's", "the same: lower end of its interval", NONE, "held-out labels: `--coverage` of new ones"),
    ("high", "the label's", "the same: upper end", NONE, "the same"),
    ("probability_<class>", "fraction", "the same, of classes", NONE, "`set`: as `low` and `high`"),
]
HEAD = ("number", "unit", "over what", "compared with what", "error over what")

# {script: rows as of HEAD}. A number is "file: key"; <...> stands for any name; a list is [value, low, high].
SCRIPTS: dict[str, list[tuple[str, str, str, str, str]]] = {
    "score.py": [
        (
            "scored.csv: masked_marginal",
            "nats",
            "a row: sum over its mutations of log p(mutant) - log p(wild type), the residue masked",
            "the wild type, which has 0",
            OF_ONE_MODEL,
        ),
        ("scored.csv: wild_type_marginal", "nats", "the same, nothing masked", "the wild type", OF_ONE_MODEL),
        (f"{SCORED}.variants", "variants", "rows of the protein that have a measurement", NONE, NONE),
        (
            f"{SCORED}.<score>.spearman",
            "",
            "the protein's measured variants; printed for several proteins: their mean",
            "`blosum62` and `residue_frequency`, which are rows beside it",
            "`low`, `high`; of the mean the standard error over proteins",
        ),
        (f"{SCORED}.<score>.low", "", "2.5 % of 1,000 bootstrap samples", NONE, "variants of this one protein"),
        (f"{SCORED}.<score>.high", "", "97.5 % of them", NONE, "variants of this one protein"),
        ("scored.csv.json: left_out.<kind>", "variants", "rows that `--leave_out` left out", NONE, NONE),
        ("NAME.<score>.csv: position", "residues", "number of the wild type's residue", NONE, NONE),
        (
            "NAME.<score>.csv: <residue>",
            "nats",
            "the substitution by this residue",
            "the wild type, which has 0",
            OF_ONE_MODEL,
        ),
        ("best_and_worst.csv: rank", "", "1 is the protein's best mutant, or its worst (`end`)", NONE, NONE),
        (
            "best_and_worst.csv: <score>",
            "nats",
            "the substitution, of the first score alone",
            "the wild type, which has 0",
            OF_ONE_MODEL,
        ),
        ("scores.json: variance.<matrix>.scores", "scores", "substitutions, without the wild type", NONE, NONE),
        (
            "scores.json: variance.<matrix>.residues",
            "fraction",
            "the scores' variance: what follows from wild type and mutant alone, corrected for their number",
            "noise: 0; from 0.95 on the heat map says nothing of positions",
            NONE,
        ),
        (
            "scores.json: variance.<matrix>.position",
            "fraction",
            "the same, from the position (with its wild type) alone",
            "noise: 0",
            NONE,
        ),
    ],
    "proteingym.py": [
        (
            "<assay>.csv: <column>",
            "nats",
            "a row of the assay, as of score.py",
            "the wild type, which has 0",
            OF_ONE_MODEL,
        ),
        (
            "<assay>.csv.json: metrics.<score>.<gym_metric>",
            "",
            "measured variants of the assay",
            "`blosum62` and `residue_frequency`",
            NONE,
        ),
        ("<assay>.csv.json: variants", "variants", "rows of the assay", NONE, NONE),
        ("<assay>.csv.json: unmeasured", "variants", "of them without a measurement: in no metric", NONE, NONE),
        ("assays.csv: variants", "variants", "rows of the assay", NONE, NONE),
        ("assays.csv: <score>", "", "an assay, of the folder's metric", "the predictors without a model", NONE),
        ("uniprot_ids.csv: <score>", "", "mean over a UniProt id's assays; last the mean of these", "the same", NONE),
        (
            "function_types.csv: <score>",
            "",
            "mean over UniProt ids of their means in a function type",
            "the same",
            NONE,
        ),
        ("summary.csv: assays", "assays", "in which the metric is defined", NONE, NONE),
        (
            "summary.csv: average",
            "",
            "mean over function types of `function_types.csv`",
            "the other rows of the metric",
            "`standard_error`",
        ),
        ("summary.csv: standard_error", "", "of 10,000 bootstrap samples of the average", NONE, OVER_IDS),
        (
            "summary.csv: standard_error_to_best",
            "",
            "the same, of the difference from the best row, as ProteinGym's",
            "the best row, which has 0",
            OVER_IDS,
        ),
        ("summary.csv: function_<type>", "", "as `function_types.csv`", "the other rows", NONE),
        (
            "summary.csv: msa_depth_<type>",
            "",
            "mean over UniProt ids of an MSA depth of their means",
            "the same",
            NONE,
        ),
        ("summary.csv: taxon_<type>", "", "the same of a taxon", "the same", NONE),
        ("results.json: assays", "assays", "with scores", NONE, NONE),
        ("results.json: variants", "variants", "of all of them", NONE, NONE),
        ("results.json: unmeasured", "variants", "of them without a measurement", NONE, NONE),
        ("results.json: uniprot_ids", "UniProt ids", "of all assays", NONE, NONE),
        ("results.json: function_types", "types", "of all assays", NONE, NONE),
        *(
            (f"results.json: averages.<gym_metric>.<score>.{name}", "", "as in `summary.csv`, not rounded", *more)
            for name, more in (
                ("average", ("the other scores", "`standard_error`")),
                ("standard_error", (NONE, OVER_IDS)),
                ("standard_error_to_best", ("the best score", OVER_IDS)),
            )
        ),
        (
            "results.json: averages.<gym_metric>.<score>.undefined",
            "assays",
            "in which the metric is not defined: left out",
            NONE,
            NONE,
        ),
    ],
    "contacts.py": [
        ("contacts.csv: residues", "residues", "the chain", NONE, NONE),
        ("contacts.csv: resolved", "residues", "those with coordinates: L below", NONE, NONE),
        *(
            row
            for file, over, error in (
                ("contacts.csv", "a chain's", NONE),
                ("results.json", "mean over chains of a chain's", CHAINS),
            )
            for row in (
                (
                    f"{file}: <range>_p_at_l",
                    "fraction",
                    f"{over} L likeliest pairs of the range: those in contact",
                    "`<range>_chance`, `<range>_nearest_p_at_l`",
                    error,
                ),
                (f"{file}: <range>_p_at_l2", "fraction", f"{over} L/2 likeliest", "`<range>_chance`", error),
                (f"{file}: <range>_p_at_l5", "fraction", f"{over} L/5 likeliest", "`<range>_chance`", error),
                (
                    f"{file}: <range>_nearest_p_at_l",
                    "fraction",
                    f"{over} L pairs nearest along the chain",
                    "`<range>_chance`",
                    error,
                ),
                (f"{file}: <range>_chance", "fraction", f"{over} pairs of the range, all of them", NONE, error),
            )
        ),
        (
            "results.json: <range>_<name>_stderr",
            "fraction",
            "standard deviation between chains over the root of their number",
            NONE,
            "chains; relatives count as independent",
        ),
        ("results.json: chains", "chains", "evaluated, others than the head was fitted on", NONE, NONE),
        ("results.json: proteins", "proteins", "`--fasta`: predicted", NONE, NONE),
        ("NAME.csv: i", "residues", "`--fasta`: number of a pair's first residue, from 1", NONE, NONE),
        ("NAME.csv: j", "residues", "of its second", NONE, NONE),
        ("NAME.csv: probability", "fraction", "one of the protein's L likeliest pairs", NONE, OF_ONE_MODEL),
    ],
    "probe.py": [
        (
            "results.json: probe.<metric>",
            "as of `eval_probe_...`",
            "labels of held-out proteins or of their residues",
            "`baseline.<metric>`",
            BOOTSTRAP,
        ),
        (
            "results.json: baseline.<metric>",
            "the same",
            "the same labels, by a probe of the composition, or of a residue's neighbours",
            NONE,
            BOOTSTRAP,
        ),
        (
            "results.json: difference.<metric>",
            "the same",
            "probe minus baseline, on the same labels",
            "0",
            f"{BOOTSTRAP}, the same samples for both",
        ),
        ("results.json: counts.train", "labels", "fitted on; of residues, each is one", NONE, NONE),
        ("results.json: counts.test", "labels", "evaluated on", NONE, NONE),
        ("results.json: intervals.test", "proteins or clusters", "held out: what intervals are over", NONE, NONE),
        CONTRADICTING,
        *CALIBRATION,
        ("results.json: folds.<metric>", "the metric's", "`--folds`: the labels of one fold", NONE, NONE),
        ("predictions.csv: fold", "none", "`--folds`: number of the fold, from 1", NONE, NONE),
        ("predictions.csv: position", "residues", "number of the residue, from 1", NONE, NONE),
        ("predictions.csv: label", "the label's", "a held-out protein or residue", NONE, NONE),
        ("predictions.csv: prediction", "the label's", "the same, by the probe", "`label`", NONE),
    ],
    "map.py": [
        ("map.csv: length", "residues", "a protein", NONE, NONE),
        ("map.csv: x", "", "the first coordinate of the projection", NONE, NONE),
        ("map.csv: y", "", "the second", NONE, NONE),
        ("map.csv: cluster", "", "number of its cluster, from 1 for the largest; empty: in none", NONE, NONE),
        ("<which>neighbours.csv: rank", "", "1 for the most similar", NONE, NONE),
        ("<which>neighbours.csv: cosine", "", "of the angle between the two embeddings", NONE, OF_ONE_MODEL),
        ("<which>neighbours.csv: cluster", "", "number of the neighbour's cluster", NONE, NONE),
        ("clusters.csv: cluster", "", "its number", NONE, NONE),
        ("clusters.csv: members", "proteins", "of the cluster", NONE, NONE),
        ("clusters.csv: median_length", "residues", "of its members", NONE, NONE),
        ("results.json: proteins", "proteins", "of the map", NONE, NONE),
        ("results.json: neighbours.k", "proteins", "neighbours of each", NONE, NONE),
        (
            "results.json: neighbours.recall",
            "fraction",
            "`--approximate`: of the found neighbours, those as similar as the exact k-th",
            "1 of exact neighbours",
            NONE,
        ),
        ("results.json: neighbours.sample", "proteins", "random ones that recall is measured on", NONE, NONE),
        ("results.json: clusters.found", "clusters", "of all proteins", NONE, NONE),
        ("results.json: clusters.in_none", "proteins", "that HDBSCAN leaves out", NONE, NONE),
        ("results.json: column.missing", "proteins", "without a value in the column of `--colour_by`", NONE, NONE),
        (
            "results.json: column.pairs",
            "proteins",
            "that have a class, and whose nearest neighbour has one",
            NONE,
            NONE,
        ),
        (
            "results.json: column.nearest_agrees",
            "fraction",
            "of these pairs, those of one class",
            "`column.chance`",
            NONE,
        ),
        ("results.json: column.chance", "fraction", "the same of random pairs that have a class", NONE, NONE),
    ],
    "finetune.py": [
        ("results.json: counts.<split>", "proteins", "of the split", NONE, NONE),
        ("results.json: intervals.<split>", "proteins or clusters", "what its intervals are over", NONE, NONE),
        CONTRADICTING,
        *CALIBRATION,
        ("results.json: best_epoch", "epochs", "the one whose weights are written", "validation loss", NONE),
        ("results.json: history.epoch", "epochs", "done", NONE, NONE),
        ("results.json: history.train_loss", "nats, or squared", "mean over the epoch's steps", NONE, NONE),
        ("results.json: history.validation_loss", "the same", "mean over the split's labels", NONE, NONE),
        ("results.json: <split>.loss", "the same", "mean over the split's labels, by the best epoch", NONE, NONE),
        (
            "results.json: <split>.<metric>",
            "as of `eval_probe_...`",
            "labels of the split's proteins or of their residues",
            "`<split>.baseline.<metric>`",
            "95 % bootstrap percentiles over proteins or clusters (`intervals.over`)",
        ),
        (
            "results.json: <split>.baseline.<metric>",
            "the same",
            "the same labels, by the most frequent class or the mean of the training labels",
            NONE,
            NONE,
        ),
        ("predictions.csv: residue", "residues", "number of the residue, from 1", NONE, NONE),
        ("predictions.csv: label", "the label's", "a protein or residue of the test split", NONE, NONE),
        ("predictions.csv: prediction", "the label's", "the same, by the model", "`label`", NONE),
    ],
    "embed.py": [
        ("part-<number>.parquet: length", "residues", "a protein", NONE, NONE),
        (
            "part-<number>.parquet: embedding",
            "",
            "the last layer's output: mean over the residues of a protein, or as `--pooling` says",
            NONE,
            OF_ONE_MODEL,
        ),
        *COUNTED,
    ],
    "predict.py": [
        *(
            (f"{file}: {name}", *rest)
            for file in ("predictions.csv", "part-<number>.parquet")
            for name, *rest in PREDICTED
        ),
        ("predictions.csv: position", "residues", "number of the residue, from 1", NONE, NONE),
        ("part-<number>.parquet: length", "residues", "a protein", NONE, NONE),
        *COUNTED,
    ],
}

# {command: rows as of HEAD, of its table's columns}.
TABLES: dict[str, list[tuple[str, str, str, str, str]]] = {
    "--find_learning_rate": [
        (
            "training loss",
            "nats",
            "selected residues of the trial's last fifth of steps",
            "the other trials",
            NONE,
        ),
        ("held-out loss", "nats", "hidden residues of the first 1,000 held-out proteins", "the other trials", NONE),
        ("below the start", "nats", "the same residues", "the starting weights", "over proteins or clusters, paired"),
        ("above the best", "nats", "the same residues", "the best trial", "over proteins or clusters, paired"),
    ],
    "python -m extras.compare": [
        ("loss", "nats", "hidden residues of the validation split; mean of the seeds", "the other rows", "over seeds"),
        ("perplexity", "", "exp of it", "the other rows", NONE),
        (
            "below A",
            "nats",
            "the same residues and seeds",
            "the first row, or `--baseline`",
            "`± proteins`: over proteins or clusters; `± seeds`: over seeds; a verdict counts both",
        ),
        ("loss, all", "nats", "all selected residues (`eval_loss`)", "published losses", "over seeds"),
    ],
}
