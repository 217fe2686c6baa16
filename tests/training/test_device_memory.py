"""What a device holds and sends, by hand: ZeRO stages, buckets, offload, ranks that share rows."""

import dataclasses
from pathlib import Path

import pytest

from inplace_ttt.training.plan.device_memory import (
    ModelSize,
    communication,
    deepspeed_memory,
    single_process_memory,
)
from inplace_ttt.training.plan.meta_step import StepCost

from .recipes import tiny_recipe

SIZE = ModelSize(
    parameters=1000_000,
    trained=800_000,
    largest=1000,
    buffers=0,
    hidden=64,
    layers=10,
    queries=64,
    keys=16,
    states=(4 * 64 * 256,) * 2,
)
STEP = StepCost(activations=50_000_000, step=51_000_000, logits=0, product_flops=0)


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [
        (0, 2_000_000, 1_600_000, 9_600_000),
        (1, 2_000_000, 1_600_000, 2_400_000),
        (2, 2_000_000, 800_000, 2_400_000),
        (3, 500_000, 800_000, 2_400_000),
    ],
)
def test_zero_stages(stage: int, parameters: int, gradients: int, optimizer: int, tmp_path: Path) -> None:
    """bfloat16 on 4 devices: 2 bytes a weight and 2 or 4 a gradient, 12 of float32 master and moments for
    what is trained."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": 1000,
        "stage3_max_live_parameters": 5000,
        "overlap_comm": False,
    }
    recipe = tiny_recipe(
        tmp_path, "model.dtype=bfloat16", "parallel.nproc_per_node=4", deepspeed={"zero_optimization": zero}
    )
    memory = deepspeed_memory(recipe, SIZE, STEP)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (parameters, gradients, optimizer)
    assert memory.buckets == {0: 0, 1: 2000, 2: 2000, 3: 2000 + 10_000}[stage]
    assert memory.activations == (50_000_000 if stage >= 2 else 51_000_000 - gradients)
    assert (
        memory.total == parameters + gradients + optimizer + memory.activations + memory.buckets
        and memory.host == 0
    )


def test_float32_buckets_and_offload(tmp_path: Path) -> None:
    offload = {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}}
    memory = deepspeed_memory(tiny_recipe(tmp_path, deepspeed={"zero_optimization": offload}), SIZE, STEP)
    assert (memory.parameters, memory.optimizer, memory.host) == (4_000_000, 0, 12 * 800_000)
    assert memory.buckets == 4 * 64 * 64
    assert deepspeed_memory(tiny_recipe(tmp_path, deepspeed=0), SIZE, STEP).optimizer == 8 * 800_000


def test_buckets_overlap_under_zero_3_unless_told_otherwise(tmp_path: Path) -> None:
    for stage, buffers in ((2, 1), (3, 2)):
        zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 0}
        assert (
            deepspeed_memory(tiny_recipe(tmp_path, deepspeed={"zero_optimization": zero}), SIZE, STEP).buckets
            == buffers * 4000
        )


def test_the_peak_may_be_the_update(tmp_path: Path) -> None:
    """A float32 copy of the gradient, and one more; not where the update happens on the host."""
    little = StepCost(activations=1000, step=1_700_000, logits=0, product_flops=0)
    for zero, held in (
        ({"stage": 2}, 8 * 800_000 // 4),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 1000),
    ):
        recipe = tiny_recipe(
            tmp_path,
            "model.dtype=bfloat16",
            "parallel.nproc_per_node=4",
            deepspeed={"zero_optimization": zero},
        )
        assert deepspeed_memory(recipe, SIZE, little).activations == held
    assert single_process_memory(SIZE, StepCost(0, 2 * 800_000, 0, 0), 2).activations == 2 * 2 * SIZE.largest


def test_gradients_are_there_from_the_second_micro_step_on(tmp_path: Path) -> None:
    """Then the peak of the activations meets all of them; in the first they come as the activations go."""
    for accumulation, activations in ((1, 51_000_000 - 3_200_000), (2, 50_000_000)):
        recipe = tiny_recipe(
            tmp_path, training={"steps": 1, "gradient_accumulation_steps": accumulation}, deepspeed=1
        )
        assert deepspeed_memory(recipe, SIZE, STEP).activations == activations


def test_ranks_that_share_rows_keep_a_state_for_each_layer(tmp_path: Path) -> None:
    """The state a layer starts from, for the backward, and three while it is exchanged; one alone where
    layers are recomputed."""
    state = 4 * 64 * 256
    for checkpointing, states in ((False, 2 + 3), (True, 1 + 3)):
        training = {"steps": 1, "gradient_checkpointing": checkpointing}
        alone = tiny_recipe(tmp_path, "parallel.nproc_per_node=2", training=training, deepspeed=2)
        shared = tiny_recipe(
            tmp_path,
            "parallel.nproc_per_node=2",
            "parallel.sequence_parallel_size=2",
            training=training,
            deepspeed=2,
        )
        extra = (
            deepspeed_memory(shared, SIZE, STEP).activations - deepspeed_memory(alone, SIZE, STEP).activations
        )
        assert extra == states * state


def test_communication_by_hand(tmp_path: Path) -> None:
    sent = {
        stage: communication(
            tiny_recipe(
                tmp_path,
                "model.dtype=bfloat16",
                "parallel.nproc_per_node=4",
                deepspeed=stage,
                training={"steps": 1, "gradient_accumulation_steps": 3},
            ),
            SIZE,
        )
        for stage in range(4)
    }
    of_trained = 2 * 800_000 * 3 // 4
    assert [sent[stage]["gradients"] for stage in range(4)] == [
        2 * of_trained,
        of_trained,
        3 * of_trained,
        3 * of_trained,
    ]
    assert [sent[stage]["parameters"] for stage in range(4)] == [
        0,
        of_trained,
        of_trained,
        3 * 2 * 2 * 1_000_000 * 3 // 4,
    ]
    assert all(
        s["fast_weight_scan"] == s["attention"] == 0 and s["total"] == s["gradients"] + s["parameters"]
        for s in sent.values()
    )


def test_the_scan_sends_the_same_from_two_ranks_to_many(tmp_path: Path) -> None:
    """2·d·h float32 numbers a TTT layer, forward and backward, times (P - 1)/P; recomputation sends the
    forward's again."""
    for ranks in (2, 4, 8):
        recipe = tiny_recipe(
            tmp_path,
            parallel={"nproc_per_node": ranks, "sequence_parallel_size": ranks},
            monitor={"save_steps": 8},
        )
        assert (
            communication(recipe, SIZE)["fast_weight_scan"]
            == 2 * 2 * (2 * 64 * 256 * 4) * (ranks - 1) // ranks
        )
        assert (
            communication(recipe, SIZE)["attention"]
            == 2 * 10 * 4 * (64 // ranks) * 2 * (64 + 16) * (ranks - 1) // ranks
        )
    again = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, gradient_checkpointing=True)
    )
    assert communication(again, SIZE)["fast_weight_scan"] == 3 * 2 * (2 * 64 * 256 * 4) * 7 // 8


