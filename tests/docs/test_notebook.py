"""The notebook runs as it stands, shows what it says, and is committed as it ran."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/read_a_book.ipynb"
FOUND = """
import json
part = lambda name, which: float(loss[name][which].mean() - loss["without"][which].mean())
of = {name: [part(name, was_read), part(name, ~was_read)] for name in ("the book", "elsewhere")}
print(json.dumps({"of": of, "first": first, "same": same, "gains": gains, "bytes": [state.state_bytes, kv_cache], "full": full}))
"""


def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_committed_as_it_ran() -> None:
    """All of it once and in order, without complaints or a machine's paths, and small."""
    cells = [cell for cell in notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(cell.outputs for cell in cells) and all(
        output.get("name") != "stderr" and output.output_type != "error" for output in outputs
    )
    assert str(ROOT) not in NOTEBOOK.read_text(encoding="utf-8") and NOTEBOOK.stat().st_size < 300_000
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.real
@pytest.mark.full
def test_it_runs_and_shows_what_it_says() -> None:
    """A passage that was read costs less, one that was not or another text's memory changes little; a session
    goes on from its file."""
    executed = notebook()
    executed.cells.append(nbformat.v4.new_code_cell(FOUND))
    NotebookClient(
        executed, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    found = json.loads(executed.cells[-1].outputs[0].text)
    (book_read, book_not), elsewhere = found["of"]["the book"], found["of"]["elsewhere"]
    assert (
        book_read < -0.4 and abs(book_not) < 0.15 and all(abs(difference) < 0.15 for difference in elsewhere)
    )
    assert found["first"]["book"] > 0.4 > 3 * found["first"]["elsewhere"]
    assert found["same"] and found["bytes"][0] * 10 < found["bytes"][1]
    assert all(0 < part < 1 for layers in found["full"] for part in layers.values())
    (new_before, old_before), (new_after, old_after) = found["gains"]["before"], found["gains"]["after"]
    assert new_after < new_before - 0.3 and abs(old_after - old_before) < 0.3 and old_after < -0.3
