# SPDX-License-Identifier: Apache-2.0
"""Each way to say no, once: exit code, one sentence, a hint, and nothing changed."""
import json
import os
import shutil
import subprocess
import sys

import pytest

from real_vllm import FP8_UTILS, PROJECT, git, snapshot, sources


def refused(apply, root, code, *said, flags=(), hint=True):
    """Run, expect a refusal with `said` in it and an unchanged tree; returns stderr."""
    before = snapshot(root) if root and os.path.isdir(root) else None
    assert apply(root, *flags) == code, apply.out + apply.err
    assert apply.err.startswith("error: ") and "Traceback" not in apply.err
    assert not hint or "\n\nhint: " in apply.err
    assert "\n" not in apply.err.split("\n\nhint: ")[0].replace("\n  ", "")
    for text in said:
        assert str(text) in apply.err
    if before is not None:
        assert snapshot(root) == before
    assert apply(root, *flags, "--json") == code
    assert json.loads(apply.out)["exit"] == code
    return apply.err


def test_not_a_folder(tmp_path, apply):
    refused(apply, tmp_path / "nowhere", 2, "does not exist")
    (tmp_path / "file").write_text("x")
    refused(apply, tmp_path / "file", 2, "is not a folder")


def test_empty_folder(tmp_path, apply):
    refused(apply, tmp_path, 2, "holds no vllm package", "--vllm-path")


def test_another_vllm(tmp_path, apply):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    refused(apply, tmp_path, 2, "no pin knows the vllm", "nearest is", FP8_UTILS)


def test_no_vllm_in_the_interpreter(tmp_path):
    run = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); "
                          "from patchset.cli import main; sys.exit(main([]))", str(PROJECT)],
                         cwd=tmp_path, capture_output=True, text=True,
                         env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert run.returncode == 2 and "finds no vllm" in run.stderr


def test_missing_and_truncated_files(wheel, apply):
    whole = (wheel / FP8_UTILS).read_bytes()
    (wheel / FP8_UTILS).unlink()
    refused(apply, wheel, 1, f"{FP8_UTILS}: missing", "force-reinstall")
    (wheel / FP8_UTILS).write_bytes(whole[:1000])
    refused(apply, wheel, 1, f"{FP8_UTILS}: edited")
    (wheel / FP8_UTILS).write_bytes(b"")
    refused(apply, wheel, 1, f"{FP8_UTILS}: edited")


def test_edited_checkout_lists_the_files(checkout, apply):
    for name in (FP8_UTILS, "vllm/envs.py"):
        with open(checkout / name, "a") as file:
            file.write("# mine\n")
    refused(apply, checkout, 1, f"{FP8_UTILS}: edited", "vllm/envs.py: edited", "git checkout")
    assert apply(checkout, "--status") == 1


def test_edited_after_apply(wheel, apply, overlay):
    apply(wheel)
    name = next(iter(overlay))
    with open(wheel / name, "a") as file:
        file.write("# mine\n")
    refused(apply, wheel, 1, name, "neither absent nor this overlay's")
    refused(apply, wheel, 1, name, flags=["--reverse"])


def test_crlf(wheel, apply):
    content = (wheel / FP8_UTILS).read_bytes()
    (wheel / FP8_UTILS).write_bytes(content.replace(b"\n", b"\r\n"))
    refused(apply, wheel, 1, "CRLF", "nothing was written", "autocrlf")


def test_already_upstream(tmp_path, apply):
    root = tmp_path / "site"
    shutil.copytree(sources("0.9.2"), root)
    refused(apply, root, 1, "already upstream", "0.9.2", "PR 19085", "19514")


@pytest.mark.parametrize("kind", ["file", "package"])
def test_symbolic_links(wheel, tmp_path, apply, kind):
    if kind == "file":
        shared = tmp_path / "cache.py"
        shutil.move(wheel / FP8_UTILS, shared)
        (wheel / FP8_UTILS).symlink_to(shared)
        refused(apply, wheel, 1, "symbolic link", shared)
    else:
        shutil.move(wheel / "vllm", tmp_path / "elsewhere")
        (wheel / "vllm").symlink_to(tmp_path / "elsewhere")
        refused(apply, wheel, 1, "symbolic link", "--vllm-path")


