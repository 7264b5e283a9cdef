#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build and install DeepGEMM at the pinned commit, from a clone or from --source.
#
#   tools/install_deepgemm.sh [--python PYTHON] [--source DIR] [--wheel-dir DIR]
#                             [--no-install] [--replace] [--repository URL]
#
# DIR is a checkout or an unpacked archive of DeepGEMM with CUTLASS below
# third-party/cutlass (its include/ is enough); it is copied, never changed.
# Sources and the installed package are compared with the pinned content ids.
# Exit codes: 0 done and verified, 1 refused, 2 cannot run.
set -euo pipefail

tools=$(cd "$(dirname "$0")" && pwd)
repository=https://github.com/deepseek-ai/DeepGEMM
bindings='cuda-bindings>=12.8,<13'
python=python3 source='' wheel_dir='' install=1 replace=0

refuse() { # code, sentence, hint
    printf 'error: %s\n\nhint: %s\n' "$2" "$3" >&2
    exit "$1"
}

# What a command prints is kept here and not in a file: the disk may be full.
said=''
attempt() { said=$("$@" 2>&1); }
last_line() { printf '%s\n' "$said" | grep -v '^ *$' | tail -n 1; }

while [ $# -gt 0 ]; do
    case $1 in
        --python | --source | --wheel-dir | --repository)
            [ $# -ge 2 ] || refuse 2 "$1 needs a value" "tools/install_deepgemm.sh --help"
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift 2 ;;
        --no-install) install=0; shift ;;
        --replace) replace=1; shift ;;
        -h | --help) sed -n '3,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) refuse 2 "unknown argument $1" "tools/install_deepgemm.sh --help" ;;
    esac
done

[ "$install" = 1 ] || [ -n "$wheel_dir" ] ||
    refuse 2 "--no-install without --wheel-dir would do nothing" "add --wheel-dir DIR"
command -v git >/dev/null || refuse 2 "git is not on the PATH" "install git 2.25 or newer"
python=$(command -v "$python") || refuse 2 "there is no such Python" "--python PYTHON"
"$python" -m pip --version >/dev/null 2>&1 || refuse 2 "$python has no pip" "$python -m ensurepip"

work=$(mktemp -d) || refuse 2 "no temporary folder can be made" "set TMPDIR"
trap 'rm -rf "$work"' EXIT

