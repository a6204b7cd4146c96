"""What a build contains, where the installed parts are found, and what importing the package costs."""

import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import types
import zipfile
from pathlib import Path

import pytest

import mok_compile
from mok_compile._version import require_torch

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(*arguments, cwd, **env):
    done = run(*arguments, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def copy_project(target):
    """What a build reads, without what other builds left there."""
    target.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "mok_compile", "passes", "csrc"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    return target


def build_wheel(project, **env):
    # Not by importing it: with pip in the process, setuptools no longer brings its own distutils, and Inductor fails.
    if not any(importlib.metadata.distributions(name="pip")):
        pytest.skip("no pip")
    arguments = ("-m", "pip", "wheel", project, "--no-deps", "--no-build-isolation", "--wheel-dir", project.parent)
    output(*arguments, cwd=project.parent, **env)
    (path,) = project.parent.glob("*.whl")
    return path


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(copy_project(tmp_path_factory.mktemp("wheel") / "project"))


def test_wheel_holds_every_source_file(wheel):
    places = {"mok_compile": "mok_compile", "passes": "mok_compile/passes", "csrc": "mok_compile/csrc"}
    sources = {
        f"{place}/{path.relative_to(ROOT / name).as_posix()}"
        for name, place in places.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }
    assert "mok_compile/passes/__init__.py" in sources
    assert contents(wheel) == sources


def test_wheel_metadata(wheel):
    assert wheel.name == f"mok_compile-{mok_compile.__version__}-py3-none-any.whl"
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    (entry,) = distribution.entry_points
    assert (entry.group, entry.name, entry.value) == ("torch_dynamo_backends", "mok", "mok_compile.backend:mok")
    assert {"torch>=2.10", "ninja"} <= set(distribution.requires)


FIND = """
import importlib.util
from mok_compile._layout import folder
print(importlib.util.find_spec("mok_compile.passes").origin, folder("passes"))
"""


def test_parts_are_found_in_an_installed_package(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    passes = tmp_path / "mok_compile" / "passes"
    assert output("-c", FIND, cwd=tmp_path).split() == [str(passes / "__init__.py"), str(passes)]


def test_parts_are_found_in_a_checkout_that_is_not_installed():
    passes = ROOT / "passes"  # -S: no site-packages, so the finder of an editable install cannot help
    assert output("-S", "-c", FIND, cwd=ROOT).split() == [str(passes / "__init__.py"), str(passes)]


PREBUILD = """
def prebuild(folder):
    folder.mkdir()
    (folder / "libmok.so").touch()
"""


def test_prebuilt_wheel(tmp_path):
    project = copy_project(tmp_path / "project")
    (project / "mok_compile" / "build.py").write_text(PREBUILD)
    leftover = project / "build" / "lib" / "mok_compile" / "deleted.py"  # what an earlier build packed
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    wheel = build_wheel(project, MOK_PREBUILT="1")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"mok_compile-{mok_compile.__version__}-py3-none-{platform}.whl"
    names = contents(wheel)
    assert "mok_compile/lib/libmok.so" in names
    assert "mok_compile/deleted.py" not in names


def test_prebuilt_wheel_without_torch(tmp_path):
    project = copy_project(tmp_path / "project")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    done = run("setup.py", "build", cwd=project, MOK_PREBUILT="1", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "pass --no-build-isolation" in done.stderr.splitlines()[-1]


def test_backend_is_registered():
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="mok")
    assert entry.value == "mok_compile.backend:mok"


def test_import_is_light(tmp_path):
    code = "import sys, mok_compile; print({'torch', 'numpy', 'mok_compile.passes'} & {*sys.modules})"
    assert output("-c", code, cwd=tmp_path) == "set()"


def test_torch_can_import_the_package_while_it_is_imported(tmp_path):
    output("-c", "import torch", cwd=tmp_path, TORCH_LOGS="+mok_compile")


def test_public_names():
    assert set(mok_compile.__all__) <= set(dir(mok_compile))
    for name in mok_compile.__all__:
        assert not isinstance(getattr(mok_compile, name), types.ModuleType)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mok_compile.nonsense  # noqa: B018
    # A submodule of the same name would replace the attribute as soon as anyone imports it.
    submodules = {module.name for module in pkgutil.iter_modules(mok_compile.__path__)}
    assert not submodules & set(mok_compile.__all__)


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234567", "2.11.0+cu130", "2.13.0", "3.0", "10.1.0rc1"])
def test_new_enough_torch(version):
    require_torch(version)


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.1.0", "1.13.1", "unknown"])
def test_too_old_torch(version):
    with pytest.raises(ImportError) as raised:
        require_torch(version)
    assert str(raised.value) == f"mok-compile needs torch >= 2.10, but torch {version} is installed"


def test_version_of_torch_is_the_installed_one(monkeypatch):
    require_torch()
    monkeypatch.setattr("torch.__version__", "2.9.0")
    with pytest.raises(ImportError, match=r"torch 2\.9\.0 is installed"):
        require_torch()


def test_backend_of_a_too_old_torch(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.0")
    monkeypatch.delitem(sys.modules, "mok_compile.backend", raising=False)
    with pytest.raises(ImportError, match=r"needs torch >= 2\.10, but torch 2\.9\.0 is installed"):
        importlib.import_module("mok_compile.backend")


def test_missing_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; from mok_compile._version import require_torch; require_torch()"
    done = run("-c", code, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "ImportError: mok-compile needs torch >= 2.10, which is not installed"
