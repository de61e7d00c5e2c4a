"""Checked inputs and the engine requests made of them: sentinels, defaults, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.client import protocol
from gptoss_trt.runtime.engine.messages import Submit
from gptoss_trt.runtime.triton_models import generation
from gptoss_trt.runtime.triton_models.inputs import Inputs, RefusalError
from gptoss_trt.runtime.triton_models.word_lists import dense_bias, pack, sparse_bias, unpack

TYPES = {bool: np.bool_, int: np.int32, float: np.float32}


def inputs(model: str = "tensorrt_llm", **values: Any) -> Inputs:
    """One prompt's inputs; Python scalars become [1, 1] arrays."""
    base: dict[str, Any] = {"request_output_len": 8, "input_lengths": 2, "input_ids": np.array([[1, 2]], np.int32)}
    if model != "tensorrt_llm":
        base = {"text_input": np.array([[b"x"]], object), "max_tokens": 8}
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.array([[value]], dtype=TYPES[type(value)])
        for name, value in {**base, **values}.items()
    }
    return Inputs(protocol.model(model), arrays)


def submit(model: str = "tensorrt_llm", **values: Any) -> Submit:
    checked = inputs(model, **values)
    return generation.submit(checked, 0, (1, 2), want=generation.wanted(checked, 0, exclude_input_default=False))


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),  # expected: temperature, top_k, top_p at the engine
    [
        (None, None, (0.0, 0, 1.0)),  # greedy, whatever the temperature
        (0, None, (0.0, 0, 1.0)),
        (0, 0.0, (0.0, 0, 1.0)),
        (None, -1.0, (0.0, 0, 1.0)),
        (1, 0.0, (0.7, 1, 1.0)),  # top_k 1 is greedy for the engine
        (40, None, (0.7, 40, 1.0)),
        (40, 0.5, (0.7, 40, 0.5)),
        (0, 0.5, (0.7, 0, 0.5)),
        (0, 1.0, (0.7, 0, 1.0)),  # the whole vocabulary
    ],
)
def test_top_k_and_top_p_sentinels(model: str, top_k: Any, top_p: Any, expected: tuple[float, int, float]) -> None:
    names = ("runtime_top_k", "runtime_top_p") if model == "tensorrt_llm" else ("top_k", "top_p")
    values = {name: value for name, value in zip(names, (top_k, top_p), strict=True) if value is not None}
    sampling = submit(model, temperature=0.7, **values).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == pytest.approx(expected)


def test_defaults() -> None:
    made = submit()
    assert (made.max_tokens, made.min_tokens, made.n, made.logprobs, made.guides) == (8, 0, 1, None, ())
    assert made.stop_ids == HARMONY_STOP_IDS
    sampling = made.sampling
    assert (sampling.seed, sampling.repetition_penalty) == (None, 1.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.0, 0.0, 0.0)


def test_end_id_min_length_seed_and_flags() -> None:
    assert submit(end_id=-1).stop_ids == ()
    assert submit(end_id=50256).stop_ids == (50256,)
    assert submit(min_length=3).min_tokens == submit(min_tokens=3).min_tokens == 3
    assert submit(min_length=3, min_tokens=3).min_tokens == 3
    assert submit(seed=np.array([[2**64 - 1]], np.uint64)).sampling.seed == 2**64 - 1
    assert submit(return_log_probs=True).logprobs == 0
    assert submit(num_return_sequences=4).n == 4


def test_sequences_are_bounded_before_answers_are_made_for_them() -> None:
    for count in (0, 129, 2**31 - 1):
        with pytest.raises(RefusalError, match=rf"num_return_sequences is {count}; it must lie in 1\.\.128"):
            submit(num_return_sequences=count)


def test_guides() -> None:
    def guide(kind: str, text: str | None) -> Any:
        values = {"guided_decoding_guide_type": np.array([[kind.encode()]], object)}
        if text is not None:
            values["guided_decoding_guide"] = np.array([[text.encode()]], object)
        (made,) = submit(**values).guides
        return made

    assert (guide("json", None).kind, guide("json", None).end_ids) == ("json_object", HARMONY_STOP_IDS)
    assert (guide("regex", "a+").kind, guide("regex", "a+").grammar) == ("regex", "a+")
    assert guide("ebnf_grammar", "root ::= x").kind == "ebnf"
    with pytest.raises(RefusalError, match="allowed: json, json_schema, regex, ebnf_grammar, choice"):
        guide("structural_tag", "x")


def test_a_missing_required_input_is_refused_by_the_model_itself() -> None:
    with pytest.raises(RefusalError, match="the required input 'max_tokens' is missing"):
        Inputs(protocol.model("ensemble"), {"text_input": np.array([[b"x"]], object)})


def test_batches_must_agree() -> None:
    with pytest.raises(RefusalError, match="a batch of 1 and input_ids one of 2"):
        inputs(input_ids=np.array([[1, 2], [3, 4]], np.int32))
    with pytest.raises(RefusalError, match="the batch has 300 prompts; allowed: 1 to 256"):
        Inputs(
            protocol.model("ensemble"),
            {"text_input": np.full((300, 1), b"x", object), "max_tokens": np.ones((300, 1), np.int32)},
        )


def test_every_refusal_has_a_neutral_value_or_an_empty_tensor() -> None:
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        for tensor in protocol.model(name).inputs:
            if tensor.refuse and -1 in tensor.dims:
                shape = (1, *(0 if dim == -1 else dim for dim in tensor.dims))
                empty = np.zeros(shape, dtype=protocol.NUMPY_NAMES[tensor.dtype])
                assert inputs(name, **{tensor.name: empty}).batch_size == 1


@pytest.mark.parametrize(
    "batch",
    [
        [[]],
        [[[1]], []],
        [[[1, 2, 3], [4]], [[5, 6]]],
        [[[1], [2], [3], [4]], [[5, 6, 7, 8, 9, 10]]],
    ],
)
def test_word_lists_read_back(batch: list[list[list[int]]]) -> None:
    packed = pack(batch)
    assert packed.shape[:2] == (len(batch), 2)
    assert [list(map(list, unpack("words", row))) for row in packed] == batch


def test_word_lists_are_padded_as_written() -> None:
    packed = pack([[[7, 8], [9]], [[5]]])
    assert packed.tolist() == [[[7, 8, 9], [2, 3, -1]], [[5, 0, 0], [1, -1, -1]]]
    assert pack([[], []]).shape == (2, 2, 0)


@pytest.mark.parametrize("offsets", [[0, -1], [3, -1], [2, 1], [-2, 1]])
def test_offsets_that_are_no_word_ends(offsets: list[int]) -> None:
    with pytest.raises(RefusalError, match="ends at"):
        unpack("stop_words_list", np.array([[7, 8], offsets]))


def test_biases() -> None:
    dense = dense_bias([[1, 3], [3]], [0.5, -2.0], 5)
    assert dense.tolist() == [0, 0.5, 0, -1.5, 0]
    assert sparse_bias("bias", dense, 5) == ((1, 0.5), (3, -1.5))
    assert sparse_bias("bias", np.zeros(0), 5) == ()
    with pytest.raises(RefusalError, match="has 4 values; it must have one for each of the 5 ids"):
        sparse_bias("bias", dense[:4], 5)
    with pytest.raises(RefusalError, match="2 embedding bias words came with 1 weights"):
        dense_bias([[1], [2]], [1.0], 5)
