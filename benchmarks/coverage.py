"""The tables of fused model families: runs `doctor --zoo` under several releases of transformers, rewrites the tables.

    python benchmarks/coverage.py --write                               with the transformers that is installed
    python benchmarks/coverage.py --write --transformers 4.57.6 5.17.0  with these, installed into build/
    python benchmarks/coverage.py mixtral --transformers 4.57.6         one family, only shown
    python benchmarks/coverage.py --write mixtral olmoe                 some families, the others as they were
    PYTHONPATH=folder python benchmarks/coverage.py --write             with the transformers in that folder
    python benchmarks/coverage.py --render                              the tables from the stored results alone

Results: coverage.json in benchmarks/results, by release; coverage.md beside it; README.md between its marks.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mok_compile import coverage, families

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- coverage: begin (benchmarks/coverage.py --write) -->", "<!-- coverage: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("families", nargs="*", help="default: all that this transformers has")
    parser.add_argument(
        "--transformers",
        nargs="+",
        type=release_of,
        default=[],
        metavar="RELEASE",
        help="releases to install and use; families come before them",
    )
    parser.add_argument("--write", action="store_true", help="keep the results and rewrite the tables")
    parser.add_argument("--render", action="store_true", help="rewrite the tables, measure nothing")
    given = parser.parse_args()
    if given.render:
        render()
        return 0
    if given.transformers:
        again = [sys.executable, __file__, *given.families, *(["--write"] if given.write else [])]
        return max(subprocess.run(again, env=environment(release)).returncode for release in given.transformers)
    names = given.families or families.present()
    print(coverage.head())

    def report(name: str, row: coverage.Row) -> None:
        print(coverage.line(name, row), flush=True)
        if given.write:
            keep(name, row)

    rows = coverage.measure(names, report=report)
    print(*coverage.details(rows), coverage.summary(rows), sep="\n")
    return 0


def release_of(text: str) -> str:
    """`text` if it can be a release of transformers, not a family. ArgumentTypeError otherwise."""
    if not re.fullmatch(r"\d+(\.\d+)+\w*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no release, such as 5.17.0; families come before releases")
    return text


def environment(release: str) -> dict[str, str]:
    """Where that release of transformers comes first; it is installed with all it needs."""
    folder = ROOT / "build" / f"transformers-{release}"
    if not (folder / "transformers").exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(folder),
            f"transformers=={release}",
        ]
        subprocess.run(install, check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def stored() -> dict[str, dict]:
    """The results by release of transformers, the newest first."""
    path = RESULTS / "coverage.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")], reverse=True))


def keep(name: str, row: coverage.Row) -> None:
    """Adds one family to the results: what was measured is not lost when the rest is interrupted."""
    new, results = coverage.to_dict({name: row}), stored()
    old = results.get(new["transformers"], {"families": {}})
    results[new["transformers"]] = {**new, "families": dict(sorted({**old["families"], **new["families"]}.items()))}
    text = json.dumps(results, indent=1) + "\n"
    here = str(ROOT / "build" / f"transformers-{new['transformers']}") + os.sep  # in the source lines of details
    (RESULTS / "coverage.json").write_text(text.replace(json.dumps(here)[1:-1], ""), encoding="utf-8")
    render()


def render() -> None:
    """Rewrites README.md and coverage.md from the stored results."""
    (RESULTS / "coverage.md").write_text(page(stored()), encoding="utf-8")
    readme = ROOT / "README.md"
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    text = pattern.sub(lambda _: f"{BEGIN}\n{section(stored())}\n{END}", readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")


def page(results: dict[str, dict]) -> str:
    """All tables in full."""
    parts = ["# What is fused", "Made by `benchmarks/coverage.py --write`."]
    for release, result in results.items():
        rows = coverage.from_dict(result)
        parts += [f"## transformers {release}, torch {result['torch']}"]
        parts += ["\n".join([coverage.head(), *(coverage.line(name, row) for name, row in rows.items())])]
        parts += ["\n".join(coverage.details(rows)) or "Nothing is missing."]
    return "\n\n".join(parts) + "\n"


def section(results: dict[str, dict]) -> str:
    """For the README: a row for each release, the families that are not complete by name."""
    settings = ", ".join(setting.name for setting in coverage.SETTINGS)
    lines = [
        f"Every block fused in each of {len(coverage.SETTINGS)} settings ({settings}):",
        "",
        "| transformers | torch | families | complete | the others, with reason codes |",
        "|---|---|---|---|---|",
    ]
    for release, result in results.items():
        rows = coverage.from_dict(result)
        missing = [
            f"{name} ({', '.join(coverage.codes(row))})" for name, row in rows.items() if not coverage.complete(row)
        ]
        done = len(rows) - len(missing)
        lines.append(f"| {release} | {result['torch']} | {len(rows)} | {done} | {', '.join(missing) or 'none'} |")
    newest = next(iter(results.values()))
    names = [name for name, row in coverage.from_dict(newest).items() if coverage.complete(row)]
    lines += ["", f"Complete under the newest of these: {', '.join(names)}."]
    lines += ["", "Every family in every setting: [coverage.md](benchmarks/results/coverage.md)."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
