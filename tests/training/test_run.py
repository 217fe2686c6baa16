"""What a run trains and leaves, and how it ends when it cannot go on."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from models import logits
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, cli, convert, load, revert
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.errors import InPlaceTTTError, NotSoError
from inplace_ttt.training.loop.guards import MOST_SKIPPED, SkippedSteps
from inplace_ttt.training.run import launch

from .runs import CHUNK, checkpoint, documents, finish, recipe_file, start, trained, weights


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    checkpoint(folder / "model")
    documents(folder / "text")
    return folder


def test_ttt_alone_leaves_the_base_as_it_was(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command, launcher and all: its processes, its report, and no shared memory that stays behind."""
    ports: list[int] = []
    monkeypatch.setattr(
        launch, "_free_port", lambda any_port=launch._free_port: ports.append(any_port()) or ports[-1]
    )
    sections = {
        "training": {"trainable": "ttt", "conv_learning_rate": 1e-2},
        "data": {"validation_documents": 2},
        "monitor": {"eval_steps": 2},
    }
    recipe = recipe_file(tmp_path, made / "model", made / "text", **sections)
    code = cli.main(["train", str(recipe), "--json", "--num-processes", "2"])
    out, log = capfd.readouterr()
    assert code == 0, log[-3000:]
    assert len(ports) == 1 and not list(Path("/dev/shm").glob(f"*_{ports[0]}_*"))
    report = json.loads(out)
    before, after = weights(made / "model"), weights(Path(report["output"]))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".ttt." in name}
    evaluation = report["evaluation"]
    assert evaluation["eval_difference"] == evaluation["eval_loss"] - evaluation["eval_off_loss"] != 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert sum("eval_difference" in line for line in lines) >= 2 and log.count("inplace-ttt train: ") == 0
    assert all(
        set(layer["gradients"]) == {"conv", "proj"}
        for line in lines
        if "loss" in line
        for layer in line["layers"]
    )
    AutoModelForCausalLM.from_pretrained(report["output"])


