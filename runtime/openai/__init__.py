"""The OpenAI API: request checks, response objects, the HTTP gateway."""

from gptoss_trt.runtime.openai.chat_request import check_request
from gptoss_trt.runtime.openai.errors import RequestError

__all__ = ["RequestError", "check_request"]
