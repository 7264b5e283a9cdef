#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM at the pin, told by content.

    python tools/deepgemm_pin.py source DIR     a checkout or an unpacked archive
    python tools/deepgemm_pin.py package DIR    an installed or unpacked deep_gemm

Ids are git tree ids with every file taken as an ordinary one, so that archives
and wheels, which lose modes, compare equal. Exit codes: 0 the pin, 1 not.
"""
import hashlib
import os
import sys
from typing import Dict, List, Tuple

COMMIT = "bfe983c4c27634d5f696fd613154c965c110385e"
CUTLASS_COMMIT = "eefa171318b79cbe2e78514d4cce5cd0fe919d0c"
PACKAGE = "8e278a1a6bc33ded465ca5826ce19eaffe1b08d8"  # deep_gemm/, without cute and cutlass
CUTE = "d448d4ed6133e21898a23bfbf26a08d8cd14d800"
CUTLASS = "3bc1a80cc817ef0b3a8e69e5e8baf983da5e3f5c"
SETUP = "b39efd03fb51a126c0c146d59cccaa185292b8cd"  # setup.py, a blob


def blob_id(path: str) -> str:
    """Git blob id of one file."""
    with open(path, "rb") as file:
        data = file.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree_id(folder: str, skip: Tuple[str, ...] = ()) -> str:
    """Git tree id of a folder, modes ignored, without bytecode and `skip`."""
    rows: List[Tuple[str, bytes]] = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        relative = name
        if name == "__pycache__" or name.endswith(".pyc") or relative in skip:
            continue
        if os.path.isdir(path):
            inner = tuple(s.split("/", 1)[1] for s in skip if s.startswith(name + "/"))
            rows.append((name + "/", b"40000 " + name.encode() + b"\0"
                         + bytes.fromhex(tree_id(path, inner))))
        else:
            rows.append((name, b"100644 " + name.encode() + b"\0" + bytes.fromhex(blob_id(path))))
    body = b"".join(row for _, row in sorted(rows, key=lambda r: r[0].encode()))
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest()


def _differences(parts: Dict[str, Tuple[str, str]]) -> List[str]:
    found = []
    for what, (path, wanted) in parts.items():
        skip = ("include/cute", "include/cutlass") if wanted == PACKAGE else ()
        if not os.path.exists(path):
            found.append(f"{what} is missing: {path}")
        elif (blob_id(path) if os.path.isfile(path) else tree_id(path, skip)) != wanted:
            found.append(f"{what} is not the pinned one: {path}")
    return found


def source_differences(folder: str) -> List[str]:
    """What in a source folder is not the pin's; empty if nothing."""
    cutlass = os.path.join(folder, "third-party/cutlass/include")
    return _differences({
        "DeepGEMM's package": (os.path.join(folder, "deep_gemm"), PACKAGE),
        "setup.py": (os.path.join(folder, "setup.py"), SETUP),
        "the CUTLASS submodule (cute)": (os.path.join(cutlass, "cute"), CUTE),
        "the CUTLASS submodule (cutlass)": (os.path.join(cutlass, "cutlass"), CUTLASS)})


def package_differences(folder: str) -> List[str]:
    """What in a deep_gemm package folder is not the pin's; empty if nothing."""
    include = os.path.join(folder, "include")
    return _differences({
        "DeepGEMM's package": (folder, PACKAGE),
        "the folder of cute headers": (os.path.join(include, "cute"), CUTE),
        "the folder of cutlass headers": (os.path.join(include, "cutlass"), CUTLASS)})


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("source", "package"):
        sys.exit(__doc__)
    wrong = (source_differences if sys.argv[1] == "source" else package_differences)(sys.argv[2])
    print("; ".join(wrong) or f"DeepGEMM {COMMIT[:7]} with its CUTLASS headers")
    sys.exit(1 if wrong else 0)
