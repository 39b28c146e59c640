"""What is to hold with every version of TRL that the package takes; `make test-trl TRL=1.15` runs it with another.

The tests of each method, and of what it is with neutral options, are run there as well.
"""

import warnings

import pytest
from test_adapters import look
from trl import GRPOConfig, GRPOTrainer
from world import TINY, assert_same, differ, make_agent, make_trainer, parameters, tiny_methods

from trl_explore.methods import METHODS
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

CASES = {
    "grpo": (GRPOTrainer, GRPOConfig, {}),
    "base": (ExplorationTrainer, ExplorationConfig, {}),
    **tiny_methods(),
}
AGENT = dict(
    max_completion_length=96, reward_funcs=lambda completions, **columns: [float(len(c)) for c in completions]
)
SIZE = dict(per_device_train_batch_size=8, num_generations=4, save_strategy="steps", save_steps=1, max_steps=2)


def make(name, folder):
    cls, config, options = CASES[name]
    options = {**SIZE, **options}
    if name in METHODS and METHODS[name].needs_tools:
        return make_agent(cls, config, folder, tools=[look], **AGENT, **options)
    return make_trainer(cls, config, folder, **options)


def refuse_what_goes():
    """Make errors of what TRL says it will remove, and of what anybody says that our own lines use."""
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("error", message=r"(?s).*removed in (version )?(TRL )?v?2\.0", category=category)
        warnings.filterwarnings("error", module=r"trl_explore\.", category=category)


@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_trained_and_the_second_is_resumed_without_what_trl_will_remove(name, tmp_path):
    with warnings.catch_warnings():
        refuse_what_goes()
        trainer = make(name, tmp_path)
        before = parameters(trainer)
        trainer.train()
        after = parameters(trainer)
        assert trainer.state.global_step == 2 and differ(before, after)
        if name in TINY:
            assert TINY[name].metric in trainer.state.log_history[0]
        resumed = make(name, tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(parameters(resumed), after)


def test_what_trl_will_remove_is_an_error_here(tmp_path):
    with warnings.catch_warnings(), pytest.raises(FutureWarning, match="will be removed in v2.0.0"):
        refuse_what_goes()
        ExplorationConfig(str(tmp_path), vllm_importance_sampling_cap=2.0, use_cpu=True, bf16=False)
