"""DEEP-GRPO: reductions to GRPO, what it branches from, what it trains on, its files and its errors."""

import json
import math
import warnings

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    make_dataset,
    make_tokenizer,
    make_trainer,
    never,
    parameters,
    some_letter,
    trained,
)

import trl_explore
from trl_explore.forks.trajectories import Trajectory
from trl_explore.rows.streams import loss_mask
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
OURS = DeepGRPOTrainer, DeepGRPOConfig
CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
SETTINGS = {
    "beta 0": {},
    "grpo loss": dict(loss_type="grpo"),
    "dr_grpo loss and beta": dict(loss_type="dr_grpo", beta=0.1),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora, beta, two iterations": dict(peft_config=LORA, beta=0.1, num_iterations=2, max_steps=4),
    "conversational": dict(conversational=True),
    "no limit of length": dict(max_completion_length=None),
    "rewards with None": dict(reward_funcs=[contains_answer, some_letter], success_threshold=1.5),
}
grpo = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())


def as_grpo(options):
    return {name: value for name, value in options.items() if name != "success_threshold"}


def make(folder, **options):
    return make_trainer(*OURS, folder, **{**CUTS, **options})


@grpo
def test_weight_zero_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **as_grpo(options))
    got, log = trained(*OURS, tmp_path, aux_loss_weight=0.0, **CUTS, **options)
    assert_same(got, expected)
    assert sum(entry.get("pivots/tried", 0) for entry in log) > 0  # it did branch


@grpo
def test_without_failures_it_is_grpo_bit_for_bit(tmp_path, options):
    options = {**options, "success_threshold": -1.0}
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **as_grpo(options))
    got, log = trained(*OURS, tmp_path, **CUTS, **options)
    assert_same(got, expected)
    assert all(entry.get("pivots/tried", 0) == 0 for entry in log)


def test_siblings_with_equal_rewards_have_no_gradient(tmp_path):
    before = parameters(make_trainer(GRPOTrainer, GRPOConfig, tmp_path))
    # A quantile of entropies looks at every row, so here the forward pass of rows without advantage is not skipped.
    options = dict(reward_funcs=never, loss_type="grpo", top_entropy_quantile=0.9)
    got, log = trained(*OURS, tmp_path, **CUTS, **options)
    assert_same(got, before)
    assert log[0]["pivots/tried"] == 8 and log[0]["aux/loss"] == 0.0


def streams_of(trainer):
    """The auxiliary rows of the first generation batch, in one micro-batch."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return inputs, trainer.stream_training.prepared


def drawn(trainer, ids):
    """The pivots of a completion."""
    completion = Trajectory(0, {"prompt": "p"}, [3], ids, loss_mask=[1] * len(ids))
    most = trainer.args.max_completion_length or len(ids)
    return trainer.branch_explorer.draw(0, completion, most)


def test_the_prefix_conditions_but_is_not_trained(tmp_path):
    trainer = make(tmp_path, beta=0.1, depth_bias=20.0, max_pivots_per_batch=2)
    _, steps = streams_of(trainer)
    (part,) = steps["aux"][2][0]
    assert len(part["advantages"]) == 2 * 3
    completions, masks = part["completion_ids"].tolist(), loss_mask(part).tolist()
    mains = trainer.main_completion_ids
    siblings = {}
    for ids, mask in zip(completions, masks, strict=True):
        start = mask.index(1)
        length = start + sum(mask[start:])
        assert mask[start:length] == [1] * (length - start) and not any(mask[length:])
        assert start % 2 == 0 and start > 0
        prefix = tuple(ids[:start])
        assert any(tuple(main[:start]) == prefix for main in mains)
        siblings.setdefault(prefix, []).append(tuple(ids[start:length]))
    assert sum(len(s) for s in siblings.values()) == 6


def test_auxiliary_loss_equals_the_equation_written_out(tmp_path):
    """Eq. 4 with App. C's token mean, against autograd on the rows themselves."""
    trainer = make(tmp_path, aux_loss_weight=0.7)
    _, steps = streams_of(trainer)
    trainer.model.zero_grad()
    trainer.stream_training.backward(trainer.model, 0, num_accumulated=1)
    got = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    _, totals, ((*parts,),) = steps["aux"]
    loss = torch.zeros(())
    for part in parts:
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
        attention = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        width = part["completion_ids"].size(1)
        logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)[:, -width:]
        ratio = (logps - logps.detach()).exp()
        loss = loss - (ratio * part["advantages"][:, None] * loss_mask(part)).sum()
    (0.7 * loss / totals.num_tokens).backward()
    assert any(g.abs().max() > 1e-4 for g in got.values())
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-6)
    # Rows without advantage are counted in the normaliser, not computed.
    metrics = trainer._metrics["train"]
    assert totals.num_tokens == metrics["pivots/sampled_tokens"][0]
    assert totals.num_rows == 3 * metrics["pivots/tried"][0]
    forwarded = sum(int(loss_mask(part).any(1).sum()) for part in parts)
    assert forwarded == 3 * round(metrics["pivots/informative_fraction"][0] * metrics["pivots/tried"][0])
    assert 0 < forwarded < totals.num_rows


