"""One vocabulary of failures, whatever shape they came in."""

import pytest

from gptoss_trt.client.errors import ServerError, error_of_body, status_of_http


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("a text", "UNKNOWN"),
        ({"message": "m", "code": 503}, "UNAVAILABLE"),
        ({"message": "m", "code": "resource_exhausted", "type": "server_error"}, "RESOURCE_EXHAUSTED"),
        ({"message": "m", "code": "context_length_exceeded", "type": "invalid_request_error"}, "INVALID_ARGUMENT"),
        ({"message": "m", "code": None, "type": "rate_limit_error"}, "RESOURCE_EXHAUSTED"),
        ({"message": "m", "type": "server_error"}, "INTERNAL"),
        ({}, "INTERNAL"),
    ],
)
def test_bodies(error, status):
    assert error_of_body({"error": error}).status == status


def test_unknown_http_statuses():
    assert [status_of_http(code) for code in (400, 502, 418)] == ["INVALID_ARGUMENT", "UNAVAILABLE", "UNKNOWN"]


def test_the_text_says_all():
    assert str(ServerError("INTERNAL", "broke", request_id="r1")) == "INTERNAL: broke (request r1)"
    assert str(ServerError("INTERNAL", "broke")) == "INTERNAL: broke"
