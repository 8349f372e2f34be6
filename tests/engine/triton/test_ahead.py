"""Every kernel compiles without a GPU, at the shapes of a real model, and keeps to its registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")

from engine.kernels.triton import ahead
from engine.kernels.triton.launch import INTERPRETED

#: Bytes of shared memory that a block may have on sm_80 and sm_90.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
KERNELS = {
    *("norm.add_norm", "rotary.rope_write", "products.linear", "head.tile", "head.merge"),
    *("decode.part", "decode.merge", "prefill.prefill", "heads.mean", "heads.sums", "heads.statistics"),
    *("pack.pack_page", "pack.unpack_page"),
}


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set: kernels are not compiled")
def test_kernels_compile_and_do_not_spill(record_property: pytest.RecordProperty) -> None:
    costs = list(ahead.costs(ahead.MODELS[0]))
    for cost in costs:
        record_property(
            f"{cost.use} {cost.kernel} sm_{cost.architecture}",
            f"{cost.registers} registers, {cost.spilled} B spilled, {cost.shared} B shared",
        )
    for number in ahead.ARCHITECTURES:
        found = [cost for cost in costs if cost.architecture == number]
        assert {cost.kernel for cost in found} == KERNELS
        assert all(0 < cost.registers <= 255 for cost in found)
        assert all(cost.shared <= SHARED[number] for cost in found)
    assert [cost for cost in costs if cost.spilled] == []
