# SPDX-License-Identifier: Apache-2.0
"""Installed wheels: RECORD, bytecode, links, reinstall, upgrade of vLLM and of the overlay."""
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

import patchset.cli
from patchset.files import blob_id
from patchset.record import _line, find_record, rewritten

from real_vllm import FP8_UTILS, PINS, fill, snapshot


def make_wheel(folder, pin, version):
    """A small wheel with the real files a pin touches, built without any backend."""
    tree = folder / f"tree-{version}"
    tree.mkdir(parents=True)
    fill(tree, pin)
    (tree / "vllm/__init__.py").write_text("")
    info = tree / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
                                "Tag: py3-none-any\n")
    names = sorted(p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file())
    (info / "RECORD").write_bytes(b"\n".join(_line(n, (tree / n).read_bytes()) for n in names)
                                  + f"\n{info.name}/RECORD,,\n".encode())
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(p for p in tree.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(tree).as_posix())
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return {v: make_wheel(folder, PINS[p], v) for v, p in (("0.9.1", "v0.9.1"),
                                                           ("0.9.0.1", "v0.9.0"))}


class Environment:
    def __init__(self, folder):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin/python"
        self.site = next((folder / "lib").glob("python*")) / "site-packages"

    def pip(self, *arguments):
        return subprocess.run([sys.executable, "-m", "pip", "--python", str(self.python),
                               "--disable-pip-version-check", *map(str, arguments)], check=True,
                              capture_output=True, text=True).stdout

    def run(self, code):
        return subprocess.run([str(self.python), "-c", code], check=True, capture_output=True,
                              text=True).stdout.strip()


@pytest.fixture
def environment(tmp_path, wheels):
    made = Environment(tmp_path / "venv")
    made.pip("install", "--no-deps", "--no-index", wheels["0.9.1"])
    return made


def record_is_true(site):
    """Every hashed line of RECORD matches its file; returns the paths it lists."""
    names = []
    for line in (site / find_record(site)).read_bytes().splitlines():
        name, digest, _ = line.decode().rsplit(",", 2)
        names.append(name)
        if digest:
            assert _line(name, (site / name).read_bytes()) == line, name
    return names


def test_record_stays_true_and_comes_back(environment, apply, overlay):
    site = environment.site
    before = (site / find_record(site)).read_bytes()
    assert apply(site) == 0, apply.err
    assert set(overlay) <= set(record_is_true(site))
    assert environment.run("import importlib.metadata as m; print(sum(not f.locate().exists() "
                           "for f in m.files('vllm') if f.suffix != '.pyc'))") == "0"
    assert "No broken requirements" in environment.pip("check")
    assert apply(site, "--reverse") == 0
    assert (site / find_record(site)).read_bytes() == before


def test_uninstall_leaves_nothing(environment, apply):
    assert apply(environment.site) == 0
    environment.run("import vllm.model_executor")  # a namespace package, with bytecode
    environment.pip("uninstall", "-y", "vllm")
    assert not (environment.site / "vllm").exists()
    assert environment.run("import importlib.util as u; print(u.find_spec('vllm'))") == "None"


def test_force_reinstall_is_seen_and_repaired(environment, apply, wheels):
    site = environment.site
    before = snapshot(site / "vllm")
    assert apply(site) == 0
    # Leave the added files as a reinstall does that trusted an older RECORD.
    record = site / find_record(site)
    record.write_bytes(b"".join(line for line in record.read_bytes().splitlines(True)
                                if b"deep_gemm_linear" not in line))
    environment.pip("install", "--force-reinstall", "--no-deps", "--no-index", wheels["0.9.1"])
    assert apply(site, "--status") == 1
    assert "vllm was reinstalled or upgraded under the overlay" in apply.out
    assert apply(site) == 0 and "the run finishes it" in apply.out
    record_is_true(site)
    assert apply(site, "--status") == 0
    assert apply(site, "--reverse") == 0
    after = snapshot(site / "vllm")
    assert {k: v for k, v in after.items() if "pycache" not in k} == \
        {k: v for k, v in before.items() if "pycache" not in k}


def test_upgrade_of_vllm_under_the_overlay(environment, apply, wheels):
    site = environment.site
    assert apply(site) == 0
    kept = {p: p.read_bytes() for p in (site / "vllm").rglob("*.py") if "deep_gemm" in str(p)}
    environment.pip("install", "--no-deps", "--no-index", wheels["0.9.0.1"])
    assert apply(site, "--status") == 0 and "pin v0.9.0" in apply.out  # pip removed all of it
    for path, content in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert apply(site, "--status") == 1
    assert "pin v0.9.0" in apply.out and "reinstalled or upgraded" in apply.out
    assert apply(site) == 0
    record_is_true(site)


def test_crash_between_record_and_files_is_repaired(environment, apply):
    site = environment.site
    before = (site / find_record(site)).read_bytes()
    apply(site)
    (site / find_record(site)).write_bytes(before)
    assert apply(site, "--status") == 1 and "half-applied" in apply.out
    assert apply(site) == 0
    record_is_true(site)


def test_record_lines_of_other_forms_are_left_alone():
    record = b"vllm/envs.py,,\r\nother,sha256=x,1\r\n"
    base, result = {"vllm/envs.py": b"a"}, {"vllm/envs.py": b"b"}
    assert rewritten(record, (base, result), result) == record


