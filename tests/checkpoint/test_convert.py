"""`convert` on folders: what it writes, what it leaves alone, and how the result loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, build
from models import distance, logits, random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import inplace_ttt
from checkpoint.folders import bytes_of, save_base, tensors_of
from inplace_ttt import InPlaceTTTError, cli, load
from inplace_ttt.surgery import config_of, fast_weights

ARGUMENTS = ("--layers", "0,2", "--chunk-size", "7")


def run_convert(src: Path, out: Path, *more: str) -> int:
    return cli.main(["convert", str(src), str(out), *ARGUMENTS, *more])


@pytest.mark.parametrize("family", [f.name for f in FAMILIES])
def test_every_family_converts_and_loads_identical(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base", family)
    capsys.readouterr()  # saving may import deepspeed, which logs to stdout
    assert run_convert(base, tmp_path / "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layers"] == [0, 2]
    assert result["new_parameters"] == 2 * (32 * 5 + 32 * 32)
    assert result["identity"]["max_abs_logit_diff"] < 1e-6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert config_of(model).chunk_size == 7
    assert (
        distance(
            logits(model, random_ids(1, 40)),
            logits(AutoModelForCausalLM.from_pretrained(base), random_ids(1, 40)),
        )
        < 1e-5
    )
    for index, layer in fast_weights(model).items():
        assert layer.ttt.conv.count_nonzero() == 0
        proj = layer.ttt.proj.detach()
        assert proj.count_nonzero() == proj.diagonal().count_nonzero() == 32, index
    first, second = (layer.ttt.proj.diagonal() for layer in fast_weights(model).values())
    assert not torch.equal(first, second), "each layer draws its own diagonal"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.sample(2)
def test_no_weight_is_moved(dtype: torch.dtype, shards: str, tied: bool, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", dtype=dtype, max_shard_size=shards, tie_word_embeddings=tied)
    assert len(list(base.glob("*.safetensors"))) == (
        1 if shards == "5GB" else len(list(base.glob("*-of-*.safetensors")))
    )
    before = bytes_of(base)
    assert run_convert(base, tmp_path / "out") == 0
    assert bytes_of(base) == before
    old, new = tensors_of(base), tensors_of(tmp_path / "out")
    added = sorted(set(new) - set(old))
    assert len(added) == 4
    assert all(".mlp.down_proj.ttt." in name for name in added)
    assert all(new[name].dtype == dtype for name in added)
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())
    model = load(tmp_path / "out")
    assert model.dtype == dtype
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == tied


def test_saving_into_a_converted_folder_leaves_the_base_alone(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    run_convert(base, tmp_path / "out")
    before = bytes_of(base)
    model = load(tmp_path / "out")
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    model.save_pretrained(tmp_path / "out")
    assert bytes_of(base) == before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "moshi"])
@pytest.mark.sample(2)
def test_l9_save_load_save_is_byte_stable(family: str, tmp_path: Path) -> None:
    run_convert(save_base(tmp_path / "base", family), tmp_path / "out")
    load(tmp_path / "out").save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")
    assert all(
        torch.equal(tensor, tensors_of(tmp_path / "out")[name])
        for name, tensor in tensors_of(tmp_path / "first").items()
    )


def test_a_model_converted_in_memory_saves_as_a_converted_one(tmp_path: Path) -> None:
    model = inplace_ttt.convert(build("llama"), inplace_ttt.InPlaceTTTConfig(layers=(1,), chunk_size=5))
    assert model.config.model_type == "llama"
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "inplace_ttt"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(again, LlamaForCausalLM)
    assert again.config.model_type == "llama"
    assert torch.equal(logits(again, random_ids(1, 20)), logits(model, random_ids(1, 20)))
    scratch = AutoModelForCausalLM.from_config(again.config)
    assert config_of(scratch) == config_of(model)


def test_without_the_package_imported(tmp_path: Path) -> None:
    """A stranger's process: trust_remote_code loads through the shim, without it the load is refused, never
    plain."""
    run_convert(save_base(tmp_path / "base"), tmp_path / "out")
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A\n"
        f"try: A.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=False)\n"
        "except Exception as e: print('refused', 'inplace_ttt' in sys.modules)\n"
        f"m = A.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=True)\n"
        "print(type(m.model.layers[0].mlp.down_proj).__name__, "
        "type(m.model.layers[1].mlp.down_proj).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**_environment(), "HF_HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines() == ["refused False", "FastWeightLinear Linear"], done.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def test_half_a_checkpoint_does_not_load(tmp_path: Path) -> None:
    run_convert(save_base(tmp_path / "base"), tmp_path / "out")
    index = tmp_path / "out" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    dropped = {name: file for name, file in values["weight_map"].items() if "ttt.conv" not in name}
    index.write_text(json.dumps({**values, "weight_map": dropped}))
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == "llama"
    (tmp_path / "out" / "inplace_ttt.safetensors").unlink()
    with pytest.raises(InPlaceTTTError, match=r"inplace_ttt\.safetensors is missing"):
        load(tmp_path / "out")


def test_missing_ttt_tensors_are_refused_by_from_pretrained(tmp_path: Path) -> None:
    base = build("llama")
    model = inplace_ttt.convert(base, inplace_ttt.InPlaceTTTConfig(layers=(0,)))
    state = {name: tensor for name, tensor in model.state_dict().items() if ".ttt." not in name}
    model.save_pretrained(tmp_path / "out", state_dict=state)
    with pytest.raises(InPlaceTTTError, match="lacks 2 tensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.full
def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Resident memory of a conversion without proof, for a base of 8 MiB and one of 250 MiB (mapped files
    left out)."""
    peaks = []
    for layers in (2, 150):
        base = save_base(
            tmp_path / f"base{layers}",
            num_hidden_layers=layers,
            hidden_size=256,
            intermediate_size=512,
            dtype=torch.float32,
        )
        peaks.append(_peak_of_conversion(base, tmp_path / f"out{layers}"))
    size = sum(f.stat().st_size for f in (tmp_path / "base150").glob("*.safetensors"))
    assert size > 200e6
    assert peaks[1] - peaks[0] < 0.25 * size


