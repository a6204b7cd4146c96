"""Which model families are fused: tiny random models of the installed transformers, every block found, and why if not.

    python benchmarks/coverage.py                 the main families, and those of a model zoo where there is one
    python benchmarks/coverage.py mixtral         some of them
    python benchmarks/coverage.py --write         rewrites the table in README.md and benchmarks/results/coverage.*

A zoo is a folder (--zoo, else ../shared/zoo) with zoo.py: families(), make(name, dtype), moe_blocks(model).
Each model is compiled with our passes and runs once, without Inductor. The blocks that run as mok:: ops are set against
the MoE modules that run in eager. With mok.verify: a block counts only if its outputs (in training its gradients too)
were compared with the graph it replaces. Reasons are those of `mok_compile.explain`.
"""

import argparse
import importlib
import json
import logging
import re
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import transformers

import mok_compile
from mok_compile import engines
from mok_compile.backend import transform
from mok_compile.options import Options

ROOT = Path(__file__).parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS = [f"{mode} {dtype}" for mode in ("inference", "training") for dtype in DTYPES]
BEGIN, END = "<!-- coverage: begin (benchmarks/coverage.py --write) -->", "<!-- coverage: end -->"

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
# Family -> its name in class names, and the settings beyond SIZES.
MAIN = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "head_dim": 16}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 8}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--zoo", type=Path, default=ROOT.parent / "shared" / "zoo", help="folder with zoo.py")
    parser.add_argument("--write", action="store_true", help="rewrite README.md and benchmarks/results/coverage.*")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)

    torch.set_num_threads(1)  # the models are tiny

    zoo = load_zoo(args.zoo)
    names = args.families or [*MAIN, *(name for name in (zoo.families() if zoo else ()) if name not in MAIN)]
    if unknown := [n for n in names if n not in MAIN and (zoo is None or n not in zoo.families())]:
        parser.error(f"unknown families {', '.join(unknown)}; without a zoo there are {', '.join(MAIN)}")
    rows = {}
    for name in names:
        start = time.perf_counter()
        rows[name] = family(name, zoo)
        print(f"{table_row(name, rows[name])} {time.perf_counter() - start:.0f} s", flush=True)
        if args.write:
            write(rows)
    return 0


def load_zoo(folder: Path):
    if not (folder / "zoo.py").exists():
        return None
    sys.path.insert(0, str(folder))
    return importlib.import_module("zoo")


def family(name: str, zoo=None) -> dict[str, dict]:
    """Column -> {"fused", "blocks", "why"} for one family."""
    return {
        f"{mode} {dtype}": case(name, DTYPES[dtype], mode == "training", zoo)
        for mode in ("inference", "training")
        for dtype in DTYPES
    }


def case(name: str, dtype: torch.dtype, training: bool, zoo=None) -> dict:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        model, inputs = main_model(name, dtype) if name in MAIN else zoo.make(name, dtype=dtype)
        model.train(training)
        with torch.set_grad_enabled(training):
            blocks = count_running(model, inputs, moe_blocks(model) if name in MAIN else zoo.moe_blocks(model))
            fused = count_fused(model, inputs)
            why = [] if fused == blocks else reasons(model, inputs)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return {"fused": 0, "blocks": None, "why": [f"error: {type(error).__name__}: {text[0]}"[:200]]}
    return {"fused": fused, "blocks": blocks, "why": why}


def count_running(model: torch.nn.Module, inputs: dict, names: list[str]) -> int:
    """How many of the modules `names` run in one eager call: text alone does not reach the experts for images."""
    seen: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: seen.add(name))
        for name in names
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return len(seen)


def count_fused(model: torch.nn.Module, inputs: dict) -> int:
    """How many blocks (told apart by their weights) run as a fused op in one call of the compiled model."""
    engine, options = engines.get("portable"), Options(verify=True, engine="portable")
    weights: dict[int, torch.Tensor] = {}

    def counting(*args, **kwargs):
        down = args[4][0]
        weights[down.data_ptr()] = down
        return type(engine).forward(engine, *args, **kwargs)

    def backend(gm, example_inputs):
        transform(gm, example_inputs, options)

        def run(*args):
            with mock.patch.object(engine, "forward", counting):
                return gm.forward(*args)

        return run

    backend.compiler_name, backend.options = "mok", options  # as the real one: it opens the door for "eager"
    torch.compile(model, backend=backend)(**inputs)
    return len(weights)


