"""What `plan` says: measured memory, sizes by hand, sentences for what will not fit or not train, the command."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import InPlaceTTTConfig, cli
from inplace_ttt.training.device_memory import ModelSize, communication, deepspeed_memory, single_process_memory
from inplace_ttt.training.meta_step import StepCost, step_cost
from inplace_ttt.training.model import meta_model
from inplace_ttt.training.plan import fast_weight_flops, make_plan
from inplace_ttt.training.recipe import Recipe

from .tiny import CONFIG, tiny_recipe, write_recipe

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(
    model_type="llama",
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def small_recipe(folder: Path, dtype: str, checkpointing: bool, vocabulary: int = 4096, length: int = 1024) -> Recipe:
    return tiny_recipe(
        folder,
        model={"config": {**SMALL, "vocab_size": vocabulary}, "tokenizer": "x", "dtype": dtype},
        surgery={"layers": [0, 2], "chunk_size": 128},
        data={"train": "x", "sequence_length": length},
        optimisation={"steps": 1, "gradient_checkpointing": checkpointing},
    )


def size_of(recipe: Recipe) -> ModelSize:
    model = meta_model(recipe)
    sizes = [p.numel() for p in model.parameters()]
    return ModelSize(sum(sizes), sum(sizes), max(sizes), 0, 256, 4, 256, 128, ((256, 1024),) * 2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak memory of a process is read from Linux's /proc")
@pytest.mark.parametrize("vocabulary", [4096, 32000])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_peak_memory(dtype: str, checkpointing: bool, vocabulary: int, tmp_path: Path) -> None:
    """Within 15 % of what a process really takes for the model, AdamW and a step."""
    recipe = small_recipe(tmp_path, dtype, checkpointing, vocabulary)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, str(ROOT / "tests" / "training" / "measured_step.py"), str(recipe.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = int(done.stdout.split("PEAK ")[1])
    planned = single_process_memory(size_of(recipe), step_cost(recipe), 4 if dtype == "float32" else 2).total
    print(
        f"{dtype} {vocabulary} {checkpointing}: planned {planned / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB, {planned / measured:.3f}"
    )
    assert planned / measured == pytest.approx(1, abs=0.15)


def test_a_step_recomputed_holds_less_and_computes_more(tmp_path: Path) -> None:
    kept, recomputed = (step_cost(small_recipe(tmp_path, "float32", checkpointing)) for checkpointing in (False, True))
    assert recomputed.activations < 0.6 * kept.activations
    assert 1.2 < recomputed.product_flops / kept.product_flops < 1.4


def test_a_steps_products_by_hand(tmp_path: Path) -> None:
    """6 operations a token and weight, except that the first layer's input needs no gradient: the embedding is a look-up."""
    recipe = small_recipe(tmp_path, "float32", False)
    d, h, kv, tokens = 256, 1024, 128, 1024
    weights = 4 * (2 * d * d + 2 * d * kv + 3 * d * h) + 4096 * d
    plain = 6 * tokens * weights
    ttt = fast_weight_flops(recipe, size_of(recipe))
    assert step_cost(recipe).product_flops == pytest.approx(plain + ttt, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_fast_weight_adds_to_the_products(dtype: str, checkpointing: bool, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, dtype, checkpointing)
    one, two = (step_cost(dataclasses.replace(recipe, surgery=InPlaceTTTConfig(layers=layers, chunk_size=32))) for layers in ((1,), (1, 2)))
    expected = fast_weight_flops(recipe, dataclasses.replace(size_of(recipe), fast_weights=((256, 1024),)))
    assert two.product_flops - one.product_flops == pytest.approx(expected, rel=0.05)


def test_logits_dominate_unless_they_are_fused(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "bfloat16", True, vocabulary=32000)
    plain = step_cost(recipe)
    assert plain.logits > 0.8 * plain.activations
    fused = step_cost(dataclasses.replace(recipe, optimisation=dataclasses.replace(recipe.optimisation, liger=True)))
    assert fused.logits == 0 and fused.activations < 0.2 * plain.activations


def test_sdpa_keeps_masks_and_repeated_heads_that_flash_attention_does_not(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "bfloat16", False)
    by_name = {
        name: step_cost(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attention=name))).activations
        for name in ("sdpa", "flash_attention_2", "eager")
    }
    masks = 1024 * 1024 * (1 + 4 * 2)  # the booleans, and numbers of them in each layer
    assert by_name["sdpa"] - by_name["flash_attention_2"] == pytest.approx(masks + 4 * 2 * 1024 * 128 * 2, rel=0.05)
    assert by_name["eager"] > by_name["sdpa"]


