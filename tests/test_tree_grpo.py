"""TreeGRPO: reductions to GRPO, what it trains on, scoring, replay, its files and its errors."""

import json
import logging
import warnings
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    differ,
    make_dataset,
    make_tokenizer,
    make_trainer,
    never,
    one_batch,
    parameters,
    saved_model,
    text_of,
    trained,
)

from trl_explore.rows.streams import loss_mask, row_tokens
from trl_explore.tasks.tiny_model import VOCAB_SIZE
from trl_explore.trainers import TreeGRPOConfig, TreeGRPOTrainer
from trl_explore.trees.credit import first_appearance, tree_advantages
from trl_explore.trees.metrics import NarrowSearch

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
SMALL = dict(expansion_width=3, node_length=2)
FLAT = dict(expansion_width=4, max_tree_depth=1, node_length=8, epsilon_high=None)


def signed(completions, answer, **kwargs):
    return [2 * reward - 1 for reward in contains_answer(completions, answer)]


def with_letter(completions, **kwargs):
    """A second reward for the same completions, of which one in three is `None`."""
    return [None if len(text_of(c)) % 3 == 0 else 0.0 for c in completions]


SETTINGS = {
    "beta 0": {},
    "beta": dict(beta=0.1),
    "grpo loss": dict(loss_type="grpo"),
    "dr_grpo loss and beta": dict(loss_type="dr_grpo", beta=0.1),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "accumulation": dict(gradient_accumulation_steps=2),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora": dict(peft_config=LORA),
    "lora, beta, two iterations": dict(peft_config=LORA, beta=0.1, num_iterations=2, max_steps=4),
    "conversational": dict(conversational=True),
    "clip higher": dict(num_iterations=2, max_steps=4, epsilon_high=0.28),
    "truncated completions masked": dict(mask_truncated_completions=True, max_completion_length=24, node_length=24),
    "zero advantages dropped": dict(drop_zero_advantage=True),
    "uniform trees trained": dict(skip_uniform_trees=False),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_depth_one_is_grpo_on_signed_rewards_bit_for_bit(tmp_path, options):
    from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

    plain = (ExplorationTrainer, ExplorationConfig) if "drop_zero_advantage" in options else (GRPOTrainer, GRPOConfig)
    as_grpo = {name: value for name, value in options.items() if name not in ("node_length", "skip_uniform_trees")}
    expected, plain_log = trained(*plain, tmp_path, scale_rewards="none", reward_funcs=signed, **as_grpo)
    options = {**FLAT, **options}
    got, log = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)
    assert_same(got, expected)
    assert differ(got, parameters(make_trainer(output_dir=tmp_path, peft_config=options.get("peft_config"))))
    for first, second in zip(log[:-1], plain_log[:-1], strict=True):
        if "reward" not in second:  # a step on rows of an earlier generation
            continue
        assert first["reward"] == pytest.approx((second["reward"] + 1) / 2)
        assert first["completions/mean_length"] == second["completions/mean_length"]


