"""What `plan` says: tokens, steps and sizes, sentences for what will not fit or not train, the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import cli
from inplace_ttt.training.plan import plan
from inplace_ttt.training.plan.plan import make_plan
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipes import CONFIG, SMALL, tiny_recipe, write_recipe
from .runs import checkpoint, documents, finish, recipe_file, start


def test_ranks_that_share_rows_hold_less(tmp_path: Path) -> None:
    config = {**SMALL, "vocab_size": 4096}
    sections = {
        "model": {"config": config, "tokenizer": "x", "dtype": "bfloat16"},
        "ttt": {"layers": [0, 2], "chunk_size": 128},
    }
    data = {"train": "x", "sequence_length": 2048}
    whole = make_plan(tiny_recipe(tmp_path, **sections, data=data, parallel={"nproc_per_node": 4}))
    parallel = {"nproc_per_node": 4, "sequence_parallel_size": 4}
    shared = make_plan(
        tiny_recipe(tmp_path, **sections, data=data, parallel=parallel, monitor={"save_steps": 4})
    )
    assert shared.per_device_bytes["activations"] < 0.6 * whole.per_device_bytes["activations"]
    assert shared.tokens_per_step == whole.tokens_per_step / 4 and shared.warnings == []
    assert shared.flops_per_step == pytest.approx(whole.flops_per_step / 4, rel=0.05)


def test_tokens_steps_and_chunks(tmp_path: Path) -> None:
    made = make_plan(
        tiny_recipe(
            tmp_path,
            "data.sequence_length=100",
            "parallel.nproc_per_node=2",
            training={"tokens": 1000, "gradient_accumulation_steps": 2},
        )
    )
    assert (made.rows_per_step, made.tokens_per_step, made.steps, made.tokens) == (4, 400, 3, 1200)
    assert made.chunks_per_row == 7
    assert made.flops == 3 * made.flops_per_step
    assert made.state_bytes_per_sequence == 2 * 4 * 32 * 48
    assert made.ttt_parameters == 2 * (32 * 32 + 5 * 32) and made.trained_parameters == made.parameters


def test_what_lora_and_the_writer_alone_train(tmp_path: Path) -> None:
    ttt = make_plan(tiny_recipe(tmp_path, training={"trainable": "ttt", "steps": 1}))
    assert ttt.trained_parameters == ttt.ttt_parameters < ttt.parameters
    lora = make_plan(tiny_recipe(tmp_path, training={"trainable": "lora", "steps": 1, "lora": {"rank": 2}}))
    assert (
        lora.ttt_parameters == ttt.ttt_parameters
        and lora.ttt_parameters < lora.trained_parameters < lora.parameters / 2
    )


def test_attention_counts_the_window(tmp_path: Path) -> None:
    full = {key: value for key, value in CONFIG.items() if key != "sliding_window"} | {"model_type": "llama"}
    made = [
        make_plan(
            tiny_recipe(
                tmp_path,
                "data.sequence_length=512",
                model={"config": config, "tokenizer": "x", "dtype": "float32"},
            )
        ).flops
        for config in (full, CONFIG)
    ]
    pairs = [512 * 513 // 2, 512 * 16 - 16 * 15 // 2]
    # 2 steps, 3 layers, forward and two of backward
    assert made[0] - made[1] == 2 * 3 * 3 * 4 * 32 * (pairs[0] - pairs[1])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["ttt.chunk_size=64"],
            "A chunk of 64 tokens is at least as long as a row of 64: no write is ever read",
        ),
        (["ttt.chunk_size=40"], "at most one write per row is ever read; lower ttt.chunk_size"),
        (["ttt.eta=0"], "eta is 0: nothing is written, and conv and P learn nothing; set ttt.eta above 0."),
        (["ttt.eta=[0, 1.0]"], "eta is 0 in layers [0]: they write nothing."),
        (["data.sequence_length=1024"], "Rows of 1024 tokens are longer than the model's context of 512"),
        (
            ["training.warmup_steps=2"],
            "The warm-up training.warmup_steps of 2 steps is at least as long as the run of 2",
        ),
        (["training.eta_warmup_steps=5"], "The warm-up training.eta_warmup_steps of 5 steps"),
        (
            ["parallel.nproc_per_node=8", "parallel.sequence_parallel_size=8", "monitor.save_steps=8"],
            "sequence_parallel_size 8 does not divide the model's 4 attention heads",
        ),
        (
            [
                "parallel.nproc_per_node=3",
                "parallel.sequence_parallel_size=3",
                "data.sequence_length=48",
                "monitor.save_steps=3",
            ],
            "sequence_parallel_size 3 does not divide the model's 4 attention heads and 2 key-value heads",
        ),
        (
            ["parallel.nproc_per_node=2", "parallel.sequence_parallel_size=2", "data.sequence_length=80"],
            "Each of 2 ranks gets 40 tokens, which are not whole chunks of 16; make data.sequence_length a "
            "multiple of 32.",
        ),
        (
            [
                "parallel.nproc_per_node=2",
                "parallel.sequence_parallel_size=2",
                "model.attn_implementation=eager",
            ],
            "Ranks cannot share rows under eager attention",
        ),
    ],
)
@pytest.mark.sample(6)
def test_what_will_not_train(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    found = make_plan(tiny_recipe(tmp_path, *overrides)).warnings
    assert any(sentence in warning for warning in found), found
    assert make_plan(tiny_recipe(tmp_path)).warnings == []


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        (
            {
                "model": {"config": {**SMALL, "vocab_size": 32000}, "tokenizer": "x"},
                "data": {"train": "x", "sequence_length": 1024},
            },
            "of them are logits, so set training.liger: true",
        ),
        ({"data": {"train": "x", "sequence_length": 512}}, "set training.gradient_checkpointing: true"),
        (
            {
                "data": {"train": "x", "sequence_length": 512},
                "training": {"steps": 1, "gradient_checkpointing": True, "liger": True, "batch_size": 8},
            },
            "lower training.batch_size and raise training.gradient_accumulation_steps",
        ),
        (
            {
                "data": {"train": "x", "sequence_length": 512},
                "training": {"steps": 1, "gradient_checkpointing": True, "liger": True},
            },
            "raise parallel.sequence_parallel_size, or lower data.sequence_length",
        ),
        ({"deepspeed": 1}, "set smaller buckets"),
        (
            {
                "deepspeed": 0,
                "parallel": {"nproc_per_node": 2},
                "data": {"train": "x", "sequence_length": 40},
            },
            "use ZeRO stage 1 or 3",
        ),
        (
            {"deepspeed": 0, "data": {"train": "x", "sequence_length": 40}},
            "offload the optimizer to the host, or use more devices",
        ),
    ],
    ids=["logits", "checkpointing", "batch", "length", "buckets", "stage", "offload"],
)
@pytest.mark.sample(4)
def test_what_will_not_fit(
    sections: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, **{"deepspeed": 0, **sections})
    cost = plan.step_cost(recipe)  # which takes seconds, once
    monkeypatch.setattr(plan, "step_cost", lambda recipe: cost)
    assert make_plan(recipe).warnings == []
    needed = make_plan(recipe).per_device_bytes["total"]
    assert make_plan(recipe, needed).warnings == []
    (sentence,) = make_plan(recipe, needed - 1).warnings
    assert remedy in sentence and sentence.startswith("A device needs ")


def test_what_evaluation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read without keeping anything for a backward, and logits are never all there; nothing held out
    needs nothing."""
    config = {
        "config": {**SMALL, "vocab_size": 32000},
        "tokenizer": "x",
        "dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
    }
    data = {"train": "x", "sequence_length": 2048, "validation_documents": 2}
    recipe = tiny_recipe(tmp_path, model=config, data=data, deepspeed=2)
    cost = plan.step_cost(recipe)  # which takes seconds, once
    monkeypatch.setattr(plan, "step_cost", lambda recipe: cost)
    made = make_plan(recipe)
    logits = 2048 * 32000 * 4
    held = made.per_device_bytes["parameters"] + made.per_device_bytes["optimizer"]
    assert held < made.evaluation_bytes < held + made.per_device_bytes["activations"]
    longer = make_plan(
        tiny_recipe(tmp_path, "data.sequence_length=8192", model=config, data=data, deepspeed=2)
    )
    assert longer.evaluation_bytes - made.evaluation_bytes < 3 * logits / 4
    assert make_plan(tiny_recipe(tmp_path, model=config, deepspeed=2)).evaluation_bytes == 0


