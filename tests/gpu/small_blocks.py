"""Every kind of kernel of the sm90 engine on small blocks, for compute-sanitizer (test_sanitizer.py)."""

import torch
from test_sm90 import OSS, Block, engine, listed
from test_sm90_router import SPECS, Router

# T, H, I, E, K; the tokens of the last one give forward its tall tiles.
BLOCKS = [
    ((33, 136, 72, 5, 2), {}),
    ((33, 136, 72, 5, 2), {"routing": "sentinel", "dtype": torch.float16}),
    ((33, 136, 72, 5, 2), {"layout": "interleaved", "activation": OSS, "bias": True}),
    ((33, 136, 72, 5, 2), {"layout": "separate", "bias": True, "transposed": True}),
    ((33, 136, 72, 5, 2), {"layout": "single", "activation": "gelu(up)"}),
    ((150, 72, 136, 2, 2), {"transposed": True}),
    ((150, 72, 136, 2, 2), {"layout": "interleaved", "activation": OSS, "bias": True, "transposed": True}),
]


def blocks():
    for sizes, options in BLOCKS:
        block = Block(*sizes, **options)
        _, *saved = block.forward(engine)
        block.backward(engine, saved)
    few = Block(3, 136, 72, 5, 2)  # inference of few tokens has a kernel of its own
    few.forward(engine, save=False)
    listed(few).forward(engine, save=False)


def routers():
    for name in SPECS:
        router = Router(name, (17, 136, 64, 4))
        router.run()
        router.chosen()


if __name__ == "__main__":
    with torch.no_grad():
        blocks()
        routers()
    torch.cuda.synchronize()
