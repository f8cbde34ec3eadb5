"""The points at which a run may ask for an extra.

The core imports no extra. `import extras`, with which every script begins, hands in extras/catalogue.py: a module with
a function for each point of `Catalogue`, which imports what it needs when it is called. So a run loads the extras that
its flags ask for, and no others. The core calls `extra().NAME(...)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol


class FamilyLine(NamedTuple):
    """A family's line in the registry, which --help shows without importing the family.

    module: defines FAMILY; of an encoder, hub_names: of its sizes on the Hub, known by what stands before the `*`;
    about: what it is, and its size if --model_type alone is given.
    """

    module: str
    hub_names: str = ""
    about: str = ""


class Catalogue(Protocol):
    """What the core may ask for, by what it is for. Arguments and results are as the function behind each has them."""

    # ---- arguments: the command line ----

    def causal_task(self, args: Any) -> type:
        """--task clm: the task of decoders."""

    def causal_arguments(self, tokenizer: str | None) -> type:
        """Its flags, with the --tokenizer that the command line names."""

    def causal_words(self, words: list[str]) -> list[str]:
        """Its command line without the guides' comments."""

    def foreign_flag(self, word: str, task: str) -> str:
        """What to give in place of another program's flag; "" if it is none."""

    def check_tokenizer(self, name: str) -> None:
        """--tokenizer_name of an encoder."""

    # ---- models ----

    def families(self) -> dict[str, FamilyLine]:
        """config.json's model_type: its family."""

    def alphabets(self) -> dict[str, str]:
        """Value of --alphabet: the module that defines ALPHABET."""

    def alphabet(self, described: Any, where: str) -> Any:
        """An alphabet but ESM-2's: by name or YAML file, from a record of one, or by the list of its tokens."""

    def esm2_layers(self, args: Any, config: Any, backend: str, gelu: str, world: Any, make: Any) -> tuple[Any, list]:
        """--backend hf, --fused_gelu: (what makes the model, lines for the log)."""

    def lora(self) -> Any:
        """--lora: the module that checks, adds and merges adapters."""

    def recipe_config(self, content: dict) -> dict:
        """config.json of a model of NVIDIA's recipe, as transformers has it."""

    def recipe_pieces(self, tensors: Any, config: Any, where: str) -> Any:
        """Its weights, by our names."""

    def recipe_checkpoint(self) -> Any:
        """The module that reads the directory of one of its checkpoints."""

    # ---- data ----

    def open_files(self, flags: Any, tokens: Any, world: Any, evaluate: bool, makers: dict) -> Any:
        """--dataset, --eval_dataset: proteins of files, read in place; --dataset_mix."""

    def weighted_clusters(self, clusters: Any, exponent: float) -> tuple[Any, str]:
        """sample_clusters_exponent: what a batch plan draws by, and a line about it."""

    def check_sets(self, flags: Any, family: Any) -> None:
        """--set_tokens: UserError for flags that contradict it."""

    def set_plan(self, flags: Any, store: Any, directory: Path) -> tuple[Any, dict, str]:
        """--set_tokens: the batch plan, its part of the data's identity, and a line about it."""

    def set_batches(self, collator: Any) -> Any:
        """--set_tokens: the collator of batches that know their sets."""

    def chains(self) -> Any:
        """--chains: the module of the alphabets, stores and batches of records of several chains."""

    def with_homologs(self, task: Any) -> Any:
        """--set_tokens: evaluates held-out proteins behind homologs of theirs."""

    def check_diffusion(self, flags: Any) -> None:
        """--objective mdlm: UserError for flags that contradict it."""

    def diffusion_batches(self, flags: Any, tokens: Any, mesh: Any, static_shape: bool) -> Any:
        """--objective mdlm: the collator of a rank."""

    def diffusion_predicted(self, flags: Any) -> float:
        """--objective mdlm: the part of the residues that is predicted, on average."""

    def held_out_bound(self, task: Any) -> Any:
        """--objective mdlm, eval_nelbo: bounds the log-likelihood of held-out proteins."""

    def untokenised(self, directory: Path, columns: Any = None) -> str:
        """What to do with a directory of datasets' save_to_disk that has no tokens but `columns`; "" if it has."""

    def make_sample(self, output_dir: Path) -> Path:
        """--dataset sample: generated proteins."""

    # ---- speed: kernels and optimisers ----

    def attention_kernels(self) -> Any:
        """--attention on a GPU: the module that chooses kernels, tries them, and finds those that ran."""

    def create_cp_groups(self, world: Any, cp_size: int) -> None:
        """--cp_size: the ranks of a group share each pack."""

    def check_context(self, comm_type: str, layout: str, cp_size: int, backend: str, config: Any) -> None:
        """--cp_size of an encoder."""

    def context_parallel(self, model: Any, group: Any, comm_type: str) -> None:
        """--cp_size: the model takes this rank's share of packs."""

    def cp_batches(
        self, collator: Any, flags: Any, mesh: Any, pad: int, mask: int, filled_to: int, predicted: float
    ) -> Any:
        """--cp_size: the collator of this rank's share of packs."""

    def cp_pack(self, batch: Any, device: Any) -> Any:
        """--cp_size: how ranks share a batch, for the model."""

    def offload_activations(self, layers: Any) -> None:
        """--offload_activations."""

    def optimizer(self, name: str) -> Any:
        """The class of --optim, or of a flag that has AdamW made otherwise."""

    def record_graphs(self, task: Any) -> None:
        """--cuda_graphs of Transformer Engine's layers."""

    # ---- number formats below bf16, and their statistics ----

    def fp8_formats(self) -> dict[str, str]:
        """Value of --fp8_recipe: the module that defines FORMAT."""

    def fp4_formats(self) -> dict[str, str]:
        """Value of --fp4_format: the same."""

    def fp8_recipe(self, name: str) -> str:
        """The value of --fp8_recipe for Transformer Engine's name; any other name as it is."""

    def check_formats(self, flags: Any) -> None:
        """--fp8, --fp4: UserError for flags that contradict each other."""

    def choose_formats(self, flags: Any, config: Any, device: Any, backend: str, why: str, sharded: bool) -> Any:
        """The format of each layer."""

    def te_statistics(self, flags: Any, plan: Any, world: Any, directory: Path | None) -> Any:
        """--quant_stats of Transformer Engine's layers, which are built next; None of others."""

    def set_formats(self, model: Any, plan: Any, flags: Any, seed: int, world: Any, te_stats: Any) -> Any:
        """Give the layers their formats: a `Precision`."""

    def check_statistics(self, file: str) -> None:
        """--quant_stats_file."""

    def statistics_file(self) -> str:
        """The name of their file."""

    def statistics_scalars(self, rows: list[dict]) -> dict:
        """What a tracker gets of a step's rows."""

    # ---- tracker, downstream evaluation, plans ----

    def open_tracker(self, flags: Any, config: dict, output_dir: Path, first_row: int | None, anew: bool) -> Any:
        """--report_to."""

    def downstream(self, task: Any) -> Any:
        """--eval_contacts, --eval_mutations, --eval_probe."""

    def dry_run(self, args: Any, build: Any) -> None:
        """--dry_run."""

    def largest_pack(self, args: Any, build: Any) -> Any:
        """--tokens_per_pack auto."""

    def find_learning_rate(self, args: Any, build: Any, world: Any) -> None:
        """--find_learning_rate."""

    # ---- export, and checkpoints of other forms ----

    def memory_checkpoints(self, world: Any) -> Any:
        """Under extras.launch: states in its memory."""

    def add_model(self, checkpoint: Path, tokenizer: Any) -> None:
        """--save_hf."""

    def read_checkpoint(self, directory: Path, config: Any) -> tuple[Any, dict]:
        """--model_name_or_path of a run's checkpoint."""

    def earlier_checkpoint(self, path: Path, sizes: dict[str, int]) -> Any:
        """The reader of a checkpoint of an earlier format."""

    def check_push(self, name: str) -> None:
        """--hub_model_id."""

    def push(self, directory: Path, name: str) -> None:
        """--hub_model_id, once the model is exported."""


_handed_in: list[Catalogue] = []


def hand_in(catalogue: Catalogue) -> None:
    """The catalogue of this process."""
    _handed_in[:] = [catalogue]


def extra() -> Catalogue:
    """The catalogue that was handed in."""
    assert _handed_in, "nothing was handed in: import extras first"
    return _handed_in[0]