def test_evaluation_comes_between_steps(tmp_path: Path) -> None:
    """Beside weights and optimizer; under ZeRO-3, which keeps its buffers, beside those too; ranks that share
    rows exchange states."""
    zero = {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 5000, "overlap_comm": False}
    for stage, beside in ((2, 2_000_000 + 2_400_000), (3, 500_000 + 2_400_000 + 800_000 + 2000 + 10_000)):
        settings = {"zero_optimization": {"stage": stage, **zero}}
        recipe = tiny_recipe(
            tmp_path, "model.dtype=bfloat16", "parallel.nproc_per_node=4", deepspeed=settings
        )
        assert deepspeed_memory(recipe, SIZE, STEP, 7000).evaluation == beside + 7000
        assert deepspeed_memory(recipe, SIZE, STEP).evaluation == 0
        shared = dataclasses.replace(
            recipe, parallel=dataclasses.replace(recipe.parallel, sequence_parallel_size=4)
        )
        assert deepspeed_memory(shared, SIZE, STEP, 7000).evaluation == beside + 7000 + 4 * 4 * 64 * 256


def test_offloaded_states_are_not_on_the_device_in_evaluation(tmp_path: Path) -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    recipe = tiny_recipe(tmp_path, deepspeed={"zero_optimization": offload})
    assert deepspeed_memory(recipe, SIZE, STEP, 7000).evaluation == 4_000_000 + 7000
