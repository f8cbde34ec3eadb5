"""--quant_stats of Transformer Engine's tensors, through its debug API (nvdlfw_inspect).

Written against Transformer Engine 2.20 and nvdlfw_inspect 0.2.2. The API calls our feature with every selected
operand, before and after the cast, and with the matmuls' results; they are accumulated as the emulation's are
(extras.formats.stats), so that a statistic means the same. Its own features do not do: there MXFP8's scales
are exponents, an all-zero block has a scale, the error along columns is that along rows, recomputed tensors count
twice, and sharded weights, stored for one dimension at a time, end the run. It has to be started before the first
layer is built.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from common.cli import UserError
from common.distributed.world import World
from extras.formats.casts import COLUMNS, ROWS
from extras.formats.recipe import Plan
from extras.formats.stats import Statistics
from extras.formats.stats_plan import MODULES, OPERANDS, RESULTS, Selection

# Transformer Engine's names of the matmuls, with the layer's number from 0.
_NAMES = {
    "qkv": "encoder.layers.{}.self_attention.layernorm_linear_qkv",
    "proj": "encoder.layers.{}.self_attention.proj",
    "fc1": "encoder.layers.{}.layernorm_mlp.fc1",
    "fc2": "encoder.layers.{}.layernorm_mlp.fc2",
}
_BETWEEN_STEPS = -1  # a step at which nothing is due: evaluations do not count
_FEATURE = "AddedUp"
_FC1, _FC2 = list(MODULES).index("fc1"), list(MODULES).index("fc2")


class TeStats(Statistics):
    """Collects the statistics of a `Selection`: the same interface as `extras.formats.stats.QuantStats`."""

    def __init__(self, selection: Selection, plan: Plan, world: World, directory: Path):
        super().__init__(plan, selection, world)
        if find_spec("nvdlfw_inspect") is None:
            raise UserError(
                "--quant_stats: Transformer Engine's statistics need nvdlfw_inspect: pip install nvdlfw-inspect, "
                "or add --emulate_precision"
            )
        import nvdlfw_inspect.api as debug_api
        import transformer_engine

        self.api = debug_api
        _register(self)
        debug_api.initialize(
            config_file=configuration(selection),
            feature_dirs=[str(Path(transformer_engine.__file__).parent / "debug" / "features")],
            log_dir=str(directory),
        )
        debug_api.initialize_training_step(_BETWEEN_STEPS)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.api.initialize_training_step(step)

    def end_step(self) -> list[dict]:
        self.api.step()
        self.api.initialize_training_step(_BETWEEN_STEPS)
        return super().end_step()

    def begin_pack(self, empty: bool = False) -> None:
        super().begin_pack(empty)
        self._past_fc2: set[int] = set()  # layers whose backward pass is

    def next_due(self, layer: int, matmul: int, tensor: str, step: int) -> int | None:
        """The first step from `step` on at which something of it is due; None: never again."""
        names = [name for name in MODULES if asked_as(name, tensor) == tuple(MODULES)[matmul]]
        wanted = [wanted for name in names for wanted in self.selection.get((layer + 1, name, tensor), ())]
        return min((due for w in wanted if (due := w.next_due(step)) is not None), default=None)

    def inspect(self, layer: int, matmul: int, tensor: str, x, quantized) -> None:
        """Count a tensor. x [..., C]: before the cast; quantized: after it (of an operand), by Transformer Engine."""
        if (matmul, tensor) == (_FC1, "dgrad") and layer not in self._past_fc2:
            self._past_fc2.add(layer)
            matmul = _FC2
        x = x.detach().flatten(0, -2)
        if tensor in RESULTS:
            self.result(layer, matmul, tensor, x)
            return
        role, recipe = OPERANDS.index(tensor), self.recipe_of(layer + 1)
        for along in (COLUMNS,) if recipe.whole_tensor else (COLUMNS, ROWS):
            if (became := recipe.stored(quantized, along)) is not None:
                self.operand(layer, matmul, role, along, x, recipe.transform(x, role, along), became)


def _register(stats: TeStats) -> None:
    """The feature that the API calls; it is built from its class alone, and known by the class's name."""
    from nvdlfw_inspect.registry import Registry, api_method

    class AddedUp:
        def parse_config_and_api(self, config: dict, tensor_name: str = "", **_):
            return tensor_name in config["tensors"], config

        @api_method
        def inspect_tensor_enabled(self, config: dict, layer_name: str, tensor_name: str, iteration: int):
            now, later = (stats.next_due(*matmul_of(layer_name), tensor_name, iteration + more) for more in (0, 1))
            return iteration == now, later

        @api_method
        def inspect_tensor(
            self,
            config: dict,
            layer_name: str,
            tensor_name: str,
            iteration: int,
            tp_group,
            tensor,
            rowwise_quantized_tensor=None,
            columnwise_quantized_tensor=None,
            quantizer=None,
            tp_size: int = 1,
        ) -> None:
            stats.inspect(*matmul_of(layer_name), tensor_name, tensor, rowwise_quantized_tensor)

    Registry.register_feature(namespace="transformer_engine")(AddedUp)


def configuration(selection: Selection) -> dict:
    """The debug API's configuration (what its YAML file would hold)."""
    tensors: dict[str, list[str]] = {}
    for layer, module, tensor in selection:
        known = tensors.setdefault(te_name(layer, asked_as(module, tensor)), [])
        if tensor not in known:
            known.append(tensor)
    return {
        name: {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": f"^{re.escape(name)}$"},
            "transformer_engine": {_FEATURE: {"enabled": True, "tensors": wanted}},
        }
        for name, wanted in tensors.items()
    }


def asked_as(module: str, tensor: str) -> str:
    """The matmul by whose name it comes: in 2.20 fc2's gradient of its input comes as fc1's, before that."""
    return "fc1" if (module, tensor) == ("fc2", "dgrad") else module


def te_name(layer: int, module: str) -> str:
    """layer: from 1."""
    return _NAMES[module].format(layer - 1)


def matmul_of(name: str) -> tuple[int, int]:
    """(layer, matmul), both from 0, of Transformer Engine's name."""
    layer = int(name.split(".")[2])
    return layer, [pattern.format(layer) for pattern in _NAMES.values()].index(name)
