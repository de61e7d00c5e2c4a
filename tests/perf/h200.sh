#!/usr/bin/env bash
# Everything that one H200 is asked in one go: the GPU tests, then cells of the results table, the telling ones first.
#
#   tests/perf/h200.sh FOLDER COMMIT SECONDS [WHAT...]
#
# WHAT: tests 20b 120b ops prefill more (default: all, in that order). Results go to FOLDER as they come
# (h200.jsonl, ops.jsonl, *.log); SECONDS bounds all of it. Runs from a clone, without installing.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=$1 commit=$2 deadline=$((SECONDS + $3))
shift 3
[ $# -gt 0 ] || set -- tests 20b 120b ops prefill more
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

bench() { # name, arguments...
  local name=$1 left=$((deadline - SECONDS))
  shift
  [ "$left" -gt 3 ] || return 0
  echo "== $name: $* (${left} s left)"
  timeout "$left" python3 -m gptoss_trt bench "$@" --commit "$commit" 2>&1 | tee -a "$out/$name.log" | cut -c1-420
}

engine() { # model, arguments...
  local model=$1
  shift
  bench "engine-$model" engine --model "gpt-oss-$model" --random --quick --json --out "$out/h200.jsonl" "$@"
}

python3 -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
for what in "$@"; do
  case $what in
    tests)
      timeout 65 python3 -m pytest tests/gpu/test_ops_on_cuda.py tests/gpu/test_engine_on_cuda.py --expect-gpu \
        -q -n 6 -p no:cacheprovider -o faulthandler_timeout=60 --deselect \
        tests/gpu/test_engine_on_cuda.py::test_full_width_layers_agree_with_the_cpu >"$out/tests.log" 2>&1
      grep -aE '^(FAILED|ERROR|E  )|passed|failed' "$out/tests.log" | cut -c1-220 | tail -40
      ;;
    20b) engine 20b --decode 1024:1,8,64 --prefill 1024 ;;
    120b) engine 120b --decode 1024:1,8,64 --prefill 1024 ;;
    full)
      timeout 60 python3 -m pytest tests/gpu/test_engine_on_cuda.py --expect-gpu -q -k full_width 2>&1 | tail -5
      ;;
    ops) bench ops ops --model gpt-oss-20b --batch 1,64 --prefill 1024 --out "$out/ops.jsonl" ;;
    prefill) engine 20b --prefill 4096,8192 ;;
    more)
      engine 20b --decode 1024:64,32,128 --decode 8192:1,64 --prefill 32768
      engine 120b --decode 1024:32,128 --decode 8192:1,64 --prefill 4096,8192
      ;;
    *) echo "unknown: $what" && exit 2 ;;
  esac
done
