# SPDX-License-Identifier: Apache-2.0
"""The tree to patch: found, told to be a checkout or a wheel, matched to a pin."""
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from patchset import git
from patchset.files import (
    APPLIED,
    EDITED,
    MISSING,
    OLDER,
    PRISTINE,
    FileState,
    blob_id,
    read_file,
)
from patchset.pins import Pin, Release
from patchset.refusals import CannotRun, Refusal

# vLLM's own DeepGEMM linear path lives in one of these, from 0.9.2 on.
_UPSTREAM = ("vllm/model_executor/layers/quantization/deepgemm.py",
             "vllm/utils/deep_gemm.py")


@dataclass(frozen=True)
class Target:
    """`root` holds the package folder `vllm`; `checkout` says whether it is a repository."""
    root: Path
    checkout: bool
    version: Optional[str]

    @property
    def kind(self) -> str:
        return "checkout" if self.checkout else "wheel"


def find_target(path: Optional[str]) -> Target:
    """Find the vLLM under `path`, or the one this interpreter would import.

    Nothing is imported. Raises CannotRun if there is none.
    """
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.origin:
            raise CannotRun("this interpreter finds no vllm to patch",
                            "python apply.py --vllm-path DIR")
        path = os.path.dirname(spec.origin)
    given = Path(os.path.abspath(path))
    if not given.is_dir():
        what = "is not a folder" if given.exists() else "does not exist"
        raise CannotRun(f"{given} {what}", "give the checkout's root, the vllm "
                        "package folder or site-packages: --vllm-path DIR")
    try:
        if (given / "vllm").is_dir():
            root = given
        elif given.name == "vllm" and (given / "__init__.py").is_file():
            root = given.parent
        else:
            raise CannotRun(f"{given} holds no vllm package",
                            "give the checkout's root, the vllm package folder or "
                            "site-packages: --vllm-path DIR")
        root = root.resolve()
        if (root / "vllm").is_symlink():
            raise Refusal(f"{root / 'vllm'} is a symbolic link to "
                          f"{(root / 'vllm').resolve()}",
                          f"python apply.py --vllm-path {(root / 'vllm').resolve()}")
        return Target(root, (root / ".git").exists(), _version(root))
    except OSError as error:
        raise CannotRun(f"{given} cannot be read: {error.strerror}",
                        "run as a user who may read it") from None


def _version(root: Path) -> Optional[str]:
    """What the tree says of its own version: a hint, never proof."""
    found = [name[5:-10] for name in sorted(os.listdir(root))
             if name.startswith("vllm-") and name.endswith(".dist-info")]
    if len(found) == 1:
        return found[0]
    try:
        text = (root / "vllm/_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^__version__ = version = ['\"]([^'\"]+)", text, re.M)
    return match[1] if match else None


def look(target: Target, pin: Pin, added: Dict[str, str],
         history: Sequence[Release] = ()) -> List[FileState]:
    """The state of each file that `pin` patches or adds, from content alone.

    `added`: path to blob id of the overlay's files. A file of an earlier release
    in `history` is "older"; files that only a release added are listed if there.
    """
    states = []
    for name, base in pin.base.items():
        content = read_file(target.root, name)
        found = None if content is None else blob_id(content)
        state = {None: MISSING, base: PRISTINE, pin.result[name]: APPLIED}.get(found, EDITED)
        version = None
        if state == EDITED:
            version = next((r.version for r in history for old in r.pins if old.name == pin.name
                            and old.result.get(name) == found), None)
            state = OLDER if version else EDITED
        crlf = (state == EDITED and content is not None
                and blob_id(content.replace(b"\r\n", b"\n")) in (base, pin.result[name]))
        states.append(FileState(name, state, False, crlf, version))
    for name in {**added, **{name: None for r in history for name in r.added}}:
        content = read_file(target.root, name)
        if content is None:
            if name in added:
                states.append(FileState(name, PRISTINE, True))
            continue
        found = blob_id(content)
        if found == added.get(name):
            states.append(FileState(name, APPLIED, True))
            continue
        version = next((r.version for r in history if r.added.get(name) == found), None)
        states.append(FileState(name, OLDER if version else EDITED, True, False, version))
    return states


def _agrees(states: List[FileState]) -> bool:
    return all(s.state in (PRISTINE, APPLIED, OLDER) for s in states if not s.added)


def match_pin(target: Target, pins: List[Pin], added: Dict[str, str],
              history: Sequence[Release] = (),
              allow_commit: Optional[str] = None) -> Tuple[Pin, List[FileState]]:
    """The pin whose files these are, with the state of each file.

    Raises Refusal (already upstream, edited, another commit) or CannotRun
    (no pin knows this tree).
    """
    looks = [(pin, look(target, pin, added, history)) for pin in pins]
    whole = [pair for pair in looks if _agrees(pair[1])]
    if not whole and any((target.root / name).exists() for name in _UPSTREAM):
        raise Refusal(f"already upstream: vLLM {target.version or 'here'} has its own "
                      "DeepGEMM linear path (vLLM 0.9.2 and later, PR 19085 and 19514)",
                      "set VLLM_USE_DEEP_GEMM=1; no patch is needed")
    head, tags = git.head_and_tags(target.root) if target.checkout else (None, [])
    if not whole:
        pin, states = min(looks, key=lambda pair: _distance(pair, target, head))
        _refuse_differing(target, pin, states, head, tags)
    pin, states = whole[0]
    if target.checkout and head not in pin.commits and not set(tags) & set(pin.tags) \
            and (allow_commit or "").lower() != head:
        raise Refusal(f"HEAD {head} is not a commit of pin {pin.name}, though every "
                      "file that it patches is the pinned one",
                      f"if this is meant, add: --allow-commit {head}")
    return pin, states


def _distance(pair: Tuple[Pin, List[FileState]], target: Target,
              head: Optional[str]) -> Tuple[bool, int]:
    pin, states = pair
    named = target.version in pin.wheels or head in pin.commits
    return not named, sum(s.state in (EDITED, MISSING) for s in states if not s.added)


def _refuse_differing(target: Target, pin: Pin, states: List[FileState],
                      head: Optional[str], tags: List[str]) -> None:
    bad = [s for s in states if not s.added and s.state in (EDITED, MISSING)]
    files = [f"{s.path}: {s.state}" for s in bad]
    if bad and all(s.crlf for s in bad):
        raise Refusal(f"files of {target.root} have CRLF line ends, vLLM's have LF; "
                      "nothing was written",
                      "check out with core.autocrlf=false, or run dos2unix on them",
                      [s.path for s in bad])
    if target.version in pin.wheels or head in pin.commits or set(tags) & set(pin.tags):
        raise Refusal(f"files that pin {pin.name} patches are not vLLM's own in "
                      f"{target.root}; nothing was written",
                      "git checkout -- FILES" if target.checkout else
                      f"pip install --force-reinstall --no-deps vllm=={pin.wheels[0]}",
                      files)
    what = f"vLLM {target.version}" if target.version else "the vllm"
    raise CannotRun(f"no pin knows {what} in {target.root}; nearest is {pin.name}, "
                    "from which these files differ",
                    "python apply.py --list shows what is pinned", files)
