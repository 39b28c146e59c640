"""Path Exploration: guess where treasures are hidden. SESA (https://huggingface.co/papers/2510.15502), 2.1 and A.1.

One prompt, 200 places `province-city-district`, 20 treasures; coverage is the share that some number of guesses names.
`PathTask` has short invented names, for a tiny model; `PaperPathTask` has the paper's, for pretrained models.
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

PROBLEM = "place"  # without any of the marks
NAMES = "abcdefghijklmnopqrstuvwxyz"  # one letter each: a list of places must fit a tiny model's context
PLACE_LENGTH = 5  # three names and two dashes

PAPER_PROMPT = (
    "One day, an alien spaceship passed by and randomly dropped 20 treasures in different districts/counties across "
    "China. Where do you think they might have landed? Please output a location from province to district/county. "
    "Example: Guangdong Province \u2013 Shenzhen City \u2013 Nanshan District."
)
# The paper lists 20, but Luolong District twice.
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
MAX_PLACE_CHARACTERS = 200  # no place is longer; bounds the work on hostile completions
SEPARATORS = re.compile(r"[\s\-\u2010-\u2015\u2212]+")  # white space and every kind of dash


@dataclass(frozen=True)
class PathTask(SketchedTask):
    """Path Exploration with invented places, `k-a-m`; a sketch is the province, `k`. Demonstrations name places by a
    Zipf law, treasure or not: a model trained on them mostly names a few, and rarely one that is rewarded."""

    name: str
    num_provinces: int
    num_cities: int  # per province
    num_districts: int  # per city
    num_hidden: int  # places with a treasure
    skew: float  # the place of rank r is named in proportion to r ** -skew
    num_candidates: int  # places in a list
    warm_start_steps: int  # supervised steps until a tiny model has converged
    place_seed: int = 0  # of the names, of their ranks and of the hidden ones
    format_weights: tuple[float, float, float, float] = (0.4, 0.2, 0.1, 0.3)

    mode = "sequential"
    # There is only one prompt. Without a KL term, lists of candidates break on some seeds.
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
        """All places, the most often demonstrated one first."""
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
        """The places with a treasure, the most often demonstrated one first."""
        hidden = random.Random(f"hidden/{self.place_seed}").sample(range(len(self.places)), self.num_hidden)
        return tuple(self.places[rank] for rank in sorted(hidden))

    @cached_property
    def cumulative_weights(self) -> tuple[float, ...]:
        """Running sums of the Zipf law, in the order of `places`."""
        return tuple(accumulate((rank + 1) ** -self.skew for rank in range(len(self.places))))

    @property
    def sesa_options(self) -> dict[str, Any]:
        return {**super().sesa_options, "coverage_column": "targets"}

    def draw(self, rng: random.Random) -> str:
        return PROBLEM

    def is_held_out(self, problem: str) -> bool:
        """Never: training and evaluation share the one problem, and differ in what is counted."""
        return False

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        return _repeated(PROBLEM, self.targets, num_examples)

    def sketch(self, problem: str, rng: random.Random) -> str:
        return self.attempt(problem, rng).partition("-")[0]

    def attempt(self, problem: str, rng: random.Random, *, sketch: str = "") -> str:
        """A place by the Zipf law, within the province `sketch` if there is one."""
        if not sketch or not any(place.startswith(f"{sketch}-") for place in self.places):
            return rng.choices(self.places, cum_weights=self.cumulative_weights)[0]
        weights = [(rank + 1) ** -self.skew * place.startswith(f"{sketch}-") for rank, place in enumerate(self.places)]
        return rng.choices(self.places, weights)[0]

    def verify(self, problem: str, completion: str) -> bool:
        return completion in self.targets

    def coverage(self, completions: Sequence[Any]) -> float:
        return coverage_at_k([completion_text(text) for text in completions], self.targets, max(1, len(completions)))


@dataclass(frozen=True)
class PaperPathTask:
    """Path Exploration with the paper's prompt and places. A [`Task`] for pretrained models; nothing teaches it."""

    name: str = "paper_paths"
    max_completion_length: int = 64  # tokens of a place, in any usual vocabulary

    @property
    def targets(self) -> tuple[str, ...]:
        """The paper's places; 19, because one of its 20 is there twice."""
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
        """1 for a place with a treasure, up to [`normalize_place`], else 0."""
        hidden = {normalize_place(place) for place in self.targets}
        return [float(normalize_place(completion_text(text)) in hidden) for text in completions]

    def coverage(self, completions: Sequence[Any]) -> float:
        """As [`PathTask.coverage`], but up to [`normalize_place`]."""
        found = [normalize_place(completion_text(text)) for text in completions]
        return coverage_at_k(found, [normalize_place(place) for place in self.targets], max(1, len(found)))

    def build_dataset(self, num_examples: int, *, seed: int) -> Dataset:
        """Copies of the one prompt; `seed` changes nothing."""
        return _repeated(PAPER_PROMPT, self.targets, num_examples)

    def evaluation_set(self, num_examples: int = 256, *, seed: int = 0) -> Dataset:
        return _repeated(PAPER_PROMPT, self.targets, num_examples)


def paper_places() -> PaperPathTask:
    return PaperPathTask()


def normalize_place(text: str) -> str:
    """Words of a place in lower case with one space between; empty for what is too long to be one."""
    if len(text) > MAX_PLACE_CHARACTERS:
        return ""
    return SEPARATORS.sub(" ", text.lower()).strip(" .")


def _repeated(problem: str, targets: Sequence[str], num_examples: int) -> Dataset:
    """Return the data set of a single problem. Its column `targets` lists all right answers, for coverage."""
    row = {"prompt": [{"role": "user", "content": problem}], "problem": problem, "targets": list(targets)}
    return Dataset.from_list([row] * num_examples)


PATHS = PathTask("paths", 20, 2, 5, num_hidden=20, skew=1.0, num_candidates=24, warm_start_steps=700)
