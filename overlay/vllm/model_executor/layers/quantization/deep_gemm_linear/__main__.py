# SPDX-License-Identifier: Apache-2.0
"""Bake, look at and carry the kernel cache. Needs DeepGEMM and torch, no GPU, no server."""
import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set

from . import kernel_cache, plan, shapes
from .kernel_cache import KernelCache, KernelSpec

SM_COUNTS = {"H100 SXM, H200": 132, "H100 PCIe": 114, "H20": 78}


class Refusal(Exception):
    """An expected failure: one sentence, and a hint."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(f"error: {sentence}\n\nhint: {hint}")


def read_config(name: str) -> Dict[str, Any]:
    """A config.json: a file, a model folder, or a Hugging Face id."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        if name.count("/") != 1 or name.startswith((".", "/")):
            raise Refusal(f"{name} is no file, no folder and no model id",
                          "give a config.json, a model folder or an id such as "
                          "Qwen/Qwen3-32B-FP8")
        try:
            from huggingface_hub import hf_hub_download
            path = Path(hf_hub_download(name, "config.json"))
        except Exception as error:
            raise Refusal(f"the config of {name} cannot be fetched: "
                          f"{str(error).splitlines()[0]}",
                          "give a local config.json") from None
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read: {error}", "give a config.json") from None
    return config


def _include() -> str:
    try:
        import deep_gemm
        import deep_gemm.jit_kernels.gemm  # noqa: F401
        include = deep_gemm.__path__[0] + "/include"
        kernel_cache.sources_key(include)
    except Exception as error:
        raise Refusal(f"DeepGEMM cannot be used: {error}",
                      "bash tools/install_deepgemm.sh") from None
    return include


def planned(configs: Sequence[str], tp_sizes: Sequence[int], sms: Sequence[int],
            max_m: int) -> List[KernelSpec]:
    """All kernels of these models, in a fixed order; says what is left out on stderr."""
    wanted: Set[KernelSpec] = set()
    for name in configs:
        config = read_config(name)
        for tp in tp_sizes:
            try:
                found = shapes.weight_shapes(config, tp)
            except shapes.UnknownModel as error:
                raise Refusal(f"{name}: {error}", "see README.md, section Kernel cache") from None
            for n, k in found:
                why = shapes.refusal(n, k)
                if why:
                    print(f"{name} TP {tp}: weight [{n}, {k}] stays on vLLM's own path, {why}",
                          file=sys.stderr)
                    continue
                for count in sms:
                    wanted.update(plan.kernels(n, k, count, max_m))
    return sorted(wanted)


def precompile(options: argparse.Namespace) -> None:
    """Compile what is missing; says how many kernels and seconds."""
    cache = KernelCache(_include(), [Path(options.out)] if options.out else None)
    specs = planned(options.config, options.tp_size, options.sms, options.max_m)
    missing = [spec for spec in specs if cache.find(spec) is None]
    print(f"{len(specs)} kernels, {len(specs) - len(missing)} of them in {cache.folders[0]}",
          flush=True)
    if options.dry_run or not missing:
        return
    compiler, why = kernel_cache.find_compiler()
    if compiler is None:
        raise Refusal(f"no usable compiler: {why}",
                      "install CUDA 12.3 or newer, or set DG_JIT_NVCC_COMPILER")
    why = kernel_cache.toolchain_error(compiler)
    if why:
        raise Refusal(f"{compiler.path} does not compile C++20: {why}",
                      "install g++ 10 or newer; NVCC_PREPEND_FLAGS='-ccbin g++-12' names one")
    print(f"compiling {len(missing)} with {compiler.path} ({compiler.name})", flush=True)
    started = time.monotonic()
    pool = ThreadPoolExecutor(options.jobs)
    try:
        jobs = [pool.submit(cache.get, spec) for spec in missing]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            _progress(done, len(missing), time.monotonic() - started)
    except (kernel_cache.CompileError, OSError) as error:
        raise Refusal(str(error), "the kernels made so far are kept; run it again") from None
    except KeyboardInterrupt:
        raise Refusal(f"interrupted after {cache.compiled} kernels",
                      "they are kept; run it again to go on") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(specs)} kernels ready, {cache.compiled} compiled in "
          f"{time.monotonic() - started:.0f} s")


