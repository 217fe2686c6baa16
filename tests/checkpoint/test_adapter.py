"""Adapter folders: the TTT tensors alone, tied to their base by a fingerprint."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from models import logits, random_ids, turn_writer_on
from training.recipes import write_recipe
from transformers import AutoModelForCausalLM

from checkpoint.folders import bytes_of, save_base
from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, cli, convert, load, save_adapter
from inplace_ttt.surgery import fast_weights


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A full checkpoint whose TTT tensors are not those of a fresh conversion."""
    base = save_base(tmp_path / "base")
    cli.main(
        ["convert", str(base), str(tmp_path / "full"), "--layers", "0,2", "--chunk-size", "7", "--no-verify"]
    )
    model = load(tmp_path / "full")
    turn_writer_on(model)
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_round_trip(trained: Path, tmp_path: Path) -> None:
    ids = random_ids(1, 40)
    expected = logits(load(trained), ids)
    assert cli.main(["export", str(trained), str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    assert sorted(bytes_of(tmp_path / "adapter")) == [
        "README.md",
        "config.json",
        "configuration_inplace_ttt.py",
        "inplace_ttt.json",
        "inplace_ttt.safetensors",
    ]
    model = load(tmp_path / "adapter")
    assert model.config.model_type == "llama"
    assert torch.equal(logits(model, ids), expected)
    assert cli.main(["export", str(tmp_path / "adapter"), str(tmp_path / "again"), "--format", "full"]) == 0
    assert torch.equal(logits(load(tmp_path / "again"), ids), expected)


def test_convert_adapter_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base", "gpt2")
    assert (
        cli.main(
            ["convert", str(base), str(tmp_path / "adapter"), "--layers", "1", "--adapter-only", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["identity"]["max_abs_logit_diff"] < 1e-6
    assert sum(f.stat().st_size for f in (tmp_path / "adapter").iterdir()) < 20_000
    assert list(fast_weights(load(tmp_path / "adapter"))) == [1]


def test_another_base_is_refused(trained: Path, tmp_path: Path) -> None:
    cli.main(["export", str(trained), str(tmp_path / "adapter"), "--format", "adapter"])
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(InPlaceTTTError, match="which does not exist"):
        load(tmp_path / "adapter")
    save_base(tmp_path / "base", vocab_size=101)  # the same shapes where it matters, other weights
    with pytest.raises(InPlaceTTTError, match="other weights"):
        load(tmp_path / "adapter")
    assert cli.main(["export", str(tmp_path / "adapter"), str(tmp_path / "full2"), "--format", "full"]) == 2
    assert not (tmp_path / "full2").exists()


def test_a_trained_base_is_not_cut_to_an_adapter(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(trained)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "moved")
    assert (
        cli.main(["export", str(tmp_path / "moved"), str(tmp_path / "adapter"), "--format", "adapter"]) == 2
    )
    assert "which an adapter would lose" in capsys.readouterr().err


def test_what_else_was_trained_is_not_cut_off(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As LoRA leaves the down-projections alone, and moves attention."""
    model = load(trained)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[-1, -1] += 1
    model.save_pretrained(tmp_path / "moved")
    assert (
        cli.main(["export", str(tmp_path / "moved"), str(tmp_path / "adapter"), "--format", "adapter"]) == 2
    )
    assert "has another model.layers.1.self_attn.q_proj.weight than" in capsys.readouterr().err
    with pytest.raises(
        InPlaceTTTError, match=r"the model has another model\.layers\.1\.self_attn\.q_proj\.weight than"
    ):
        save_adapter(model, tmp_path / "adapter")
    model.resize_token_embeddings(200, mean_resizing=False)
    with pytest.raises(InPlaceTTTError, match=r"the model has another lm_head\.weight than"):
        save_adapter(model, tmp_path / "adapter")


def test_a_base_on_the_hub(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is compared as far as it is here, with no network: whole from the hub's cache, in the revision that
    was converted."""
    revision, hub = "0" * 40, tmp_path / "hub"
    config = json.loads((trained / "config.json").read_text())
    config["inplace_ttt"]["base"] |= {"name_or_path": "owner/tiny", "revision": revision}
    (trained / "config.json").write_text(json.dumps(config))
    model = load(trained)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[-1, -1] += 1
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    save_adapter(model, tmp_path / "not compared")
    assert "only the down-projections of the model were compared with owner/tiny" in caplog.text
    shutil.copytree(tmp_path / "base", hub / "models--owner--tiny" / "snapshots" / revision)
    for base in (None, "owner/tiny"):
        with pytest.raises(
            InPlaceTTTError, match=r"another model\.layers\.1\.self_attn\.q_proj\.weight than owner/tiny"
        ):
            save_adapter(model, tmp_path / "adapter", base=base)
    caplog.clear()
    save_adapter(load(trained), tmp_path / "adapter")
    assert not caplog.text
    described = json.loads((tmp_path / "adapter" / "inplace_ttt.json").read_text())["base"]
    assert (described["name_or_path"], described["revision"]) == ("owner/tiny", revision)
    save_adapter(load(trained), tmp_path / "of a copy", base=str(tmp_path / "base"))
    assert json.loads((tmp_path / "of a copy" / "inplace_ttt.json").read_text())["base"]["revision"] is None


def test_saved_from_python(trained: Path, tmp_path: Path) -> None:
    """Load an adapter, train it, save it again; the base is remembered, and checked when it was trained
    too."""
    cli.main(["export", str(trained), str(tmp_path / "adapter"), "--format", "adapter"])
    model = load(tmp_path / "adapter")
    with torch.no_grad():
        fast_weights(model)[0].ttt.conv.mul_(2)
    save_adapter(model, tmp_path / "again")
    ids = random_ids(1, 30)
    assert torch.equal(logits(load(tmp_path / "again"), ids), logits(model, ids))
    model.save_pretrained(tmp_path / "full")
    assert cli.main(["export", str(tmp_path / "full"), str(tmp_path / "third"), "--format", "adapter"]) == 0
    fresh = convert(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), InPlaceTTTConfig(layers=(1,), chunk_size=4)
    )
    save_adapter(fresh, tmp_path / "fresh")
    assert list(fast_weights(load(tmp_path / "fresh"))) == [1]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
    with pytest.raises(InPlaceTTTError, match="training has changed the down-projections"):
        save_adapter(model, tmp_path / "no")


def test_base_in_another_place(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["export", str(trained), str(tmp_path / "adapter"), "--format", "adapter"])
    (tmp_path / "base").rename(tmp_path / "moved")
    model = load(tmp_path / "adapter", base=str(tmp_path / "moved"))
    assert torch.equal(logits(model, random_ids(1, 30)), logits(load(trained), random_ids(1, 30)))
    for verb in (["info", "ADAPTER"], ["export", "ADAPTER", str(tmp_path / "full2"), "--format", "full"]):
        command = [str(tmp_path / "adapter") if a == "ADAPTER" else a for a in verb]
        capsys.readouterr()
        assert cli.main(command) == 2
        said = (
            f"adapter is an adapter of {tmp_path / 'base'}, which does not exist; give its new path "
            "with --base"
        )
        assert said in capsys.readouterr().err
        assert cli.main([*command, "--base", str(tmp_path / "moved")]) == 0
    assert (
        cli.main(["export", str(tmp_path / "full2"), str(tmp_path / "adapter2"), "--format", "adapter"]) == 0
    )
    load(tmp_path / "adapter2")  # which knows where its base is now
    for verb in (["serve"], ["bench", "--serving"]):
        assert cli.main([*verb, str(tmp_path / "adapter")]) == 2
        assert (
            "adapter is an adapter, and vLLM serves full checkpoints; export it as full first"
            in capsys.readouterr().err
        )
    recipe = write_recipe(tmp_path, model={"path": str(tmp_path / "adapter")}, ttt=None)
    assert cli.main(["plan", str(recipe)]) == 2
    assert "which does not exist; put both together by `inplace-ttt export" in capsys.readouterr().err
    with pytest.raises(
        InPlaceTTTError, match="which does not exist; give its new path with --base, in Python with base="
    ):
        load(tmp_path / "adapter")
    with pytest.raises(InPlaceTTTError, match="needs no base"):
        load(trained, base="x")
