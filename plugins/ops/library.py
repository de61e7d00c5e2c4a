"""Finds libgptoss_trt.so, checks its version and gives its C functions Python signatures (ctypes; no torch).

Invariant: the argument struct here equals the header's, field by field (a test compiles the header and compares), and a
library of another ABI version is never called. Must not know tensors: pointers are plain integers.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

ABI_VERSION = 7
NAME = "libgptoss_trt.so"
_HERE = Path(__file__).resolve()
# Beside the packages (a wheel, or plugins/lib of a clone), then where `make library` builds.
SEARCH_PATHS = (_HERE.parents[1] / "lib" / NAME, _HERE.parents[2] / "build" / "cuda" / NAME)


class LibraryError(RuntimeError):
    """The library is not there or not ours, or a call failed; the text is the library's own where it has one."""


class Product(IntEnum):
    """gptoss_trt_moe_product."""

    GATE_UP = 1
    DOWN = 2


class Storage(IntEnum):
    """gptoss_trt_moe_storage."""

    MXFP4 = 1
    FP8 = 2
    FP8_TILES = 3


class ScaleMode(IntEnum):
    """gptoss_trt_scale_mode."""

    STATIC = 1
    BLOCK128 = 2
    BLOCK64 = 3


class Plan(IntEnum):
    """gptoss_trt_moe_plan."""

    AUTO = 0
    SIMT = 1
    WGMMA = 2
    PREFILL = 3


class OutDtype(IntEnum):
    """gptoss_trt_dtype."""

    NONE = 0
    BF16 = 1
    FP32 = 2


class DenseFormat(IntEnum):
    """gptoss_trt_dense_format."""

    BF16 = 1
    FP8 = 2


DEPENDENT_LAUNCH = 1
DENSE_ADDS = 2
ROUTING_READY = 2


class _Sized(ctypes.Structure):
    """A C struct that begins with its own size in bytes, which is filled in."""

    def __init__(self, **values: float | None) -> None:
        super().__init__(size=ctypes.sizeof(self), **values)