SIZE = ModelSize(
    parameters=1000_000, trained=800_000, largest=1000, buffers=0, hidden=64, layers=10, queries=64, keys=16, fast_weights=((64, 256),) * 2
)
STEP = StepCost(activations=50_000_000, step=51_000_000, logits=0, product_flops=0)


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimiser"),
    [
        (0, 2_000_000, 1_600_000, 9_600_000),
        (1, 2_000_000, 1_600_000, 2_400_000),
        (2, 2_000_000, 400_000, 2_400_000),
        (3, 500_000, 400_000, 2_400_000),
    ],
)
def test_zero_stages(stage: int, parameters: int, gradients: int, optimiser: int, tmp_path: Path) -> None:
    """bfloat16 on 4 devices: 2 bytes a weight and gradient, 12 of float32 master and moments for what is trained."""
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 5000, "overlap_comm": False}
    recipe = tiny_recipe(tmp_path, "model.dtype=bfloat16", "parallel.processes=4", deepspeed={"zero_optimization": zero})
    memory = deepspeed_memory(recipe, SIZE, STEP)
    assert (memory.parameters, memory.gradients, memory.optimiser) == (parameters, gradients, optimiser)
    assert memory.buckets == {0: 0, 1: 2000, 2: 2000, 3: 2000 + 10_000}[stage]
    assert memory.activations == (50_000_000 if stage >= 2 else 51_000_000 - gradients)
    assert memory.total == parameters + gradients + optimiser + memory.activations + memory.buckets and memory.host == 0


def test_float32_buckets_and_offload(tmp_path: Path) -> None:
    offload = {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}
    memory = deepspeed_memory(tiny_recipe(tmp_path, deepspeed={"zero_optimization": offload}), SIZE, STEP)
    assert (memory.parameters, memory.optimiser, memory.host) == (4_000_000, 0, 12 * 800_000)
    assert memory.buckets == 4 * 64 * 64
    assert deepspeed_memory(tiny_recipe(tmp_path, deepspeed=0), SIZE, STEP).optimiser == 8 * 800_000


