"""backend="mok" under the Hugging Face Trainer: compile the model in place, then hand it over.

    python examples/hf_trainer.py

TrainingArguments(torch_compile_backend="mok") does not work: accelerate keeps a closed list of backend names
(accelerate.utils.DynamoBackend) and turns away whatever is not in it. `model.compile(backend="mok")` needs no list: it
compiles the module's own call in place, keeps its class and the names of its weights, and the Trainer does not notice.
Leave torch_compile off. Takes about a minute on two cores. Exit status 1 if anything is wrong.
"""

import argparse
import sys
import tempfile

import torch
from torch._dynamo.utils import counters
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

LAYERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    steps = parser.parse_args().steps

    model = build()
    names = list(model.state_dict())
    model.compile(backend="mok")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=max(1, steps // 5),
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=sentences(8 * steps))
        print("the first step compiles: about a minute on two cores", flush=True)
        trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    good = {
        f"{counters['mok']['fused']} of {LAYERS} MoE blocks fused": counters["mok"]["fused"] == LAYERS,
        f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}": losses[-1] < losses[0],
        "the model keeps the names of its weights": list(model.state_dict()) == names,
    }
    for text, holds in good.items():
        print(f"{'ok' if holds else 'NO':4} {text}")
    if not all(good.values()):
        print("hf_trainer FAILED: " + "; ".join(t for t, holds in good.items() if not holds), file=sys.stderr)
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
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards from some number in some stride: easy to learn, but not at once."""
    random = torch.Generator().manual_seed(0)
    starts, strides = (
        torch.randint(0, 256, (count, 1), generator=random),
        torch.randint(1, 4, (count, 1), generator=random),
    )
    rows = (starts + strides * torch.arange(48)) % 256
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
