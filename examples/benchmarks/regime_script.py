"""Command line of the scripts that train runs of regimes and write their tables to `results.md`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from regimes_plan import Regime, load_regimes

from trl_explore.errors import UsageError


def script_parser(doc: str | None, *, output_dir: str, regimes: Sequence[str] = ()) -> argparse.ArgumentParser:
    """
    Return a parser with the arguments that the scripts share.

    Args:
        doc (`str`, *optional*):
            Docstring of the script.
        output_dir (`str`):
            Default folder of the checkpoints.
        regimes (`Sequence[str]`):
            Regimes that are trained if the command line names none. Empty: all.

    Returns:
        `argparse.ArgumentParser`: The parser. A script may add arguments to it.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"names of files in regimes/ (default: {', '.join(regimes) or 'all'})"
    parser.add_argument("regimes", nargs="*", metavar="REGIME", default=list(regimes), help=text)
    parser.add_argument("--output_dir", type=Path, default=Path(output_dir), help="checkpoints")
    parser.add_argument("--processes", type=int, default=1, help="number of runs to train at the same time")
    parser.add_argument("--report", action="store_true", help="do not train; write and print the tables")
    return parser


def run_script(
    parser: argparse.ArgumentParser,
    train: Callable[[Regime, argparse.Namespace], None],
    report: Callable[[], str],
    *,
    results: Path,
) -> None:
    """
    Train the named regimes. With `--report`, train nothing. Then write the tables of all regimes, and print them.

    Args:
        parser (`argparse.ArgumentParser`):
            Parser of the command line, see [`script_parser`].
        train (`Callable[[Regime, Namespace], None]`):
            Trains the missing runs of a regime.
        report (`Callable[[], str]`):
            Returns the tables of all regimes that have results.
        results (`Path`):
            Folder of the results.

    Raises:
        SystemExit: If an argument is wrong, or if training failed or was interrupted. Finished runs are kept.
    """
    args = parser.parse_args()
    try:
        # Regimes are also loaded for `--report`, so that a wrong name is an error.
        for regime in load_regimes(args.regimes):
            if not args.report:
                train(regime, args)
    except UsageError as error:
        parser.error(str(error))
    text = report()
    (results / "results.md").write_text(text, encoding="utf-8")
    print(text)
