# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments, text or JSON, exit code."""
import argparse
import json
import sys
from typing import Any, Dict, List, Optional, Sequence

from patchset import __version__
from patchset.files import APPLIED, EDITED, MISSING, PRISTINE, FileState, read_file
from patchset.pins import Pin, overlay_files, read_pins
from patchset.refusals import DONE, INTERRUPTED, REFUSED, Refusal
from patchset.target import Target, find_target, match_pin
from patchset.trees import Trees, plan
from patchset.write import Tree, locked, write

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
    """pristine, applied, mixed (some of each), or edited."""
    kinds = {s.state for s in states}
    if kinds & {EDITED, MISSING}:
        return EDITED
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _refuse_edited(target: Target, states: List[FileState]) -> None:
    edited = [s.path for s in states if s.added and s.state == EDITED]
    if edited:
        raise Refusal(f"files in {target.root} are neither absent nor this overlay's "
                      f"({__version__}); nothing was written",
                      "undo with the overlay version that wrote them, or remove them",
                      edited)


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
    pins, overlay = read_pins(), overlay_files()
    if options.list:
        _list(pins, options.json)
        return DONE
    target = find_target(options.vllm_path)
    with locked(target.root):
        pin, states = match_pin(target, pins, overlay, options.allow_commit)
        state = tree_state(states)
        answer: Dict[str, Any] = dict(root=str(target.root), kind=target.kind, pin=pin.name,
                                      version=target.version, overlay=__version__, state=state)
        if options.status:
            answer["lines"] = [
                f"  {'absent' if s.added and s.state == PRISTINE else s.state:8} {s.path}"
                for s in states] + [f"state: {state}"]
            _report(answer, states, options.json)
            return DONE if state in (PRISTINE, APPLIED) else REFUSED
        _refuse_edited(target, states)
        asked = PRISTINE if options.reverse else APPLIED
        if state == asked and not options.diff:
            answer.update(changed=[], lines=[f"already {asked}, nothing to do"])
            _report(answer, states, options.json)
            return DONE
        trees = plan(target, pin, states, overlay)
        if options.diff:
            _diff(answer, trees, options.json)
            return DONE
        current: Tree = {s.path: read_file(target.root, s.path) for s in states}
        # Added files go in first and out last: what imports them is never alone.
        order = [*overlay, *pin.base]
        if options.reverse:
            order = [*reversed(list(pin.base)), *overlay]
        goal = trees.base if options.reverse else trees.result
        wanted: Tree = {name: goal[name] for name in order}
        changed = [name for name in order if wanted[name] != current[name]]
        lines = _change_lines(changed, current, wanted)
        if state == "mixed":
            lines.insert(0, "half-applied: the run finishes it" if asked == APPLIED
                         else "half-applied: the run undoes it")
        if options.check:
            answer.update(changed=changed, tree=trees.tree, lines=[
                *lines, f"would be {asked}: {len(changed)} files, result tree {trees.tree}"])
        else:
            write(target.root, current, wanted)
            answer.update(changed=changed, tree=trees.tree, state=asked, lines=[
                *lines, f"{asked}: {len(changed)} files"
                + ("" if options.reverse else f", result tree {trees.tree}")])
        _report(answer, states, options.json)
    return DONE


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
