"""The command `trl-explore eval`, which measures pass@k and maj@k of a model on benchmarks, tasks or own data."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.cli.benchmarks import TASK_PROMPTS, Benchmark, load_benchmarks
from trl_explore.cli.flags import FlagParser
from trl_explore.errors import UsageError
from trl_explore.evaluation.presets import preset_names
from trl_explore.fitting_table import FittingTable
from trl_explore.runs.inputs import check_deciding_reward, check_output_dir
from trl_explore.runs.models import ADAPTER_CONFIG, ModelSource, find_model, load_model, load_tokenizer
from trl_explore.saving.whole_files import whole_file
from trl_explore.visible_text import visible_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trl_explore.evaluation.samplers import PromptSampler, Sampling
    from trl_explore.rows.rollouts import Continuation

DESCRIPTION = f"""\
Sample completions and measure pass@k and maj@k, with 95 % bootstrap intervals over the prompts:

  trl-explore eval --model_name_or_path ./model --dataset gsm8k math500 --output_dir out/eval
  trl-explore eval --model_name_or_path BASE --adapter_name_or_path ./adapter --dataset data.jsonl \\
      --num_samples 8 --metrics pass@1 pass@8 maj@8 --output_dir out/eval

D is one of
- a benchmark: {", ".join(preset_names())}; gsm8k=PATH for a copy of it
- a YAML file with the fields of a benchmark
- an embedded task, such as chain
- data with the columns `prompt` and `answer`: a file, a folder or a Hub name
Flags override the options that the benchmark recommends. Instead of D, --task names a task with data and rewards:

  trl-explore eval --model_name_or_path ./model --task reasoning_gym:countdown --output_dir out/eval

