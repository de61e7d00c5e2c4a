"""URLs: which become which client, and which are refused by name."""

import pkgutil
import subprocess
import sys

import pytest

from gptoss_trt import client
from gptoss_trt.client.connect import connect, split_url
from gptoss_trt.client.grpc_client import GrpcClient
from gptoss_trt.client.http_client import HttpClient


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("grpc://localhost:9001", ("grpc", "localhost:9001")),
        ("localhost:9001", ("grpc", "localhost:9001")),
        ("localhost", ("grpc", "localhost:8001")),
        ("http://[::1]", ("http", "[::1]:8000")),
        ("https://example.org/", ("https", "example.org:8000")),
    ],
)
def test_addresses(url, parts):
    assert split_url(url) == parts


@pytest.mark.parametrize("url", ["ftp://x", "grpc://", "http://host/v1", "http://host?x=1"])
def test_refused(url):
    with pytest.raises(ValueError, match=r"allowed|address"):
        split_url(url)


def test_scheme_chooses_the_client():
    with connect("grpc://127.0.0.1:9") as one, connect("http://127.0.0.1:9") as other:
        assert isinstance(one, GrpcClient)
        assert isinstance(other, HttpClient)


def test_the_client_runs_without_torch_and_the_runtime():
    names = [module.name for module in pkgutil.walk_packages(client.__path__, "gptoss_trt.client.")]
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {names}:
    importlib.import_module(name)
own = [name for name in sys.modules if name.startswith("gptoss_trt.") and not name.startswith("gptoss_trt.client")]
assert own == [], own
"""
    assert "gptoss_trt.client.bench.sweep" in names
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
