"""
Train a search agent on trees of searches: trajectories are left at random turns and continued. By default the
questions (2 to 4 hops) and the documents are of an invented world, so that only the model is loaded:

    python examples/agent_tree_grpo_search_agent.py --output_dir out/search-trees

Questions of your own (`question` and `answer`), over documents that a server finds, for example that of Search-R1:

    trl-explore serve-retriever --corpus wiki.parquet --index wiki-index --port 8000
    accelerate launch --num_processes 4 examples/agent_tree_grpo_search_agent.py --dataset_name questions.jsonl \
        --retriever_url http://127.0.0.1:8000/retrieve

Offline, on a CPU, with a small model of your own whose chat template knows tools:

    python examples/agent_tree_grpo_search_agent.py --model_name_or_path ./my-model --use_cpu --bf16 false \
        --max_steps 3 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_completion_length 512
"""

from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.retrieval import BM25Retriever, CachedRetriever, HTTPRetriever, SearchTool
from trl_explore.rewards import make_search_reward
from trl_explore.tasks.multihop_world import EnglishWorld

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import AgentTreeGRPOConfig, AgentTreeGRPOTrainer

INVENTED = "multihop"
INSTRUCTIONS = (
    "Answer the question with facts from the documents that the `search` tool finds. Reason inside <thinking> and "
    "</thinking> before every search and before the answer. One search rarely suffices: look up one fact at a time. "
    "When you know enough, write the answer in a few words between <answer> and </answer>, and nothing after it.\n\n"
    "Question: "
)


@dataclass
class ScriptArguments:
    dataset_name: str = field(default=INVENTED, metadata={"help": "'multihop', or a .jsonl file."})
    num_questions: int = field(default=2000, metadata={"help": "Training questions about the invented world."})
    retriever_url: str | None = field(default=None, metadata={"help": "Of a retrieval server; by default BM25."})
    retriever_top_k: int = field(default=3, metadata={"help": "Documents per search."})


def build_dataset(args):
    if args.dataset_name == INVENTED:
        rows = EnglishWorld(seed=0).questions(args.num_questions, seed=0)
        dataset = Dataset.from_list([{key: row[key] for key in ("question", "answer")} for row in rows])
    else:
        dataset = load_dataset("json", data_files=args.dataset_name, split="train")
    return dataset.map(lambda row: {"prompt": [{"role": "user", "content": INSTRUCTIONS + row["question"]}]})


def build_retriever(args):
    if args.retriever_url is not None:
        return HTTPRetriever(args.retriever_url)
    if args.dataset_name != INVENTED:
        raise SystemExit("`--retriever_url` is missing: it finds the documents that answer your questions.")
    return BM25Retriever(EnglishWorld(seed=0).corpus())


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, AgentTreeGRPOConfig, ModelConfig))
    # Where they differ from the defaults of the config; --config and flags override these in turn.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-3B-Instruct",
        output_dir="out/agent-tree-grpo",
        # 8 rows x 8 = 64 trees per step: 32 questions with 2 trees each, and 2 branches of each tree.
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=2,
        learning_rate=1e-6,
        beta=0.001,
        max_completion_length=3072,
        max_tool_calling_iterations=3,
        logging_steps=1,
        save_steps=20,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()

    tool = SearchTool(CachedRetriever(build_retriever(script_args)), top_k=script_args.retriever_top_k)
    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = AgentTreeGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=make_search_reward(score="f1", format_penalty=0.0),
        args=training_args,
        train_dataset=build_dataset(script_args),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        tools=[tool.search],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        invented = script_args.dataset_name == INVENTED
        trainer.push_to_hub(dataset_name=None if invented else script_args.dataset_name)
    trainer.accelerator.end_training()
