"""What would be fused in a model that is not here yet: built on the meta device, without weights, in seconds.

Layers that equal each other are traced once. They are compared by everything that Dynamo could see of them (classes,
shapes, dtypes, plain attributes, hooks), not by what a config promises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mok_compile import build, engines
from mok_compile.explaining import Collector, broken_graphs
from mok_compile.integrations import watch
from mok_compile.options import Options
from mok_compile.report import Report, Site
from mok_compile.spec import dtype_name

TRACED_TOKENS = 64  # the graph does not depend on their number


class NotAModel(ValueError):
    """The target names nothing that can be examined; the message says what was tried."""


@dataclass(frozen=True)
class Subject:
    """A model to be examined and the arguments that it is called with."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """A list of layers, and which ones equal each other: ``kinds[j]`` are the numbers of the layers of kind j."""

    name: str
    kinds: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return sum(map(len, self.kinds))

    def __str__(self) -> str:
        kinds = len(self.kinds)
        if kinds == self.length:
            return f"{self.name}: {self.length} layers, all different, each traced"
        traced = ", ".join(str(kind[0]) for kind in self.kinds)
        what = "one kind" if kinds == 1 else f"{kinds} kinds"
        which = f"layer {traced} was traced" if kinds == 1 else f"one of each was traced ({traced})"
        return f"{self.name}: {self.length} layers of {what}; {which}, the others equal it in every setting"


@dataclass(frozen=True)
class Memory:
    """Bytes that one block saves for its backward pass, for `tokens` tokens: see `saved_bytes`."""

    tokens: int
    eager: int
    fused: int


@dataclass
class Examination:
    """The result: `report` counts every layer, also those that were not traced."""

    name: str
    parameters: int
    bytes: int
    report: Report
    tokens: int
    stacks: list[Stack] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether there is a block, all blocks are fused, and the model was seen to its end."""
        return self.report.fused > 0 and self.report.missed == 0 and not self.failure

    def memory(self) -> list[tuple[Site, Memory]]:
        return [
            (site, saved_bytes(site, self.tokens))
            for site in self.report.sites
            if site.status == "fused" and site.problem is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        report = {k: v for k, v in self.report.to_dict().items() if k != "graphs"}
        per_site = [{"location": s.location, **dataclasses.asdict(m)} for s, m in self.memory()]
        return {
            "schema": 1,
            "name": self.name,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "healthy": self.healthy,
            "failure": self.failure or None,
            "stacks": [{"name": s.name, "kinds": [list(k) for k in s.kinds]} for s in self.stacks],
            "remarks": self.remarks,
            "memory": per_site,
            "seconds": round(self.seconds, 2),
            **report,
        }


def saved_bytes(site: Site, tokens: int) -> Memory:
    """With S = tokens * top_k slots, N pre-activation columns (2I gated, else I) and elements of b bytes:

    eager (Hugging Face's grouped_mm experts) saves S * (2H + N + 2I) * b: the gathered rows [S, H], the pre-activations
    [S, N], the activation and the product that the down projection reads [S, I] each, and the experts' outputs [S, H].
    fused saves S * N * b + 4 * (S + E): the pre-activations, the order of the slots and the experts' ends. Ungated
    blocks have no product. Tokens and weights are there anyway.
    """
    p, b = site.problem, site.problem.dtype.itemsize
    slots = tokens * p.top_k
    columns = 2 * p.intermediate if site.spec.gated else p.intermediate
    activated = 2 * p.intermediate if site.spec.gated else p.intermediate
    return Memory(
        tokens, slots * (2 * p.hidden + columns + activated) * b, slots * columns * b + 4 * (slots + p.num_experts)
    )


def examine(
    subject: Subject,
    *,
    tokens: int = 4096,
    device: str | None = None,
    train: bool = False,
    options: Options | None = None,
) -> Examination:
    """What the backend would do with `subject` on `device` (default: this machine's best)."""
    start = time.perf_counter()
    model, options = subject.model.train(train), options or Options()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    parameters = list(model.parameters())
    result = Examination(
        name=subject.name,
        parameters=sum(p.numel() for p in parameters),
        bytes=sum(p.numel() * p.element_size() for p in parameters),
        report=Report(),
        tokens=tokens,
        remarks=list(subject.remarks),
    )
    with shrunk(model) as result.stacks:
        result.report, result.failure = _trace(model, subject.inputs, options)
    if result.failure and not result.report.sites and any(len(s.kinds) < s.length for s in result.stacks):
        result.remarks.append("traced whole, since it does not run with fewer layers")
        result.stacks = []
        result.report, result.failure = _trace(model, subject.inputs, options)
    with _without_building():
        for site in result.report.sites:
            _place(site, torch.device(device), options)
    result.report.sites = [whole for site in result.report.sites for whole in _expand(site, result.stacks)]
    result.seconds = time.perf_counter() - start
    return result


def _trace(model: nn.Module, inputs: dict[str, Any], options: Options) -> tuple[Report, str]:
    """The report, and what kept the model from running to its end."""
    collector, failure = Collector(options, model), ""
    watch()
    torch._dynamo.reset()
    with broken_graphs(collector, model):
        try:
            torch.compile(model._call_impl, backend=collector)(**inputs)
        except Exception as error:  # whatever the model raises
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            failure = f"{type(error).__name__}: {' '.join(said[:2])[:200]}"
    torch._dynamo.reset()
    # The meta device runs nothing that depends on numbers; any other failure says nothing about the experts.
    collector.add_unseen(surely=bool(failure) and not failure.startswith("NotImplementedError"))
    return collector.report, failure


def _place(site: Site, device: torch.device, options: Options) -> None:
    """Chooses the engine as on `device`: a model on the meta device would run nowhere."""
    if site.problem is not None and site.problem.device.type == "meta":
        site.problem = dataclasses.replace(site.problem, device=device)
        choice = engines.choose(site.spec, site.problem, options.engine)
        site.engine, site.detail = choice.name, "; ".join(f"{n}: {why}" for n, why in choice.passed_over.items())


@contextlib.contextmanager
def _without_building() -> Iterator[None]:
    """An engine loads its library before it says yes. To name the engine nothing need be built yet."""
    load, build.load = build.load, lambda name: Path(name)
    try:
        yield
    finally:
        build.load = load


def _expand(site: Site, stacks: list[Stack]) -> Iterator[Site]:
    """`site` for every layer of the kind that it was found in."""
    for stack in stacks:
        match = re.match(rf"{re.escape(stack.name)}\.(\d+)(?=[.\s]|$)", site.location)
        if match is not None and int(match[1]) < len(stack.kinds):
            rest = site.location[match.end() :]
            for number in stack.kinds[int(match[1])]:
                yield dataclasses.replace(site, location=f"{stack.name}.{number}{rest}")
            return
    yield site


@contextlib.contextmanager
def shrunk(model: nn.Module) -> Iterator[list[Stack]]:
    """While this lasts, each list of layers in `model` holds one layer of each kind only.

    A list of layers is an outermost ModuleList whose length one of the model's configs gives as a number of layers.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs |= {id(c): c for o in list(configs.values()) for c in vars(o).values() if hasattr(c, "to_dict")}
    found, undo = [], []
    try:
        for owner, attribute, name in list(_outermost_lists(model)):
            layers = getattr(owner, attribute)
            counts = [(c, k) for c in configs.values() for k, v in _settings(c) if v == len(layers) and "layer" in k]
            if len(layers) < 2 or not counts:
                continue
            kinds: dict[Any, list[int]] = {}
            for i, layer in enumerate(layers):
                kinds.setdefault(signature(layer, i), []).append(i)
            stack = Stack(name, tuple(map(tuple, kinds.values())))
            found.append(stack)
            kept = [kind[0] for kind in stack.kinds]
            undo.append((setattr, owner, attribute, layers))
            setattr(owner, attribute, nn.ModuleList([layers[i] for i in kept]))
            for config in configs.values():
                for key, value in list(vars(config).items()):
                    if isinstance(value, (list, tuple)) and len(value) == len(layers):
                        undo.append((_set, config, key, value))
                        _set(config, key, type(value)(value[i] for i in kept))
            for config, key in counts:
                undo.append((_set, config, key, len(layers)))
                _set(config, key, len(kept))
        yield found
    finally:
        for put, target, key, value in reversed(undo):
            put(target, key, value)


def _settings(config: Any) -> Iterator[tuple[str, int]]:
    yield from ((k, v) for k, v in vars(config).items() if isinstance(v, int) and not isinstance(v, bool))


def _set(config: Any, key: str, value: Any) -> None:
    vars(config)[key] = value  # past checks that a config may do when it is changed one setting at a time


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, str]]:
    for attribute, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield module, attribute, prefix + attribute
        else:
            yield from _outermost_lists(child, f"{prefix}{attribute}.")


def signature(layer: nn.Module, index: int) -> tuple:
    """Equal for two layers exactly if they differ in nothing but values of tensors and their own index."""
    parts = []
    for name, module in layer.named_modules():
        plain = {
            k: "own index" if v == index and _INDEX.search(k) else _plain(v)
            for k, v in vars(module).items()
            if not k.startswith("_")
        }
        tensors = [
            (key, tuple(t.shape), t.dtype, t.stride(), t.requires_grad)
            for group in (module._parameters, module._buffers)
            for key, t in group.items()
            if t is not None
        ]
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and hasattr(v, "__len__")]
        parts.append((name, type(module), tuple(sorted(plain.items())), tuple(tensors), tuple(hooks)))
    return tuple(parts)


_INDEX = re.compile("idx|index|layer|number")  # names of attributes that hold a layer's own index


def _plain(value: Any) -> str:
    """What can be compared of an attribute."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return repr([_plain(v) for v in value])
    if isinstance(value, dict):
        return repr({repr(k): _plain(v) for k, v in value.items()})
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__qualname__} {id(value) if hasattr(value, 'to_dict') else ''}"


