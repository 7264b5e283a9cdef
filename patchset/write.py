# SPDX-License-Identifier: Apache-2.0
"""Bring a target to one tree, all or nothing.

Every file goes from old to new by one rename, added files before the files that
import them, so a reader always sees a tree that imports. A crash leaves files
that are each old or new; the next run reads that from content and goes on.
"""
import contextlib
import fcntl
import os
import signal
from pathlib import Path
from typing import Any, Dict, Iterator, List

from patchset.files import check_writable, read_file, replace_file
from patchset.record import Tree
from patchset.refusals import INTERRUPTED, CannotRun, Refusal


class Interrupted(Refusal):
    """Ctrl-C or SIGTERM came while writing; the write was finished or undone first."""
    code = INTERRUPTED


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a target; waits. The lock is on the folder, no file is made."""
    handle = os.open(root / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _signals_held() -> Iterator[List[int]]:
    caught: List[int] = []
    old = {number: signal.signal(number, lambda got, _: caught.append(got))
           for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def write(root: Path, current: Tree, wanted: Tree) -> List[str]:
    """Change what differs from `current` to `wanted`; returns the paths changed.

    `current` is what the plan read, and each file is compared with it again just
    before its rename. Raises CannotRun with the tree as it was if a write fails,
    Refusal if another program changed a file meanwhile, Interrupted on a signal.
    """
    names = [name for name in wanted if current[name] != wanted[name]]
    check_writable(root, iter(names))
    done: List[str] = []
    with _signals_held() as caught:
        try:
            for name in names:
                if read_file(root, name) != current[name]:
                    raise Refusal(f"{root / name} changed while it was being patched",
                                  "python apply.py --status")
                done.append(name)
                replace_file(root, name, wanted[name])
            for name in names:
                if read_file(root, name) != wanted[name]:
                    raise Refusal(f"{root / name} does not hold what was written",
                                  "check the disk, then run again")
        except (OSError, Refusal) as error:
            _undo(root, done, current)
            if isinstance(error, Refusal):
                raise
            raise CannotRun(f"writing {error.filename or root} failed: {error.strerror}; "
                            "the tree is as it was", "make room or get write access, "
                            "then run again") from None
    if caught:
        raise Interrupted(f"interrupted by {signal.Signals(caught[0]).name} after all "
                          f"{len(names)} files were written", "python apply.py --status")
    return names


def _undo(root: Path, done: List[str], before: Tree) -> None:
    failed: Dict[str, Any] = {}
    for name in reversed(done):
        try:
            if read_file(root, name) != before[name]:
                replace_file(root, name, before[name])
        except OSError as error:
            failed[name] = error.strerror
    if failed:
        raise CannotRun(f"undoing a failed write failed too; {root} is mixed",
                        "run apply.py again: it finishes, or undoes with --reverse",
                        [f"{name}: {why}" for name, why in failed.items()])
