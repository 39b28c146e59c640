"""
Screenshots of what a real run of a tiny model shows, in a real browser: a search tree as `trl-explore tree` writes it,
and rows of the completions table of `log_completions=True` as a terminal prints them.

    python docs/make_screenshots.py [FOLDER]    # needs chromium or google-chrome; writes docs/images/*.png
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, TreeGRPOConfig, TreeGRPOTrainer
from trl_explore.tree_view.files import read_trees
from trl_explore.tree_view.text import html_page, verdict

IMAGES = Path(__file__).resolve().parent / "images"
OPTIONS = dict(
    num_generations=4,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    seed=0,
)


def tree_page(folder: Path) -> str:
    """The smallest tree in which a search found a right completion beside wrong ones."""
    task = get_task("doors")
    config = TreeGRPOConfig(
        str(folder),
        **OPTIONS,
        max_steps=20,
        learning_rate=1e-3,
        per_device_train_batch_size=64,
        max_completion_length=task.max_completion_length,
        expansion_width=4,
        dump_trees="trees",
    )
    TreeGRPOTrainer(
        model=str(warm_start(task, seed=0)),
        reward_funcs=task.reward,
        args=config,
        train_dataset=task.build_dataset(64, seed=0),
    ).train()
    trees = list(read_trees(folder / "trees/trees_0.jsonl"))
    found = [tree for tree in trees if {"correct", "wrong"} <= {verdict(node) for node in tree["nodes"]}]
    return html_page(min(found, key=lambda tree: len(tree["nodes"])))


def table_page(folder: Path) -> str:
    """What a terminal shows of DEEP-GRPO on calculations in several steps: a failed completion that a branch
    recovered, and its branches."""
    task = get_task("chain")
    config = DeepGRPOConfig(
        str(folder),
        **OPTIONS,
        max_steps=4,
        per_device_train_batch_size=32,
        max_completion_length=task.max_completion_length,
        num_branches=3,
        segment_delimiters=[";"],
        log_completions=True,
    )
    trainer = DeepGRPOTrainer(
        model=str(warm_start(task, seed=0)),
        reward_funcs=task.reward,
        args=config,
        train_dataset=task.build_dataset(64, seed=0),
    )
    printed = io.StringIO()
    os.environ |= {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
    with contextlib.redirect_stdout(printed):
        trainer.train()
    for step in reversed(re.split(r"\n(?=[^\n]*Step \d)", printed.getvalue())):
        title, *rows = re.split(r"\n(?=\S*row \S*\d)", step.rstrip())
        plain = [" ".join(Text.from_ansi(row).plain.split()) for row in rows]
        recovered = [words.split()[1] for words in plain if "recovered 1 ·" in words]
        if recovered:
            break
    chosen = re.compile(rf"row {recovered[0]} |.* parent {recovered[0]} ·")
    shown = [row for row, words in zip(rows, plain, strict=True) if chosen.match(words)]
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi("\n".join([title, *shown])))
    return console.export_html(theme=MONOKAI)


def screenshot(page: str, image: Path, *, width: int, height: int) -> None:
    """A page as a browser shows it, at twice the pixels."""
    browser = next(name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(page, encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=2"]
        size = f"--window-size={width},{height}"
        command = [browser, *flags, size, f"--user-data-dir={folder}", f"--screenshot={image}", file.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    images = Path(sys.argv[1]) if sys.argv[1:] else IMAGES
    with tempfile.TemporaryDirectory() as folder:
        screenshot(tree_page(Path(folder, "tree")), images / "search_tree.png", width=1100, height=1060)
        screenshot(table_page(Path(folder, "table")), images / "completions_table.png", width=800, height=480)
