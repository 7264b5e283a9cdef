#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says line by line whether this environment will run the DeepGEMM linear path."""
import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "tools"),
                str(PROJECT / "overlay/vllm/model_executor/layers/quantization")]
import deepgemm_pin  # noqa: E402

from deep_gemm_linear import kernel_cache  # noqa: E402
from patchset.cli import tree_state  # noqa: E402
from patchset.files import APPLIED, blob_id  # noqa: E402
from patchset.pins import overlay_files, read_history, read_pins  # noqa: E402
from patchset.refusals import Refusal  # noqa: E402
from patchset.target import find_target, match_pin  # noqa: E402

GOOD, BAD, NOTE = "ok", "bad", "note"
_MARKS = {GOOD: "+", BAD: "x", NOTE: "-"}

_GPU = """
import json, torch
from deep_gemm_linear import driver
said = dict(torch=torch.__version__, found=torch.cuda.is_available())
if said["found"]:
    p = torch.cuda.get_device_properties(0)
    said.update(name=p.name, capability=[p.major, p.minor], sms=p.multi_processor_count)
try:
    said["driver"] = driver.version()
except driver.DriverError as error:
    said["driver_error"] = str(error)
print(json.dumps(said))
"""

_PROBE = """
import os, torch
os.environ["VLLM_USE_DEEP_GEMM_LINEAR"] = "1"
from vllm.model_executor.layers.quantization.deep_gemm_linear import linear
from vllm.model_executor.layers.quantization.utils import fp8_utils
torch.manual_seed(0)
w = (torch.randn(256, 512, device="cuda").clamp(-3, 3) * 100).to(torch.float8_e4m3fn)
s = torch.rand(2, 4, device="cuda") * 1e-3 + 1e-4
x = torch.randn(10, 512, device="cuda", dtype=torch.bfloat16)
layer = linear.layer_for(x.dtype, w, s, [128, 128], x.device)
if layer is None:
    raise SystemExit("the weight was refused, see the log above")
linear.cache_of_process().get(layer.tile(10).spec)
out = fp8_utils.apply_w8a8_block_fp8_linear(x, w, [128, 128], s)
full = s.repeat_interleave(128, 0).repeat_interleave(128, 1)
exact = x.float() @ (w.float() * full).t()
error = ((out.float() - exact).norm() / exact.norm()).item()
assert linear.counts["deep_gemm"] == 1, linear.counts
assert error < 0.05, error
print("%.4f" % error)
"""


class Report:
    """Collects one line a check."""

    def __init__(self):
        self.lines = []

    def add(self, state, what, text, hint=None):
        self.lines.append(dict(state=state, what=what, text=text, hint=hint))

    @property
    def healthy(self):
        return all(line["state"] != BAD for line in self.lines)

    def show(self):
        for line in self.lines:
            print(f"{_MARKS[line['state']]} {line['what']:14} {line['text']}")
            if line["hint"] and line["state"] != GOOD:
                print(f"  {'':14} hint: {line['hint']}")


