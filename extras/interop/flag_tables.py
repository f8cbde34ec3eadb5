"""Flags of others, and ours in their place: NVIDIA's recipe, accelerate, transformers' Trainer, earlier versions.

extras/migrate.py reads it, for the error of an unknown flag and to translate commands; docs/flags.md shows it.
The FSDP guides' own arguments are not here: the scripts take them as they are
(extras/families/decoders/causal_arguments.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ours:
    """What is here in place of another program's flag.

    flag: ours, or several separated by blanks that share a list; empty: none. why: what differs, or why there is none.
    values: {their value in lower case: our words}; any other value stays as it is. convert: their value as ours. also:
    further words that their value asks for.
    """

    flag: str = ""
    why: str = ""
    values: dict[str, str] = field(default_factory=dict)
    convert: Callable[[str], str] = str
    also: Callable[[str], list[str]] = lambda value: []

    def words(self, value: str) -> list[str]:
        """Our words for their value; none if our default says the same."""
        if value.lower() in self.values:
            return self.values[value.lower()].split()
        if not self.flag or value.lower() in ("null", "none", "???", ""):
            return []
        if value.lower() == "true":
            return [f"--{self.flag}"]
        names = self.flag.split()
        parts = [value] if len(names) == 1 else unlisted(value).split(",")
        flags = [f"--{name}={self.convert(part.strip())}" for name, part in zip(names, parts, strict=False)]
        return flags + self.also(value)


@dataclass(frozen=True)
class OfJson(Ours):
    """A flag whose value is a JSON object of numbers. keys: {its key: our flag}; other keys have none."""

    keys: dict[str, str] = field(default_factory=dict)

    def words(self, value: str) -> list[str]:
        try:
            content = json.loads(value)
        except ValueError:
            return []
        entries = content.items() if isinstance(content, dict) else ()
        numbers = ((key, entry) for key, entry in entries if isinstance(entry, int | float))
        return [f"--{self.keys[key]}={entry}" for key, entry in numbers if key in self.keys]


def unlisted(value: str) -> str:
    """1,2,3 of [1,2,3]."""
    return value.strip().strip("[]()").replace(" ", "")


def number(value: str) -> str:
    """20000 of hydra's 20_000."""
    return value.replace("_", "")


def facebook(value: str) -> str:
    """The same model under ESM-2's own name."""
    return re.sub(r"^nvidia/(?=esm2_)", "facebook/", value)


def as_json(value: str) -> str:
    """{"margin": 0} of hydra's {margin:0}."""
    return re.sub(r"""["']?(\w+)["']?\s*:\s*""", r'"\1": ', value)


def overrides(value: str) -> str:
    """hidden_size=64,... of hydra's {hidden_size:64,...}."""
    return re.sub(r"\s*:\s*", "=", value.strip("{}")).replace(" ", "")


def none(why: str, *names: str) -> dict[str, Ours]:
    """Rows of flags that have no counterpart, for one reason."""
    return dict.fromkeys(names, Ours(why=why))


