"""Sources by weights: each has its share of the tokens all along, by the seed, stored or streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt.errors import InPlaceTTTError

from .corpus import CHUNK, documents, texts, tokens
from .recipes import tiny_recipe

SIZES = ((40, 9, 25, 60, 31, 12, 77, 20), (15, 33, 8, 21))
LONGEST = 78


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Two files of documents; every word tells which document it is of."""
    for name, sizes, first in (("a", SIZES[0], 0), ("b", SIZES[1], 1000)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(sizes, first))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def of_second(document: list[int]) -> bool:
    return document[0] >= 1000


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3, 1], [0.1, 0.9]])
def test_every_source_has_its_share_of_tokens_all_along(
    build: Any, sources: list[Path], weights: list[float], streaming: bool
) -> None:
    found = build(sources, weights=weights, shuffle=True, streaming=streaming, seed=3)
    read = documents(found.train)
    share, given = weights[1] / sum(weights), [0, 0]
    for document in read[:-1]:  # the last may be cut
        given[of_second(document)] += len(document)
        assert abs(given[1] - share * sum(given)) <= LONGEST
    whole = {
        str(tokens(text))
        for sizes, first in zip(SIZES, (0, 1000), strict=True)
        for text in texts(sizes, first)
    }
    assert {str(document) for document in read} == whole, "every document at least once"
    assert read == documents(build(sources, weights=weights, shuffle=True, streaming=streaming, seed=3).train)
    assert read != documents(build(sources, weights=weights, shuffle=True, streaming=streaming, seed=4).train)
    mixture = found.report.mixture
    assert [source["weight"] for source in mixture] == pytest.approx([1 - share, share])
    assert [source["share"] for source in mixture] == pytest.approx(
        [1 - share, share], abs=LONGEST / found.report.tokens
    )
    assert [source["documents"] for source in mixture] == [
        sum(of_second(d) == second for d in read[: found.report.documents]) for second in (False, True)
    ], "a stream's is of its start"
    assert sum(source["tokens"] for source in mixture) == found.report.tokens


def test_what_is_read_again_comes_in_another_order(build: Any, sources: list[Path]) -> None:
    for streaming in (False, True):
        read = documents(build(sources, weights=[1, 9], shuffle=True, streaming=streaming).train)
        again = [document for document in read if of_second(document)]
        passes = [again[i : i + 4] for i in range(0, len(again), 4)]
        assert len(passes) > 5 and len({str(one) for one in passes}) > 3
        assert all(len({str(document) for document in one}) == 4 for one in passes[:-1])


def test_without_weights_the_report_says_what_each_gave(build: Any, sources: list[Path]) -> None:
    for streaming in (False, True):
        report = build(sources, streaming=streaming).report
        assert [(s["documents"], s["tokens"], s["weight"]) for s in report.mixture] == [
            (len(n), sum(n) + len(n), None) for n in SIZES
        ]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("[1, 2, 3]", r"data.weights: must be one for each entry of train: 3 given, 2 entries"),
        ("[1, 0]", r"data.weights.*: must all be above 0"),
        ("[1, -2]", r"data.weights.*: must all be above 0"),
        ("[1, .inf]", r"data.weights.*: must "),
        ("[1, .nan]", r"data.weights.*: must "),
        ("[1, many]", r"data\.weights"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=message) as refusal:
        tiny_recipe(tmp_path, f"data.weights={weights}", data={"train": ["a", "b"], "sequence_length": 64})
    assert "\n" not in str(refusal.value)
    with pytest.raises(
        InPlaceTTTError, match=r"data\.weights: does nothing with fewer than two entries of train"
    ):
        tiny_recipe(tmp_path, "data.weights=[1]")


def test_sources_that_cannot_have_their_share_are_refused(
    build: Any, sources: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n')
    for streaming in (False, True):
        with pytest.raises(
            InPlaceTTTError, match=r"lacks a document to train on, though data\.weights gives it a share"
        ):
            build(
                [sources[0], tmp_path / "none.jsonl"], weights=[1, 1], streaming=streaming, chunk_size=CHUNK
            )
    with pytest.raises(
        InPlaceTTTError, match=r"one pass over every document has .* tokens, but the sources have only 363"
    ):
        build(sources, weights=[1e-6, 1])
