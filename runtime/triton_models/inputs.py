"""The inputs of one Triton request, checked against the wire table before anything reads them.

Invariant: an `Inputs` that exists has every required tensor, one batch size, and no set input that is refused. Tensors
come as numpy arrays, so that the rules are tested without a server. Must not know Triton's Python module or engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gptoss_trt.client import protocol
from gptoss_trt.client.protocol import MAX_BATCH_SIZE, Model, Tensor
from gptoss_trt.runtime.engine.messages import ErrorCode

Array = NDArray[Any]
RefusalCode = Literal["INVALID_ARG", "UNSUPPORTED", "UNAVAILABLE", "INTERNAL", "NOT_FOUND", "CANCELLED"]


class RefusalError(ValueError):
    """A request that is not run, or failed. `code` is the name of Triton's error code; `engine_code` the engine's own,
    where the error is the engine's."""

    def __init__(self, message: str, code: RefusalCode = "INVALID_ARG", engine_code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.code: RefusalCode = code
        self.engine_code = engine_code

    @property
    def client_is_gone(self) -> bool:
        """Whether nobody waits for this error."""
        return self.code == "CANCELLED" and self.engine_code is None


class Inputs:
    """Reads one request's tensors by the names of `tensorrt_llm` (or the model's own, where they are the same).

    Raises RefusalError for a missing or refused input, an unknown name, a wrong type or shape.
    """

    def __init__(self, model: Model, arrays: Mapping[str, Array], *, check_required: bool = True) -> None:
        self._model = model
        self._aliases = {engine: text for text, engine in protocol.TEXT_TO_ENGINE.items()} if _is_text(model) else {}
        self._arrays = arrays
        known = {tensor.name: tensor for tensor in model.inputs}
        for name, array in arrays.items():
            if name not in known:
                raise RefusalError(f"{model.name} has no input {name!r}{protocol.did_you_mean(name, known)}")
            _check_type(model, known[name], array)
        if check_required:
            self._require(tensor.name for tensor in model.inputs if not tensor.optional)
        for name, array in arrays.items():
            _check_refusal(model, known[name], array)
        self.batch_size = self._batch_size()

    def _require(self, names: Any) -> None:
        for name in names:
            if name not in self._arrays:
                raise RefusalError(f"{self._model.name}: the required input {name!r} is missing")

    def _batch_size(self) -> int:
        if self._model.max_batch_size == 0:
            return 1
        sizes = {name: int(array.shape[0]) if array.ndim else 0 for name, array in self._arrays.items()}
        name, size = next(iter(sizes.items()), ("", 0))
        for other, other_size in sizes.items():
            if other_size != size:
                raise RefusalError(
                    f"{self._model.name}: {name} has a batch of {size} and {other} one of {other_size}; they must agree"
                )
        if not 1 <= size <= MAX_BATCH_SIZE:
            raise RefusalError(f"{self._model.name}: the batch has {size} prompts; allowed: 1 to {MAX_BATCH_SIZE}")
        return size

    def name_of(self, name: str) -> str:
        """This model's name of the engine input `name`, for messages."""
        return self._aliases.get(name, name)

    def has(self, name: str) -> bool:
        return self.name_of(name) in self._arrays

    def scalar(self, name: str, row: int) -> Any:
        """The Python value of a [B, 1] or [B] input in row `row`; None when it is not set or the model lacks it."""
        own = self.name_of(name)
        array = self._arrays.get(own)
        if array is None:
            return None
        if array.size != self.batch_size:
            raise RefusalError(
                f"{self._model.name}: {own} has the shape {list(array.shape)}; it must hold one value a prompt"
            )
        value = array.reshape(-1)[row].item() if array.dtype != np.object_ else array.reshape(-1)[row]
        if isinstance(value, float) and not math.isfinite(value):
            raise RefusalError(f"{self._model.name}: {own} is {value}; it must be finite")
        return value

    def number(self, name: str, row: int, default: float) -> float:
        value = self.scalar(name, row)
        return default if value is None else float(value)

    def flag(self, name: str, row: int, default: bool = False) -> bool:
        value = self.scalar(name, row)
        return default if value is None else bool(value)

    def text(self, name: str, row: int) -> str | None:
        """A string in UTF-8; None when it is not set. Raises RefusalError for other bytes."""
        value = self.scalar(name, row)
        return None if value is None else self._decode(name, value)

    def texts(self, name: str, row: int) -> list[str]:
        """The strings of row `row` without the empty ones that pad it."""
        array = self._arrays.get(self.name_of(name))
        if array is None:
            return []
        texts = [self._decode(name, value) for value in array[row].reshape(-1)]
        return [text for text in texts if text]

    def row(self, name: str, row: int) -> Array | None:
        """Row `row` of an input with a batch axis; None when it is not set."""
        array = self._arrays.get(self.name_of(name))
        return None if array is None else array[row]

    def _decode(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RefusalError(
                f"{self._model.name}: {self.name_of(name)} is not UTF-8: byte {error.start} is "
                f"0x{value[error.start]:02x}"
            ) from error


def _is_text(model: Model) -> bool:
    return any(tensor.name == "text_input" for tensor in model.inputs)


def _check_type(model: Model, tensor: Tensor, array: Array) -> None:
    wanted = protocol.NUMPY_NAMES[tensor.dtype]
    if array.dtype != np.dtype(wanted) and not (wanted == "object" and array.dtype.kind in "SU"):
        raise RefusalError(f"{model.name}: {tensor.name} is {array.dtype}; it must be {tensor.dtype}")
    if model.max_batch_size and tensor.dims != (1,):
        shape = tuple(array.shape[1:])
        if len(shape) != len(tensor.dims) or any(d not in (-1, n) for d, n in zip(tensor.dims, shape, strict=True)):
            raise RefusalError(
                f"{model.name}: {tensor.name} has the shape {list(array.shape)}; it must be [batch, "
                f"{', '.join(map(str, tensor.dims))}]"
            )


def _check_refusal(model: Model, tensor: Tensor, array: Array) -> None:
    if not tensor.refuse or array.size == 0:
        return
    for value in array.reshape(-1)[: MAX_BATCH_SIZE + 1]:
        plain = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        if not any(plain == neutral or _near(plain, neutral) for neutral in tensor.neutral):
            allowed = f" (accepted: {', '.join(repr(n) for n in tensor.neutral)})" if tensor.neutral else ""
            shown = repr(plain)[:60] if isinstance(plain, str) else plain
            raise RefusalError(f"{model.name}: {tensor.name} is {shown}, but {tensor.refuse}{allowed}", "UNSUPPORTED")


def _near(value: Any, neutral: float | str) -> bool:
    return not isinstance(value, str) and not isinstance(neutral, str) and math.isclose(value, neutral, rel_tol=1e-6)