def load(target: str, config: str | None = None, *, dtype: str | None = None, tokens: int = TRACED_TOKENS) -> Subject:
    """The model that `target` names: a ``config.json`` or its folder, a class of transformers (its settings from
    `config` or the class's defaults), a model type of transformers, or ``package.module:function`` that returns (model,
    inputs). NotAModel if it is none of these."""
    if ":" in target and not Path(target).exists():
        return _from_function(target)
    try:
        import transformers
    except ImportError:
        raise NotAModel(f"{target!r} is not package.module:function, and anything else needs transformers") from None
    settings = _config(target, config, transformers)
    remarks = []
    text = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    if text is not settings and not getattr(settings, "is_encoder_decoder", False):
        remarks.append("the text model alone; give package.module:function to look at the others too")
        settings = text
    model_class = _model_class(target, settings, transformers)
    wanted = _dtype(dtype or getattr(settings, "dtype" if hasattr(settings, "dtype") else "torch_dtype", None))
    if getattr(settings, "quantization_config", None):
        remarks.append(f"the config asks for quantised weights; examined with {dtype_name(wanted)} ones instead")
    try:
        with torch.device("meta"):
            model = model_class._from_config(settings, dtype=wanted)
    except Exception as error:  # whatever the class makes of the config
        raise NotAModel(f"{model_class.__name__} cannot be built from this config: {error}") from error
    ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(settings, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    if "use_cache" in settings.to_dict():
        settings.use_cache = False
    return Subject(model_class.__name__, model, inputs, tuple(remarks))


def _dtype(wanted: Any) -> torch.dtype:
    found = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if wanted is not None and not isinstance(found, torch.dtype):
        raise NotAModel(f"{wanted!r} is not a dtype")
    return torch.bfloat16 if found is None or (found == torch.float32 and wanted is None) else found


def _config(target: str, given: str | None, transformers) -> Any:
    path = Path(given or target)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            settings = json.loads(path.read_text())
            kind = settings.pop("model_type")
        except (ValueError, KeyError) as error:
            raise NotAModel(f"{path} is no model config: {error!r}") from error
        try:
            return transformers.AutoConfig.for_model(kind, **settings)
        except ValueError as error:
            raise NotAModel(f"transformers {transformers.__version__} has no model type {kind!r}") from error
    if given is not None or path.suffix == ".json" or "/" in target:
        raise NotAModel(f"{path} does not exist")
    named = _attribute(target, transformers)
    if named is not None:
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedConfig):
            return named()
        if getattr(named, "config_class", None) is not None:
            return named.config_class()
    try:
        return transformers.AutoConfig.for_model(target)
    except ValueError:
        raise NotAModel(
            f"{target!r} is neither a file, nor a class or a model type of transformers {transformers.__version__}, "
            "nor package.module:function"
        ) from None


