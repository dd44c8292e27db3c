"""Quantisers, on bit patterns: bfloat16, FP8 (e4m3) by tensor and by 128×128 block, MXFP8 and MXFP4.

They make the variants of a run, so they own one invariant: the result depends on the bits of the elements
of a scale group alone, so that a window, a shard or a device gives the same bytes. Every step is an integer
operation or one float32 operation that IEEE 754 rounds exactly; which ones, each function says.

Elements go in and come out as *lanes*, unsigned integers: uint32 for float32, uint16 for bfloat16, uint8 for
what is quantised. `fp8` and `mx` are the reference; `deltad.delta.quant.fast` has the same functions compiled.

A device that flushes subnormal float32 operands to zero gives other bytes for elements below 2⁻¹²⁶, so
implementations must not ask for that (`ftz`, `daz`, fast-math), and must not fuse the one multiplication
per element with an addition after it (CUDA's `__fmul_rn`, Triton's `enable_fp_fusion=False`). The reference
has integer arithmetic there, which nothing fuses; numba fuses nothing without fast-math.
"""

from __future__ import annotations

from deltad.delta.quant.bf16 import bf16_from_f32, f32_from_bf16

__all__ = ["bf16_from_f32", "f32_from_bf16"]
