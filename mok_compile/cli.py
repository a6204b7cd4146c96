"""The command line: ``python -m mok_compile doctor | info | bench | build | tune``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence


def out(text: str) -> None:
    """All output goes through here; logs and progress go to standard error."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0 for success, 1 for a finding, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m mok_compile", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="what would be fused in a model, and what is in the way, without its weights",
        description="Builds a model on the meta device and says what would be fused, with which engine, and why not.",
    )
    doctor.add_argument(
        "target",
        nargs="?",
        help="config.json, a model folder, a class or model type of transformers, or package.module:function",
    )
    doctor.add_argument("config", nargs="?", help="config.json for a class")
    doctor.add_argument("--tokens", type=int, default=4096, help="tokens that the memory figures are for (%(default)s)")
    doctor.add_argument(
        "--device", type=_device, help="device that the model is meant for (cuda if there is one, else cpu)"
    )
    doctor.add_argument("--dtype", help="dtype of the weights (the config's, else bfloat16)")
    doctor.add_argument("--train", action="store_true", help="look at the model in training mode")
    doctor.add_argument("--dump", default="", metavar="FOLDER", help="write the graphs and a page about them")
    doctor.add_argument("--require-all", action="store_true", help="exit status 1 unless every block would be fused")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--zoo",
        nargs="*",
        metavar="FAMILY",
        help="instead of a model: tiny random models of these families of transformers (all), in every setting",
    )
    doctor.set_defaults(run=_doctor)
    info = commands.add_parser("info", help="versions, devices, engines, compilers, caches")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_info)
    bench = commands.add_parser("bench", help="compare eager mode, Inductor and mok on this machine")
    bench.add_argument("--device", type=_device, help="cuda if there is one, else cpu")
    bench.add_argument("--repetitions", type=int, default=10, help="runs of each, the median counts (%(default)s)")
    bench.set_defaults(run=_bench)
    build = commands.add_parser("build", help="compile the kernels now instead of at first use")
    build.set_defaults(run=_build)
    tune = commands.add_parser(
        "tune",
        help="find the best settings of expert parallelism for a shape on the GPUs here",
        description="Measures how many SMs should read from other ranks in a block of experts spread over GPUs, and "
        "stores it for the transport peer_memory. No setting changes a bit of the results, which is checked.",
    )
    for name, what in (
        ("H", "hidden size"),
        ("I", "size of an expert"),
        ("E", "experts of all ranks"),
        ("K", "experts per token"),
    ):
        tune.add_argument(name, nargs="?", type=_positive, help=what)
    tune.add_argument("--ranks", type=_positive, help="ranks, one GPU each (all GPUs here)")
    tune.add_argument(
        "--tokens", nargs="+", type=_positive, default=[2048, 16384], metavar="T", help="tokens of a rank (2048 16384)"
    )
    tune.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(%(default)s)")
    tune.add_argument("--budget", type=_positive, default=60, metavar="SECONDS", help="time to measure (%(default)s)")
    instead = tune.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="print what is stored, of this shape if one is given")
    instead.add_argument("--forget", action="store_true", help="remove what is stored, of this shape if one is given")
    tune.set_defaults(run=_tune)
    given = parser.parse_args(arguments)
    if not logging.getLogger("mok_compile").handlers:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
    return given.run(given)


def _device(text: str) -> str:
    import torch

    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device, such as cpu, cuda or cuda:1") from None
    return text


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return number


def _doctor(given: argparse.Namespace) -> int:
    from mok_compile import doctor, table
    from mok_compile.options import Options

    if given.zoo is not None and given.target is None:
        return _zoo(given)
    if given.target is None or given.zoo is not None:
        sys.stderr.write("doctor: give either a model or --zoo\n")
        return 2
    try:
        subject = doctor.load(given.target, given.config, dtype=given.dtype)
    except doctor.NotAModel as error:
        sys.stderr.write(f"doctor: {error}\n")
        return 2
    result = doctor.examine(
        subject, tokens=given.tokens, device=given.device, train=given.train, options=Options(dump=given.dump)
    )
    if given.json:
        out(json.dumps(result.to_dict(), indent=2))
    else:
        out(doctor.text(result, table.text(result.report, table.is_terminal(sys.stdout))))
    return int(given.require_all and not result.healthy)


def _zoo(given: argparse.Namespace) -> int:
    try:
        from mok_compile import coverage, families

        known = families.present()
    except ImportError:
        sys.stderr.write("doctor: --zoo needs transformers\n")
        return 2
    if unknown := [name for name in given.zoo if name not in known]:
        sys.stderr.write(f"doctor: unknown here: {', '.join(unknown)}; there are {', '.join(known)}\n")
        return 2
    show = None if given.json else lambda name, row: out(coverage.line(name, row))
    if not given.json:
        out(coverage.head())
    rows = coverage.measure(given.zoo or known, given.device or "cpu", show)
    if given.json:
        out(json.dumps(coverage.to_dict(rows), indent=1))
    else:
        out("\n".join(["", *coverage.details(rows), "", coverage.summary(rows)]))
    return int(given.require_all and not all(map(coverage.complete, rows.values())))


def _info(given: argparse.Namespace) -> int:
    from mok_compile import info

    out(json.dumps(info.collect(), indent=2) if given.json else info.text())
    return 0


def _bench(given: argparse.Namespace) -> int:
    from mok_compile import bench

    out(bench.text(*bench.run(given.device, given.repetitions, _bar)))
    return 0


def _bar(done: int, total: int, what: str) -> None:
    """A progress bar, on a terminal only."""
    if not sys.stderr.isatty():
        return
    filled = 30 * done // total
    line = f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {what:32}"
    sys.stderr.write(line if done < total else "\r" + " " * len(line) + "\r")
    sys.stderr.flush()


def _build(given: argparse.Namespace) -> int:
    from mok_compile import build

    results = build.build_all()
    for name, result in results:
        out(f"{name}: {result}")
    return int(not any(not isinstance(result, str) for _, result in results))


def _tune(given: argparse.Namespace) -> int:
    from mok_compile.distributed import sweep, tune, tuned

    shape = [given.H, given.I, given.E, given.K]
    if given.K is None and (given.H is not None or not (given.show or given.forget)):
        sys.stderr.write("tune: give H, I, E (experts of all ranks) and K, such as 2048 768 128 8\n")
        return 2
    try:
        if given.show or given.forget:
            found = {k: best for k, best in tuned.read().items() if given.H is None or tune.is_for(k, *shape)}
            if given.forget:
                tuned.forget(found)
            out(tune.stored_text(found) if given.show else f"removed {len(found)} of {tuned.path()}")
            return 0
        job = sweep.Job(*shape, tuple(given.tokens), given.dtype, budget=given.budget)
        job, ranks = tune.prepare(job, given.ranks)
        times = tune.measure(job, ranks, _bar)
        best, key = sweep.choose(times), tune.key(job, ranks)
        out(tune.text(job, ranks, key.gpu, times, best))
        tuned.remember(key, best)
        out(f"stored in {tuned.path()}: sms={best.sms} backward_sms={best.backward_sms}")
    except (sweep.Differs, tune.TuneError) as error:
        sys.stderr.write(f"tune: {error}\n")
        return 1 if isinstance(error, sweep.Differs) else 2
    except OSError as error:
        sys.stderr.write(
            f"tune: cannot write {tuned.path()} ({error}); the variable MOK_CACHE_DIR names another folder\n"
        )
        return 2
    return 0
