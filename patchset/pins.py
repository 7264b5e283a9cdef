# SPDX-License-Identifier: Apache-2.0
"""Pins: which vLLM files a series was made for, and what must come out."""
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List

from patchset.refusals import CannotRun

PROJECT = Path(__file__).resolve().parent.parent
PATCHES, OVERLAY = PROJECT / "patches", PROJECT / "overlay"
HISTORY = PATCHES / "history"
_ID = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """One `patches/<name>/pin.toml` with its series.

    `base` and `result` map each patched path to a git blob id; `overlay` is the
    git tree id of the added files.
    """
    name: str
    folder: Path
    wheels: List[str]
    tags: List[str]
    commits: List[str]
    ends: str
    base: Dict[str, str]
    result: Dict[str, str]
    overlay: str
    patches: List[Path] = field(default_factory=list)


def _parse(path: Path) -> Dict[str, Any]:
    try:
        import tomllib as toml
    except ModuleNotFoundError:
        try:
            import tomli as toml  # type: ignore[no-redef]
        except ModuleNotFoundError:
            raise CannotRun("reading pins needs the package tomli before Python 3.11",
                            "python -m pip install tomli") from None
    try:
        with open(path, "rb") as file:
            return toml.load(file)
    except (OSError, ValueError) as error:
        raise CannotRun(f"pin file {path} cannot be read: {error}",
                        "restore it: git checkout -- patches") from None


def check_inside(name: str, where: str) -> str:
    """Return `name` if it stays inside the tree, else raise CannotRun."""
    path = PurePosixPath(name)
    if (path.is_absolute() or ".." in path.parts or not path.parts
            or path.parts[0] != "vllm" or "\\" in name or not name.isprintable()):
        raise CannotRun(f"{where} names a path outside the vllm package: {name!r}",
                        "restore it: git checkout -- patches")
    return name


def _ids(data: Dict[str, Any], key: str, where: Path) -> Dict[str, str]:
    table = data.get(key)
    if (not isinstance(table, dict) or not table
            or not all(isinstance(v, str) and _ID.fullmatch(v) for v in table.values())):
        raise CannotRun(f"pin file {where} has no table [{key}] of git blob ids",
                        "restore it: git checkout -- patches")
    return {check_inside(name, str(where)): blob for name, blob in table.items()}


def _text(data: Dict[str, Any], key: str, kind: type, where: Path) -> Any:
    value = data.get(key)
    good = isinstance(value, kind) and (
        not isinstance(value, list) or all(isinstance(item, str) for item in value))
    if not good:
        raise CannotRun(f"pin file {where} has no {key} of type {kind.__name__}",
                        "restore it: git checkout -- patches")
    return value


def read_pin(folder: Path) -> Pin:
    """Read one pin. Raises CannotRun on anything that is not as it should be."""
    where = folder / "pin.toml"
    data = _parse(where)
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotRun(f"{folder / 'series'} cannot be read: {error}",
                        "restore it: git checkout -- patches") from None
    names = [line.strip() for line in lines if line.strip() and line[0] != "#"]
    for name in names:
        if "/" in name or not (folder / name).is_file():
            raise CannotRun(f"{folder / 'series'} names a patch that is not there: {name}",
                            "restore it: git checkout -- patches")
    base, result = _ids(data, "base", where), _ids(data, "result", where)
    overlay = _text(data, "overlay", str, where)
    if list(base) != list(result) or not _ID.fullmatch(overlay):
        raise CannotRun(f"pin file {where} does not pin one result for each base",
                        "restore it: git checkout -- patches")
    return Pin(folder.name, folder, _text(data, "wheels", list, where),
               _text(data, "tags", list, where), _text(data, "commits", list, where),
               _text(data, "ends", str, where), base, result, overlay,
               [folder / name for name in names])


def read_pins(folder: Path = PATCHES) -> List[Pin]:
    """All pins, newest first."""
    found = [path.parent for path in folder.glob("*/pin.toml")]

    if not found:
        raise CannotRun(f"no pins under {folder}", "clone the whole project")
    return [read_pin(path) for path in sorted(found, key=lambda p: version_key(p.name),
                                               reverse=True)]


@dataclass(frozen=True)
class Release:
    """An earlier overlay version: its pins and the blob ids of its added files."""
    version: str
    pins: List[Pin]
    added: Dict[str, str]


def read_history(folder: Path = HISTORY) -> List[Release]:
    """Earlier overlay versions, newest first; see ci/refresh.py --freeze."""
    found = []
    for path in sorted(folder.glob("*/added"), key=lambda p: version_key(p.parent.name),
                       reverse=True):
        rows = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
        found.append(Release(path.parent.name, read_pins(path.parent),
                             {check_inside(name, str(path)): blob for blob, name in rows}))
    return found


def version_key(text: str) -> List[int]:
    """Numbers of a version, to compare by."""
    return [int(number) for number in re.findall(r"\d+", text)]


def overlay_files(folder: Path = OVERLAY) -> Dict[str, bytes]:
    """Path below the target's root to content, for every file of the overlay."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(folder).as_posix()
            files[check_inside(name, str(folder))] = path.read_bytes()
    return files
