"""What the gate runs of a grid."""

import itertools

import pytest
from gate import covering, is_over_families, spread


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 4), (7, 4, 3, 2, 2)])
def test_every_value_and_every_pair_stays(sizes: tuple[int, ...]) -> None:
    grid = list(itertools.product(*map(range, sizes)))
    for strength in (1, 2):
        chosen = [grid[index] for index in covering(grid, strength)]
        for columns in itertools.combinations(range(len(sizes)), strength):
            seen = {tuple(case[column] for column in columns) for case in chosen}
            assert seen == set(itertools.product(*(range(sizes[column]) for column in columns)))
    assert len(covering(grid, 1)) == max(sizes)
    assert len(covering(grid, 2)) < len(grid) or len(sizes) == 2


def test_a_list_of_cases_stays_whole() -> None:
    assert covering([("a",), ("b",), ("c",)], 1) == [0, 1, 2]
    assert covering([()], 1) == [0]


@pytest.mark.parametrize("most", [1, 3, 8, 30])
def test_a_part_of_the_families_is_spread_and_differs_by_test(most: int) -> None:
    chosen = {name: spread(range(20), most, name) for name in ("test_a", "test_b", "test_c")}
    assert all(len(set(part)) == min(most, 20) and part == sorted(part) for part in chosen.values())
    assert most >= 20 or len(set(map(tuple, chosen.values()))) > 1
    assert {index for number in range(20) for index in spread(range(20), most, chr(number))} == set(range(20))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["llama", "gpt2"], True),
        (["Gemma3", "Llava"], True),
        (["niah_single_1", "vt"], False),
        (["llama", "none"], False),
    ],
    ids=str,
)
def test_a_test_over_families_is_known_by_its_values(values: list[str], expected: bool) -> None:
    for parameter in ("name", "family"):
        assert is_over_families([{"length": 3, parameter: value} for value in values]) == expected