# Asked from an empty folder: a cuda.py or deep_gemm/ in this one would be found first.
installed=$(cd "$work" && "$python" -c '
import importlib.util as u
spec = u.find_spec("deep_gemm")
print((spec.submodule_search_locations or [""])[0] if spec else "")' 2>/dev/null) ||
    refuse 2 "$python cannot look for deep_gemm" "--python PYTHON"
if [ -n "$installed" ] && [ "$install" = 1 ]; then
    if difference=$("$python" "$tools/deepgemm_pin.py" package "$installed"); then
        echo "already installed: $difference in $installed"
        [ -n "$wheel_dir" ] || exit 0
        install=0
    elif [ "$replace" = 0 ]; then
        refuse 1 "another deep_gemm is installed in $installed: $difference" \
            "add --replace, or use another environment with --python"
    fi
fi

if [ -n "$source" ]; then
    [ -d "$source" ] || refuse 2 "$source is not a folder" "--source DIR"
    attempt "$python" "$tools/deepgemm_pin.py" source "$source" ||
        refuse 1 "$source is not DeepGEMM at the pin: $(last_line)" \
            "check out the commit first, then: git submodule update --init"
    { attempt mkdir -p "$work/src/third-party/cutlass" &&
        attempt cp -r "$source/deep_gemm" "$source/setup.py" "$work/src/" &&
        attempt cp -r "$source/third-party/cutlass/include" "$work/src/third-party/cutlass/"; } ||
        refuse 2 "the sources cannot be copied: $(last_line)" "TMPDIR=/a/folder/with/200/MB"
else
    commit=$("$python" -c "import sys; sys.path.insert(0, '$tools'); import deepgemm_pin as p
print(p.COMMIT)")
    echo "cloning $repository (about a minute) ..."
    { attempt git clone -q "$repository" "$work/src" &&
        attempt git -C "$work/src" checkout -q "$commit" &&
        attempt git -C "$work/src" submodule -q update --init third-party/cutlass; } ||
        refuse 2 "DeepGEMM cannot be cloned: $(last_line)" \
            "without a network, unpack it elsewhere and give --source DIR"
    attempt "$python" "$tools/deepgemm_pin.py" source "$work/src" ||
        refuse 1 "the clone is not DeepGEMM at the pin: $(last_line)" "--repository URL"
fi

echo "building the wheel ..."
# An isolated build fetches setuptools; where it is installed none needs a network.
isolation=()
"$python" -I -c 'import setuptools.command.bdist_wheel' 2>/dev/null &&
    isolation=(--no-build-isolation)
build() { cd "$work/src" && "$python" -m pip wheel -q --disable-pip-version-check --no-deps \
    ${isolation[@]+"${isolation[@]}"} -w "$work/wheel" .; }
attempt build || refuse 2 "the wheel cannot be built: $(last_line)" \
    "python -m pip install 'setuptools>=77', or TMPDIR=/a/folder/with/200/MB"
wheel=$(echo "$work"/wheel/deep_gemm-*.whl)
{ attempt mkdir "$work/unpacked" && attempt "$python" -m zipfile -e "$wheel" "$work/unpacked" &&
    attempt "$python" "$tools/deepgemm_pin.py" package "$work/unpacked/deep_gemm"; } ||
    refuse 1 "the wheel is not complete: $(last_line)" "TMPDIR=/a/folder/with/200/MB"

if [ -n "$wheel_dir" ]; then
    { attempt mkdir -p "$wheel_dir" && attempt cp "$wheel" "$wheel_dir/.new.whl" &&
        attempt mv "$wheel_dir/.new.whl" "$wheel_dir/$(basename "$wheel")"; } ||
        refuse 2 "$wheel_dir cannot be written: $(last_line)" "--wheel-dir DIR"
    echo "wheel: $wheel_dir/$(basename "$wheel")"
fi
[ "$install" = 1 ] || exit 0

if [ "$replace" = 1 ] && [ -n "$installed" ]; then
    attempt "$python" -m pip uninstall -q -y deep_gemm deep-gemm || true
fi
attempt "$python" -m pip install -q --disable-pip-version-check --no-deps "$wheel" ||
    refuse 2 "the wheel cannot be installed: $(last_line)" \
        "install into a writable environment: --python VENV/bin/python"
take_out() { "$python" -m pip uninstall -q -y deep_gemm >/dev/null 2>&1 || true; }
(cd "$work" && "$python" -c 'import cuda.bindings.driver') >/dev/null 2>&1 ||
    attempt "$python" -m pip install -q --disable-pip-version-check "$bindings" || {
    take_out
    refuse 2 "$bindings, which DeepGEMM imports, cannot be installed: $(last_line)" \
        "install it from a wheel, then run again; deep_gemm was taken out again"
}
verify() { cd "$work" && "$python" -c '
import sys
sys.path.append(sys.argv[1])
import deepgemm_pin
import deep_gemm
wrong = deepgemm_pin.package_differences(list(deep_gemm.__path__)[0])
sys.exit("; ".join(wrong) if wrong else not callable(deep_gemm.gemm_fp8_fp8_bf16_nt))' "$tools"; }
attempt verify || {
    take_out
    refuse 1 "the installed package does not work: $(last_line)" \
        "deep_gemm was taken out again; it needs torch in the same environment"
}
echo "installed and verified: DeepGEMM in $(cd "$work" && "$python" -c '
import importlib.util as u; print(u.find_spec("deep_gemm").submodule_search_locations[0])')"
