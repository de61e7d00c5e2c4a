"""The `preprocessing` model: where Triton's python backend finds the code of runtime/triton_models."""

from gptoss_trt.runtime.triton_models.processing import Preprocessing


class TritonPythonModel:
    """Text and word lists to the tensors of `tensorrt_llm`."""

    def initialize(self, args: dict[str, str]) -> None:
        self._model = Preprocessing(args)

    def execute(self, requests: list) -> list:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
