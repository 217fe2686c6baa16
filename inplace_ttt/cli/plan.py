"""Runs `inplace-ttt plan RECIPE`."""

from __future__ import annotations

import argparse
from typing import Any

from ..training.plan.plan import make_plan
from ..training.recipe.recipe import load_recipe
from . import Result


def run(args: argparse.Namespace) -> Result:
    return make_plan(load_recipe(args.recipe, args.set), args.device_memory).to_dict(), 0


def render(result: dict[str, Any]) -> str:
    memory, sent = result["per_device_bytes"], result["communication_bytes"]
    layers = ", ".join(map(str, result["ttt_layers"]))
    shared = f", {result['sequence_parallel']} share a row" if result["sequence_parallel"] > 1 else ""
    lines = [
        f"model      {result['model_type']}, {_number(result['parameters'])} parameters, "
        f"{_number(result['trained_parameters'])} trained, "
        f"{_number(result['ttt_parameters'])} new",
        f"TTT        layers {layers}; chunks of {result['chunk_size']} tokens, {result['chunks_per_row']} "
        "in a row of "
        f"{result['sequence_length']}; {_size(result['state_bytes_per_sequence'])} of state per sequence",
        f"devices    {result['devices']}, ZeRO stage {result['zero_stage']}{shared}",
        f"run        {result['steps']:,} steps of {result['rows_per_step']} rows, "
        f"{_number(result['tokens_per_step'])} tokens; "
        f"{_number(result['tokens'])} tokens in all",
        f"compute    {result['flops_per_step']:.2e} FLOPs per step, {result['flops']:.2e} in all; TTT is "
        f"{result['fast_weight_flops']:.0%} of it",
        "",
        "device memory at its peak",
        *(f"  {name:18}{_size(value):>10}" for name, value in memory.items() if value),
        f"  of the activations, {_size(result['logits_bytes'])} are logits",
        *([f"  on the host       {_size(result['host_bytes']):>10}"] if result["host_bytes"] else []),
        *(
            [f"  in evaluation     {_size(result['evaluation_bytes']):>10} in all"]
            if result["evaluation_bytes"]
            else []
        ),
        "",
        f"on disk    {_size(result['checkpoint_bytes'])} per checkpoint, {_size(result['disk_bytes'])} at "
        "the run's peak",
        *(
            [f"           saving takes {_size(result['saving_host_bytes'])} of the first node's memory"]
            if result["saving_host_bytes"]
            else []
        ),
        "",
        "sent per device and step",
        *(
            f"  {name.replace('_', ' '):18}{_size(value):>10}"
            for name, value in sent.items()
            if value or name == "total"
        ),
    ]
    return "\n".join(
        [
            *lines,
            *([""] if result["warnings"] else []),
            *(f"warning: {warning}" for warning in result["warnings"]),
        ]
    )


def _size(value: int) -> str:
    return f"{value / 10**9:.1f} GB" if value >= 10**8 else f"{value / 10**6:.1f} MB"


def _number(value: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:,}"