MFSDP = "of train_mfsdp.py"
NO_REMOTE = "none: models, data and tokenizers are data, and run no code"
CHECKPOINTS = "none: a checkpoint holds all of a run's state, always"
PADDING = "none: packs are filled up to what the format asks for"
PACKS = "on by default, but for configs/sanity.yaml"
MODEL = Ours(
    "config_name",
    "nvidia/esm2_* is the same model as facebook/esm2_*, which runs transformers' own layers there",
    convert=facebook,
    also=lambda value: ["--backend=hf"] if value.startswith("facebook/esm2_") else [],
)
# hydra keys of NVIDIA's recipe, as its files and README have had them.
RECIPE = {
    **dict.fromkeys(("config_name_or_path", "model_tag"), MODEL),
    "use_te": Ours(
        "backend", "hf: transformers' own; auto: te if possible", {"true": "--backend=te", "false": "--backend=hf"}
    ),
    "attn_backend": Ours(why="none: follows from --backend and the device"),
    "config_kwargs": Ours("config_overrides", convert=overrides),
    "num_train_steps": Ours(
        "max_steps", "the schedule ends there too; --stop_at_step ends a run before its schedule", convert=number
    ),
    "grad_acc_steps": Ours("gradient_accumulation_steps"),
    "use_meta_device": Ours(
        why="none: sharded weights are made shard by shard, and are the same on any number of ranks"
    ),
    "use_torch_compile": Ours("torch_compile"),
    "cp_size": Ours("cp_size"),
    **dict.fromkeys(
        ("use_sequence_packing", "dataset.use_sequence_packing"),
        Ours("sequence_packing", PACKS, {"false": "--sequence_packing=False"}),
    ),
    "use_fp32_master_weights": Ours(
        "param_dtype", "of train_fsdp2.py; fp32 by default here", {"true": "", "false": "--param_dtype=bf16"}
    ),
    "log_mfu": Ours(why="none: each line has tflops, and mfu on a GPU whose peak is known"),
    "bf16_baseline_file": Ours(why="none: metrics.jsonl has loss, perplexity and tokens/s of each logged step"),
    "fp8_layers": Ours("fp8_layers", convert=unlisted),
    "fp4_layers": Ours("fp4_layers", convert=unlisted),
    "dataset.tokenizer_name": Ours("tokenizer_name", "the vocabulary is always ESM-2's", convert=facebook),
    "dataset.micro_batch_size": Ours("per_device_train_batch_size"),
    "dataset.token_micro_batch_size": Ours("tokens_per_pack"),
    "dataset.num_workers": Ours("dataloader_num_workers"),
    "dataset.max_seq_length": Ours("max_seq_length"),
    "dataset.mlm_probability": Ours("mlm_probability"),
    "dataset.pad_sequences_to_be_divisible_by": Ours("pad_sequences_to_be_divisible_by", "goes with --cp_size"),
    "dataset.sequence_packing_pad_to_multiple_of": Ours(why=PADDING),
    "dataset.use_stateful_dataloader": Ours(
        why="none: the order is a function of seed and step, and resumes anywhere"
    ),
    "dataset.path": Ours("dataset"),
    "dataset.load_dataset_kwargs.path": Ours("dataset", values={"parquet": "", "json": "", "csv": "", "text": ""}),
    "dataset.load_dataset_kwargs.data_files": Ours("dataset"),
    "dataset.load_dataset_kwargs.split": Ours(why="none: trains on the split train"),
    "dataset.load_dataset_kwargs.streaming": Ours("streaming", "of a data set on the Hub"),
    "wandb_init_args.name": Ours("run_name", "with --report_to wandb"),
    **none(
        "WANDB_PROJECT, WANDB_MODE, WANDB_DIR in the environment, with --report_to wandb",
        *(f"wandb_init_args.{name}" for name in ("project", "mode", "dir")),
    ),
    **{
        f"fully_shard_kwargs.{name}": Ours(name, MFSDP)
        for name in (
            *("zero_dp_strategy", "calculate_per_token_loss", "init_model_with_meta_device", "check_for_nan_in_grad"),
            *("grad_reduce_in_fp32", "preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather"),
            *("sync_model_each_microbatch", "average_in_collective"),
        )
    },
    "fp8_config.enabled": Ours("fp8"),
    "fp8_config.fp8_recipe": Ours("fp8_recipe"),
    "fp8_config.fp8_format": Ours("fp8_format"),
    "fp8_config.fp8_recipe_kwargs": Ours("fp8_recipe_kwargs", convert=as_json),
    "fp8_config.fp8_model_init_kwargs.enabled": Ours("fp8_params", "fp32 master weights stay"),
    "fp8_config.quantized_model_init_kwargs.enabled": Ours("fp8_params", "fp32 master weights stay"),
    "fp4_config.enabled": Ours("fp4"),
    "fp4_config.fp4_recipe": Ours(why="none: NVFP4BlockScaling is the only one"),
    "fp4_config.fp4_format": Ours("fp4_format"),
    "fp4_config.fp4_recipe_kwargs": Ours("fp4_recipe_kwargs", convert=as_json),
    "adamw_kwargs.lr": Ours("learning_rate"),
    "adamw_kwargs.betas": Ours("adam_beta1 adam_beta2"),
    "adamw_kwargs.eps": Ours("adam_epsilon"),
    "adamw_kwargs.weight_decay": Ours("weight_decay", "never on biases and norms here"),
    "adamw_kwargs.fused": Ours(why="none: always fused"),
    "lr_scheduler_kwargs.num_warmup_steps": Ours("warmup_steps", convert=number),
    "lr_scheduler_kwargs.num_training_steps": Ours(
        "max_steps", "with --stop_at_step for num_train_steps", convert=number
    ),
    "checkpoint.ckpt_dir": Ours("output_dir"),
    "checkpoint.save_every_n_steps": Ours("save_steps", convert=number),
    "checkpoint.max_checkpoints": Ours("save_total_limit"),
    "checkpoint.async_save": Ours("async_save"),
    "checkpoint.save_final_model": Ours("save_final_model", "on by default once all steps are done"),
    "checkpoint.resume_from_checkpoint": Ours(
        "resume_from_checkpoint",
        "a run resumes from its --output_dir by default",
        {"true": "", "false": "--resume_from_checkpoint=false"},
    ),
    "checkpoint.use_distributed_checkpoint_fsdp2": Ours(why="none: checkpoints are always distributed"),
    "logger.frequency": Ours("logging_steps"),
    "quant_stats_config.enabled": Ours("quant_stats"),
    "quant_stats_config.quant_stats_file": Ours("quant_stats_file"),
    "quant_stats_config.quant_log_dir": Ours("quant_stats_dir"),
    "quant_stats_config.log_to_wandb": Ours(why="none: --report_to wandb gets the statistics too"),
    **none(
        "--profile_steps A-B: torch's profiler, a trace of each rank",
        *(f"nsys_profiling.{name}" for name in ("enabled", "start_step", "end_step", "ranks")),
    ),
    "hydra.verbose": Ours(
        why="none: there are no debug lines; metrics.jsonl has each logged step (--logging_steps 1: all), TRACEBACK=1 "
        "in the environment gives an error's full stack, NCCL_DEBUG=INFO NCCL's log"
    ),
    "hydra.run.dir": Ours(why="none: results go to --output_dir"),
}
# Keys of these groups are fields of an object, which is the value of one flag.
RECIPE_OBJECTS = {
    "config_kwargs": "config_overrides",
    "fp8_config.fp8_recipe_kwargs": "fp8_recipe_kwargs",
    "fp4_config.fp4_recipe_kwargs": "fp4_recipe_kwargs",
}

