"""Pass@k and the filter of hard prompts on two processes; see `ranks.py`."""

from pathlib import Path

from accelerate.utils import gather_object
from world import contains_answer, make_dataset, make_model, make_tokenizer, make_trainer

from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.evaluation.hard_prompts import filter_hard_prompts


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


def main(folder):
    return {"watched": watched(folder), "filtered": filtered(folder)}
