"""Argument checks: shapes, dtypes and the rules between arguments, from one table, for every device.

Invariant: a call that passes is one that every implementation must serve; an error names op, argument, value and limit.
Looks at shapes and dtypes only, never at data, so it also is the fake implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from gptoss_trt.ops.schemas import SCHEMAS
from gptoss_trt.ops.shapes import F32, FP8, TENSORS, TensorShape
from gptoss_trt.ops.weight_layout import expert_bytes, tiles_bytes
from gptoss_trt.reference.act_quant import GROUPS

MAX_BLOCK_TOKENS = 64
MAX_DECODE_QUERIES = 8
LAYOUTS = ("plain", "sm90_v1", "sm90_tiles_v1")

Values = dict[str, Any]
Sizes = dict[str, int]


class ArgumentError(ValueError):
    """An op was called with arguments that do not belong together."""


_ARGUMENT_NAMES = {
    op: tuple(re.findall(r"(\w+)(?:,|$)", schema.arguments)) for op, schema in SCHEMAS.items()
}  # the word before each comma


_REMEMBERED = 4096  # calls; a full check takes 100 us, looking it up 5
_passed: set[tuple[Any, ...]] = set()


def check(op: str, arguments: tuple[Any, ...]) -> None:
    """check_call, skipped for shapes, dtypes and numbers that passed before."""
    key = (op, *map(_signature, arguments))
    if key not in _passed:
        check_call(op, arguments)
        if len(_passed) >= _REMEMBERED:
            _passed.clear()
        _passed.add(key)


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype, argument.is_contiguous()
    return tuple(argument) if isinstance(argument, list) else argument


def check_call(op: str, arguments: tuple[Any, ...]) -> None:
    """Raises ArgumentError when a call of `op` with these positional arguments is not what its schema describes."""
    values: Values = dict(zip(_ARGUMENT_NAMES[op], arguments, strict=True))
    sizes: Sizes = {name: value for name, value in values.items() if type(value) is int}
    for tensor in TENSORS[op]:
        value = values[tensor.name]
        if value is not None:
            _check_tensor(op, tensor, value, sizes)
    rule = _RULES.get(op)
    if rule is not None:
        rule(op, values, sizes)


def _check_tensor(op: str, expected: TensorShape, value: torch.Tensor, sizes: Sizes) -> None:
    name = f"{op}: {expected.name}"
    if value.dtype not in expected.dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        raise ArgumentError(f"{name} is {str(value.dtype).removeprefix('torch.')}, not {allowed}")
    words = expected.words
    if value.dim() != len(words):
        raise ArgumentError(f"{name} has shape {tuple(value.shape)}, expected [{', '.join(words)}]")
    for size, word in zip(value.shape, words, strict=True):
        wanted = _size(word, size, sizes)
        if size != wanted:
            raise ArgumentError(
                f"{name} has shape {tuple(value.shape)}, expected [{', '.join(words)}] with {word} = {wanted}"
            )
    if not value.is_contiguous():
        raise ArgumentError(f"{name} is not contiguous: shape {tuple(value.shape)}, strides {value.stride()}")


def _size(word: str, size: int, sizes: Sizes) -> int:
    """What a shape word stands for; a name not bound yet (alone, or in `name+1`) takes the size that is there."""
    known = sizes.get(word)
    if known is not None:
        return known
    if word == "_":
        return size
    if word.isdigit():
        return int(word)
    if word.isidentifier():
        sizes[word] = size
        return size
    left, sign, right = re.split(r"([/*+])", word)
    if sign == "+" and left not in sizes:
        sizes[left] = size - int(right)
    return _OPERATORS[sign](_term(left, sizes), _term(right, sizes))


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "/": lambda a, b: -(-a // b),
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
}


def _term(word: str, sizes: Sizes) -> int:
    return int(word) if word.isdigit() else sizes[word]


def _both_or_neither(op: str, values: Values, _sizes: Sizes) -> None:
    if (values["quantised"] is None) != (values["scales"] is None):
        raise ArgumentError(f"{op}: quantised and scales are given together or not at all")
    if values["quantised"] is None and values["normed"] is None:
        raise ArgumentError(f"{op}: neither normed nor quantised is asked for")


def _act_quant(op: str, values: Values, sizes: Sizes) -> None:
    _scales_for(op, "group", values["group"], values["scales"], sizes["K"], sizes["T"])


def _scales_for(op: str, what: str, group: int, scales: torch.Tensor | None, channels: int, rows: int) -> None:
    if group not in GROUPS:
        raise ArgumentError(f"{op}: {what} is {group}; allowed: {', '.join(map(str, GROUPS))}")
    if (group == 0) != (scales is None):
        raise ArgumentError(f"{op}: scales are given for groups of 128 and 64, and are None for {what} 0")
    if scales is not None:
        _check_tensor(op, TensorShape("scales", f"{-(-channels // group)} {rows}", F32), scales, {})


def _dense_fp8(op: str, values: Values, sizes: Sizes) -> None:
    segments = list(values["segments"]) or [sizes["N"]]
    if sum(segments) != sizes["N"]:
        raise ArgumentError(f"{op}: segments {segments} add up to {sum(segments)}, weight has {sizes['N']} rows")
    rows = sum(-(-segment // 128) for segment in segments)
    if values["weight_scale"].shape[0] != rows:
        raise ArgumentError(f"{op}: weight_scale has {values['weight_scale'].shape[0]} rows, segments need {rows}")


def _block_tokens(op: str, _values: Values, sizes: Sizes) -> None:
    if not 1 <= sizes["block_tokens"] <= MAX_BLOCK_TOKENS:
        raise ArgumentError(f"{op}: block_tokens is {sizes['block_tokens']}, allowed are 1 to {MAX_BLOCK_TOKENS}")


def _rope(op: str, values: Values, sizes: Sizes) -> None:
    _block_tokens(op, values, sizes)
    width = (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["D"]
    if values["qkv"].shape[1] != width:
        raise ArgumentError(
            f"{op}: qkv has {values['qkv'].shape[1]} columns; {sizes['heads']} query and {sizes['kv_heads']} KV heads "
            f"of {sizes['D']} need {width}"
        )


def _dense_rope(op: str, values: Values, sizes: Sizes) -> None:
    _block_tokens(op, values, sizes)
    _dense_fp8(op, values, sizes)
    wanted = [count * sizes["D"] for count in (sizes["heads"], sizes["kv_heads"], sizes["kv_heads"])]
    if list(values["segments"]) != wanted:
        raise ArgumentError(f"{op}: segments are {list(values['segments'])}; the rows of q, k and v are {wanted}")


def _attention(op: str, values: Values, sizes: Sizes) -> None:
    _block_tokens(op, values, sizes)
    if sizes["heads"] % sizes["kv_heads"]:
        raise ArgumentError(f"{op}: {sizes['heads']} query heads are not a multiple of {sizes['kv_heads']} KV heads")
    if values["window"] < 0:
        raise ArgumentError(f"{op}: window is {values['window']}; 0 means none")
    if sizes.get("K", sizes["heads"] * sizes["D"]) != sizes["heads"] * sizes["D"]:
        raise ArgumentError(f"{op}: quantised has {sizes['K']} columns; {sizes['heads']} heads have {sizes['D']} each")


def _decode(op: str, values: Values, sizes: Sizes) -> None:
    _attention(op, values, sizes)
    tokens, sequences = sizes["T"], sizes["S"]
    if sequences and (tokens % sequences or tokens // sequences > MAX_DECODE_QUERIES):
        raise ArgumentError(
            f"{op}: {tokens} queries of {sequences} sequences; 1 to {MAX_DECODE_QUERIES} each are served"
        )
    if tokens and not sequences:
        raise ArgumentError(f"{op}: {tokens} queries of 0 sequences")


def _route(op: str, values: Values, sizes: Sizes) -> None:
    first, count, experts = values["first_expert"], values["num_local_experts"], sizes["experts"]
    if first < 0 or count < 1 or first + count > experts:
        raise ArgumentError(f"{op}: experts {first} to {first + count - 1} of {experts} do not exist")
    if sizes["k"] > experts:
        raise ArgumentError(f"{op}: {sizes['k']} experts a token of {experts}")


def _gate_up(op: str, values: Values, sizes: Sizes) -> None:
    _experts(op, values, (sizes["E"], 2 * sizes["I"], sizes["H"]))
    _scales_for(op, "h_group", values["h_group"], values["h_scale"], sizes["I"], sizes["rows"])


def _down(op: str, values: Values, sizes: Sizes) -> None:
    _experts(op, values, (sizes["E"], sizes["H"], sizes["I"]))
    _scales_for(op, "h_group", values["h_group"], values["h_scale"], sizes["I"], sizes["T"] * sizes["k"])


def _experts(op: str, values: Values, shape: tuple[int, int, int]) -> None:
    """Expert weights [E, N, K] in one of the two storages and three layouts."""
    if values["layout"] not in LAYOUTS:
        raise ArgumentError(f"{op}: layout is {values['layout']!r}; allowed: {', '.join(LAYOUTS)}")
    experts, rows, columns = shape
    weight, scale = values["weight"], values["weight_scale"]
    if values["layout"] == "sm90_tiles_v1":
        if values["h_group"] != 0 or scale.numel() or scale.dtype != torch.float32:
            raise ArgumentError(f"{op}: layout sm90_tiles_v1 has h_group 0 and an empty float32 weight_scale")
        tiles = f"{experts} {tiles_bytes(rows, columns)}"
        _check_tensor(op, TensorShape("weight", tiles, (torch.uint8,)), weight, {})
        return
    if values["layout"] == "sm90_v1":
        if scale.numel() or scale.dtype not in (torch.uint8, torch.float32):
            raise ArgumentError(
                f"{op}: weight_scale of a packed layout is an empty uint8 (MXFP4) or float32 (FP8) tensor"
            )
        size = expert_bytes(rows, columns, scale.dtype == torch.uint8)
        _check_tensor(op, TensorShape("weight", f"{experts} {size}", (torch.uint8,)), weight, {})
        return
    if weight.dtype == torch.uint8:
        _check_tensor(op, TensorShape("weight", f"{experts} {rows} {columns}/32 16", (torch.uint8,)), weight, {})
        _check_tensor(op, TensorShape("weight_scale", f"{experts} {rows} {columns}/32", (torch.uint8,)), scale, {})
    elif weight.dtype == torch.float8_e4m3fn:
        _check_tensor(op, TensorShape("weight", f"{experts} {rows} {columns}", FP8), weight, {})
        _check_tensor(op, TensorShape("weight_scale", f"{experts} {rows}/128 {columns}/128", F32), scale, {})
    else:
        raise ArgumentError(f"{op}: weight is {weight.dtype}, not float8_e4m3fn or (MXFP4) uint8")


def _sample(op: str, _values: Values, sizes: Sizes) -> None:
    if sizes["R"] > sizes["C"]:
        raise ArgumentError(f"{op}: {sizes['R']} rows of logits; tokens has room for {sizes['C']}")


def _feed(op: str, values: Values, sizes: Sizes) -> None:
    first, rows, words = values["source_at"], sizes["R"], sizes["N"]
    if first < rows or first + rows > words:
        raise ArgumentError(f"{op}: source lies at {first} to {first + rows} of {words} words, behind {rows} tokens")


_RULES: dict[str, Callable[[str, Values, Sizes], None]] = {
    "rmsnorm_quant": _both_or_neither,
    "moe_combine_norm": _both_or_neither,
    "act_quant": _act_quant,
    "dense_fp8": _dense_fp8,
    "dense_fp8_add": _dense_fp8,
    "kv_slots": _block_tokens,
    "rope_kv_append": _rope,
    "attention_prefill": _attention,
    "attention_decode": _decode,
    "dense_fp8_rope_kv_append": _dense_rope,
    "attention_prefill_quant": _attention,
    "attention_decode_quant": _decode,
    "moe_route": _route,
    "rmsnorm_route": _route,
    "moe_gate_up": _gate_up,
    "moe_down": _down,
    "sample": _sample,
    "feed": _feed,
}