def first_batch(trainer):
    """The first generation batch as it reaches the loss."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def tree_trainer(folder, **options):
    return make_trainer(TreeGRPOTrainer, TreeGRPOConfig, folder, **{**SMALL, **options})


def rows_by_completion(inputs, trainer):
    """Row of the batch for every trained completion of every tree; TRL shuffles rows."""
    lengths = inputs["completion_mask"].sum(dim=1).tolist()
    prompts = row_tokens(inputs)[0]
    rows = {}
    for i, (ids, length) in enumerate(zip(inputs["completion_ids"].tolist(), lengths, strict=True)):
        rows.setdefault((tuple(prompts[i]), tuple(ids[:length])), []).append(i)
    return rows


@pytest.mark.parametrize("selection", ["global", "uct", "random"])
def test_rows_and_advantages_are_those_of_the_trees(tmp_path, selection):
    trainer = tree_trainer(tmp_path, selection=selection, skip_uniform_trees=False)
    inputs = first_batch(trainer)
    rows = rows_by_completion(inputs, trainer)
    assert len(trainer.explorer.trees) == 2 and inputs["completion_ids"].shape[0] == 8
    depths = set()
    for tree in trainer.explorer.trees:
        for row, advantages in zip(tree.rows, tree_advantages(tree), strict=True):
            i = rows[tuple(tree.prompt_ids), tuple(tree.completion_ids(row))].pop()
            got = inputs["advantages"][i].tolist()
            assert got[: len(advantages)] == pytest.approx(advantages)
            assert not any(got[len(advantages) :])
            depths.add(tree.nodes[row].depth)
        assert all(len(node.token_ids) <= 2 or node.direct for node in tree.nodes)
        # A random model is unsure, but never more than over its whole vocabulary.
        assert all(0 < node.entropy < 3.5 for node in tree.nodes[1:])
    assert len(depths) > 1 and not any(rows.values())


def test_entropies_are_those_that_a_forward_pass_gives(tmp_path):
    trainer = tree_trainer(tmp_path, temperature=0.8)
    first_batch(trainer)
    tree = trainer.explorer.trees[0]
    row = tree.rows[-1]
    ids = torch.tensor([tree.prompt_ids + tree.completion_ids(row)])
    with torch.no_grad():
        logprobs = (trainer.model(ids).logits[0, len(tree.prompt_ids) - 1 : -1] / 0.8).log_softmax(dim=-1)
    expected = -(logprobs.exp() * logprobs).sum(dim=-1).mean().item()
    assert tree.trajectory_entropy(row) == pytest.approx(expected, abs=1e-4)
    # Seconds of generation are those of the whole batch, not of an iteration.
    assert tree.iterations > 1 and len(trainer._metrics["train"]["generation/main_seconds"]) == 1


class Counting:
    """A reward function that notes every completion it is asked about."""

    __name__ = "counting"

    def __init__(self):
        self.seen, self.calls = Counter(), 0

    def __call__(self, prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        assert trainer_state.global_step >= 0 and len(prompts) == len(answer) == len(completion_ids)
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            self.seen[str(prompt), tuple(ids)] += 1
        self.calls += 1
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("calls", self.calls)
        return contains_answer(completions, answer)


@pytest.mark.parametrize("conversational", [False, True])
def test_every_completion_is_scored_once(tmp_path, conversational):
    reward = Counting()
    trainer = tree_trainer(tmp_path, reward_funcs=reward, conversational=conversational)
    first_batch(trainer)
    terminal = sum(node.terminal for tree in trainer.explorer.trees for node in tree.nodes)
    assert sum(reward.seen.values()) == terminal
    scored = [node for tree in trainer.explorer.trees for node in tree.nodes if node.terminal]
    assert all(node.rewards in ((0.0,), (1.0,)) for node in scored)
    # The table of completions shows what was logged when each was scored.
    lengths = [len(ids) for ids in trainer.main_completion_ids]
    assert list(trainer._logs["extra"]["length"]) == lengths
    rewards = [tree.nodes[row].rewards[0] for tree in trainer.explorer.trees for row in tree.rows]
    metrics = trainer._metrics["train"]
    assert metrics["calls"] and metrics["reward"] == [pytest.approx(sum(rewards) / 8)]


def test_a_reward_model_sees_each_completion_once(tmp_path):
    class Model(torch.nn.Module):
        config = type("Config", (), {"_name_or_path": "tiny/reward", "pad_token_id": 0, "problem_type": None})()
        rows = 0

        def forward(self, input_ids, **kwargs):
            Model.rows += len(input_ids)
            return type("Output", (), {"logits": (input_ids == 6).any(dim=1, keepdim=True).float()})()

    trainer = tree_trainer(tmp_path, reward_funcs=Model(), reward_processing_classes=make_tokenizer())
    first_batch(trainer)
    scored = sum(node.terminal for tree in trainer.explorer.trees for node in tree.nodes)
    assert Model.rows == scored
    assert {node.outcome for tree in trainer.explorer.trees for node in tree.nodes if node.terminal} <= {1.0, -1.0}


def test_several_reward_functions_keep_their_values_and_weights(tmp_path):
    async def slow(completions, **kwargs):
        return [0.5] * len(completions)

    trainer = tree_trainer(
        tmp_path,
        reward_funcs=[contains_answer, with_letter, slow],
        reward_weights=[1.0, 5.0, 2.0],
        success_threshold=2,
    )
    first_batch(trainer)
    metrics = trainer._metrics["train"]
    assert metrics["rewards/slow/mean"] == [0.5] and metrics["rewards/with_letter/mean"] == [0.0]
    nodes = [tree.nodes[row] for tree in trainer.explorer.trees for row in tree.rows]
    assert all((node.outcome > 0) == (node.rewards[0] == 1.0) for node in nodes)
    assert metrics["reward"][0] == pytest.approx(1.0 + sum(node.rewards[0] for node in nodes) / 8)


def test_completions_that_cannot_be_scored_have_no_advantage(tmp_path):
    def begins_well(completions, **kwargs):
        return [None if c[:1].isdigit() else float(len(c) % 2) for c in completions]

    options = dict(reward_funcs=begins_well, skip_uniform_trees=False, max_search_iterations=2)
    trainer = tree_trainer(tmp_path, **options)
    inputs = first_batch(trainer)
    rows = rows_by_completion(inputs, trainer)
    unscored = 0
    for tree in trainer.explorer.trees:
        for row in tree.rows:
            i = rows[tuple(tree.prompt_ids), tuple(tree.completion_ids(row))].pop()
            if tree.nodes[row].outcome is None:
                unscored += 1
                assert not inputs["advantages"][i].any()
    assert unscored > 0


def test_uniform_trees_train_nothing_unless_asked_to(tmp_path):
    before = parameters(make_trainer(output_dir=tmp_path))
    for reward in (never, always):
        options = dict(SMALL, reward_funcs=reward, max_steps=1)
        skipped, log = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, skip_uniform_trees=True, **options)
        assert_same(skipped, before)
        assert log[0]["tree/uniform_fraction"] == 1.0
        kept, _ = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, skip_uniform_trees=False, **options)
        assert differ(kept, before)


def test_shared_nodes_trained_once_give_the_gradient_over_distinct_nodes(tmp_path):
    options = dict(optim="sgd", max_grad_norm=0.0, learning_rate=0.5, max_steps=1, lr_scheduler_type="constant")
    trainer = tree_trainer(tmp_path, share_prefix_once=True, skip_uniform_trees=False, **options)
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(saved_model())
    loss, num_tokens, shared = 0.0, 0, 0
    for tree in trainer.explorer.trees:
        advantages, masks = tree_advantages(tree), first_appearance(tree)
        for row, credit, mask in zip(tree.rows, advantages, masks, strict=True):
            completion = tree.completion_ids(row)
            ids = torch.tensor([tree.prompt_ids + completion])
            logits = model(ids).logits[0, len(tree.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            loss = loss - (logprobs * torch.tensor(credit) * torch.tensor(mask)).sum()
            num_tokens += sum(mask)
            shared += len(mask) - sum(mask)
    assert shared > 0
    (loss / num_tokens).backward()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in model.named_parameters()}
    assert_same(parameters(trainer), expected, tolerance=1e-6)
    again, _ = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **SMALL, **options, skip_uniform_trees=False)
    assert differ(again, expected)


def test_shared_nodes_are_trained_in_the_first_row_that_is_not_masked(tmp_path):
    options = dict(share_prefix_once=True, mask_truncated_completions=True, num_generations=8)
    trainer = tree_trainer(tmp_path, per_device_train_batch_size=32, **options)
    masks = loss_mask(one_batch(trainer)).tolist()
    expected, found = 0, sum(map(sum, masks))
    for place, tree in enumerate(trainer.explorer.trees):
        nodes = set()
        for row, mask in zip(tree.rows, masks[8 * place :], strict=False):
            if any(mask):
                nodes.update(tree.path(row))
        expected += sum(len(tree.nodes[node].token_ids) for node in nodes)
    assert found == expected > 0


def test_direct_rollouts_fill_the_rows_when_the_budget_ends(tmp_path):
    trainer = tree_trainer(tmp_path, max_search_iterations=1)
    assert len(first_batch(trainer)["advantages"]) == 8
    assert all(tree.iterations == 1 and len(tree.results) == 4 for tree in trainer.explorer.trees)
    assert sum(tree.nodes[row].direct for tree in trainer.explorer.trees for row in tree.rows) >= 6
    trainer = tree_trainer(tmp_path, max_tree_tokens=20)
    first_batch(trainer)
    for tree in trainer.explorer.trees:
        assert sum(len(node.token_ids) for node in tree.nodes if not node.direct) <= 20


OTHERS = {
    "shrinking width": dict(width_decay=1, min_expansion_width=2, max_tree_depth=4),
    "mean and std": dict(advantage_normalization="mean_std"),
    "outcomes of rows": dict(node_credit="outcome"),
    "overlong penalty": dict(overlong_buffer=4),
    "entropy, log depth": dict(entropy_weight=0.4, depth_bonus="log"),
    "once, dropped": dict(share_prefix_once=True, drop_zero_advantage=True),
    "sequence level": dict(importance_sampling_level="sequence", num_iterations=2),
    "cispo": dict(loss_type="cispo", num_iterations=2),
    "vespo": dict(loss_type="vespo", num_iterations=2),
    "luspo": dict(loss_type="luspo", num_iterations=2),
    "sapo": dict(loss_type="sapo", num_iterations=2),
    "off-policy mask": dict(off_policy_mask_threshold=0.5, num_iterations=2),
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_it_learns_with(tmp_path, options):
    before = parameters(make_trainer(output_dir=tmp_path))
    got, log = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **{**SMALL, "max_steps": 2, **options})
    assert differ(got, before) and all(p.isfinite().all() for p in got.values())
    assert all(torch.tensor(entry["loss"]).isfinite() for entry in log[:-1])


@pytest.mark.parametrize(("uniform", "solved", "warns"), [(99, 40, True), (99, 2, False), (60, 40, False)])
def test_a_search_that_copies_one_completion_is_named(uniform, solved, warns):
    watch = NarrowSearch(TreeGRPOConfig(max_completion_length=16, depth_weight=1.0, bf16=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            watch.look({"trees": 100.0, "uniform": float(uniform), "solved": float(solved)})
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == warns
    assert all("lower `depth_weight` (now 1), or raise `node_length` (now 2)" in message for message in messages)


def test_metrics(tmp_path):
    trainer = tree_trainer(tmp_path, max_steps=1)
    trainer.train()
    log, trees = trainer.state.log_history[0], trainer.explorer.trees
    rows = [(tree, row) for tree in trees for row in tree.rows]
    trained_tokens = sum(len(tree.completion_ids(row)) for tree, row in rows)
    assert log["tree/sampled_tokens"] == sum(tree.generated_tokens for tree in trees)
    assert log["tree/trained_tokens"] == trained_tokens
    assert log["tree/token_ratio"] == pytest.approx(log["tree/sampled_tokens"] / trained_tokens)
    assert log["tree/iterations"] == sum(tree.iterations for tree in trees) / 2
    assert log["tree/nodes"] == sum(len(tree.nodes) - 1 for tree in trees) / 2
    assert log["tree/max_depth"] == sum(max(n.depth for n in tree.nodes) for tree in trees) / 2
    assert log["tree/success_fraction"] == log["reward"]
    assert 0 < log["tree/encoded_fraction"] < 0.5  # siblings share the encoding of their prefix
    assert 0 < log["tree/distinct_fraction"] < 1
    for name in ("sampling_seconds", "scoring_seconds", "own_seconds"):
        assert log[f"tree/{name}"] > 0
    assert 0 < log["generation/main_seconds"] <= log["tree/sampling_seconds"]


def test_entropies_are_known_where_a_choice_looks_at_them(tmp_path):
    trainer = tree_trainer(tmp_path, max_search_iterations=5, dump_trees="trees", entropy_weight=0.0)
    first_batch(trainer)
    nodes = [node for tree in trainer.explorer.trees for node in tree.nodes[1:]]
    assert {node.direct for node in nodes} == {True, False} and all(
        (node.entropy == 0) == node.direct for node in nodes
    )
    known = [(tree, row) for tree in trainer.explorer.trees for row in tree.rows if not tree.nodes[row].direct]
    expected = sum(tree.trajectory_entropy(row) for tree, row in known) / len(known)
    assert trainer._metrics["train"]["tree/trajectory_entropy"] == [pytest.approx(expected)]
    written = [json.loads(line) for line in (tmp_path / "trees" / "trees_0.jsonl").read_text().splitlines()]
    assert all((node["entropy"] is None) == node["direct"] for tree in written for node in tree["nodes"][1:])


def test_evaluation_is_plain_grpo(tmp_path):
    options = dict(eval_dataset=make_dataset().select(range(8)), num_generations_eval=2, max_steps=2)
    plain = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options)
    tree = tree_trainer(tmp_path, **options)
    state = tree.exploration_generator.get_state()
    torch.manual_seed(5)
    expected = plain.evaluate()
    torch.manual_seed(5)
    got = tree.evaluate()
    same = [key for key in expected if "time" not in key and "second" not in key]
    assert {k: got[k] for k in same} == {k: expected[k] for k in same}
    assert tree.explorer.trees == [] and torch.equal(tree.exploration_generator.get_state(), state)


def test_default_node_length_follows_short_completions(tmp_path):
    def node_length(**options):
        return TreeGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options).limits().node_length

    assert node_length(max_completion_length=256) == 32 and node_length(max_completion_length=16384) == 256
    assert node_length(max_completion_length=3, num_generations=2) == 1


# ------------------------------------------------------------------------------------------------------- replay


REPLAY = dict(replay_buffer=True, replay_threshold=0.9, replay_solutions=2)
TWO_PROMPTS = make_dataset().select(range(2))


def offer_solutions(trainer, dataset, completion):
    for prompt in dataset["prompt"]:
        trainer.solutions.offer(make_tokenizer()(prompt)["input_ids"], [completion], 0.25)


def test_solutions_replace_failures_at_the_next_visit(tmp_path):
    trainer = tree_trainer(tmp_path, **REPLAY, train_dataset=TWO_PROMPTS, max_steps=6)
    trainer.train()
    log = trainer.state.log_history
    assert log[0]["replay/prompts"] == 0
    later = [entry for entry in log[:-1] if entry["replay/prompts"] > 0]
    assert later and sum(entry["replay/replaced_rows"] for entry in later) > 0
    for entry in later:  # a tree that was not searched costs what GRPO costs
        if entry["replay/prompts"] == 2:
            assert entry["tree/sampled_tokens"] <= 8 * 8 and "tree/iterations" not in entry
    lines = [json.loads(line) for line in (tmp_path / "solutions.jsonl").read_text().splitlines()]
    assert len(lines) - 1 == trainer.solutions.num_solutions > 0


def test_a_replayed_row_keeps_successes_and_its_score(tmp_path):
    trainer = tree_trainer(tmp_path, **REPLAY, train_dataset=TWO_PROMPTS)
    tokenizer = make_tokenizer()
    solutions = {}
    for example in TWO_PROMPTS:
        prompt_ids = tuple(tokenizer(example["prompt"])["input_ids"])
        solutions[prompt_ids] = [tokenizer(example["answer"])["input_ids"] + [1]]
        trainer.solutions.offer(list(prompt_ids), solutions[prompt_ids], 0.25)
    reward = Counting()
    trainer.reward_funcs[0] = reward
    inputs = first_batch(trainer)
    assert len(inputs["advantages"]) == 8
    for tree in trainer.explorer.trees:
        assert tree.reason == "replayed" and tree.iterations == 0
        (solution,) = solutions[tuple(tree.prompt_ids)]
        assert sum(tree.completion_ids(row) == solution for row in tree.rows) == 1
        assert all(tree.nodes[row].outcome == 2 * tree.nodes[row].rewards[0] - 1 for row in tree.rows)
    # Direct rollouts, and each solution when it is used.
    assert sum(reward.seen.values()) == 8 + 2


def test_prompts_that_direct_rollouts_solve_leave_the_cache_and_are_searched_again(tmp_path):
    options = dict(train_dataset=TWO_PROMPTS, reward_funcs=always, max_steps=2)
    trainer = tree_trainer(tmp_path, **REPLAY, **options)
    offer_solutions(trainer, TWO_PROMPTS, [6, 1])
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["replay/replaced_rows"] == 0
    assert (first["replay/prompts"], first["replay/left_prompts"], first["replay/stored_prompts"]) == (2, 2, 0)
    assert (second["replay/prompts"], second["replay/left_prompts"]) == (0, 0) and second["tree/iterations"] > 0
    assert len((tmp_path / "solutions.jsonl").read_text().splitlines()) == 1  # the header


def test_prompts_that_are_seldom_solved_stay_in_the_cache_and_solutions_that_are_wrong_now_leave_it(tmp_path):
    def only_six(completion_ids, **kwargs):
        return [float(ids == [6, 1]) for ids in completion_ids]

    trainer = tree_trainer(tmp_path, **REPLAY, train_dataset=TWO_PROMPTS, reward_funcs=only_six, max_steps=2)
    offer_solutions(trainer, TWO_PROMPTS.select([0]), [6, 1])
    offer_solutions(trainer, TWO_PROMPTS.select([1]), [7, 1])
    trainer.train()
    log = trainer.state.log_history[:2]
    assert [(entry["replay/prompts"], entry["replay/left_prompts"]) for entry in log] == [(2, 0), (1, 0)]
    lines = [json.loads(line) for line in (tmp_path / "solutions.jsonl").read_text().splitlines()]
    assert [line["completion_ids"] for line in lines[1:]] == [[6, 1]]


def test_a_second_run_of_a_trainer_starts_its_file_again(tmp_path):
    def often(completion_ids, **kwargs):
        return [float(sum(ids) % 8 == 0) for ids in completion_ids]

    dataset = make_dataset()
    trainer = tree_trainer(tmp_path, **REPLAY, train_dataset=dataset.select(range(4)), reward_funcs=often)
    trainer.train()
    num_first = trainer.solutions.num_solutions
    trainer.train()
    assert trainer.solutions.num_solutions >= num_first > 0
    written = len((tmp_path / "solutions.jsonl").read_text().splitlines()) - 1  # without the header
    assert written == trainer.solutions.num_solutions and (tmp_path / "_earlier-1" / "solutions.jsonl").is_file()
    trainer.train_dataset = dataset.select(range(4, 8))  # solutions of the old data are forgotten
    trainer.train()
    new_prompts = {tuple(make_tokenizer()(prompt)["input_ids"]) for prompt in trainer.train_dataset["prompt"]}
    assert {tuple(prompt) for prompt, _ in trainer.solutions.state_dict()["solutions"]} <= new_prompts


def test_truncated_solutions_are_neither_stored_nor_replayed_if_they_are_masked(tmp_path):
    options = dict(train_dataset=TWO_PROMPTS, reward_funcs=always, mask_truncated_completions=True)
    trainer = tree_trainer(tmp_path, replay_buffer=True, replay_threshold=1.0, **options)
    offer_solutions(trainer, TWO_PROMPTS.select([0]), [6, 7])
    inputs = first_batch(trainer)
    assert all(tree.reason != "replayed" for tree in trainer.explorer.trees)
    assert not inputs["completion_mask"].any(dim=1).all()  # otherwise this tests nothing
    found = [ids for _, ids in trainer.solutions.state_dict()["solutions"] if ids != [6, 7]]
    assert all(ids[-1] in (*trainer.eos_token_ids, trainer.processing_class.pad_token_id) for ids in found)


@pytest.mark.parametrize("ending", [[1], []], ids=["end token", "none"])
def test_a_replayed_row_is_written_down_as_it_is(tmp_path, ending):
    def six(completion_ids, **kwargs):  # right if it is the solution of the first prompt
        return [float(ids == [6, 7, *ending]) for ids in completion_ids]

    options = dict(train_dataset=TWO_PROMPTS, reward_funcs=six, dump_trees="trees", incomplete_score=-0.5, max_steps=1)
    trainer = tree_trainer(tmp_path, **REPLAY, **options)
    offer_solutions(trainer, TWO_PROMPTS.select([0]), [6, 7, *ending])
    offer_solutions(trainer, TWO_PROMPTS.select([1]), [6, 8, *ending])
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "trees" / "trees_0.jsonl").read_text().splitlines()]
    found = {tuple(node["token_ids"]): node for record in records for node in record["nodes"]}
    for ids, outcome in (([6, 7], 1.0), ([6, 8], -1.0 if ending else -0.5)):
        node = found[(*ids, *ending)]
        assert node["value"] == node["q"] == node["credit"] == node["outcome"] == outcome and node["visits"] == 1
        assert node["finished"] is bool(ending)
    assert all(record["nodes"][0]["visits"] == 5 for record in records)


def test_a_second_round_starts_from_the_solutions_of_the_first(tmp_path):
    first = tree_trainer(tmp_path / "first", **REPLAY)
    first.train()
    file = tmp_path / "first" / "solutions.jsonl"
    second = tree_trainer(tmp_path / "second", **REPLAY, replay_file=str(file))
    assert second.solutions.state_dict() == first.solutions.state_dict() and len(first.solutions) > 0
    second.train()
    again = tree_trainer(tmp_path / "third", **REPLAY, replay_file=str(tmp_path / "second" / "solutions.jsonl"))
    assert again.solutions.state_dict() == second.solutions.state_dict()


# -------------------------------------------------------------------------------------------------------- files


def test_trees_are_written_down(tmp_path):
    trainer = tree_trainer(tmp_path, dump_trees="trees", max_steps=2)
    trainer.train()
    lines = (tmp_path / "trees" / "trees_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["step"], r["index"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last, tree = records[-1], trainer.explorer.trees[-1]
    assert last["prompt"] == make_tokenizer().decode(tree.prompt_ids) and last["iterations"] == tree.iterations
    assert [n["token_ids"] for n in last["nodes"]] == [n.token_ids for n in tree.nodes]
    assert [n["result"] is not None for n in last["nodes"]] == [n.index in tree.results for n in tree.nodes]
    assert all(n["reward"] in (0.0, 1.0) for n in last["nodes"] if n["terminal"])


# ------------------------------------------------------------------------------------------------------- errors


ERRORS = {
    "expansion_width=0": dict(expansion_width=0),
    "max_tree_depth=0": dict(max_tree_depth=0),
    "node_length=0": dict(node_length=0),
    "node_length=9` is longer than a whole completion of `max_completion_length=8": dict(node_length=9),
    "num_generations=4` is more than the 2 completions": dict(expansion_width=2, max_tree_depth=1),
    "more than the 3 completions.*depth 1": dict(expansion_width=3, node_length=8),
    "selection.*unknown value 'randon'; did you mean 'random'": dict(selection="randon"),
    "depth_bonus.*unknown value 'cube'": dict(depth_bonus="cube"),
    "advantage_normalization.*unknown value 'std'": dict(advantage_normalization="std"),
    "node_credit.*unknown value 'q'": dict(node_credit="q"),
    "max_search_iterations=0": dict(max_search_iterations=0),
    "max_tree_tokens=0": dict(max_tree_tokens=0),
    "incomplete_score=0.5` must be between -1 and 0": dict(incomplete_score=0.5),
    "q_decay_min=2": dict(q_decay_min=2),
    "q_temperature=0.0": dict(q_temperature=0.0),
    "overlong_buffer=9` is longer than": dict(overlong_buffer=9),
    "overlong_buffer=-1": dict(overlong_buffer=-1),
    "replay_threshold=1.5": dict(replay_threshold=1.5),
    "replay_solutions=0": dict(replay_solutions=0),
    "has no effect without `replay_buffer=True`": dict(replay_file="x.jsonl"),
    "dump_trees='../x'` must name a file inside": dict(dump_trees="../x"),
    "no meaning for a tree search": dict(multi_objective_aggregation="normalize_then_sum"),
    "must be a finite number": dict(entropy_weight=float("nan")),
    "`rollout_func` cannot be combined with TreeGRPOTrainer": dict(rollout_func=lambda prompts, trainer: {}),
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=ERRORS.keys())
def test_bad_input_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        make_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)


def test_a_missing_replay_file_is_named(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere.jsonl"):
        tree_trainer(tmp_path, **REPLAY, replay_file=str(tmp_path / "nowhere.jsonl"))


def test_groups_that_span_processes_are_refused(tmp_path):
    args = tree_trainer(tmp_path).args
    args.per_device_train_batch_size = 6  # as on one of two processes that share twelve rows
    with pytest.raises(ValueError, match="`per_device_train_batch_size=6` times `steps_per_generation=1` must be a"):
        make_trainer(TreeGRPOTrainer, lambda **fields: args)


def test_a_failing_reward_function_is_the_users_own_error(tmp_path, caplog):
    def broken(completions, **kwargs):
        raise ZeroDivisionError("mine")

    trainer = tree_trainer(tmp_path, reward_funcs=broken)
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError, match="mine"):
        trainer.train()
    assert trainer.rollout_func is None  # what was swapped in is swapped back


def test_a_model_without_attention_layers_is_trained(tmp_path):
    # The cache of such a model has no length.
    def parity(completion_ids, **columns):
        return [float(sum(ids) % 2) for ids in completion_ids]

    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4))
    trainer = make_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, model=model, reward_funcs=parity, max_steps=1)
    before = parameters(trainer)
    trainer.train()
    assert differ(parameters(trainer), before)
