# SPDX-License-Identifier: Apache-2.0
"""Git through GitPython, cut off from the user's configuration and repositories."""
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from patchset.refusals import CannotRun

OLDEST = (2, 25)
_SETTINGS = ("-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn",
             "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")


def _gitpython() -> Any:
    if shutil.which("git") is None:
        raise CannotRun("git is not on the PATH", "install git 2.25 or newer")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    try:
        import git
    except ImportError:
        raise CannotRun("the Python package GitPython is missing",
                        "python -m pip install GitPython") from None
    return git


class IsolatedGit:
    """Runs git in `folder` with a home of its own; use as a context manager.

    Raises CannotRun if git or GitPython is missing or git is older than 2.25.
    """

    def __init__(self, folder: Optional[Path] = None):
        self._module = _gitpython()
        self._temporary = tempfile.TemporaryDirectory(prefix="deepgemm-overlay-")
        self.home = Path(self._temporary.name)
        self.folder = folder or self.home / "scratch"
        self.folder.mkdir(exist_ok=True)
        # Another owner's checkout (a bind mount, say) is only read.
        (self.home / ".gitconfig").write_text(
            f"[safe]\n\tdirectory = {self.folder}\n", encoding="utf-8")
        self._git = self._module.Git(str(self.folder))
        self.error = self._module.GitCommandError
        text = self.run("version").decode()
        found = re.search(r"(\d+)\.(\d+)", text)
        if found is None or (int(found[1]), int(found[2])) < OLDEST:
            raise CannotRun(f"{text.strip()} is too old, 2.25 or newer is needed",
                            "install a newer git")

    def __enter__(self) -> "IsolatedGit":
        return self

    def __exit__(self, *_: Any) -> None:
        self._temporary.cleanup()

    def run(self, *arguments: str, stdin: bytes = b"",
            index: Optional[str] = None) -> bytes:
        """Run one git command; returns stdout. Raises `self.error`."""
        environment: Dict[str, Any] = {
            name: None for name in os.environ if name.startswith("GIT_")}
        environment.update(
            HOME=str(self.home), XDG_CONFIG_HOME=str(self.home),
            GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL=str(self.home / ".gitconfig"),
            GIT_CEILING_DIRECTORIES=str(self.folder.parent), LC_ALL="C")
        if index:
            environment["GIT_INDEX_FILE"] = str(self.home / index)
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            with _without_git_variables():
                out: bytes = self._git.execute(
                    ["git", *_SETTINGS, *arguments], istream=given,
                    env={k: v for k, v in environment.items() if v is not None},
                    stdout_as_string=False, strip_newline_in_stdout=False)
                return out


    def write_index(self, files: Mapping[str, bytes], index: str) -> str:
        """Make `index` hold exactly `files`; returns its tree id. Needs a repository."""
        folder = Path(tempfile.mkdtemp(dir=self.home))
        paths = []
        for number, content in enumerate(files.values()):
            paths.append(folder / str(number))
            paths[-1].write_bytes(content)
        blobs = self.run("hash-object", "-w", "--no-filters", "--stdin-paths",
                         stdin="".join(f"{path}\n" for path in paths).encode()).decode().split()
        rows = "".join(f"100644 {blob}\t{name}\0" for blob, name in zip(blobs, files))
        (self.home / index).unlink(missing_ok=True)
        self.run("update-index", "-z", "--index-info", index=index, stdin=rows.encode())
        return self.run("write-tree", index=index).decode().strip()

    def read_index(self, index: str) -> Dict[str, bytes]:
        """Path to content of everything in `index`."""
        rows = self.run("ls-files", "-s", "-z", index=index).split(b"\0")[:-1]
        names = [row.split(b"\t", 1)[1].decode() for row in rows]
        out = self.run("cat-file", "--batch",
                       stdin=b"".join(row.split()[1] + b"\n" for row in rows))
        found, at = {}, 0
        for name in names:
            end = out.index(b"\n", at)
            size = int(out[at:end].split()[2])
            found[name] = out[end + 1:end + 1 + size]
            at = end + 2 + size
        return found


class _without_git_variables:
    # GitPython lays `env` over os.environ, so what must be absent is taken out.
    def __enter__(self) -> None:
        self._kept = {name: value for name, value in os.environ.items()
                      if name.startswith("GIT_") and name != "GIT_PYTHON_REFRESH"}
        for name in self._kept:
            del os.environ[name]

    def __exit__(self, *_: Any) -> None:
        os.environ.update(self._kept)


def head_and_tags(root: Path) -> Tuple[Optional[str], List[str]]:
    """HEAD's commit id and the tags on it. Raises CannotRun for a broken repository."""
    with IsolatedGit(root) as git:
        try:
            head = git.run("rev-parse", "--verify", "HEAD^{commit}").decode().strip()
            tags = git.run("tag", "--points-at", "HEAD").decode().split()
        except git.error as error:
            why = (error.stderr or "").strip().strip("'").splitlines() or ["no reason given"]
            raise CannotRun(f"git cannot read the checkout {root}: {why[-1].strip()}",
                            f"try: git -C {root} status") from None
    return head, tags
