"""Decoding with a static cache, for test_models.py: graphs are captured, not skipped, and choose the tokens that plain
launches do. A program of its own, because what goes wrong under CUDA graphs can end a process.

`generate` compiles decoding only, after a prefill that has made the cache. Where a compiled forward makes the cache
itself, Inductor's own CUDA graphs end in a segmentation fault (torch 2.11, backend="inductor" too).

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

    def generate(**how):
        torch._dynamo.reset()
        counters.clear()
        config = transformers.GenerationConfig(
            max_new_tokens=24, do_sample=False, cache_implementation="static", pad_token_id=0, **how
        )
        return copy.deepcopy(model).generate(ids, generation_config=config)

    def compiled(**how):
        tokens = generate(compile_config=transformers.CompileConfig(backend="mok", **how))
        assert counters["mok"]["fused"] > 0 and counters["mok"]["missed"] == 0, counters["mok"]
        return tokens

    plain = compiled(mode=None)
    graphs = compiled(mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0, counters["inductor"]
    assert torch.equal(plain, graphs), (plain, graphs)


if __name__ == "__main__":
    main()