def _python(code, **environment):
    """Run code elsewhere: away from this folder, whose files could shadow packages."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True,
                              text=True, env={**os.environ, **environment})


def _last(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def check_vllm(report):
    """vLLM, its pin, the overlay, and that it is the copy that gets imported."""
    try:
        target = find_target(None)
        added = {name: blob_id(content) for name, content in overlay_files().items()}
        pin, states = match_pin(target, read_pins(), added, read_history())
    except Refusal as refusal:
        report.add(BAD, "vllm", refusal.sentence, refusal.hint)
        return
    report.add(GOOD, "vllm", f"{target.version or 'unknown version'} in {target.root}, pin "
               f"{pin.name}")
    state = tree_state(states)
    report.add(GOOD if state == APPLIED else BAD, "overlay", state,
               f"python apply.py --vllm-path {target.root}")
    seen = _python("import importlib.util as u; print(u.find_spec('vllm').origin)").stdout.strip()
    same = os.path.realpath(os.path.dirname(os.path.dirname(seen))) == str(target.root)
    report.add(GOOD if same else BAD, "import", f"`import vllm` finds {seen}",
               "start the server with this interpreter and without another vllm on PYTHONPATH")


def check_switches(report):
    """The environment variables that decide."""
    for name in sorted(n for n in os.environ if "DEEP_GEMM" in n or n.startswith("DG_")):
        known = name.startswith("DG_JIT_") or name in (
            "VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_LINEAR", "VLLM_USE_DEEP_GEMM_PER_TENSOR",
            "VLLM_DEEP_GEMM_WARMUP")
        report.add(NOTE, "switch", f"{name}={os.environ[name]}"
                   + ("" if known else " is read by nothing here"))
    on = os.environ.get("VLLM_USE_DEEP_GEMM_LINEAR") or os.environ.get("VLLM_USE_DEEP_GEMM", "0")
    if on == "0":
        report.add(NOTE, "switch", "linear layers are off in this shell",
                   "export VLLM_USE_DEEP_GEMM_LINEAR=1")


def check_deep_gemm(report):
    """The package at the pin, importable, with its bindings."""
    # Found as the server finds it: this project's own folders do not count.
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None or not spec.submodule_search_locations:
        report.add(BAD, "deep_gemm", "not installed", "bash tools/install_deepgemm.sh")
        return None
    folder = list(spec.submodule_search_locations)[0]
    wrong = deepgemm_pin.package_differences(folder)
    report.add(BAD if wrong else GOOD, "deep_gemm",
               "; ".join(wrong) or f"{deepgemm_pin.COMMIT[:7]} in {folder}",
               "bash tools/install_deepgemm.sh --replace")
    run = _python("import cuda.bindings as b; import cuda.bindings.driver; print(b.__version__)")
    report.add(BAD if run.returncode else GOOD, "cuda.bindings",
               _last(run.stderr) if run.returncode else run.stdout.strip(),
               "python -m pip install 'cuda-bindings>=12.8,<13'")
    run = _python("import deep_gemm; deep_gemm.gemm_fp8_fp8_bf16_nt")
    if run.returncode:
        report.add(BAD, "deep_gemm", f"does not import: {_last(run.stderr)}",
                   "bash tools/install_deepgemm.sh --replace")
    return None if wrong or run.returncode else folder


def check_compiler_and_cache(report, folder):
    """nvcc, or a cache that makes it unnecessary."""
    compiler, why = kernel_cache.find_compiler()
    cached = 0
    root = kernel_cache.roots()[0]
    if folder:
        sources = kernel_cache.sources_key(folder + "/include")
        cached = sum(1 for r in kernel_cache.roots() for _ in (r / sources).rglob("*.cubin"))
    if compiler:
        why = kernel_cache.toolchain_error(compiler)
        state = GOOD if not why else NOTE if cached else BAD
        report.add(state, "nvcc", f"{compiler.version[0]}.{compiler.version[1]}, {compiler.path}"
                   + (f" does not compile C++20: {why}" if why else ""),
                   "install g++ 10 or newer, or NVCC_PREPEND_FLAGS='-ccbin g++-12'")
        if compiler.version <= (12, 8) and not compiler.cuobjdump:
            report.add(NOTE, "cuobjdump", "not found: large-M kernels stay un-interleaved",
                       "install cuobjdump beside nvcc")
    else:
        report.add(NOTE if cached else BAD, "nvcc", why,
                   "kernels that are not cached run vLLM's own path" if cached else
                   "install CUDA 12.3 or newer, or bring a kernel cache: kernels.py unpack FILE")
    where = root
    while not where.exists():
        where = where.parent
    writable = os.access(where, os.W_OK)
    report.add(GOOD if writable else NOTE, "kernel cache",
               f"{cached} kernels, {root} is {'writable' if writable else 'read-only'}",
               "new kernels go below the temporary folder: set DG_JIT_CACHE_DIR")


def check_gpu(report):
    """The GPU, the driver, and one product against float32."""
    run = _python(_GPU, PYTHONPATH=os.pathsep.join(
        [str(PROJECT / "overlay/vllm/model_executor/layers/quantization"),
         os.environ.get("PYTHONPATH", "")]))
    if run.returncode:
        report.add(BAD, "torch", _last(run.stderr), "install vLLM's own torch")
        return
    said = json.loads(run.stdout.splitlines()[-1])
    if not said["found"]:
        report.add(BAD, "gpu", f"torch {said['torch']} sees no CUDA GPU",
                   "run on the GPU machine, or skip these lines: --no-gpu")
        return
    capability = ".".join(map(str, said["capability"]))
    report.add(GOOD if capability == "9.0" else BAD, "gpu",
               f"{said['name']}, capability {capability}, {said['sms']} SMs",
               "DeepGEMM's kernels are for Hopper only (H100, H200, H20, H800)")
    version = said.get("driver", 0)
    text = said.get("driver_error") or f"CUDA {version // 1000}.{version % 1000 // 10}"
    report.add(GOOD if version >= 12040 else BAD, "driver", text,
               "a driver for CUDA 12.4 or newer is needed")
    if report.healthy:
        run = _python(_PROBE)
        report.add(BAD if run.returncode else GOOD, "probe",
                   _last(run.stderr) if run.returncode else
                   f"one product on the GPU, error against float32 {_last(run.stdout)}",
                   "send this line with the log of: VLLM_LOGGING_LEVEL=DEBUG python doctor.py")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-gpu", action="store_true", help="skip GPU, driver and probe")
    options = parser.parse_args()
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    report = Report()
    check_vllm(report)
    check_switches(report)
    check_compiler_and_cache(report, check_deep_gemm(report))
    if not options.no_gpu:
        check_gpu(report)
    if options.json:
        print(json.dumps(dict(healthy=report.healthy, lines=report.lines), indent=1))
    else:
        report.show()
        print("the DeepGEMM path will run" if report.healthy else
              "the DeepGEMM path will not run here: see the lines marked x")
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
