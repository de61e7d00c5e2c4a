#!/bin/sh
# Installs gptoss-trt into a virtual environment. The Makefile, both images and CI run this one script.
#
#   docker/install.sh VENV [EXTRAS]      editable from this folder, or from WHEEL when that is set
#
# PYTHON            interpreter to use; else the first of python3.11, python3.12, python3 that can serve
# WHEEL             a built wheel to install in place of this folder
# TORCH             requirement of torch, taken as it is; "none" leaves torch to the image. Unset: torch==2.13.0, its CPU
#                   build where nvidia-smi finds no GPU
# TORCH_INDEX_URL   index to take torch from
# All that it says goes to stderr, so that `make demo` keeps stdout for the conversation.
set -eu
exec 1>&2

venv=${1:?usage: docker/install.sh VENV [EXTRAS]}
extras=${2:-pypi-server,dev}
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
torch=${TORCH:-torch==2.13.0}

stop() {
    echo "install: $*"
    exit 1
}

# Prints nothing when interpreter $1 can make the environment and serve from it, else what is missing.
lacks() {
    "$1" - <<'EOF' 2>/dev/null || echo "a working interpreter"
import importlib.util, pathlib, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
places = [sysconfig.get_config_var("LIBDIR"), sys.base_prefix + "/lib",
          "/usr/lib/%s" % sysconfig.get_config_var("MULTIARCH")]
missing = []
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    missing.append("Python 3.11 or 3.12 (this is %s): apt install python3.11 python3.11-venv" % version)
if not importlib.util.find_spec("ensurepip"):
    missing.append("the module venv: apt install python%s-venv" % version)
if not any(p and pathlib.Path(p, "libpython%s.so.1.0" % version).is_file() for p in places):
    missing.append("libpython%s.so.1.0: apt install libpython%s" % (version, version))
print("; ".join(missing), end="")
EOF
}

pick() {
    if [ -n "${PYTHON:-}" ]; then
        why=$(lacks "$PYTHON")
        [ -z "$why" ] || stop "$PYTHON lacks $why"
        echo "$PYTHON" >"$picked"
        return
    fi
    reasons=
    for candidate in python3.11 python3.12 python3; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        why=$(lacks "$candidate")
        if [ -z "$why" ]; then
            command -v "$candidate" >"$picked"
            return
        fi
        reasons="$reasons
  $candidate lacks $why"
    done
    stop "no Python can serve here.${reasons:-
  no python3.11, python3.12 or python3 on PATH: apt install python3.11 python3.11-venv libpython3.11}"
}

install_torch() {
    [ "$torch" != none ] || return 0
    index=
    [ -z "${TORCH_INDEX_URL:-}" ] || index="--index-url $TORCH_INDEX_URL"
    if [ -z "${TORCH:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
        # The CPU build is a tenth of the other's size; an index without it answers at once.
        # shellcheck disable=SC2086 # $index is two words or none
        "$venv/bin/pip" install --quiet $index "$torch+cpu" 2>/dev/null && return 0
    fi
    # shellcheck disable=SC2086
    "$venv/bin/pip" install --quiet $index "$torch"
}

# One stamp for each set of extras; a larger set (pypi-server,dev) serves a smaller one (pypi-server).
want=$(cat "$here/pyproject.toml" "$here/docker/install.sh" | cksum)" ${WHEEL:-} $torch"
for stamp in "$venv/.installed-$extras" "$venv/.installed-$extras",*; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
        exit 0
    fi
done

picked=$(mktemp)
trap 'rm -f "$picked"' EXIT
pick
python=$(cat "$picked")
echo "install: $("$python" --version) at $python -> $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip 'setuptools>=77' wheel
install_torch
if [ -n "${WHEEL:-}" ]; then
    "$venv/bin/pip" install --quiet "${WHEEL}[$extras]"
else
    # setuptools warns of a top folder that is named as the package; that folder is the package.
    PYTHONWARNINGS=ignore "$venv/bin/pip" install --quiet --no-build-isolation --editable "${here}[$extras]"
fi
printf '%s' "$want" >"$venv/.installed-$extras"
echo "install: done"
