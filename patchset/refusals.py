# SPDX-License-Identifier: Apache-2.0
"""Every way in which the tool says no: exit code, one sentence, one next step."""
from typing import List, Optional

DONE, REFUSED, CANNOT_RUN, CONFLICT, INTERRUPTED = 0, 1, 2, 3, 130


class Refusal(Exception):
    """An expected failure. `code` is the exit code; nothing has been changed.

    `files` lists what the sentence speaks of, one path a line.
    """
    code = REFUSED

    def __init__(self, sentence: str, hint: Optional[str] = None,
                 files: Optional[List[str]] = None):
        super().__init__(sentence)
        self.sentence, self.hint, self.files = sentence, hint, files or []

    def __str__(self) -> str:
        lines = [f"error: {self.sentence}", *(f"  {name}" for name in self.files)]
        if self.hint:
            lines += ["", f"hint: {self.hint}"]
        return "\n".join(lines)


class CannotRun(Refusal):
    """Wrong usage, a missing tool, or a tree that no pin knows."""
    code = CANNOT_RUN


class PatchConflict(Refusal):
    """A patch does not fit, or the result is not the pinned one."""
    code = CONFLICT