# Flags of `accelerate launch`, and torchrun's in their place.
TORCHRUN = {
    "num_processes": "nproc_per_node",  # of all machines there, of one here
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "rdzv_backend": "rdzv_backend",
    "rdzv_conf": "rdzv_conf",
    "max_restarts": "max_restarts",
    "monitor_interval": "monitor_interval",
    "role": "role",
    "tee": "tee",
}
SHARDED = "use train_fsdp2.py"
ACCELERATE = {
    **{name: Ours(why=f"torchrun's --{theirs}, before the script") for name, theirs in TORCHRUN.items()},
    "use_fsdp": Ours(why=SHARDED),
    "fsdp_version": Ours(why=f"{SHARDED}: always FSDP2"),
    "fsdp_sharding_strategy": Ours(
        "sharding_strategy",
        "of train_fsdp2.py",
        {
            **dict.fromkeys(("full_shard", "1"), "--sharding_strategy=full"),
            **dict.fromkeys(("shard_grad_op", "2"), "--sharding_strategy=grad_op"),
            **dict.fromkeys(("hybrid_shard", "4"), "--sharding_strategy=hybrid"),
        },
    ),
    "fsdp_reshard_after_forward": Ours(
        "sharding_strategy",
        "of train_fsdp2.py",
        {"true": "", "full_shard": "", **dict.fromkeys(("false", "shard_grad_op"), "--sharding_strategy=grad_op")},
    ),
    "fsdp_offload_params": Ours("cpu_offload", "of train_fsdp2.py", {"false": ""}),
    "fsdp_activation_checkpointing": Ours(
        "activation_checkpointing", "of train_fsdp2.py", {"true": "--activation_checkpointing=full", "false": ""}
    ),
    "fsdp_forward_prefetch": Ours("forward_prefetch", "of train_fsdp2.py; on by default", {"true": "", "false": ""}),
    "fsdp_backward_prefetch": Ours(why="none: FSDP2 always prefetches in the backward pass"),
    **none(
        f"{SHARDED}: it shards layer by layer",
        *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"),
    ),
    **none(
        "none: FSDP2 always does (weights are made shard by shard, and keep their names)",
        *("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_use_orig_params"),
    ),
    "fsdp_state_dict_type": Ours(why="none: checkpoints are sharded, and load on any number of ranks"),
    "mixed_precision": Ours("bf16", "no FP16", {"no": "", "bf16": "--bf16", "fp16": "--bf16", "fp8": "--bf16 --fp8"}),
    "dynamo_backend": Ours("torch_compile", "", {"no": "--torch_compile=False", "inductor": "--torch_compile"}),
    "cpu": Ours("use_cpu"),
    "multi_gpu": Ours(why="none: torchrun starts a rank on each GPU"),
    "gpu_ids": Ours(why="CUDA_VISIBLE_DEVICES in the environment"),
    "config_file": Ours(why="none: a file of accelerate's: give its flags"),
    "num_cpu_threads_per_process": Ours(why="OMP_NUM_THREADS in the environment"),
    "same_network": Ours(why="none: torchrun's --rdzv_endpoint says where ranks meet"),
    "gradient_clipping": Ours("max_grad_norm"),
    **none("use train_fsdp2.py, or train_mfsdp.py", "use_deepspeed", "use_megatron_lm", "zero_stage"),
}

