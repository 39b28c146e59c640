"""Tests with many slow cases, of which the default suite runs some. The other cases are marked `slow`."""

import re
from collections import Counter

import pytest

# With the value n, the default suite runs the cases 1, n + 1, 2 n + 1 and so on of the test.
ONE_OF = {
    "test_tree_grpo.py::test_depth_one_is_grpo_on_signed_rewards_bit_for_bit": 4,
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
    "test_reasoning_gym.py::test_saved_rows_score_in_another_process": 8,
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
