"""Every kind of kernel of the sm90 engine on small blocks, for compute-sanitizer (test_sanitizer.py)."""

import torch
from test_sm90 import OSS, Block, engine, listed
from test_sm90_router import SPECS, Router

# T, H, I, E, K. Forward has low tiles for the first ones, wide tiles for 80 tokens, tall ones for 150.
BLOCKS = [
    ((33, 136, 72, 5, 2), {}),
    ((33, 136, 72, 5, 2), {"routing": "sentinel", "dtype": torch.float16}),
    ((33, 136, 72, 5, 2), {"layout": "interleaved", "activation": OSS, "bias": True}),
    ((33, 136, 72, 5, 2), {"layout": "separate", "bias": True, "transposed": True}),
    ((33, 136, 72, 5, 2), {"layout": "single", "activation": "gelu(up)"}),
    ((33, 136, 72, 5, 2), {"transposed": True}),
    ((70, 136, 72, 20, 4), {"routing": "one"}),
    ((80, 72, 136, 2, 2), {}),
    ((80, 72, 136, 2, 2), {"transposed": True}),
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
