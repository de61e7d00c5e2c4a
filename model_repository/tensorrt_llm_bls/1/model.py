"""The `tensorrt_llm_bls` model: where Triton's python backend finds the code of runtime/triton_models."""

from gptoss_trt.runtime.triton_models.text_model import TextModel


class TritonPythonModel:
    """Text in, text out, in one model over the engine process."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = TextModel("tensorrt_llm_bls", args)

    def execute(self, requests: list) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
