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

last_lines() { grep -v "^ *$" "$1" | tail -n 1; }

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
print((spec.submodule_search_locations or [""])[0] if spec else "")' 2>"$work/log") ||
    refuse 2 "$python cannot look for deep_gemm: $(last_lines "$work/log")" "--python PYTHON"
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
    "$python" "$tools/deepgemm_pin.py" source "$source" >"$work/log" 2>&1 ||
        refuse 1 "$source is not DeepGEMM at the pin: $(last_lines "$work/log")" \
            "check out the commit first, then: git submodule update --init"
    mkdir -p "$work/src/third-party/cutlass"
    cp -r "$source/deep_gemm" "$source/setup.py" "$work/src/"
    cp -r "$source/third-party/cutlass/include" "$work/src/third-party/cutlass/"
else
    commit=$("$python" -c "import sys; sys.path.insert(0, '$tools'); import deepgemm_pin as p
print(p.COMMIT)")
    echo "cloning $repository (about a minute) ..."
    { git clone -q "$repository" "$work/src" && git -C "$work/src" checkout -q "$commit" &&
        git -C "$work/src" submodule -q update --init third-party/cutlass; } >"$work/log" 2>&1 ||
        refuse 2 "DeepGEMM cannot be cloned: $(last_lines "$work/log")" \
            "without a network, unpack it elsewhere and give --source DIR"
    "$python" "$tools/deepgemm_pin.py" source "$work/src" >"$work/log" ||
        refuse 1 "the clone is not DeepGEMM at the pin: $(last_lines "$work/log")" "--repository URL"
fi

echo "building the wheel ..."
# An isolated build fetches setuptools; where it is installed none needs a network.
isolation=()
"$python" -I -c 'import setuptools.command.bdist_wheel' 2>/dev/null &&
    isolation=(--no-build-isolation)
(cd "$work/src" && "$python" -m pip wheel -q --disable-pip-version-check --no-deps \
    ${isolation[@]+"${isolation[@]}"} -w "$work/wheel" .) >"$work/log" 2>&1 ||
    refuse 2 "the wheel cannot be built: $(last_lines "$work/log")" \
        "python -m pip install 'setuptools>=77', and check the room in $work"
wheel=$(echo "$work"/wheel/deep_gemm-*.whl)
mkdir "$work/unpacked"
"$python" -m zipfile -e "$wheel" "$work/unpacked"
"$python" "$tools/deepgemm_pin.py" package "$work/unpacked/deep_gemm" >"$work/log" ||
    refuse 1 "the wheel is not complete: $(last_lines "$work/log")" "check the room in $work"

if [ -n "$wheel_dir" ]; then
    { mkdir -p "$wheel_dir" && cp "$wheel" "$wheel_dir/.new.whl" &&
        mv "$wheel_dir/.new.whl" "$wheel_dir/$(basename "$wheel")"; } 2>"$work/log" ||
        refuse 2 "$wheel_dir cannot be written: $(last_lines "$work/log")" "--wheel-dir DIR"
    echo "wheel: $wheel_dir/$(basename "$wheel")"
fi
[ "$install" = 1 ] || exit 0

if [ "$replace" = 1 ] && [ -n "$installed" ]; then
    "$python" -m pip uninstall -q -y deep_gemm deep-gemm >"$work/log" 2>&1 || true
fi
"$python" -m pip install -q --disable-pip-version-check --no-deps "$wheel" >"$work/log" 2>&1 ||
    refuse 2 "the wheel cannot be installed: $(last_lines "$work/log")" \
        "install into a writable environment: --python VENV/bin/python"
(cd "$work" && "$python" -c 'import cuda.bindings.driver') >/dev/null 2>&1 ||
    "$python" -m pip install -q --disable-pip-version-check "$bindings" >"$work/log" 2>&1 || {
    "$python" -m pip uninstall -q -y deep_gemm >/dev/null 2>&1
    refuse 2 "$bindings, which DeepGEMM imports, cannot be installed: $(last_lines "$work/log")" \
        "install it from a wheel, then run again; deep_gemm was taken out again"
}
(cd "$work" && "$python" - "$tools" <<'PY') >"$work/log" 2>&1 ||
import sys
sys.path.append(sys.argv[1])
import deepgemm_pin
import deep_gemm
wrong = deepgemm_pin.package_differences(list(deep_gemm.__path__)[0])
sys.exit("; ".join(wrong) if wrong else not callable(deep_gemm.gemm_fp8_fp8_bf16_nt))
PY
    { "$python" -m pip uninstall -q -y deep_gemm >/dev/null 2>&1 || true
      refuse 1 "the installed package does not work: $(last_lines "$work/log")" \
        "deep_gemm was taken out again; it needs torch in the same environment"; }
echo "installed and verified: DeepGEMM in $(cd "$work" && "$python" -c '
import importlib.util as u; print(u.find_spec("deep_gemm").submodule_search_locations[0])')"
