"""Cases in which a rank goes wrong, run on each rank of a group."""

import os
import time
from datetime import timedelta

import ep_block
import torch
import torch.distributed as dist


def message(call):
    """The class and the text of what `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def wrong_arguments(what):
    """The second rank passes something that does not fit; afterwards the block still works on all."""
    block = ep_block.Block((4, 3, 2))
    rank = dist.get_rank()
    ranks, lists = ep_block.data(block)
    x, ids, weights, _ = ranks[rank]
    own = ep_block.own_experts(lists, ep_block.Sharding(block.experts, 3), rank)
    if rank == 1:
        if what == "k":
            ids, weights = ids[:, :1], weights[:, :1]
        elif what == "dtype":
            x, own = x.double(), [[t.double() for t in tensors] for tensors in own]
        elif what == "experts":
            own = lists
        elif what == "shape":
            weights = weights[:1]
        elif what == "floats":
            ids = ids.float()
    said = message(lambda: ep_block.parallel(block, x, ids, weights, own))
    ep_block.against_one_process(block)
    return said


def another_pass():
    """One rank is in a forward pass while the other is in a backward pass."""
    block = ep_block.Block((4, 3))
    rank = dist.get_rank()
    ranks, lists = ep_block.data(block)
    x, ids, weights, dy = ranks[rank]
    own = ep_block.own_experts(lists, ep_block.Sharding(block.experts, 2), rank)
    y = ep_block.parallel(block, x.requires_grad_(), ids, weights, own)
    return message(lambda: ep_block.parallel(block, x, ids, weights, own) if rank else y.backward(dy))


def wrong_group():
    block = ep_block.Block((4, 3))
    ranks, lists = ep_block.data(block)
    x, ids, weights, _ = ranks[dist.get_rank()]
    half = dist.new_subgroups(1)[0]
    how = ("collectives", half.group_name, 2, block.experts, ep_block.spec(block), "portable")
    return message(lambda: torch.ops.mok.experts_parallel(x, ids, weights, *lists, *how))


def late(seconds):
    """A rank that comes late is waited for."""
    if dist.get_rank() == 1:
        time.sleep(seconds)
    return ep_block.against_one_process(ep_block.Block((4, 3)))


def does_not_come(timeout):
    """The last rank raises before the block: the others end with the timeout of their group."""
    block = ep_block.Block((4, 3))
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    ranks, lists = ep_block.data(block)
    x, ids, weights, _ = ranks[rank]
    own = ep_block.own_experts(lists, ep_block.Sharding(block.experts, 2), rank)
    start = time.monotonic()
    said = ("", "")
    if rank == 0:
        said = message(lambda: ep_block.parallel(block, x, ids, weights, own, group))
    return said, time.monotonic() - start


def dies():
    """The last rank ends between the exchange of the counts and the tokens."""
    from mok_compile.distributed import collectives

    block = ep_block.Block((4, 3))
    rank = dist.get_rank()
    ranks, lists = ep_block.data(block)
    x, ids, weights, _ = ranks[rank]
    own = ep_block.own_experts(lists, ep_block.Sharding(block.experts, 2), rank)
    if rank == 1:
        collectives._dispatch = lambda *args: os._exit(0)
    return message(lambda: ep_block.parallel(block, x, ids, weights, own))
