"""Large buffers are used again, but never while a tensor has them."""

import gc
import threading

import pytest
import torch

from mok_compile.engines import buffers
from mok_compile.engines.buffers import Pool

pytestmark = pytest.mark.skipif(not buffers._HAVE, reason="this system cannot map memory in that way")


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(buffers, "SMALLEST", 1 << 12)
    return Pool()


def make(pool, *shape, dtype=torch.float32):
    return pool.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype)


def test_a_buffer_comes_back_when_its_last_tensor_is_gone(pool):
    a = make(pool, 64, 64)
    where, view = a.data_ptr(), a[3]
    del a
    assert make(pool, 64, 64).data_ptr() != where  # `view` has it still
    del view
    assert make(pool, 64, 64).data_ptr() == where


def test_numbers_stay_as_long_as_a_tensor_lives(pool):
    live = [make(pool, 64, 64).fill_(i) for i in range(4)]
    del live[1]
    for i in range(8):
        make(pool, 64, 64).fill_(99 + i)
    assert [t.unique().tolist() for t in live] == [[0], [2], [3]]


def test_never_more_than_was_once_in_use(pool):
    several = [make(pool, 64, 64) for _ in range(3)]
    most = pool.most
    del several
    for rows in (70, 100, 150, 64, 40):
        t = make(pool, rows, 64)
        assert pool.lent + sum(map(len, pool.kept)) <= max(most, pool.lent)
        del t
    assert pool.most == most


def test_release(pool):
    live = make(pool, 64, 64).fill_(7)
    make(pool, 64, 64)
    pool.release()
    assert not pool.kept and pool.most == pool.lent > 0
    assert (live == 7).all()


def test_layout_and_dtype(pool):
    like = torch.empty(8, 40, 64, dtype=torch.bfloat16).transpose(1, 2)
    t = pool.empty_like(like)
    assert (t.shape, t.stride(), t.dtype, t.storage_offset()) == (like.shape, like.stride(), like.dtype, 0)
    t.fill_(1)
    assert t.sum() == t.numel()


def test_small_ones_are_left_to_torch(pool):
    make(pool, 3)
    assert pool.most == 0


def test_without_memory_torch_is_asked(pool, monkeypatch):
    def none(*args, **kwargs):
        raise OSError("no memory")

    monkeypatch.setattr(buffers.mmap, "mmap", none)
    assert make(pool, 64, 64).fill_(2).sum() == 2 * 64 * 64
    assert pool.lent == 0


def test_tensors_that_die_in_cycles_and_in_other_threads(pool):
    failures = []

    def work(seed):
        for i in range(200):
            box = [make(pool, 32 + (seed + i) % 3 * 32, 64).fill_(seed)]
            box.append(box)
            failures.extend([] if (box[0] == seed).all() else [(seed, i)])
            if i % 50 == 0:
                gc.collect()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    pool.release()
    assert not failures and pool.lent == 0


def test_gradients_of_two_steps(monkeypatch):
    """What the engine wrote in one step is not touched by the next, unless it was given up."""
    monkeypatch.setattr(buffers, "SMALLEST", 1)
    from mok_compile import ops  # noqa: F401  defines mok::experts
    from mok_compile.spec import ExpertsSpec

    T, H, I, E, K = 9, 16, 24, 3, 2
    spec = ExpertsSpec("silu(gate) * up", "concat", "float32").to_json()
    up, down = torch.randn(E, 2 * I, H, requires_grad=True), torch.randn(E, H, I, requires_grad=True)

    def step():
        ids, weights, x = torch.randint(E, (T, K)), torch.rand(T, K), torch.randn(T, H)
        torch.ops.mok.experts(x, ids, weights, [up], [down], [], [], spec, "cpu")[0].sum().backward()

    step()
    first, copies = (up.grad, down.grad), (up.grad.clone(), down.grad.clone())
    where = up.grad.data_ptr()
    up.grad = down.grad = None
    step()
    assert up.grad.data_ptr() != where
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))
    del first
    up.grad = down.grad = None
    step()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in (up, down))
