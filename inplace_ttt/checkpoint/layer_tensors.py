"""Checks the new tensors of a conversion against its TTT config."""

from __future__ import annotations

from torch import Tensor

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layer.quantized import parameter_dtype

LayerTensors = dict[int, dict[str, Tensor]]
"""TTT layer -> its new tensors: conv [d, 1, k], proj [d, d], and the tensors of extensions.

`TargetGenerator` documents the tensors of the extensions.
"""


def check_tensors(tensors: LayerTensors, config: InPlaceTTTConfig, name: str) -> None:
    """Checks that the layers, kinds and shapes of TTT tensors match a config.

    Args:
        tensors: the tensors of each layer.
        config: the TTT config, with the layers as indices.
        name: the checkpoint, for the message.

    Raises:
        InPlaceTTTError: naming the first layer or tensor that does not fit.
    """
    assert isinstance(config.layers, tuple)
    if sorted(tensors) != list(config.layers):
        raise InPlaceTTTError(
            f"{name} has TTT tensors for layers {sorted(tensors)}, but its config names "
            f"{list(config.layers)}."
        )
    for layer, held in tensors.items():
        if set(held) != kinds(config):
            has, wants = (", ".join(sorted(names)) for names in (held, kinds(config)))
            raise InPlaceTTTError(
                f"{name}: layer {layer} has the TTT tensors {has}, but its config requires {wants}; convert "
                "the base again."
            )
        width, taps = (
            held["proj"].shape[-1] if "proj" in held and held["proj"].ndim else 0,
            config.kernel_size,
        )
        wanted = {"proj": [width, width], "conv": [width, 1, taps], "mean": [width], "gain": []}
        if (directions := held.get("keys.directions")) is not None:
            if directions.ndim != 2:
                raise InPlaceTTTError(
                    f"{name}: keys.directions of layer {layer} is {list(directions.shape)}, not a "
                    "matrix [r, h]."
                )
            rank, inputs = directions.shape
            wanted |= {"keys.center": [inputs], "write_gate.gate": [rank + 1]}
        for kind, shape in wanted.items():
            if kind in held and list(held[kind].shape) != shape:
                raise InPlaceTTTError(
                    f"{name}: {kind} of layer {layer} is {list(held[kind].shape)} instead of {shape}."
                )
        for kind, tensor in held.items():
            require_numbers(tensor, f"{name}: {kind} of layer {layer}")


def require_numbers(tensor: Tensor, what: str) -> None:
    """Raises InPlaceTTTError for a tensor in a storage format, or with values that are not finite.

    Args:
        tensor: of a checkpoint.
        what: the tensor's name, for the message.
    """
    if parameter_dtype(tensor.dtype) != tensor.dtype:
        wanted = "float32, bfloat16 or float16"
        raise InPlaceTTTError(
            f"{what} is stored as {str(tensor.dtype).removeprefix('torch.')}, not as {wanted}; convert the "
            "base again."
        )
    if not tensor.isfinite().all():
        raise InPlaceTTTError(f"{what} holds NaN or infinite numbers; the file is damaged.")


def kinds(config: InPlaceTTTConfig) -> set[str]:
    """Returns the names of the tensors that each TTT layer adds."""
    of_target = (
        {"gain"} if config.target == "gradient" else {"proj"} if config.conv == "next" else {"conv", "proj"}
    )
    return (
        of_target
        | ({"write_gate.gate"} if config.write_gate else set())
        | ({"mean", "gain"} if config.normalize_targets else set())
        | ({"keys.directions", "keys.center"} if config.whitening else set())
    )


def parameters_of(tensors: LayerTensors) -> int:
    """Returns the number of trained values in a conversion's tensors. Measured tensors do not count."""
    return sum(
        pair[kind].numel()
        for pair in tensors.values()
        for kind in ("conv", "proj", "write_gate.gate")
        if kind in pair
    )
