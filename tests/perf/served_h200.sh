#!/usr/bin/env bash
# What one H200 serves through tritonserver, 20b at random weights: the README's tables "Through tritonserver" and, with
# requests that come at rates, "Under load".
#
#   tests/perf/served_h200.sh FOLDER COMMIT SECONDS [WHAT...]
#
# WHAT: bf16 fp8_block128 (decode cells with dense products so) trace (default: all, in that order). SECONDS bounds all
# of it, in equal shares of what is left; results go to FOLDER as they come: triton.jsonl, trace.jsonl, *.log.
# `tests/perf/h200_merge.py FOLDER` puts them into the results files. Needs the package and a tritonserver where
# `gptoss-trt doctor` finds both.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1 commit=$2 deadline=$((SECONDS + $3))
shift 3
[ $# -gt 0 ] || set -- bf16 fp8_block128 trace
model=gpt-oss-20b
mkdir -p "$out"
engines=$(mktemp -d)
trap 'rm -rf "$engines"' EXIT

measure() { # dense, log, script, arguments...: of an engine with dense products so
  local left=$(((deadline - SECONDS) / waiting)) engine=$engines/$1 notes
  waiting=$((waiting - 1))
  [ "$left" -gt 20 ] || return 0
  [ "$3" != served_decode.py ] || set -- "$@" --seconds "$((left - 18))" # a cell takes up to 4, the server's end 5
  [ -d "$engine" ] || python3 -m gptoss_trt bench random-engine "$engine" --model "$model" --dense "$1" || exit 1
  notes=(--note commit="$commit" --note model="$model" --note dense="$1" --note card="$card")
  echo "== $2: ${*:3} ($left s left)"
  # An interrupt, so that the script stops its server; it drains for no longer than the rest of the time.
  timeout -s INT -k 10 $((left - 10)) python3 "tests/perf/$3" "$engine" "${notes[@]}" "${@:4}" 2>&1 |
    tee "$out/$2.log" | cut -c1-420
}

card=$(python3 -c 'import torch; print(torch.cuda.get_device_name())') || exit 1
waiting=$#
case " $* " in *" trace "*) waiting=$((waiting + 1)) ;; esac # it serves twice
for what in "$@"; do
  case $what in
    bf16 | fp8_block128) measure "$what" "triton-$what" served_decode.py --out "$out/triton.jsonl" ;;
    trace)
      for name in chunked "whole prompts"; do
        measure bf16 "trace-${name%% *}" served_trace.py --out "$out/trace.jsonl" --configurations "$name" \
          --in-flight 0 --rates 20,28
      done
      ;;
    *) echo "unknown: $what" && exit 2 ;;
  esac
done
