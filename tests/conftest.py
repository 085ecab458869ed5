"""Knows what the whole test suite shares: threads per process, where a GPU test can run, and what begins first."""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

# Tests start worlds of several processes on few cores; one thread each is fastest, and makes sums repeat exactly.
# Set before torch is imported, and inherited by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with Ctrl-C ignored, and tests send one to the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collecting tests imports torch and transformers, and nothing of them is garbage.
gc.disable()

# The files that take longest, in order: begun last, one would leave every worker but its own without work.
LONGEST = (
    "train_cli", "plan", "goldens", "terminals", "hf", "samples", "checkpoint", "families", "sweep", "verify", "images",
    "parity", "deepspeed", "checkpoints", "analysis_report",
    "evaluate", "roll_call", "schedule", "architecture", "hostile_files", "rank_launcher", "adapters", "saving",
    "windows", "integrations_trl", "benchmark_step", "refusals", "weights", "plan_steps", "tiled", "layer_costs",
    "faults", "token_cache", "analysis_curves", "documents", "slurm", "output_directory", "schedule_time",
    "attention", "happens_before", "loss", "halo", "merge", "content", "kernels", "errors", "packing",
)  # fmt: skip

# Tests, and cases of tests, that take longest. Only `make test-all` runs them, beside those marked slow. Most differ
# little from a case that stays.
SLOW = (
    "faults::test_a_run_that_loses_a_rank_resumes_to_the_result_of_one_that_does_not[1]",
    "refusals::test_the_launcher_shows_the_line_of_its_workers_once[1]",
    "plan::test_a_kernel_without_windows_is_refused_for_a_model_that_has_them",
    "plan::test_every_suggestion_makes_the_run_fit",
    "parity::test_several_steps_equal_one_process[4]",
    "benchmark_attention::test_the_program_alone_refuses_in_one_line_and_exits_2",
    "benchmark_attention::test_a_run_on_two_ranks_records_every_point_under_a_header",
    "token_cache::test_steps_without_a_target_are_counted_and_no_part_of_the_loss",
    "packing::test_packed_documents_in_a_loop_have_the_loss_and_gradients_of_each_alone[4]",
    "packing::test_a_compiled_layer_is_not_compiled_again_for_other_documents",
    "stored_buffers::test_buffers_are_loaded_trained_with_saved_and_restored[2-1]",
    "offload::test_attention_outputs_are_offloaded_too",
    "hf::test_a_whole_model_may_be_compiled",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[full-8-techniques3]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[attention-5-techniques3]",
    "hf::test_right_padding_equals_plain_transformers[4]",
    "hf::test_scaled_rotary_positions_equal_one_process[1]",
    "projections::test_stored_products_are_not_computed_again[True-3]",
    "sweep::test_cells_at_once_share_no_gpu",
    "sweep::test_a_stopped_sweep_leaves_no_process_and_continues[2]",
    "plan_training::test_keeping_gathered_weights_changes_no_loss_evaluation_or_weight[2]",
    "plan_documents::test_plan_prints_and_records_the_documents_of_the_data",
    "attention::test_output_and_gradients_equal_whole_sequence_attention[4]",
    "tiled::test_layers_share_what_is_compiled",
    "tiled::test_the_backward_pass_of_grouped_layers_holds_the_planned_bytes[False]",
    "adapters::test_layers_with_adapters_compile_alike_and_give_the_same_gradients[attention]",
    "log_probs::test_losses_of_log_probs_equal_one_process_under_fsdp[2]",
    "watchdog::test_the_rank_that_others_wait_for_is_named_and_all_end[dies-no sign of life from rank 1 on]",
    "train_cli::test_a_run_is_watched_from_its_start_and_may_take_its_time_until_its_first_step",
    "train_cli::test_a_run_resumes_into_another_directory",
    "train_cli::test_the_checkpoint_of_the_lowest_evaluation_loss_is_kept_besides_the_newest",
    "train_cli::test_a_run_that_its_launcher_restarts_resumes",
    "train_cli::test_a_checkpoint_is_the_trained_model[llama2-programs---sequence_parallel_size 1]",
    "train_cli::test_a_model_is_evaluated_after_every_epoch",
    "integrations_trainer::test_a_resumed_run_equals_an_uninterrupted_one[FullyShardedTrainer-False]",
    "integrations_trainer::test_recomputed_layers_repeat_their_dropout",
    "buckets::test_a_resumed_run_goes_on_with_the_next_row_to_the_bit",
    "roll_call::test_a_slow_rank_is_waited_for_with_a_warning",
    "analysis_report::test_without_the_extra_only_the_page_is_refused[plotly]",
    "analysis_report::test_another_page_is_not_replaced",
    "evaluate::test_a_limit_equals_a_file_that_is_cut_to_it[none]",
    "documents::test_packed_documents_equal_each_one_alone[4]",
    "happens_before::test_recordings_are_in_order_with_all_others[_ReplaysSome]",
    "errors::test_running_out_of_memory_ends_with_the_breakdown_and_a_remedy[trainer.Trainer.step-2]",
    "presets::test_scaled_models_have_any_size[scaled-n_layers-24-shape2-48185937920]",
    "data_gen::test_the_standard_library_is_read_without_its_tests",
    "packaging::test_an_extra_is_added_without_replacing_the_clone",
    "plan::test_notes_name_what_a_plan_assumes[--bf16 False --kernel reference-reference kernel-True]",
    "plan::test_the_record_and_the_table_name_the_layers_with_state_on_the_gpu",
    "mlp::test_a_checkpoint_that_keeps_gate_and_up_makes_neither_again[5-True]",
    "softcap::test_a_compiled_layer_caps_its_scores",
    "attention::test_bfloat16_error_does_not_grow_with_the_ring",
    "sweep::test_a_cell_is_done_only_with_all_steps_of_the_same_flags",
    "sweep::test_the_files_of_a_cell_replace_a_garbled_record",
    "train_cli::test_a_resumed_run_equals_one_that_never_stopped[--fp16]",
    "train_cli::test_copies_sum_their_gradients_once_an_update",
    "hf::test_a_compiled_layer_runs_attention_once[aot_eager]",
    "toy_schedule::test_a_schedule_of_ten_lines_trains[4]",
    "host_calls::test_a_layer_asks_little_of_the_host[prefix-4]",
    "happens_before::test_exchanges_between_ranks_are_ordered_on_every_stream",
    "tiled::test_bfloat16_errs_at_most_twice_as_much_as_whole_layers[cpu-False]",
    "host_adamw::test_updates_in_pieces_equal_updates_of_the_whole[1024]",
    "schedule_time::test_the_load_equals_the_table[8-32]",
    "watchdog::test_the_rank_that_others_wait_for_is_named_and_all_end[freezes-no sign of life from rank 1 on]",
    "checkpoint::test_random_states_resume",
    "buckets::test_texts_that_are_tokenised_on_access_make_short_batches_on_all_ranks",
    "analysis_report::test_garbled_lines_are_noted_and_the_others_are_shown",
    "windows::test_loss_and_gradients_equal_transformers[qwen3-2-plain]",
    "windows::test_loss_and_gradients_equal_transformers[mistral-2-plain]",
    "windows::test_loss_and_gradients_equal_transformers[gemma2-2-plain]",
    "windows::test_loss_and_gradients_equal_transformers[gpt-oss-2-plain]",
    "windows::test_loss_and_gradients_equal_transformers[gemma3-2-packed]",
    "launch::test_scripts_are_clean_under_shellcheck",
    "toy_mixer::test_it_trains_resumes_and_saves_like_one_process[2-whole---remat none --torch_compile]",
    "hf::test_no_target_is_lost_at_a_border_and_positions_are_global[4]",
    "plan::test_notes_name_what_a_plan_assumes[--model_max_length 8K-reference kernel-False]",
    "plan::test_notes_name_what_a_plan_assumes"
    "[--model_max_length 128K --rope_theta 5e6-positions that the model covers-False]",
    "stored_buffers::test_buffers_are_loaded_trained_with_saved_and_restored[2-3]",
    "halo::test_tokens_of_other_documents_are_zeros[4]",
    "train_cli::test_a_signal_ends_all_ranks_after_the_step_with_a_checkpoint[SIGTERM-1]",
    "train_cli::test_a_resumed_run_equals_one_that_never_stopped"
    "[--gradient_accumulation_steps 2 --sequence_parallel_size 1]",
    "train_cli::test_a_checkpoint_is_the_trained_model[llama2-programs---fsdp '']",
    "train_cli::test_a_checkpoint_is_the_trained_model[llama3-programs---gradient_accumulation_steps 2]",
    "happens_before::test_offloaded_activations_are_ordered_on_every_stream[1-2-1000000.0-staying0]",
    "happens_before::test_offloaded_activations_are_ordered_on_every_stream[1-1-1000000.0-staying1]",
    "happens_before::test_offloaded_activations_are_ordered_on_every_stream[1-2-9000.0-staying2]",
    "happens_before::test_offloaded_activations_are_ordered_on_every_stream[1-2-1000000.0-staying4]",
    "happens_before::test_an_exchange_that_does_not_wait_is_seen[wait_event]",
    "optim_8bit::test_a_resumed_run_of_one_rank_equals_one_that_never_stopped",
    "plan::test_notes_name_what_a_plan_assumes"
    '[--model_name_or_path llama3.2-1b --rope_scaling {"rope_type":"yarn","factor":8}-from 131072 to 65536-True]',
    "plan::test_the_planner_stores_only_what_a_models_layers_can_store",
    "plan::test_layers_that_differ_are_planned_one_by_one[none]",
    "plan_training::test_an_out_of_memory_error_names_settings_that_fit",
    "layer_costs::test_experts_are_read_like_any_other_layer[True]",
    "layer_costs::test_an_eager_layer_saves_what_the_plan_says[qwen3]",
    "layer_costs::test_an_eager_layer_saves_what_the_plan_says[olmo2]",
    "layer_costs::test_an_eager_layer_saves_what_the_plan_says[phi3]",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='attention', compiled=True, tiles_mlp=True)]",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='attention+mlp', compiled=True, tiles_mlp=False)]",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='attention+linears', compiled=True, tiles_mlp=False)]",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='attention', compiled=False, tiles_mlp=True)]",
    "halo::test_tokens_across_ranks_equal_the_whole_sequence[2]",
    "halo::test_tokens_across_ranks_equal_the_whole_sequence[4]",
    "halo::test_tokens_of_other_documents_are_zeros[1]",
    "halo::test_tokens_of_other_documents_are_zeros[2]",
    "weights::test_fresh_weights_are_the_same_on_any_number_of_ranks[1]",
    "weights::test_fresh_weights_are_the_same_on_any_number_of_ranks[3]",
    "weights::test_weights_go_in_and_out_unchanged_on_any_number_of_ranks[3-True]",
    "weights::test_weights_go_in_and_out_unchanged_on_any_number_of_ranks[2-False]",
    "weights::test_weights_go_in_and_out_unchanged_on_any_number_of_ranks[2-True]",
    "windows::test_loss_and_gradients_equal_transformers[mistral-2-packed]",
    "windows::test_loss_and_gradients_equal_transformers[qwen3-2-packed]",
    "windows::test_loss_and_gradients_equal_transformers[gemma2-2-packed]",
    "attention::test_output_and_gradients_equal_whole_sequence_attention[2]",
    "benchmark_step::test_gemma_is_trained_by_lightseq_train_and_cut_with_its_windows",
    "benchmark_step::test_every_peer_takes_the_step_that_one_process_takes[trl-True]",
    "checkpoint::test_a_failed_save_on_one_rank_ends_all_in_one_line_and_harms_no_checkpoint[write-True]",
    "checkpoint::test_hosts_that_see_an_older_list_go_on_from_the_same_checkpoint[some]",
    "saving::test_a_run_killed_right_after_a_save_has_the_records_of_all_saved_steps[training waits]",
    "stored_buffers::test_buffers_are_loaded_trained_with_saved_and_restored[1-None]",
    "mlp::test_layers_of_one_kind_are_compiled_once[none]",
    "mlp::test_layers_of_one_kind_are_compiled_once[attention]",
    "mlp::test_layers_of_one_kind_are_compiled_once[full]",
    "mlp::test_layers_of_one_kind_are_compiled_once[attention+linears]",
    "optimization::test_offloaded_gradients_leave_the_device_after_every_batch[optimizer]",
    "analysis_report::test_a_file_with_missing_facts_is_named_and_the_page_is_written[plans/8b.jsonl]",
    "analysis_report::test_a_file_with_missing_facts_is_named_and_the_page_is_written[checked/verify.jsonl]",
    "analysis_report::test_a_file_with_missing_facts_is_named_and_the_page_is_written[books/evaluation.jsonl]",
    "plan_steps::test_windows_wide_heads_and_more_norms_are_planned_within_five_percent_and_ten",
    "integrations_trainer::test_trainer_equals_one_process[accumulated-2]",
    "routed::test_each_peer_is_reached_its_own_way_with_the_results_of_one_transport[abab]",
    "routed::test_each_peer_is_reached_its_own_way_with_the_results_of_one_transport[aabb]",
    "comm::test_every_schedule_is_exact_over_mapped_memory[1048576-True]",
    "presets::test_a_preset_has_the_published_architecture[llama2-70b]",
    "presets::test_a_preset_has_the_published_architecture[llama3-70b]",
    "presets::test_a_preset_has_the_published_architecture[llama2-13b]",
    "presets::test_a_preset_has_the_published_architecture[codellama-7b]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[full-8-techniques1]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[full-8-techniques2]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[attention-5-techniques0]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[attention-5-techniques2]",
    "hf::test_in_a_recomputed_group_the_mlps_of_all_layers_but_the_last_run_twice[full]",
    "schedule_time::test_the_load_equals_the_table[3-32]",
    "schedule_time::test_the_load_equals_the_table[8-16]",
    "schedule_time::test_the_load_equals_the_table[3-16]",
    "schedule_time::test_the_load_equals_the_table[3-12]",
    "schedule_time::test_the_load_equals_the_table[8-12]",
    "schedule_time::test_the_load_equals_the_table[3-11]",
    "schedule_time::test_the_load_equals_the_table[3-10]",
    "schedule_time::test_the_load_equals_the_table[8-11]",
    "toy_mixer::test_it_trains_resumes_and_saves_like_one_process[3-whole---remat full --layers_per_checkpoint 2]",
    "toy_mixer::test_it_trains_resumes_and_saves_like_one_process[1-whole---remat attention]",
    "tiled::test_the_backward_pass_of_tiled_layers_holds_the_planned_bytes[True]",
    "tiled::test_recomputed_products_match_the_report[full-1]",
    "tiled::test_recomputed_products_match_the_report[attention-2]",
    "tiled::test_adapters_alone_get_gradients[False-qwen2]",
    "tiled::test_adapters_alone_get_gradients[False-llama]",
    "tiled::test_adapters_alone_get_gradients[True-qwen3]",
    "sweep_file::test_the_table_shows_every_name_whole[120]",
    "slurm::test_a_script_is_the_same_piped_and_submitted[fp8.sbatch]",
    "slurm::test_a_script_is_the_same_piped_and_submitted[neither.sbatch]",
    "slurm::test_a_script_is_the_same_piped_and_submitted[fsdp.sbatch]",
    "slurm::test_a_script_is_the_same_piped_and_submitted[flash_fsdp.sbatch]",
    "kernels::test_cpu_kernels_match_the_definition[reference-(4, 4)-torch.float16]",
    "kernels::test_cpu_kernels_match_the_definition[reference-(9, 3)-torch.float16]",
    "kernels::test_cpu_kernels_match_the_definition[cpu-(9, 3)-torch.float16]",
    "kernels::test_cpu_kernels_match_the_definition[cpu-(4, 4)-torch.float16]",
    "examples::test_the_loop_runs_uninstalled_and_prints_its_losses[launcher0]",
    "plan::test_tiles_are_planned_only_for_supported_layers",
    "plan::test_auto_offloads_no_more_than_the_host_has[]",
    "plan_documents::test_the_choice_follows_from_the_time_of_the_documents",
    "stored_buffers::test_adapters_keep_buffers_in_their_state_only",
    "train_cli::test_skipped_steps_are_counted_one_by_one_at_any_logging_interval",
    "softcap::test_every_schedule_equals_transformers[2-plain]",
    "routed::test_each_peer_is_reached_its_own_way_with_the_results_of_one_transport[abcc]",
    "benchmark_step::test_every_peer_takes_the_step_that_one_process_takes[fsdp2-False]",
    "lazy_logits::test_a_loss_of_logits_trains_as_on_one_process[unused parameters]",
    "happens_before::test_an_outbox_that_closes_before_its_recording_ends_is_seen",
    "layer_costs::test_experts_are_read_like_any_other_layer[False]",
    "benchmark_step::test_every_peer_takes_the_step_that_one_process_takes[plain-True]",
    "checkpoint::test_a_rank_without_memory_for_its_state_ends_all",
    "comm::test_every_schedule_is_exact_over_mapped_memory[0-False]",
    "evaluate::test_only_rank_0_shows_progress",
    "hf::test_double_precision_agrees_to_ten_digits",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='none', compiled=True, tiles_mlp=False)]",
    "toy_schedule::test_a_schedule_of_ten_lines_trains[2]",
    "quiet::test_importing_lightseq_prints_nothing_and_loads_neither_the_planner_nor_the_flags",
    "train_cli::test_the_original_command_lines_run[llama3]",
    "hf::test_scaled_rotary_positions_equal_one_process[2]",
    "hf::test_a_disabled_model_generates_as_before_and_may_be_enabled_again[2]",
    "hf::test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output[attention-5-techniques1]",
    "packing::test_training_on_packed_documents_equals_training_on_each_alone",
    "packing::test_packed_documents_in_a_loop_have_the_loss_and_gradients_of_each_alone[1]",
    "windows::test_one_document_may_fill_a_packed_row[3]",
    "happens_before::test_layers_that_do_not_wait_are_seen",
    "checkpoint::test_a_run_resumes_from_before_the_damage_and_retains_whole_checkpoints",
    "documents::test_each_document_attends_to_itself_once_and_to_no_other[1]",
    "documents::test_each_document_attends_to_itself_once_and_to_no_other[4]",
    "kernels::test_blocks_of_scores_match_the_definition[7 keys-(24, 16)-torch.bfloat16]",
    "kernels::test_blocks_of_scores_match_the_definition[7 keys-(24, 16)-torch.float64]",
    "kernels::test_blocks_of_scores_match_the_definition[7 keys-(16, 16)-torch.float64]",
    "kernels::test_blocks_of_scores_match_the_definition[24 keys-(16, 16)-torch.float64]",
    "kernels::test_blocks_of_scores_match_the_definition[24 keys-(16, 16)-torch.float32]",
    "kernels::test_cpu_kernels_match_the_definition[cpu-(9, 3)-torch.float64]",
    "kernels::test_cpu_kernels_match_the_definition[reference-(9, 3)-torch.float64]",
    "loss::test_half_precision_with_transformed_logits_errs_at_most_twice_as_much_as_plain"
    "[LogitTransform(scale=0.3, cap=None)-dtype1]",
    "loss::test_half_precision_with_transformed_logits_errs_at_most_twice_as_much_as_plain"
    "[LogitTransform(scale=1.0, cap=2.0)-dtype0]",
    "loss::test_half_precision_with_transformed_logits_errs_at_most_twice_as_much_as_plain"
    "[LogitTransform(scale=1.7, cap=3.0)-dtype1]",
    "plan::test_notes_name_what_a_plan_assumes[-planned with 8 cores per rank-False]",
    "plan::test_notes_name_what_a_plan_assumes[--offload both --host_cores 64-planned with 8 cores per rank-False]",
    "plan::test_attention_memory_over_many_ranks_is_extrapolated[prefix]",
    "plan::test_longer_sequences_recompute_more",
    "plan::test_stored_products_take_memory_and_are_not_recomputed[attention+linears-159383552]",
    "presets::test_a_preset_has_the_published_architecture[llama2-3b]",
    "presets::test_a_preset_has_the_published_architecture[llama3-8b]",
    "presets::test_a_preset_has_the_published_architecture[llama3.2-3b]",
    "schedule::test_a_dropped_tile_or_move_is_always_caught[striped-move]",
    "schedule::test_a_dropped_tile_or_move_is_always_caught[striped-tile]",
    "schedule::test_balanced_schedules_keep_every_rank_busy_in_every_world[prefix]",
    "schedule::test_kept_operands_do_not_move_again[2]",
    "schedule_time::test_the_load_equals_the_table[3-8]",
    "schedule_time::test_the_load_equals_the_table[3-9]",
    "schedule_time::test_the_load_equals_the_table[8-9]",
    "roll_call::test_a_forward_pass_on_one_rank_is_named"
    "[2-1-in eval mode-rank 1 runs the model without training it on 1 x 40 tokens, but rank 0 trains on]",
    "roll_call::test_what_one_rank_of_a_loop_with_accelerate_does_is_named[True-rank 0 reads logits]",
    "routed::test_received_tensors_come_once_and_in_order[members1-a ba]",
    "routed::test_received_tensors_come_once_and_in_order[members2- aab]",
    "tiled::test_adapters_alone_get_gradients[True-qwen2]",
    "weights::test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused_on_every_rank[0]",
    "weights::test_weights_go_in_and_out_unchanged_on_any_number_of_ranks[1-False]",
    "output_directory::test_a_run_that_begins_anew_removes_nothing_that_no_run_wrote[--resume_from_checkpoint auto]",
    "integrations_trl::test_adapters_that_add_tokens_are_refused[PromptTuningConfig]",
    "host_calls::test_a_layer_asks_little_of_the_host[ulysses-1]",
    "halo::test_tokens_across_ranks_equal_the_whole_sequence[1]",
    "layer_costs::test_an_eager_layer_saves_what_the_plan_says[llama]",
    "layer_costs::test_a_backward_pass_holds_what_an_h100_held"
    "[Treatment(policy='attention+mlp', compiled=False, tiles_mlp=False)]",
    "analysis_curves::test_pictures_of_several_runs_are_in_a_folder_of_their_own[command1]",
    "architectures::test_the_sweep_notices_a_planted_fault[labels-loss]",
    "composites::test_text_trains_as_in_the_whole_model[True]",
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        from forkserver import share

        share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in LONGEST if not Path(__file__).with_name(f"test_{name}.py").is_file()]
    assert not missing, f"LONGEST names files that are not here: {missing}"
    for name in SLOW:
        file, test = name.partition("[")[0].split("::")
        source = Path(__file__).with_name(f"test_{file}.py").read_text(encoding="utf-8")
        assert f"def {test}(" in source, f"SLOW names a test that is not here: {name}"
    for item in items:
        file, _, test = item.nodeid.partition("::")
        names = f"{Path(file).stem.removeprefix('test_')}::{test}"
        if names in SLOW or names.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(Path(item.fspath).stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("compat"):
        if marker.args and Version(version("transformers")) < Version(marker.args[0]):
            pytest.skip(f"needs transformers {marker.args[0]}, {version('transformers')} here")
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    wanted = marker.args[0] if marker.args else 1
    found = torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} GPU(s), {found} here")
    from lightseq.distributed.environment import cache_compiled_kernels

    cache_compiled_kernels()


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders chats in this process. The fork of a process as large as this one would take most of a test's time."""

    def limited_map(function: Callable[[Any], Any], batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        yield from (list(map(function, batch)) for batch in batches)

    monkeypatch.setattr("lightseq.data.token_cache.limited_map", limited_map)


@pytest.fixture
def alone() -> Iterator[None]:
    """Joins a process group of this process alone."""
    from worlds import one_process

    with one_process():
        yield