def test_lora_leaves_an_adapter_that_reloads(made: Path, tmp_path: Path) -> None:
    sections = {"training": {"trainable": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}}
    report, _ = trained(recipe_file(tmp_path, made / "model", made / "text", **sections))
    saved = weights(Path(report["output"]))
    assert {name.split(".")[-2] for name in saved if "lora" in name} == {"lora_A", "lora_B"} and any(
        ".ttt.conv" in name for name in saved
    )
    model = PeftModel.from_pretrained(load(made / "model", dtype=torch.float32), report["output"])
    parameters = dict(model.named_parameters())
    for name, tensor in saved.items():
        if name.endswith("ttt.conv"):
            inside = name.removeprefix("base_model.model.").replace(
                "ttt.conv", "ttt.modules_to_save.default.conv"
            )
            (found,) = (p for n, p in parameters.items() if n.endswith(inside))
            torch.testing.assert_close(found, tensor)
    merged = load(report["output"], dtype=torch.float32)
    ids = torch.arange(3, 90)[None]
    torch.testing.assert_close(logits(merged, ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    assert type(merged) is type(load(made / "model")) and not any(
        "lora" in name for name, _ in merged.named_parameters()
    )
    assert (logits(merged, ids) - logits(load(made / "model", dtype=torch.float32), ids)).abs().max() > 1e-3


@pytest.mark.full
def test_a_lora_over_a_base_brings_its_conversion(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the recipe made the surgery, every verb makes it again; a base that was converted since needs
    none."""
    base, surgery = tmp_path / "base", {"layers": [0, 2], "chunk_size": CHUNK}
    revert(load(made / "model")).save_pretrained(base)
    AutoTokenizer.from_pretrained(made / "model").save_pretrained(base)
    recipe = recipe_file(tmp_path, base, made / "text", ttt=surgery, training={"trainable": "lora"})
    final, ids = Path(trained(recipe)[0]["output"]), torch.arange(3, 90)[None]
    expected = logits(
        PeftModel.from_pretrained(convert(load_base(base), InPlaceTTTConfig(**surgery)), final).eval(), ids
    )
    assert (expected - logits(load_base(base), ids)).abs().max() > 1e-3 and 'load("final")' in (
        final / "README.md"
    ).read_text()
    convert(load_base(base), InPlaceTTTConfig(**surgery)).save_pretrained(tmp_path / "converted")
    assert cli.main(["export", str(final), str(tmp_path / "merged"), "--format", "full"]) == 0
    for model in (load(final), load(final, base=str(tmp_path / "converted")), load(tmp_path / "merged")):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    told = {}
    for model in (final, tmp_path / "merged"):
        for verb in ("info", "audit"):
            capsys.readouterr()
            assert cli.main([verb, str(model), "--json"]) in (0, 1)
            told[model, verb] = json.loads(capsys.readouterr().out)
    assert told[final, "audit"]["counts"] == told[tmp_path / "merged", "audit"]["counts"]
    assert (
        told[final, "info"].pop("base")["name_or_path"] == str(base)
        and told[final, "info"].pop("form") == "lora"
    )
    assert told[final, "info"].items() <= told[tmp_path / "merged", "info"].items()


def assert_only_on_its_base(final: Path, base: Path, folder: Path) -> None:
    """On other weights an adapter of a run is refused; on its base's, and where it does not say which, it
    loads in any dtype."""
    other = load(base)
    with torch.no_grad():
        next(parameter for name, parameter in other.named_parameters() if "o_proj" in name).mul_(1.5)
    other.save_pretrained(folder / "other")
    with pytest.raises(
        InPlaceTTTError,
        match=r"was trained on other weights than .*other .fingerprint .*, found .*; load it onto those",
    ):
        load(final, base=str(folder / "other"))
    load(final, base=str(shutil.copytree(base, folder / "moved")), dtype=torch.float16)
    (final / "inplace_ttt_base.json").unlink()
    load(final, base=str(folder / "other"))


@pytest.mark.full
def test_a_lora_is_evaluated_as_any_run(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what cannot be loaded says why."""
    final = Path(
        trained(recipe_file(tmp_path, made / "model", made / "text", training={"trainable": "lora"}))[0][
            "output"
        ]
    )
    book = tmp_path / "book.txt"
    book.write_text(" ".join(str(number) for number in range(400)))
    capsys.readouterr()
    how = ["--text", str(book), "--tokens", "120", "--documents", "1", "--json"]
    assert (
        cli.main(
            ["evaluate", str(final), *how, "--base", str(made / "model"), "--out", str(tmp_path / "found")]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["gain"]["mean"] != 0
    assert cli.main(["export", str(final), str(tmp_path / "merged"), "--format", "full"]) == 0
    ids = torch.arange(3, 90)[None]
    assert torch.equal(logits(load(tmp_path / "merged"), ids), logits(load(final), ids))
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged")
        and cli.main(["info", str(tmp_path / "merged")]) == 0
    )
    capsys.readouterr()
    assert cli.main(["info", str(final), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert cli.main(["info", str(made / "model"), "--json"]) == 0
    assert told == {**json.loads(capsys.readouterr().out), "form": "lora"}
    verdicts = []
    for model in (final, tmp_path / "merged"):
        assert cli.main(["audit", str(model), "--json"]) in (0, 1)
        verdicts.append(json.loads(capsys.readouterr().out)["counts"])
    assert verdicts[0] == verdicts[1]
    settings = json.loads((final / "adapter_config.json").read_text())
    for base, said in (
        (tmp_path / "gone", "gone, which does not exist; give its new path with --base"),
        (None, "names no base_model_name_or_path"),
    ):
        (final / "adapter_config.json").write_text(
            json.dumps({**settings, "base_model_name_or_path": base and str(base)})
        )
        assert cli.main(["evaluate", str(final), *how]) == 2
        assert said in capsys.readouterr().out
    (final / "adapter_config.json").write_text(json.dumps(settings))
    assert_only_on_its_base(final, made / "model", tmp_path)
    (final / "adapter_model.safetensors").unlink()
    with pytest.raises(InPlaceTTTError, match="cannot load"):
        load(final, base=str(made / "model"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_no_number_stops_the_run(processes: int, made: Path, tmp_path: Path) -> None:
    """One document holds a token whose embedding is NaN: the run ends before a weight sees it, on every
    rank."""
    broken = checkpoint(tmp_path / "model")
    (shard,) = broken.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, shard, {"format": "pt"})
    recipe = recipe_file(tmp_path, broken, made / "text")
    log = finish(start(recipe, f"parallel.nproc_per_node={processes}"), code=1)
    assert "inplace-ttt train: the loss is not finite at step 1; the weights are as before that step" in log
    assert "the last checkpoint is none: nothing is trained yet, so look for" in log
    assert not (tmp_path / "out" / "final").exists()


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "float32"), (2, "bfloat16")]
)
@pytest.mark.sample(2)
def test_a_gradient_that_is_not_finite(
    stage: int, dtype: str, unstable: Path, made: Path, tmp_path: Path
) -> None:
    """The loss is finite. DeepSpeed skips such steps and ends well; here the run says so, and stops. (ZeRO-3
    has a norm in float64.)"""
    recipe = recipe_file(tmp_path, unstable, made / "text", deepspeed=stage)
    log = finish(
        start(recipe, f"model.dtype={dtype}", "training.steps=6", "training.gradient_accumulation_steps=1"),
        code=1,
    )
    (line,) = re.findall("inplace-ttt train: (.*)", log)
    assert "the gradient" in line and "not finite" in line and "the weights are as before" in line
    assert log.count("was skipped, since its gradient is not finite") == (
        0 if (stage, dtype) == (0, "float32") else MOST_SKIPPED
    )
    assert not (tmp_path / "out" / "final").exists()


@pytest.fixture(scope="module")
def unstable(made: Path) -> Path:
    """A model whose last norm is as small as its head is large: its logits are ordinary, the norm's gradient
    is not."""
    folder = made / "unstable"
    shutil.copytree(made / "model", folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.norm.weight"] *= 1e-36
    tensors["lm_head.weight"] *= 1e36
    save_file(tensors, shard, {"format": "pt"})
    return folder


def test_skipped_steps_are_counted_in_the_report() -> None:
    skipped = SkippedSteps()
    for step, none in enumerate((False, True, True, False, True), start=1):
        skipped.record(step, none)
    assert skipped.count == 3 and skipped.warnings() == [
        "3 steps were skipped, since their gradient was not finite"
    ]
    skipped.record(6, True)
    with pytest.raises(NotSoError, match="in 3 steps in a row, the last of them step 7"):
        skipped.record(7, True)


REFUSED = [
    (("model.path=nowhere/at/all",), "nowhere/at/all does not exist"),
    (("data.train=nothing.txt",), "nothing.txt"),
    (("ttt={layers: [0]}",), "is converted already"),
]


@pytest.mark.parametrize(
    ("settings", "message"), REFUSED, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_bad_input_is_one_line(settings: tuple[str, ...], message: str, made: Path, tmp_path: Path) -> None:
    """What only the run itself finds."""
    log = finish(
        start(recipe_file(tmp_path, made / "model", made / "text"), *settings, "parallel.nproc_per_node=2"),
        code=2,
    )
    (line,) = (line for line in log.splitlines() if line.startswith("inplace-ttt"))
    assert message in line and "Traceback" not in log, log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("training.stepz=3",), "--set, training.stepz: unknown setting"),
        (
            (
                "deepspeed=0",
                "parallel.nproc_per_node=2",
                "parallel.sequence_parallel_size=2",
                "monitor.save_steps=4",
            ),
            "sequence_parallel_size above 1 needs ZeRO stage 1, 2 or 3",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_recipe_that_is_none_starts_nothing(
    settings: tuple[str, ...], message: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_file(tmp_path, made / "model", made / "text")
    assert cli.main(["train", str(file), *(part for setting in settings for part in ("--set", setting))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_recipe_that_claims_nothing_is_stopped_by_faults_alone(made: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, made / "model", made / "text", audit={"enabled": True})
    log = finish(start(recipe, "training.steps=1"))
    assert "the run deviates from the paper in" in log and "chunk-size" in log
    assert (tmp_path / "out" / "audit.html").exists()
    clipped = tmp_path / "clipped"
    shutil.copytree(made / "model", clipped)
    config = json.loads((clipped / "config.json").read_text())
    config["inplace_ttt"]["config"]["clip"] = {"max_norm": 1e-9, "relative": False, "mode": "always"}
    (clipped / "config.json").write_text(json.dumps(config))
    log = finish(start(recipe, f"model.path={clipped}", f"output={tmp_path}/none"), code=1)
    assert "the audit found faults in clip-effect; read" in log


def test_an_undeclared_deviation_stops_the_run_before_it_starts(made: Path, tmp_path: Path) -> None:
    """The same run starts when it is told to, or when it says what it deviates in and why."""
    recipe = recipe_file(tmp_path, made / "model", made / "text", audit={"enabled": True, "profile": "paper"})
    log = finish(start(recipe), code=1)
    (refusal,) = (line for line in log.splitlines() if "the run deviates from the paper profile in" in line)
    ids = refusal.split("profile in ")[1].split("; read")[0].split(", ")
    assert {"chunk-size", "learning-rate", "token-budget", "stages"} <= set(ids)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "audit.html",
        "audit.md",
        "audit.json",
        ".inplace-ttt-run",
    }
    declared = [{"id": name, "why": "a test"} for name in ids]
    report, _ = trained(recipe, f"audit.deviations={json.dumps(declared)}", f"output={tmp_path}/declared")
    assert report["steps"] == 3 and (tmp_path / "declared" / "audit.html").exists()
    finish(start(recipe, "training.steps=1", flags=("--no-audit",)))
