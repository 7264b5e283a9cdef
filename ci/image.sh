#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the Dockerfile where no Docker engine runs, and check what came out.
#
#   ci/image.sh --deepgemm DIR [--site DIR] [--toolkit DIR] [--keep]
#
# Needs root, buildah and debootstrap (Debian packages). The base image is made
# here: a Debian with the real vLLM 0.9.1 files and the Python packages of --site
# (default: .venv). DIR of --deepgemm is what install_deepgemm.sh takes as
# --source; of --toolkit, a CUDA toolkit (default: the one nvcc belongs to).
# Exit codes: 0 built and checked, 1 a check failed, 2 cannot run.
set -euo pipefail

project=$(cd "$(dirname "$0")/.." && pwd)
deepgemm='' site='' toolkit='' keep=0
config=benchmarks/models/qwen3-8b.json
precompile="$config --sms 132 --max-m 64"

refuse() { # code, sentence, hint
    printf 'error: %s\n\nhint: %s\n' "$2" "$3" >&2
    exit "$1"
}

while [ $# -gt 0 ]; do
    case $1 in
        --deepgemm | --site | --toolkit)
            [ $# -ge 2 ] || refuse 2 "$1 needs a value" "ci/image.sh --help"
            printf -v "${1#--}" %s "$2"
            shift 2 ;;
        --keep) keep=1; shift ;;
        -h | --help) sed -n '3,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) refuse 2 "unknown argument $1" "ci/image.sh --help" ;;
    esac
done
[ "$(id -u)" = 0 ] || refuse 2 "buildah in a chroot needs root" "sudo ci/image.sh"
for tool in buildah debootstrap; do
    command -v $tool >/dev/null || refuse 2 "$tool is not installed" "apt-get install $tool"
done
[ -d "$deepgemm/deep_gemm" ] || refuse 2 "there are no DeepGEMM sources in '$deepgemm'" \
    "--deepgemm DIR, a checkout at the pin with its CUTLASS submodule"
if [ -z "$site" ]; then
    site=$("$project/.venv/bin/python" -c 'import sysconfig
print(sysconfig.get_paths()["purelib"])' 2>/dev/null) || refuse 2 "there is no .venv" "make lint"
fi
if [ -z "$toolkit" ]; then
    # nvcc may be a script that calls the one in the toolkit; --dryrun tells.
    toolkit=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') ||
        refuse 2 "there is no nvcc" "--toolkit DIR"
    toolkit=$(cd "$toolkit" && pwd)
fi
work=$(mktemp -d) made=()
finish() {
    status=$?
    mountpoint -q "$work/root" && umount -R "$work/root"
    buildah rm "${made[@]}" >/dev/null 2>&1 || true
    [ "$keep" = 1 ] || buildah rmi -f vllm-base:ci toolkit:ci vllm-deepgemm:ci >/dev/null 2>&1 || true
    rm -rf "$work"
    exit $status
}
trap finish EXIT
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
from() { made+=("$(buildah from "$@")"); container=${made[-1]}; mounted=$(buildah mount "$container"); }

say "base system"
mirror=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null |
    sed -n 's/^URIs: *//p; s/^deb \(http[^ ]*\).*/\1/p' | sed -n 1p) || true
debootstrap --variant=minbase --include=python3,python3-pip,git,ca-certificates,g++ \
    bookworm "$work/base" "$mirror" >"$work/log" 2>&1 ||
    refuse 2 "no base system: $(tail -n 1 "$work/log")" "is a Debian mirror reachable?"
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED

say "image vllm-base:ci, with the real vLLM 0.9.1 files"
from scratch
cp -a "$work/base/." "$mounted/"
packages=$mounted/usr/local/lib/python3.11/dist-packages
mkdir -p "$packages"
cp -a "$site/." "$packages/"
rm -rf "$packages"/deep_gemm* "$packages"/pip "$packages"/pip-*
rm -rf "$packages"/cuda "$packages"/cuda_*
# The build itself fetches nothing: what the final stage installs lies in the base.
{ "$project/.venv/bin/pip" install -q --disable-pip-version-check --target "$packages" --upgrade \
    'setuptools>=77,<80' && "$project/.venv/bin/pip" download -q --disable-pip-version-check \
    -d "$mounted/wheels" 'cuda-bindings>=12.8,<13'; } >"$work/log" 2>&1 ||
    refuse 2 "no packages for the base: $(tail -n 1 "$work/log")" "is PyPI reachable?"
buildah config --env PIP_NO_INDEX=1 --env PIP_FIND_LINKS=/wheels "$container"
cp -a "$("$project/.venv/bin/python" -c "import sys; sys.path.insert(0, '$project/tests')
import real_vllm; print(real_vllm.sources('0.9.1'))")/." "$packages/"
rm -rf "$work/base"
buildah config --entrypoint '["python3", "-m", "vllm.entrypoints.openai.api_server"]' "$container"
base_size=$(du -sm "$mounted" | cut -f1)
buildah commit -q "$container" vllm-base:ci >/dev/null

