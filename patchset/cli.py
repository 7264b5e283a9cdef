# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments, text or JSON, exit code."""
import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from patchset import __version__
from patchset.files import (
    APPLIED,
    EDITED,
    MISSING,
    OLDER,
    PRISTINE,
    FileState,
    blob_id,
    is_leftover,
    prune,
    read_file,
    sweep,
)
from patchset.pins import Pin, Release, overlay_files, read_history, read_pins, version_key
from patchset.record import Tree, find_record, rewritten
from patchset.refusals import DONE, INTERRUPTED, REFUSED, Refusal
from patchset.target import Target, find_target, match_pin
from patchset.trees import Trees, base_files, plan
from patchset.write import locked, write

_EPILOG = """exit codes: 0 in the asked state; 1 refused, nothing changed;
2 cannot run; 3 a patch conflicts; 130 interrupted"""


def _arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="apply.py", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Patch a pinned vLLM so that its block-FP8 linear layers run "
        "through DeepGEMM. All or nothing; --reverse takes it back byte for byte.")
    parser.add_argument("--vllm-path", metavar="DIR",
                        help="checkout root, vllm package folder or site-packages "
                        "(default: the vllm this interpreter would import)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say what would change, write nothing")
    what.add_argument("--status", action="store_true", help="state of each file, from its content")
    what.add_argument("--reverse", action="store_true", help="bring vLLM's own files back")
    what.add_argument("--diff", action="store_true", help="the result as one patch on stdout")
    what.add_argument("--list", action="store_true", help="the pins")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    parser.add_argument("--allow-commit", metavar="HEAD_SHA",
                        help="accept this HEAD, whose patched files are a pin's own")
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args(argv)


def tree_state(states: List[FileState]) -> str:
    """pristine, applied, older, mixed (some of each), or edited."""
    kinds = {s.state for s in states}
    if kinds & {EDITED, MISSING}:
        return EDITED
    if OLDER in kinds:
        return OLDER
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _refuse_edited(target: Target, states: List[FileState]) -> None:
    edited = [s.path for s in states if s.added and s.state == EDITED]
    if not edited:
        return
    init = next((name for name in edited if name.endswith("deep_gemm_linear/__init__.py")), None)
    found = re.search(rb'^__version__ = "([\d.]+)"',
                      read_file(target.root, init) or b"", re.M) if init else None
    if found and version_key(found[1].decode()) > version_key(__version__):
        raise Refusal(f"{target.root} holds overlay {found[1].decode()}, newer than this "
                      f"{__version__}", "use that version's apply.py, or reverse with it first")
    raise Refusal(f"files in {target.root} are neither absent nor this overlay's "
                  f"({__version__}); nothing was written",
                  "undo with the overlay version that wrote them, or remove them", edited)


@dataclass
class Found:
    """What is in the target: its pin, each file's state, and earlier releases."""
    pin: Pin
    states: List[FileState]
    history: List[Release]

    @property
    def version(self) -> str:
        """The overlay version that the tree is patched by, as far as it is."""
        return next((s.version for s in self.states if s.version), __version__)


def _find(target: Target, overlay: Dict[str, bytes], allow_commit: Optional[str]) -> Found:
    history = read_history()
    pin, states = match_pin(target, read_pins(), {n: blob_id(c) for n, c in overlay.items()},
                            history, allow_commit)
    return Found(pin, states, history)


def _report(answer: Dict[str, Any], states: List[FileState], as_json: bool) -> None:
    if as_json:
        answer["files"] = [dict(path=s.path, state=s.state, added=s.added) for s in states]
        print(json.dumps(answer, indent=2))
        return
    version = f" {answer['version']}" if answer["version"] else ""
    print(f"{answer['kind']} {answer['root']}: vllm{version}, pin {answer['pin']}")
    for line in answer["lines"]:
        print(line)


def _change_lines(changed: List[str], current: Tree, wanted: Tree) -> List[str]:
    lines = []
    for name in changed:
        old, new = current[name], wanted[name]
        verb = "add" if old is None else "remove" if new is None else "patch"
        count = len((new or old or b"").splitlines())
        if verb == "patch":
            before, after = set((old or b"").splitlines()), set((new or b"").splitlines())
            note = f"+{len(after - before)} -{len(before - after)} lines"
        else:
            note = f"{count} lines"
        lines.append(f"  {verb:6} {name} ({note})")
    return lines