def reasons(model: torch.nn.Module, inputs: dict) -> list[str]:
    torch._dynamo.reset()
    report = mok_compile.explain(model, {"mok.verify": True, "mok.engine": "portable"})(**inputs)
    missed = dict.fromkeys(f"{site.reason}: {site.detail}" for site in report.sites if site.status == "missed")
    return list(missed) or ["not reported"]


def main_model(name: str, dtype: torch.dtype):
    title, settings = MAIN[name]
    package = importlib.import_module(f"transformers.models.{name}")
    config = getattr(package, f"{title}Config")(**{**SIZES, **settings})
    model = getattr(package, f"{title}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # some families leave the experts' weights to be loaded
            parameter.normal_(0, 0.1)
    ids = torch.randint(3, 128, (2, 12))
    return model, {"input_ids": ids}


def moe_blocks(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]


def complete(row: dict[str, dict]) -> bool:
    return all(cell["fused"] == cell["blocks"] for cell in row.values())


def codes(row: dict[str, dict]) -> list[str]:
    """Reason codes of a row, each once."""
    whys = [why for cell in row.values() for why in cell["why"]]
    return sorted({why.partition(":")[0] for why in whys})


def table_row(name: str, row: dict[str, dict]) -> str:
    cells = ["error" if cell["blocks"] is None else f"{cell['fused']}/{cell['blocks']}" for cell in row.values()]
    return f"| {name} | {' | '.join(cells)} | {', '.join(codes(row))} |"


def table(rows: dict[str, dict]) -> str:
    head = f"| family | {' | '.join(COLUMNS)} | why not |\n|---|{'---|' * (len(COLUMNS) + 1)}"
    return "\n".join([head, *(table_row(name, row) for name, row in rows.items())])


def conditions() -> str:
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def readme_section(rows: dict[str, dict]) -> str:
    """The main families as a table, the others in a sentence by outcome."""
    parts = [table({name: row for name, row in rows.items() if name in MAIN})]
    others = {name: row for name, row in rows.items() if name not in MAIN}
    if others:
        groups: dict[str, list[str]] = {}
        for name, row in others.items():
            groups.setdefault("every block fused" if complete(row) else ", ".join(codes(row)), []).append(name)
        done = groups.pop("every block fused", [])
        lines = [
            f"Of {len(others)} other families {len(done)} have every block fused in all four columns: {listed(done)}."
        ]
        lines += [
            "",
            "The others, by reason code:",
        ]
        lines += ["", *(f"- {reason}: {listed(names)}" for reason, names in sorted(groups.items()))]
        parts.append("\n".join(lines))
    parts.append(f"Tiny random models, {conditions()}; every family in full: `benchmarks/results/coverage.md`.")
    return "\n\n".join(parts)


def listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def write(new: dict[str, dict]) -> None:
    """Rewrites the README's section and the results; families not in `new` keep what was found under these versions."""
    results = ROOT / "benchmarks" / "results"
    rows = dict(new)
    stored = results / "coverage.json"
    if stored.exists() and (old := json.loads(stored.read_text()))["conditions"] == conditions():
        rows = {**old["families"], **new}
    readme = ROOT / "README.md"
    text = readme.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    readme.write_text(pattern.sub(lambda _: f"{BEGIN}\n{readme_section(rows)}\n{END}", text))
    stored.write_text(json.dumps({"conditions": conditions(), "families": rows}, indent=1) + "\n")
    details = [
        f"- {name}: {'; '.join(dict.fromkeys(why for cell in row.values() for why in cell['why']))}"
        for name, row in rows.items()
        if not complete(row)
    ]
    body = [
        "# What is fused",
        f"Made by `benchmarks/coverage.py --write`: {conditions()}.",
        table(rows),
        "## Why not",
        "\n".join(details) or "Nothing is missing.",
    ]
    (results / "coverage.md").write_text("\n\n".join(body) + "\n")


if __name__ == "__main__":
    sys.exit(main())