def test_hard_links_keep_the_old_content(wheel, apply, tmp_path):
    os.link(wheel / FP8_UTILS, tmp_path / "cache.py")
    old = (tmp_path / "cache.py").read_bytes()
    assert apply(wheel) == 0
    assert (tmp_path / "cache.py").read_bytes() == old != (wheel / FP8_UTILS).read_bytes()


@pytest.mark.parametrize("mode", ["TIMESTAMP", "CHECKED_HASH", "UNCHECKED_HASH"])
def test_stale_bytecode_never_runs(wheel, apply, mode, tmp_path):
    """Bytecode of each kind, compiled before; afterwards the new source decides."""
    code = textwrap.dedent("""\
        import py_compile, sys
        py_compile.compile(sys.argv[1], doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode[sys.argv[2]])
        """)
    target = wheel / "vllm/envs.py"
    subprocess.run([sys.executable, "-c", code, str(target), mode], check=True)
    read = ("import importlib.util as u, sys\n"
            "s = u.spec_from_file_location('envs', sys.argv[1]); m = u.module_from_spec(s)\n"
            "s.loader.exec_module(m); print('VLLM_USE_DEEP_GEMM_LINEAR' in "
            "m.environment_variables)\n")

    def has_switch():
        return subprocess.run([sys.executable, "-c", read, str(target)], check=True,
                              capture_output=True, text=True).stdout.strip()

    assert importlib.util.cache_from_source(str(target))
    assert has_switch() == "False"
    apply(wheel)
    assert has_switch() == "True"
    subprocess.run([sys.executable, "-c", code, str(target), mode], check=True)
    apply(wheel, "--reverse")
    assert has_switch() == "False"


@pytest.fixture
def released(monkeypatch, tmp_path, overlay, newest):
    """The present overlay as release 0.1.0, and a changed one as the present."""
    history = tmp_path / "history/0.1.0"
    import shutil
    shutil.copytree(newest.folder, history / newest.name)
    (history / "added").write_text("".join(f"{blob_id(c)} {n}\n" for n, c in overlay.items()))
    changed = dict(overlay)
    first = next(n for n in overlay if n.endswith("/plan.py"))
    changed[first] = overlay[first] + b"# newer\n"
    gone = next(n for n in overlay if n.endswith("/shapes.py"))
    del changed[gone]
    changed[first.replace("plan.py", "brand_new.py")] = b"# new file\n"
    pin_id = _overlay_id(changed)
    import dataclasses
    new_pin = dataclasses.replace(newest, overlay=pin_id)

    def present():
        monkeypatch.setattr(patchset.cli, "overlay_files", lambda: changed)
        monkeypatch.setattr(patchset.cli, "read_pins", lambda: [new_pin])
        monkeypatch.setattr(patchset.cli, "__version__", "0.2.0")
        from patchset.pins import read_history
        monkeypatch.setattr(patchset.cli, "read_history",
                            lambda: read_history(tmp_path / "history"))

    return present, changed, gone


def _overlay_id(files):
    from patchset.git import IsolatedGit
    with IsolatedGit() as git:
        git.run("init", "-q", "--bare", ".")
        return git.write_index(files, "i")


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_an_older_overlay_is_brought_up_in_one_run(request, apply, released, kind):
    root = request.getfixturevalue(kind)
    present, changed, gone = released
    before = snapshot(root)
    assert apply(root) == 0
    present()
    assert apply(root, "--status") == 1 and "applied by overlay 0.1.0, this is 0.2.0" in apply.out
    assert apply(root, "--check") == 0 and "would be applied" in apply.out
    assert apply(root) == 0, apply.err
    assert all((root / n).read_bytes() == c for n, c in changed.items())
    assert not (root / gone).exists()
    assert apply(root, "--status") == 0
    if kind == "wheel":
        record_is_true(root) if len(list(root.glob("vllm/*"))) > 50 else None
    assert apply(root, "--reverse") == 0
    assert snapshot(root) == before


def test_an_older_overlay_can_be_reversed_by_the_new_one(wheel, apply, released):
    before = snapshot(wheel)
    apply(wheel)
    released[0]()
    assert apply(wheel, "--reverse") == 0, apply.err
    assert snapshot(wheel) == before


def test_a_newer_overlay_is_refused_by_name(wheel, apply, overlay):
    apply(wheel)
    init = next(n for n in overlay if n.endswith("deep_gemm_linear/__init__.py"))
    text = (wheel / init).read_text()
    (wheel / init).write_text(re.sub(r'__version__ = ".*"', '__version__ = "9.1.0"', text))
    before = snapshot(wheel)
    assert apply(wheel) == 1 and "overlay 9.1.0, newer than this" in apply.err
    assert snapshot(wheel) == before


def test_version_is_one(overlay):
    init = next(c for n, c in overlay.items() if n.endswith("deep_gemm_linear/__init__.py"))
    assert f'__version__ = "{patchset.__version__}"'.encode() in init
    text = (Path(patchset.__file__).parent.parent / "pyproject.toml").read_text()
    assert f'version = "{patchset.__version__}"' in text
