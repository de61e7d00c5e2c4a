"""The `chat` model: where Triton's python backend finds the code of runtime/triton_models."""

from gptoss_trt.runtime.triton_models.json_model import ChatModel


class TritonPythonModel:
    """A /v1/chat/completions body in, chat.completion objects or chunks out."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = ChatModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
