"""
Train a small instruct model on DeepMath with tree search in the loop. One GPU with 48 GB is enough for this model:

    python examples/tree_grpo.py --output_dir out/tree-grpo

With LoRA, on four GPUs, with settings from a file that flags override:

    accelerate launch --num_processes 4 examples/tree_grpo.py --config run.yaml --use_peft --lora_r 16

Offline, on a CPU, with a file of your own that has DeepMath's two columns `question` and `final_answer`:

    python examples/tree_grpo.py --dataset_name data.jsonl --model_name_or_path ./my-model --use_cpu --bf16 false \
        --max_steps 3 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 64

Afterwards, look at what was searched: `trl-explore tree out/tree-grpo/trees/trees_0.jsonl --index 0`.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.rewards import accuracy_reward

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import TreeGRPOConfig, TreeGRPOTrainer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="zwhe99/DeepMath-103K", metadata={"help": "Hub name, or a .jsonl file."})


def to_prompt(row):
    return {"prompt": [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, TreeGRPOConfig, ModelConfig))
    # Where the paper's settings differ from the defaults of the config; --config and flags override these in turn.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        output_dir="out/tree-grpo-deepmath",
        # 8 rows x 32 = 256 completions per step: 32 prompts with 8 each (the paper: 256 prompts on a cluster).
        per_device_train_batch_size=8,
        gradient_accumulation_steps=32,
        num_generations=8,
        learning_rate=1e-6,
        warmup_steps=10,
        weight_decay=0.1,
        # The paper: nodes of 256 tokens, up to 64 of them. A quarter of that fits one GPU; depth follows by itself.
        max_completion_length=4096,
        node_length=256,
        expansion_width=8,
        overlong_buffer=1024,
        sampling_batch_size=64,  # rows per generate call: 32 trees of width 8 ask for up to 256 at once
        dump_trees="trees",
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

    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = TreeGRPOTrainer(
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
