"""Greedy generation with a static cache, compiled with backend="mok": the tokens must be those of eager.

    python examples/generate.py

`generate` compiles the forward pass itself when the cache is static. By default it does so on accelerators only;
_compile_all_devices asks for it on the CPU too. The prompt runs uncompiled, the decoding steps compiled. Takes about a
minute on two cores. Exit status 1 if a token differs or a block is not fused.
"""

import argparse
import sys
import time

import torch
from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=48, help="new tokens (default: %(default)s)")
    new_tokens = parser.parse_args().tokens
    model = build()
    prompt = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))

    def generate(**kwargs) -> torch.Tensor:
        start = time.perf_counter()
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            **kwargs,
        )
        seconds = time.perf_counter() - start
        print(f"{1000 * seconds / new_tokens:8.1f} ms a token ({seconds:.1f} s)", flush=True)
        return tokens[:, prompt.shape[1] :]

    print("eager                     ", end="", flush=True)
    eager = generate(disable_compile=True)

    # mode=None is torch.compile's default; generate would ask for "reduce-overhead" (CUDA graphs).
    how = CompileConfig(backend="mok", mode=None, fullgraph=True)
    how._compile_all_devices = True
    print("mok, compiling first      ", end="", flush=True)
    compiled = generate(compile_config=how)
    print("mok again                 ", end="", flush=True)
    again = generate(compile_config=how)

    fused = torch._dynamo.utils.counters["mok"]["fused"]
    good = {
        f"{fused} of {LAYERS} MoE blocks fused": fused == LAYERS,
        f"2 x {new_tokens} greedy tokens equal eager's": torch.equal(compiled, eager),
        "a second run repeats them": torch.equal(again, compiled),
    }
    print("tokens:", " ".join(map(str, compiled[0, :16].tolist())), "...")
    for text, holds in good.items():
        print(f"{'ok' if holds else 'NO':4} {text}")
    if not all(good.values()):
        print("generate FAILED: " + "; ".join(t for t, holds in good.items() if not holds), file=sys.stderr)
        return 1
    return 0


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.1,  # so that the tokens depend on the experts
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


if __name__ == "__main__":
    sys.exit(main())