@pytest.mark.full
def test_evaluation_that_will_not_fit(tmp_path: Path) -> None:
    """Liger trains in smaller pieces than those of evaluation, so that evaluation may be what needs most."""
    recipe = tiny_recipe(
        tmp_path,
        model={"config": {**SMALL, "vocab_size": 32000, "num_hidden_layers": 3}, "tokenizer": "x"},
        data={"train": "x", "sequence_length": 1024, "validation": "y"},
        training={"steps": 1, "trainable": "ttt", "gradient_checkpointing": True, "liger": True},
        deepspeed=0,
    )
    made = make_plan(recipe)
    assert (
        made.evaluation_bytes > made.per_device_bytes["total"]
        and make_plan(recipe, made.evaluation_bytes).warnings == []
    )
    (sentence,) = make_plan(recipe, made.evaluation_bytes - 1).warnings
    assert "to read held-out rows but has" in sentence


@pytest.mark.parametrize(
    ("stage", "train", "dtype"), [(1, "all", "float32"), (2, "lora", "bfloat16"), (3, "ttt", "bfloat16")]
)
@pytest.mark.sample(1)
def test_what_a_run_has_on_disk(stage: int, train: str, dtype: str, tmp_path: Path) -> None:
    """Against the files of a run."""
    model = checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=512)
    file = recipe_file(tmp_path, model, documents(tmp_path / "text"), deepspeed=stage)
    settings = (
        "training.steps=1",
        "monitor.save_steps=1",
        f"training.trainable={train}",
        f"model.dtype={dtype}",
    )
    finish(start(file, *settings))
    made = make_plan(load_recipe(file, settings))
    sizes = {name: written(tmp_path / "out" / name) for name in ("checkpoint-1", "final")}
    assert made.checkpoint_bytes == pytest.approx(sizes["checkpoint-1"], rel=0.1)
    assert made.disk_bytes - made.checkpoint_bytes == pytest.approx(sizes["final"], rel=0.05)


