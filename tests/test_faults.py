# SPDX-License-Identifier: Apache-2.0
"""A fault at every write step of apply, reverse and upgrade, then the next run.

After each fault every file is old or new by content, and for a fault that raises
the whole tree is; after the next run the tree is what was asked. In CI one point in
seven, with --nightly all.
"""
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_packages import released  # noqa: F401

import patchset.cli
from patchset.cli import main
from patchset.refusals import CannotRun, Refusal
from patchset.write import Interrupted, write

from real_vllm import FP8_UTILS, PROJECT, fill, snapshot

RAISED = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}


class Steps:
    """Counts the calls that change a file system below `root`; faults at the n-th."""

    def __init__(self, root, at=None, fault=None, after=False):
        self.root, self.at, self.fault, self.after = str(root), at, fault, after
        self.count = 0

    def _step(self, real, *args, **kwargs):
        self.count += 1
        if self.count != self.at:
            return real(*args, **kwargs)
        if self.after:
            with contextlib.suppress(OSError):
                real(*args, **kwargs)
        if self.fault in RAISED:
            raise OSError(RAISED[self.fault], os.strerror(RAISED[self.fault]),
                          str(args[0] if args else self.root))
        os.kill(os.getpid(), getattr(signal, self.fault))
        return None if self.after else real(*args, **kwargs)

    @contextlib.contextmanager
    def watching(self):
        kept = []

        def wrap(owner, name):
            real = getattr(owner, name)
            kept.append((owner, name, real))
            setattr(owner, name, lambda *a, **k: self._step(real, *a, **k))

        for owner, names in ((os, ("replace", "fsync", "fchmod", "fchown", "fdopen")),
                             (tempfile, ("mkstemp",)),
                             (Path, ("mkdir", "rmdir", "unlink"))):
            for name in names:
                wrap(owner, name)
        try:
            yield self
        finally:
            for owner, name, real in kept:
                setattr(owner, name, real)


class Change:
    """One operation: the tree before it, what it writes, how the tool asks for it."""

    def __init__(self, folder, before, current, wanted, flags):
        self.folder, self.before = folder, before
        self.current, self.wanted, self.flags = current, wanted, flags

    def fresh(self):
        root = Path(tempfile.mkdtemp(dir=self.folder)) / "site"
        shutil.copytree(self.before, root)
        return root

    def state(self, root):
        """'old', 'new' or 'mixed' by content; anything else fails the test."""
        kinds = set()
        for name, old in self.current.items():
            path, new = root / name, self.wanted.get(name, old)
            content = path.read_bytes() if path.is_file() else None
            assert content in (old, new), f"{name} is torn"
            if old != new:
                kinds.add("old" if content == old else "new")
        return kinds.pop() if len(kinds) == 1 else "mixed"


@pytest.fixture(params=["apply", "reverse", "upgrade"])
def change(request, tmp_path, newest, released, monkeypatch, capsys):  # noqa: F811
    root = tmp_path / "start"
    root.mkdir()
    tree = fill(root, newest)
    info = next(tree.glob("vllm-*.dist-info"))
    (root / info.name).mkdir()
    shutil.copy(info / "RECORD", root / info.name)
    flags = ["--reverse"] if request.param == "reverse" else []
    if request.param != "apply":
        assert main(["--vllm-path", str(root)]) == 0
    if request.param == "upgrade":
        released[0]()
    asked = {}

    def capture(where, current, wanted):
        asked.update(current=dict(current), wanted=dict(wanted))
        return []

    with monkeypatch.context() as patched:
        patched.setattr(patchset.cli, "write", capture)
        assert main(["--vllm-path", str(root), *flags]) == 0
    return Change(tmp_path, root, asked["current"], asked["wanted"], flags)


def points(change, request):
    steps = Steps(change.folder)
    root = change.fresh()
    with steps.watching():
        write(root, change.current, change.wanted)
    assert change.state(root) == "new"
    stride = 1 if request.config.getoption("--nightly") else 7
    return range(1, steps.count + 1, stride)


@pytest.mark.parametrize("fault", list(RAISED))
def test_raised(change, fault, request, tally):
    for at in points(change, request):
        root = change.fresh()
        with Steps(root, at, fault).watching(), pytest.raises((CannotRun, Refusal)):
            write(root, change.current, change.wanted)
        assert change.state(root) == "old", at
        write(root, change.current, change.wanted)
        assert change.state(root) == "new"
        tally("faults raised (ENOSPC, EIO, EACCES)")
        shutil.rmtree(root.parent)


