#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lint the patch series: headers, sizes, form. Exit codes: 0 clean, 1 findings."""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from patchset.pins import OVERLAY, read_pins  # noqa: E402

FIELDS = ("Subject", "File", "Why", "How", "Upstream", "Remove-when")
# Raised only with a reason in a patch header's "Ceiling" field.
ADDED, REMOVED = 26, 5


def findings(pin):
    """What is wrong with one pin's series, one line each."""
    added = removed = 0
    on_disk = {path.name for path in pin.folder.glob("*.patch")}
    for name in sorted(on_disk - {path.name for path in pin.patches}):
        yield f"{name} is not in series"
    for patch in pin.patches:
        raw = patch.read_bytes()
        if b"\r" in raw or not raw.endswith(b"\n"):
            yield f"{patch.name} has CR or no final newline"
        header, _, body = raw.decode().partition("diff --git ")
        for field in FIELDS:
            if not re.search(rf"^{field}: \S", header, re.M):
                yield f"{patch.name} has no {field}"
        lines = body.splitlines()
        plus = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
        minus = [line for line in lines if line.startswith("-") and not line.startswith("---")]
        added, removed = added + len(plus), removed + len(minus)
        for line in plus:
            if line != line.rstrip():
                yield f"{patch.name} adds trailing blanks: {line!r}"
            if len(line) > 81:
                yield f"{patch.name} adds a line over 80 columns: {line!r}"
        files = re.findall(r"^\+\+\+ b/(\S+)", body, re.M)
        if files != re.findall(r"^File: (\S+)", header, re.M):
            yield f"{patch.name} touches {files}, its header says otherwise"
    if added > ADDED or removed > REMOVED:
        yield f"series adds {added} and removes {removed} lines, ceiling {ADDED} and {REMOVED}"
    print(f"{pin.name}: {len(pin.patches)} patches, +{added} -{removed} lines")


def main():
    found = [f"{pin.name}: {text}" for pin in read_pins() for text in findings(pin)]
    for path in OVERLAY.rglob("*.py"):
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text():
            found.append(f"{path.name}: no licence line")
    print("\n".join(found) or "clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
