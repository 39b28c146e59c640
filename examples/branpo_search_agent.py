"""
Train a search agent with contrastive branches: it calls a search tool until it can answer. By default the questions
(2 to 4 hops) and the documents are of an invented world, so that nothing needs to be downloaded but the model:

    python examples/branpo_search_agent.py --output_dir out/search-agent

Questions and documents of your own, here with dense retrieval; rows need `question` and `answer`, documents `text`:

    python examples/branpo_search_agent.py --dataset_name questions.jsonl --corpus wiki.parquet --retriever dense

Several processes share one index if it is served; the client speaks the protocol of Search-R1's server too:

    trl-explore serve-retriever --corpus wiki.parquet --index wiki-index --port 8000
    accelerate launch --num_processes 4 examples/branpo_search_agent.py --dataset_name questions.jsonl \
        --retriever http --retriever_url http://127.0.0.1:8000/retrieve

Offline, on a CPU, with a small model of your own whose chat template knows tools:

    python examples/branpo_search_agent.py --model_name_or_path ./my-model --use_cpu --bf16 false --max_steps 3 \
        --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_completion_length 512
"""

from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_explore.retrieval import (
    BM25Retriever,
    CachedRetriever,
    DenseRetriever,
    HTTPRetriever,
    SearchTool,
    load_retriever,
)
from trl_explore.rewards import make_search_reward
from trl_explore.tasks.multihop_world import EnglishWorld

# The difference from a GRPO script is two names: these, where it has `GRPOConfig` and `GRPOTrainer` from `trl`.
from trl_explore.trainers import BranPOConfig, BranPOTrainer

INVENTED = "multihop"
INSTRUCTIONS = (
    "Answer the question with facts from the documents that the `search` tool finds. Reason inside <thinking> and "
    "</thinking> before every search and before the answer. One search rarely suffices: look up one fact at a time. "
    "When you know enough, write the answer in a few words between <answer> and </answer>, and nothing after it.\n\n"
    "Question: "
)


@dataclass
class ScriptArguments:
    dataset_name: str = field(default=INVENTED, metadata={"help": "'multihop', a .jsonl file, or a Hub name."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    num_questions: int = field(default=2000, metadata={"help": "Training questions about the invented world."})
    corpus: str | None = field(default=None, metadata={"help": "Documents: .jsonl or .parquet with a `text` column."})
    retriever: str = field(default="bm25", metadata={"help": "'bm25', 'dense' or 'http'."})
    retriever_model: str = field(default="intfloat/e5-base-v2", metadata={"help": "Encoder of dense retrieval."})
    retriever_url: str = field(default="http://127.0.0.1:8000/retrieve", metadata={"help": "Of a retrieval server."})
    index: str | None = field(default=None, metadata={"help": "Folder of a saved index; made where there is none."})
    retriever_top_k: int = field(default=3, metadata={"help": "Documents per search."})


def build_retriever(args):
    if args.retriever == "http":
        return HTTPRetriever(args.retriever_url)
    if args.corpus is not None:
        return load_retriever(args.retriever, args.corpus, index=args.index, model=args.retriever_model)
    if args.dataset_name != INVENTED:
        raise SystemExit("`--corpus` is missing: name the file with the documents, or use `--retriever http`.")
    documents = EnglishWorld(seed=0).corpus()
    if args.retriever == "dense":
        return DenseRetriever.from_model(args.retriever_model, documents)
    return BM25Retriever(documents)


def build_dataset(args):
    if args.dataset_name == INVENTED:
        rows = EnglishWorld(seed=0).questions(args.num_questions, seed=0)
        dataset = Dataset.from_list([{key: row[key] for key in ("question", "answer")} for row in rows])
    elif args.dataset_name.endswith(".jsonl"):
        dataset = load_dataset("json", data_files=args.dataset_name, split="train")
    else:
        dataset = load_dataset(args.dataset_name, args.dataset_config, split="train")
    return dataset.map(lambda row: {"prompt": [{"role": "user", "content": INSTRUCTIONS + row["question"]}]})


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, BranPOConfig, ModelConfig))
    # Where they differ from the defaults of the config; --config and flags override these in turn.
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen3-4B-Instruct-2507",
        output_dir="out/branpo-search-agent",
        # 8 rows x 8 = 64 trajectories per step: 16 questions with 4 trajectories each, and their branches.
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=4,
        learning_rate=5e-6,
        beta=0.001,
        temperature=0.95,
        max_completion_length=7168,
        interaction_limits=[4, 8],
        interaction_limit_steps=[40],
        logging_steps=1,
        save_steps=20,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()

    tool = SearchTool(CachedRetriever(build_retriever(script_args)), top_k=script_args.retriever_top_k)
    training_args.model_init_kwargs = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = BranPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=make_search_reward(score="f1", format_penalty=-0.5),
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
