"""NVIDIA's compiler for kernels, as the package `nvidia-cuda-nvrtc` brings it: it needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def library() -> Path | None:
    """Where the compiler's library lies, if it is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for found in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return found
    return None


class CompileError(Exception):
    """The source does not compile; the message is the compiler's."""


def compiled(source: str, *options: str) -> bytes:
    """The cubin of a source. Raises CompileError."""
    nvrtc = ctypes.CDLL(str(library()))
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"deltad.cu", 0, None, None) == 0
    words = [option.encode() for option in options]
    code = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    if code:
        raise CompileError(_got(nvrtc, program, "ProgramLog").decode())
    return _got(nvrtc, program, "CUBIN")


def _got(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    data = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, data) == 0
    return data.raw