def _peak_of_conversion(base: Path, out: Path) -> int:
    code = (
        "import sys, threading, time; from inplace_ttt import cli\n"
        "peak, going = [0], True\n"
        "def watch():\n"
        "    while going:\n"
        "        peak[0] = max(peak[0], *(int(l.split()[1]) for l in open('/proc/self/status') if "
        "l.startswith('RssAnon')))\n"
        "        time.sleep(0.002)\n"
        "t = threading.Thread(target=watch); t.start()\n"
        f"code = cli.main(['convert', {str(base)!r}, {str(out)!r}, '--layers', '0', '--no-verify', "
        "'--json'])\n"
        "going = False; t.join(); print(peak[0] * 1024); sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def test_a_checkpoint_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As GPT-2's own: `h.0.mlp.c_proj.weight`, not `transformer.h.0.…`."""
    base = save_base(tmp_path / "base", "gpt2")
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert run_convert(base, tmp_path / "full") == 0
    assert run_convert(base, tmp_path / "adapter", "--adapter-only") == 0
    ids = random_ids(1, 30)
    assert torch.equal(logits(load(tmp_path / "full"), ids), logits(load(tmp_path / "adapter"), ids))
    assert cli.main(["info", str(tmp_path / "adapter")]) == 0


def with_architectures(folder: Path, value: object) -> Path:
    base = save_base(folder)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"architectures": value}))
    return base


@pytest.mark.parametrize("wrong", [[10**20], [None], {"a": 1}, 3, [["LlamaForCausalLM"]]], ids=str)
def test_architectures_that_are_no_names_are_refused(
    wrong: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_convert(with_architectures(tmp_path / "base", wrong), tmp_path / "out") == 2
    assert "config.json, architectures: must be a list (text) or nothing, got " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_architecture_may_stand_without_a_list(tmp_path: Path) -> None:
    assert run_convert(with_architectures(tmp_path / "base", "LlamaForCausalLM"), tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "InPlaceTTTLlamaForCausalLM"
    ]