def _progress(done: int, total: int, seconds: float) -> None:
    if sys.stdout.isatty():
        filled = 40 * done // total
        print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total} {seconds:.0f} s",
              end="\n" if done == total else "", flush=True)
    elif done % 10 == 0 or done == total:
        print(f"{done} of {total} kernels, {seconds:.0f} s", flush=True)


def list_cache(options: argparse.Namespace) -> None:
    """One line a file: size, state, path; --verify removes what is broken."""
    broken = total = 0
    for root in _roots(options):
        for path in sorted(root.rglob("*.cubin")):
            whole = kernel_cache.is_whole(path.read_bytes())
            total, broken = total + 1, broken + (not whole)
            if options.command == "list" or not whole:
                print(f"{path.stat().st_size:8} {'ok    ' if whole else 'broken'} {path}")
            if options.command == "verify" and not whole:
                path.unlink()
    print(f"{total} kernels, {broken} broken"
          + (" and removed" if options.command == "verify" and broken else ""))


def pack(options: argparse.Namespace) -> None:
    """All whole kernels of the cache into one tar file, the same bytes every time."""
    import io
    import tarfile
    root, count = _roots(options)[0], 0
    temporary = f"{options.file}.{os.getpid()}"
    with tarfile.open(temporary, "w") as archive:
        for path in sorted(root.rglob("*.cubin")):
            content = path.read_bytes()
            if kernel_cache.is_whole(content):
                entry = tarfile.TarInfo(path.relative_to(root).as_posix())
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
                count += 1
    os.replace(temporary, options.file)
    print(f"{count} kernels packed into {options.file}")


def unpack(options: argparse.Namespace) -> None:
    """Bring packed kernels into the cache; existing whole files are kept."""
    import re
    import tarfile
    root, count = _roots(options)[0], 0
    try:
        with tarfile.open(options.file) as archive:
            for entry in archive:
                if not re.fullmatch(r"[0-9a-f]{16}/[\w.-]+/\w+\.cubin", entry.name) \
                        or not entry.isfile():
                    raise Refusal(f"{options.file} is not a packed kernel cache: it holds "
                                  f"{entry.name!r}", "make one: python kernels.py pack FILE")
                content, path = archive.extractfile(entry).read(), root / entry.name
                if kernel_cache.is_whole(content) and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    temporary = path.with_name(f".{path.name}.{os.getpid()}")
                    temporary.write_bytes(content)
                    os.replace(temporary, path)
                    count += 1
    except (OSError, tarfile.TarError) as error:
        raise Refusal(f"{options.file} cannot be unpacked: {error}",
                      "make one: python kernels.py pack FILE") from None
    print(f"{count} kernels unpacked into {root}")


def _roots(options: argparse.Namespace) -> List[Path]:
    return [Path(options.out)] if options.out else kernel_cache.roots()


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command. Returns 0, 2 for a refusal, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="kernels.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bake = commands.add_parser("precompile", help="compile every kernel a model can ask for")
    bake.add_argument("config", nargs="+", help="config.json, model folder or Hugging Face id")
    bake.add_argument("--tp-size", type=int, nargs="+", default=[1], metavar="N",
                      help="tensor-parallel sizes (default: 1)")
    bake.add_argument("--max-m", type=int, default=8192,
                      help="most tokens in one step, max_num_batched_tokens (default: 8192)")
    bake.add_argument("--sms", type=int, nargs="+", default=sorted(set(SM_COUNTS.values())),
                      metavar="COUNT", help="SM counts (default: 78 114 132, for "
                      "H20, H100 PCIe, H100 SXM and H200)")
    bake.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    bake.add_argument("--dry-run", action="store_true", help="only count")
    made = [bake, commands.add_parser("list", help="what the cache holds"),
            commands.add_parser("verify", help="remove broken files")]
    for name, text in (("pack", "the cache into one file"), ("unpack", "one file into the cache")):
        made.append(commands.add_parser(name, help=text))
        made[-1].add_argument("file")
    for command in made:
        command.add_argument("--out", metavar="DIR", help="cache folder (default: "
                             "$DG_JIT_CACHE_DIR or $VLLM_CACHE_ROOT, /deep_gemm_linear)")
    options = parser.parse_args(argv)
    run = dict(precompile=precompile, list=list_cache, verify=list_cache, pack=pack,
               unpack=unpack)[options.command]
    try:
        run(options)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 130 if "interrupted" in str(refusal) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
