"""Patches for Triton's interpreter.

Without these patches the interpreter cannot run these kernels, or rounds differently from a GPU, or takes 1.4
times as long.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl


def mend() -> None:
    """Patches the interpreter in four places.

    1. Loops up to a kernel's argument work under numpy 2.4 and later (triton issue 9171).
    2. Products of bfloat16 multiply values, and not bit patterns (triton issue 11584).
    3. Conversion to bfloat16 rounds to nearest, and does not truncate.
    4. The language module is prepared once per launch, and not at each call of a function.
    """
    from triton.runtime import interpreter

    patch, patch_language, builder = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.InterpreterBuilder,
    )
    dot, cast = builder.create_dot, builder.cast_impl

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patched_once(function: Any) -> interpreter._LangPatchScope:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        ready = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if ready else patch_language(function)

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        pair = source.dtype.scalar, wanted.scalar
        if pair == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            widened = torch.from_numpy(source.data.copy()).view(torch.bfloat16).float()
            return interpreter.TensorHandle(widened.numpy(), tl.float32)
        return cast(self, source, wanted)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor, interpreter._patch_lang = patched, patched_once
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
