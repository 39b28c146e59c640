"""Tests with many slow cases, of which the default suite runs some. The other cases are marked `slow`."""

import re
from collections import Counter

import pytest

# With the value n, the default suite runs the cases 1, n + 1, 2 n + 1 and so on of the test.
ONE_OF = {
    "test_tree_grpo.py::test_depth_one_is_grpo_on_signed_rewards_bit_for_bit": 6,
    "test_tree_grpo.py::test_it_learns_with": 4,
    "test_sesa.py::test_without_visible_sketches_it_is_grpo_bit_for_bit": 4,
    "test_sesa.py::test_a_resumed_run_ends_where_the_uninterrupted_one_does": 3,
    "test_sesa_agent.py::test_without_branches_it_is_grpo_bit_for_bit": 3,
    "test_versions.py::test_two_steps_are_trained_and_the_second_is_resumed_without_what_trl_will_remove": 4,
    "test_serving.py::test_rows_of_every_stream_carry_what_the_sampler_said": 4,
    "test_method_metrics.py::test_what_a_method_logs_is_described_and_what_is_described_is_logged": 3,
    "test_packed_training.py::test_every_trainer_ends_in_the_same_parameters": 3,
    "test_packed_training.py::test_rows_are_packed_only_where_rotary_factors_are_fixed": 4,
    "test_tree_rl.py::test_forks_change_what_is_learned": 3,
    "test_tree_rl.py::test_without_rounds_it_is_grpo_bit_for_bit": 3,
    "test_paths.py::test_agents_train_the_same_with_kept_prefixes": 3,
    "test_paths.py::test_methods_train_the_same_with_kept_prefixes": 3,
    "test_reward_inputs.py::test_a_function_may_log_some_rows_only": 3,
    "test_reasoning_gym.py::test_saved_rows_score_in_another_process": 2,
    "test_reasoning_gym.py::test_demonstrations_keep_to_the_form": 4,
    "test_resume.py::test_a_resumed_run_ends_where_the_uninterrupted_one_does": 3,
    "test_resume.py::test_a_resumed_tree_search_ends_where_the_uninterrupted_one_does": 3,
    "test_resume_files.py::test_a_resume_between_two_logs_loses_no_table": 3,
    "test_trained_generations.py::test_methods_train_with_it": 3,
    "test_trained_generations.py::test_it_trains_with": 3,
    "test_dynamic_sampling_of_agents.py::test_methods_train_and_resume_bit_for_bit": 3,
    "test_dynamic_sampling.py::test_every_method_takes_it_and_resumes": 3,
    "test_threads.py::test_a_number_that_the_user_chose_stays": 4,
    "test_threads.py::test_every_command_computes_with_one_thread_and_says_so_once": 4,
    "test_text_arena.py::test_every_method_for_agents_branches_from_the_middle_of_games": 3,
    "test_auto.py::test_it_trains_with": 3,
    "test_adapters.py::test_lora_trains_the_adapter_only_and_is_loaded_again": 3,
    "test_run_changes.py::test_another_methods_checkpoint_is_refused_with_the_remedy": 3,
    "test_hints_and_replay.py::test_with_vllm_a_row_is_corrected_only_for_the_policy_that_sampled_it": 3,
    "test_packed_training.py::test_training_is_the_same_with_every_field": 3,
    "test_explore_prompts.py::test_it_trains_and_resumes_where_it_was": 3,
    "test_explore_prompts.py::test_where_everything_is_solved_it_is_grpo": 3,
    "test_explore_prompts.py::test_a_falling_share_explores_fewer_prompts": 3,
    "test_explore_prompts.py::test_where_nothing_is_solved_all_are_explored": 3,
    "test_paths.py::test_what_is_refused_is_said_once_and_trains_as_without": 2,
    "test_reward_checks.py::test_training_tells_a_reward_functions_mistake_in_one_line": 3,
    "integration/test_pinned_runs.py::test_one_process_is_for_users_as_it_was": 2,
    "test_adapters.py::test_with_dropout_a_neutral_method_is_grpo_bit_for_bit": 3,
    "test_text_arena.py::test_a_copy_in_mid_game_plays_on_as_the_original": 3,
    "test_budget.py::test_it_trains_and_resumes_where_it_was": 3,
    "test_resume_epochs.py::test_a_run_resumed_in_any_epoch_ends_where_the_uninterrupted_one_does": 2,
    "test_sampled_tokens.py::test_a_method_is_charged_for_what_it_reports": 3,
    "test_credit_trainers.py::test_other_advantages_train_with_every_loss_type": 3,
    "test_credit_trainers.py::test_neutral_values_are_grpo_bit_for_bit": 3,
    "test_regimes.py::test_the_regimes_can_be_compared": 3,
    "test_base.py::test_an_echo_of_the_main_stream_adds_its_weight_under_every_loss_type": 3,
    "test_base.py::test_an_echo_adds_its_weight_in_every_setting": 3,
    "test_base.py::test_with_nothing_to_drop_dropping_changes_nothing": 3,
    "test_base.py::test_without_hooks_the_base_is_grpo_bit_for_bit": 3,
    "test_sesa.py::test_a_column_called_targets_is_not_read_unless_it_is_named": 3,
    "test_reward_inputs.py::test_two_functions_may_log_one_column_and_every_branch_has_it": 3,
    "test_reward_inputs.py::test_the_environment_of_each_branch_owns_the_list_that_it_draws_from": 3,
    "test_reward_inputs.py::test_each_row_owns_its_list_columns": 3,
    "test_deep_grpo.py::test_weight_zero_is_grpo_bit_for_bit": 3,
    "test_deep_grpo.py::test_without_failures_it_is_grpo_bit_for_bit": 3,
    "test_completions_table.py::test_of_two_functions_of_one_name_the_table_has_the_second": 3,
    "test_branpo.py::test_all_ways_to_go_back_give_the_same": 2,
    "test_branpo.py::test_without_a_kept_branch_it_is_grpo_bit_for_bit": 3,
    "test_run_changes.py::test_it_may_change_where_the_data_begin_anew": 3,
    "test_data_rows.py::test_every_method_trains_on_prompts_that_are_made_on_the_fly": 3,
    "test_dynamic_sampling.py::test_where_all_groups_have_contrast_it_is_grpo": 3,
    "test_g2rl.py::test_without_novelty_it_is_grpo_bit_for_bit": 2,
    "test_g2rl.py::test_novelty_changes_what_is_learned": 2,
    "test_advantage_functions.py::test_methods_train_with_a_function": 3,
    "test_graded_rewards.py::test_a_threshold_that_no_completion_reaches_is_named_once": 3,
    "test_graded_rewards.py::test_a_threshold_that_some_completions_reach_is_not_named": 3,
    "test_graded_rewards.py::test_a_threshold_that_every_completion_reaches_is_named_once": 3,
    "test_branpo.py::test_a_resumed_run_ends_where_the_uninterrupted_one_does": 3,
    "test_credit_trainers.py::test_methods_train_and_resume_with_it_bit_for_bit": 3,
    "test_resume_files.py::test_a_resumed_run_goes_on_with_its_files_to_the_byte": 3,
    "test_resume_files.py::test_a_run_that_begins_again_in_its_folder_leaves_nothing_twice": 3,
    "test_resume_files.py::test_checkpoints_of_weights_alone_begin_files_anew": 3,
    "test_replaced.py::test_other_groups_are_those_of_grpo_where_it_samples": 3,
    "test_hard_prompts.py::test_mistakes_are_explained_in_one_line": 3,
    "test_own_advantage.py::test_mistakes_are_explained_in_one_line": 3,
    "test_tree_view.py::test_mistakes_are_told_in_one_line": 3,
    "test_retrieval.py::test_mistakes_are_explained_in_one_line": 3,
    "test_cli.py::test_every_method_trains_and_saves_a_model": 3,
    "test_grid_worlds.py::test_data_sets_are_deterministic_distinct_and_disjoint": 2,
}


def mark_slow_cases(items):
    """Mark the cases that the default suite leaves out."""
    seen = Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        name = re.sub(r"\[.*", "", item.nodeid, flags=re.DOTALL).removeprefix("tests/")
        if name in ONE_OF:
            if seen[name] % ONE_OF[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
