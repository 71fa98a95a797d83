"""Attention of com.microsoft against ONNX Runtime: masks, caches, rotary embedding, experts."""

import numpy as np
import pytest
from one_node import MICROSOFT, agree, by_bitwright, by_onnxruntime, compare, feeds, model

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx import load

BATCH, LENGTH, FEATURES, HEADS, SIZE = 2, 5, 8, 2, 4
DYNAMIC = pytest.mark.parametrize(
    "dynamic", [None, {BATCH: "batch", LENGTH: "length"}], ids=["static", "symbolic"]
)


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def whole(*values):
    return np.array(values, np.int32)


def flags(*shape):
    return np.random.default_rng(shape).integers(0, 2, shape).astype(np.int32)


PROJECTED = [draw(BATCH, LENGTH, FEATURES), draw(FEATURES, 24), draw(24)]
LEFT_PADDED = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], np.int32)


@DYNAMIC
@pytest.mark.parametrize(
    "mask",
    [
        None,
        whole(3, 5),
        LEFT_PADDED,
        flags(BATCH, LENGTH, LENGTH) | np.eye(LENGTH, dtype=np.int32),
        np.ones((BATCH, 1), np.int32),
    ],
    ids=["none", "lengths", "keys", "pairs", "one column"],
)
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention_masks(mask, unidirectional, dynamic):
    options = {"num_heads": HEADS, "unidirectional": unidirectional, "dynamic": dynamic}
    compare("Attention", [*PROJECTED, mask], tolerance=2e-4, **options)


def test_attention_mask_of_ends_and_starts():
    compare("Attention", [*PROJECTED, whole(3, 5, 1, 0)], num_heads=HEADS)
    with pytest.raises(UnsupportedError, match="is ambiguous"):
        load(model("Attention", [*PROJECTED, whole(3, 5, 1)], num_heads=HEADS))


def test_a_row_without_visible_keys_averages():
    mask = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    compare("Attention", [*PROJECTED, mask], num_heads=HEADS, mask_filter_value=-3.0)


@DYNAMIC
def test_attention_with_past(dynamic):
    past = draw(2, BATCH, HEADS, 3, SIZE)
    options = {"num_heads": HEADS, "dynamic": dynamic}
    compare("Attention", [*PROJECTED, None, past], 2, **options)
    compare("Attention", [*PROJECTED, None, past], 2, unidirectional=1, scale=0.4, **options)
    mask = flags(BATCH, LENGTH + 3)
    mask[:, 0] = 1
    compare("Attention", [*PROJECTED, mask, past], 2, unidirectional=1, **options)
    empty = draw(2, BATCH, HEADS, 0, SIZE)
    compare("Attention", [*PROJECTED, None, empty], 2, unidirectional=1, **options)


@DYNAMIC
def test_attention_bias_and_sizes(dynamic):
    options = {"num_heads": HEADS, "dynamic": dynamic}
    bias = draw(BATCH, HEADS, LENGTH, LENGTH)
    compare("Attention", [*PROJECTED, None, None, bias], **options)
    compare("Attention", [*PROJECTED, whole(3, 5), None, bias[:1, :1]], **options)
    wide = [PROJECTED[0], draw(FEATURES, 28), draw(28)]
    compare("Attention", wide, qkv_hidden_sizes=[8, 8, 12], **options)


QUERY, KEY, VALUE = (draw(BATCH, n, FEATURES, seed=n) for n in (LENGTH, 7, 7))
CACHE = draw(BATCH, HEADS, 3, SIZE, seed=1), draw(BATCH, HEADS, 3, SIZE, seed=2)
OWN = draw(BATCH, LENGTH, FEATURES, seed=3), draw(BATCH, LENGTH, FEATURES, seed=4)