An interrupted evaluation continues when the same command is given again. Other --metrics and --reward_funcs are
computed from the existing completions.
"""


def build_parser() -> FlagParser:
    """Return the parser of `trl-explore eval`."""
    parser = FlagParser(
        prog="trl-explore eval",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="trl-explore eval --model_name_or_path M (--dataset D [D ...] | --task T) --output_dir DIR [...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="M", help="model, or the folder of an adapter")
    add("--adapter_name_or_path", metavar="A", help="adapter, where M is its base model")
    add("--dataset", nargs="+", metavar="D", help="data sets, see D above")
    add("--task", metavar="T", help="task to evaluate on, on its held-out problems; all: trl-explore tasks")
    add("--task_config", metavar="JSON", help="fields of the task, as in `train`")
    add("--output_dir", required=True, metavar="DIR", help="results.json, and the completions of each data set")
    add("--metrics", nargs="+", metavar="NAME", help="pass@K, maj@K (default: pass@1, pass@N and maj@N)")
    add("--num_samples", type=int, metavar="N", help="completions per prompt")
    add("--temperature", type=float, help="of the samples; 0 decodes greedily")
    add("--top_p", type=float, help="probability mass that is sampled from")
    add("--top_k", type=int, help="tokens that are sampled from; 0 for all")
    add("--max_new_tokens", type=int, metavar="N", help="most tokens per completion")
    add("--seed", type=int, default=0, help="of the samples; a vLLM server has its own (default: %(default)s)")
    add("--limit", type=int, metavar="N", help=f"first N prompts (default: all; {TASK_PROMPTS} of an embedded task)")
    add("--system_prompt", metavar="TEXT", help="message before each question of a benchmark")
    add("--reward_funcs", nargs="+", metavar="R", help="reward functions, as in `train`, instead of those of D")
    add("--success_threshold", type=float, default=1.0, help="smallest reward of a success (default: %(default)s)")
    add("--success_reward", metavar="NAME", help="reward function that decides success (default: the sum of all)")
    add("--dataset_config", metavar="NAME", help="configuration of your own data set on the Hub")
    add("--dataset_split", metavar="NAME", help="split (default: the benchmark's, else `test` or the only one)")
    add("--model_revision", default="main", metavar="NAME", help="revision on the Hub (default: %(default)s)")
    add("--dtype", default="auto", help="auto, bfloat16, float16 or float32 (default: %(default)s)")
    add("--batch_size", type=int, metavar="N", help="completions at a time (default: 64; 1024 with vLLM)")
    add("--use_vllm", action="store_true", help="sample with vLLM in this process")
    add("--vllm_tensor_parallel_size", type=int, default=1, metavar="N", help="GPUs for one model")
    add("--vllm_gpu_memory_utilization", type=float, default=0.9, help="share of their memory (default: %(default)s)")
    add("--vllm_max_model_length", type=int, metavar="N", help="tokens of a sequence (default: the model's)")
    add("--vllm_server_base_url", metavar="URL", help="sample with a vLLM server that serves M, or A")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


@dataclass
class LazySampler:
    """A sampler that loads the model only when the first completion is sampled. If all completions are already in the
    results, the model is not loaded."""

    args: argparse.Namespace
    source: ModelSource
    tokenizer: "PreTrainedTokenizerBase"

    @cached_property
    def sampler(self) -> "PromptSampler":
        """The sampler that the flags choose: a vLLM server, vLLM in this process, or transformers."""
        from trl_explore.evaluation.samplers import ServerSampler, TransformersSampler, VLLMSampler

        args, source = self.args, self.source
        if args.vllm_server_base_url is not None:
            return ServerSampler(args.vllm_server_base_url, source.adapter or source.base)
        if args.use_vllm:
            return VLLMSampler(
                source.base,
                adapter=source.adapter,
                batch_size=args.batch_size or 1024,
                tokenizer=source.tokenizer,
                revision=args.model_revision,
                dtype=args.dtype,
                seed=args.seed,
                tensor_parallel_size=args.vllm_tensor_parallel_size,
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                max_model_len=args.vllm_max_model_length,
            )
        from trl_explore.machine.devices import available_accelerator
        from trl_explore.machine.threads import limit_threads

        model: Any = load_model(source, dtype=args.dtype, revision=args.model_revision)
        model.to(available_accelerator() or "cpu")
        limit_threads(model)
        return TransformersSampler(model, self.tokenizer, batch_size=args.batch_size or 64)

    def __call__(
        self, prompts: dict[int, list[int]], sampling: "Sampling"
    ) -> Iterator[tuple[int, list["Continuation"]]]:
        try:
            yield from self.sampler(prompts, sampling)
        except ConnectionError as error:
            raise UsageError(f"{error} The same command continues where it stopped.") from error
        except (ImportError, ValueError) as error:
            raise UsageError(str(error)) from error

    @property
    def engine(self) -> str:
        """Name of the sampling library, for the settings in the results."""
        if self.args.vllm_server_base_url is not None:
            return "vllm server"
        if self.args.use_vllm:
            return "vllm"
        return "transformers"


def run(argv: list[str]) -> int:
    """Run `trl-explore eval`, and return its exit status, which is 130 after Ctrl-C."""
    args = build_parser().parse(argv)
    _check(args)
    source = find_model(args.model_name_or_path, args.adapter_name_or_path, revision=args.model_revision)
    benchmarks = load_benchmarks(args)
    for benchmark in benchmarks:
        check_deciding_reward(args.success_reward, benchmark.reward_funcs)
    samplings = [_sampling(args, benchmark) for benchmark in benchmarks]
    weights = _fingerprint(args, source)
    model = {"name": args.model_name_or_path, "adapter": args.adapter_name_or_path, "weights": weights}
    output = Path(args.output_dir).expanduser() / "results.json"
    earlier = _earlier_results(output, model)

    sampler = LazySampler(args, source, load_tokenizer(source, revision=args.model_revision))
    results: dict[str, Any] = {}
    for benchmark, sampling in zip(benchmarks, samplings, strict=True):
        try:
            results[benchmark.name] = _evaluate(args, benchmark, sampling, sampler, weights)
        except KeyboardInterrupt:
            print(
                f"Stopped after {_num_done(output.parent / benchmark.name)} of {len(benchmark.rows)} prompts of "
                f"{benchmark.name}; the same command continues there.",
                file=sys.stderr,
            )
            return 130
        with whole_file(output) as part:
            part.write_text(json.dumps({"model": model, "results": earlier | results}, indent=2) + "\n")
    if args.json:
        print(json.dumps({"model": model, "results": results}, indent=2))
    else:
        _report(results, [benchmark.name for benchmark in benchmarks if benchmark.reads_answers])
        print(f"Written to {visible_text(str(output))}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise a UsageError if a number is too small, there are several processes, or the folder is not writable."""
    for name in ("limit", "batch_size", "vllm_tensor_parallel_size", "vllm_max_model_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("eval runs as one process: for several GPUs, --use_vllm --vllm_tensor_parallel_size N")
    check_output_dir(args.output_dir)


def _num_done(folder: Path) -> int:
    """Return the number of prompts whose completions are already in a folder of results."""
    from trl_explore.evaluation.completions import read_completions

    path = folder / "completions.jsonl"
    if not path.is_file():
        return 0
    return len(read_completions(path)[1])


def _sampling(args: argparse.Namespace, benchmark: Benchmark) -> "Sampling":
    """Return the sampling options. Flags override the options that the benchmark recommends."""
    from trl_explore.evaluation.evaluate import default_metrics, parse_metrics
    from trl_explore.evaluation.samplers import Sampling

    options = dict(benchmark.recommended)
    if args.temperature == 0:
        options["num_samples"] = 1  # all greedy completions of a prompt are equal
    for name in ("num_samples", "temperature", "top_p", "top_k", "max_new_tokens", "seed"):
        value = getattr(args, name)
        if value is not None:
            options[name] = value
    try:
        sampling = Sampling(**options)
        parse_metrics(args.metrics or default_metrics(sampling.num_samples), sampling.num_samples)
    except ValueError as error:
        raise UsageError(f"{benchmark.name}: {error}") from error
    return sampling


def _fingerprint(args: argparse.Namespace, source: ModelSource) -> str:
    """Return a fingerprint of a model's weights without loading them. Raise a UsageError if an adapter on the Hub
    cannot be found."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    from trl_explore.saving.fingerprints import digest, folder_probes

    parts: list[bytes] = []
    base, adapter = source.base, source.adapter
    if Path(base).is_dir():
        parts += folder_probes(Path(base))
    else:
        # The path of a cached file contains the commit, so the fingerprint changes when the model on the Hub does.
        # `find_model` has downloaded this file.
        path = try_to_load_from_cache(base, "config.json", revision=args.model_revision)
        parts.append(f"{base} {path}".encode())
    if adapter is not None and Path(adapter).is_dir():
        parts += folder_probes(Path(adapter))
    elif adapter is not None and args.vllm_server_base_url is not None:
        parts.append(adapter.encode())  # the name that the server lists; it may not exist on the Hub
    elif adapter is not None:
        try:
            path = cached_file(adapter, ADAPTER_CONFIG)  # downloads the file if it is not in the cache
        except OSError as error:
            raise UsageError(f"adapter_name_or_path={adapter!r} cannot be loaded: {error}") from error
        parts.append(f"{adapter} {path}".encode())
    return digest(parts)


def _earlier_results(path: Path, model: dict[str, Any]) -> dict[str, Any]:
    """Return the results in the file of an earlier evaluation. Raise a UsageError if it evaluated another model."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
        known, results = found["model"], found["results"]
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} is no file of results ({error!r}); name another output_dir") from error
    if known["weights"] != model["weights"]:
        raise UsageError(
            f"{path} holds results of other weights: the model was {_named(known)}, and is {_named(model)} now. "
            "Name another output_dir, or delete that one."
        )
    return results


