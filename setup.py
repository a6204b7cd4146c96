"""Packaging of mok-compile; tool settings live in pyproject.toml.

The metadata is here rather than in a [project] table because a build without isolation meets whatever setuptools the
environment has, and releases before 77 reject the licence notation that later ones demand.
"""

import os
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py as _build_py

# Kernels are compiled at first use. MOK_PREBUILT=1 compiles them now and puts them into the wheel.
PREBUILT = os.environ.get("MOK_PREBUILT", "0") not in ("", "0")


def prebuild(folder):
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"MOK_PREBUILT=1 compiles the kernels with the installed torch, but this build has none ({error}). "
            "Install torch and pass --no-build-isolation, or unset MOK_PREBUILT to compile at first use."
        )
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from mok_compile.build import prebuild

    prebuild(folder)


class build_py(_build_py):
    def run(self):
        if self.editable_mode:  # runs from the checkout, where nothing is to be written
            return super().run()
        # build/ outlives a build: without this a module deleted since, or an old kernel, would be packed again.
        package = Path(self.build_lib, "mok_compile")
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        if PREBUILT:
            prebuild(package / "lib")


setup(
    name="mok-compile",
    version=runpy.run_path("mok_compile/_version.py")["__version__"],
    description='torch.compile(model, backend="mok"): fused, deterministic Mixture-of-Experts blocks',
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.14",
    install_requires=["torch>=2.10", "ninja"],
    extras_require={
        "examples": ["accelerate", "matplotlib", "tqdm", "transformers"],
        "test": [
            "accelerate",
            "expecttest",
            "hypothesis",
            "peft",
            "pytest",
            "pytest-xdist",
            "tlparse",
            "setuptools>=70.1",  # tests/test_packaging.py builds a wheel in this environment
            "transformers",
        ],
        "lint": ["clang-format", "ruff"],
        "docs": ["mkdocs", "mkdocs-material"],
    },
    entry_points={"torch_dynamo_backends": ["mok = mok_compile.backend:mok"]},
    # passes/ and csrc/ lie at the top level of a checkout and inside mok_compile/ once installed.
    package_dir={"mok_compile.passes": "passes", "mok_compile.csrc": "csrc"},
    packages=[
        *find_packages(include=["mok_compile", "mok_compile.*"]),
        "mok_compile.passes",
        *(f"mok_compile.passes.{name}" for name in find_packages("passes")),
        *(["mok_compile.csrc"] if Path("csrc").is_dir() else []),
    ],
    package_data={
        "mok_compile": ["py.typed"],
        "mok_compile.csrc": [f"**/*.{suffix}" for suffix in ("h", "cuh", "cpp", "cu")],
    },
    cmdclass={"build_py": build_py},
    # The libraries use torch's stable ABI and no Python API: such a wheel belongs to a platform, not to a Python.
    options={"bdist_wheel": {"plat_name": sysconfig.get_platform()}} if PREBUILT else {},
)
