"""Benchmarks: small data of our own in each one's format, read as from the Hub, and the prompts that come out."""

import argparse
import json

import pytest
import yaml
from datasets import Dataset

from trl_explore.cli.benchmarks import load_benchmark
from trl_explore.errors import UsageError
from trl_explore.evaluation.presets import Preset, as_prompts, load_preset, preset_names

BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
LETTER = "\n\nReason step by step, and put the letter of your choice within \\boxed{}."

# Made up, in the columns and types of the real ones, but for some that nothing reads: rows, and their expected prompts
# and answers.
FORMATS = {
    "gsm8k": (
        [
            {"question": "Ada has 2 hats and buys 3.", "answer": "2+3=<<2+3=5>>5\n#### 5"},
            {"question": "Bo has none.", "answer": "#### 1,000"},
        ],
        [("Ada has 2 hats and buys 3." + BOXED, "2+3=<<2+3=5>>5\n#### 5"), ("Bo has none." + BOXED, "#### 1,000")],
    ),
    "math500": (
        [{"problem": "Halve $1$.", "solution": "so \\boxed{9}", "answer": "\\frac{1}{2}", "level": 1}],
        [("Halve $1$." + BOXED, "\\frac{1}{2}")],
    ),
    "aime24": (
        [{"id": 60, "problem": "Count.", "solution": "\\boxed{204}", "url": "https://example.com"}],
        [("Count." + BOXED, "\\boxed{204}")],
    ),
    "aime25": ([{"problem": "Count on.", "answer": "70", "id": "0"}], [("Count on." + BOXED, "70")]),
    "amc": (
        [{"id": 0, "problem": "Add.", "answer": 142.0, "url": "https://example.com"}],
        [("Add." + BOXED, "142.0")],
    ),
    "minerva": ([{"question": "How hot?", "answer": "4.5e33"}], [("How hot?" + BOXED, "4.5e33")]),
    "olympiadbench": (
        [
            {"context": None, "question": "Find $x$.", "final_answer": ["$2$"], "modality": "Text-only"},
            {"context": "Let $n=1$.", "question": "Find both.", "final_answer": ["8", "-3"], "modality": "Text-only"},
        ],
        [("Find $x$." + BOXED, "$2$"), ("Let $n=1$.\n\nFind both." + BOXED, "\\boxed{8, -3}")],
    ),
    "gpqa": (
        [
            {
                "Question": "Which is even?\n",
                "Correct Answer": "two\n",
                "Incorrect Answer 1": "one",
                "Incorrect Answer 2": "three",
                "Incorrect Answer 3": "five",
                "Record ID": "rec",
            }
        ],
        [("Which is even?\n\nA. one\nB. five\nC. two\nD. three" + LETTER, "C")],
    ),
    "mmlu_pro": (
        [{"question": "Which is last?", "options": [str(i) for i in range(10)], "answer": "J", "answer_index": 9}],
        [("Which is last?\n\n" + "\n".join(f"{c}. {i}" for i, c in enumerate("ABCDEFGHIJ")) + LETTER, "J")],
    ),
}
# The format that the Hub has each in.
JSON_LINES = ("aime25", "olympiadbench")


def flags(**changes):
    names = ("limit", "system_prompt", "reward_funcs", "dataset_config", "dataset_split")
    return argparse.Namespace(**dict.fromkeys(names) | changes)


