"""Decoding with a static cache, for test_models.py: graphs are captured, not skipped, and choose the tokens that plain
launches do. A program of its own, because what goes wrong under CUDA graphs can end a process.

python tests/gpu/generate.py
"""

import copy

import hf
import torch
import transformers
from torch._dynamo.utils import counters


def main() -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "initializer_range": 0.05, "num_experts": 16}
    model, ids = hf.make("qwen3_moe", torch.bfloat16, **sizes, use_cache=True)
    model, ids = model.cuda().eval(), ids.cuda()
    how = transformers.GenerationConfig(
        max_new_tokens=24, do_sample=False, cache_implementation="static", disable_compile=True, pad_token_id=0
    )

    def generate(**options):
        torch._dynamo.reset()
        mine = copy.deepcopy(model)
        mine.forward = torch.compile(mine.forward, backend="mok", options=options)
        return mine.generate(ids, generation_config=how)

    plain = generate()
    counters.clear()
    graphs = generate(**{"triton.cudagraphs": True})
    assert counters["mok"]["fused"] > 0 and counters["mok"]["missed"] == 0, counters["mok"]
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
    assert torch.equal(plain, graphs), (plain, graphs)


if __name__ == "__main__":
    main()
