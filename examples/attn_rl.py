"""
Train a reasoning model on MATH with AttnRL. One GPU with 80 GB is enough for this model:

    python examples/attn_rl.py --output_dir out/attn-rl

With LoRA, on four GPUs, with settings from a file that flags override:

    accelerate launch --num_processes 4 examples/attn_rl.py --config run.yaml --use_peft --lora_r 16

Offline, on a CPU, with a file of your own that has the columns `problem` and `solution`:

    python examples/attn_rl.py --dataset_name data.jsonl --model_name_or_path ./my-model --use_cpu --bf16 false \
        --max_steps 3 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 64
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.rewards import accuracy_reward, extract_answer

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import AttnRLConfig, AttnRLTrainer


@dataclass
class ScriptArguments:
    dataset_name: str = field(
        default="DigitalLearningGmbH/MATH-lighteval", metadata={"help": "Hub name, or a .jsonl file."}
    )
    dataset_config: str = field(default="default", metadata={"help": "Configuration of a data set on the Hub."})


def to_prompt(row):
    # MATH's solutions are worked out; their answer is the last box.
    answer = extract_answer(row["solution"]) or row["solution"]
    return {"prompt": [{"role": "user", "content": row["problem"]}], "answer": answer}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, AttnRLConfig, ModelConfig))
    # The authors' settings, scaled to one GPU (theirs: 64 prompts, 8192 tokens); --config and flags override these.
    parser.set_defaults(
        model_name_or_path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        output_dir="out/attn-rl-math",
        # 6 rows x 16 = 96 chains per step: 16 prompts with 6 chains each. Divide the 16 by your GPUs.
        per_device_train_batch_size=6,
        gradient_accumulation_steps=16,
        num_generations=6,
        learning_rate=1e-6,
        beta=0.001,
        epsilon_high=0.28,
        drop_zero_advantage=True,
        max_completion_length=2048,
        # A chain is forked at 2 of its steps, 2 branches each; 3 to 6 chains of a prompt, more where it is hard.
        num_forks=2,
        branches_per_fork=2,
        sampling_batch_size=96,  # there are up to four branches per chain: bound the memory of sampling
        logging_steps=1,
        save_steps=50,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()

    if script_args.dataset_name.endswith(".jsonl"):
        dataset = load_dataset("json", data_files=script_args.dataset_name)
    else:
        dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)
    dataset = dataset["train"].select_columns(["problem", "solution"])
    dataset = dataset.map(to_prompt, remove_columns=["problem", "solution"])

    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = AttnRLTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()
