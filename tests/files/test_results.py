"""Results in files: kept whole, found again, refused where they answer another question."""

import json
from pathlib import Path

import pytest

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.results import Results


def test_what_was_put_is_found_by_another(tmp_path: Path) -> None:
    result = {"asked": {"seed": 0, "rates": (1, 2)}, "score": 0.5, "text": "±"}
    for folder in (None, tmp_path / "deeper"):
        first = Results(folder)
        assert first.get("a", asked=result["asked"]) is None
        first.put("a", result)
        assert first.get("a", asked=result["asked"]) == result
    assert [file.name for file in (tmp_path / "deeper").iterdir()] == ["a.json"]
    found = Results(tmp_path / "deeper").get("a", asked=result["asked"])
    assert found == json.loads(json.dumps(result))


def test_another_question_is_refused(tmp_path: Path) -> None:
    Results(tmp_path).put("a", {"asked": {"seed": 0}, "steps": 3})
    with pytest.raises(InPlaceTTTError, match=r"a\.json was made with seed 0, not 1; choose another --out\."):
        Results(tmp_path).get("a", asked={"seed": 1})
    Results(tmp_path).put("c", {"settings": {"waves": {"noise": 0.3}, "dim": 8}})
    with pytest.raises(InPlaceTTTError, match=r"c\.json was made with waves\.noise 0\.3, not 0\.1;"):
        Results(tmp_path).get("c", settings={"dim": 8, "waves": {"noise": 0.1}})
    with pytest.raises(InPlaceTTTError, match=r"c\.json was made with waves\.noise 0\.3, not None;"):
        Results(tmp_path).get("c", settings={"dim": 8, "waves": {}})
    with pytest.raises(InPlaceTTTError, match=r"a\.json was made with steps 3, not 4; delete it\."):
        Results(tmp_path, "delete it").get("a", steps=4)
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(InPlaceTTTError, match=r"b\.json is not a result of this command"):
        Results(tmp_path).get("b", asked={})
    with pytest.raises(InPlaceTTTError, match="cannot write to"):
        Results(tmp_path / "a.json")
