#!/bin/sh
# Steps and checks inside the images. `packages NAME...` and `user` run at build time as root, `health` as the container's
# user.
set -eu

case ${1:-} in
packages)
    shift
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
    ;;
user)
    useradd --system --uid 10001 --create-home --home-dir /var/lib/gptoss-trt gptoss
    chmod 0700 /var/lib/gptoss-trt
    ;;
health)
    # The request goes to the engine and back: a server whose engine is dead is not healthy.
    exec python3 - "${2:-http://127.0.0.1:8000}" <<'EOF'
import json, sys, urllib.request
body = json.dumps({"text_input": "Hello", "max_tokens": 1, "stream": False}).encode()
url = sys.argv[1] + "/v2/models/ensemble/generate"
request = urllib.request.Request(url, body, {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=15) as answer:
    if "text_output" not in json.load(answer):
        sys.exit("no text_output in the answer")
EOF
    ;;
*)
    echo "usage: image.sh packages NAME... | user | health [URL]" >&2
    exit 2
    ;;
esac
