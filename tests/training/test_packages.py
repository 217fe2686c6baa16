"""What a recipe needs installed is asked for before anything is loaded or started, in one sentence."""

import json
import sys
from pathlib import Path

import pytest
from tiny import word_level

from inplace_ttt import InPlaceTTTError, cli
from inplace_ttt.training.recipe import packages
from inplace_ttt.training.run.launch import launch

from .recipes import VALUES, tiny_recipe, write_recipe


@pytest.mark.parametrize(
    ("settings", "hidden", "message"),
    [
        (("training.liger=true",), "liger_kernel", "training.liger needs liger-kernel"),
        (
            ("monitor.report_to=[wandb]",),
            "wandb",
            "monitor.report_to names wandb, which is not installed; pip install wandb",
        ),
        (("monitor.report_to=[tensorboard]",), "tensorboard", "monitor.report_to names tensorboard"),
        (
            ("model.attn_implementation=flash_attention_2",),
            "flash_attn",
            "model.attn_implementation is flash_attention_2, which needs the package flash-attn",
        ),
        (
            (),
            "deepspeed",
            r"training needs deepspeed; in a checkout of inplace-ttt, pip install -e '.\[train\]'",
        ),
        (
            (),
            "datasets",
            r"training needs datasets; in a checkout of inplace-ttt, pip install -e '.\[train\]'",
        ),
    ],
)
def test_what_is_missing_is_named(
    settings: tuple[str, ...], hidden: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launcher, and so before any process starts."""
    find = packages.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == hidden else find(name))
    monkeypatch.setattr(packages, "is_liger_kernel_available", lambda: False)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("a process was started"))
    with pytest.raises(InPlaceTTTError, match=message) as refusal:
        launch(tiny_recipe(tmp_path, *settings), [])
    assert "\n" not in str(refusal.value)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """An environment in which these packages cannot be imported."""
    for name in [*names, *(module for module in sys.modules if module.partition(".")[0] in names)]:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_recipe_is_audited_without_the_training_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but its rows, of which one sentence says what to install."""
    (tmp_path / "text.txt").write_text("a b c")
    word_level("abc").save_pretrained(tmp_path / "tokenizer")
    model = {**VALUES["model"], "tokenizer": str(tmp_path / "tokenizer")}
    file = write_recipe(
        tmp_path, model=model, data={"train": str(tmp_path / "text.txt"), "sequence_length": 64}
    )
    without(monkeypatch, "datasets", "accelerate", "deepspeed", "peft")
    assert cli.main(["audit", str(file), "--json"]) == 1
    out, err = capsys.readouterr()
    (rows,) = (item for item in json.loads(out)["items"] if item["id"] == "long-documents")
    assert (
        rows["verdict"] == "not checked"
        and rows["found"].endswith("install the extra `train`")
        and "\n" not in rows["found"]
    )
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["audit", "plan"])
def test_low_rank_adapters_without_peft(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "peft")
    assert cli.main([verb, str(write_recipe(tmp_path, training={"trainable": "lora", "steps": 1}))]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("inplace-ttt"))
    assert line.endswith(
        "training.trainable: lora needs peft; in a checkout of inplace-ttt, pip install -e '.[train]'."
    )
