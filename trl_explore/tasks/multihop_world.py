"""Invented worlds of people, films, cities and countries, and questions that need several look-ups.

A *world* is a graph: each relation of an entity leads to one entity at most. For pretrained models, worlds are
rendered in English. For a tiny model, they are rendered in names of one letter. There every question has its own
world, so the model cannot memorize answers and has to search.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from trl_explore.tasks.held_out import HELD_OUT_ONE_IN, is_held_out

Entity = tuple[str, int]  # kind and number; a husband has an even number and his wife the next number


class Relation(NamedTuple):
    """Relation between two kinds of entities, with its noun."""

    source: str
    target: str
    noun: str


RELATIONS = {
    "d": Relation("film", "person", "director"),
    "w": Relation("film", "person", "writer"),
    "f": Relation("person", "person", "father"),
    "m": Relation("person", "person", "mother"),
    "s": Relation("person", "person", "spouse"),
    "b": Relation("person", "city", "birthplace"),
    "c": Relation("city", "country", "country"),
    "y": Relation("city", "person", "mayor"),
    "k": Relation("country", "city", "capital"),
    "p": Relation("country", "person", "president"),
}
ROUNDABOUT = "kc"  # the country of a country's capital is the country itself


def _following(first: str) -> list[str]:
    """Return the relations that may follow a relation in a path."""
    found = []
    for second in RELATIONS:
        fits = RELATIONS[first].target == RELATIONS[second].source
        if fits and second != first and first + second != ROUNDABOUT:
            found.append(second)
    return found


FOLLOWING = {relation: _following(relation) for relation in RELATIONS}
LAST_RELATIONS = sorted(set().union(*FOLLOWING.values()))
MAX_HOPS = 6  # longer paths without a repetition are rare, and small worlds have none

LETTERS = "".join(sorted(set("abcdefghijklmnopqrstuvwxyz") - set(RELATIONS)))  # the short names
PUZZLE_SIZES = {"couples": 5, "films": 1, "cities": 3, "countries": 2}  # one entity per letter
START_MARK, END_MARK = ".", "?"
PASSAGES = 2  # per search

ONSETS = "Bel Cor Dal Fen Gar Hol Jur Kal Lor Mir Nor Ost Pel Rav Sel Tor Ul Vel Wen Yar Zan".split()
RIMES = "ab ad ag al am an ar as ed el em en er id il im in ir od ol om on or ud ul um un ur".split()
ENDINGS = {"person": ("ek", "er"), "city": ("burg", "borg"), "country": ("ia", "ina")}
MEN = "Adam Bruno Cyril Denis Emil Felix Gustav Hugo Igor Jonas Karel Leon".split()
WOMEN = "Ada Berta Clara Dora Elsa Frida Greta Hana Irma Julia Klara Lena".split()
ADJECTIVES = "Silent Broken Crimson Distant Empty Frozen Golden Hidden Last Midnight Northern Pale Restless".split()
NOUNS = "Harbor Harvest Garden Guardian Letter Ladder Mirror Minister River Rider Station Stranger".split()
QUESTION_WORDS = {"person": "Who is", "city": "Which city is", "country": "Which country is"}


@dataclass(frozen=True)
class World:
    """
    World without names.

    Args:
        facts (`dict[tuple[Entity, str], Entity]`):
            Maps an entity and the letter of a relation to the entity to which the relation leads.
    """

    facts: dict[tuple[Entity, str], Entity]

    @cached_property
    def entities(self) -> list[Entity]:
        return sorted({entity for (entity, _) in self.facts})

    def walk(self, start: Entity, path: str) -> list[Entity]:
        """Follow a path of relations as far as they exist. Return the entities, beginning with `start`."""
        walk = [start]
        for relation in path:
            if (walk[-1], relation) not in self.facts:
                break
            walk.append(self.facts[walk[-1], relation])
        return walk

    def answerable(self, start: Entity, path: str) -> bool:
        """Return whether `path` is complete and visits no entity twice, so that only its end is the right answer."""
        return len(set(self.walk(start, path))) == len(path) + 1


def build_world(rng: random.Random, *, couples: int, films: int, cities: int, countries: int) -> World:
    """
    Sample a world. Its oldest two couples have no parents, and nobody is married to a sibling.

    Args:
        rng (`random.Random`):
            Random generator.
        couples (`int`):
            Number of married couples, at least 3.
        films (`int`):
            Number of films, at least 1.
        cities (`int`):
            Number of cities, at least `countries`.
        countries (`int`):
            Number of countries, at least 1.

    Raises:
        ValueError: If one of the numbers is out of range.
    """
    if couples < 3 or not 1 <= countries <= cities or films < 1:
        raise ValueError(
            f"`couples, films, cities, countries` are {couples}, {films}, {cities}, {countries}; give at least 3 "
            "couples, one film and one country, and no fewer cities than countries."
        )
    facts: dict[tuple[Entity, str], Entity] = {}
    for couple in range(couples):
        husband, wife = ("person", 2 * couple), ("person", 2 * couple + 1)
        facts[husband, "s"], facts[wife, "s"] = wife, husband
        # Couples are ordered from young to old, and parents are older, so nobody is their own ancestor.
        if couple < couples - 2:
            older_couples = rng.sample(range(couple + 1, couples), 2)
            for child, parents in zip((husband, wife), older_couples, strict=True):
                facts[child, "f"], facts[child, "m"] = ("person", 2 * parents), ("person", 2 * parents + 1)
        for person in (husband, wife):
            facts[person, "b"] = ("city", rng.randrange(cities))
    for film in range(films):
        director, writer = rng.sample(range(2 * couples), 2)
        facts[("film", film), "d"], facts[("film", film), "w"] = ("person", director), ("person", writer)
    for city in range(cities):
        # The first cities are the capitals of the countries with the same numbers.
        country = city if city < countries else rng.randrange(countries)
        facts[("city", city), "c"] = ("country", country)
        facts[("city", city), "y"] = ("person", rng.randrange(2 * couples))
    for country in range(countries):
        facts[("country", country), "k"] = ("city", country)
        facts[("country", country), "p"] = ("person", rng.randrange(2 * couples))
    return World(facts)


def draw_path(rng: random.Random, hops: int) -> str:
    """Sample a path: letters of different relations, each of which begins at the kind where the one before ends."""
    if not 1 <= hops <= MAX_HOPS:
        raise ValueError(f"`hops` is {hops}; give between 1 and {MAX_HOPS} look-ups.")
    path = ""
    while len(path) != hops:  # a path that cannot be continued is dropped
        path = rng.choice(list(RELATIONS))
        following = FOLLOWING[path]
        while following and len(path) < hops:
            path += rng.choice(following)
            following = [relation for relation in FOLLOWING[path[-1]] if relation not in path]
    return path


def _lookalikes(entities: list[Entity]) -> dict[tuple[str, int, int], list[Entity]]:
    """Return groups of one or two entities that get similar names. The entities of a group are of the same kind, and
    people of the same sex. The keys are the kind, the number of the group, and 1 for women or 0 for all others."""
    groups: dict[tuple[str, int, int], list[Entity]] = {}
    for kind, number in entities:
        key = (kind, number // 2, 0)
        if kind == "person":  # two people of one sex, from consecutive couples
            key = (kind, number // 4, number % 2)
        groups.setdefault(key, []).append((kind, number))
    return groups


# --- short names, for the tiny model ---------------------------------------------------------------------------------


class Puzzle(NamedTuple):
    """World of one question in short names: `facts` such as `{"zd": "q"}`, and the `chain` from start to answer."""

    facts: dict[str, str]
    chain: tuple[str, ...]


def split_question(question: str) -> tuple[str, str]:
    """Return the start and the path of a short question: `z` and `dm` for `z.dm?`."""
    start, _, path = question.removesuffix(END_MARK).partition(START_MARK)
    return start, path


def draw_question(rng: random.Random, hops: int) -> str:
    """Sample a short question, such as `z.dm?`."""
    return f"{rng.choice(LETTERS)}{START_MARK}{draw_path(rng, hops)}{END_MARK}"


# Cached, because all rows of a prompt share their world, and every search of a row needs it again.
@lru_cache(maxsize=4096)
def puzzle(question: str, seed: int) -> Puzzle:
    """Build the world of a short question and a seed. The question has at least two look-ups. In the searches for the
    last two, the second passage leads to a wrong entity."""
    name, path = split_question(question)
    rng = random.Random(f"puzzle/{question}/{seed}")
    while True:
        world = build_world(rng, **PUZZLE_SIZES)
        starts = [entity for entity in world.entities if world.answerable(entity, path)]
        if not starts:
            continue
        start = rng.choice(starts)
        others = [entity for entity in world.entities if entity != start]
        letters = rng.sample(LETTERS.replace(name, ""), len(others))
        names = {start: name, **dict(zip(others, letters, strict=True))}
        facts = {names[subject] + relation: names[found] for (subject, relation), found in world.facts.items()}
        chain = tuple(names[entity] for entity in world.walk(start, path))
        wrong = []  # entities to which the second passages lead
        for query in (chain[-3] + path[-2], chain[-2] + path[-1]):
            _, second = retrieve(facts, query)
            wrong.append(facts[second])
        if set(wrong).isdisjoint(chain[-2:]):
            return Puzzle(facts, chain)


def retrieve(facts: dict[str, str], query: str) -> list[str]:
    """Return the keys of the [`PASSAGES`] facts nearest to a query, such as `zd`: the name `z` and the relation `d`.
    Only facts with this name or this relation count. Facts with this relation come first, sorted by the distance of
    their name in the alphabet."""
    letters = [character for character in query if character.isalpha()]
    if len(letters) < 2:
        return []
    name, relation = letters[:2]

    def distance(key: str) -> tuple[bool, int]:
        return key[1] != relation, abs(ord(key[0]) - ord(name))

    alike = [key for key in facts if key[0] == name or key[1] == relation]
    return sorted(alike, key=distance)[:PASSAGES]


# --- English, for real models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnglishWorld:
    """
    World in English: a corpus with one passage per entity, and questions about it.

    Worlds of different seeds have different facts, so facts that a model has memorized do not help in another world.

    Args:
        seed (`int`):
            Seed of the world.
        couples (`int`, *optional*, defaults to `60`):
            Number of married couples. There are no other people.
        films (`int`, *optional*, defaults to `60`):
            Number of films.
        cities (`int`, *optional*, defaults to `30`):
            Number of cities.
        countries (`int`, *optional*, defaults to `10`):
            Number of countries.
    """

    seed: int
    couples: int = 60
    films: int = 60
    cities: int = 30
    countries: int = 10

    def __post_init__(self) -> None:
        titles, stems = len(ADJECTIVES) * len(NOUNS), len(ONSETS) * len(RIMES)
        if self.films > titles:
            raise ValueError(f"`films` is {self.films}; there are titles for {titles}, so give no more.")
        if self.couples + self.cities + self.countries > stems:
            raise ValueError(
                f"`couples + cities + countries` is {self.couples + self.cities + self.countries}; there are names "
                f"for {stems}, so give fewer."
            )
        _ = self.world  # raises an error for impossible sizes

    @cached_property
    def world(self) -> World:
        rng = random.Random(f"world/{self.seed}")
        return build_world(rng, couples=self.couples, films=self.films, cities=self.cities, countries=self.countries)

    @cached_property
    def names(self) -> dict[Entity, str]:
        """Names of all entities. Most entities have another entity with a similar name."""
        rng = random.Random(f"names/{self.seed}")
        groups = _lookalikes(self.world.entities)
        all_stems = [onset + rime for onset, rime in itertools.product(ONSETS, RIMES)]
        stems = iter(rng.sample(all_stems, len(groups)))
        similar_nouns = list(zip(NOUNS[::2], NOUNS[1::2], strict=True))
        all_titles = list(itertools.product(ADJECTIVES, similar_nouns))
        titles = iter(rng.sample(all_titles, len(all_titles)))
        names: dict[Entity, str] = {}
        for (kind, _, is_woman), members in groups.items():
            if kind == "film":
                adjective, endings = next(titles)
                start = f"{adjective} "
            else:
                first_name = ""
                if kind == "person":
                    first_name = f"{rng.choice(WOMEN if is_woman else MEN)} "
                start, endings = first_name + next(stems), ENDINGS[kind]
            for member, ending in zip(members, endings, strict=False):  # a group may have only one member
                names[member] = start + ending
        return names

    def corpus(self) -> list[dict[str, str]]:
        """Return a passage per entity, with `id`, `title` and `text`."""
        return [
            {"id": f"{kind}-{number}", "title": self.names[kind, number], "text": self._passage((kind, number))}
            for kind, number in self.world.entities
        ]

    def questions(
        self, number: int, *, seed: int, held_out: bool = False, hops: tuple[int, ...] = (2, 3, 4)
    ) -> list[dict[str, Any]]:
        """
        Sample different questions.

        Args:
            number (`int`):
                Number of questions.
            seed (`int`):
                Seed of the questions.
            held_out (`bool`, *optional*, defaults to `False`):
                If `True`, return held-out questions instead of training questions.
            hops (`tuple[int, ...]`, *optional*, defaults to `(2, 3, 4)`):
                Numbers of look-ups, which are equally likely.

        Returns:
            `list[dict[str, Any]]`: Rows with `question`, `answer`, `hops`, and `evidence`, the titles of the passages
            that the look-ups need.

        Raises:
            ValueError: If the world seems to have fewer such questions.
        """
        rows: dict[str, dict[str, Any]] = {}
        rng = random.Random(f"questions/{self.seed}/{seed}")
        max_tries = 100 * HELD_OUT_ONE_IN * (number + 1)  # far more than a world with enough questions needs
        for row in itertools.islice(self._random_rows(rng, hops), max_tries):
            if len(rows) == number:
                return list(rows.values())
            if is_held_out(row["question"]) == held_out:
                rows[row["question"]] = row
        raise ValueError(f"`number` is {number}, but there are only about {len(rows)} such questions; ask for fewer.")

    def _random_rows(self, rng: random.Random, hops: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Sample rows of [`questions`] without end. Rows may repeat."""
        while True:
            path = draw_path(rng, rng.choice(hops))
            start = rng.choice([entity for entity in self.world.entities if entity[0] == RELATIONS[path[0]].source])
            if self.world.answerable(start, path):
                walk = [self.names[entity] for entity in self.world.walk(start, path)]
                phrase = walk[0]
                for relation in path:
                    phrase = f"the {RELATIONS[relation].noun} of {phrase}"
                question = f"{QUESTION_WORDS[RELATIONS[path[-1]].target]} {phrase}?"
                yield {"question": question, "answer": walk[-1], "hops": len(path), "evidence": walk[:-1]}

    def _passage(self, entity: Entity) -> str:
        """Return a text with all facts about an entity."""
        kind, number = entity
        name = self.names[entity]
        known = {}  # names by relation
        for (subject, relation), found in self.world.facts.items():
            if subject == entity:
                known[relation] = self.names[found]
        if kind == "film":
            return f"{name} is a film. Its director is {known['d']} and its writer is {known['w']}."
        if kind == "city":
            return f"{name} is a city in the country of {known['c']}. The mayor of {name} is {known['y']}."
        if kind == "country":
            return f"{name} is a country. Its capital is {known['k']} and its president is {known['p']}."
        possessive = "Her" if number % 2 else "His"
        parents = ""
        if "f" in known:
            parents = f" {possessive} father is {known['f']} and {possessive.lower()} mother is {known['m']}."
        return f"The birthplace of {name} is {known['b']}.{parents} {possessive} spouse is {known['s']}."
