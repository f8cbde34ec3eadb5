"""Tests that only `./test.sh --slow` runs, beside those marked `soak`: a third of the suite's CPU time.

What they show holds in a faster test too, of another row of the same table or of a smaller run: that one notices a
fault in the code that they share. Run them before a release, and after a change of what they are about.
"""

SLOW = {
    "benchmarks/test_candidates.py": ("test_changes_together_train",),
    "data/test_packing.py": ("test_plan_of_69_million_records",),
    "distributed/test_signals.py": ("test_stop_of_one_rank_stops_all_at_the_same_step[0]",),
    "extras/decoders/test_model.py": ("test_decoder_compiled_layers_agree[mistral_8x7b]",),
    "extras/downstream/test_probes.py": ("test_probe_clusters_by_mmseqs",),
    "extras/dry_run/test_dry_run.py": (
        "test_dry_run_peak_is_that_of_a_real_run[train_fsdp2.py-4-num_hidden_layers=2,hidden_size=240,num_attention_heads=10,intermediate_size=960-flags3]",
        "test_dry_run_peak_is_that_of_a_real_run[train_fsdp2.py-2-None-flags6]",
        "test_dry_run_fits_the_guides_layout_of_llama_8b",
        "test_dry_run_subtracts_recomputed_and_offloaded_activations",
    ),
    "extras/dry_run/test_dry_run_mfsdp.py": (
        "test_dry_run_peak_is_that_of_a_real_run[optim_grads_params]",
        "test_dry_run_peak_is_that_of_a_real_run[optim]",
        "test_dry_run_peak_is_that_of_a_real_run[llama]",
        "test_dry_run_peak_is_that_of_a_real_run[no_shard]",
        "test_dry_run_bytes_per_parameter_are_the_documented_ones[optim-0.25-0.5-4]",
        "test_dry_run_bytes_per_parameter_are_the_documented_ones[optim_grads-0.25-0.5-0.25]",
    ),
    "extras/esmc/test_model.py": (
        "test_esmc_every_size_equals_reference[biohub/ESMC-600M-hf]",
        "test_esmc_every_size_equals_reference[biohub/ESMC-6B-hf]",
        "test_esmc_layer_compiles_to_one_graph[selective-False]",
    ),
    "extras/find_learning_rate/test_search.py": (
        "test_search_on_two_ranks_is_that_of_one[train_fsdp2.py-more1]",
        "test_search_on_two_ranks_is_that_of_one[train_mfsdp.py-more2]",
        "test_search_on_two_ranks_is_that_of_one[train_ddp_cp.py-more3]",
        "test_search_of_a_decoder",
    ),
    "extras/monitor/test_replicas.py": ("test_replicas_check_names_ranks_that_diverge[hsdp]",),
    "extras/monitor/test_step_monitor.py": (
        "test_stragglers_name_the_slow_rank[hsdp]",
        "test_stragglers_name_the_slow_rank[mfsdp]",
    ),
    "extras/preflight/test_preflight.py": ("test_preflight_reports_clock_skew",),
    "extras/prepare/test_download_killed.py": ("test_download_data_resumes_after_a_kill_anywhere[through files]",),
    "extras/prepare/test_mmseqs.py": ("test_mmseqs_holds_out_whole_families",),
    "extras/prepare/test_shuffle.py": ("test_shuffle_order_is_independent_of_memory[400-500]",),
    "extras/prepare/test_tokenize_faults.py": ("test_tokenize_resumes_after_a_kill_anywhere[10-flags2]",),
    "models/test_context_attention.py": ("test_context_attention_equals_single_process[4-1]",),
    "models/test_lowered_cpu.py": ("test_cpu_without_bf16_instructions_computes_the_same[AVX2]",),
    "models/test_model.py": (
        "test_esm2_every_size_equals_reference[facebook/esm2_t48_15B_UR50D]",
        "test_esm2_every_size_equals_reference[facebook/esm2_t36_3B_UR50D]",
        "test_esm2_layer_compiles_to_one_graph[full-torch.bfloat16]",
    ),
    "ops/test_kubernetes_run.py": (
        "test_preflight_stops_a_pod_without_data[trainjob-template.yaml]",
        "test_pods_resume_after_killed_rank_and_deleted_pod",
        "test_guide_pods_of_a_decoder_train_and_log_master_addr",
        "test_pod_preflight_of_all_nodes",
    ),
    "ops/test_push.py": ("test_push_keeps_an_immutable_tag",),
    "ops/test_render_fuzz.py": ("test_render_keeps_or_refuses_any_value",),
    "precision/test_emulation.py": (
        "test_emulated_run_of_every_layout_equals_one_process[delayed]",
        "test_emulated_run_of_every_layout_equals_one_process[block]",
        "test_emulated_compiled_layers_take_the_same_steps[delayed-more0]",
    ),
    "precision/test_stats.py": ("test_stats_log_is_independent_of_strategy_and_ranks[mixed]",),
    "te_on_cpu/test_gpu_files.py": ("test_gpu_files_pass_over_the_stand_in[9.0]",),
    "te_on_cpu/test_runs.py": (
        "test_run_trains_like_bf16_up_to_the_formats[current, DDP, statistics]",
        "test_run_trains_like_bf16_up_to_the_formats[block, DDP, statistics]",
        "test_run_trains_like_bf16_up_to_the_formats[block, FSDP2, recomputed]",
        "test_run_trains_like_bf16_up_to_the_formats[delayed, FSDP2, recomputed]",
        "test_run_trains_like_bf16_up_to_the_formats[mxfp8, DDP, statistics]",
        "test_run_trains_like_bf16_up_to_the_formats[nvfp4, FSDP2, recomputed]",
        "test_run_trains_like_bf16_up_to_the_formats[current, FP8 weights]",
        "test_run_trains_like_bf16_up_to_the_formats[block, FP8 weights]",
        "test_run_resumes_bit_exactly[current]",
        "test_run_resumes_bit_exactly[block]",
        "test_run_resumes_bit_exactly[mxfp8]",
    ),
    "training/test_batch_ramp.py": (
        "test_ramp_on_two_ranks_equals_one[train_fsdp2.py-flags1]",
        "test_ramp_on_two_ranks_equals_one[train_mfsdp.py-flags2]",
    ),
    "training/test_checkpoint_faults.py": ("test_checkpoint_full_disk_keeps_earlier_ones[True-2-train_fsdp2.py]",),
    "training/test_compiled_graphs.py": (
        "test_compiled_layer_is_one_graph_on_two_ranks[train_ddp_cp.py-flags1]",
        "test_compiled_layer_is_one_graph_on_two_ranks[train_mfsdp.py-flags4]",
    ),
    "training/test_context_parallel.py": (
        "test_cp_run_equals_one_process[ddp]",
        "test_cp_run_equals_one_process[contiguous]",
        "test_cp_run_equals_one_process[hybrid]",
        "test_cp_run_equals_one_process[fsdp2]",
    ),
    "training/test_decoder_flags.py": (
        "test_decoder_commands_of_guides_train[mistral_8x7b]",
        "test_decoder_commands_of_guides_train[mathstral_7b]",
    ),
    "training/test_decoders.py": (
        "test_decoder_with_muon_equals_one_process[llama]",
        "test_decoder_learns_more_than_frequencies",
        "test_decoder_resume_after_stop_is_bit_identical",
    ),
    "training/test_fsdp2.py": (
        "test_fsdp2_every_layout_equals_one_process[2-flags2]",
        "test_fsdp2_every_layout_equals_one_process[2-flags4]",
        "test_fsdp2_every_layout_equals_one_process[4-flags7]",
        "test_fsdp2_compiled_layers_take_the_same_steps",
    ),
    "training/test_fsdp2_faults.py": ("test_fsdp2_resume_skips_and_names_damaged_checkpoints",),
    "training/test_last_step.py": (
        "test_last_step_is_independent_of_ranks_and_workers[padded-3-flags2]",
        "test_last_step_is_independent_of_ranks_and_workers[packed-2-flags3]",
        "test_empty_pack_adds_no_gradient[bf16, recomputed]",
        "test_empty_pack_adds_no_gradient[recomputed]",
    ),
    "training/test_mfsdp.py": (
        "test_mfsdp_every_strategy_equals_one_process_and_fsdp2[optim_grads]",
        "test_mfsdp_every_strategy_equals_one_process_and_fsdp2[optim]",
        "test_mfsdp_every_strategy_equals_one_process_and_fsdp2[no_shard]",
        "test_mfsdp_bf16_equals_fsdp2[three]",
        "test_mfsdp_checkpoint_of_any_strategy_resumes_on_any_other",
    ),
    "training/test_muon.py": (
        "test_muon_every_strategy_equals_one_process[2-flags0]",
        "test_muon_every_strategy_equals_one_process[3-flags4]",
        "test_muon_every_strategy_equals_one_process[2-flags7]",
        "test_muon_every_strategy_equals_one_process[2-flags9]",
        "test_muon_resume_after_kill_is_same_run[3-train_fsdp2.py]",
        "test_muon_resume_after_kill_is_same_run[2-train_mfsdp.py]",
        "test_muon_more_ranks_than_matrices_and_rows",
        "test_muon_checkpoint_of_any_strategy_resumes_on_any_other",
    ),
    "training/test_skipped_steps.py": (
        "test_nan_step_is_skipped_and_counted[2-1-train_fsdp2.py]",
        "test_nan_step_is_skipped_and_counted[2-1-train_mfsdp.py]",
    ),
    "training/test_train_ddp.py": ("test_ddp_guides_command_runs_under_torchrun",),
}
NODE_IDS = {f"tests/{file}::{test}" for file, tests in SLOW.items() for test in tests}
