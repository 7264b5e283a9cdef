# SPDX-License-Identifier: Apache-2.0
"""The installer and the doctor on bad input; with DEEPGEMM_SOURCE also on good.

DEEPGEMM_SOURCE is a checkout of DeepGEMM at the pin with its CUTLASS submodule.
"""
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from real_vllm import PROJECT

INSTALL = PROJECT / "tools/install_deepgemm.sh"
SOURCE = os.environ.get("DEEPGEMM_SOURCE")


def install(*arguments, cwd=None, **environment):
    return subprocess.run(["bash", str(INSTALL), *map(str, arguments)], capture_output=True,
                          text=True, cwd=cwd, env={**os.environ, **environment})


def refused(done, code, *said):
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and "\n\nhint: " in done.stderr
    for text in said:
        assert text in done.stderr


@pytest.fixture
def environment(tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    return tmp_path / "env/bin/python"


def site_of(python):
    return Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()"
                                "['purelib'])"], capture_output=True, text=True).stdout.strip())


def test_usage():
    refused(install("--frob"), 2, "unknown argument --frob")
    refused(install("--source"), 2, "--source needs a value")
    refused(install("--no-install"), 2, "would do nothing")
    refused(install("--python", "/nowhere/python"), 2, "no such Python")
    assert install("--help").returncode == 0 and "--wheel-dir" in install("--help").stdout


def test_no_git_and_no_network(environment, tmp_path):
    refused(install("--python", environment, "--repository", "file:///nowhere/DeepGEMM"), 2,
            "cannot be cloned", "--source DIR")
    only = tmp_path / "bin"
    only.mkdir()
    for name in ("bash", "dirname", "sed", "tail", "grep", "mktemp", "rm"):
        (only / name).symlink_to(shutil.which(name))
    refused(install("--python", environment, PATH=str(only)), 2, "git is not on the PATH")


def test_sources_that_are_not_the_pin(environment, tmp_path):
    refused(install("--python", environment, "--source", tmp_path / "none"), 2, "not a folder")
    (tmp_path / "dg/deep_gemm").mkdir(parents=True)
    (tmp_path / "dg/deep_gemm/__init__.py").write_text("")
    (tmp_path / "dg/setup.py").write_text("")
    refused(install("--python", environment, "--source", tmp_path / "dg"), 1,
            "not DeepGEMM at the pin", "CUTLASS submodule (cute) is missing",
            "git submodule update --init")
    assert not list(site_of(environment).glob("deep_gemm*"))


@pytest.mark.parametrize("kind", ["the PyPI package", "a later one"])
def test_another_deep_gemm_is_named_and_kept(environment, kind):
    package = site_of(environment) / "deep_gemm"
    package.mkdir()
    text = "" if kind == "the PyPI package" else "def fp8_gemm_nt(): pass\n"
    (package / "__init__.py").write_text(text)
    refused(install("--python", environment, "--source", "/nowhere"), 1,
            "another deep_gemm is installed", str(package), "--replace")
    assert (package / "__init__.py").read_text() == text


def test_a_package_of_that_name_in_the_working_folder_is_not_taken(environment, tmp_path):
    (tmp_path / "here/deep_gemm").mkdir(parents=True)
    (tmp_path / "here/deep_gemm/__init__.py").write_text("raise SystemExit('wrong one')")
    (tmp_path / "here/cuda.py").write_text("raise SystemExit('wrong one')")
    refused(install("--python", environment, "--repository", "file:///nowhere",
                    cwd=tmp_path / "here"), 2, "cannot be cloned")


@pytest.mark.skipif(not SOURCE, reason="DEEPGEMM_SOURCE is not set: no DeepGEMM sources here")
def test_wheel_from_source_and_damage(environment, tmp_path):
    done = install("--python", environment, "--source", SOURCE, "--wheel-dir", tmp_path / "w",
                   "--no-install")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "w").glob("deep_gemm-*.whl"))) == 1
    assert not list(site_of(environment).glob("deep_gemm*"))
    refused(install("--python", environment, "--source", SOURCE), 1, "No module named 'torch'")
    assert not list(site_of(environment).glob("deep_gemm*"))  # nothing half-installed
    shutil.copytree(SOURCE, tmp_path / "dg", ignore=shutil.ignore_patterns(".git"))
    with open(tmp_path / "dg/deep_gemm/jit/compiler.py", "a") as file:
        file.write("# edited\n")
    refused(install("--python", environment, "--source", tmp_path / "dg"), 1,
            "DeepGEMM's package is not the pinned one")
    shutil.rmtree(tmp_path / "dg/third-party/cutlass/include/cute")
    refused(install("--python", environment, "--source", tmp_path / "dg"), 1, "cute) is missing")


