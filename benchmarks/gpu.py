"""The Triton kernels on a GPU, or as far as one gets without: `benchmarks/gpu.sh`, or

python -m benchmarks.gpu            correctness, then speed; needs an NVIDIA GPU; under 8 minutes
python -m benchmarks.gpu --check    correctness alone
python -m benchmarks.gpu --compile  registers, spills and shared memory of every kernel; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "results" / "gpu.json"
NO_GPU = 3
REFUSAL = """\
benchmarks/gpu.sh needs an NVIDIA GPU that PyTorch can use, and there is none here;
--compile shows what can be told without one"""


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for. Exit status: 0, 1 for a wrong or spilling kernel, 3 without a GPU."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="correctness alone")
    parser.add_argument("--compile", action="store_true", help="compile for sm_80 and sm_90; needs no GPU")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON goes")
    chosen = parser.parse_args(arguments)
    if chosen.compile:
        return _compile()
    import torch  # noqa: PLC0415  --help needs none of it

    if not torch.cuda.is_available():
        print(REFUSAL, file=sys.stderr)
        return NO_GPU
    began = time.monotonic()
    failed, results = _check()
    if not failed and not chosen.check:
        from benchmarks import gpu_speed  # noqa: PLC0415  imports transformers

        results |= gpu_speed.rows(torch.device("cuda"))
        results["seconds"] = time.monotonic() - began
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{chosen.output} written after {results['seconds']:.0f} s")
    return int(failed)


def _check() -> tuple[bool, dict[str, Any]]:
    """Whether any kernel is wrong, and what the results say of the machine and the checks."""
    import torch  # noqa: PLC0415
    import triton  # noqa: PLC0415

    from benchmarks.gpu_check import SIZES, checks  # noqa: PLC0415

    device = torch.device("cuda")
    found = [
        check
        for sizes in SIZES
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for check in checks(device, sizes, dtype, [1, 2, 33, 500, 1025])
    ]
    wrong = [check for check in found if not check.passed]
    for check in wrong:
        print(f"WRONG {check.name}: error {check.error:.2e}, allowed {check.allowed:.0e}")
    print(f"{len(found) - len(wrong)} of {len(found)} checks of kernels against the reference passed")
    properties = torch.cuda.get_device_properties(device)
    about = {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "checks": len(found),
        "wrong": [check._asdict() for check in wrong],
    }
    return bool(wrong), about


def _compile() -> int:
    import torch  # noqa: PLC0415

    from engine.kernels.triton import ahead  # noqa: PLC0415

    print(f"{'model':22} {'use':8} {'kernel':18} {'arch':>5} {'registers':>9} {'spilled':>7} {'shared':>7}")
    spilling = 0
    for cost in ahead.costs(*ahead.MODELS, dtypes=(torch.bfloat16, torch.float32)):
        spilling += cost.spilled > 0
        print(
            f"{cost.model:22} {cost.use:8} {cost.kernel:18} sm_{cost.architecture} "
            f"{cost.registers:9} {cost.spilled:7} {cost.shared:7}",
            flush=True,
        )
    return int(spilling > 0)


if __name__ == "__main__":
    sys.exit(main())