def test_no_git(wheel, apply, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(apply, wheel, 2, "git is not on the PATH")


def test_old_git(wheel, apply, monkeypatch, tmp_path):
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho git version 2.24.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    import git as gitpython
    monkeypatch.setattr(gitpython.Git, "GIT_PYTHON_GIT_EXECUTABLE", "git")
    refused(apply, wheel, 2, "2.24.1", "2.25 or newer")


def test_no_gitpython(wheel):
    run = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['git'] = None; sys.path.insert(0, "
         "sys.argv[2]); from patchset.cli import main; "
         "sys.exit(main(['--vllm-path', sys.argv[1]]))", str(wheel), str(PROJECT)],
        capture_output=True, text=True)
    assert run.returncode == 2 and "GitPython" in run.stderr
    assert "python -m pip install GitPython" in run.stderr and "Traceback" not in run.stderr


def test_status_needs_no_git_for_a_wheel(wheel, apply, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert apply(wheel, "--status") == 0


@pytest.fixture
def read_only(tmp_path):
    """Remounts a folder read-only on itself; root may write anywhere else."""
    mounted = []

    def mount(folder):
        for command in (["mount", "--bind", folder, folder],
                        ["mount", "-o", "remount,ro,bind", folder]):
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("this machine does not let the test mount a folder")
            mounted.append(folder)

    yield mount
    if mounted:
        subprocess.run(["umount", mounted[0]], check=True)


def test_read_only_tree(wheel, apply, read_only):
    read_only(wheel)
    refused(apply, wheel, 2, "not writable", "nothing was written")
    assert apply(wheel, "--check") == 0


def test_read_only_tree_that_is_applied(wheel, apply, read_only):
    apply(wheel)
    read_only(wheel)
    for flags in ([], ["--check"], ["--status"]):
        assert apply(wheel, *flags) == 0, apply.err
    assert apply(wheel, "--reverse") == 2


def test_unreadable_file(wheel, apply, monkeypatch):
    from pathlib import Path
    real = Path.read_bytes

    def read_bytes(self):
        if str(self).endswith("fp8_utils.py"):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)  # root reads everything
    assert apply(wheel) == 2 and "cannot be read: Permission denied" in apply.err


def test_broken_repository(checkout, apply):
    (checkout / ".git/HEAD").write_text("nonsense\n")
    assert apply(checkout) == 2 and "git cannot read the checkout" in apply.err


def test_unknown_flag_exits_2():
    run = subprocess.run([sys.executable, str(PROJECT / "apply.py"), "--frob"],
                         capture_output=True, text=True)
    assert run.returncode == 2 and "--frob" in run.stderr


def test_a_pin_with_wrong_ids_is_a_conflict(wheel, apply, monkeypatch, newest):
    import dataclasses

    import patchset.cli
    broken = dataclasses.replace(newest, overlay="0" * 40)
    monkeypatch.setattr(patchset.cli, "read_pins", lambda: [broken])
    before = snapshot(wheel)
    assert apply(wheel) == 3 and "is not the one pinned" in apply.err
    assert snapshot(wheel) == before


def test_a_patch_that_does_not_apply(wheel, apply, monkeypatch, newest, tmp_path):
    import dataclasses

    import patchset.cli
    patch = tmp_path / "linear-dispatch.patch"
    original = newest.folder / "linear-dispatch.patch"
    patch.write_text(original.read_text().replace("    output_shape = [", "    no_such_line = ["))
    patches = [patch if p.name == patch.name else p for p in newest.patches]
    monkeypatch.setattr(patchset.cli, "read_pins",
                        lambda: [dataclasses.replace(newest, patches=patches)])
    before = snapshot(wheel)
    assert apply(wheel) == 3
    assert "patch linear-dispatch.patch of pin v0.9.1 does not apply" in apply.err
    assert FP8_UTILS in apply.err and "hint:" in apply.err
    assert snapshot(wheel) == before


def test_tree_inside_another_repository(wheel, apply, newest):
    git(wheel.parent, "init", "-q")
    assert apply(wheel) == 0
    assert apply(wheel, "--status") == 0 and "state: applied" in apply.out
