"""Counting words: ten common words of a numbered list, three frequent words of a coded text."""

from __future__ import annotations

import math
import string
from random import Random

from ..prompt import Count, Draft, Puzzle
from .material import Material

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n"
    "{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
    "{context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared "
    "words in the above coded text?"
)
_FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_COMMON_WORDS = 10
_LONG = 4096
"""Length in tokens from which on RULER repeats the words of the list more often."""

_ZETA_2 = math.pi**2 / 6


def common(random: Random, material: Material, length: int, index: int, count: Count) -> Puzzle:
    """Makes a puzzle with ten words that occur 30 times in the list, and others that occur 3 times.

    Below 4,096 tokens they occur 6 times and once. The size is in different words of the list.
    """
    often, seldom = (30, 3) if length >= _LONG else (6, 1)
    example_words, example_often, example_seldom = (40, 10, 3) if length >= _LONG else (20, 3, 1)
    vocabulary = random.sample(material.words, len(material.words))
    # at 256k tokens the words of the first source run out
    vocabulary += random.sample(material.further_words, len(material.further_words))
    example, vocabulary = vocabulary[:example_words], vocabulary[example_words:]
    solved = (
        _COMMON.format(context=_numbered(example, example_often, example_seldom, random))
        + _COMMON_PREFIX
        + " "
        + " ".join(f"{i}. {word}" for i, word in enumerate(example[:_COMMON_WORDS], 1))
    )
    order = random.random()

    def draft(size: int) -> Draft:
        context = _numbered(vocabulary[:size], often, seldom, Random(order))
        return Draft(
            f"{solved}\n{_COMMON.format(context=context)}", _COMMON_PREFIX, tuple(vocabulary[:_COMMON_WORDS])
        )

    lacks = f"there are {len(vocabulary):,} words to list (a --text of more different words adds to them)"
    return Puzzle(_COMMON_WORDS + 1, len(vocabulary), draft, lacks)


def frequent(random: Random, material: Material, length: int, index: int, count: Count) -> Puzzle:
    """Makes a puzzle with random words of six letters, the k-th of which occurs n / (ζ(2) k²) times.

    Dots replace the first word. The size is n.
    """
    wanted = max(length // 50, 5)
    vocabulary: dict[str, None] = {"...": None}
    while len(vocabulary) < wanted:
        vocabulary["".join(random.choices(string.ascii_lowercase, k=6))] = None
    words = list(vocabulary)
    order = random.random()

    def draft(size: int) -> Draft:
        text = [word for k, word in enumerate(words, 1) for _ in range(int(size / (_ZETA_2 * k * k)))]
        Random(order).shuffle(text)
        return Draft(_FREQUENT.format(context=" ".join(text)), _FREQUENT_PREFIX, tuple(words[1:4]))

    # from this size on the third word occurs more often than the fourth, whatever the rounding
    return Puzzle(74, 10 * length, draft)


def _numbered(words: list[str], often: int, seldom: int, random: Random) -> str:
    """Returns the list as "1. word 2. word …", in random order.

    The first ten words occur `often` times, the others `seldom` times.
    """
    listed = words[:_COMMON_WORDS] * often + words[_COMMON_WORDS:] * seldom
    random.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