@DYNAMIC
@pytest.mark.parametrize(
    "operands, outputs, attrs",
    [
        ([QUERY, KEY, VALUE], 3, {}),
        ([QUERY, KEY, VALUE, draw(24)], 1, {"scale": 0.3}),
        ([QUERY, KEY, draw(BATCH, 7, 12), draw(28)], 1, {}),
        ([QUERY, KEY, VALUE, None, whole(3, 7)], 1, {}),
        ([QUERY, KEY, VALUE, None, flags(BATCH, 7)], 1, {}),
        ([QUERY, KEY, VALUE, None, flags(BATCH, LENGTH, 7)], 1, {}),
        ([QUERY, KEY, VALUE, None, None, draw(1, HEADS, LENGTH, 7)], 1, {}),
        ([QUERY, *OWN], 1, {"unidirectional": 1}),
        ([QUERY, draw(BATCH, HEADS, 7, SIZE), draw(BATCH, HEADS, 7, SIZE)], 1, {}),
        ([QUERY, draw(BATCH, HEADS, 7, SIZE), draw(BATCH, HEADS, 7, SIZE), draw(24)], 1, {}),
        ([QUERY, *OWN, draw(24), None, None, *CACHE], 3, {"unidirectional": 1}),
        ([QUERY, *OWN, None, flags(BATCH, LENGTH + 3), None, *CACHE], 3, {}),
        ([QUERY, *OWN, None, None, draw(1, 1, LENGTH, LENGTH + 3), *CACHE], 3, {}),
    ],
)
def test_multi_head_attention(operands, outputs, attrs, dynamic):
    options = {"num_heads": HEADS, "dynamic": dynamic, "tolerance": 2e-4}
    compare("MultiHeadAttention", operands, outputs, **attrs, **options)


def test_packed_operands_equal_separate_ones():
    """ONNX Runtime's CPU kernel takes only separate operands."""
    heads = [draw(BATCH, LENGTH, HEADS, SIZE, seed=i) for i in range(3)]
    folded = [x.reshape(BATCH, LENGTH, FEATURES) for x in heads]
    expected = compare("MultiHeadAttention", [*folded, draw(24)], num_heads=HEADS)
    packed = [np.stack(heads, axis=3), None, None, draw(24)]
    proto = model("MultiHeadAttention", packed, num_heads=HEADS)
    agree(expected, by_bitwright(proto, feeds(proto, packed)), 1e-6)
    pair = [folded[0], np.stack(heads[1:], axis=3), None, draw(24)]
    proto = model("MultiHeadAttention", pair, num_heads=HEADS)
    agree(expected, by_bitwright(proto, feeds(proto, pair)), 1e-6)


@DYNAMIC
def test_preallocated_cache(dynamic):
    step = [draw(BATCH, 1, FEATURES, seed=i) for i in range(3)]
    cache = [draw(BATCH, HEADS, 9, SIZE, seed=i) for i in range(2)]
    for array in cache:
        array[:, :, 3:] = 0
    options = {"num_heads": HEADS, "dynamic": dynamic, "tolerance": 2e-4}
    op = "DecoderMaskedMultiHeadAttention"
    shared = {"past_present_share_buffer": 1, **options}
    compare(op, [*step, None, None, *cache, whole(3)], 3, **shared)
    masked = [*step, flags(BATCH, 4) | 1, None, *cache, whole(3), whole(1)]
    compare(op, masked, 3, **shared)
    compare("MultiHeadAttention", [*step, None, None, None, *cache, whole(3)], 3, **options)


@DYNAMIC
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved, dynamic):
    positions = np.array([[0, 3, 10, 7, 1], [5, 5, 2, 0, 9]])
    tables, short = (draw(11, 4), draw(11, 4, seed=1)), (draw(11, 2), draw(11, 2, seed=1))
    folded, apart = draw(BATCH, LENGTH, 16), draw(BATCH, 2, LENGTH, 8)
    options = {"interleaved": interleaved, "dynamic": dynamic}
    compare("RotaryEmbedding", [folded, positions, *tables], **options)
    compare("RotaryEmbedding", [apart, positions, *tables], **options)
    compare("RotaryEmbedding", [folded, np.array([3]), *tables], **options)
    part = {"num_heads": 2, "rotary_embedding_dim": 4, **options}
    compare("RotaryEmbedding", [folded, positions, *short], **part)


