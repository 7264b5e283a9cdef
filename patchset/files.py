# SPDX-License-Identifier: Apache-2.0
"""Single files of a target: read, told apart by content, replaced in one step."""
import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Optional

from patchset.refusals import CannotRun, Refusal

PRISTINE, APPLIED, OLDER = "pristine", "applied", "older"
EDITED, MISSING = "edited", "missing"
_LARGEST = 16 << 20


@dataclass(frozen=True)
class FileState:
    """`state` of one path; `added` files are ours and pristine means not there.

    `version`: the overlay that an older file is from.
    """
    path: str
    state: str
    added: bool
    crlf: bool = False
    version: Optional[str] = None


def blob_id(content: bytes) -> str:
    """The git blob id of `content`."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _components(root: Path, name: str) -> Iterator[Path]:
    path = root
    for part in name.split("/"):
        path = path / part
        yield path


def read_file(root: Path, name: str) -> Optional[bytes]:
    """The content of a regular file below `root`, None if it is not there.

    Raises Refusal for a symbolic link on the way, CannotRun if it is unreadable.
    """
    for path in _components(root, name):
        if path.is_symlink():
            raise Refusal(f"{path} is a symbolic link to {os.path.realpath(path)}; "
                          "a patch would change or replace what others share",
                          "replace the link by a copy, then run again")
    path = root / name
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > _LARGEST:
            raise CannotRun(f"{path} is not a source file", "reinstall vllm")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror}",
                        "run as a user who may read it") from None


def check_writable(root: Path, names: Iterator[str]) -> None:
    """Raise CannotRun unless every file of `names` could be replaced or added."""
    for name in names:
        folder = (root / name).parent
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CannotRun(f"{folder} is not writable; nothing was written",
                            "run as the owner, or on a writable copy")


TEMPORARY = ".deepgemm-overlay-"


def sweep(root: Path, names: Iterable[str]) -> None:
    """Remove temporary files that a killed run left beside `names`."""
    for folder in sorted({(root / name).parent for name in names}):
        for leftover in folder.glob(TEMPORARY + "*"):
            with contextlib.suppress(OSError):
                leftover.unlink()


def replace_file(root: Path, name: str, content: Optional[bytes]) -> None:
    """Give `name` the new content in one step, or remove it (None).

    The mode is kept; a hard link to the old file keeps the old content. Folders
    are made and, when empty, removed. Raises OSError.
    """
    path = root / name
    if content is None:
        if path.exists():
            path.unlink()
        prune(root, path.parent)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), _default_mode() if mode is None else mode)
            if mode is not None and os.geteuid() == 0:
                owner = path.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _drop_unchecked_bytecode(path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _drop_unchecked_bytecode(path: Path) -> None:
    # Python compares other bytecode with its source; this kind it just runs.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        with open(cached, "rb") as file:
            if file.read(8)[4:] == b"\x01\0\0\0":
                cached.unlink()


def _default_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def is_leftover(folder: Path) -> bool:
    """Whether a folder of added files is still there without any source."""
    return folder.is_dir() and not any(folder.glob("*.py"))


def prune(root: Path, folder: Path) -> None:
    """Remove `folder` and its parents as far as they are empty; bytecode does not count.

    Bytecode of a removed module would keep its folder importable.
    """
    cache = folder / "__pycache__"
    if is_leftover(folder) and cache.is_dir():
        for leftover in cache.glob("*.pyc"):
            leftover.unlink()
    for path in (cache, folder, *folder.parents):
        if path == root or path == root / "vllm":
            return
        try:
            path.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return
            raise
