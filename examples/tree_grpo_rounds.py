"""
Adaptive training with tree search (the paper's section 3): two rounds, each on the prompts that are still hard.

    python examples/tree_grpo_rounds.py --output_dir out/rounds --max_steps 100

Before each round, every prompt is sampled 4 times and those with a pass rate below 25 % stay. Each round keeps correct
completions of prompts that its search rarely solves; the next round trains on them instead of searching those prompts
again. Started again after an interruption, it measures no prompt twice and continues from the last checkpoint.

Offline, on a CPU, with a file of your own that has the columns `question` and `final_answer`:

    python examples/tree_grpo_rounds.py --dataset_name data.jsonl --model_name_or_path ./my-model --use_cpu \
        --bf16 false --max_steps 3 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 \
        --max_completion_length 64
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser

from trl_explore.evaluation.hard_prompts import filter_hard_prompts
from trl_explore.rewards import accuracy_reward
from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.trainers import TreeGRPOConfig, TreeGRPOTrainer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="zwhe99/DeepMath-103K", metadata={"help": "Hub name, or a .jsonl file."})
    num_rounds: int = field(default=2, metadata={"help": "Rounds of filtering and training."})
    filter_k: int = field(default=4, metadata={"help": "Samples per prompt when filtering."})
    filter_threshold: float = field(default=0.25, metadata={"help": "Pass rate below which a prompt stays."})


def to_prompt(row):
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, TreeGRPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        output_dir="out/tree-grpo-rounds",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=32,
        num_generations=8,
        learning_rate=1e-6,
        max_steps=100,
        max_completion_length=4096,
        replay_buffer=True,
        sampling_batch_size=64,
        logging_steps=1,
        save_steps=25,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()
    if script_args.dataset_name.endswith(".jsonl"):
        dataset = load_dataset("json", data_files=script_args.dataset_name)
    else:
        dataset = load_dataset(script_args.dataset_name)
    dataset = dataset["train"].select_columns(["question", "final_answer"])
    dataset = dataset.map(to_prompt, remove_columns="question").rename_column("final_answer", "answer")

    output_dir, start = Path(training_args.output_dir), model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(start)
    for number in range(1, script_args.num_rounds + 1):
        folder = output_dir / f"round_{number}"
        args = copy.deepcopy(training_args)
        args.output_dir = str(folder)
        solutions = output_dir / f"round_{number - 1}" / "solutions.jsonl"
        args.replay_file = str(solutions) if solutions.is_file() else None

        if not (folder / "config.json").is_file():  # else this round was finished before
            model = AutoModelForCausalLM.from_pretrained(start, dtype=model_args.dtype)
            hard = filter_hard_prompts(
                model,
                dataset,
                reward_funcs=accuracy_reward,
                processing_class=tokenizer,
                k=script_args.filter_k,
                threshold=script_args.filter_threshold,
                max_completion_length=args.max_completion_length,
                scores_file=folder / "pass_rates.jsonl",
            )
            print(f"round {number}: {len(hard)} of {len(dataset)} prompts are hard for {start}")
            if not len(hard):
                break
            trainer = TreeGRPOTrainer(
                model=model,
                reward_funcs=accuracy_reward,
                args=args,
                train_dataset=hard.remove_columns("pass_rate"),
                processing_class=tokenizer,
            )
            trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder)[0])
            trainer.save_model()
            print(f"round {number}: {trainer.solutions.num_solutions} solutions of {len(trainer.solutions)} prompts")
        start = str(folder)
    print(f"the model of the last round is in {start}")