say "image toolkit:ci, from $toolkit"
from scratch
mkdir -p "$mounted/usr/local"
cp -aL "$toolkit" "$mounted/usr/local/cuda"
buildah commit -q "$container" toolkit:ci >/dev/null

say "Dockerfile"
mkdir "$work/context"
(cd "$project" && git ls-files -z --cached --others --exclude-standard |
    tar c --null -T - ) | tar x -C "$work/context"
mkdir -p "$work/context/DeepGEMM/third-party/cutlass"
cp -r "$deepgemm/deep_gemm" "$deepgemm/setup.py" "$work/context/DeepGEMM/"
cp -r "$deepgemm/third-party/cutlass/include" "$work/context/DeepGEMM/third-party/cutlass/"
build() { # tag, more arguments
    buildah bud --isolation chroot --format docker --tag "$@" --build-arg BASE_IMAGE=localhost/vllm-base:ci \
        --build-arg BUILD_IMAGE=localhost/toolkit:ci --build-arg DEEPGEMM_SOURCE=DeepGEMM \
        --build-arg PRECOMPILE="$precompile" "$work/context"
}
build vllm-deepgemm:ci || refuse 1 "the image does not build" "the step is the last one above"

say "checks"
from vllm-deepgemm:ci
check() { # sentence, command ...
    local sentence=$1
    shift
    "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; refuse 1 "not so: $sentence" "ci/image.sh --keep"; }
    say "ok: $sentence"
}
packages=$mounted/usr/local/lib/python3.11/dist-packages
blobs() {
    "$project/.venv/bin/python" - "$project" "$packages" <<'PY'
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from patchset.files import blob_id
from patchset.pins import overlay_files, read_pins
pin = next(p for p in read_pins() if p.name == "v0.9.1")
site = Path(sys.argv[2])
for name, wanted in pin.result.items():
    assert blob_id((site / name).read_bytes()) == wanted, name
for name, content in overlay_files().items():
    assert (site / name).read_bytes() == content, name
PY
}
labels() {
    buildah inspect --type image vllm-deepgemm:ci | "$project/.venv/bin/python" -c '
import json, sys
config = json.load(sys.stdin)["OCIv1"]["config"]
labels = config["Labels"]
assert labels["vllm.deepgemm.pin"] == "v0.9.1", labels
assert labels["vllm.deepgemm.deepgemm-commit"].startswith("bfe983c"), labels
assert labels["vllm.deepgemm.overlay"], labels
assert config["Entrypoint"] == ["python3", "-m", "vllm.entrypoints.openai.api_server"], config
assert "DG_JIT_CACHE_DIR=/opt" in config["Env"], config'
}
small() {
    local size
    size=$(du -sm "$mounted" | cut -f1)
    echo "$((size - base_size)) MB over the base"
    [ $((size - base_size)) -lt 150 ]
}
mkdir "$work/root"
readonly_root() { # command ...: as a uid that no file names, on a root that cannot be written
    # shellcheck disable=SC2016  # the inner shell expands them
    unshare -m sh -c 'root=$1; shift
        mount --bind "$0" "$root" && mount -o remount,ro,bind "$root" &&
        mount -t tmpfs tmpfs "$root/tmp" && mount -t proc proc "$root/proc" &&
        ! touch "$root/written" 2>/dev/null &&
        exec chroot --userspec=31415:31415 "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin \
            HOME=/ DG_JIT_CACHE_DIR=/opt VLLM_USE_DEEP_GEMM_LINEAR=1 "$@"' \
        "$mounted" "$work/root" "$@"
}
check "patched files and overlay are those of the pin" blobs
check "DeepGEMM's wheel is installed" test -e "$packages/deep_gemm-1.0.0.dist-info/RECORD"
check "labels and entry point" labels
check "under 150 MB over the base" small
cat "$work/log"
cp "$project/$config" "$mounted/opt/config.json"
module=vllm.model_executor.layers.quantization.deep_gemm_linear
check "any uid on a read-only root finds every kernel, without a compiler" \
    readonly_root python3 -m $module precompile /opt/config.json --sms 132 --max-m 64
grep -q '^\([0-9]*\) kernels, \1 of them' "$work/log" ||
    refuse 1 "kernels are missing: $(cat "$work/log")" "PRECOMPILE"
check "any uid on a read-only root imports the patched module" \
    readonly_root python3 -c "import $module.gate, deep_gemm"
precompile=''
if build broken:ci --build-arg PIN=v0.9.0 >"$work/log" 2>&1; then
    refuse 1 "an image with a wrong label was built" "Dockerfile"
fi
grep -q "pin v0.9.1" "$work/log" || { cat "$work/log"; refuse 1 "it failed elsewhere" "Dockerfile"; }
say "ok: a label that lies does not build"
say "done"
