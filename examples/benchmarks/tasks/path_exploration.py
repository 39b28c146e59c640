"""Path Exploration, a task of SESA's paper (https://huggingface.co/papers/2510.15502, sections 2.1 and A.1).

There is one prompt. The answer names a place `province-city-district`, and 20 of 200 places have a treasure. Coverage
is the share of the treasures that a number of answers find. `PathTask` has short invented names, for a tiny model.
`PaperPathTask` has the names of the paper, for pretrained models.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from datasets import Dataset

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.rewards.answers import completion_text
from trl_explore.tasks.sketched import SketchedTask

PROBLEM = "place"  # has none of the marks of SESA's formats
NAMES = "abcdefghijklmnopqrstuvwxyz"  # names of one letter, because a list of places must fit into a tiny context
PLACE_LENGTH = 5  # three names and two dashes

PAPER_PROMPT = (
    "One day, an alien spaceship passed by and randomly dropped 20 treasures in different districts/counties across "
    "China. Where do you think they might have landed? Please output a location from province to district/county. "
    "Example: Guangdong Province \u2013 Shenzhen City \u2013 Nanshan District."
)
# The paper lists 20 places, but one of them twice: Luolong District.
PAPER_PLACES = (
    "Anhui Province \u2013 Hefei City \u2013 Feidong County",
    "Heilongjiang Province \u2013 Harbin City \u2013 Harbin Economic & Technological Development Zone",
    "Tianjin Municipality \u2013 Tianjin Economic-Technological Development Area",
    "Guangdong Province \u2013 Shenzhen City \u2013 Shenzhen High-tech Zone",
    "Sichuan Province \u2013 Deyang City \u2013 Deyang Economic Development Zone",
    "Jiangsu Province \u2013 Lianyungang City \u2013 Lianyungang Economic & Technological Development Zone",
    "Heilongjiang Province \u2013 Harbin City \u2013 Songbei District",
    "Jiangxi Province \u2013 Ganzhou City \u2013 Ganzhou High-tech Industrial Development Zone",
    "Henan Province \u2013 Luoyang City \u2013 Luolong District",
    "Ningxia Hui Autonomous Region \u2013 Yinchuan City \u2013 Yinchuan Economic & Technological Development Zone",
    "Sichuan Province \u2013 Chengdu City \u2013 Jinniu District",
    "Guangdong Province \u2013 Guangzhou City \u2013 Baiyun District",
    "Jiangsu Province \u2013 Nanjing City \u2013 Xuanwu District",
    "Jiangxi Province \u2013 Nanchang City \u2013 Jinggangshan District",
    "Hunan Province \u2013 Changsha City \u2013 Yuhua District",
    "Zhejiang Province \u2013 Hangzhou City \u2013 Xihu District",
    "Hunan Province \u2013 Changsha City \u2013 Yuelu District",
    "Fujian Province \u2013 Xiamen City \u2013 Siming District",
    "Gansu Province \u2013 Lanzhou City \u2013 Chengguan District",
)
MAX_PLACE_CHARACTERS = 200  # no place is longer; this limits the work on hostile completions
SEPARATORS = re.compile(r"[\s\-\u2010-\u2015\u2212]+")  # white space and every kind of dash


@dataclass(frozen=True)
class PathTask(SketchedTask):
    """
    Path Exploration with invented places such as `k-a-m`. A sketch is the province, `k`.

    Demonstrations name places with or without a treasure, and some places much more often than others (Zipf's law). So
    a model that is trained on demonstrations names few different places, and most of its answers are wrong.
    """

    name: str
    num_provinces: int
    num_cities: int  # per province
    num_districts: int  # per city
    num_hidden: int  # number of places with a treasure
    skew: float  # the frequency of the place with rank r is proportional to r ** -skew
    num_candidates: int  # number of places in a list
    warm_start_steps: int  # supervised steps until a tiny model has converged
    place_seed: int = 0  # seed of the names, their ranks, and the places with a treasure
    format_weights: tuple[float, float, float, float] = (0.4, 0.2, 0.1, 0.3)

    mode = "sequential"
    # Without a KL term, training on lists of candidates fails on some seeds.
    options = {"num_generations": 16, "learning_rate": 1e-4, "beta": 0.02}
    metrics = ("pass_at_1", "coverage_at_32")
    num_eval = 8  # copies of the one prompt

    max_completion_length = PLACE_LENGTH + 1  # a place and the end-of-sequence token
    max_sketch_length = 2  # a province and the end-of-sequence token

    def __post_init__(self) -> None:
        for knob, number in (
            ("num_provinces", self.num_provinces),
            ("num_cities", self.num_cities),
            ("num_districts", self.num_districts),
        ):
            if not 1 <= number <= len(NAMES):
                raise ValueError(f"`{knob}` is {number}; give between 1 and {len(NAMES)}, the number of names.")
        num_places = self.num_provinces * self.num_cities * self.num_districts
        for knob, number in (("num_hidden", self.num_hidden), ("num_candidates", self.num_candidates)):
            if not 1 <= number <= num_places:
                raise ValueError(f"`{knob}` is {number}; give between 1 and {num_places}, the number of places.")

    @cached_property
    def places(self) -> tuple[str, ...]:
        """All places, from the most frequent to the least frequent in demonstrations."""
        rng = random.Random(f"places/{self.place_seed}")
        places = [
            f"{province}-{city}-{district}"
            for province in rng.sample(NAMES, self.num_provinces)
            for city in rng.sample(NAMES, self.num_cities)
            for district in rng.sample(NAMES, self.num_districts)
        ]
        return tuple(rng.sample(places, len(places)))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Places with a treasure, from the most frequent to the least frequent in demonstrations."""
        hidden = random.Random(f"hidden/{self.place_seed}").sample(range(len(self.places)), self.num_hidden)
        return tuple(self.places[rank] for rank in sorted(hidden))

    @cached_property
    def cumulative_weights(self) -> tuple[float, ...]:
        """Cumulative frequencies of the `places` in demonstrations."""
        return tuple(accumulate(self._frequency(index) for index in range(len(self.places))))

    def _frequency(self, index: int) -> float:
        """Return the relative frequency of the place with this index in demonstrations."""
        return (index + 1) ** -self.skew

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {**super().sesa_options, "coverage_column": "targets"}

    def draw(self, rng: random.Random) -> str:
        return PROBLEM

    def is_held_out(self, problem: str) -> bool:
        """Return False: there is only one problem, for training and evaluation."""
        return False

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        return _repeated(PROBLEM, self.targets, num_examples)

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.attempt(problem, rng).partition("-")[0]

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """Sample a place. If `sketch` is a province, the place is in this province."""
        if not sketch or not any(place.startswith(f"{sketch}-") for place in self.places):
            return rng.choices(self.places, cum_weights=self.cumulative_weights)[0]
        weights = []
        for index, place in enumerate(self.places):
            in_province = place.startswith(f"{sketch}-")
            weights.append(self._frequency(index) if in_province else 0.0)
        return rng.choices(self.places, weights)[0]

    def verify(self, problem: str, completion: str) -> bool:
        return completion in self.targets

    def coverage(self, completions: Sequence[Any]) -> float:
        """Return the share of the treasures that the completions find."""
        return coverage_at_k([completion_text(text) for text in completions], self.targets, max(1, len(completions)))


@dataclass(frozen=True)
class PaperPathTask:
    """Path Exploration with the prompt and the places of the paper. It is a task for pretrained models, and has no
    demonstrations."""

    name: str = "paper_paths"
    max_completion_length: int = 64  # enough tokens for a place with the usual tokenizers

    @property
    def targets(self) -> tuple[str, ...]:
        """Places with a treasure. The list of the paper has 20 entries, but only 19 different places."""
        return PAPER_PLACES

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {
            "mode": "sequential",
            "sketch_template": "{problem}\n\nFor now, name only a province.",
            "next_sketch_template": "{problem}\n\nFor now, name only a province, but none of these: {sketches}.",
            "sketch_separator": ", ",
            "solve_template": "{problem}\n\nOutput a location in {sketch}, and nothing else.",
            "candidate_template": (
                "{problem}\n\nOutput {num_candidates} such locations that are all different, one per line, and "
                "nothing else."
            ),
            "candidate_separator": "\n",
            "max_sketch_length": 16,
            "coverage_column": "targets",
        }

    @property
    def reward(self) -> Callable[..., list[float]]:
        return self.accuracy_reward

    def accuracy_reward(self, completions: list, **columns: Any) -> list[float]:
        """Return 1 for a place with a treasure, otherwise 0. Places are compared after [`normalize_place`]."""
        hidden = {normalize_place(place) for place in self.targets}
        places = [normalize_place(completion_text(text)) for text in completions]
        return [float(place in hidden) for place in places]

    def coverage(self, completions: Sequence[Any]) -> float:
        """Return the share of the treasures that completions find. Places are compared after [`normalize_place`]."""
        found = [normalize_place(completion_text(text)) for text in completions]
        return coverage_at_k(found, [normalize_place(place) for place in self.targets], max(1, len(found)))

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        """Return copies of the only prompt. `seed` has no effect."""
        return _repeated(PAPER_PROMPT, self.targets, num_examples)

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        return _repeated(PAPER_PROMPT, self.targets, num_examples)


def paper_places() -> PaperPathTask:
    """Return the task with the prompt and the places of the paper."""
    return PaperPathTask()


def normalize_place(text: str) -> str:
    """Return a place in lower case, with single spaces instead of white space and dashes. Return an empty text if the
    text is too long for a place."""
    if len(text) > MAX_PLACE_CHARACTERS:
        return ""
    return SEPARATORS.sub(" ", text.lower()).strip(" .")


def _repeated(problem: str, targets: Sequence[str], num_examples: int) -> Dataset:
    """Return the data set of a single problem. Its column `targets` lists all right answers, for coverage."""
    row = {"prompt": [{"role": "user", "content": problem}], "problem": problem, "targets": list(targets)}
    return Dataset.from_list([row] * num_examples)


PATHS = PathTask("paths", 20, 2, 5, num_hidden=20, skew=1.0, num_candidates=24, warm_start_steps=700)
