#!/usr/bin/env bash
# The README's picture of the dashboard: the demo engine under a small load, scraped by a Prometheus of its own.
#
#   tests/perf/dashboard_demo.sh PICTURE [SECONDS]     (whole minutes, default 180; half a minute more for start and end)
#
# Needs `prometheus` on PATH (Debian has it as a package), the demo engine (`make demo`) in $ENGINE and matplotlib in
# $PYTHON. Everything listens on free ports of loopback and is ended at the end. Some requests are wrong and some clients
# hang up, and the engine has few blocks, so that those panels have something to show.
set -euo pipefail
cd "$(dirname "$0")/../.."
picture=$(realpath "$1") seconds=${2:-180}
engine=${ENGINE:-.cache/demo/engine} python=${PYTHON:-.venv/bin/python} command=${GPTOSS_TRT:-.venv/bin/gptoss-trt}
scrape_s=2
folder=$(mktemp -d)
started=()
finish() {
  for process in "${started[@]}"; do kill "$process" 2>/dev/null || true; done
  wait
  rm -rf "$folder"
}
trap finish EXIT

"$command" serve "$engine" --json --state-dir "$folder/state" --http-port 0 --grpc-port 0 --metrics-port 0 \
  --openai-port 0 --engine-option speculation=ngram --engine-option max_batch=8 \
  --engine-option kv_bytes=2500000 >"$folder/serve.json" 2>"$folder/serve.log" &
started+=($!)
until [ -s "$folder/serve.json" ]; do
  kill -0 "${started[0]}" || { cat "$folder/serve.log" && exit 1; }
  sleep 1
done
read -r grpc metrics openai < <("$python" -c 'import json, sys
told = json.load(open(sys.argv[1]))
print(told["grpc"], told["metrics"].split("/")[2], told["openai"].split("/")[2])' "$folder/serve.json")

sed -e "s/server:8002/$metrics/; s/server:8080/$openai/; s/scrape_interval: .*/scrape_interval: ${scrape_s}s/" \
  docker/prometheus.yml >"$folder/prometheus.yml"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
prometheus --config.file="$folder/prometheus.yml" --storage.tsdb.path="$folder/data" \
  --web.listen-address="127.0.0.1:$port" 2>"$folder/prometheus.log" &
started+=($!)

again() { while [ "$SECONDS" -lt "$end" ]; do "$@" >>"$folder/load.log" 2>&1 || true; done; }
bench() { "$command" bench serve --url "grpc://$grpc" --warmup 0 --timeout 30 "$@"; }
ask() { curl -s -m "${3:-20}" "http://$openai/v1/chat/completions" -d "{\"messages\": [{\"role\": \"user\", \"content\": \"$1\"}], $2}"; }
wrong() {
  ask "Hello" '"max_tokens": 900000000'
  curl -s "http://$openai/v1/nowhere"
  bench --model tensorrt_llm --concurrency 1 --requests 1 --input-tokens 8 --output-tokens 900000000
  sleep 11
}
talk() { ask "What is 17 + $((RANDOM % 90))?" '"stream": true' && sleep 1.5; }
hang_up() { ask "Tell me a long story about the sea." '"stream": true' 1.2 || sleep 7; }

end=$((SECONDS + seconds))
again bench --model tensorrt_llm --shared-prefix 96 --input-tokens uniform:112,200 --output-tokens uniform:16,60 \
  --request-rate 0.7 --requests 40 &
load=($!)
again bench --model chat --shared-prefix 64 --input-tokens uniform:70,120 --output-tokens 48 --concurrency 1,2,3 --requests 6 &
load+=($!)
for kind in talk hang_up wrong; do
  again "$kind" &
  load+=($!)
done
started+=("${load[@]}")
sleep "$seconds"
"$python" tests/perf/dashboard_picture.py --prometheus "http://127.0.0.1:$port" --scrape-seconds "$scrape_s" \
  --minutes "$((seconds / 60))" --out "$picture" \
  --caption "Drawn by tests/perf/dashboard_picture.py from the dashboard's own queries, not by Grafana; the demo model on a CPU under load; times UTC"