def _run(options: argparse.Namespace) -> int:
    if options.list:
        _list(read_pins(), options.json)
        return DONE
    overlay = overlay_files()
    target = find_target(options.vllm_path)
    with locked(target.root):
        found = _find(target, overlay, options.allow_commit)
        state = tree_state(found.states)
        record = find_record(target.root) if not target.checkout else None
        current: Tree = {s.path: read_file(target.root, s.path) for s in found.states}
        if record:
            current[record] = read_file(target.root, record)
        if state in (APPLIED, PRISTINE) and record and \
                _record_is_stale(current, record, overlay):
            state = "mixed"
        answer: Dict[str, Any] = dict(
            root=str(target.root), kind=target.kind, pin=found.pin.name,
            version=target.version, overlay=found.version, state=state)
        if options.status:
            answer["lines"] = [
                f"  {'absent' if s.added and s.state == PRISTINE else s.state:8} {s.path}"
                for s in found.states] + [f"state: {_said(state, found)}"]
            _report(answer, found.states, options.json)
            return DONE if state in (PRISTINE, APPLIED) else REFUSED
        _refuse_edited(target, found.states)
        if not (options.check or options.diff):
            sweep(target.root, current)
        asked = PRISTINE if options.reverse else APPLIED
        if state == PRISTINE and _leftover(target, overlay):
            state = "mixed"
        if state == asked and not options.diff:
            answer.update(changed=[], lines=[f"already {asked}, nothing to do"])
            _report(answer, found.states, options.json)
            return DONE
        base = base_files(target, found.pin, found.states, found.history)
        trees = plan(base, found.pin, overlay)
        if options.diff:
            _diff(answer, trees, options.json)
            return DONE
        wanted = _wanted(trees, found, current, record, options.reverse)
        changed = [name for name in wanted if wanted[name] != current[name]]
        lines = _change_lines(changed, current, wanted)
        if state in ("mixed", OLDER):
            lines.insert(0, f"{_said(state, found)}: the run "
                         f"{'undoes' if options.reverse else 'finishes'} it")
        if options.check:
            answer.update(changed=changed, tree=trees.tree, lines=[
                *lines, f"would be {asked}: {len(changed)} files, result tree {trees.tree}"])
        else:
            write(target.root, current, wanted)
            for folder in _leftover(target, overlay):
                prune(target.root, folder)
            answer.update(changed=changed, tree=trees.tree, state=asked, overlay=__version__,
                          lines=[*lines, f"{asked}: {len(changed)} files"
                                 + ("" if options.reverse else f", result tree {trees.tree}")])
        _report(answer, found.states, options.json)
    return DONE


def _said(state: str, found: Found) -> str:
    if state == OLDER:
        return f"applied by overlay {found.version}, this is {__version__}"
    if state != "mixed":
        return state
    if all((s.state == APPLIED) == s.added for s in found.states):
        return "half-applied: vllm was reinstalled or upgraded under the overlay"
    return "half-applied"


def _leftover(target: Target, overlay: Dict[str, bytes]) -> List[Path]:
    folders = {(target.root / name).parent for name in overlay}
    return [folder for folder in sorted(folders) if is_leftover(folder)]


def _record_is_stale(current: Tree, record: str, overlay: Dict[str, bytes]) -> bool:
    mine = {name: content for name, content in current.items() if name != record}
    known: List[Tree] = [dict.fromkeys(overlay), mine, {**overlay}]
    return rewritten(current[record] or b"", known, mine) != current[record]


def _wanted(trees: Trees, found: Found, current: Tree, record: Optional[str],
            reverse: bool) -> Tree:
    """What to write, in an order in which every moment's tree imports and uninstalls."""
    goal = trees.base if reverse else trees.result
    added = [name for name in goal if trees.base[name] is None]
    old = [s.path for s in found.states if s.added and s.path not in goal]
    order = [*reversed(list(found.pin.base)), *added, *old] if reverse else \
        [*added, *found.pin.base, *old]
    wanted: Tree = {name: goal.get(name) for name in order}
    for name in wanted:
        current.setdefault(name, None)
    if record:
        text = rewritten(current[record] or b"", (trees.base, trees.result, current), wanted)
        wanted = {**wanted, record: text} if reverse else {record: text, **wanted}
    return wanted


def _diff(answer: Dict[str, Any], trees: Trees, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**answer, "diff": trees.diff.decode()}, indent=2))
    else:
        sys.stdout.buffer.write(trees.diff)


def _list(pins: Sequence[Pin], as_json: bool) -> None:
    rows: List[Dict[str, Any]] = [
        dict(pin=p.name, wheels=p.wheels, tags=p.tags, commits=p.commits, ends=p.ends,
             base=p.base, result=p.result, overlay=p.overlay) for p in pins]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['pin']:14} vllm {', '.join(row['wheels'])}; ends: {row['ends']}")
        for name in row["base"]:
            print(f"  {name}  {row['base'][name][:12]} -> {row['result'][name][:12]}")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command. Returns its exit code; prints a refusal on stderr."""
    options = _arguments(argv)
    try:
        return _run(options)
    except Refusal as refusal:
        if options.json:
            print(json.dumps(dict(error=refusal.sentence, hint=refusal.hint,
                                  files=refusal.files, exit=refusal.code), indent=2))
        else:
            print(refusal, file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