def written(folder: Path) -> int:
    """Bytes of weights and states."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".safetensors", ".pt"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_recipe(tmp_path))
    assert cli.main(["plan", file, "--set", "training.steps=5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 5 and result["tokens"] == 5 * 64 and result["warnings"] == []
    assert result["per_device_bytes"]["total"] == sum(
        value for key, value in result["per_device_bytes"].items() if key != "total"
    )
    assert cli.main(["plan", file, "--device-memory", "10KB", "--set", "ttt.eta=0"]) == 0
    text = capsys.readouterr().out
    for part in (
        "mistral",
        "layers 0, 2",
        "4 in a row of 64",
        "2 steps of 1 rows",
        "activations",
        "warning: eta is 0",
        "warning: A device needs",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "required: RECIPE"),
        (["plan", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["plan", "FILE", "--set", "training.step=1"], "--set, training.step: unknown setting"),
        (
            ["plan", "FILE", "--device-memory", "much"],
            "--device-memory must be a size such as 80GB or 24GiB, got 'much'",
        ),
        (
            ["plan", "FILE", "--set", "model.config.model_type=perceptron"],
            "is not one of transformers' model types",
        ),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_recipe(tmp_path))
    assert cli.main([file if a == "FILE" else a for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and message in err
        and len([line for line in err.splitlines() if line.startswith("inplace-ttt")]) == 1
    )


def test_a_hub_model_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    file = str(write_recipe(tmp_path, model={"path": "nobody/nothing"}))
    assert cli.main(["plan", file]) == 2
    assert (
        "model.path: cannot read the config of nobody/nothing" in (err := capsys.readouterr().err)
        and "give a local model folder" in err
    )


def test_more_ranks_than_key_heads_repeat_them(tmp_path: Path) -> None:
    """4 ranks and 2 key-value heads of 8 channels: each rank needs one, so four are sent. Nothing is wrong
    with that."""
    config = {"config": CONFIG, "tokenizer": "x", "dtype": "float32"}
    made = {
        ranks: make_plan(
            tiny_recipe(
                tmp_path,
                parallel={"nproc_per_node": ranks, "sequence_parallel_size": ranks},
                model=config,
                monitor={"save_steps": 4},
            )
        )
        for ranks in (2, 4)
    }
    sent = {ranks: planned.communication_bytes["attention"] for ranks, planned in made.items()}
    assert made[4].warnings == []
    assert sent[2] == 2 * 3 * 4 * 32 * 2 * (32 + 16) // 2
    assert sent[4] == 2 * 3 * 4 * 16 * 2 * (32 + 32) * 3 // 4
