"""The `tensorrt_llm` model: where Triton's python backend finds the code of runtime/triton_models."""

from gptoss_trt.runtime.triton_models.token_model import TokenModel


class TritonPythonModel:
    """Token ids in, token ids out."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = TokenModel(args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
