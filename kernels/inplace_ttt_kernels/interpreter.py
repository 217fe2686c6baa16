"""Two mends of Triton's interpreter, without which it cannot run these kernels."""

from __future__ import annotations

from typing import Any

import triton.language as tl


def mend() -> None:
    """Loops up to a kernel's argument under numpy 2.4 and later (triton issue 9171), and products of bfloat16 (11584)."""
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """With bfloat16 as float32, in place of the product of the bit patterns."""
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor, builder.create_dot = patched, create_dot
