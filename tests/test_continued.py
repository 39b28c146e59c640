"""Sampling options that count from the start of a completion, for prefixes that end inside one."""

import pytest
import torch
from world import make_model, make_trainer, tiny_methods, trained

from trl_explore.sampling.sampler import Sampler
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

EOS, MOST = 1, 8
PROMPTS = [[5, 15, 6], [9, 8, 7, 6, 5], [6, 7], [20, 21, 22, 5]]
COUNTED = {
    "min_new_tokens": 6,
    "forced_eos_token_id": EOS,
    "exponential_decay_length_penalty": (2, 1.3),
    "begin_suppress_tokens": [*range(5, 17)],
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "guidance_scale": 1.5,
}
every_option = pytest.mark.parametrize(("name", "value"), COUNTED.items(), ids=COUNTED)


def sampler(folder, **options):
    """Greedy samples."""
    model = make_model(num_hidden_layers=2, tie_word_embeddings=False)
    greedy = {"do_sample": False, **options}
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, folder, model=model, generation_kwargs=greedy)
    trainer.model.train()
    return trainer.sample


def whole_completions(sample):
    """One greedy completion of each prompt, each in a call of its own, because `generate` reads padding as tokens."""
    return [sample([prompt], 1, MOST)[0][0].token_ids for prompt in PROMPTS]


# The model likes to end, so that an option which keeps it from ending acts.
LIKES_TO_END = {"min_new_tokens": {"sequence_bias": [[[EOS], 4.0]]}}


def rests(sample, completions, *, told):
    """What is sampled behind every beginning of every completion, and what stood there."""
    cuts = [(prompt, ids, cut) for prompt, ids in zip(PROMPTS, completions, strict=True) for cut in range(1, len(ids))]
    found = sample(
        [prompt + ids[:cut] for prompt, ids, cut in cuts],
        1,
        [MOST - cut for *_, cut in cuts],
        begun=[cut for *_, cut in cuts] if told else None,
    )
    return [one.token_ids for (one,) in found], [ids[cut:] for _, ids, cut in cuts]


@every_option
def test_a_part_of_a_completion_is_what_the_whole_completion_has_there(tmp_path, name, value):
    sample = sampler(tmp_path, **{name: value, **LIKES_TO_END.get(name, {})})
    completions = whole_completions(sample)
    found, expected = rests(sample, completions, told=True)
    assert len(expected) > len(PROMPTS) and found == expected
    if name != "forced_eos_token_id":  # all of these parts end with their completion
        assert rests(sample, completions, told=False)[0] != expected  # `generate` counts from the end of the prefix


def test_options_of_the_models_own_configuration_count_from_the_start_as_well(tmp_path):
    sample = sampler(tmp_path)
    model = sample.policy.model
    model.generation_config.min_new_tokens = 6
    completions = whole_completions(sample)
    assert min(map(len, completions)) >= 6
    found, expected = rests(sample, completions, told=True)
    assert found == expected
    assert model.generation_config.min_new_tokens == 6 and "generate" not in vars(model)


def test_a_part_that_ends_before_the_completion_is_not_forced_to_end(tmp_path):
    sample = sampler(tmp_path, forced_eos_token_id=EOS, min_new_tokens=MOST)
    begun = [0] * len(PROMPTS)
    nodes = [one.token_ids for (one,) in sample(PROMPTS, 1, 4, begun=begun)]
    assert all(EOS not in ids for ids in nodes)
    rows = [prompt + ids for prompt, ids in zip(PROMPTS, nodes, strict=True)]
    ends = [one.token_ids for (one,) in sample(rows, 1, 4, begun=[4] * len(rows))]
    assert all(len(ids) == 4 and ids[-1] == EOS for ids in ends)


def test_requests_of_several_budgets_are_forced_to_end_at_their_own(tmp_path):
    sample = sampler(tmp_path, forced_eos_token_id=EOS, min_new_tokens=MOST)
    found = sample(PROMPTS, 1, [3, 5, 4, 6])
    assert [len(one.token_ids) for (one,) in found] == [3, 5, 4, 6]
    assert all(one.token_ids[-1] == EOS for (one,) in found)


def test_several_beams_of_a_row_count_alike(tmp_path):
    sample = sampler(tmp_path, min_new_tokens=6, num_beams=2)
    rows = [prompt + [20, 21, 22] for prompt in PROMPTS]
    found = [one.token_ids for (one,) in sample(rows, 1, 5, begun=[3, 0, 3, 0])]
    assert all(EOS not in ids[: 6 - begun - 1] for ids, begun in zip(found, [3, 0, 3, 0], strict=True))
    assert min(len(ids) for ids in found) >= 3


def test_entropies_are_recorded_beside_a_guided_pass(tmp_path):
    sample = sampler(tmp_path, guidance_scale=3.0)
    for (one,), prompt in zip(sample(PROMPTS, 1, MOST, entropies=True), PROMPTS, strict=True):
        with torch.no_grad():
            row = torch.tensor([prompt + one.token_ids])
            logprobs = sample.policy.model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert one.entropies == pytest.approx((-(logprobs.exp() * logprobs).sum(-1)).tolist(), abs=1e-4)


METHODS = tiny_methods(deep_grpo=dict(num_branches=2))


@pytest.mark.slow
@every_option
@pytest.mark.parametrize("method, config, options", METHODS.values(), ids=METHODS)
def test_every_method_samples_with_options_that_count(tmp_path, method, config, options, name, value):
    _, log = trained(method, config, tmp_path, **options, generation_kwargs={name: value}, max_steps=1)
    assert log[0]["completions/mean_length"] > 0


@pytest.mark.parametrize("name", ["deep_grpo", "tree_grpo", "tree_rl", "branpo"])
def test_what_continues_completions_says_where_they_began(tmp_path, name, monkeypatch):
    told = []
    own = Sampler.__call__

    def listening(self, prefixes, num_samples, max_new_tokens, begun=None, **more):
        told.append((prefixes, begun))
        return own(self, prefixes, num_samples, max_new_tokens, begun, **more)

    monkeypatch.setattr(Sampler, "__call__", listening)
    method, config, options = METHODS[name]
    trained(method, config, tmp_path, **options, max_steps=1)
    parts = [pair for prefixes, begun in told if begun for pair in zip(prefixes, begun, strict=True)]
    assert {len(prefix) - number for prefix, number in parts} == {4}  # the tokens of every prompt


@every_option
def test_branches_that_share_a_call_with_main_rows_cannot_count(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"`deferred_branching=True`.*`{name}`"):
        make_trainer(
            DeepGRPOTrainer, DeepGRPOConfig, tmp_path, deferred_branching=True, generation_kwargs={name: value}
        )
