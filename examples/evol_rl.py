"""
Train a base model on MATH without its answers: the majority of its own decides. One GPU with 80 GB is enough:

    python examples/evol_rl.py --output_dir out/evol-rl

With the answers, novelty is what remains; without an embedding model, characters are compared:

    python examples/evol_rl.py --correctness reward --embedding_model ngrams

With LoRA, on four GPUs, with settings from a file that flags override:

    accelerate launch --num_processes 4 examples/evol_rl.py --config run.yaml --use_peft --lora_r 16

Offline, on a CPU, with a file of your own that has the columns `problem` and `solution`:

    python examples/evol_rl.py --dataset_name data.jsonl --model_name_or_path ./my-model --use_cpu --bf16 false \
        --max_steps 3 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 64 \
        --num_generations 8 --embedding_model ngrams
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.rewards import accuracy_reward, extract_answer

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import EvolRLConfig, EvolRLTrainer


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
    parser = TrlParser((ScriptArguments, EvolRLConfig, ModelConfig))
    # Where they differ from the defaults of the config; --config and flags override these in turn.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-1.7B-Base",
        output_dir="out/evol-rl-math",
        # 8 rows x 16 = 128 completions per step: 8 prompts with 16 completions each.
        per_device_train_batch_size=8,
        gradient_accumulation_steps=16,
        num_generations=16,
        learning_rate=5e-7,
        beta=0.001,
        epsilon_high=0.28,
        max_completion_length=2048,
        embedding_model="Qwen/Qwen3-Embedding-0.6B",
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
    trainer = EvolRLTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=accuracy_reward,  # only logged, as `reward`: the majority decides
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
