"""
Train an agent that plays Sokoban, a move per tool call, with an advantage for every move. Only the model is loaded:

    python examples/gigpo_sokoban_agent.py --output_dir out/sokoban

Other boards, here larger ones with two boxes; the control that tells what the states are worth:

    python examples/gigpo_sokoban_agent.py --size 5 --num_boxes 2 --min_moves 8 --max_moves 16
    python examples/gigpo_sokoban_agent.py --step_states shuffled

Offline, on a CPU, with a small model of your own whose chat template knows tools:

    python examples/gigpo_sokoban_agent.py --model_name_or_path ./my-model --use_cpu --bf16 false --max_steps 3 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_completion_length 256
"""

from dataclasses import dataclass, field, replace

from benchmarks.tasks import SOKOBAN, SokobanEnvironment
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import GiGPOConfig, GiGPOTrainer

INSTRUCTIONS = (
    "Sokoban: you are S, o is a box, G a goal, # a wall; rows are divided by /. Move with the `move` tool, one cell "
    "per call, and push every box onto a goal. Boxes can be pushed and not pulled, one at a time. Think about one "
    "move, make it, and look at the board that comes back. When the game is over, say so.\n\nBoard: "
)


@dataclass
class ScriptArguments:
    num_boards: int = field(default=2000, metadata={"help": "Training boards."})
    size: int = field(default=4, metadata={"help": "Cells along a side."})
    num_boxes: int = field(default=1, metadata={"help": "Boxes of a board, and goals."})
    min_moves: int = field(default=4, metadata={"help": "Moves that a board takes at least."})
    max_moves: int = field(default=8, metadata={"help": "Moves that the shortest way takes at most."})
    max_steps_per_game: int = field(default=15, metadata={"help": "Tool calls after which a game is over."})


def build_dataset(args):
    task = replace(
        SOKOBAN, size=args.size, num_boxes=args.num_boxes, min_moves=args.min_moves, max_moves=args.max_moves
    )
    boards = task.build_dataset(args.num_boards, seed=0).rename_column("problem", "board")
    return boards.map(lambda row: {"prompt": [{"role": "user", "content": INSTRUCTIONS + row["board"]}]})


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GiGPOConfig, ModelConfig))
    # Where they differ from the defaults of the config; --config and flags override these in turn.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-1.5B-Instruct",
        output_dir="out/gigpo-sokoban",
        # 8 rows x 16 = 128 trajectories per step: 16 boards with 8 trajectories each.
        per_device_train_batch_size=8,
        gradient_accumulation_steps=16,
        num_generations=8,
        learning_rate=1e-6,
        beta=0.01,
        max_completion_length=4096,
        max_tool_calling_iterations=15,
        logging_steps=1,
        save_steps=20,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()

    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = GiGPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=build_dataset(script_args),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        # A game that is won is worth 1: the environment's own `get_reward`.
        environment_factory=lambda: SokobanEnvironment(max_steps=script_args.max_steps_per_game),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.accelerator.end_training()