HUB = "none: final_model/ is what `hf upload` takes"
LOOP = "none: as this training loop needs it"
# Flags of transformers' TrainingArguments, run_mlm.py and run_clm.py that these scripts lack.
TRANSFORMERS = {
    "dataset_name": Ours("dataset"),
    "train_file": Ours("dataset"),
    "validation_file": Ours("eval_dataset"),
    "dataset_config_name": Ours(why="none for proteins; a flag of decoders (--task clm)"),
    "block_size": Ours("max_seq_length"),
    "model_type": Ours(
        why="none for ESM-2: --config_name chooses; here of another encoder, or of a decoder (--task clm)"
    ),
    "warmup_ratio": Ours("warmup_steps", "below 1: a fraction of the run"),
    "fp16": Ours("bf16", "no FP16: BF16 needs no loss scaling", {"true": "--bf16", "false": ""}),
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        Ours(
            "bf16",
            "weights stay fp32",
            {
                **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf16", "float16", "torch.float16"), "--bf16"),
                **dict.fromkeys(("auto", "float32", "torch.float32"), ""),
            },
        ),
    ),
    "full_determinism": Ours("deterministic"),
    "data_seed": Ours("seed", "a run is a function of data, flags and seed"),
    "no_cuda": Ours("use_cpu"),
    "save_strategy": Ours(
        "save_steps", "by --save_steps alone", {"steps": "", "epoch": "", "no": "--save_steps=1000000000"}
    ),
    "eval_strategy": Ours(
        "eval_steps", "by --eval_steps alone", {"steps": "--do_eval", "epoch": "--do_eval", "no": ""}
    ),
    "evaluation_strategy": Ours(
        "eval_steps", "by --eval_steps alone", {"steps": "--do_eval", "epoch": "--do_eval", "no": ""}
    ),
    "logging_strategy": Ours("logging_steps", "by --logging_steps alone", dict.fromkeys(("steps", "epoch", "no"), "")),
    "fsdp": Ours(why=SHARDED),
    "fsdp_config": Ours(why=f"{SHARDED}, and its flags"),
    "deepspeed": Ours(why="use train_fsdp2.py, or train_mfsdp.py"),
    "parallelism_config": Ours(why="use train_fsdp2.py, with --cp_size for long sequences"),
    "accelerator_config": Ours(why="none: there is no accelerate here"),
    "gradient_checkpointing_kwargs": Ours(
        why="none: train_fsdp2.py --activation_checkpointing chooses what to recompute"
    ),
    "token": Ours(why="HF_TOKEN in the environment"),
    "cache_dir": Ours(why="HF_HOME in the environment"),
    "local_rank": Ours(why="none: torchrun sets LOCAL_RANK"),
    "trust_remote_code": Ours(why=NO_REMOTE),
    "use_fast_tokenizer": Ours(why="none: the alphabet is built in"),
    "overwrite_cache": Ours(why="none: step 1 redoes what its input or flags change"),
    **none("none: packs leave no padding to save", "train_sampling_strategy", "group_by_length", "length_column_name"),
    "validation_split_percentage": Ours(why="none: step 1 makes the splits (1.tokenize_uniref_csv.py)"),
    "lr_scheduler_kwargs": OfJson(
        "min_lr_rate lr_decay_steps",
        "of its min_lr_rate, min_lr_ratio and num_decay_steps; wsd falls linearly here",
        keys={"min_lr_rate": "min_lr_rate", "min_lr_ratio": "min_lr_rate", "num_decay_steps": "lr_decay_steps"},
    ),
    "logging_dir": Ours(why="none: --report_to tensorboard writes into --output_dir"),
    **none("those of 1.tokenize_uniref_csv.py", "preprocessing_num_workers", "line_by_line"),
    **none(
        CHECKPOINTS,
        *("restore_callback_states_from_checkpoint", "ignore_data_skip", "save_only_model", "enable_jit_checkpoint"),
    ),
    **none(
        HUB,
        *("push_to_hub", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        *("hub_revision", "model_revision"),
    ),
    **none("none: --optim has no other settings", "optim_args", "optim_target_modules"),
    "save_on_each_node": Ours(why="none: all nodes share --output_dir"),
    **none(
        LOOP,
        *("ddp_backend", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph"),
        *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
        *("dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
        *("remove_unused_columns", "torch_empty_cache_steps", "low_cpu_mem_usage"),
        *("average_tokens_across_devices", "use_cache", "debug", "torch_compile_backend", "torch_compile_mode"),
    ),
    **none("none: when memory runs out, the error names what to lower", "auto_find_batch_size"),
    **none(
        "none: an evaluation is loss and accuracy over masked residues, summed over batches and ranks",
        *("batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps", "eval_delay"),
        *("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics", "prediction_loss_only"),
        *("label_names", "do_predict"),
    ),
    **none("none: less is better of a loss or a perplexity, more of the others", "greater_is_better"),
    **none("none: --early_stopping_patience counts any gain as better", "early_stopping_threshold"),
    **none("none: plain cross-entropy, as ESM-2 was trained", "label_smoothing_factor", "neftune_noise_alpha"),
    **none("none: Transformer Engine has fused layers (--backend te)", "use_liger_kernel", "liger_kernel_config"),
    **none(
        "none: rank 0 logs every --logging_steps steps, with tokens and memory; steps with NaN are skipped",
        *("log_level", "log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter"),
        *("skip_memory_metrics", "include_num_input_tokens_seen"),
    ),
    **none(
        "none: --report_to tensorboard or wandb",
        "project",
        "trackio_bucket_id",
        "trackio_space_id",
        "trackio_static_space_id",
    ),
}
# Defaults of transformers' TrainingArguments that change what is learnt, where ours differ.
TRAINER_DEFAULTS = {
    "learning_rate": "5e-05",
    "lr_scheduler_type": "linear",
    "warmup_steps": "0",
    "adam_beta2": "0.999",
    "weight_decay": "0.0",
}
# Besides, where a decoder's run (--task clm) has the FSDP guides' defaults; block_size of run_clm.py.
CLM_DEFAULTS = {
    "min_lr": "0.0",
    "seed": "42",
    "bf16": "False",
    "per_device_train_batch_size": "8",
    "per_device_eval_batch_size": "8",
    "max_seq_length": "1024",
}
EARLIER = {
    "flash_attention": Ours("attention", "its name until 0.5", {f"fa{n}": f"--attention=flash{n}" for n in (2, 3, 4)})
}

PROGRAMS = {"NVIDIA's recipe": RECIPE, "accelerate launch": ACCELERATE, "transformers": TRANSFORMERS}
PROGRAMS |= {"earlier versions": EARLIER}
