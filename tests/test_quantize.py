# SPDX-License-Identifier: Apache-2.0
"""The quantizer compiles for Hopper without a GPU, as its launcher expects it."""
import os
import subprocess
import sys
import textwrap

import pytest

from real_vllm import PROJECT

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torch", reason="torch is not installed")

CODE = textwrap.dedent("""\
    import importlib, sys, types
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device: 0
        get_current_target = lambda self: GPUTarget("cuda", 90, 32)
        get_device_interface = lambda self: None
        assemble_tensormap_to_arg = lambda self, *a: a

    driver.set_active(Hopper())
    package = types.ModuleType("package")
    package.__path__ = [sys.argv[1]]
    sys.modules["package"] = package
    q = importlib.import_module("package.quantize")
    c = q._group_quantize.warmup(
        torch.bfloat16, torch.float8_e4m3fn, torch.float32, 2, 2, 2, q.EPS, q.FP8_MAX,
        GROUPS=q.GROUPS_PER_PROGRAM, CHAINED=True, num_warps=q.NUM_WARPS, grid=(1, 1))
    ptx = c.asm["ptx"]
    assert c.asm["cubin"][:4] == b"\\x7fELF" and c.metadata.name == "_group_quantize"
    assert c.metadata.shared < 48 << 10
    head = ptx[ptx.index(".entry"):ptx.index(".reqntid")]
    kinds = [line.split()[1] for line in head.splitlines() if ".param ." in line]
    # Three addresses and three 32-bit counts; later Tritons append scratch addresses.
    assert kinds[:6] == [".u64"] * 3 + [".u32"] * 3 and set(kinds[6:]) <= {".u64"}, kinds
    assert len(kinds) <= 8
    # Nothing is read before the wait; the GEMM is let in after it, as it reads weights.
    wait, let_in = ptx.index("griddepcontrol.wait"), ptx.index("griddepcontrol.launch_dependents")
    assert wait < let_in < ptx.index("ld.global")
    assert ptx.count("ld.global.v4") >= 2, "loads are not 16 bytes wide"
    assert "div.full.f32" in ptx, "not the division of vLLM's own quantizer"
    print("ok", triton.__version__)
    """)


def test_compiles_for_hopper_without_a_gpu(tmp_path):
    folder = PROJECT / "overlay/vllm/model_executor/layers/quantization/deep_gemm_linear"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True,
                         env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("ok")
