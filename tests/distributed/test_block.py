"""``mok::experts_parallel`` against one process over the tokens of all ranks: outputs and every gradient."""

import ep_block
import pytest
import torch
from ep_block import Block

RANKS = (2, 3, 4)


def check(group_of, block):
    shapes = group_of(len(block.tokens)).run(ep_block.against_one_process, block)
    assert shapes == [(tokens, block.hidden) for tokens in block.tokens]


@pytest.mark.parametrize("tokens", [(4, 4), (7, 2), (0, 5), (0, 0), (3, 0, 6), (5, 1, 0, 4), (0, 0, 0, 9)], ids=str)
def test_any_number_of_tokens_on_each_rank(group_of, tokens):
    check(group_of, Block(tokens))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("route", ["to_last", "sentinels", "nowhere"])
def test_routing(group_of, ranks, route):
    check(group_of, Block((5, 3, 4, 2)[:ranks], route=route))


@pytest.mark.parametrize("tokens", [(4, 3), (4, 3, 2), (4, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("experts", [5, 3, 1])
def test_experts_that_do_not_divide_by_the_ranks(group_of, tokens, experts):
    """One expert on four ranks: three of them hold none."""
    check(group_of, Block(tokens, experts=experts, k=1))


@pytest.mark.parametrize("ranks", RANKS)
def test_more_slots_than_a_rank_has_experts(group_of, ranks):
    check(group_of, Block((5, 3, 4, 2)[:ranks], k=6))


@pytest.mark.parametrize("layout", ["interleaved", "separate", "single"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_layouts_biases_and_where_the_weight_goes(group_of, layout, weight_on):
    check(group_of, Block((5, 3), layout=layout, bias=True, weight_on=weight_on))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(group_of, dtype):
    check(group_of, Block((5, 3), dtype=dtype, k=3))


def test_output_wider_than_the_input(group_of):
    check(group_of, Block((5, 3), dtype=torch.bfloat16, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_narrow_ids(group_of, dtype):
    check(group_of, Block((5, 3), ids_dtype=dtype))


@pytest.mark.parametrize("frozen", [("x",), ("weights",), ("x", "weights"), ("up", "down"), ("up",)], ids=str)
def test_frozen_operands(group_of, frozen):
    check(group_of, Block((5, 3), frozen=frozen))


def test_nothing_to_learn(group_of):
    check(group_of, Block((5, 3), frozen=("x", "weights", "up", "down")))


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_accumulate(group_of, ranks):
    check(group_of, Block((5, 3, 0, 2)[:ranks], steps=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [(40, 25), (40, 0, 25)], ids=str)
def test_the_cpu_engine_has_the_bits_of_one_process_too(group_of, dtype, tokens):
    check(group_of, Block(tokens, dtype=dtype, k=4, hidden=72, bias=True, engine="cpu", route="spread", exact=False))


def test_the_cpu_engine_with_sentinels_and_weights_on_the_input(group_of):
    check(group_of, Block((40, 25), k=4, engine="cpu", weight_on="input", route="sentinels", exact=False))


def test_the_functional_layer(group_of):
    block = Block((5, 3, 0))
    received = group_of(3).run(ep_block.by_hand, block)
    assert sum(received) == 8 * block.k