GROUPED = {"num_heads": 4, "kv_num_heads": 2}
ANGLES = draw(11, 8), draw(11, 8, seed=1)
PROMPT = draw(BATCH, LENGTH, 64), draw(BATCH, LENGTH, 32), draw(BATCH, LENGTH, 32, seed=1)
STEP = draw(BATCH, 1, 64), draw(BATCH, 1, 32), draw(BATCH, 1, 32, seed=1)
PAST = draw(BATCH, 2, 6, 16), draw(BATCH, 2, 6, 16, seed=1)
FULL, NEXT = (whole(4, 4), whole(5)), (whole(6, 6), whole(7))
NONE = [None] * 3


@DYNAMIC
@pytest.mark.parametrize(
    "operands, attrs",
    [
        ([*PROMPT, None, None, *FULL], {"scale": 0.3, "softcap": 2.0}),
        ([*PROMPT, None, None, *FULL, *ANGLES], {"do_rotary": 1}),
        ([*PROMPT, None, None, *FULL, *ANGLES], {"do_rotary": 1, "rotary_interleaved": 1}),
        ([draw(BATCH, LENGTH, 128), *NONE, None, *FULL, *ANGLES], {"do_rotary": 1}),
        ([*PROMPT, draw(BATCH, 2, 0, 16), draw(BATCH, 2, 0, 16), *FULL], {}),
        ([*PROMPT, None, None, *FULL], {"local_window_size": 2}),
        ([*PROMPT, None, None, *FULL], {"causal": 0}),
        ([*PROMPT, None, None, *FULL, *NONE, draw(BATCH, 4, LENGTH, LENGTH)], {}),
        ([*PROMPT, None, None, *FULL], {"smooth_softmax": 1}),
        (
            [*PROMPT, None, None, *FULL, *NONE, draw(1, 1, LENGTH, LENGTH), draw(4)],
            {"local_window_size": 2, "softcap": 3.0},
        ),
        ([*STEP, *PAST, *NEXT], {}),
        ([*STEP, *PAST, *NEXT, *ANGLES], {"do_rotary": 1}),
        ([*STEP, *PAST, *NEXT, *ANGLES, np.array([[3], [4]])], {"do_rotary": 1}),
        ([*STEP, *PAST, *NEXT, *ANGLES], {"do_rotary": 1, "local_window_size": 3}),
        ([*STEP, *PAST, *NEXT, *ANGLES, None, None, draw(4)], {"do_rotary": 1}),
    ],
)
def test_group_query_attention(operands, attrs, dynamic):
    compare("GroupQueryAttention", operands, 3, dynamic=dynamic, **GROUPED, **attrs)


def test_group_query_attention_of_a_chunk():
    past = draw(1, 2, 6, 16), draw(1, 2, 6, 16, seed=1)
    chunk = draw(1, 3, 64), draw(1, 3, 32), draw(1, 3, 32, seed=1)
    operands = [*chunk, *past, whole(8), whole(9), *ANGLES]
    attrs = {"do_rotary": 1, "local_window_size": 4}
    compare("GroupQueryAttention", operands, 3, **GROUPED, **attrs)
    compare("GroupQueryAttention", operands, 3, constants=[6], **GROUPED, **attrs)


@DYNAMIC
def test_rows_after_the_valid_keys_are_undefined(dynamic):
    """A preallocated cache, sequences of unequal length and a padded prompt: valid rows agree."""
    room = draw(BATCH, 2, 10, 16), draw(BATCH, 2, 10, 16, seed=1)
    operands = [*STEP, *room, whole(3, 6), whole(7), *ANGLES]
    options = {"do_rotary": 1, "dynamic": dynamic, **GROUPED}
    proto = model("GroupQueryAttention", operands, 3, **options)
    given = feeds(proto, operands)
    expected, found = by_onnxruntime(proto, given), by_bitwright(proto, given)
    agree(expected[:1], found[:1], 1e-5)
    for text, valid in enumerate((4, 7)):
        for want, have in zip(expected[1:], found[1:], strict=True):
            agree([want[text, :, :valid]], [have[text, :, :valid]], 1e-5)
    operands = [*PROMPT, None, None, whole(4, 2), whole(5), *ANGLES]
    proto = model("GroupQueryAttention", operands, 3, **options)
    given = feeds(proto, operands)
    expected, found = by_onnxruntime(proto, given), by_bitwright(proto, given)
    for text, valid in enumerate((5, 3)):
        agree([expected[0][text, :valid]], [found[0][text, :valid]], 1e-5)


