# SPDX-License-Identifier: Apache-2.0
"""A wheel's RECORD, kept true: pip uninstalls and importlib.metadata reads by it."""
import base64
import hashlib
from pathlib import Path
from typing import Dict, Optional, Sequence

Tree = Dict[str, Optional[bytes]]


def find_record(root: Path) -> Optional[str]:
    """Path below `root` of the one vLLM RECORD, or None."""
    found = sorted(root.glob("vllm-*.dist-info/RECORD"))
    if len(found) != 1 or found[0].is_symlink():
        return None
    return found[0].relative_to(root).as_posix()


def _line(name: str, content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(content)}".encode()


def rewritten(record: bytes, known: Sequence[Tree], wanted: Tree) -> bytes:
    """`record` with the lines of `wanted` true and every other byte as it was.

    Only lines in pip's own form for a content in one of the `known` trees are
    touched, so the way back gives the same bytes. Files that the first of them
    lacks are added ones and get a line at the end.
    """
    end = b"\r\n" if b"\r\n" in record[:4096] else b"\n"
    lines, seen = [], set()
    for line in record.splitlines(keepends=True):
        name = line.split(b",", 1)[0].decode("utf-8", "surrogateescape")
        if name in wanted and line.rstrip(b"\r\n") in [
                _line(name, content) for tree in known
                if (content := tree.get(name)) is not None]:
            content = wanted[name]
            if content is None or name in seen:
                continue
            line = _line(name, content) + end
        seen.add(name)
        lines.append(line)
    added = [_line(name, content) + end for name, content in wanted.items()
             if content is not None and known[0].get(name) is None and name not in seen]
    return b"".join([*lines, *added])
