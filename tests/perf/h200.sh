#!/usr/bin/env bash
# Everything that one H200 is asked: the GPU tests, then the cells of the results table, then the operators.
#
#   tests/perf/h200.sh FOLDER COMMIT SECONDS [WHAT...]
#
# WHAT: tests 20b 120b fp8 ops (default: all, in that order). SECONDS bounds all of it; results go to FOLDER as they
# come: client.jsonl (wall times at a client process, prompts read for real), core.jsonl (graph times and experts of the
# same cells), ops.jsonl, *.log. `tests/perf/h200_merge.py FOLDER` makes results/h200.jsonl of them. Runs from a clone,
# without installing; the library must stand in build/cuda or plugins/lib.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1 commit=$2 deadline=$((SECONDS + $3))
shift 3
[ $# -gt 0 ] || set -- tests 20b 120b fp8 ops
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

bench() { # name, arguments...
  local name=$1 left=$((deadline - SECONDS))
  shift
  [ "$left" -gt 3 ] || return 0
  echo "== $name: $* (${left} s left)"
  timeout "$left" python3 -m gptoss_trt bench "$@" --commit "$commit" 2>&1 | tee -a "$out/$name.log" | cut -c1-420
}

cells() { # model, dense, prompt lengths, batches, more: every cell at the client, then the graphs of those that decode
  local common=(engine --model "gpt-oss-$1" --random --json --dense "$2")
  local decode=(--decode "1024:$4" --decode "8192:$4")
  bench "client-$1-$2" "${common[@]}" "${@:5}" --at client --out "$out/client.jsonl" "${decode[@]}" --prefill "$3"
  # No step of these cells reads FP8 copies of experts, which take 4 (20b) to 15 s (120b, 59 GiB) to make.
  bench "core-$1-$2" "${common[@]}" --prefill-weights none --quick --out "$out/core.jsonl" "${decode[@]}"
}

python3 -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
for what in "$@"; do
  case $what in
    tests)
      timeout 150 python3 -m pytest tests/gpu --expect-gpu -q -n 6 -p no:cacheprovider -o faulthandler_timeout=100 \
        >"$out/tests.log" 2>&1
      grep -aE '^(FAILED|ERROR|E  )|passed|failed' "$out/tests.log" | cut -c1-220 | tail -40
      ;;
    20b | 120b) cells "$what" bf16 1024,4096,8192,32768 1,8,32,64,128 ;;
    fp8)
      cells 20b fp8_block128 8192 1,8,32,64,128
      cells 120b fp8_block128 8192 1,8,32,64 --prefill-weights 59.2 # GiB: the most that leaves room for these caches
      ;;
    ops) bench ops ops --model gpt-oss-20b --batch 1,64 --prefill 1024,8192 --out "$out/ops.jsonl" ;;
    *) echo "unknown: $what" && exit 2 ;;
  esac
done