def log_of(tmp_path, **options):
    return trained(*OURS, tmp_path, **{**CUTS, **options})[1]


@pytest.mark.parametrize("branch_from,expected", [("failures", 0), ("failed_groups", 0), ("all", 8)])
def test_which_completions_are_branched(tmp_path, branch_from, expected):
    log = log_of(tmp_path, branch_from=branch_from, reward_funcs=always, max_steps=1)
    assert log[0]["pivots/tried"] == expected
    logs = log_of(tmp_path, branch_from=branch_from, max_steps=6)[:-1]
    failures = [round(8 * log["pivots/failure_fraction"]) for log in logs]
    tried = [log["pivots/tried"] for log in logs]
    assert 0 < min(failures) < 8
    if branch_from == "failures":
        assert tried == failures
    elif branch_from == "failed_groups":
        assert set(tried) <= {0, 4, 8} and tried != failures
    else:
        assert tried == [8] * 6


def test_unscorable_completions_are_neither_failures_nor_branched(tmp_path):
    def only_short_ones(completion_ids, **kwargs):
        return [0.0 if len(ids) < 8 else None for ids in completion_ids]

    logs = log_of(tmp_path, reward_funcs=only_short_ones, branch_from="all", max_steps=6)[:-1]
    tried = [log["pivots/tried"] for log in logs]
    assert tried == [round(8 * log["pivots/failure_fraction"]) for log in logs]
    assert 0 < sum(tried) < 48


@pytest.mark.parametrize("selection,depth", [("root", None), ("uniform", None), ("utility", 1.0)])
def test_pivot_selection(tmp_path, selection, depth):
    logs = log_of(tmp_path, pivot_selection=selection, depth_bias=50.0, reward_funcs=never, max_steps=2)
    for log in logs[:-1]:
        if selection == "root":  # a whole completion is resampled
            assert log["pivots/mean_depth"] <= 0.5
        elif selection == "utility":
            assert log["pivots/mean_depth"] == pytest.approx(depth)
        else:
            assert 0.3 < log["pivots/mean_depth"] < 1.0


def test_the_cap_bounds_pivots_and_serves_every_completion_before_a_second_pivot(tmp_path):
    trainer = make(tmp_path, num_pivots=3, max_pivots_per_batch=8, reward_funcs=never, beta=0.1)
    rows = []
    draw = trainer.branch_explorer.draw
    trainer.branch_explorer.draw = lambda row, *arguments: rows.append(row) or draw(row, *arguments)
    capped = trainer.branch_explorer._capped
    kept = []
    trainer.branch_explorer._capped = lambda pivots, limit: kept.extend(capped(pivots, limit)) or kept
    streams_of(trainer)
    assert rows == list(range(8))
    assert sorted(p.row for p in kept) == list(range(8))
    assert trainer._metrics["train"]["pivots/tried"] == [8]


