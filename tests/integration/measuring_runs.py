"""Pass@k and the filter of hard prompts on two processes; see `ranks.py`."""

from pathlib import Path

from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer
from world import contains_answer, make_dataset, make_model, make_tokenizer, make_trainer

from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.evaluation.hard_prompts import filter_hard_prompts
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer
from trl_explore.trainers.base import count_sampled


def watched(folder):
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompts)
        return contains_answer(completions, **columns)

    trainer = make_trainer(output_dir=folder, max_steps=1)
    rows = make_dataset().select([1, 8, 14])
    watch = PassAtKCallback(trainer, rows, reward_funcs=reward, num_samples=4, k=(1, 4), at_begin=False)
    trainer.add_callback(watch)
    trainer.train()
    return {"history": watch.history, "seen": seen, "prompts": rows["prompt"][:]}


def filtered(folder):
    seen = []

    def reward(prompts, **columns):
        seen.extend(prompts)
        return contains_answer(prompts=prompts, **columns)

    hard = filter_hard_prompts(
        make_model(),
        make_dataset(),
        reward_funcs=reward,
        processing_class=make_tokenizer(),
        threshold=1.0,
        max_completion_length=8,
        batch_size=32,
        scores_file=str(Path(folder) / "scores.jsonl"),
    )
    return {"hard": hard.to_list(), "seen": len(seen), "gathered": gather_object([len(seen)])}


class Searcher(ExplorationTrainer):
    """Samples further completions, twice as many on the second process."""

    def setup(self):
        self.own_tokens = 0

    def search(self, output):
        prompts = self.encode_prompts([example["prompt"] for example in self.main_examples])
        found = self.sample(prompts, self.ranks.index + 1, 5)
        self.own_tokens += sum(len(continuation.token_ids) for group in found for continuation in group)


def sampled(folder, trainer_class, config_class):
    asked = []

    def reward(completion_ids, **columns):
        asked.append(sum(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    trainer = make_trainer(trainer_class, config_class, folder, reward_funcs=reward, max_steps=2)
    count = count_sampled(trainer)
    trainer.train()
    own = sum(asked) + (trainer.own_tokens if isinstance(trainer, Searcher) else 0)
    logged = [entry.get("generation/sampled_tokens") for entry in trainer.state.log_history if "reward" in entry]
    return {"own": own, "counted": (count.own, count.total), "logged": logged}


def main(folder):
    return {
        "watched": watched(folder),
        "filtered": filtered(folder),
        "searcher": sampled(folder, Searcher, ExplorationConfig),
        "grpo": sampled(folder, GRPOTrainer, GRPOConfig),
    }
