# SPDX-License-Identifier: Apache-2.0
"""Random series over random trees, forward and back, against real git.

200 cases in CI, 10,000 with --nightly. Failing cases are kept by hypothesis in
tests/failing_cases and tried first the next time.
"""
import subprocess
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from patchset.files import APPLIED, PRISTINE, FileState, blob_id
from patchset.git import IsolatedGit
from patchset.pins import Pin
from patchset.target import Target, look
from patchset.trees import base_files, plan
from patchset.write import write

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00\x0b\x0c\x1c\x1d\x1e"
                              "\x85\u2028\u2029"), max_size=12)
FILES = st.sampled_from([f"vllm/{name}" for name in (
    "a.py", "b.py", "sub/c.py", "sub/deep/d.py", "with space.py", "e")])


@st.composite
def contents(draw):
    lines = draw(st.lists(LINES, min_size=1, max_size=30))
    return "\n".join(lines) + draw(st.sampled_from(["\n", "\n", "\n", ""]))


@st.composite
def edits(draw, text):
    """Another text: some lines replaced, removed or added, never the same."""
    lines = text.split("\n")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines)))
        kind = draw(st.sampled_from(["insert", "replace", "delete"]))
        if kind == "insert" or at == len(lines):
            lines.insert(at, draw(LINES))
        elif kind == "replace":
            lines[at] = draw(LINES)
        elif len(lines) > 1:
            del lines[at]
    changed = "\n".join(lines)
    return changed if changed not in (text, "") else text + "more\n"


@st.composite
def cases(draw):
    """A tree and 1 to 4 versions of it that follow."""
    versions = [draw(st.dictionaries(FILES, contents(), min_size=1, max_size=4))]
    for _ in range(draw(st.integers(1, 4))):
        changed = dict(versions[-1])
        for name in draw(st.lists(st.sampled_from(sorted(changed)), min_size=1, max_size=3,
                                  unique=True)):
            changed[name] = draw(edits(changed[name]))
        versions.append(changed)
    overlay = draw(st.dictionaries(st.sampled_from(["vllm/new/x.py", "vllm/new/y/z.py"]),
                                   contents(), min_size=1))
    return versions, overlay, draw(st.integers(0, 1 << 10))


def check(case):
    versions, overlay, mask = case
    versions = [{n: t.encode() for n, t in v.items()} for v in versions]
    overlay = {n: t.encode() for n, t in overlay.items()}
    base, final = versions[0], versions[-1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        for name, content in base.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        with IsolatedGit() as git:
            git.run("init", "-q", "--bare", ".")
            trees = [git.write_index(v, "i") for v in versions]
            patches = []
            for number, pair in enumerate(zip(trees, trees[1:])):
                patches.append(Path(folder) / f"{number}.patch")
                patches[-1].write_bytes(b"Subject: x\n---\n" + git.run(
                    "-c", "core.quotePath=false", "diff", "--full-index", *pair))
            overlay_id = git.write_index(overlay, "o")
            expected = git.write_index({**final, **overlay}, "r")
        pin = Pin("v0", Path(folder), [], [], [], "", {n: blob_id(c) for n, c in base.items()},
                  {n: blob_id(c) for n, c in final.items()}, overlay_id, patches)
        target = Target(root, False, None)
        added = {n: blob_id(c) for n, c in overlay.items()}
        trees = plan(base, pin, overlay)
        assert trees.tree == expected
        # Any mixture of old and new files leads to both ends.
        both = {**base, **dict.fromkeys(overlay)}
        for number, name in enumerate(both):
            if mask >> number & 1 and trees.result[name] is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(trees.result[name])
        states = look(target, pin, added)
        assert base_files(target, pin, states) == base
        for goal in (trees.result, trees.base, trees.result, trees.base):
            current = {n: (root / n).read_bytes() if (root / n).exists() else None for n in goal}
            write(root, current, goal)
            assert {n: (root / n).read_bytes() if (root / n).exists() else None
                    for n in goal} == goal
        left = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
        assert sorted(left) == sorted(base) and not (root / "vllm/new").exists()
        # git agrees that the diff is the change.
        (Path(folder) / "all.patch").write_bytes(trees.diff)
        subprocess.run(["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn",
                        "../all.patch"], cwd=root, check=True, capture_output=True,
                       env={"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": folder,
                            "GIT_CEILING_DIRECTORIES": folder})
        for name, content in {**final, **overlay}.items():
            assert (root / name).read_bytes() == content
    assert all(isinstance(s, FileState) and s.state in (PRISTINE, APPLIED) for s in states)


def test_random_series_forward_and_back(request, tally):
    count = request.config.getoption("--cases") or (
        10_000 if request.config.getoption("--nightly") else 200)
    database = DirectoryBasedExampleDatabase(str(Path(__file__).parent / "failing_cases"))
    run = settings(max_examples=count, deadline=None, database=database, print_blob=True,
                   suppress_health_check=list(HealthCheck))(given(cases())(check))
    run()
    tally("random series over random trees", count)
