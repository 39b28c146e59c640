"""
Train a small instruct model on GSM8K with `AutoExploreTrainer`. One GPU with 24 GB is enough:

    python examples/auto.py --output_dir out/auto

With LoRA, on four GPUs. Settings come from a file, and flags override them:

    accelerate launch --num_processes 4 examples/auto.py --config run.yaml --use_peft --lora_r 16

Offline, on a CPU, with your own file. It needs GSM8K's columns `question` and `answer` (which ends with `#### 42`):

    python examples/auto.py --dataset_name data.jsonl --model_name_or_path ./my-model --use_cpu --bf16 false \
        --max_steps 3 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 64
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.rewards import accuracy_reward

# A GRPO script imports `GRPOConfig` and `GRPOTrainer` from `trl` instead. The rest of the script stays the same.
from trl_explore.trainers import AutoExploreConfig, AutoExploreTrainer

INSTRUCTION = "Think step by step. End with the final answer as a bare number on a line of its own, like this: #### 42"


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="openai/gsm8k", metadata={"help": "Hub name, or a .jsonl file."})
    dataset_config: str = field(default="main", metadata={"help": "Configuration of a data set on the Hub."})


def to_prompt(row):
    return {"prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["question"]}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, AutoExploreConfig, ModelConfig))
    # These defaults replace the defaults of TRL's config. `--config` and flags override them.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct",
        output_dir="out/auto-gsm8k",
        # 8 rows x 64 = 512 completions per step: 64 prompts with 8 generations each. Divide the 64 by your GPUs.
        per_device_train_batch_size=8,
        gradient_accumulation_steps=64,
        num_generations=8,
        learning_rate=1e-6,
        max_completion_length=512,
        # For each prompt that no completion solves, the trainer chooses one of these explorers, or none.
        explorers=["tree", "pivots"],
        explorer_options={
            "tree": {"expansion_width": 4},
            "pivots": {"segment_delimiters": ["."], "num_branches": 8},
        },
        sampling_batch_size=256,  # explorers can sample more rows than GRPO: limit the memory
        logging_steps=1,
        save_steps=50,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()

    if script_args.dataset_name.endswith(".jsonl"):
        dataset = load_dataset("json", data_files=script_args.dataset_name)
    else:
        dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)
    dataset = dataset.map(to_prompt, remove_columns="question")  # the reward function needs `answer`

    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = AutoExploreTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()
