"""The `trl-explore` command. Slow imports are inside functions, so that `--help` answers at once."""

import argparse
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module

from trl_explore import __version__
from trl_explore.cli.flags import subcommands
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name
from trl_explore.rewards.checks import RewardError
from trl_explore.runs.quiet import without_noise
from trl_explore.runs.workers import count_cores
from trl_explore.saving.full_disk import is_disk_full
from trl_explore.visible_text import visible_text

ROOM = (
    "Complete files are kept, and an incomplete checkpoint is skipped later. Free some space, or keep fewer "
    "checkpoints with --save_total_limit, and run the same command again; `train` continues with "
    "--resume_from_checkpoint true"
)
AFTER_CTRL_C = {
    "train": "; --resume_from_checkpoint true continues from the last checkpoint, if any",
    **dict.fromkeys(("compare", "quickstart", "eval", "filter"), "; the same command continues from here"),
}
# Sub-commands that parse their flags themselves.
READ_THEIR_FLAGS = ("train", "compare", "tasks", "tree", "filter", "eval", "advise")


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, in which the sub-commands of `READ_THEIR_FLAGS` have no flags."""
    parser = argparse.ArgumentParser(
        prog="trl-explore",
        description="GRPO trainers that explore better, on top of TRL.",
        epilog="New here? trl-explore quickstart --fast. More on a command: trl-explore COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"trl-explore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a model: trl-explore train --method deep_grpo --config run.yaml")
    commands.add_parser("compare", help="several methods on the same budget: trl-explore compare --task chain")
    commands.add_parser("tasks", help="tasks that bring data and rewards, with examples: trl-explore tasks chain")
    commands.add_parser("advise", help="read the logs of a run, and say what to do: trl-explore advise out")
    commands.add_parser("tree", help="look at a dumped search tree: trl-explore tree FILE --index N --html tree.html")
    commands.add_parser("filter", help="keep the prompts that a model rarely solves: trl-explore filter --k 4 ...")
    commands.add_parser("eval", help="measure pass@k and maj@k: trl-explore eval --dataset gsm8k ...")
    serve = commands.add_parser("serve-retriever", help="search over a corpus as an HTTP server, for agents")
    serve.description = "Serve BM25 or dense search over a corpus by HTTP, in the protocol of Search-R1's server."
    serve.add_argument("--corpus", required=True, help=".jsonl or .parquet with `text` (and `id`, `title`)")
    serve.add_argument("--index", help="folder of the index: loaded if it is there, else built and saved")
    serve.add_argument("--retriever", choices=["bm25", "dense"], default="bm25", help="default: %(default)s")
    serve.add_argument("--model", default="intfloat/e5-base-v2", help="E5 model of `dense` (default: %(default)s)")
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--top_k", type=int, default=3, help="passages, unless a request says how many (default: 3)")
    serve.add_argument("--max_top_k", type=int, default=100, help="most passages per query (default: %(default)s)")
    serve.add_argument("--max_queries", type=int, default=512, help="most queries per request (default: %(default)s)")
    serve.add_argument("--max_query_chars", type=int, default=10_000, help="longest query (default: %(default)s)")
    serve.add_argument("--max_body_mb", type=int, default=8, help="largest request, in MiB (default: %(default)s)")
    serve.add_argument("--max_cache_mb", type=int, default=512, help="cache of answers, in MiB (default: %(default)s)")
    serve.add_argument(
        "--allowed_hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="further names or addresses that requests may use for this machine; '*' for any",
    )
    completion = commands.add_parser("completion", help="print a script that completes commands, flags and methods")
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    commands.add_parser("env", help="print versions, devices and what is supported here")
    quickstart = commands.add_parser(
        "quickstart", help="GRPO, DEEP-GRPO and TreeGRPO on a tiny task, offline, on a CPU"
    )
    quickstart.description = (
        "Train GRPO, DEEP-GRPO and TreeGRPO on a tiny task that needs exploration, offline: under 4 minutes on two "
        "CPU cores. The same command continues where it was stopped."
    )
    quickstart.add_argument("--fast", action="store_true", help="fewer steps and seeds: a check that everything runs")
    quickstart.add_argument("--output_dir", help="where results go (default: out/quickstart, or out/quickstart-fast)")
    quickstart.add_argument("--seed", type=int, default=0, help="first seed (default: %(default)s)")
    quickstart.add_argument("--num_seeds", type=int, help="seeds per method (default: 6, with --fast 2)")
    quickstart.add_argument(
        "--processes",
        type=int,
        default=count_cores(),
        help="runs at a time (default: the number of cores, %(default)s)",
    )
    quickstart.add_argument("--resume", action="store_true", help="not needed: the same command continues by itself")
    return parser


def _dispatch(argv: list[str]) -> int:
    """Run the sub-command, and return its exit status."""
    parser = _build_parser()
    if argv and not argv[0].startswith("-") and argv[0] not in subcommands(parser):
        raise UsageError(unknown_name("command", argv[0], subcommands(parser)))
    if argv and argv[0] in READ_THEIR_FLAGS:
        return import_module(f"trl_explore.cli.{argv[0]}").run(argv[1:])
    args = parser.parse_args(argv)
    if args.command == "completion":
        from trl_explore.cli.completion import run as print_completion

        return print_completion(parser, args.shell)
    if args.command == "env":
        from trl_explore.cli.env import describe_environment

        print(describe_environment())
        return 0
    if args.command == "serve-retriever":
        try:
            from trl_explore.retrieval.server import run as serve_retriever
        except ImportError as error:
            raise UsageError(str(error)) from error
        return serve_retriever(args)
    from trl_explore.compare.quickstart import main as run_quickstart

    return run_quickstart(args) or 0


def main(argv: list[str] | None = None) -> int:
    """
    Run the command.

    Args:
        argv (`list[str]`, *optional*):
            Arguments. By default the arguments of the process.

    Returns:
        `int`: Exit status: 0 if all went well, 1 for a full disk or a closed pipe, 2 for a mistake in the arguments or
        in a reward function, 130 after Ctrl-C. Sub-commands may return others.
    """
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        _build_parser().print_help(sys.stderr)
        return 2
    try:
        with without_noise():
            try:
                return _dispatch(argv)
            finally:
                sys.stdout.flush()  # so that a closed pipe raises an error here, and not when Python ends
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        _drop_output()
        return 1
    except Exception as error:
        if isinstance(error, UsageError | RewardError):
            code, problem = 2, str(error)
        elif is_disk_full(error):
            code, problem = 1, f"the disk is full: {error}. {ROOM}"
            _drop_output()
        else:
            raise
        problem = " ".join(problem.split())  # errors of datasets and transformers have several lines
    except KeyboardInterrupt:
        command = argv[0] if argv else ""
        print(f"trl-explore: aborted{AFTER_CTRL_C.get(command, '')}", file=sys.stderr)
        return 130
    gc.collect()  # deletes the progress bar of a failed run, which then ends its line
    print(f"trl-explore: error: {visible_text(problem)}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """Discard output that is not printed yet. Otherwise Python would fail to print it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
