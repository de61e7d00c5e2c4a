"""One vocabulary of failures, whatever shape they came in."""

import json

import pytest

from gptoss_trt.client.errors import ServerError, error_of_body, error_of_text, status_of_http


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("a text", "UNKNOWN"),
        ({"message": "m", "code": 503}, "UNAVAILABLE"),
        ({"message": "m", "code": "resource_exhausted", "type": "server_error"}, "RESOURCE_EXHAUSTED"),
        ({"message": "m", "code": "context_length_exceeded", "type": "invalid_request_error"}, "INVALID_ARGUMENT"),
        ({"message": "m", "code": None, "type": "rate_limit_error"}, "RESOURCE_EXHAUSTED"),
        ({"message": "m", "type": "server_error"}, "INTERNAL"),
        ({"message": "m", "code": "invalid_value", "status": 400}, "INVALID_ARGUMENT"),
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


INNER = json.dumps({"error": {"message": "temprature", "param": "p", "status": 404}})


@pytest.mark.parametrize(
    "text", [INNER, json.dumps({"error": INNER}), "data: " + json.dumps({"error": INNER}) + "\n\n"]
)
def test_an_error_wrapped_in_others_is_found(text):
    error = error_of_text("UNKNOWN", text)
    assert (error.status, error.message, error.detail["param"]) == ("NOT_FOUND", "temprature", "p")
    assert error_of_text("INVALID_ARGUMENT", text).status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("text", ["plain", "[1]", "{", '{"other": 1}', "{}"])
def test_other_texts_stay_as_they_are(text):
    assert error_of_text("INTERNAL", text + "\n").message == text
