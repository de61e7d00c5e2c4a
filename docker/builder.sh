#!/bin/sh
# The builder stage's steps. `packages` installs what compiling needs, `wheel FOLDER` builds the wheel with the CUDA library.
set -eu

case ${1:-} in
packages)
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends cmake g++ make python3 python3-pip python3-venv
    rm -rf /var/lib/apt/lists/*
    ;;
wheel)
    folder=${2:?usage: builder.sh wheel FOLDER}
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "${PYTHON:-python3}" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --upgrade pip 'setuptools>=77' wheel
    "$work/venv/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" .
    ;;
*)
    echo "usage: builder.sh packages | wheel FOLDER" >&2
    exit 2
    ;;
esac