@pytest.mark.parametrize("after", [False, True])
def test_killed(change, after, request, tally, capsys):
    for at in points(change, request):
        root = change.fresh()
        child = os.fork()
        if child == 0:
            with Steps(root, at, "SIGKILL", after).watching(), contextlib.suppress(BaseException):
                write(root, change.current, change.wanted)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        change.state(root)
        assert main(["--vllm-path", str(root), *change.flags]) == 0, capsys.readouterr().err
        assert change.state(root) == "new"
        assert not list(root.rglob(".deepgemm-overlay-*"))
        tally("kills (SIGKILL before or after a step), repaired by the next run")
        shutil.rmtree(root.parent)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_finish_the_write(change, name, request, tally):
    for at in list(points(change, request))[::3]:
        root = change.fresh()
        with Steps(root, at, name).watching(), pytest.raises(Interrupted) as caught:
            write(root, change.current, change.wanted)
        assert caught.value.code == 130 and name in caught.value.sentence
        assert change.state(root) == "new"
        tally("Ctrl-C and SIGTERM in a write")
        shutil.rmtree(root.parent)


def test_leftover_temporary_files_do_not_matter(wheel, apply):
    before = snapshot(wheel)
    (wheel / FP8_UTILS).with_name(".deepgemm-overlay-abc").write_text("half")
    assert apply(wheel) == 0 and apply(wheel, "--reverse") == 0
    assert snapshot(wheel) == before


def test_disk_full(wheel, tmp_path, apply, tally):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk],
                      capture_output=True).returncode:
        pytest.skip("this machine does not let the test mount a tmpfs")
    try:
        shutil.copytree(wheel, disk / "site")
        filler = disk / "filler"
        before = snapshot(disk / "site")
        for room in range(0, 100_000, 12_288):
            with contextlib.suppress(OSError), open(filler, "wb") as file:
                while file.write(bytes(4096)):
                    file.flush()
            with open(filler, "r+b") as file:
                file.truncate(max(0, filler.stat().st_size - room))
            assert apply(disk / "site") == 2, room
            assert "No space left" in apply.err and "the tree is as it was" in apply.err
            assert snapshot(disk / "site") == before
            tally("disk full (tmpfs), by room left")
            filler.unlink()
        assert apply(disk / "site") == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_sixteen_at_once(wheel, apply, tally):
    before = snapshot(wheel)
    command = [sys.executable, str(PROJECT / "apply.py"), "--vllm-path", str(wheel)]
    running = [subprocess.Popen(command + (["--reverse"] if i % 2 else []),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for i in range(16)]
    for process in running:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        tally("racing processes")
    assert apply(wheel, "--status") == 0
    assert apply(wheel, "--reverse") == 0
    assert snapshot(wheel) == before


IMPORTER = """
import hashlib, importlib.util, select, sys
fp8, envs, old, new = sys.argv[1:]
print("ready", flush=True)
seen = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    content = open(fp8, "rb").read()
    assert hashlib.sha1(content).hexdigest() in (old, new), "torn"
    compile(content, fp8, "exec")
    spec = importlib.util.spec_from_file_location("envs", envs)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What the new file asks of envs must be there, unless the new file is gone again.
    if hashlib.sha1(content).hexdigest() == new:
        assert "VLLM_USE_DEEP_GEMM_LINEAR" in module.environment_variables or \
            hashlib.sha1(open(fp8, "rb").read()).hexdigest() == old
    seen += 1
print(seen)
"""


def test_another_process_imports_meanwhile(wheel, apply, tally):
    """Each import in a loop sees the old or the new file, never a torn one."""
    import hashlib
    hashes = []
    for flags in ([], ["--reverse"]):
        hashes.append(hashlib.sha1((wheel / FP8_UTILS).read_bytes()).hexdigest())
        assert apply(wheel, *flags) == 0
    reader = subprocess.Popen(
        [sys.executable, "-c", IMPORTER, wheel / FP8_UTILS, wheel / "vllm/envs.py", *hashes],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "ready\n"
    for _ in range(5):
        assert apply(wheel) == 0 and apply(wheel, "--reverse") == 0
    out, err = reader.communicate("stop\n", timeout=60)
    assert reader.returncode == 0, err
    assert int(out) > 20
    tally("imports by another process during writes", int(out))


def test_another_program_changes_a_file_meanwhile(wheel, newest, apply, monkeypatch):
    real = patchset.cli.write

    def late(root, current, wanted):
        (root / FP8_UTILS).write_bytes(b"# somebody else\n")
        return real(root, current, wanted)

    monkeypatch.setattr(patchset.cli, "write", late)
    before = snapshot(wheel)
    assert apply(wheel) == 1 and "changed while it was being patched" in apply.err
    after = snapshot(wheel)
    assert after.pop(FP8_UTILS)[1] == b"# somebody else\n"
    before.pop(FP8_UTILS)
    assert after == before
