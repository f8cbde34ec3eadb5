"""Probes as files: probe.json says what they are and of which embeddings, probe.safetensors has their numbers.

A saved probe needs no scikit-learn: it is a few matrix products.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.cli import UserError, one_line
from common.files.content_hash import combined_hash
from common.files.safe_files import read_json
from extras.after.downstream.probe_fits import Evaluation, Outputs

PROBE = "probe"  # directory in --output_dir
ABOUT, ARRAYS = "probe.json", "probe.safetensors"
FORMAT = 1
LINEAR = ("mean", "scale", "weights", "bias")
FAR = 1e9  # of standardised features
OF_PROCESS = ("points", "alpha", "cholesky", "kernel", "labels")  # with mean and scale


@dataclass(frozen=True)
class Source:
    """The embeddings that probes were fitted to. model: as the user named it, None if embed.py had it; model_hash;
    settings: of embed.py that matter; layer: of --repr_layers, None for the last one."""

    model: str | None
    model_hash: str
    settings: dict[str, Any]
    layer: int | None


@dataclass(frozen=True)
class SavedProbe:
    """label_column: what it predicts; kind: of `PROBES`; classes: in the order of the logits, () of numbers;
    temperature: of the logits; fitted_on: "train" or "all"; labels: how many it was fitted to; arrays: of `LINEAR` or
    `OF_PROCESS`, and `scores`."""

    label_column: str
    kind: str
    classes: tuple[str, ...]
    temperature: float
    fitted_on: str
    labels: int
    arrays: dict[str, np.ndarray]

    @property
    def scores(self) -> np.ndarray:
        """How wrong the probe was on what it had not seen, as of conformal.py."""
        return self.arrays["scores"]

    def outputs(self, features: np.ndarray) -> Outputs:
        """features: [N, F]. As `outputs_of` the model that it was made from."""
        scaled = (features - self.arrays["mean"]) / self.arrays["scale"]
        if self.kind == "gp":
            return self._of_process(scaled)
        found = scaled @ self.arrays["weights"].T + self.arrays["bias"]
        if not self.classes:
            return Outputs(found[:, 0])
        logits = np.concatenate([np.zeros_like(found), found], 1) if found.shape[1] == 1 else found
        return Outputs(np.array(self.classes)[logits.argmax(1)], logits)

    def _of_process(self, scaled: np.ndarray) -> Outputs:
        """Rasmussen and Williams 2006, equations 2.25 and 2.26, with the noise of a label in the variance."""
        from scipy.linalg import solve_triangular
        from scipy.spatial.distance import cdist

        constant, length, noise = self.arrays["kernel"]
        mean, deviation = self.arrays["labels"]
        distances = cdist(scaled / length, self.arrays["points"] / length, "sqeuclidean")
        kernel = constant * np.exp(-0.5 * distances)
        solved = solve_triangular(self.arrays["cholesky"], kernel.T, lower=True)
        variance = np.maximum(constant + noise - (solved**2).sum(0), 0)
        return Outputs(mean + deviation * (kernel @ self.arrays["alpha"]), sigma=deviation * np.sqrt(variance))


def saved_probe(label_column: str, kind: str, evaluation: Evaluation, fitted_on: str, labels: int) -> SavedProbe:
    """Of what `evaluate` gives."""
    scaler, last = evaluation.fit.model
    arrays = {"mean": scaler.mean_, "scale": scaler.scale_, "scores": evaluation.scores}
    if kind == "gp":
        signal, noise = last.kernel_.k1, last.kernel_.k2.noise_level
        kernel = np.array([signal.k1.constant_value, signal.k2.length_scale, noise])
        # Far from all points the process knows the mean and the deviation of the labels alone.
        mean, deviation = last.predict(np.full((1, len(scaler.mean_)), FAR), return_std=True)
        of_labels = np.array([mean[0], deviation[0] / np.sqrt(kernel[0] + kernel[2])])
        points, alpha, cholesky = last.X_train_, last.alpha_, last.L_
        values = (points, alpha, cholesky, kernel, of_labels)
        arrays |= dict(zip(OF_PROCESS, values, strict=True))
    else:
        arrays |= {"weights": np.atleast_2d(last.coef_), "bias": np.atleast_1d(last.intercept_)}
    classes = tuple(map(str, getattr(last, "classes_", ())))
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return SavedProbe(label_column, kind, classes, evaluation.fit.temperature, fitted_on, labels, arrays)


def write_probes(directory: Path, source: Source, probes: Sequence[SavedProbe]) -> None:
    directory.mkdir()
    listed = []
    for probe in probes:
        about = asdict(probe)
        del about["arrays"]
        listed.append(about)
    about = {"format": FORMAT, "embeddings": asdict(source), "probes": listed}
    (directory / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    arrays = {f"{n}.{name}": array for n, probe in enumerate(probes) for name, array in probe.arrays.items()}
    save_file(arrays, directory / ARRAYS)


def read_probes(directory: Path) -> tuple[Source, list[SavedProbe]]:
    """UserError for files that are missing, damaged, or of a later version."""
    again = "run probe.py again"
    try:
        about = read_json(directory / ABOUT)
        if about["format"] != FORMAT:
            raise ValueError(f"format {str(about['format'])[:20]} is of another version")
        source, arrays = Source(**about["embeddings"]), load_file(directory / ARRAYS)
        probes = []
        for n, each in enumerate(about["probes"]):
            prefix = f"{n}."
            own = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
            probes.append(SavedProbe(**each | {"classes": tuple(each["classes"]), "arrays": own}))
            check(probes[-1])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{directory}: no probe that can be read: {one_line(error)[:120]}: {again}") from error
    return source, probes


def check(probe: SavedProbe) -> None:
    """ValueError for arrays that are missing, do not fit each other, or are not finite."""
    needed = {"scores", "mean", "scale", *(OF_PROCESS if probe.kind == "gp" else LINEAR)}
    if needed != probe.arrays.keys():
        raise ValueError(f"arrays {', '.join(sorted(probe.arrays))}")
    shapes = {name: array.shape for name, array in probe.arrays.items()}
    columns, count = shapes["mean"][0], len(probe.classes)
    if probe.kind == "gp":
        points = shapes["points"][0]
        expected = {"points": (points, columns), "alpha": (points,), "cholesky": (points, points)}
        expected |= {"kernel": (3,), "labels": (2,)}
    else:
        rows = count if count > 2 else 1
        expected = {"weights": (rows, columns), "bias": (rows,)}
    for name, shape in (expected | {"scale": (columns,)}).items():
        if shapes[name] != shape:
            raise ValueError(f"{name} is {list(shapes[name])}, not {list(shape)}")
    if not all(np.isfinite(array).all() for array in probe.arrays.values()):
        raise ValueError("NaN or infinity")


def probes_hash(directory: Path) -> str:
    """Identity of the probes, by content."""
    return combined_hash([directory / ABOUT, directory / ARRAYS])