def in_a_mount(script, *arguments, **environment):
    """Run a shell script that may mount, unseen by anyone else."""
    allowed = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                             capture_output=True)
    if allowed.returncode:
        pytest.skip("mounting is not allowed here")
    return subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", *map(str, arguments)],
                          capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.skipif(not SOURCE, reason="DEEPGEMM_SOURCE is not set: no DeepGEMM sources here")
@pytest.mark.parametrize("room", ["1m", "12m", "30m"])
def test_disk_full_while_building(environment, tmp_path, room):
    (tmp_path / "small").mkdir()
    done = in_a_mount('mount -t tmpfs -o size=$1 tmpfs "$2" && shift 2 && bash "$@"', room,
                      tmp_path / "small", INSTALL, "--python", environment, "--source", SOURCE,
                      TMPDIR=str(tmp_path / "small"))
    assert done.returncode in (1, 2), done.stdout + done.stderr
    refused(done, done.returncode, "TMPDIR=/a/folder")
    assert not list(site_of(environment).glob("deep_gemm*"))


@pytest.mark.skipif(not SOURCE, reason="DEEPGEMM_SOURCE is not set: no DeepGEMM sources here")
def test_site_packages_that_cannot_be_written(environment, tmp_path):
    site = site_of(environment)
    done = in_a_mount('mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && '
                      'bash "$@"', site, INSTALL, "--python", environment, "--source", SOURCE)
    refused(done, 2, "the wheel cannot be installed", "Read-only file system")
    assert not list(site.glob("deep_gemm*"))


@pytest.mark.skipif(not SOURCE, reason="DEEPGEMM_SOURCE is not set: no DeepGEMM sources here")
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("buildah")
                    or not shutil.which("debootstrap"),
                    reason="needs root, buildah and debootstrap")
def test_image():
    done = subprocess.run(["bash", str(PROJECT / "ci/image.sh"), "--deepgemm", SOURCE],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_image_refusals():
    for flags, said in ((["--frob"], "unknown argument"), (["--deepgemm"], "needs a value")):
        done = subprocess.run(["bash", str(PROJECT / "ci/image.sh"), *flags],
                              capture_output=True, text=True)
        refused(done, 2, said)


def test_doctor_is_not_misled_by_the_working_folder(wheel, apply, tmp_path):
    apply(wheel)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("cuda.py", "deep_gemm.py", "torch.py"):
        (here / name).write_text("raise SystemExit('wrong one')")
    done = subprocess.run([sys.executable, str(PROJECT / "doctor.py"), "--no-gpu"], cwd=here,
                          capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(wheel)})
    assert "wrong one" not in done.stdout + done.stderr
    assert "+ overlay        applied" in done.stdout


def doctor(*flags, **environment):
    return subprocess.run([sys.executable, str(PROJECT / "doctor.py"), *flags],
                          capture_output=True, text=True, env={**os.environ, **environment})


def lines_of(done):
    return {line["what"]: line for line in json.loads(done.stdout)["lines"]}


def test_doctor_before_and_after(wheel, apply, tmp_path):
    there = dict(PYTHONPATH=str(wheel), DG_JIT_CACHE_DIR=str(tmp_path / "cache"))
    done = doctor("--json", "--no-gpu", **there)
    assert done.returncode == 1 and lines_of(done)["overlay"]["text"] == "pristine"
    assert "apply.py" in lines_of(done)["overlay"]["hint"]
    apply(wheel)
    found = lines_of(doctor("--json", "--no-gpu", **there))
    assert found["overlay"]["state"] == found["vllm"]["state"] == found["import"]["state"] == "ok"
    text = doctor("--no-gpu", **there).stdout
    assert "+ overlay        applied" in text
    with open(next((wheel / "vllm").rglob("plan.py")), "a") as file:
        file.write("# mine\n")
    assert lines_of(doctor("--json", "--no-gpu", **there))["overlay"]["text"] == "edited"


def test_doctor_names_what_is_wrong(tmp_path):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/__init__.py").write_text("raise ImportError('broken on purpose')")
    done = doctor("--json", "--no-gpu", PYTHONPATH=str(tmp_path), VLLM_USE_DEEP_GEMM_LINERA="1",
                  DG_JIT_NVCC_COMPILER="/nowhere", CUDA_HOME="/nowhere", CUDA_PATH="",
                  PATH="/nowhere")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["healthy"]
    texts = " ".join(line["text"] for line in found["lines"])
    assert "broken on purpose" in texts and "cutlass headers is missing" in texts
    assert "VLLM_USE_DEEP_GEMM_LINERA=1 is read by nothing here" in texts
    assert "Traceback" not in done.stdout + done.stderr
    assert all(line["hint"] for line in found["lines"] if line["state"] == "bad")
