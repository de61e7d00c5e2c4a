"""Python values to Triton tensors and back, by the types and shapes of client/protocol.py.

Invariant: a value that does not fit its tensor is an error here, before anything is sent. Must not know what a tensor
means.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from gptoss_trt.client.answers import Record
from gptoss_trt.client.errors import ServerError
from gptoss_trt.client.protocol import MODELS, NUMPY_NAMES, Model, Tensor, did_you_mean
from gptoss_trt.client.requests import Call, Values

WIRE_DTYPES = {"STRING": "BYTES"}  # the configuration's word -> the inference protocol's
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(NUMPY_NAMES[name]) for name in NUMPY_NAMES if name != "STRING"}
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
FINAL_RESPONSE = "triton_final_response"


def model_of(name: str) -> Model | None:
    """The contract of a model, None for one that is not in it (values are then typed by their Python types)."""
    return MODELS.get(name)


def _tensor_of(model: Model | None, name: str, value: Any) -> Tensor:
    if model is not None:
        known = {tensor.name: tensor for tensor in model.inputs}
        if name not in known:
            raise ValueError(f"{model.name} has no input {name!r}{did_you_mean(name, known)}")
        return known[name]
    kind = np.asarray(value).dtype.kind
    dtypes = {"b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32", "U": "STRING", "S": "STRING", "O": "STRING"}
    if kind not in dtypes:
        raise ValueError(f"input {name!r}: no tensor type for {type(value).__name__}")
    return Tensor(name, dtypes[kind], (1,) if np.ndim(value) == 0 else (-1,))  # type: ignore[arg-type]


def to_array(tensor: Tensor, value: Any, *, batched: bool) -> np.ndarray[Any, Any]:
    """The value as the tensor's array, with a batch axis of 1 in front where the model has one.

    A numpy array is sent as it is (its caller has put the batch axis in). Raises ValueError for a value out of the
    type's range or of another rank than the tensor's.
    """
    dtype = np.dtype(NUMPY_NAMES[tensor.dtype])
    if isinstance(value, np.ndarray):
        return value.astype(dtype, copy=False)
    if tensor.dtype == "STRING":
        array = np.asarray(value, dtype=object)
    else:
        array = np.asarray(value)
        if array.dtype.kind in "iu" and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
                raise ValueError(f"{tensor.name} = {value!r} is outside {limits.min}..{limits.max} of {tensor.dtype}")
        elif array.size and not np.can_cast(array.dtype, dtype, casting="same_kind"):
            raise ValueError(f"{tensor.name} = {value!r} is no {tensor.dtype}")
        array = array.astype(dtype)
    if array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != len(tensor.dims):
        raise ValueError(f"{tensor.name} has {array.ndim} axes, its tensor has {len(tensor.dims)}: {list(tensor.dims)}")
    return array[None] if batched else array


def encode_request(call: Call) -> service_pb2.ModelInferRequest:
    """The gRPC message of a call. Raises ValueError for an unknown input or a value that does not fit."""
    model = model_of(call.model)
    request = service_pb2.ModelInferRequest(model_name=call.model, id=call.request_id)
    request.parameters[EMPTY_FINAL_RESPONSE].bool_param = True
    for name, value in call.values.items():
        tensor = _tensor_of(model, name, value)
        array = to_array(tensor, value, batched=model is not None and model.max_batch_size > 0)
        entry = request.inputs.add(name=name, datatype=WIRE_DTYPES.get(tensor.dtype, tensor.dtype))
        entry.shape.extend(array.shape)
        raw = serialize_byte_tensor(_bytes_array(array)) if tensor.dtype == "STRING" else array
        content = b"" if raw.size == 0 else (raw.item() if tensor.dtype == "STRING" else raw.tobytes())
        request.raw_input_contents.append(content)
    return request


def _bytes_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    encoded = np.empty(array.shape, dtype=object)
    for index, text in np.ndenumerate(array):
        encoded[index] = text if isinstance(text, bytes) else str(text).encode()
    return encoded


def decode_response(response: service_pb2.ModelInferResponse) -> Record:
    """A response's outputs by name, flattened to Python lists; strings decoded from UTF-8 (U+FFFD for bad bytes).

    Reads the raw contents itself: tritonclient's InferResult costs four times as much, for every token of a benchmark.
    Raises ServerError for outputs without raw contents, which Triton never sends.
    """
    if len(response.outputs) != len(response.raw_output_contents):
        raise ServerError(
            "INTERNAL", f"{len(response.outputs)} outputs, {len(response.raw_output_contents)} raw contents"
        )
    record: Record = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            record[output.name] = [text.decode("utf-8", "replace") for text in deserialize_bytes_tensor(raw)]
        else:
            known = output.datatype in ARRAY_DTYPES
            dtype = ARRAY_DTYPES[output.datatype] if known else triton_to_np_dtype(output.datatype)
            record[output.name] = np.frombuffer(raw, dtype=dtype).tolist()
    return record


def is_final(response: service_pb2.ModelInferResponse) -> bool | None:
    """Whether the server marked this as a request's last response; None where it does not mark at all."""
    if FINAL_RESPONSE not in response.parameters:
        return None
    return bool(response.parameters[FINAL_RESPONSE].bool_param)


def generate_body(call: Call) -> Values:
    """The JSON body of `/generate` and `/generate_stream`, which take numbers, booleans, strings and flat lists.

    Raises ValueError for an input that this route cannot carry (a matrix): send it over gRPC.
    """
    model = model_of(call.model)
    for name, value in call.values.items():
        _tensor_of(model, name, value)
        if np.ndim(value) > 1:
            raise ValueError(f"{name} has {np.ndim(value)} axes; HTTP carries flat lists only: use the gRPC client")
    return {"id": call.request_id, **call.values}


def decode_body(body: dict[str, Any]) -> Record:
    """A JSON answer of those routes by output name, scalars as lists of one."""
    return {name: value if isinstance(value, list) else [value] for name, value in body.items()}
