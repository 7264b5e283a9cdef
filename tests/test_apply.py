# SPDX-License-Identifier: Apache-2.0
"""apply, again, reverse, status, diff on the real files of every pin."""
import json
import os
import subprocess
import sys

import pytest

from patchset.files import blob_id

from real_vllm import FP8_UTILS, PINS, PROJECT, fill, git, snapshot


def ids(root, names):
    return {name: blob_id((root / name).read_bytes()) for name in names}


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_round_trip(pin, kind, request, apply, overlay):
    root = request.getfixturevalue(kind)
    os.chmod(root / FP8_UTILS, 0o640)
    before = snapshot(root)
    assert ids(root, pin.base) == pin.base
    assert apply(root, "--check") == 0, apply.err
    assert "would be applied" in apply.out
    assert snapshot(root) == before

    assert apply(root) == 0, apply.err
    assert ids(root, pin.base) == pin.result
    assert all((root / n).read_bytes() == c for n, c in overlay.items())
    applied, times = snapshot(root), {p: p.stat().st_mtime_ns for p in root.rglob("*.py")}
    assert apply(root) == 0 and "already applied" in apply.out
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*.py")} == times
    assert apply(root, "--status") == 0 and "state: applied" in apply.out
    assert snapshot(root) == applied

    assert apply(root, "--reverse") == 0, apply.err
    assert snapshot(root) == before
    assert apply(root, "--reverse") == 0 and "already pristine" in apply.out
    assert apply(root, "--status") == 0 and "state: pristine" in apply.out


@pytest.mark.parametrize("version", ["0.9.0", "0.8.5"])
def test_releases_that_share_a_pin(tmp_path, apply, version):
    pin = next(p for p in PINS.values() if version in p.wheels)
    fill(tmp_path, pin, version)
    assert ids(tmp_path, pin.base) == pin.base
    assert apply(tmp_path) == 0, apply.err
    assert ids(tmp_path, pin.base) == pin.result


def test_patched_files_compile(pin, wheel, apply):
    apply(wheel)
    for path in wheel.rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec")


def test_package_folder_and_json(wheel, apply, newest):
    assert apply(wheel / "vllm", "--json") == 0
    answer = json.loads(apply.out)
    assert answer["pin"] == newest.name and answer["state"] == "applied"
    assert {f["state"] for f in answer["files"]} == {"pristine"}  # as found
    assert apply(wheel, "--status", "--json") == 0
    assert {f["state"] for f in json.loads(apply.out)["files"]} == {"applied"}


def test_finds_the_vllm_of_the_interpreter(wheel):
    run = subprocess.run([sys.executable, str(PROJECT / "apply.py"), "--status", "--json"],
                         env={**os.environ, "PYTHONPATH": str(wheel)}, cwd="/",
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["root"] == str(wheel)


def test_diff_is_a_patch_git_applies(checkout, apply, newest):
    assert apply(checkout, "--diff", "--json") == 0
    (checkout.parent / "one.patch").write_text(json.loads(apply.out)["diff"])
    git(checkout, "apply", "--whitespace=nowarn", "../one.patch")
    assert ids(checkout, newest.base) == newest.result


def test_list(apply):
    assert apply(None, "--list") == 0
    assert all(name in apply.out for name in PINS)
    assert apply(None, "--list", "--json") == 0
    assert [row["pin"] for row in json.loads(apply.out)] == list(PINS)


def test_mixed_tree_is_finished_or_undone(wheel, apply, newest, overlay):
    before = snapshot(wheel)
    apply(wheel)
    applied = snapshot(wheel)
    base = before[FP8_UTILS][1]
    (wheel / FP8_UTILS).write_bytes(base)
    (wheel / next(iter(overlay))).unlink()
    assert apply(wheel, "--status") == 1 and "state: half-applied" in apply.out
    assert apply(wheel) == 0 and "half-applied: the run finishes it" in apply.out
    assert snapshot(wheel) == applied
    (wheel / FP8_UTILS).write_bytes(base)
    assert apply(wheel, "--reverse") == 0 and "half-applied: the run undoes it" in apply.out
    assert snapshot(wheel) == before


def test_listed_commit_or_allowed_commit(checkout, apply):
    git(checkout, "tag", "-d", "v0.9.1")
    head = git(checkout, "rev-parse", "HEAD")
    before = snapshot(checkout)
    assert apply(checkout) == 1
    assert "v0.9.1" in apply.err and f"--allow-commit {head}" in apply.err
    assert snapshot(checkout) == before
    assert apply(checkout, "--allow-commit", "0" * 40) == 1
    assert apply(checkout, "--allow-commit", head) == 0


def test_dirty_elsewhere_is_fine_and_kept(checkout, apply):
    (checkout / "vllm/__init__.py").write_text("# mine\n")
    (checkout / "notes.txt").write_text("mine\n")
    assert apply(checkout) == 0
    assert apply(checkout, "--reverse") == 0
    assert (checkout / "vllm/__init__.py").read_text() == "# mine\n"
    assert (checkout / "notes.txt").read_text() == "mine\n"


def test_bytecode_of_added_files_goes_too(wheel, apply, overlay):
    apply(wheel)
    added = wheel / next(iter(overlay))
    (added.parent / "__pycache__").mkdir()
    (added.parent / "__pycache__" / "plan.cpython-311.pyc").write_bytes(b"x")
    assert apply(wheel, "--reverse") == 0
    assert not added.parent.exists()
