"""Questions about facts that lie in a real text, in the manner of RULER.

The tasks are those that RULER (Hsieh et al. 2024, arXiv:2404.06654) describes, in words of our own:

| task | the question | answers |
|---|---|---|
| single | for a fact of a kind that the text has once | 1 |
| keys | for a fact among others that differ by their key alone | 1 |
| values | for all values of one key | 4 |
| variables | for all names in a chain, each given the value of the one before | 4 |

RULER makes a text for each question. Here a text is read once and asked many times, at several
lengths. A question belongs to one length: its facts lie within it, at random places of all its
quarters; those of questions of other lengths are further noise.
"""

import random
from dataclasses import dataclass
from string import ascii_uppercase

import torch
from transformers import PreTrainedTokenizerBase

from quality.retrieval import CITIES
from quality.texts import ids_of

QUARTERS = 4
SLOT = 64  # tokens: at most one fact begins in each, and none is longer
KEYS = 2 * QUARTERS  # questions of this task at each length; of `single` a quarter each
KINDS = """
code of the harbour gate
weight of the bronze bell
price of the oldest violin
number of the lost passport
height of the frozen waterfall
mileage of the yellow taxi
age of the stone bridge
salary of the night porter
capacity of the empty stadium
depth of the flooded mine
length of the coastal tunnel
population of the walled village
speed of the silver comet
rent of the corner bakery
temperature of the glass furnace
area of the royal garden
distance to the northern lighthouse
frequency of the pirate radio
value of the forged painting
volume of the village reservoir
"""
NAMES = "Agnes Boris Clara Dmitri Edith Felix Greta Hugo"


@dataclass(frozen=True)
class Question:
    """One question, and what its answer must name: words, each with the quarter of its fact."""

    task: str
    length: int  # of the text when it is asked, in tokens
    prompt: str
    answers: tuple[tuple[str, int], ...]


class Haystack:
    """A text with facts in it.

    Args:
        tokenizer: of the model.
        name: of the text, and the seed.
        lengths: at which it is asked, in tokens, rising.

    Raises:
        ValueError: a fact has too many tokens.

    Attributes:
        ids: `(1, lengths[-1])`.
        questions: in the order in which they can be asked.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str, lengths: tuple[int, ...]
    ) -> None:
        self._draw = random.Random(name)
        self._facts: dict[int, str] = {}  # by slot
        self.questions: list[Question] = []
        kinds, cities, names = (
            iter(self._draw.sample(words, len(words)))
            for words in (KINDS.strip().splitlines(), CITIES.split(), NAMES.split())
        )
        for length in lengths:
            for quarter in range(QUARTERS):
                self._ask_one("single", length, quarter, next(kinds))
            for index in range(KEYS):
                self._ask_one("keys", length, index % QUARTERS, f"secret number of {next(cities)}")
            self._ask_values(length, next(names))
            self._ask_variables(length)
        self.ids = self._with_facts(tokenizer, ids_of(tokenizer, name, lengths[-1])[0])

    def _number(self) -> str:
        return str(self._draw.randrange(10000, 100000))

    def _place(self, fact: str, length: int, quarter: int) -> None:
        """Puts a fact into a free slot of a quarter."""
        first, last = (length * part // (QUARTERS * SLOT) for part in (quarter, quarter + 1))
        free = [slot for slot in range(first, last) if slot not in self._facts]
        self._facts[self._draw.choice(free)] = f"\n\n{fact}\n\n"

    def _ask_one(self, task: str, length: int, quarter: int, what: str) -> None:
        number = self._number()
        self._place(f"The {what} is {number}.", length, quarter)
        prompt = f"\n\nQuestion: What is the {what}?\nAnswer: The {what} is"
        self.questions.append(Question(task, length, prompt, ((number, quarter),)))

    def _ask_values(self, length: int, name: str) -> None:
        answers = tuple((self._number(), quarter) for quarter in range(QUARTERS))
        for number, quarter in answers:
            self._place(f"One of the lucky numbers of {name} is {number}.", length, quarter)
        what = f"four lucky numbers of {name}"
        prompt = f"\n\nQuestion: What are the {what}?\nAnswer: The {what} are"
        self.questions.append(Question("values", length, prompt, answers))

    def _ask_variables(self, length: int) -> None:
        number = value = self._number()
        answers = []
        for quarter in range(QUARTERS):
            variable = "".join(self._draw.sample(ascii_uppercase, 3))
            self._place(f"The variable {variable} is set to {value}.", length, quarter)
            answers.append((variable, quarter))
            value = f"the variable {variable}"
        what = f"four variables with the value {number}"
        prompt = f"\n\nQuestion: Which are the {what}?\nAnswer: The {what} are"
        self.questions.append(Question("variables", length, prompt, tuple(answers)))

    def _with_facts(self, tokenizer: PreTrainedTokenizerBase, text: torch.Tensor) -> torch.Tensor:
        ids, read = [], 0
        for slot, fact in sorted(self._facts.items()):
            told = tokenizer(fact, add_special_tokens=False).input_ids
            if len(told) > SLOT:
                raise ValueError(f"a fact must have at most {SLOT} tokens, got {len(told)}: {fact}")
            space = slot * SLOT - len(ids)
            ids += [*text[read : read + space].tolist(), *told]
            read += space
        return torch.tensor([[*ids, *text[read : read + len(text) - len(ids)].tolist()]])