def test_communication_by_hand(tmp_path: Path) -> None:
    sent = {
        stage: communication(
            tiny_recipe(
                tmp_path, "model.dtype=bfloat16", "parallel.processes=4", deepspeed=stage, optimisation={"steps": 1, "accumulation": 3}
            ),
            SIZE,
        )
        for stage in range(4)
    }
    of_trained = 2 * 800_000 * 3 // 4
    assert [sent[stage]["gradients"] for stage in range(4)] == [2 * of_trained, of_trained, 3 * of_trained, 3 * of_trained]
    assert [sent[stage]["parameters"] for stage in range(4)] == [0, of_trained, of_trained, 3 * 2 * 2 * 1_000_000 * 3 // 4]
    assert all(s["fast_weight_scan"] == s["attention"] == 0 and s["total"] == s["gradients"] + s["parameters"] for s in sent.values())


def test_the_scan_sends_the_same_from_two_ranks_to_many(tmp_path: Path) -> None:
    """2·d·h float32 numbers a TTT layer, forward and backward, times (P - 1)/P; recomputation sends the forward's again."""
    for ranks in (2, 4, 8):
        recipe = tiny_recipe(tmp_path, parallel={"processes": ranks, "sequence_parallel": ranks}, monitor={"save_every": 8})
        assert communication(recipe, SIZE)["fast_weight_scan"] == 2 * 2 * (2 * 64 * 256 * 4) * (ranks - 1) // ranks
        assert communication(recipe, SIZE)["attention"] == 2 * 10 * 4 * (64 // ranks) * 2 * (64 + 16) * (ranks - 1) // ranks
    again = dataclasses.replace(recipe, optimisation=dataclasses.replace(recipe.optimisation, gradient_checkpointing=True))
    assert communication(again, SIZE)["fast_weight_scan"] == 3 * 2 * (2 * 64 * 256 * 4) * 7 // 8


def test_ranks_that_share_rows_hold_less(tmp_path: Path) -> None:
    config = {**SMALL, "vocab_size": 4096}
    sections = {"model": {"config": config, "tokenizer": "x", "dtype": "bfloat16"}, "surgery": {"layers": [0, 2], "chunk_size": 128}}
    data = {"train": "x", "sequence_length": 2048}
    whole = make_plan(tiny_recipe(tmp_path, **sections, data=data, parallel={"processes": 4}))
    parallel = {"processes": 4, "sequence_parallel": 4}
    shared = make_plan(tiny_recipe(tmp_path, **sections, data=data, parallel=parallel, monitor={"save_every": 4}))
    assert shared.per_device_bytes["activations"] < 0.6 * whole.per_device_bytes["activations"]
    assert shared.tokens_per_step == whole.tokens_per_step / 4 and shared.warnings == []
    assert shared.flops_per_step == pytest.approx(whole.flops_per_step / 4, rel=0.05)


def test_tokens_steps_and_chunks(tmp_path: Path) -> None:
    made = make_plan(
        tiny_recipe(tmp_path, "data.sequence_length=100", "parallel.processes=2", optimisation={"tokens": 1000, "accumulation": 2})
    )
    assert (made.rows_per_step, made.tokens_per_step, made.steps, made.tokens) == (4, 400, 3, 1200)
    assert made.chunks_per_row == 7
    assert made.flops == 3 * made.flops_per_step
    assert made.state_bytes_per_sequence == 2 * 4 * 32 * 48
    assert made.ttt_parameters == 2 * (32 * 32 + 5 * 32) and made.trained_parameters == made.parameters


def test_what_lora_and_the_writer_alone_train(tmp_path: Path) -> None:
    ttt = make_plan(tiny_recipe(tmp_path, optimisation={"train": "ttt", "steps": 1}))
    assert ttt.trained_parameters == ttt.ttt_parameters < ttt.parameters
    lora = make_plan(tiny_recipe(tmp_path, optimisation={"train": "lora", "steps": 1, "lora": {"rank": 2}}))
    assert lora.ttt_parameters == ttt.ttt_parameters and lora.ttt_parameters < lora.trained_parameters < lora.parameters / 2


def test_attention_counts_the_window(tmp_path: Path) -> None:
    full = {key: value for key, value in CONFIG.items() if key != "sliding_window"} | {"model_type": "llama"}
    made = [
        make_plan(tiny_recipe(tmp_path, "data.sequence_length=512", model={"config": config, "tokenizer": "x", "dtype": "float32"})).flops
        for config in (full, CONFIG)
    ]
    pairs = [512 * 513 // 2, 512 * 16 - 16 * 15 // 2]
    assert made[0] - made[1] == 2 * 3 * 3 * 4 * 32 * (pairs[0] - pairs[1])  # 2 steps, 3 layers, forward and two of backward


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["surgery.chunk_size=64"], "A chunk of 64 tokens is no shorter than a row of 64: no write is ever read"),
        (["surgery.chunk_size=40"], "at most one write a row is ever read; lower surgery.chunk_size"),
        (["surgery.eta=0"], "eta is 0: nothing is written, and conv and P learn nothing; set surgery.eta above 0."),
        (["surgery.eta=[0, 1.0]"], "eta is 0 in layers [0]: they write nothing."),
        (["data.sequence_length=1024"], "Rows of 1024 tokens are longer than the model's context of 512"),
        (["optimisation.warmup_steps=2"], "The warm-up optimisation.warmup_steps of 2 steps is no shorter than the run of 2"),
        (["optimisation.eta_warmup_steps=5"], "The warm-up optimisation.eta_warmup_steps of 5 steps"),
        (
            ["parallel.processes=8", "parallel.sequence_parallel=8", "monitor.save_every=8"],
            "sequence_parallel 8 does not divide the model's 4 attention heads",
        ),
        (
            ["parallel.processes=3", "parallel.sequence_parallel=3", "data.sequence_length=48", "monitor.save_every=3"],
            "sequence_parallel 3 does not divide the model's 4 attention heads and 2 key-value heads",
        ),
        (
            ["parallel.processes=2", "parallel.sequence_parallel=2", "data.sequence_length=80"],
            "Each of 2 ranks gets 40 tokens, which are not whole chunks of 16; make data.sequence_length a multiple of 32.",
        ),
        (
            ["parallel.processes=2", "parallel.sequence_parallel=2", "model.attention=eager"],
            "Ranks cannot share rows under eager attention",
        ),
    ],
)
def test_what_will_not_train(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    found = make_plan(tiny_recipe(tmp_path, *overrides)).warnings
    assert any(sentence in warning for warning in found), found
    assert make_plan(tiny_recipe(tmp_path)).warnings == []


@pytest.mark.parametrize(
    ("sections", "remedy"),
    [
        (
            {"model": {"config": {**SMALL, "vocab_size": 32000}, "tokenizer": "x"}, "data": {"train": "x", "sequence_length": 1024}},
            "of them are logits, so set optimisation.liger: true",
        ),
        ({"data": {"train": "x", "sequence_length": 512}}, "set optimisation.gradient_checkpointing: true"),
        (
            {
                "data": {"train": "x", "sequence_length": 512},
                "optimisation": {"steps": 1, "gradient_checkpointing": True, "liger": True, "batch_size": 8},
            },
            "lower optimisation.batch_size and raise accumulation",
        ),
        (
            {"data": {"train": "x", "sequence_length": 512}, "optimisation": {"steps": 1, "gradient_checkpointing": True, "liger": True}},
            "raise parallel.sequence_parallel, or lower data.sequence_length",
        ),
        ({"deepspeed": 1}, "set smaller buckets"),
        ({"deepspeed": 0, "parallel": {"processes": 2}, "data": {"train": "x", "sequence_length": 40}}, "use ZeRO stage 1 or 3"),
        ({"deepspeed": 0, "data": {"train": "x", "sequence_length": 40}}, "offload the optimiser to the host, or use more devices"),
    ],
    ids=["logits", "checkpointing", "batch", "length", "buckets", "stage", "offload"],
)
def test_what_will_not_fit(sections: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, **{"deepspeed": 0, **sections})
    assert make_plan(recipe).warnings == []
    needed = make_plan(recipe).per_device_bytes["total"]
    assert make_plan(recipe, needed).warnings == []
    (sentence,) = make_plan(recipe, needed - 1).warnings
    assert remedy in sentence and sentence.startswith("A device needs ")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_recipe(tmp_path))
    assert cli.main(["plan", file, "--set", "optimisation.steps=5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 5 and result["tokens"] == 5 * 64 and result["warnings"] == []
    assert result["per_device_bytes"]["total"] == sum(value for key, value in result["per_device_bytes"].items() if key != "total")
    assert cli.main(["plan", file, "--device-memory", "10KB", "--set", "surgery.eta=0"]) == 0
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
        (["plan", "FILE", "--set", "optimisation.step=1"], "--set, optimisation.step: there is no such setting"),
        (["plan", "FILE", "--device-memory", "much"], "--device-memory must be a size such as 80GB or 24GiB, got 'much'"),
        (["plan", "FILE", "--set", "model.config.model_type=perceptron"], "is not one that transformers knows"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_recipe(tmp_path))
    assert cli.main([file if a == "FILE" else a for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len([line for line in err.splitlines() if line.startswith("inplace-ttt")]) == 1


def test_a_hub_model_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    file = str(write_recipe(tmp_path, model={"path": "nobody/nothing"}))
    assert cli.main(["plan", file]) == 2
    assert "model.path: cannot read the config of nobody/nothing" in (err := capsys.readouterr().err) and "give a local model folder" in err


def test_buckets_overlap_under_zero_3_unless_told_otherwise(tmp_path: Path) -> None:
    for stage, buffers in ((2, 1), (3, 2)):
        zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 0}
        assert deepspeed_memory(tiny_recipe(tmp_path, deepspeed={"zero_optimization": zero}), SIZE, STEP).buckets == buffers * 4000


def test_the_peak_may_be_the_update(tmp_path: Path) -> None:
    """A float32 copy of the gradient, and one more; not where the update happens on the host."""
    little = StepCost(activations=1000, step=1_700_000, logits=0, product_flops=0)
    for zero, held in (({"stage": 2}, 8 * 800_000 // 4), ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 1000)):
        recipe = tiny_recipe(tmp_path, "model.dtype=bfloat16", "parallel.processes=4", deepspeed={"zero_optimization": zero})
        assert deepspeed_memory(recipe, SIZE, little).activations == held
    assert single_process_memory(SIZE, StepCost(0, 2 * 800_000, 0, 0), 2).activations == 2 * 2 * SIZE.largest


def test_gradients_are_there_from_the_second_micro_step_on(tmp_path: Path) -> None:
    """Then the peak of the activations meets all of them; in the first they come as the activations go."""
    for accumulation, activations in ((1, 51_000_000 - 3_200_000), (2, 50_000_000)):
        recipe = tiny_recipe(tmp_path, optimisation={"steps": 1, "accumulation": accumulation}, deepspeed=1)
        assert deepspeed_memory(recipe, SIZE, STEP).activations == activations


def test_gradients_count_into_a_step(tmp_path: Path) -> None:
    """With many weights and few tokens they are what a step holds at its end."""
    recipe = small_recipe(tmp_path, "float32", True, length=256)
    step = step_cost(recipe)
    assert step.step >= 4 * size_of(recipe).trained > step.activations


def test_ranks_that_share_rows_keep_a_state_for_each_layer(tmp_path: Path) -> None:
    """The state a layer starts from, for the backward, and three while it is exchanged; one alone where layers are recomputed."""
    state = 4 * 64 * 256
    for checkpointing, states in ((False, 2 + 3), (True, 1 + 3)):
        optimisation = {"steps": 1, "gradient_checkpointing": checkpointing}
        alone = tiny_recipe(tmp_path, "parallel.processes=2", optimisation=optimisation, deepspeed=2)
        shared = tiny_recipe(tmp_path, "parallel.processes=2", "parallel.sequence_parallel=2", optimisation=optimisation, deepspeed=2)
        extra = deepspeed_memory(shared, SIZE, STEP).activations - deepspeed_memory(alone, SIZE, STEP).activations
        assert extra == states * state


def test_more_ranks_than_key_heads_repeat_them(tmp_path: Path) -> None:
    """4 ranks and 2 key-value heads of 8 channels: each rank needs one, so four are sent. Nothing is wrong with that."""
    config = {"config": CONFIG, "tokenizer": "x", "dtype": "float32"}
    made = {
        ranks: make_plan(
            tiny_recipe(tmp_path, parallel={"processes": ranks, "sequence_parallel": ranks}, model=config, monitor={"save_every": 4})
        )
        for ranks in (2, 4)
    }
    sent = {ranks: plan.communication_bytes["attention"] for ranks, plan in made.items()}
    assert made[4].warnings == []
    assert sent[2] == 2 * 3 * 4 * 32 * 2 * (32 + 16) // 2
    assert sent[4] == 2 * 3 * 4 * 16 * 2 * (32 + 32) * 3 // 4
