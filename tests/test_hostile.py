# SPDX-License-Identifier: Apache-2.0
"""Hostile surroundings and input: git set-ups, environment, patches and pins."""
import dataclasses
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

import patchset.cli
from patchset.files import blob_id
from patchset.pins import read_pin
from patchset.refusals import CannotRun, Refusal

from real_vllm import FP8_UTILS, PROJECT, fill, git, snapshot


def ids(root, names):
    return {name: blob_id((root / name).read_bytes()) for name in names}


def run(root, *flags, **environment):
    return subprocess.run([sys.executable, str(PROJECT / "apply.py"), "--vllm-path", str(root),
                           *flags], capture_output=True, text=True,
                          env={**os.environ, **environment})


def round_trip(root, pin, tally, **environment):
    before = snapshot(root)
    for flags, wanted in (([], pin.result), (["--reverse"], pin.base)):
        done = run(root, *flags, **environment)
        assert done.returncode == 0, done.stderr
        assert ids(root, pin.base) == wanted
    assert snapshot(root) == before
    tally("hostile settings")


SETTINGS = ["core.autocrlf true", "core.autocrlf input", "core.eol crlf",
            "apply.whitespace fix", "apply.whitespace error", "apply.ignoreWhitespace change",
            "core.fileMode false", "core.hooksPath /nowhere", "diff.external /bin/false",
            "diff.noprefix true", "diff.mnemonicPrefix true", "color.ui always",
            "core.safecrlf true", "init.templateDir /nowhere", "core.quotePath true",
            "i18n.commitEncoding latin-1", "core.compression 0", "gc.auto 1",
            "core.fsmonitor /bin/false", "core.attributesFile /nowhere", "init.defaultBranch x",
            "extensions.worktreeConfig true", "diff.renames copies", "core.abbrev 4"]


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_users_configuration(request, newest, kind, setting, tmp_path, tally):
    root = request.getfixturevalue(kind)
    home = tmp_path / "home"
    home.mkdir()
    key, value = setting.split(" ", 1)
    section, name = key.split(".")
    (home / ".gitconfig").write_text(f"[{section}]\n\t{name} = {value}\n")
    round_trip(root, newest, tally, HOME=str(home), XDG_CONFIG_HOME=str(home))


@pytest.mark.parametrize("setting", ["core.autocrlf true", "apply.whitespace fix",
                                     "core.fileMode false", "core.fsmonitor /bin/false",
                                     "core.hooksPath /nowhere"])
def test_repositorys_own_configuration(checkout, newest, setting, tally):
    git(checkout, "config", *setting.split(" ", 1))
    round_trip(checkout, newest, tally)


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_git_variables_exported(request, newest, kind, tmp_path, tally):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    before = snapshot(other)
    round_trip(request.getfixturevalue(kind), newest, tally, GIT_DIR=str(other / ".git"),
               GIT_WORK_TREE=str(other), GIT_INDEX_FILE=str(other / "index"),
               GIT_OBJECT_DIRECTORY=str(other / "objects"), GIT_CONFIG_COUNT="1",
               GIT_CONFIG_KEY_0="apply.whitespace", GIT_CONFIG_VALUE_0="fix")
    assert snapshot(other) == before


def test_hooks_and_attributes(checkout, newest, tally, tmp_path):
    for hook in ("post-checkout", "pre-commit", "post-index-change", "reference-transaction"):
        path = checkout / ".git/hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\nexit 1\n")
        path.chmod(0o755)
    (checkout / ".git/info").mkdir(exist_ok=True)
    (checkout / ".git/info/attributes").write_text("*.py text eol=crlf\n")
    round_trip(checkout, newest, tally)
    assert not (tmp_path / "hook-ran").exists()


def test_other_owner(checkout, newest, tally):
    if os.geteuid():
        pytest.skip("only root can give files away")
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 12345, 12345)
    round_trip(checkout, newest, tally)
    assert {p.stat().st_uid for p in (checkout / "vllm").rglob("*.py")} == {12345}