def test_the_cap_is_of_all_rounds_of_a_batch(tmp_path):
    refill = dict(dynamic_sampling="refill", max_sampling_rounds=3)
    trainer = make(tmp_path, **refill, max_pivots_per_batch=10, reward_funcs=never)
    for _ in range(2):
        streams_of(trainer)
    assert trainer._metrics["train"]["pivots/tried"] == [8, 2, 0] * 2


@pytest.mark.parametrize(
    "options, ids, starts",
    [
        (dict(min_remaining_tokens=None), [5] * 8, [0, 2, 4, 6]),
        (dict(min_remaining_tokens=3), [5] * 8, [0, 2, 4]),
        (dict(min_remaining_tokens=8), [5] * 8, [0]),
        # By default a tenth of the budget remains.
        (dict(segment_length=1, num_pivots=100, max_completion_length=50), [5] * 50, [*range(46)]),
        # Completions that are short by themselves have no room that could be asked for.
        (dict(min_remaining_tokens=10, max_completion_length=None), [5, 6, 7, 8, 1], [0]),
    ],
    ids=str,
)
def test_branches_have_room_to_go_on(tmp_path, options, ids, starts):
    trainer = make(tmp_path, **{"num_pivots": 4, **options})
    pivots = drawn(trainer, ids)
    assert sorted(p.start for p in pivots) == starts
    if len(ids) == 8:
        assert all(p.depth == (p.start / 2 + 1) / 4 for p in pivots)


@pytest.mark.parametrize("segmentation, deferred", [("delimiter", False), ("fixed", True)])
def test_without_a_limit_branches_end_where_the_longest_completion_ends(tmp_path, segmentation, deferred):
    options = dict(max_completion_length=None, segmentation=segmentation, segment_length=None, depth_bias=6.0)
    for log in log_of(tmp_path, deferred_branching=deferred, max_steps=4, **options)[deferred:-1]:
        assert log["completions/max_length"] == 20  # transformers' own limit
        assert 0 < log["pivots/mean_suffix_length"] and log["aux/completions/max_length"] <= 20


@pytest.mark.parametrize("selection", ["utility", "uniform"])
def test_no_pivot_where_only_the_end_token_follows(tmp_path, selection):
    trainer = make(tmp_path, segmentation="delimiter", num_pivots=9, pivot_selection=selection)
    ids = make_tokenizer()("ab.cd.<eos>")["input_ids"]
    assert sorted((p.start, p.depth) for p in drawn(trainer, ids)) == [(0, 0.5), (3, 1.0)]


@pytest.mark.parametrize("num_pivots", [1, 3])
def test_the_control_from_the_root_has_the_budget_of_its_rivals(tmp_path, num_pivots):
    counts = {}
    for selection in ("root", "uniform", "utility"):
        trainer = make(tmp_path, num_pivots=num_pivots, pivot_selection=selection)
        completions = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 1], [5]]
        counts[selection] = [len(drawn(trainer, ids)) for ids in completions]
        if selection == "root":
            assert {p.start for ids in completions for p in drawn(trainer, ids)} == {0}
    assert counts["root"] == counts["uniform"] == counts["utility"]
    assert counts["root"] == [min(num_pivots, 4), 1, 1]