def _named(model: dict[str, Any]) -> str:
    """Return the name of a model with its adapter and the fingerprint of its weights, for messages."""
    adapter = ""
    if model["adapter"]:
        adapter = f" with {model['adapter']!r}"
    return f"{model['name']!r}{adapter} ({model['weights']})"


def _evaluate(
    args: argparse.Namespace,
    benchmark: Benchmark,
    sampling: "Sampling",
    sampler: LazySampler,
    weights: str,
) -> dict[str, Any]:
    """Evaluate one data set. Return its origin, its results and the versions of the packages."""
    from trl_explore.evaluation.evaluate import NoRewardError, evaluate
    from trl_explore.saving.records import FileRefusedError

    try:
        result = evaluate(
            sampler,
            benchmark.rows,
            processing_class=sampler.tokenizer,
            reward_funcs=benchmark.reward_funcs,
            sampling=sampling,
            metrics=args.metrics,
            answer_fn=benchmark.answer_fn,
            success_threshold=args.success_threshold,
            success_reward=args.success_reward,
            output_dir=Path(args.output_dir).expanduser() / benchmark.name,
            source={"weights": weights, "engine": sampler.engine, "dtype": args.dtype},
        )
    except (FileRefusedError, NoRewardError) as error:
        raise UsageError(str(error)) from error
    except UsageError as error:
        raise UsageError(f"{benchmark.name}: {error}") from error
    packages = ["trl-explore", "trl", "transformers", "torch"]
    if args.use_vllm:
        packages.append("vllm")
    return {"dataset": benchmark.origin, **result, "versions": {name: version(name) for name in packages}}


def _report(results: dict[str, Any], answered: list[str]) -> None:
    """
    Print one line per data set, with metrics in percent and their intervals.

    Args:
        results (`dict[str, Any]`):
            Results by the name of the data set.
        answered (`list[str]`):
            Names of the data sets whose reward functions read marked answers. The table has the share of completions
            without an answer only for these data sets.
    """
    from rich.console import Console

    metrics: dict[str, None] = {}  # a dictionary keeps the order and drops duplicates
    for entry in results.values():
        metrics |= dict.fromkeys(entry["metrics"])
    titles = ["data set", "prompts", "samples", *metrics, "truncated"]
    if answered:
        titles.append("no answer")
    titles.append("tokens")
    rows = []
    for name, entry in results.items():
        cells = [visible_text(name), str(entry["num_prompts"]), str(entry["settings"]["num_samples"])]
        for metric in metrics:
            found = entry["metrics"].get(metric)
            cell = ""
            if found:
                cell = f"{100 * found['value']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"
            cells.append(cell)
        cells.append(f"{100 * entry['truncated']:.1f} %")
        if name in answered:
            cells.append(f"{100 * entry['unanswered']:.1f} %")
        elif answered:
            cells.append("")
        cells.append(f"{entry['tokens']:,}")
        rows.append(cells)
    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(FittingTable(titles, rows))
    for name, entry in results.items():
        if entry["unscored"]:
            left_out = f"{entry['unscored']} prompts are left out, because none of their samples has a reward."
            print(f"{visible_text(name)}: {left_out}")
        voted = any(metric.startswith("maj") for metric in entry["metrics"])
        if voted and entry["unanswered"] and name not in answered:
            share = f"{100 * entry['unanswered']:.1f} %"
            note = f"maj@k votes on marked answers, such as \\boxed{{7}}, but {share} of the samples have none."
            print(f"{visible_text(name)}: {note}")