def test_worktree_submodule_and_shallow_clone(checkout, newest, tmp_path, tally):
    git(checkout, "worktree", "add", "-q", str(tmp_path / "worktree"), "v0.9.1")
    round_trip(tmp_path / "worktree", newest, tally)
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add",
        str(checkout), "vllm-src")
    round_trip(outer / "vllm-src", newest, tally)
    git(tmp_path, "clone", "-q", "--depth", "1", "--branch", "v0.9.1", f"file://{checkout}",
        "shallow")
    round_trip(tmp_path / "shallow", newest, tally)


def test_sparse_checkout(checkout, newest, tmp_path, tally):
    git(tmp_path, "clone", "-q", "--sparse", str(checkout), "sparse")
    git(tmp_path / "sparse", "sparse-checkout", "set", "vllm")
    round_trip(tmp_path / "sparse", newest, tally)
    git(tmp_path, "clone", "-q", "--sparse", str(checkout), "sparser")
    git(tmp_path / "sparser", "sparse-checkout", "set", "vllm/v1")
    assert run(tmp_path / "sparser").returncode == 1  # the files to patch are not there


def test_checkout_and_wheel_inside_another_repository(newest, tmp_path, tally):
    outer = tmp_path / "project"
    (outer / "venv/site-packages").mkdir(parents=True)
    git(outer, "init", "-q")
    fill(outer / "venv/site-packages", newest)
    round_trip(outer / "venv/site-packages", newest, tally)
    (outer / ".gitignore").write_text("venv/\n")
    round_trip(outer / "venv/site-packages", newest, tally)


def test_index_and_refs_of_a_checkout_are_left_alone(checkout, apply):
    before = {p: p.read_bytes() for p in (checkout / ".git").rglob("*") if p.is_file()}
    assert apply(checkout) == 0 and apply(checkout, "--reverse") == 0
    assert {p: p.read_bytes() for p in (checkout / ".git").rglob("*") if p.is_file()} == before