def _model_class(target: str, settings: Any, transformers) -> type:
    named = _attribute(target, transformers)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if is_model and isinstance(settings, named.config_class or object):
        return named
    for name in settings.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(settings) in auto._model_mapping:
            found = auto._model_mapping[type(settings)]
            return found[0] if isinstance(found, tuple) else found
    raise NotAModel(f"transformers has no model for {type(settings).__name__}")


def _attribute(target: str, transformers) -> Any:
    """The class called `target`: of transformers, or a dotted name."""
    if "." not in target:
        return getattr(transformers, target, None) if target.isidentifier() else None
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _from_function(target: str) -> Subject:
    module, _, name = target.partition(":")
    try:
        function: Callable = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotAModel(f"{target!r} cannot be imported: {error}") from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise NotAModel(f"{target!r} must return (model, inputs), inputs being a dictionary of keyword arguments")
    model, inputs = made
    if not isinstance(inputs, dict):
        inputs = {f"_{i}": value for i, value in enumerate(inputs if isinstance(inputs, (list, tuple)) else [inputs])}
        return Subject(target, _Positional(model), inputs)
    return Subject(target, model, inputs)


class _Positional(nn.Module):
    """Calls `model` with positional arguments that came as keywords."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(*inputs.values())


def text(result: Examination, table: str) -> str:
    """The examination for a terminal; `table` is the report's table."""
    size = _human(result.bytes)
    lines = [f"{result.name}: {_count(result.parameters)} parameters ({size}), looked at in {result.seconds:.1f} s"]
    lines += [f"  {stack}" for stack in result.stacks]
    lines += [f"  {remark}" for remark in result.remarks]
    lines += ["", table]
    if result.failure:
        lines += ["", f"The model did not run to its end: {result.failure}"]
    groups: dict[tuple, list[Site]] = {}
    for site, memory in result.memory():
        groups.setdefault((memory.eager, memory.fused), []).append(site)
    if groups:
        lines += ["", f"Saved for the backward pass with {result.tokens} tokens (--tokens), per block:"]
    for (eager, fused), sites in groups.items():
        times = len(sites)
        lines.append(
            f"  {_human(eager)} in eager mode, {_human(fused)} fused: {_human(eager - fused)} less"
            + (f", in {times} blocks {_human(times * (eager - fused))} less" if times > 1 else "")
        )
    if groups:
        lines += [
            "  eager: slots x (2 hidden + pre-activations + activation + product); fused: slots x pre-activations,",
            "  order and offsets; slots = tokens x experts per token. Tokens and weights are there either way.",
        ]
    return "\n".join(lines)


def _count(n: int) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.1f} {name}"
    return str(n)


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