@pytest.mark.parametrize(
    "operands, attrs, message",
    [
        ([*PROMPT, None, None, None, whole(5)], {}, "lengths of the keys are missing"),
        ([*PROMPT, None, None, *FULL], {"do_rotary": 1}, "tables of angles are missing"),
        ([*PROMPT, None, None, *FULL], {"kv_num_heads": 3}, "no multiple of kv_num_heads"),
        ([*STEP, *PAST, *NEXT], {"sliding_window_cache": 1}, "drops keys"),
    ],
)
def test_group_query_attention_refuses(operands, attrs, message):
    with pytest.raises(ImportModelError, match=message):
        load(model("GroupQueryAttention", operands, 3, **{**GROUPED, **attrs}))


TOKENS, WIDTH, INNER, EXPERTS = 5, 16, 32, 4
ROUTED = [draw(TOKENS, WIDTH), draw(TOKENS, EXPERTS)]
LAYERS = [
    draw(EXPERTS, INNER, WIDTH),
    draw(EXPERTS, INNER),
    draw(EXPERTS, WIDTH, INNER),
    draw(EXPERTS, WIDTH),
]


@pytest.mark.parametrize("dynamic", [None, {TOKENS: "tokens"}], ids=["static", "symbolic"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("k, normalize", [(1, 0), (2, 1)])
def test_mixture_of_experts(activation, k, normalize, dynamic):
    attrs = {"activation_type": activation, "k": k, "normalize_routing_weights": normalize}
    compare("MoE", [*ROUTED, *LAYERS], dynamic=dynamic, **attrs)


def test_mixture_of_gated_experts():
    operands = [*ROUTED, draw(EXPERTS, 2 * INNER, WIDTH), draw(EXPERTS, 2 * INNER), *LAYERS[2:]]
    gate = {"activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 1.0}
    interleaved = {"swiglu_fusion": 1, "swiglu_limit": 3.0, "k": 2, **gate}
    expected = compare("MoE", operands, **interleaved)
    for fused in (
        [np.concatenate([x[:, ::2], x[:, 1::2]], axis=1) for x in operands[2:4]],
        [],
    ):
        own = fused or [x[:, ::2] for x in operands[2:4]]
        beside = [] if fused else [x[:, 1::2] for x in operands[2:4]]
        other = [*ROUTED, *own, *LAYERS[2:], *beside]
        attrs = {**interleaved, "swiglu_fusion": 2 if fused else 0}
        proto = model("MoE", other, domain=MICROSOFT, **attrs)
        agree(expected, by_bitwright(proto, feeds(proto, other)), 1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mixture_of_quantized_experts(bits):
    generator = np.random.default_rng(bits)

    def qvalues(rows, columns):
        return generator.integers(0, 256, (EXPERTS, rows, columns * bits // 8)).astype(np.uint8)

    def scales(*shape):
        return np.abs(draw(EXPERTS, *shape)) * np.float32(0.05)

    first, second = qvalues(INNER, WIDTH), qvalues(WIDTH, INNER)
    attrs = {"expert_weight_bits": bits, "k": 2, "activation_type": "silu"}
    options = {"constants": [2, 3, 5, 6, 11, 12], "tolerance": 5e-2 if bits == 8 else 1e-3}
    rows = [*ROUTED, first, scales(INNER), LAYERS[1], second, scales(WIDTH), LAYERS[3]]
    compare("QMoE", rows, **attrs, **options)
    zeros = [qvalues(1, INNER)[:, 0], qvalues(1, WIDTH)[:, 0]]
    compare("QMoE", [*rows, None, None, None, *zeros], **attrs, **options)
    weights = [None] * 6 + [np.abs(draw(TOKENS, EXPERTS, seed=3))]
    compare("QMoE", [*rows, *weights], **attrs, **options)
    blocks = [*ROUTED, first, scales(INNER, 1), LAYERS[1], second, scales(WIDTH, 2), LAYERS[3]]
    compare("QMoE", blocks, block_size=16, **attrs, **options)