def test_nothing_outside_the_target_is_written(wheel, tmp_path):
    """Every file opened for writing, renamed or removed is in the target or temporary."""
    watch = textwrap.dedent("""\
        import os, sys, tempfile
        seen = []
        def hook(event, arguments):
            if event == 'open' and isinstance(arguments[0], str) and (
                    arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                seen.append(arguments[0])
            elif event in ('os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.chmod',
                           'os.link', 'os.symlink', 'os.truncate'):
                seen.extend(a for a in arguments if isinstance(a, (str, os.PathLike)))
        sys.dont_write_bytecode = True
        sys.path.insert(0, sys.argv[1])
        from patchset.cli import main
        import git
        sys.addaudithook(hook)
        codes = [main(['--vllm-path', sys.argv[2], *f]) for f in ([], ['--reverse'])]
        allowed = (os.path.realpath(sys.argv[2]), os.path.realpath(tempfile.gettempdir()),
                   '/dev/null')
        bad = [p for p in map(str, seen) if os.path.isabs(p)
               and not os.path.realpath(p).startswith(allowed)]
        print(codes, bad, len(seen))
        """)
    home = tmp_path / "home"
    home.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = snapshot(tmp_path)
    done = subprocess.run([sys.executable, "-c", watch, str(PROJECT), str(wheel)],
                          capture_output=True, text=True, cwd=home,
                          env={**os.environ, "HOME": str(home), "TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    codes, rest = done.stdout.splitlines()[-1].split("] ", 1)
    assert codes == "[0, 0" and rest.startswith("[] ")
    assert snapshot(tmp_path) == before  # home, the temporary folder, and the target again


@pytest.fixture
def mine(tmp_path, newest):
    """A copy of the newest pin's folder, to be damaged."""
    folder = tmp_path / newest.name
    shutil.copytree(newest.folder, folder)
    return folder


@pytest.mark.parametrize("old,new", [
    ('wheels = ["0.9.1"]', "wheels = 3"), ('wheels = ["0.9.1"]', "wheels = [1, 2]"),
    ("commits = [", "commits = 4 #"), ("[base]", "[foundation]"),
    ('"vllm/envs.py" = "', '"vllm/envs.py" = "xyz'), ('"vllm/envs.py"', '"../envs.py"'),
    ('"vllm/envs.py"', '"/etc/passwd"'), ('"vllm/envs.py"', '"vllm/../../x"'),
    ('"vllm/envs.py"', '"setup.py"'), ("overlay = \"", "overlay = \"zz"), ("ends", "end"),
    ("wheels = ", "wheels = [ = "), ("[result]", "[result]\n\"vllm/x.py\" = \"" + "0" * 40 + '"')])
def test_pin_files_with_wrong_content(mine, old, new, tally):
    text = (mine / "pin.toml").read_text()
    assert old in text
    (mine / "pin.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(CannotRun):
        read_pin(mine)
    tally("bad pins and patches")


def test_other_broken_pins(mine, tally):
    (mine / "pin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CannotRun, match="cannot be read"):
        read_pin(mine)
    (mine / "pin.toml").unlink()
    with pytest.raises(CannotRun, match="cannot be read"):
        read_pin(mine)


@pytest.mark.parametrize("series,why", [(b"gone.patch\n", "not there"),
                                        (b"../x.patch\n", "not there"), (b"\xff\n", "read")])
def test_series_with_wrong_content(mine, series, why, tally):
    (mine / "series").write_bytes(series)
    with pytest.raises(CannotRun, match=why):
        read_pin(mine)
    tally("bad pins and patches")


def escape(text):
    return text.replace("vllm/envs.py", "../envs.py")


DAMAGE = {
    "leaves the tree": escape,
    "absolute path": lambda t: t.replace("b/vllm/envs.py", "b//etc/passwd"),
    "another file": lambda t: t.replace("vllm/envs.py", "vllm/config.py"),
    "non-UTF-8 name": lambda t: t.replace("b/vllm/envs.py", "b/vllm/\udcff.py"),
    "binary": lambda t: t + "diff --git a/vllm/x b/vllm/x\nGIT binary patch\nliteral 1\n",
    "CRLF": lambda t: t.replace("\n", "\r\n"),
    "cut short": lambda t: t[:-40],
    "mode change": lambda t: t.replace("index ", "old mode 100644\nnew mode 100755\nindex ", 1),
    "symbolic link": lambda t: t + "diff --git a/vllm/l b/vllm/l\nnew file mode 120000\n"
                                   "--- /dev/null\n+++ b/vllm/l\n@@ -0,0 +1 @@\n+/etc\n",
    "rename": lambda t: t + "diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 100%\n"
                            "rename from vllm/a.py\nrename to ../b.py\n",
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_patches_are_not_trusted(wheel, apply, newest, mine, monkeypatch, damage, tally):
    patch = mine / "linear-switch.patch"
    patch.write_text(DAMAGE[damage](patch.read_text()), errors="surrogateescape", newline="")
    pin = dataclasses.replace(newest, folder=mine,
                              patches=[mine / p.name for p in newest.patches])
    monkeypatch.setattr(patchset.cli, "read_pins", lambda: [pin])
    before = snapshot(wheel.parent)
    assert apply(wheel) in (2, 3), damage
    assert apply.err.startswith("error: ") and "Traceback" not in apply.err
    assert snapshot(wheel.parent) == before
    tally("bad pins and patches")


def test_huge_and_odd_targets(wheel, apply, tally):
    path = wheel / FP8_UTILS
    content = path.read_bytes()
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    assert apply(wheel) == 2 and "is not a source file" in apply.err
    path.unlink()
    os.mkfifo(path)
    assert apply(wheel) == 2 and "is not a source file" in apply.err
    path.unlink()
    path.mkdir()
    assert apply(wheel) == 2 and "is not a source file" in apply.err
    path.rmdir()
    path.write_bytes(content)
    folder = (wheel / "vllm/model_executor/layers/quantization")
    shutil.move(folder, wheel / "elsewhere")
    folder.symlink_to(wheel / "elsewhere")
    assert apply(wheel) == 1 and "symbolic link" in apply.err
    tally("bad targets", 4)


def test_overlay_that_leaves_the_package(tmp_path):
    from patchset.pins import overlay_files
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.py").write_text("")
    with pytest.raises(Refusal, match="outside the vllm package"):
        overlay_files(tmp_path)
