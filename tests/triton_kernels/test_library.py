"""The operators under torch.compile, and the choice between the kernels and plain torch."""

import subprocess
import sys
import warnings

import pytest
import torch
from test_fast_weight import DEVICE, inputs
from torch import Tensor

import inplace_ttt.kernels
from inplace_ttt import InPlaceTTTError
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight, takes_weight, triton

LAYOUT = ChunkLayout((((0, 11), (11, 30)), ((2, 25),)), 30, 8)


@pytest.mark.parametrize("keep", [False, True])
def test_registrations_of_the_op(keep: bool) -> None:
    """Schema, fake tensors, autograd and dynamic shapes, as torch itself checks them."""
    given = inputs(LAYOUT, 9, 10, torch.float32, start=True, w0=True)
    tau = torch.tensor(20.0, device=DEVICE)
    arguments = (
        *(given[name] for name in ("z", "v", "weight", "initial_state")),
        tau,
        LAYOUT.spans,
        LAYOUT.chunk_size,
        0.3,
        keep,
    )
    torch.library.opcheck(torch.ops.inplace_ttt.fast_weight.default, arguments)


def test_registrations_of_the_convolution() -> None:
    x, conv = (
        torch.randn(2, 30, 6, device=DEVICE, requires_grad=True),
        torch.randn(6, 1, 5, device=DEVICE, requires_grad=True),
    )
    torch.library.opcheck(torch.ops.inplace_ttt.chunk_conv.default, (x, conv, LAYOUT.chunk_ids(DEVICE), -2))


def test_compile_has_no_graph_break_and_compiles_once_for_all_layouts() -> None:
    ttt = TargetGenerator(16, 5, "lookahead", device=DEVICE)
    ttt.reset_parameters(0.1, 0)
    ttt.conv.data.normal_(generator=torch.Generator(DEVICE).manual_seed(0))

    def layer(x: Tensor, z: Tensor, w0: Tensor, layout: ChunkLayout) -> Tensor:
        v = triton.chunk_conv(x, ttt.conv, layout.chunk_ids(x.device), ttt.first_tap) @ ttt.proj
        return fast_weight(z, v, w0, eta=0.5, layout=layout, clip=3.0, backend="triton")

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    g = torch.Generator().manual_seed(0)
    x, z, w0 = (
        torch.randn(*shape, generator=g).to(DEVICE).requires_grad_()
        for shape in ((1, 40, 16), (1, 40, 24), (16, 24))
    )
    for lengths in ([40], [13, 27], [9, 9, 22], [1, 20, 19]):
        layout = ChunkLayout.from_lengths([lengths], 8)
        layout.chunk_ids(x.device)
        results = []
        for run in (layer, compiled):
            out = run(x, z, w0, layout)
            results.append([out, *torch.autograd.grad(out.square().sum(), (x, z, w0, *ttt.parameters()))])
        for expected, found in zip(*results, strict=True):
            assert torch.equal(expected, found)
    assert counter.frame_count <= 2  # the second time with a number of documents that may vary


def test_auto_on_the_cpu_is_chunked_and_silent() -> None:
    given = inputs(LAYOUT, 9, 10, torch.bfloat16, start=False, w0=True)
    given = {name: x.detach().cpu() for name, x in given.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto = fast_weight(**given, eta=0.3, layout=LAYOUT)
    assert torch.equal(auto, fast_weight(**given, eta=0.3, layout=LAYOUT, backend="chunked"))
    assert not takes_weight(given["z"]) and takes_weight(given["z"].float())


def test_cuda_without_kernels_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_warned", set())
    cuda = torch.device("cuda")
    for name in [name for name in sys.modules if name.startswith("inplace_ttt.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(
        UserWarning, match=r"without its Triton kernels.*the package triton is not installed"
    ) as said:
        assert [triton.preferred(cuda, torch.bfloat16) for _ in range(2)] == [False, False]
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not triton.preferred(cuda, torch.float32) and not triton.preferred(
            torch.device("cpu"), torch.bfloat16
        )


def test_half_precision_on_cuda_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace_ttt.kernels, "unsupported", lambda device, dtype: None)
    assert [
        triton.preferred(torch.device("cuda"), dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ] == [
        True,
        True,
        False,
    ]


@pytest.mark.full
def test_an_unsupported_device_is_one_sentence() -> None:
    """In a process without the interpreter, on CPU tensors."""
    code = """
import torch
from inplace_ttt import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight
try:
    fast_weight(torch.ones(1, 4, 2), torch.ones(1, 4, 2), None, eta=1.0, layout=ChunkLayout.from_lengths([[4]], 2), backend="triton")
except InPlaceTTTError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.startswith("backend 'triton' cannot run here: they run on NVIDIA GPUs, not on cpu"), (
        done.stderr
    )
    assert len(done.stdout.splitlines()) == 1


def test_float64_is_refused_by_name() -> None:
    given = {
        name: x.detach().double()
        for name, x in inputs(LAYOUT, 9, 10, torch.float32, start=False, w0=True).items()
    }
    with pytest.raises(InPlaceTTTError, match="not float64; use backend 'chunked' or 'auto'"):
        fast_weight(**given, eta=0.3, layout=LAYOUT, backend="triton")
