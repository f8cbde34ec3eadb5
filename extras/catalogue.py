"""The extras that a run may ask for, by the points of common.hooks.Catalogue. Each is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.hooks import FamilyLine

# ---- arguments: the command line ----


def causal_task(args: Any) -> type:
    from extras.families.decoders.protein_lm import task_for

    return task_for(args)


def causal_arguments(tokenizer: str | None) -> type:
    from extras.families.decoders.protein_arguments import arguments_for

    return arguments_for(tokenizer)


def causal_words(words: list[str]) -> list[str]:
    from extras.families.decoders.causal_arguments import without_comments

    return without_comments(words)


def foreign_flag(word: str, task: str) -> str:
    from extras.migrate import hint, script_with

    return hint(word) or script_with(word.partition("=")[0], task)


def check_tokenizer(name: str) -> None:
    from extras.prepare import encode

    encode.check_tokenizer(name)


# ---- models ----


def families() -> dict[str, FamilyLine]:
    return {
        **dict.fromkeys(("llama", "mistral", "mixtral"), FamilyLine("extras.families.decoders.family")),
        "esmc": FamilyLine("extras.families.esmc.family", "biohub/ESMC-*-hf", "ESM C, the 300M if not named"),
        "amplify": FamilyLine("extras.families.amplify.family", "chandar-lab/AMPLIFY_*", "AMPLIFY, the 120M"),
        "e1": FamilyLine("extras.families.e1.family", "Profluent-Bio/E1-*", "E1, which reads homologs, the 150M"),
        "esm_sets": FamilyLine("extras.families.esm2_sets.family", "", "an ESM-2 that learns to read homologs"),
    }


def alphabets() -> dict[str, str]:
    return {
        "saprot": "extras.families.alphabets.saprot",
        "codon": "extras.families.alphabets.codon",
    }


def alphabet(described: Any, where: str) -> Any:
    from extras.families.alphabets.declared import open_alphabet

    return open_alphabet(described, where)


def esm2_layers(args: Any, config: Any, backend: str, gelu: str, world: Any, make: Any) -> tuple[Any, list]:
    from common.models.layers.backend import HF_BACKENDS

    remarks: list[str | None] = []
    if backend in HF_BACKENDS:
        import extras.interop.hf_backend

        remarks.append(extras.interop.hf_backend.check(args, world))
        make = partial(extras.interop.hf_backend.StockEsm, config, HF_BACKENDS[backend])
    if args.model.fused_gelu:
        import extras.speed.fused_gelu

        remarks.append(extras.speed.fused_gelu.check(args, config, gelu, world))
        make = partial(extras.speed.fused_gelu.with_fused_gelu, make)
    return make, remarks


def lora() -> Any:
    from extras.after.adapting import lora

    return lora


def recipe_config(content: dict) -> dict:
    from extras.nv_esm import stock_config

    return stock_config(content)


def recipe_pieces(tensors: Mapping[str, Any], config: Any, where: str) -> Any:
    from extras.nv_esm import pieces

    return pieces(tensors, config, where)


def recipe_checkpoint() -> Any:
    from extras.interop import recipe_checkpoint

    return recipe_checkpoint


# ---- data ----


def open_files(flags: Any, tokens: Any, world: Any, evaluate: bool, makers: dict) -> Any:
    if flags.dataset_mix:
        from extras.prepare.sources import mixture

        return mixture.open_mixture(flags, tokens, world, evaluate)
    from extras.prepare.sources import streamed_data

    return streamed_data.open_files(flags, tokens, world, evaluate, makers)


def weighted_clusters(clusters: Any, exponent: float) -> tuple[Any, str]:
    from extras.prepare.sources import weighted_clusters

    return weighted_clusters.weighted(clusters, exponent)


def check_sets(flags: Any, family: Any) -> None:
    from extras.prepare.sources import sets

    sets.check_flags(flags, family)


def set_plan(flags: Any, store: Any, directory: Path) -> tuple[Any, dict, str]:
    from extras.prepare.sources import sets

    return sets.set_plan(flags, store, directory)


def set_batches(collator: Any) -> Any:
    from extras.prepare.sources.sets import SetCollator

    return SetCollator(collator)


def chains() -> Any:
    from extras.prepare.sources import chains

    return chains


def with_homologs(task: Any) -> Any:
    from extras.families.sets.evaluation import WithHomologs

    return WithHomologs(task)


def check_diffusion(flags: Any) -> None:
    from extras.families.diffusion import masking

    masking.check_flags(flags)


def diffusion_batches(flags: Any, tokens: Any, mesh: Any, static_shape: bool) -> Any:
    from extras.families.diffusion import masking

    return masking.diffusion_batches(flags, tokens, mesh, static_shape)


def diffusion_predicted(flags: Any) -> float:
    from extras.families.diffusion.masking import SCHEDULES

    return SCHEDULES[flags.diffusion_schedule].mean_rate


def held_out_bound(task: Any) -> Any:
    from extras.families.diffusion.bound import HeldOutBound

    return HeldOutBound(task)


def untokenised(directory: Path, columns: Any = None) -> str:
    from extras.prepare.sources import saved_datasets

    columns = columns or saved_datasets.untokenised_columns(directory)
    return saved_datasets.as_parquet(directory, columns) if columns else ""


def make_sample(output_dir: Path) -> Path:
    from extras.prepare import sample

    return sample.make_sample(output_dir / sample.SAMPLE)


# ---- speed: kernels and optimisers ----


def attention_kernels() -> Any:
    from extras.speed import attention_kernels

    return attention_kernels


def create_cp_groups(world: Any, cp_size: int) -> None:
    from extras.speed import context_parallel

    context_parallel.create_cp_groups(world, cp_size)


def check_context(comm_type: str, layout: str, cp_size: int, backend: str, config: Any) -> None:
    from extras.speed import cp_model

    cp_model.check_context(comm_type, layout, cp_size, backend, config)


def context_parallel(model: Any, group: Any, comm_type: str) -> None:
    from extras.speed.cp_model import enable_context_parallel

    enable_context_parallel(model, group, comm_type)


def cp_batches(collator: Any, flags: Any, mesh: Any, pad: int, mask: int, filled_to: int, predicted: float) -> Any:
    from extras.speed import cp_batches

    return cp_batches.cp_batches(collator, flags, mesh, pad, mask, filled_to, predicted)


def cp_pack(batch: Any, device: Any) -> Any:
    from extras.speed import cp_batches

    return cp_batches.cp_pack(batch, device)


def offload_activations(layers: Any) -> None:
    from extras.speed import offload

    offload.offload_activations(layers)


def optimizer(name: str) -> Any:
    if name == "muon":
        from extras.speed.muon import Muon

        return Muon
    assert name == "triton_adamw", name
    from extras.speed.triton_adamw import TritonAdamW

    return TritonAdamW


def record_graphs(task: Any) -> None:
    from extras.speed.te_graphs import record_run

    record_run(task)


# ---- number formats below bf16, and their statistics ----


def fp8_formats() -> dict[str, str]:
    return {
        "delayed": "extras.formats.fp8_delayed",
        "current": "extras.formats.fp8_current",
        "block": "extras.formats.fp8_block",
        "mxfp8": "extras.formats.mxfp8",
    }


def fp4_formats() -> dict[str, str]:
    return {"e2m1": "extras.formats.nvfp4"}


def fp8_recipe(name: str) -> str:
    from extras.formats.plan import our_name

    return our_name(name)


def check_formats(flags: Any) -> None:
    from extras.formats.plan import recipes

    recipes(flags)


def choose_formats(flags: Any, config: Any, device: Any, backend: str, why: str, sharded: bool) -> Any:
    from extras.formats.build import choose_plan

    return choose_plan(flags, config, device, backend, why, sharded)


def te_statistics(flags: Any, plan: Any, world: Any, directory: Path | None) -> Any:
    from extras.formats.build import start_te_stats

    return start_te_stats(flags, plan, world, directory)


def set_formats(model: Any, plan: Any, flags: Any, seed: int, world: Any, te_stats: Any) -> Any:
    from extras.formats.build import set_formats

    return set_formats(model, plan, flags, seed, world, te_stats)


def check_statistics(file: str) -> None:
    from extras.formats.stats_plan import read_file

    read_file(file)


def statistics_file() -> str:
    from extras.formats.stats_plan import FILE

    return FILE


def statistics_scalars(rows: list[dict]) -> dict:
    from extras.formats.stats import scalars

    return scalars(rows)


# ---- tracker, downstream evaluation, plans ----


def open_tracker(flags: Any, config: dict, output_dir: Path, first_row: int | None, anew: bool) -> Any:
    import extras.publish.trackers

    return extras.publish.trackers.open_tracker(flags, config, output_dir, first_row, anew)


def downstream(task: Any) -> Any:
    from extras.after.downstream.during_training import Downstream

    return Downstream(task)


def dry_run(args: Any, build: Any) -> None:
    from extras.plan.dry_run import dry_run

    dry_run.dry_run(args, build)


def largest_pack(args: Any, build: Any) -> Any:
    from extras.plan.dry_run.auto_pack import largest_that_fits

    return largest_that_fits(args, build)


def find_learning_rate(args: Any, build: Any, world: Any) -> None:
    from extras.plan.find_learning_rate import search

    search.find_learning_rate(args, build, world)


# ---- export, and checkpoints of other forms ----


def memory_checkpoints(world: Any) -> Any:
    from extras.launch.memory_checkpoints import MemoryCheckpoints

    return MemoryCheckpoints(world)


def add_model(checkpoint: Path, tokenizer: Any) -> None:
    import extras.export

    extras.export.add_model(checkpoint, tokenizer)


def read_checkpoint(directory: Path, config: Any) -> tuple[Any, dict]:
    import extras.export

    return extras.export.read_checkpoint(directory, config)


def earlier_checkpoint(path: Path, sizes: dict[str, int]) -> Any:
    from extras.interop.checkpoint_format_1 import EarlierReader

    return EarlierReader(path, sizes)


def check_push(name: str) -> None:
    import extras.publish.push_to_hub

    extras.publish.push_to_hub.check_push(name)


def push(directory: Path, name: str) -> None:
    import extras.publish.push_to_hub

    extras.publish.push_to_hub.push(directory, name)
