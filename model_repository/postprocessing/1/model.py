"""The `postprocessing` model: where Triton's python backend finds the code of runtime/triton_models."""

from gptoss_trt.runtime.triton_models.processing import Postprocessing


class TritonPythonModel:
    """The tensors of `tensorrt_llm` to text."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = Postprocessing(args)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
