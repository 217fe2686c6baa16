"""Plain English, counted: patterns that need a second reading stay rare on each page, in each package, in each
folder of tools, and in the recipes."""

from pathlib import Path

import prose
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "inplace_ttt"
TOOLS = ROOT / "tools"
RECIPES = ROOT / "recipes"
GENERATED = {"audit-reference-conversion.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    RECIPES / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED),
]
PACKAGES = [
    folder for top in (PACKAGE, TOOLS) for folder in (top, *sorted(top.iterdir())) if any(folder.glob("*.py"))
]
PER_1000 = 0.5
"""Occurrences of a pattern per 1,000 words; well-known libraries have 0 to 0.5."""
LEAST = 2
"""Occurrences that any page or package may have: in a quotation, a name, or the plain use of a word."""
LONG = 25
SHARE_OF_LONG = 0.2


def modules(package: Path) -> list[Path]:
    return sorted(package.glob("*.py") if package in (PACKAGE, TOOLS) else package.rglob("*.py"))


def sentences_of(place: Path) -> list[str]:
    if place.suffix == ".md":
        return prose.markdown(place)
    if place == RECIPES:
        return [sentence for file in sorted(place.rglob("*.yaml")) for sentence in prose.yaml(file)]
    return [sentence for file in modules(place) for sentence in prose.python(file)]


def require_plain(sentences: list[str]) -> None:
    allowed = max(LEAST, PER_1000 * prose.words(sentences) / 1000)
    for pattern, found in prose.found(sentences).items():
        assert len(found) <= allowed, f"{pattern}: {len(found)} of {allowed:.1f} allowed: {found[:5]}"


@pytest.mark.parametrize(
    "place", [*PAGES, *PACKAGES, RECIPES], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_sentences_are_plain(place: Path) -> None:
    sentences = sentences_of(place)
    require_plain(sentences)
    long = [sentence for sentence in sentences if len(sentence.split()) > LONG]
    assert len(long) <= max(LEAST, SHARE_OF_LONG * len(sentences)), f"over {LONG} words: {long[:3]}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_messages_are_plain(package: Path) -> None:
    require_plain([sentence for file in modules(package) for sentence in prose.messages(file)])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_begin_with_a_subject_or_a_verb(package: Path) -> None:
    begun = [(file.name, text.split("\n")[0]) for file in modules(package) for text in prose.docstrings(file)]
    found = [pair for pair in begun if pair[1].split(" ")[0] in prose.OPENINGS]
    assert len(found) <= LEAST, found[:10]


def test_the_patterns_are_found() -> None:
    found = prose.found(
        [
            "What remembered was no sum.",
            "Who wants more says so.",
            "It costs 1.2 nats a token.",
            "The optimiser knows it.",
            "What does it do?",
        ]
    )
    assert {name: len(hits) for name, hits in found.items()} == {
        "headless clause": 2,
        "program that says": 2,
        "negative definition": 1,
        "a for per": 1,
        "British spelling": 1,
    }


def test_messages_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '''"""A docstring has no message."""

def check(name):
    """Checks it."""
    logger.warning("%s has no rows", name)
    if name:
        raise ValueError(
            f"{name} has no {', '.join(['one or no', name])}; "
            "leave it out."
        )
    raise AttributeError(f"module has no attribute {name}")
'''
    )
    assert prose.messages(module) == ["%s has no rows", "X has no X; leave it out.", "one or no"]


def test_comments_of_recipes_are_found(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """# What it shows: a model
# recalls. By hand:
#   inplace-ttt train recipe.yaml
# It is plain.
eta: 1.0     # who knows
steps: 3
"""
    )
    assert prose.yaml(recipe) == ["What it shows: a model recalls.", "By hand:", "It is plain.", "who knows"]