class MoeGemmArgs(_Sized):
    """gptoss_trt_moe_gemm_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("product", ctypes.c_int32),
        ("storage", ctypes.c_int32),
        ("scale_mode", ctypes.c_int32),
        ("plan", ctypes.c_int32),
        ("k_split", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("max_tokens", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("expert_offsets", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("expert_weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_scale", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    )


class AttentionArgs(_Sized):
    """gptoss_trt_attention_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("plan", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("q", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("first_block", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_scale", ctypes.c_void_p),
        ("tickets", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    )


class DenseFewArgs(_Sized):
    """gptoss_trt_dense_few_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("format", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("first_segment", ctypes.c_int32),
        ("second_segment", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class DenseFp8Args(_Sized):
    """gptoss_trt_dense_fp8_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("out_dtype", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("first_segment", ctypes.c_int32),
        ("second_segment", ctypes.c_int32),
        ("tile_tokens", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
    )


class RmsnormQuantArgs(_Sized):
    """gptoss_trt_rmsnorm_quant_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("tokens", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
        ("local_experts", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("updated", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("expert_ids", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("quantised", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


class RmsnormRouteArgs(_Sized):
    """gptoss_trt_rmsnorm_route_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("tokens", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
        ("local_experts", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("gain", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("token_count", ctypes.c_void_p),
        ("updated", ctypes.c_void_p),
        ("quantised", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("expert_ids", ctypes.c_void_p),
        ("expert_weights", ctypes.c_void_p),
        ("expert_offsets", ctypes.c_void_p),
        ("active_experts", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("ticket", ctypes.c_void_p),
    )


class RouteRowsArgs(_Sized):
    """gptoss_trt_route_rows_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("tokens", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),
        ("local_experts", ctypes.c_int32),
        ("expert_ids", ctypes.c_void_p),
        ("expert_offsets", ctypes.c_void_p),
        ("active_experts", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
    )


class DecodeOneLayer(ctypes.Structure):
    """gptoss_trt_decode_one_layer: addresses of one layer's tensors, and its window."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "attention_norm", "qkv_weight", "qkv_scale", "qkv_bias", "sinks", "out_weight", "out_scale", "out_bias",
                "moe_norm", "router_weight", "router_bias", "gate_up_weight", "gate_up_bias", "down_weight",
                "down_bias", "k_cache", "v_cache",
            )
        ),
        ("window", ctypes.c_int64),
    )  # fmt: skip


class DecodeOneArgs(_Sized):
    """gptoss_trt_decode_one_args; the header says what each field means."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("format", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("full_width", ctypes.c_int32),
        ("window_width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("lm_head", ctypes.c_void_p),
        ("lm_head_scale", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("full_blocks", ctypes.c_void_p),
        ("window_blocks", ctypes.c_void_p),
        ("window_first_block", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    )


class Library:
    """The loaded library. Methods raise LibraryError with the library's text when a call fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = ctypes.CDLL(str(path))
            version = int(self._handle.gptoss_trt_abi_version())
            if version == ABI_VERSION:
                self._declare()
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path} cannot be loaded: {error}") from error
        if version != ABI_VERSION:
            raise LibraryError(f"{path} has ABI version {version}; this build calls {ABI_VERSION}")

    def _declare(self) -> None:
        """Signatures of the C functions. Raises AttributeError for one that the library lacks."""
        self._handle.gptoss_trt_last_error.restype = ctypes.c_char_p
        pointer, stream, size = ctypes.POINTER(MoeGemmArgs), ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
        self._handle.gptoss_trt_moe_weight_bytes.argtypes = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, size)
        self._handle.gptoss_trt_moe_gemm_fp8_workspace.argtypes = (pointer, size)
        self._handle.gptoss_trt_moe_gemm_fp8_prepare.argtypes = (pointer, stream)
        self._handle.gptoss_trt_moe_gemm_fp8.argtypes = (pointer, stream)
        attention = ctypes.POINTER(AttentionArgs)
        self._handle.gptoss_trt_attention_decode_workspace.argtypes = (attention, size)
        self._handle.gptoss_trt_attention_decode.argtypes = (attention, stream)
        self._handle.gptoss_trt_attention_prefill.argtypes = (attention, stream)
        self._handle.gptoss_trt_dense_few.argtypes = (ctypes.POINTER(DenseFewArgs), stream)
        self._handle.gptoss_trt_dense_fp8.argtypes = (ctypes.POINTER(DenseFp8Args), stream)
        self._handle.gptoss_trt_rmsnorm_quant.argtypes = (ctypes.POINTER(RmsnormQuantArgs), stream)
        self._handle.gptoss_trt_rmsnorm_route.argtypes = (ctypes.POINTER(RmsnormRouteArgs), stream)
        self._handle.gptoss_trt_route_rows.argtypes = (ctypes.POINTER(RouteRowsArgs), stream)
        self._handle.gptoss_trt_decode_one_workspace.argtypes = (size,)
        self._handle.gptoss_trt_decode_one.argtypes = (ctypes.POINTER(DecodeOneArgs), stream)

    def _check(self, status: int) -> None:
        if status != 0:
            raise LibraryError(self._handle.gptoss_trt_last_error().decode("utf-8", "replace"))

    def moe_weight_bytes(self, storage: Storage, n: int, k: int) -> int:
        """Bytes of one expert's [n, k] weight in layout sm90_v1."""
        size = ctypes.c_uint64()
        self._check(self._handle.gptoss_trt_moe_weight_bytes(storage, n, k, ctypes.byref(size)))
        return size.value

    def moe_gemm_workspace(self, args: MoeGemmArgs) -> int:
        """Bytes of workspace that calls with these arguments need, up to max_tokens tokens."""
        size = ctypes.c_uint64()
        self._check(self._handle.gptoss_trt_moe_gemm_fp8_workspace(ctypes.byref(args), ctypes.byref(size)))
        return size.value

    def moe_gemm_prepare(self, args: MoeGemmArgs, stream: int) -> None:
        """Zeroes the workspace's counters on the stream: once per workspace, ahead of its first call."""
        self._check(self._handle.gptoss_trt_moe_gemm_fp8_prepare(ctypes.byref(args), stream))

    def moe_gemm(self, args: MoeGemmArgs, stream: int) -> None:
        """Launches the product on the stream (a cudaStream_t as an integer); does not wait."""
        self._check(self._handle.gptoss_trt_moe_gemm_fp8(ctypes.byref(args), stream))

    def dense_few(self, args: DenseFewArgs, stream: int) -> None:
        """Launches a product of few tokens on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_dense_few(ctypes.byref(args), stream))

    def dense_fp8(self, args: DenseFp8Args, stream: int) -> None:
        """Launches an FP8 128x128 product on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_dense_fp8(ctypes.byref(args), stream))

    def rmsnorm_quant(self, args: RmsnormQuantArgs, stream: int) -> None:
        """Launches residual addition and norm on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_rmsnorm_quant(ctypes.byref(args), stream))

    def rmsnorm_route(self, args: RmsnormRouteArgs, stream: int) -> None:
        """Launches norm and routing on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_rmsnorm_route(ctypes.byref(args), stream))

    def route_rows(self, args: RouteRowsArgs, stream: int) -> None:
        """Launches the sorting of rows on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_route_rows(ctypes.byref(args), stream))

    def decode_one_workspace(self) -> int:
        """Bytes of workspace that decode_one needs."""
        size = ctypes.c_uint64()
        self._check(self._handle.gptoss_trt_decode_one_workspace(ctypes.byref(size)))
        return size.value

    def decode_one(self, args: DecodeOneArgs, stream: int) -> None:
        """Launches the forward pass of one token on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_decode_one(ctypes.byref(args), stream))

    def attention_workspace(self, args: AttentionArgs) -> int:
        """Bytes of workspace that a decode call with these sizes needs."""
        size = ctypes.c_uint64()
        self._check(self._handle.gptoss_trt_attention_decode_workspace(ctypes.byref(args), ctypes.byref(size)))
        return size.value

    def attention_decode(self, args: AttentionArgs, stream: int) -> None:
        """Launches attention of one token a sequence on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_attention_decode(ctypes.byref(args), stream))

    def attention_prefill(self, args: AttentionArgs, stream: int) -> None:
        """Launches attention of chunks on the stream; does not wait."""
        self._check(self._handle.gptoss_trt_attention_prefill(ctypes.byref(args), stream))


@functools.cache
def load() -> Library:
    """The library of the first of SEARCH_PATHS that exists. Raises LibraryError listing all of them."""
    for path in SEARCH_PATHS:
        if path.is_file():
            return Library(path)
    tried = ", ".join(map(str, SEARCH_PATHS))
    raise LibraryError(f"{NAME} is not built (make library); tried {tried}")


def unusable() -> str | None:
    """Why the library cannot be called here, or None (a probe for the dispatch table; loads it)."""
    try:
        load()
    except LibraryError as error:
        return str(error)
    return None
