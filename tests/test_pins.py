# SPDX-License-Identifier: Apache-2.0
"""Every pin on its real wheels, what other releases are, and the maintainer's tools."""
import json
import shutil
import subprocess
import sys

import pytest

from real_vllm import PINS, PROJECT, sources

sys.path[:0] = [str(PROJECT / "ci")]

import check_pins  # noqa: E402

RELEASES = json.loads((PROJECT / "ci/releases.json").read_text())
WHEELS = [(pin, version) for pin in PINS.values() for version in pin.wheels]


@pytest.mark.parametrize("pin,version", WHEELS, ids=[v for _, v in WHEELS])
def test_pins_hold_on_their_wheels(pin, version):
    assert check_pins.round_trip(sources(version), pin) is None
    assert RELEASES[version] == dict(kind="pinned", detail=pin.name)


@pytest.mark.parametrize("version", ["0.8.3", "0.9.2"])
def test_other_releases_are_what_was_recorded(version):
    kind, _ = check_pins.kind_of(sources(version))
    assert kind == RELEASES[version]["kind"] != "pinned"


def test_refresh_and_new_pin_are_deterministic(tmp_path):
    """refresh gives the committed bytes again; new_pin gives v0.8.4 from v0.8.5.post1."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns(
        ".git", ".venv", ".cache", ".work", ".gpu", ".whl", "__pycache__"))
    (project / ".cache").symlink_to(PROJECT / ".cache")

    def run(*arguments):
        done = subprocess.run([sys.executable, *map(str, arguments)], cwd=project,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def patches():
        return {p.relative_to(project).as_posix(): p.read_bytes()
                for p in (project / "patches").rglob("*") if p.is_file()}

    before = patches()
    base, edited = sources("0.9.1"), tmp_path / "edited"
    shutil.copytree(base, edited)
    run(project / "apply.py", "--vllm-path", edited)
    run("ci/refresh.py", "v0.9.1", "--base", base, "--edited", edited)
    assert patches() == before
    run("ci/refresh.py")
    assert patches() == before
    shutil.rmtree(project / "patches/v0.8.4")
    run("ci/new_pin.py", "v0.8.5.post1", "0.8.4")
    after = patches()
    toml = "patches/v0.8.4/pin.toml"
    known = before[toml].decode().splitlines()
    assert [line for line in known if line not in after[toml].decode().splitlines()] == [
        line for line in known if line.startswith('    "')]  # only the commit is by hand
    assert {n: c for n, c in after.items() if n != toml} == \
        {n: c for n, c in before.items() if n != toml}
    run("ci/refresh.py", "--freeze")
    assert (project / "patches/history/0.1.0/added").is_file()
    run(project / "apply.py", "--vllm-path", edited, "--status")


def test_new_pin_marks_conflicts(tmp_path):
    from new_pin import merge
    text, count = merge(b"a\nb\nc\n", b"a\nours\nc\n", b"a\ntheirs\nc\n", "x.py")
    assert count == 1 and b"<<<<<<< new x.py" in text and b">>>>>>> the series" in text
    assert merge(b"a\nb\n", b"a\nb\nc\n", b"z\na\nb\n", "x.py")[1] in (0, 1)