def hub_copy(folder, name):
    """What `hf download` would leave: the files, and the card with the configuration."""
    preset, (rows, _) = load_preset(name), FORMATS[name]
    file = f"{preset.config or 'data'}/{preset.split}-00000-of-00001.{'jsonl' if name in JSON_LINES else 'parquet'}"
    path = folder / name / file
    path.parent.mkdir(parents=True)
    data = Dataset.from_list(rows)
    data.to_json(path) if name in JSON_LINES else data.to_parquet(path)
    files = [{"split": preset.split, "path": file}]
    card = {"configs": [{"config_name": preset.config or "default", "data_files": files}]}
    (folder / name / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    return folder / name


def test_every_benchmark_is_tried_here():
    assert preset_names() == sorted(FORMATS)


# Right and wrong answers to the rows, in their order.
ANSWERS = {
    "gsm8k": (["so \\boxed{5}", "It is 1000.\n#### 1000"], ["\\boxed{6}", "#### 1001"]),
    "math500": (["\\boxed{0.5}"], ["\\boxed{9}"]),
    "aime24": (["\\boxed{204}"], ["\\boxed{20}"]),
    "aime25": (["\\boxed{70}"], ["no idea"]),
    "amc": (["\\boxed{142}"], ["\\boxed{14}"]),
    "minerva": (["\\boxed{4.5 \\times 10^{33}}"], ["\\boxed{4.5}"]),
    "olympiadbench": (["\\boxed{2}", "\\boxed{-3, 8}"], ["\\boxed{3}", "\\boxed{8}"]),
    "gpqa": (["\\boxed{C}"], ["\\boxed{A}"]),
    "mmlu_pro": (["The answer is (J)."], ["\\boxed{I}"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_of_the_hub_is_read_as_the_benchmark_and_answers_are_graded(name, tmp_path):
    benchmark = load_benchmark(f"{name}={hub_copy(tmp_path, name)}", flags())
    found = [(row["prompt"], row["answer"]) for row in benchmark.rows]
    expected = [([{"role": "user", "content": prompt}], answer) for prompt, answer in FORMATS[name][1]]
    assert found == expected
    preset = load_preset(name)
    assert benchmark.name == name
    assert benchmark.origin["split"] == preset.split and benchmark.origin["config"] == preset.config
    assert benchmark.recommended["num_samples"] == preset.num_samples
    (reward,) = benchmark.reward_funcs
    right, wrong = ANSWERS[name]
    for texts, score in ((right, 1.0), (wrong, 0.0)):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        assert reward(completions=completions, answer=benchmark.rows["answer"][:]) == [score] * len(texts)
    assert all(benchmark.answer_fn(text) is not None for text in right)


def test_a_file_or_a_bare_folder_of_files_is_a_copy_too(tmp_path):
    rows, expected = FORMATS["gsm8k"]
    (tmp_path / "bare").mkdir()
    Dataset.from_list(rows).to_json(tmp_path / "bare" / "test.jsonl")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for copy in ("bare", "bare/test.jsonl", "saved"):
        benchmark = load_benchmark(f"gsm8k={tmp_path / copy}", flags(limit=1))
        assert benchmark.rows["answer"][:] == [expected[0][1]]


def test_choices_are_shuffled_for_equal_questions_equally():
    preset = load_preset("gpqa")
    rows = [{**FORMATS["gpqa"][0][0], "Question": f"Number {i}?"} for i in range(40)]
    first = as_prompts(Dataset.from_list(rows), preset)
    last = as_prompts(Dataset.from_list(rows[::-1]), preset)
    assert first.to_list() == last.to_list()[::-1]
    assert set(first["answer"]) == set("ABCD")
    for row in first:
        assert f"{row['answer']}. two\n" in row["prompt"][0]["content"] + "\n"


def test_a_benchmark_of_ones_own_is_a_yaml_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"text": "1+1?", "gold": 2}) + "\n")
    fields = {"path": "./quiz.jsonl", "question": "text", "answer": "gold", "num_samples": 3}
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump(fields | {"system_prompt": "Be brief."}))
    benchmark = load_benchmark("quiz.yaml", flags())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert benchmark.name == "quiz" and benchmark.recommended["num_samples"] == 3
    assert benchmark.rows.to_list() == [{"prompt": messages, "answer": "2"}]
    other = load_benchmark("quiz.yaml", flags(system_prompt="Be long."))
    assert other.rows[0]["prompt"][0]["content"] == "Be long."


def test_one_wrong_answer_and_gold_answers_that_are_lists_of_numbers(tmp_path):
    fields = {"path": "x", "question": "q", "answer": "a", "wrong_answers": "b"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(fields))
    preset = load_preset(tmp_path / "two.yaml")
    assert preset.wrong_answers == ["b"]
    (row,) = as_prompts(Dataset.from_list([{"q": "1+1?", "a": "2", "b": "3"}]), preset)
    assert "A. " in row["prompt"][0]["content"] and row["answer"] in ("A", "B")
    lists = Preset(path="x", question=["q"], answer="a")
    rows = as_prompts(Dataset.from_list([{"q": "1+1?", "a": [2]}, {"q": "both?", "a": [1, 2]}]), lists)
    assert rows["answer"] == ["2", r"\boxed{1, 2}"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "x"}, "must have at least the fields path, question and answer"),
        ([1], "must have at least the fields"),
        ({"path": "x", "question": "q", "answer": "a", "promt": "p"}, "unknown field 'promt'"),
    ],
)
def test_mistakes_in_a_yaml_file_are_named(tmp_path, fields, message):
    (tmp_path / "quiz.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=message):
        load_preset(tmp_path / "quiz.yaml")


def test_a_missing_column_or_preset_is_named_with_the_nearest():
    rows = Dataset.from_list([{"problems": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match=r"unknown column 'problem'; did you mean 'problems'\? .*'answer'"):
        as_prompts(rows, load_preset("math500"))
    with pytest.raises(ValueError, match="unknown preset 'math-500'; did you mean 'math500'"):
        load_preset("math-500")


def test_a_benchmark_that_is_not_here_says_how_to_get_it():
    with pytest.raises(UsageError, match="hf download nobody/no-such-data .*--dataset gsm8k=FOLDER"):
        load_benchmark("gsm8k=nobody/no-such-data", flags())
