# SPDX-License-Identifier: Apache-2.0
"""The kernel cache: one compile, whole files, many processes, no toolkit.

A script stands in for nvcc and writes a small ELF file; where nvcc and DeepGEMM
are installed one kernel is compiled for real.
"""
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from real_vllm import PROJECT

sys.path[:0] = [str(PROJECT / "overlay/vllm/model_executor/layers/quantization")]

import cpu_path  # noqa: E402

cpu_path.stand_in_deep_gemm()

import deep_gemm  # noqa: E402

from deep_gemm_linear import kernel_cache  # noqa: E402
from deep_gemm_linear.__main__ import main as kernels_main  # noqa: E402
from deep_gemm_linear.kernel_cache import KernelCache, KernelSpec  # noqa: E402

STAND_IN = PROJECT / "tests/stand_in/deep_gemm/include"
SPECS = [KernelSpec(128, 512, 64, 8 * i, 4) for i in range(2, 12)]


def elf(body=b"kernel" * 200):
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<QQ", head, 32, 0, 64)
    struct.pack_into("<4H", head, 54, 0, 0, len(body), 1)
    return bytes(head) + body


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A compiler that logs each run; `version` and `fail` files steer it."""
    folder = tmp_path / "cuda/bin"
    folder.mkdir(parents=True)
    (folder / "version").write_text("12.8")
    (folder / "blob").write_bytes(elf())
    script = folder / "nvcc"
    script.write_text(textwrap.dedent(f"""\
        #!/bin/sh
        here={folder}
        if [ "$1" = --version ]; then echo "release $(cat $here/version),"; exit 0; fi
        if [ -e $here/fail ]; then echo "error: no such thing" >&2; exit 1; fi
        case $1 in *probe.cu) ;; *) echo "$1" >> $here/log ;; esac
        sleep 0.05
        head -c 300 $here/blob > "$3"; sleep 0.02; cat $here/blob > "$3"
        """))
    script.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(script))
    kernel_cache._inspect.cache_clear()
    yield folder
    kernel_cache._inspect.cache_clear()


def runs(nvcc):
    return (nvcc / "log").read_text().splitlines() if (nvcc / "log").exists() else []


@pytest.fixture
def cache(tmp_path):
    return KernelCache(str(STAND_IN), [tmp_path / "cache"])


def no_leftovers(root):
    return [p.name for p in root.rglob("*") if p.is_file() and p.suffix not in (".cubin", ".lock")]


def test_compiles_once_and_finds_again(cache, nvcc, tmp_path):
    assert cache.find(SPECS[0]) is None
    path = cache.get(SPECS[0])
    assert cache.get(SPECS[0]) == path == cache.find(SPECS[0])
    assert path.read_bytes() == elf() and path.parent.name == "nvcc-12.8"
    assert len(runs(nvcc)) == cache.compiled == 1
    assert not no_leftovers(tmp_path / "cache")


def test_runtime_without_a_toolkit(cache, nvcc, monkeypatch):
    path = cache.get(SPECS[0])
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/nowhere/nvcc")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "access", lambda p, mode: False)
    assert kernel_cache.find_compiler()[0] is None
    assert cache.find(SPECS[0]) == path
    with pytest.raises(kernel_cache.CompileError, match="no nvcc"):
        cache.get(SPECS[1])


@pytest.mark.parametrize("version,usable", [
    ("12.2", False), ("11.8", False), ("9.0", False), ("12.3", True), ("12.10", True),
    ("13.0", True)])
def test_versions_are_compared_as_numbers(nvcc, version, usable):
    (nvcc / "version").write_text(version)
    compiler, why = kernel_cache.find_compiler()
    assert (compiler is not None) == usable
    assert usable or f"is CUDA {version}" in why


def test_any_compilers_kernel_serves_and_ones_own_comes_first(cache, nvcc):
    old = cache.get(SPECS[0])
    (nvcc / "version").write_text("13.0")
    kernel_cache._inspect.cache_clear()
    assert cache.get(SPECS[0]) == old and len(runs(nvcc)) == 1
    new = old.parent.parent / "nvcc-13.0" / old.name
    new.parent.mkdir()
    shutil.copy(old, new)
    assert cache.find(SPECS[0]) == new


def test_other_sources_are_another_key(tmp_path, nvcc, cache):
    include = tmp_path / "include"
    shutil.copytree(STAND_IN, include)
    with open(include / "deep_gemm/fp8_gemm.cuh", "a") as file:
        file.write("// changed\n")
    assert KernelCache(str(include), [tmp_path]).sources != cache.sources
    shutil.rmtree(include / "cute")
    with pytest.raises(FileNotFoundError, match="no cute headers"):
        kernel_cache.sources_key(str(include) + "/.")


@pytest.mark.parametrize("content", [b"", elf()[:200], b"not a kernel" * 100])
def test_broken_files_count_as_missing_and_are_replaced(cache, nvcc, content):
    path = cache.get(SPECS[0])
    path.write_bytes(content)
    assert cache.find(SPECS[0]) is None
    assert cache.get(SPECS[0]).read_bytes() == elf() and len(runs(nvcc)) == 2


def test_failure_is_told_and_leaves_nothing(cache, nvcc, tmp_path):
    (nvcc / "fail").touch()
    with pytest.raises(kernel_cache.CompileError, match="no such thing"):
        cache.get(SPECS[0])
    assert cache.find(SPECS[0]) is None and not no_leftovers(tmp_path / "cache")


def test_roots(monkeypatch, tmp_path):
    for name in ("DG_JIT_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache.roots()[0] == tmp_path / ".cache/vllm/deep_gemm_linear"
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/v")
    assert kernel_cache.roots()[0] == Path("/v/deep_gemm_linear")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/d")
    assert kernel_cache.roots()[0] == Path("/d/deep_gemm_linear")


def test_unwritable_first_folder(nvcc, tmp_path):
    (tmp_path / "file").write_text("a file, so no folder can be made in it")
    cache = KernelCache(str(STAND_IN), [tmp_path / "file/x", tmp_path / "second"])
    assert (tmp_path / "second") in cache.get(SPECS[0]).parents
    with pytest.raises(PermissionError, match="no kernel cache can be written"):
        KernelCache(str(STAND_IN), [tmp_path / "file/x"]).get(SPECS[1])


def _fill(folder, order):
    cache = KernelCache(str(STAND_IN), [Path(folder)])
    for spec in order:
        cache.get(spec)


def test_eight_processes_one_compile_a_kernel(nvcc, tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill, args=(tmp_path / "cache", SPECS[i:] + SPECS[:i]))
               for i in range(8)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert [w.exitcode for w in workers] == [0] * 8
    names = [Path(line).name.split(".")[1] for line in runs(nvcc)]
    assert sorted(names) == sorted(spec.name for spec in SPECS)


def test_killed_at_random_points_never_leaves_a_broken_cache(nvcc, tmp_path, request):
    times = 200 if request.config.getoption("--nightly") else 40
    context, chance = multiprocessing.get_context("fork"), random.Random(1)
    for _ in range(times):
        worker = context.Process(target=_fill, args=(tmp_path / "cache", SPECS))
        worker.start()
        time.sleep(chance.uniform(0, 0.25))
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        for path in (tmp_path / "cache").rglob("n*.cubin"):
            assert path.read_bytes() == elf()
        if len(list((tmp_path / "cache").rglob("n*.cubin"))) == len(SPECS):
            shutil.rmtree(tmp_path / "cache")
    _fill(tmp_path / "cache", SPECS)


CONFIG = dict(model_type="qwen3", hidden_size=512, intermediate_size=1024,
              num_attention_heads=8, num_key_value_heads=8, head_dim=64,
              quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def cli(capsys, *arguments):
    capsys.readouterr()
    code = kernels_main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_precompile_resumes_and_carries(nvcc, config, tmp_path, capsys):
    out = tmp_path / "baked"
    bake = ["precompile", config, "--sms", 132, "--max-m", 600, "--jobs", 2, "--out", out]
    code, said, _ = cli(capsys, *bake, "--dry-run")
    assert code == 0 and ", 0 of them in " in said and not runs(nvcc)
    code, said, err = cli(capsys, *bake)
    assert code == 0, err
    made = sorted(out.rglob("*.cubin"))
    assert f"{len(made)} kernels ready, {len(made)} compiled" in said
    made[0].unlink()
    code, said, _ = cli(capsys, *bake)
    assert f"{len(made)} kernels ready, 1 compiled" in said
    (out / made[0].relative_to(out)).write_bytes(b"")
    code, said, _ = cli(capsys, "list", "--out", out)
    assert f"{len(made)} kernels, 1 broken" in said
    code, said, _ = cli(capsys, "verify", "--out", out)
    assert "1 broken and removed" in said
    cli(capsys, *bake)
    packed = tmp_path / "kernels.tar"
    assert cli(capsys, "pack", packed, "--out", out)[0] == 0
    first = packed.read_bytes()
    assert cli(capsys, "pack", packed, "--out", out)[0] == 0 and packed.read_bytes() == first
    code, said, _ = cli(capsys, "unpack", packed, "--out", tmp_path / "elsewhere")
    assert f"{len(made)} kernels unpacked" in said
    assert sorted(p.relative_to(tmp_path / "elsewhere") for p in
                  (tmp_path / "elsewhere").rglob("*.cubin")) == [p.relative_to(out) for p in made]


def test_precompile_refusals(nvcc, config, tmp_path, capsys, monkeypatch):
    code, _, err = cli(capsys, "precompile", tmp_path / "none.json")
    assert code == 2 and "no file" in err and "hint:" in err
    (tmp_path / "bad.json").write_text("[")
    code, _, err = cli(capsys, "precompile", tmp_path / "bad.json")
    assert code == 2 and "cannot be read" in err
    code, _, err = cli(capsys, "precompile", config, "--tp-size", 3)
    assert code == 2 and "do not divide" in err
    (nvcc / "fail").touch()
    code, _, err = cli(capsys, "precompile", config, "--out", tmp_path / "x")
    assert code == 2 and "does not compile C++20: error: no such thing" in err
    assert not (tmp_path / "x").exists()
    (nvcc / "version").write_text("12.2")
    kernel_cache._inspect.cache_clear()
    code, _, err = cli(capsys, "precompile", config, "--out", tmp_path / "x")
    assert code == 2 and "12.2" in err and not (tmp_path / "x").exists()
    (tmp_path / "evil.tar").write_bytes(b"nonsense")
    code, _, err = cli(capsys, "unpack", tmp_path / "evil.tar", "--out", tmp_path / "x")
    assert code == 2 and "cannot be unpacked" in err


def test_unpack_stays_inside(tmp_path, capsys):
    import io
    import tarfile
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        entry = tarfile.TarInfo("../outside.cubin")
        entry.size = len(elf())
        archive.addfile(entry, io.BytesIO(elf()))
    code, _, err = cli(capsys, "unpack", tmp_path / "evil.tar", "--out", tmp_path / "x")
    assert code == 2 and "not a packed kernel cache" in err
    assert not (tmp_path / "outside.cubin").exists()


def test_real_compiler_with_an_old_host_compiler(tmp_path, monkeypatch):
    kernel_cache._inspect.cache_clear()
    compiler, why = kernel_cache.find_compiler()
    if compiler is None:
        pytest.skip(why)
    assert kernel_cache.toolchain_error(compiler) is None
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho 'error: unrecognized option -std=c++20' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", f"-ccbin {old}")
    assert "c++20" in kernel_cache.toolchain_error(compiler)


@pytest.mark.parametrize("spec,entry", [
    (KernelSpec(128, 512, 64, 16, 4), "fp8_gemm_kernel"),
    (KernelSpec(128, 640, 64, 40, 3, 2), "overlapped_gemm"),
    (KernelSpec(128, 512, 128, 64, 4, 1), "overlapped_gemm")])
def test_real_compiler(tmp_path, spec, entry):
    kernel_cache._inspect.cache_clear()
    compiler, why = kernel_cache.find_compiler()
    include = Path(deep_gemm.__path__[0]) / "include"
    if compiler is None:
        pytest.skip(why)
    if include == STAND_IN:
        pytest.skip("DeepGEMM is not installed")
    cache = KernelCache(str(include), [tmp_path])
    path = cache.get(spec)
    assert kernel_cache.is_whole(path.read_bytes()) and path.stat().st_size > 10_000
    text = subprocess.run(["strings", path], capture_output=True, text=True).stdout
    assert not text or entry in text
    # Products that cannot be under way together would be reported here.
    source = tmp_path / "kernel.cu"
    source.write_text(kernel_cache.source_text(spec))
    run = subprocess.run([compiler.path, source, "-o", tmp_path / "again.cubin", f"-I{include}",
                          *kernel_cache.FLAGS], capture_output=True, text=True)
    assert run.returncode == 0 and "wgmma" not in run.stderr, run.stderr
