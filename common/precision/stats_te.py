"""--quant_stats where Transformer Engine quantises: its debug API (nvdlfw_inspect), asked for the same statistics.

Written against Transformer Engine 2.20 and nvdlfw_inspect 0.2.2. The configuration has a section for each product of
each quantised layer, with the features of the layer's format; what the API logs comes back as the rows of
common.precision.stats. It has to be started before the first layer is built.

What the API does not have is left out: overflows but for delayed scaling, scales of NVFP4 and its second dimension.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from common.cli import UserError
from common.precision.plan import DelayedScaling, NVFP4BlockScaling, Plan, Recipe
from common.precision.stats import GEMMS, Row, make_row
from common.precision.stats_plan import PLAIN, RESULTS, Key, Selection, Wanted

# Its names of the products, which it matches the configuration against, and the number of the layer, from 0.
_NAMES = {
    "qkv": "encoder.layers.{}.self_attention.layernorm_linear_qkv",
    "proj": "encoder.layers.{}.self_attention.proj",
    "fc1": "encoder.layers.{}.layernorm_mlp.fc1",
    "fc2": "encoder.layers.{}.layernorm_mlp.fc2",
}
_COLUMNWISE = "_columnwise"
_BETWEEN_STEPS = -1  # a step at which nothing is due: evaluation shall not be counted


class TeStats:
    """Collects the statistics of a `Selection`: the same interface as `common.precision.stats.QuantStats`."""

    def __init__(self, selection: Selection, plan: Plan, world, directory: Path):
        if find_spec("nvdlfw_inspect") is None:
            raise UserError(
                "--quant_stats: Transformer Engine's statistics need nvdlfw_inspect: pip install nvdlfw-inspect, "
                "or add --emulate_precision"
            )
        import nvdlfw_inspect.api as debug_api
        import transformer_engine
        from nvdlfw_inspect.logging import BaseLogger

        found = self._found = {}

        class Collector(BaseLogger):
            def log_scalar(self, name: str, value, iteration: int, **_) -> None:
                found[name] = float(value)

        self.plan, self.world, self.api = plan, world, debug_api
        self.names = logged_names(selection, plan)
        self.step = 0
        debug_api.initialize(
            config_file=configuration(selection, plan),
            feature_dirs=[str(Path(transformer_engine.__file__).parent / "debug" / "features")],
            statistics_logger=Collector(),
            log_dir=str(directory),
        )
        debug_api.initialize_training_step(_BETWEEN_STEPS)

    def begin_step(self, step: int) -> None:
        self.step = step
        self._found.clear()
        self.api.initialize_training_step(step)

    def end_step(self) -> list[dict]:
        """The rows of quant_stats.jsonl; all ranks together."""
        self.api.step()  # gathers from all ranks, and logs
        self.api.initialize_training_step(_BETWEEN_STEPS)
        return to_rows(self._found, self.names, self.step, self.plan, self.world)


def configuration(selection: Selection, plan: Plan) -> dict:
    """The debug API's configuration (what its YAML file would hold)."""
    sections: dict[str, dict] = {}
    for (layer, module, tensor), wanted in selection.items():
        name = te_name(layer, module)
        section = sections.setdefault(
            f"layer {layer} {module}",
            {
                "enabled": True,
                "layers": {"layer_name_regex_pattern": f"^{re.escape(name)}$"},
                "transformer_engine": {},
            },
        )
        for feature, stats, what in _features(tensor, wanted, plan[layer - 1]):
            settings = {"tensor": tensor, "stats": list(stats), "freq": what.freq, "start_step": what.start}
            if what.end is not None:
                settings["end_step"] = what.end
            features = section["transformer_engine"]
            features.setdefault(feature, {"enabled": True, "tensors_struct": []})["tensors_struct"].append(settings)
    return {name: section for name, section in sections.items() if section["transformer_engine"]}


def logged_names(selection: Selection, plan: Plan) -> dict[str, tuple[Row, str]]:
    """What the API calls a statistic in its log -> where it belongs, and its name there."""
    names = {}
    for key, wanted in selection.items():
        layer, module, tensor = key
        recipe = plan[layer - 1]
        for feature, stats, _ in _features(tensor, wanted, recipe):
            prefix = "nvfp4_" if feature == "LogNvfp4TensorStats" else ""
            for stat in stats:
                row = key, _gemms(key, recipe, stat.endswith(_COLUMNWISE))
                names[f"{te_name(layer, module)}_{tensor}_{prefix}{stat}"] = row, stat.removesuffix(_COLUMNWISE)
    return names


def to_rows(found: dict[str, float], names: dict[str, tuple[Row, str]], step: int, plan: Plan, world) -> list[dict]:
    """The rows of a step from what the API logged in it."""
    stats: dict[Row, dict[str, float]] = {}
    for name, (row, stat) in names.items():
        if name in found:
            stats.setdefault(row, {})[stat] = found[name]
    return [make_row(step, key, gemms, of, plan[key[0] - 1], world) for (key, gemms), of in stats.items()]


def te_name(layer: int, module: str) -> str:
    return _NAMES[module].format(layer - 1)


def _features(tensor: str, wanted: tuple[Wanted, ...], recipe: Recipe):
    """(feature, its names of the statistics, when) for each that is left of `wanted`."""
    for what in wanted:
        if plain := tuple(stat for stat in what.stats if stat in PLAIN):
            yield "LogTensorStats", plain, what
        quantised = [stat for stat in what.stats if stat not in PLAIN]
        if isinstance(recipe, NVFP4BlockScaling):
            feature, has = "LogNvfp4TensorStats", ("underflows%", "mse")
        else:
            feature, has = "LogFp8TensorStats", ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
            has += ("overflows%",) * isinstance(recipe, DelayedScaling)
        stats = tuple(stat for stat in quantised if stat in has)
        if not recipe.whole_tensor and not isinstance(recipe, NVFP4BlockScaling):
            stats += tuple(stat + _COLUMNWISE for stat in stats)
        if stats:
            yield feature, stats, what


def _gemms(key: Key, recipe: Recipe, columnwise: bool) -> tuple[str, ...]:
    tensor = key[2]
    if tensor in RESULTS:
        return (RESULTS[tensor],)
    return GEMMS[tensor] if recipe.whole_tensor else (GEMMS[tensor][int(columnwise)],)
