"""Runs of test_two_processes.py; see `ranks.py`."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import LoraConfig
from transformers import Qwen2Config
from trl import GRPOConfig, GRPOTrainer
from world import always, contains_answer, differ, make_tokenizer, make_trainer, parameters

from trl_explore.rewards.checks import RewardError
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import row_tokens
from trl_explore.trainers import (
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
)

CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
SGD = dict(optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, learning_rate=0.1)
# Groups of four over two ranks with two rows each: every group spans both.
SPANNING = dict(per_device_train_batch_size=6, num_generations=4, max_steps=3)
WHOLE = {**SPANNING, "per_device_train_batch_size": 8}


def never_scores(completions, **kwargs):
    return [None] * len(completions)


class ShardedRewardModel(torch.nn.Module):
    """A stand-in for a sharded reward model: every call waits for the other rank, for a minute."""

    def __init__(self):
        super().__init__()
        self.config = Qwen2Config(name_or_path="sharded")
        self.group = torch.distributed.new_group(timeout=timedelta(seconds=60))
        self.num_calls = 0

    def forward(self, input_ids, **inputs):
        torch.distributed.all_reduce(torch.zeros(1), group=self.group)
        self.num_calls += 1
        return SimpleNamespace(logits=5.0 + input_ids.sum(1, keepdim=True) % 2)


class Echo(ExplorationTrainer):
    """The first group of every rank's rows again; `where` says which ranks hand theirs in, and `knowing` which ranks
    know the rewards."""

    where = knowing = (0, 1)

    def extra_streams(self, output, examples, rewards):
        rows = slice(0, 4) if self.accelerator.process_index in self.where else slice(0, 0)
        ids = self.main_completion_ids[rows]
        group = Rows(
            examples=examples[rows],
            prompt_ids=row_tokens(output)[0][rows],
            completion_ids=ids,
            loss_mask=[[1] * len(i) for i in ids],
            group_size=4,
            known_rewards=[[float(sum(i) % 2)] for i in ids if self.accelerator.process_index in self.knowing],
        )
        self.echo = self.scorer.score("echo", group)
        return {"echo": (self.echo, 1.0)}


class Rank1Only(Echo):
    where = (1,)


class Rank1OnlyUnknown(Rank1Only):
    knowing = ()


class Rank0Knows(Echo):
    knowing = (0,)


class Handed(ExplorationTrainer):
    """Both ranks hand in the rows that rank 1 sampled: a mean over copies is the mean over the originals."""

    def extra_streams(self, output, examples, rewards):
        from accelerate.utils import gather_object

        mine = [
            dict(examples=[e], prompt_ids=[p], completion_ids=[c], loss_mask=[[1] * len(c)])
            for e, p, c in zip(examples, row_tokens(output)[0], self.main_completion_ids, strict=True)
        ][:4]
        theirs = gather_object(mine)[4:8]
        merged = {k: [row[k][0] for row in theirs] for k in theirs[0]}
        known = [[float(sum(c) % 2)] for c in merged["completion_ids"]]
        return {"echo": (self.scorer.score("echo", Rows(**merged, group_size=4, known_rewards=known)), 1.0)}


def run(trainer_class, config_class, folder, **options):
    trainer = make_trainer(trainer_class, config_class, folder, **options)
    trainer.train()
    return trainer


def compare(first, second, tolerance=0.0):
    first, second = parameters(first), parameters(second)
    worst = max((first[n] - second[n]).abs().max().item() for n in first)
    return "same" if worst <= tolerance else f"differ by {worst}"


def reward_models(folder):
    """How often a rank called the reward model, and the rewards of its newest echo."""
    out = {}
    for name, trainer_class in {"filler rows": Rank1OnlyUnknown, "known rows": Rank0Knows}.items():
        model = ShardedRewardModel()
        options = dict(reward_funcs=model, reward_processing_classes=make_tokenizer(), max_steps=2)
        trainer = run(trainer_class, ExplorationConfig, folder, **options)
        out[name] = {"calls": model.num_calls, "rewards": sorted(set(trainer.echo.rewards.tolist()))}
    return out


def main(folder):
    out = {}
    plain = run(GRPOTrainer, GRPOConfig, folder, **SPANNING)
    rank = plain.accelerator.process_index
    out["num_processes"] = plain.accelerator.num_processes
    out["reward models"] = reward_models(folder)
    out["base"] = compare(run(ExplorationTrainer, ExplorationConfig, folder, **SPANNING), plain)
    out["weight zero"] = compare(
        run(DeepGRPOTrainer, DeepGRPOConfig, folder, aux_loss_weight=0.0, **CUTS, **SPANNING), plain
    )
    out["no novelty"] = compare(
        run(G2RLTrainer, G2RLConfig, folder, novelty_weight=0.0, reward_mapping="none", **SPANNING), plain
    )
    shuffled = run(G2RLTrainer, G2RLConfig, folder, novelty_scores="shuffled", **SPANNING)
    out["shuffled novelty"] = shuffled._novelty.tolist()
    out["no branches"] = compare(
        run(BranPOTrainer, BranPOConfig, folder, num_branches=0, num_branches_solved=0, **WHOLE),
        run(GRPOTrainer, GRPOConfig, folder, **WHOLE),
    )
    solved = run(GRPOTrainer, GRPOConfig, folder, reward_funcs=always, **SPANNING)
    out["no failures"] = compare(
        run(DeepGRPOTrainer, DeepGRPOConfig, folder, reward_funcs=always, **CUTS, **SPANNING), solved
    )

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    cases = {name: dict(loss_type=name) for name in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo")}
    cases["luspo"]["importance_sampling_level"] = "sequence"
    cases["accumulation"] = dict(gradient_accumulation_steps=2, steps_per_generation=2)
    cases["beta"] = dict(beta=0.2)
    cases["lora"] = dict(peft_config=lora)
    for name, options in cases.items():
        options = {**SGD, **SPANNING, "per_device_train_batch_size": 8, **options, "max_steps": 2}
        one = run(Rank1Only, ExplorationConfig, folder, **options)
        both = run(Handed, ExplorationConfig, folder, **options)
        grpo = run(GRPOTrainer, GRPOConfig, folder, **options)
        acted = differ(parameters(one), parameters(grpo))
        out[f"uneven {name}"] = compare(one, both, 2e-6) if acted else "the stream did not act"

    def only_rank_1_fails(completions, **kwargs):
        # A few tokens decide, so that groups keep some spread.
        return [1.0 if rank == 0 else float(len(c) % 2) for c in completions]

    lonely = run(DeepGRPOTrainer, DeepGRPOConfig, folder, reward_funcs=only_rank_1_fails, **CUTS, **SPANNING)
    out["lonely"] = [round(p.double().sum().item(), 6) for p in parameters(lonely).values()]
    out["lonely tried"] = [entry["pivots/tried"] for entry in lonely.state.log_history[:-1]]

    scored = []

    def counting(completions, answer, completion_ids, **kwargs):
        scored.append(len(completions))
        return contains_answer(completions, answer)

    class Counting(DeepGRPOTrainer):
        counts = []

        def extra_streams(self, *arguments):
            self.counts.append(len(self.branch_explorer._points))
            return super().extra_streams(*arguments)

    options = dict(
        **CUTS, **{**SPANNING, "max_steps": 6}, steps_per_generation=1, max_pivots_per_batch=3, reward_funcs=counting
    )
    deep = run(Counting, DeepGRPOConfig, folder, hard_states_file="hard.jsonl", **options)
    steps = deep.state.log_history[:-1]
    out["tried"] = [entry["pivots/tried"] for entry in steps]
    out["local"] = Counting.counts
    out["scored extra rows"] = sum(scored) - 6 * 6
    out["parameters"] = [round(p.double().sum().item(), 6) for p in parameters(deep).values()]
    out["estimator"] = deep.estimator.state_dict()
    out["unrecovered"] = round(
        sum(e["pivots/tried"] * (1 - e["pivots/recovered_fraction"]) for e in steps if e["pivots/tried"])
    )
    deep.accelerator.wait_for_everyone()
    out["hard states"] = len((Path(folder) / "hard.jsonl").read_text().splitlines())
    for entry in steps:
        if entry["pivots/tried"]:
            rate, size = entry["aux/reward"] * entry["pivots/tried"] * 3, entry["pivots/sampled_tokens"]
            consistent = abs(rate - round(rate)) < 1e-3 and size == round(size)
            consistent &= entry["aux/rewards/counting/mean"] == entry["aux/reward"]
            out["metrics"] = "consistent" if consistent and out.get("metrics", "consistent") == "consistent" else entry

    options = dict(**CUTS, **{**SPANNING, "max_steps": 5}, steps_per_generation=4)
    whole = run(DeepGRPOTrainer, DeepGRPOConfig, folder, save_strategy="steps", save_steps=2, **options)
    whole.accelerator.wait_for_everyone()
    again = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, folder, **options)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    out["resume"] = compare(again, whole)

    for name, ranks in {"no rank scores": (), "one rank scores": (0,)}.items():
        reward = contains_answer if whole.accelerator.process_index in ranks else never_scores
        try:
            run(ExplorationTrainer, ExplorationConfig, folder, **SPANNING, reward_funcs=reward)
            out[name] = "trained"
        except RewardError as error:
            out[name] = str(error)
    return out