def test_every_pivot_at_the_root_has_siblings_of_its_own(tmp_path):
    options = dict(num_pivots=2, pivot_selection="root", reward_funcs=never, max_steps=1, segment_length=1)
    log = log_of(tmp_path, **options)[0]
    assert 8 < log["pivots/tried"] <= 16


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(segmentation="delimiter", segment_delimiters=["##"]), "without any of \\['##'\\]"),
        (dict(segment_length=8), "shorter than a segment"),
    ],
)
def test_completions_that_are_never_cut_give_one_warning(tmp_path, fields, words):
    with pytest.warns(UserWarning, match=words) as caught:
        log_of(tmp_path, reward_funcs=never, **fields)
    assert sum("branches start from the prompt" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("fields", [{}, dict(pivot_selection="root", segment_length=8), dict(reward_funcs=always)])
def test_completions_that_are_cut_or_need_no_cut_give_no_warning(tmp_path, fields):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*branches start from the prompt")
        log_of(tmp_path, **{"reward_funcs": never, "max_steps": 1, **fields})


def test_the_estimator_learns_from_every_pivot_and_steers_the_next_draw(tmp_path):
    trainer = make(tmp_path, max_steps=6)
    trainer.train()
    tried = sum(entry.get("pivots/tried", 0) for entry in trainer.state.log_history)
    assert len(trainer.branch_explorer.estimator) == tried
    assert trainer.branch_explorer.estimator.weight != 0.0
    assert trainer.state.log_history[-2]["pivots/success_weight"] == trainer.branch_explorer.estimator.weight


def test_updates_are_as_rare_as_configured(tmp_path):
    logs = log_of(tmp_path, estimator_update_steps=4, max_steps=5)
    weights = [entry["pivots/success_weight"] for entry in logs[:-1]]
    assert weights[:3] == [0.0] * 3 and weights[3] != 0.0 and weights[4] == weights[3]


def test_deferred_branches_are_sampled_with_the_next_batch_and_trained_then(tmp_path):
    trainer = make(tmp_path, deferred_branching=True, max_steps=3, depth_bias=6.0)
    calls = []
    generate = trainer.model.generate
    trainer.model.generate = lambda **kwargs: (calls.append(len(kwargs["input_ids"])), generate(**kwargs))[1]
    trainer.train()
    logs = trainer.state.log_history
    failures = [round(8 * entry["pivots/failure_fraction"]) for entry in logs[:-1]]
    assert calls == [8, 8 + 3 * failures[0], 8 + 3 * failures[1]]  # one generation call per batch
    assert [entry["pivots/tried"] for entry in logs[:-1]] == [0, *failures[:2]]
    assert all("generation/extra_seconds" not in entry for entry in logs)
    assert all(entry["completions/max_length"] <= 8 for entry in logs[:-1])
    assert logs[1]["aux/completions/max_length"] <= 8
    assert "aux/loss" in logs[1]


def test_unrecovered_pivots_are_written_one_per_line(tmp_path):
    logs = log_of(tmp_path, hard_states_file="hard/states.jsonl", conversational=True)
    lines = [json.loads(line) for line in (tmp_path / "hard" / "states.jsonl").read_text().splitlines()]
    unrecovered = sum(e["pivots/tried"] * (1 - e["pivots/recovered_fraction"]) for e in logs[:-1])
    assert len(lines) == round(unrecovered) > 0
    tokenizer = make_tokenizer()
    for line in lines:
        assert tokenizer.decode(line["prefix_ids"]) == line["prefix"]
        assert tokenizer.decode(line["prompt_ids"]) == f"<u>{line['prompt'][0]['content']}<a>"
        assert 0 < line["depth"] <= 1 and line["step"] in (0, 1, 2)


def scorer_of_main_rows(branch_reward=None):
    """Scores the main rows 0, and of every four branches the first by `branch_reward`, the others not at all."""
    calls = iter(range(1000))

    def reward(completions, **kwargs):
        if next(calls) % 2 == 0:
            return [0.0] * len(completions)
        return [branch_reward if i % 4 == 0 else None for i in range(len(completions))]

    return reward


@pytest.mark.parametrize("reward, label", [(None, None), (0.0, 0), (1.0, 1)])
def test_pivots_whose_branches_nobody_scores_have_no_outcome(tmp_path, reward, label):
    options = dict(num_branches=4, hard_states_file="hard.jsonl", log_completions=True, max_steps=2)
    options["reward_funcs"] = scorer_of_main_rows(reward)
    trainer = make(tmp_path, **options)
    trainer.train()
    logs = trainer.state.log_history[:-1]
    assert [log["pivots/tried"] for log in logs] == [8, 8]
    assert [log.get("pivots/recovered_fraction") for log in logs] == [label] * 2
    assert [log["pivots/informative_fraction"] for log in logs] == [0, 0]
    assert len(trainer.branch_explorer.estimator) == (0 if label is None else 16)
    path = tmp_path / "hard.jsonl"
    assert (len(path.read_text().splitlines()) if path.exists() else 0) == (16 if label == 0 else 0)
    recovered = trainer.completion_columns()["recovered"]
    assert all(math.isnan(r) for r in recovered) if label is None else recovered == [label] * 8


def test_evaluation_is_plain_and_touches_no_state(tmp_path):
    evaluation = make_dataset().select(range(8))
    options = dict(eval_dataset=evaluation, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    with_eval = make(tmp_path, **options)
    reference = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options)
    torch.manual_seed(0)
    first = with_eval.evaluate()
    torch.manual_seed(0)
    second = reference.evaluate()
    same = [k for k in second if not k.endswith(("runtime", "per_second", "_time"))]
    assert {k: first[k] for k in same} == {k: second[k] for k in same}
    assert not any("pivots" in k or "aux" in k for k in first)
    assert len(with_eval.branch_explorer.estimator) == 0 and with_eval.main_completion_ids == []


def test_a_plain_config_gets_the_papers_defaults(tmp_path):
    trainer = make_trainer(DeepGRPOTrainer, GRPOConfig, tmp_path)
    args = trainer.args
    assert (args.num_branches, args.num_pivots, args.depth_bias, args.aux_loss_weight) == (8, 1, 2.0, 1.0)
    assert (args.pivot_selection, args.branch_from, args.success_threshold) == ("utility", "failures", 1.0)
    trainer.train()
    assert trainer.state.log_history[0]["pivots/tried"] > 0


def test_the_names_are_exported_from_the_top_level():
    assert trl_explore.DeepGRPOTrainer is DeepGRPOTrainer and trl_explore.DeepGRPOConfig is DeepGRPOConfig
    with pytest.raises(AttributeError):
        trl_explore.Nothing  # noqa: B018


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(num_branches=1), "`num_branches=1` must be at least 2"),
        (dict(num_pivots=0), "`num_pivots=0`"),
        (dict(aux_loss_weight=-0.5), "`aux_loss_weight=-0.5` must not be negative"),
        (dict(depth_bias=math.inf), "`depth_bias=inf` must be a finite"),
        (dict(estimator_l2=0.0), "`estimator_l2=0.0`"),
        (dict(max_pivots_per_batch=0), "`max_pivots_per_batch=0`"),
        (dict(segment_length=9), "`max_completion_length=8` is smaller than one segment of `segment_length=9`"),
        (dict(segment_length=0), "`segment_length=0`"),
        (dict(min_remaining_tokens=0), "`min_remaining_tokens=0` must be at least 1"),
        (dict(min_remaining_tokens=9), "`min_remaining_tokens=9` is more than `max_completion_length=8`"),
        (dict(segment_delimiters=[""]), "segment_delimiters"),
        (dict(segmentation="delimiters"), "`segmentation`: unknown value 'delimiters'; did you mean 'delimiter'"),
        (dict(pivot_selection="best"), "`pivot_selection`: unknown value 'best'; choose one of root, uniform"),
        (dict(branch_from="failure"), "did you mean 'failures'"),
        (dict(hard_states_file="../x.jsonl"), "`hard_states_file='../x.jsonl'`"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_bad_values_are_refused_by_the_config(tmp_path, options, words):
    with pytest.raises(ValueError) as error:
        DeepGRPOConfig(str(tmp_path), max_completion_length=8, use_cpu=True, bf16=False, **options)
    assert words in str(error.value)
